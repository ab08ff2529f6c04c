//! Databases and virtual hosts of one's own, and how tests are told of the servers.

use std::collections::HashMap;

use semel_tests::services::{Permissions, Services};
use semel_tests::wait::eventually;
use sqlx::{Connection as _, PgConnection};

use super::DEADLINE;

fn services() -> Services {
    Services::from_env().unwrap()
}

async fn database_exists(services: &Services, name: &str) -> bool {
    let mut connection = PgConnection::connect(&services.postgres.admin_url("postgres")).await.unwrap();
    let found = sqlx::query("SELECT 1 FROM pg_database WHERE datname = $1").bind(name);
    found.fetch_optional(&mut connection).await.unwrap().is_some()
}

#[tokio::test]
async fn drops_a_database_with_its_value_even_while_it_is_used() {
    let services = services();
    let database = services.create_database("bed").await.unwrap();
    let mut connection = PgConnection::connect(&database.url()).await.unwrap();
    sqlx::query("CREATE TABLE things (id int)").execute(&mut connection).await.unwrap();
    let name = database.name().to_owned();
    assert!(database_exists(&services, &name).await);
    drop(database);
    assert!(!database_exists(&services, &name).await);
    assert!(connection.ping().await.is_err());
}

#[tokio::test]
async fn drops_a_database_when_asked() {
    let services = services();
    let database = services.create_database("bed").await.unwrap();
    let name = database.name().to_owned();
    database.drop_now().await.unwrap();
    assert!(!database_exists(&services, &name).await);
}

#[tokio::test]
async fn keeps_a_lasting_database() {
    let services = services();
    for _ in 0..2 {
        drop(services.postgres.lasting_database("bed_lasting").await.unwrap());
        assert!(database_exists(&services, "bed_lasting").await);
    }
    assert!(services.postgres.lasting_database("bed_lasting").await.unwrap().drop_now().await.is_err());
}

#[tokio::test]
async fn refuses_a_name_that_needs_quotes() {
    for name in ["", "Bed", "a-b", "a\"; DROP DATABASE", "abcdefghijklmnopqrstuvwxyz_01234"] {
        assert!(services().create_database(name).await.unwrap_err().to_string().contains("is no name"));
        assert!(services().create_vhost(name).await.unwrap_err().to_string().contains("is no name"));
    }
}

#[tokio::test]
async fn asks_the_owner_of_a_private_database_for_its_password() {
    let services = services();
    if services.postgres.private().is_none() {
        return;
    }
    let database = services.create_database("bed").await.unwrap();
    let wrong = PgConnection::connect(&database.url_as("semel", "wrong")).await.unwrap_err();
    let code = wrong.as_database_error().and_then(|error| error.code().map(Into::into));
    assert_eq!(code, Some(String::from("28P01")), "{wrong}");
    let mut connection = PgConnection::connect(&database.url()).await.unwrap();
    let owner =
        "SELECT current_user::text = 'semel' AND NOT usesuper FROM pg_user WHERE usename = current_user";
    assert!(sqlx::query_scalar::<_, bool>(owner).fetch_one(&mut connection).await.unwrap());
}

#[tokio::test]
async fn terminates_all_sessions_of_one_database() {
    let services = services();
    let (one, other) =
        (services.create_database("bed").await.unwrap(), services.create_database("bed").await.unwrap());
    let mut ended = PgConnection::connect(&one.url()).await.unwrap();
    let mut spared = PgConnection::connect(&other.url()).await.unwrap();
    assert_eq!(one.terminate_sessions().await.unwrap(), 1);
    assert!(ended.ping().await.is_err());
    spared.ping().await.unwrap();
}

#[tokio::test]
async fn deletes_a_virtual_host_with_its_value_or_when_asked() {
    let services = services();
    let Some(management) = services.rabbitmq.management() else { return };
    let (dropped, deleted) =
        (services.create_vhost("bed").await.unwrap(), services.create_vhost("bed").await.unwrap());
    let names = [dropped.name().to_owned(), deleted.name().to_owned()];
    let vhosts = management.vhosts().await.unwrap();
    assert!(names.iter().all(|name| vhosts.contains(name)));
    assert!(!dropped.is_shared());
    assert_eq!(dropped.scoped("events"), "events");

    drop(dropped);
    deleted.delete_now().await.unwrap();
    let vhosts = management.vhosts().await.unwrap();
    assert!(!names.iter().any(|name| vhosts.contains(name)));
}

#[tokio::test]
async fn lists_and_closes_connections() {
    let services = services();
    let Some(management) = services.rabbitmq.management() else { return };
    let vhost = services.create_vhost("bed").await.unwrap();
    let properties = lapin::ConnectionProperties::default().with_connection_name("the one".into());
    let connection = lapin::Connection::connect(&vhost.url(), properties).await.unwrap();
    let listed = eventually("the connection to be listed", DEADLINE, || async {
        management.connections(vhost.name()).await.unwrap().pop()
    });
    assert_eq!(listed.await.unwrap().client_name(), Some("the one"));
    assert_eq!(management.close_connections(vhost.name()).await.unwrap(), 1);
    let closed = eventually("the connection to close", DEADLINE, || async {
        (!connection.status().connected()).then_some(())
    });
    closed.await.unwrap();
}

#[tokio::test]
async fn limits_what_a_user_may_do() {
    let services = services();
    let Some(management) = services.rabbitmq.management() else { return };
    let vhost = services.create_vhost("bed").await.unwrap();
    let user = vhost.name();
    management.create_user(user, "secret").await.unwrap();
    let permissions = Permissions { configure: String::new(), ..Permissions::all() };
    management.set_permissions(vhost.name(), user, &permissions).await.unwrap();

    let connect = || async {
        let url = vhost.url_as(user, "secret");
        lapin::Connection::connect(&url, lapin::ConnectionProperties::default()).await
    };
    let connection = connect().await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let declared = channel
        .queue_declare(
            "forbidden".into(),
            lapin::options::QueueDeclareOptions::default(),
            lapin::types::FieldTable::default(),
        )
        .await;
    assert!(declared.unwrap_err().to_string().contains("ACCESS_REFUSED"));

    management.clear_permissions(vhost.name(), user).await.unwrap();
    assert!(connect().await.is_err());
    management.delete_user(user).await.unwrap();
}

#[tokio::test]
async fn counts_the_messages_of_a_queue() {
    let services = services();
    let Some(management) = services.rabbitmq.management() else { return };
    let vhost = services.create_vhost("bed").await.unwrap();
    let connection =
        lapin::Connection::connect(&vhost.url(), lapin::ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel
        .queue_declare(
            "counted".into(),
            lapin::options::QueueDeclareOptions::default(),
            lapin::types::FieldTable::default(),
        )
        .await
        .unwrap();
    for _ in 0..3 {
        let publish = channel.basic_publish(
            "".into(),
            "counted".into(),
            lapin::options::BasicPublishOptions::default(),
            b"x",
            lapin::BasicProperties::default(),
        );
        publish.await.unwrap().await.unwrap();
    }
    let counted = eventually("three messages", DEADLINE, || async {
        let queues = management.queues(vhost.name()).await.unwrap();
        if queues.iter().any(|queue| queue.name == "counted" && queue.messages == 3) {
            Ok(())
        } else {
            Err(queues)
        }
    });
    counted.await.unwrap();
    management.delete_queue(vhost.name(), "counted").await.unwrap();
    assert!(management.queues(vhost.name()).await.unwrap().is_empty());
}

#[test]
fn tells_a_test_of_the_services_it_was_told_of() {
    let services = services();
    let variables: HashMap<_, _> = services.environment().into_iter().collect();
    let again = Services::from_variables(|name| variables.get(name).cloned()).unwrap();
    assert_eq!(again.environment(), services.environment());
    assert_eq!(again.postgres_url("some"), services.postgres_url("some"));
    assert_eq!(again.amqp_url("some"), services.amqp_url("some"));
    assert_eq!(again.are_private(), services.are_private());
}

#[test]
fn says_what_to_run_when_a_test_was_told_of_none() {
    let error = Services::from_variables(|_| None).unwrap_err();
    assert_eq!(error.to_string(), "run `cargo xtask test`, which starts a private Postgres and RabbitMQ");
}

#[tokio::test]
async fn shares_a_given_virtual_host_by_unique_names() {
    let services = services();
    let Some(management) = services.rabbitmq.management() else { return };
    let given = services.create_vhost("bed").await.unwrap();
    let mut variables: HashMap<_, _> = services.environment().into_iter().collect();
    variables.insert("SEMEL_TEST_SERVICES", "given".to_owned());
    variables.insert("SEMEL_TEST_AMQP_URL", given.url());
    variables.remove("SEMEL_TEST_AMQP_MANAGEMENT_URL");
    let without = Services::from_variables(|name| variables.get(name).cloned()).unwrap();

    let (one, other) =
        (without.create_vhost("bed").await.unwrap(), without.create_vhost("bed").await.unwrap());
    assert!(one.is_shared() && one.management().is_none());
    assert_eq!(one.url(), given.url());
    assert_ne!(one.scoped("events"), other.scoped("events"));
    drop((one, other));
    assert!(management.vhosts().await.unwrap().contains(&given.name().to_owned()));
}
