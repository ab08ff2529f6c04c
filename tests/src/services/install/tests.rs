use std::os::unix::fs::symlink;

use super::*;

/// A machine of which nothing is known but a folder for programs, gone with the value.
struct Bare {
    machine: Machine,
    dir: PathBuf,
}

impl Bare {
    fn new(root: bool) -> Self {
        let dir = env::temp_dir().join(crate::net::unique_name("semel_machine"));
        fs::create_dir_all(dir.join("bin")).unwrap();
        let machine = Machine {
            path: dir.join("bin").into(),
            postgres_versions: dir.join("postgresql"),
            rabbitmq_script: dir.join("rabbitmq/bin/rabbitmq-server"),
            service_policy: dir.join("policy-rc.d"),
            root,
            given: [None, None],
        };
        Self { machine, dir }
    }

    fn program(&self, path: &str, script: &str) -> PathBuf {
        let path = self.dir.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Lets the machine's scripts use the tools of this one.
    fn tools(&self) {
        for tool in ["sh", "rm", "chmod", "mkdir", "cp", "cat"] {
            symlink(on_path(tool).unwrap(), self.dir.join("bin").join(tool)).unwrap();
        }
    }

    /// An apt-get that writes down how it was called, and installs RabbitMQ's script.
    fn apt_get(&self) {
        let dir = self.dir.display();
        self.program("script", "");
        let install =
            format!("mkdir -p {dir}/rabbitmq/bin; cp {dir}/script {dir}/rabbitmq/bin/rabbitmq-server");
        let policy = format!("cat {dir}/policy-rc.d >> {dir}/policy");
        self.program("bin/apt-get", &format!("echo \"$@\" >> {dir}/calls\n{policy}\n{install}"));
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.dir.join(file)).unwrap()
    }

    async fn find(&self, package: Package) -> Result<PathBuf> {
        self.machine.find_or_install(package, Progress::Silent).await
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[tokio::test]
async fn prefers_the_newest_postgres() {
    let bare = Bare::new(true);
    for version in ["9", "15", "16"] {
        bare.program(&format!("postgresql/{version}/bin/initdb"), "");
    }
    for version in ["9", "15"] {
        bare.program(&format!("postgresql/{version}/bin/postgres"), "");
    }
    assert_eq!(bare.find(Package::Postgres).await.unwrap(), bare.dir.join("postgresql/15/bin"));
}

#[tokio::test]
async fn takes_no_wrapper_for_the_server() {
    let bare = Bare::new(true);
    let wrapper = bare.program("bin/rabbitmq-script-wrapper", "");
    symlink(&wrapper, bare.dir.join("bin/rabbitmq-server")).unwrap();
    assert!(bare.find(Package::RabbitMq).await.is_err());

    fs::remove_file(bare.dir.join("bin/rabbitmq-server")).unwrap();
    let script = bare.program("bin/rabbitmq-server", "");
    assert_eq!(bare.find(Package::RabbitMq).await.unwrap(), script.canonicalize().unwrap());
}

#[tokio::test]
async fn names_a_setting_that_leads_nowhere() {
    let mut bare = Bare::new(true);
    bare.machine.given = [Some("/nowhere".into()), Some("/nowhere".into())];
    let error = bare.find(Package::Postgres).await.unwrap_err();
    assert_eq!(error.to_string(), "SEMEL_POSTGRES_BIN=/nowhere does not hold initdb and postgres");
    let error = bare.find(Package::RabbitMq).await.unwrap_err();
    assert_eq!(error.to_string(), "SEMEL_RABBITMQ_SERVER=/nowhere is no program");
}

#[tokio::test]
async fn installs_what_is_missing_and_starts_no_service() {
    let bare = Bare::new(true);
    bare.tools();
    bare.apt_get();
    let script = bare.find(Package::RabbitMq).await.unwrap();
    assert_eq!(script, bare.machine.rabbitmq_script);
    let calls = bare.read("calls");
    let calls: Vec<&str> = calls.lines().collect();
    assert_eq!(calls.len(), 2);
    assert!(calls[0].ends_with("update"));
    assert!(calls[1].ends_with("install -y --no-install-recommends rabbitmq-server"));
    assert!(bare.read("policy").contains("exit 101"));
    assert!(!bare.machine.service_policy.exists());
}

#[tokio::test]
async fn leaves_the_machines_own_policy_alone() {
    let bare = Bare::new(true);
    bare.tools();
    bare.apt_get();
    fs::write(&bare.machine.service_policy, "# the machine's own").unwrap();
    bare.find(Package::RabbitMq).await.unwrap();
    assert_eq!(bare.read("policy-rc.d"), "# the machine's own");
}

#[tokio::test]
async fn installs_through_sudo_as_an_ordinary_user() {
    let bare = Bare::new(false);
    bare.tools();
    bare.apt_get();
    bare.program(
        "bin/sudo",
        &format!("printf '%s' \"$1\" > {}/sudo-calls\nshift\nexec \"$@\"", bare.dir.display()),
    );
    bare.find(Package::RabbitMq).await.unwrap();
    assert_eq!(bare.read("sudo-calls"), "-n");
}

#[tokio::test]
async fn says_what_to_type_when_it_may_not_install() {
    let bare = Bare::new(false);
    bare.tools();
    bare.apt_get();
    let error = format!("{:#}", bare.find(Package::Postgres).await.unwrap_err());
    let command = "apt-get update && apt-get install --no-install-recommends postgresql";
    assert_eq!(error, format!("postgresql is not installed; as root, type: {command}"));

    bare.program("bin/sudo", "echo 'sudo: a password is required' >&2; exit 1");
    let error = format!("{:#}", bare.find(Package::Postgres).await.unwrap_err());
    assert!(error.contains("sudo: a password is required"), "{error}");
    assert!(error.ends_with(&format!("type: sudo sh -c '{command}'")), "{error}");
}

#[tokio::test]
async fn says_what_to_set_where_there_is_no_apt_get() {
    let bare = Bare::new(true);
    let error = bare.find(Package::RabbitMq).await.unwrap_err().to_string();
    assert!(error.ends_with("install it, or set SEMEL_RABBITMQ_SERVER or AMQP_URL"), "{error}");
}

#[tokio::test]
async fn takes_no_python_that_cannot_make_environments() {
    let bare = Bare::new(false);
    bare.tools();
    bare.program("bin/python3", "exit 1");
    let error = bare.find(Package::Python).await.unwrap_err().to_string();
    assert!(error.contains("python3-venv is not installed") && error.contains("modules venv"), "{error}");
    let python = bare.program("bin/python3", "exit 0");
    assert_eq!(bare.find(Package::Python).await.unwrap(), python);
}

#[tokio::test]
async fn takes_node_only_with_npm() {
    let bare = Bare::new(false);
    let node = bare.program("bin/node", "");
    assert!(bare.find(Package::Node).await.is_err());
    bare.program("bin/npm", "");
    assert_eq!(bare.find(Package::Node).await.unwrap(), node);
}
