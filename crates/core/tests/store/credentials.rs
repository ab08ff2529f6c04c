//! Bearer credentials.

use secrecy::ExposeSecret as _;
use semel_core::credentials::{Authenticator, create};
use semel_core::idempotency::ClientId;

use crate::database::{Database, with_database};

#[tokio::test]
async fn a_token_speaks_for_its_client() {
    with_database(async |db: Database| {
        let acme: ClientId = "acme".parse().unwrap();
        let authenticator = Authenticator::new(db.pool.clone());
        // A second credential beside the first: rotation with overlap.
        for _ in 0..2 {
            let created = create(&db.pool, &acme).await.unwrap();
            let client = authenticator.authenticate(created.token.expose_secret()).await.unwrap();
            assert_eq!(client.as_ref(), Some(&acme));
        }
        assert_eq!(db.count("SELECT count(*) FROM api_clients").await, 1);
    })
    .await;
}

#[tokio::test]
async fn refuses_unknown_wrong_and_revoked_tokens() {
    with_database(async |db: Database| {
        let created = create(&db.pool, &"acme".parse().unwrap()).await.unwrap();
        let token = created.token.expose_secret();
        let authenticator = Authenticator::new(db.pool.clone());
        let wrong = format!("{}{}", &token[..token.len() - 64], "0".repeat(64));
        let unknown = format!("sml_{}_{}", "0".repeat(16), &token[token.len() - 64..]);
        for refused in [wrong.as_str(), &unknown, "", "sml_", &token[1..]] {
            assert_eq!(authenticator.authenticate(refused).await.unwrap(), None);
        }
        assert!(authenticator.authenticate(token).await.unwrap().is_some());
        assert_eq!(authenticator.authenticate(&wrong).await.unwrap(), None, "also once the id is remembered");

        db.execute("UPDATE api_credentials SET revoked_at = clock_timestamp()").await;
        assert_eq!(Authenticator::new(db.pool.clone()).authenticate(token).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn the_secret_is_not_stored() {
    with_database(async |db: Database| {
        let created = create(&db.pool, &"acme".parse().unwrap()).await.unwrap();
        let (_, secret) = created.token.expose_secret().rsplit_once('_').unwrap();
        let row: String = sqlx::query_scalar("SELECT row_to_json(c)::TEXT FROM api_credentials AS c")
            .fetch_one(&db.pool)
            .await
            .unwrap();
        assert!(!row.contains(secret) && !format!("{created:?}").contains(secret));
    })
    .await;
}
