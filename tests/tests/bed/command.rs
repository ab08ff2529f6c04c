//! The command `semel-bed`.

use std::process::{Command, Output};

use semel_tests::net::free_port;
use semel_tests::services::Services;

/// Runs the command with given servers, so that it starts none.
fn semel_bed(services: &Services, management: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_semel-bed"));
    command.env("DATABASE_URL", services.postgres.admin_url("postgres"));
    command.env("AMQP_URL", services.amqp_url("/")).env("AMQP_MANAGEMENT_URL", management);
    command.args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn takes_the_servers_it_is_given() {
    let services = Services::from_env().unwrap();
    let Some(management) = services.rabbitmq.management() else { return };
    let output = semel_bed(&services, management.url().as_str(), &["services", "up", "--print-env"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert!(lines.contains(&"SEMEL_TEST_SERVICES=given"));
    assert!(
        lines.contains(
            &format!("SEMEL_TEST_POSTGRES_URL={}", services.postgres.admin_url("postgres")).as_str()
        )
    );
    assert!(lines.contains(&format!("SEMEL_TEST_AMQP_MANAGEMENT_URL={}", management.url()).as_str()));

    let output = semel_bed(&services, management.url().as_str(), &["services", "status"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).matches(": answers (given by ").count(), 2);
}

#[test]
fn says_so_when_it_can_make_no_virtual_hosts() {
    let services = Services::from_env().unwrap();
    let nobody = format!("http://guest:guest@127.0.0.1:{}/", free_port().unwrap());
    let output = semel_bed(&services, &nobody, &["services", "up", "--print-env"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!text(&output.stdout).contains("SEMEL_TEST_AMQP_MANAGEMENT_URL"));
    assert!(text(&output.stderr).contains("no virtual hosts can be made in the RabbitMQ of AMQP_URL"));
}

#[test]
fn names_the_given_server_that_does_not_answer() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_semel-bed"));
    let nobody = format!("postgres://somebody:secret@127.0.0.1:{}/postgres", free_port().unwrap());
    let output = command.env("DATABASE_URL", nobody).args(["services", "up"]).output().unwrap();
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("DATABASE_URL"));
    assert!(!text(&output.stderr).contains("secret"));
}
