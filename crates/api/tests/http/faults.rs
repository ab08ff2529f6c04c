//! The database makes trouble, or the client goes away.

use std::time::Duration;

use sqlx::Executor as _;
use sqlx::postgres::PgPoolOptions;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::bed::{Database, Server, until, with_database};

#[tokio::test]
async fn a_client_that_goes_away_ends_the_waiting_and_not_the_work() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        let stopped = db.stop_writes().await;
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&server.order("k", 1200).bytes()).await.unwrap();
        db.until_one_is_blocked().await;
        drop(stream);
        stopped.rollback().await.unwrap();
        until("the order of a client that went away", async || (db.rows().await == (1, 1, 1)).then_some(()))
            .await;
        let retry = server.order("k", 1200).send(server.address).await;
        assert_eq!((retry.status, retry.header("idempotent-replayed")), (201, Some("true")));
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_key_whose_request_takes_long_is_in_progress() {
    with_database(async |db: Database| {
        // The daemon's own guard ends the waiting of the second one after a second.
        let (patient, guarded) = (db.serve().await, db.serve_guarded().await);
        let stopped = db.stop_writes().await;
        let first = tokio::spawn({
            let patient = patient.clone();
            async move { patient.order("k", 1200).send(patient.address).await }
        });
        db.until_one_is_blocked().await;
        let second = guarded.order("k", 1200).send(guarded.address).await;
        second.expect_problem(409, "request-in-progress");
        assert!(second.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
        stopped.rollback().await.unwrap();
        assert_eq!(first.await.unwrap().status, 201);
        let third = guarded.order("k", 1200).send(guarded.address).await;
        assert_eq!((third.status, third.header("idempotent-replayed")), (201, Some("true")));
    })
    .await;
}

#[tokio::test]
async fn an_outcome_that_is_not_known_is_told_so_and_settled_by_the_retry() {
    with_database(async |db: Database| {
        let server = db.serve().await;
        let stopped = db.stop_writes().await;
        let waiting = tokio::spawn({
            let server = server.clone();
            async move { server.order("k", 1200).send(server.address).await }
        });
        // Every connection on which it asks is lost while the statement waits.
        while !waiting.is_finished() {
            tokio::select! {
                pid = db.until_one_is_blocked() => db.kill(pid).await,
                () = until("the answer", async || waiting.is_finished().then_some(())) => {}
            }
        }
        let answer = waiting.await.unwrap();
        let problem = answer.expect_problem(503, "outcome-unknown");
        assert!(answer.header("retry-after").is_some());
        stopped.rollback().await.unwrap();
        let retry = server.order("k", 1200).send(server.address).await;
        assert_eq!(retry.status, 201);
        assert_eq!(problem["resource_id"], retry.json()["id"]);
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_statement_that_is_refused_is_our_failure_and_is_not_stored() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        db.execute("ALTER TABLE outbox ADD CONSTRAINT outbox_refuses_all CHECK (FALSE)").await;
        let failed = server.order("k", 1200).send(server.address).await;
        let problem = failed.expect_problem(500, "internal");
        assert!(failed.header("retry-after").is_some());
        assert!(!problem.to_string().contains("outbox"), "{problem}");
        assert_eq!(db.rows().await, (0, 0, 0));
        db.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_refuses_all").await;
        let retry = server.order("k", 1200).send(server.address).await;
        assert_eq!((retry.status, retry.header("idempotent-replayed")), (201, None));
    })
    .await;
}

#[tokio::test]
async fn a_database_that_is_away_is_unavailable() {
    let pool = PgPoolOptions::new()
        .acquire_timeout(Duration::from_millis(200))
        .connect_lazy("postgres://nobody@127.0.0.1:1/nothing")
        .unwrap();
    let token = format!("sml_{}_{}", "0".repeat(16), "0".repeat(64));
    let server = Server::start(pool, token).await;
    for ask in [server.order("k", 1200), server.get("/v1/orders/00000000-0000-4000-8000-000000000000")] {
        let answer = ask.send(server.address).await;
        answer.expect_problem(503, "temporarily-unavailable");
        assert!(answer.header("retry-after").is_some());
    }
}

#[tokio::test]
async fn without_a_free_connection_nothing_is_executed() {
    with_database(async |db: Database| {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(Duration::from_secs(1))
            .connect_lazy_with((*db.pool.connect_options()).clone());
        let server = Server::start(pool.clone(), db.token("acme").await).await;
        // Once before, so that the credential is remembered and the order alone needs the database.
        server.get("/v1/nothing").send(server.address).await.expect_problem(404, "not-found");
        let mut held = pool.acquire().await.unwrap();
        held.execute("SELECT 1").await.unwrap();
        let answer = server.order("k", 1200).send(server.address).await;
        answer.expect_problem(503, "temporarily-unavailable");
        assert!(answer.header("retry-after").is_some());
        assert_eq!(db.rows().await, (0, 0, 0));
        drop(held);
        assert_eq!(server.order("k", 1200).send(server.address).await.status, 201);
    })
    .await;
}

#[tokio::test]
async fn before_the_database_was_usable_every_request_is_told_to_come_back() {
    with_database(async |db: Database| {
        let server = Server::start_closed(db.pool.clone(), db.token("acme").await).await;
        for ask in [
            server.order("k", 1200),
            server.get("/v1/nothing"),
            server.order("k", 1200).without("Authorization"),
        ] {
            let answer = ask.send(server.address).await;
            answer.expect_problem(503, "temporarily-unavailable");
            assert!(answer.header("retry-after").is_some());
        }
        server.api.open();
        assert_eq!(server.order("k", 1200).send(server.address).await.status, 201);
    })
    .await;
}
