//! Private servers: reuse, stopping, killing and starting again, and what becomes of lost ones.

use std::net::{Ipv4Addr, TcpListener};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use semel_tests::progress::Progress;
use semel_tests::services::{Database, Place, PrivatePostgres, PrivateRabbitMq, Services, Vhost};
use semel_tests::wait::eventually;
use sqlx::{Connection as _, PgConnection};

use super::DEADLINE;

async fn start(place: &Place) -> Services {
    Services::start_private(place.clone(), Progress::Silent).await.unwrap()
}

/// One test, for a private RabbitMQ takes seconds to start: it lives through all that may happen.
#[tokio::test]
async fn private_servers_live_as_they_are_told() {
    let place = Services::from_env().unwrap().place().own("lifecycle");
    let services = start(&place).await;
    let (postgres, rabbitmq) = (services.postgres.private().unwrap(), services.rabbitmq.private().unwrap());

    // Two more at the same time find those that run.
    let before = (postgres.process().unwrap(), rabbitmq.process().unwrap());
    let (one, other) = tokio::join!(start(&place), start(&place));
    assert_eq!((postgres.process().unwrap(), rabbitmq.process().unwrap()), before);
    assert_eq!(one.environment(), services.environment());
    assert_eq!(other.environment(), services.environment());

    let database = services.create_database("bed").await.unwrap();
    let vhost = services.create_vhost("bed").await.unwrap();
    tokio::join!(
        postgres_keeps_what_was_committed(postgres, &database),
        rabbitmq_keeps_what_was_confirmed(rabbitmq, &vhost)
    );

    taken_port_is_told(postgres, &database).await;
    drop((database, vhost));
    lost_server_is_replaced(postgres, &place).await;

    let last = (postgres.process().unwrap(), rabbitmq.process().unwrap());
    services.clone().remove(Progress::Silent).await.unwrap();
    assert!(!last.0.is_running() && !last.1.is_running());
    assert!(postgres.process().is_err() && rabbitmq.process().is_err());
}

async fn postgres_keeps_what_was_committed(server: &PrivatePostgres, database: &Database) {
    let connect = async || PgConnection::connect(&database.url()).await;
    let insert = "INSERT INTO kept VALUES (1)";
    let mut connection = connect().await.unwrap();
    sqlx::query("CREATE TABLE kept (id int)").execute(&mut connection).await.unwrap();

    sqlx::query(insert).execute(&mut connection).await.unwrap();
    server.kill().await.unwrap();
    assert!(connect().await.is_err());
    assert!(connection.ping().await.is_err());
    server.start().await.unwrap();

    sqlx::query(insert).execute(&mut connect().await.unwrap()).await.unwrap();
    server.stop_immediately().await.unwrap();
    server.start().await.unwrap();

    sqlx::query(insert).execute(&mut connect().await.unwrap()).await.unwrap();
    server.restart().await.unwrap();
    let kept = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM kept");
    assert_eq!(kept.fetch_one(&mut connect().await.unwrap()).await.unwrap(), 3);
}

async fn rabbitmq_keeps_what_was_confirmed(server: &PrivateRabbitMq, vhost: &Vhost) {
    let open = async || {
        let connection = Connection::connect(&vhost.url(), ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        (connection, channel)
    };
    let (_connection, channel) = open().await;
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare("kept".into(), durable, FieldTable::default()).await.unwrap();
    // A confirm says that a message is on disk. Nothing says so of a queue, but a stop.
    server.restart().await.unwrap();
    let (_connection, channel) = open().await;
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let persistent = BasicProperties::default().with_delivery_mode(2);
    let publish =
        channel.basic_publish("".into(), "kept".into(), BasicPublishOptions::default(), b"x", persistent);
    assert!(publish.await.unwrap().await.unwrap().is_ack());

    server.kill().await.unwrap();
    assert!(Connection::connect(&vhost.url(), ConnectionProperties::default()).await.is_err());
    server.start().await.unwrap();
    let management = vhost.management().unwrap();
    let kept = eventually("the confirmed message", DEADLINE, || async {
        let queues = management.queues(vhost.name()).await;
        if queues.as_ref().is_ok_and(|queues| queues.iter().any(|queue| queue.messages == 1)) {
            Ok(())
        } else {
            Err(queues)
        }
    });
    kept.await.unwrap();
}

async fn taken_port_is_told(server: &PrivatePostgres, database: &Database) {
    let url = database.admin_url();
    let port = url.rsplit(':').next().and_then(|rest| rest.split('/').next()).unwrap().parse().unwrap();
    server.stop().await.unwrap();
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let error = format!("{:#}", server.start().await.unwrap_err());
    assert!(error.contains("Address already in use"), "{error}");
    assert!(error.contains(&server.log().display().to_string()), "{error}");
    drop(taken);
    server.start().await.unwrap();
}

/// As after `cargo clean`: the server runs, but nothing tells of it.
async fn lost_server_is_replaced(server: &PrivatePostgres, place: &Place) {
    let lost = server.process().unwrap();
    std::fs::remove_file(place.dir().join("postgres.json")).unwrap();
    start(place).await;
    assert!(!lost.is_running());
    assert!(server.process().unwrap().is_running());
}
