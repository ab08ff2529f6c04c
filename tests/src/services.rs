//! The Postgres and the RabbitMQ that everything runs against.
//!
//! Each of the two comes from the first of these that there is:
//!
//! 1. the one that the user gave, `DATABASE_URL` or `AMQP_URL` (with `AMQP_MANAGEMENT_URL`, else the
//!    same host's port 15672). Nothing in it is touched but databases and virtual hosts of our own;
//!    where no virtual host can be made, unique names in the given one ([`Vhost::scoped`]);
//! 2. a private one that a former call left running;
//! 3. a private one, started from the installed programs, at first installed with apt-get.
//!
//! A private server outlives the command that started it, so that the next one finds it in a moment;
//! `semel-bed services down` ends it and removes its data. What a killed test left behind in it is
//! removed by the next command. After a crash a private server is set up anew: its data is no
//! treasure. Two commands at the same time start one server, not two.
//!
//! Tests are told by environment variables ([`Services::environment`], [`Services::from_env`]).

mod database;
mod install;
mod launch;
mod management;
mod place;
mod postgres;
mod rabbitmq;
mod vhost;

use std::env;
use std::future::Future;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use reqwest::Url;

pub use self::database::{Backup, Database};
use self::install::Machine;
pub use self::install::{POSTGRES_BIN, Package, RABBITMQ_SERVER, on_path};
pub use self::management::{Connection, Management, Permissions, Queue};
pub use self::place::Place;
pub use self::postgres::{Postgres, PrivatePostgres, ROLE};
pub use self::rabbitmq::{PrivateRabbitMq, RabbitMq};
pub use self::vhost::Vhost;
use crate::progress::Progress;

/// The administrator's URL of the Postgres that tests use.
pub const POSTGRES_URL: &str = "SEMEL_TEST_POSTGRES_URL";
/// The URL of the RabbitMQ that tests use.
pub const AMQP_URL: &str = "SEMEL_TEST_AMQP_URL";
/// The URL of its management API; unset if there is none.
pub const AMQP_MANAGEMENT_URL: &str = "SEMEL_TEST_AMQP_MANAGEMENT_URL";
/// Which of them are ours to stop and kill: `private` (both), `private-postgres`,
/// `private-rabbitmq`, or `given` (none).
pub const ORIGIN: &str = "SEMEL_TEST_SERVICES";
/// The folder of the private servers.
pub const FOLDER: &str = "SEMEL_TEST_SERVICES_DIR";

/// The Postgres and the RabbitMQ that everything runs against.
#[derive(Clone, Debug)]
pub struct Services {
    /// The Postgres.
    pub postgres: Postgres,
    /// The RabbitMQ.
    pub rabbitmq: RabbitMq,
    place: Place,
}

impl Services {
    /// Finds the services of a workspace, or starts or installs what is missing.
    ///
    /// # Errors
    ///
    /// A given service does not answer, or a private one could not be installed or started.
    pub async fn find_or_start(root: &Path, progress: Progress) -> Result<Self> {
        let postgres = match setting("DATABASE_URL") {
            Some(url) => Some(given_postgres(&url).await?),
            None => None,
        };
        let rabbitmq = match setting("AMQP_URL") {
            Some(url) => Some(RabbitMq::given(&url, setting("AMQP_MANAGEMENT_URL"), progress).await?),
            None => None,
        };
        Self::complete(Place::of(root)?, postgres, rabbitmq, progress).await
    }

    /// Starts private services in a folder of their own, for a test that stops and kills them.
    ///
    /// They are ended by [`remove`](Self::remove), and not with the value. A test that fails before it
    /// comes to that leaves them to its next run, which finds them.
    ///
    /// # Errors
    ///
    /// A service could not be installed or started.
    pub async fn start_private(place: Place, progress: Progress) -> Result<Self> {
        Self::complete(place, None, None, progress).await
    }

    async fn complete(
        place: Place,
        postgres: Option<Postgres>,
        rabbitmq: Option<RabbitMq>,
        progress: Progress,
    ) -> Result<Self> {
        if let (Some(postgres), Some(rabbitmq)) = (&postgres, &rabbitmq) {
            return Ok(Self { postgres: postgres.clone(), rabbitmq: rabbitmq.clone(), place });
        }
        let lock = place.lock(progress).await?;
        let (own_postgres, own_rabbitmq) = (PrivatePostgres::at(&place), PrivateRabbitMq::at(&place));
        let postgres = match postgres {
            Some(given) => Some(given),
            None => answering(own_postgres.known(), Postgres::check).await,
        };
        let rabbitmq = match rabbitmq {
            Some(given) => Some(given),
            None => answering(own_rabbitmq.known(), RabbitMq::check).await,
        };

        // Two installations at a time would wait for each other anyway.
        let machine = Machine::this();
        let bin = match &postgres {
            Some(_) => None,
            None => Some(machine.find_or_install(Package::Postgres, progress).await?),
        };
        let script = match &rabbitmq {
            Some(_) => None,
            None => Some(machine.find_or_install(Package::RabbitMq, progress).await?),
        };
        let starting_postgres = async {
            match (postgres, bin) {
                (None, Some(bin)) => {
                    progress.step("starting a private Postgres", Box::pin(own_postgres.create(&bin))).await
                }
                (postgres, _) => postgres.context("no Postgres"),
            }
        };
        let starting_rabbitmq = async {
            match (rabbitmq, script) {
                (None, Some(script)) => {
                    progress.step("starting a private RabbitMQ", Box::pin(own_rabbitmq.create(&script))).await
                }
                (rabbitmq, _) => rabbitmq.context("no RabbitMQ"),
            }
        };
        let (postgres, rabbitmq) = tokio::try_join!(starting_postgres, starting_rabbitmq)?;
        if postgres.private.is_some() {
            postgres.sweep().await?;
        }
        if rabbitmq.private.is_some() {
            rabbitmq.sweep().await?;
        }
        drop(lock);
        Ok(Self { postgres, rabbitmq, place })
    }

    /// Takes the services that [`environment`](Self::environment) told of.
    ///
    /// # Errors
    ///
    /// The variables are not set: the test was not started by the command that sets them.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(setting)
    }

    /// Takes the services that variables like those of [`environment`](Self::environment) tell of.
    ///
    /// # Errors
    ///
    /// A variable is missing, or a private service was never started.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let read = |name| variable(name).ok_or_else(|| anyhow!(NOT_TOLD));
        let place = Place::at(&PathBuf::from(read(FOLDER)?));
        let (private_postgres, private_rabbitmq) = match read(ORIGIN)?.as_str() {
            "private" => (true, true),
            "private-postgres" => (true, false),
            "private-rabbitmq" => (false, true),
            "given" => (false, false),
            other => bail!("{ORIGIN}={other}: {NOT_TOLD}"),
        };
        let postgres = if private_postgres {
            PrivatePostgres::at(&place).remembered().context(NOT_TOLD)?
        } else {
            let admin = Url::parse(&read(POSTGRES_URL)?)
                .with_context(|| format!("{POSTGRES_URL} cannot be parsed"))?;
            Postgres { admin, password: None, private: None }
        };
        let rabbitmq = if private_rabbitmq {
            PrivateRabbitMq::at(&place).remembered().context(NOT_TOLD)?
        } else {
            let url = Url::parse(&read(AMQP_URL)?).with_context(|| format!("{AMQP_URL} cannot be parsed"))?;
            let management = variable(AMQP_MANAGEMENT_URL).map(|url| Management::new(&url)).transpose()?;
            RabbitMq { url, management, private: None }
        };
        Ok(Self { postgres, rabbitmq, place })
    }

    /// The environment variables that tell a test of these services.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let origin = match (self.postgres.private.is_some(), self.rabbitmq.private.is_some()) {
            (true, true) => "private",
            (true, false) => "private-postgres",
            (false, true) => "private-rabbitmq",
            (false, false) => "given",
        };
        let mut variables = vec![
            (ORIGIN, origin.to_owned()),
            (FOLDER, self.place.dir().display().to_string()),
            (POSTGRES_URL, self.postgres.admin.to_string()),
            (AMQP_URL, self.rabbitmq.url.to_string()),
        ];
        let management = self.rabbitmq.management.as_ref();
        variables.extend(management.map(|management| (AMQP_MANAGEMENT_URL, management.url().to_string())));
        variables
    }

    /// Where private services live; [`Place::own`] makes room for more.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Whether both are ours, to be stopped and killed as a test likes.
    #[must_use]
    pub fn are_private(&self) -> bool {
        self.postgres.private.is_some() && self.rabbitmq.private.is_some()
    }

    /// The URL of a database for its owner.
    #[must_use]
    pub fn postgres_url(&self, database: &str) -> String {
        self.postgres.url(database)
    }

    /// The URL of a virtual host.
    #[must_use]
    pub fn amqp_url(&self, vhost: &str) -> String {
        self.rabbitmq.url(vhost)
    }

    /// Makes a database that is dropped with its value.
    ///
    /// # Errors
    ///
    /// Those of [`Postgres::create_database`].
    pub async fn create_database(&self, prefix: &str) -> Result<Database> {
        self.postgres.create_database(prefix).await
    }

    /// Makes a virtual host that is deleted with its value.
    ///
    /// # Errors
    ///
    /// Those of [`RabbitMq::create_vhost`].
    pub async fn create_vhost(&self, prefix: &str) -> Result<Vhost> {
        self.rabbitmq.create_vhost(prefix).await
    }

    /// Ends the private ones among these services and removes their data.
    ///
    /// # Errors
    ///
    /// One of them could not be ended.
    pub async fn remove(self, progress: Progress) -> Result<()> {
        remove(&self.place, progress).await
    }

    /// Ends the private services of a workspace, if any run, and removes their data; those too that a
    /// test had of its own and did not come to end.
    ///
    /// # Errors
    ///
    /// One of them could not be ended.
    pub async fn stop(root: &Path, progress: Progress) -> Result<()> {
        for place in Place::of(root)?.with_own() {
            remove(&place, progress).await?;
        }
        Ok(())
    }

    /// Says of each service, in a line, whether it is there and whose it is; starts nothing.
    ///
    /// # Errors
    ///
    /// The workspace's folder does not exist.
    pub async fn status(root: &Path) -> Result<[String; 2]> {
        let place = Place::of(root)?;
        let line = |name: &str, origin: String, answer: Result<String>| match answer {
            Ok(version) => format!("{name} {version}: answers ({origin})"),
            Err(error) => format!("{name}: does not answer ({origin}): {error:#}"),
        };
        let postgres = if let Some(url) = setting("DATABASE_URL") {
            let answer = match given_postgres(&url).await {
                Ok(server) => server.check().await,
                Err(error) => Err(error),
            };
            line("Postgres", "given by DATABASE_URL".to_owned(), answer)
        } else if let Some(server) = PrivatePostgres::at(&place).known() {
            line("Postgres", format!("private, {}", place.dir().display()), server.check().await)
        } else {
            "Postgres: none runs".to_owned()
        };
        let rabbitmq = if let Some(url) = setting("AMQP_URL") {
            let given = RabbitMq::given(&url, setting("AMQP_MANAGEMENT_URL"), Progress::Silent).await;
            let answer = match given {
                Ok(server) => server.check().await,
                Err(error) => Err(error),
            };
            line("RabbitMQ", "given by AMQP_URL".to_owned(), answer)
        } else if let Some(server) = PrivateRabbitMq::at(&place).known() {
            line("RabbitMQ", format!("private, {}", place.dir().display()), server.check().await)
        } else {
            "RabbitMQ: none runs".to_owned()
        };
        Ok([postgres, rabbitmq])
    }
}

const NOT_TOLD: &str = "run `cargo xtask test`, which starts a private Postgres and RabbitMQ";

async fn given_postgres(url: &str) -> Result<Postgres> {
    let admin = Url::parse(url).context("DATABASE_URL cannot be parsed")?;
    let postgres = Postgres { admin, password: None, private: None };
    postgres.check().await.context("DATABASE_URL")?;
    Ok(postgres)
}

async fn remove(place: &Place, progress: Progress) -> Result<()> {
    let (postgres, rabbitmq) = (PrivatePostgres::at(place), PrivateRabbitMq::at(place));
    if !postgres.left_anything() && !rabbitmq.left_anything() {
        return Ok(());
    }
    let lock = place.lock(progress).await?;
    let ending = async { tokio::try_join!(postgres.destroy(), rabbitmq.destroy()) };
    progress.step(&format!("ending the services in {}", place.dir().display()), ending).await?;
    drop(lock);
    Ok(())
}

/// The server, if it is known and answers.
async fn answering<T>(known: Option<T>, check: impl AsyncFnOnce(&T) -> Result<String>) -> Option<T> {
    let server = known?;
    check(&server).await.ok()?;
    Some(server)
}

/// A setting of the user; an empty one counts as unset.
fn setting(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Checks a name that stands unquoted in URLs and in SQL.
fn check_name(name: &str) -> Result<()> {
    let fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    let sound = (1..=30).contains(&name.len()) && name.bytes().all(fine);
    ensure!(sound, "{name:?} is no name: it takes 1 to 30 lower-case letters, digits and underscores");
    Ok(())
}

/// Runs the last wish of a value that is being dropped, and waits for it.
///
/// It gets a thread and a runtime of its own, since the one that we are in may be ending. What fails
/// is told and forgotten: the next start sweeps up.
fn at_the_end(wish: impl Future<Output = Result<()>> + Send + 'static) {
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(wish)
    });
    if let Ok(Err(error)) = thread.join() {
        Progress::Stderr.say(format_args!("left behind: {error:#}"));
    }
}
