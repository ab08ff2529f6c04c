//! Bearer credentials.

use std::sync::Arc;
use std::time::Duration;

use secrecy::ExposeSecret as _;
use semel_core::credentials::operator::{
    By, CredentialError, CredentialId, create, create_unless_any, list, revoke, rotate,
};
use semel_core::credentials::{Authenticator, Caller, Scopes, is_shut_out};
use semel_core::idempotency::ClientId;
use sqlx::Executor as _;
use tokio::task::JoinSet;

use crate::database::{Database, with_database};

#[tokio::test]
async fn a_token_speaks_for_its_client() {
    with_database(async |db: Database| {
        let acme: ClientId = "acme".parse().unwrap();
        let authenticator = Authenticator::new(db.pool.clone());
        // A second credential beside the first: rotation with overlap.
        for _ in 0..2 {
            let created = create(&db.pool, &acme, &Scopes::all()).await.unwrap();
            let caller = authenticator.authenticate(created.token.expose_secret()).await.unwrap();
            assert_eq!(caller, Some(Caller { client: acme.clone(), scopes: Scopes::all() }));
        }
        assert_eq!(db.count("SELECT count(*) FROM api_clients").await, 1);
    })
    .await;
}

#[tokio::test]
async fn refuses_unknown_wrong_and_revoked_tokens() {
    with_database(async |db: Database| {
        let created = create(&db.pool, &"acme".parse().unwrap(), &Scopes::all()).await.unwrap();
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

/// Tokens of strangers, who guess.
#[tokio::test]
async fn at_most_four_questions_are_asked_at_a_time() {
    with_database(async |db: Database| {
        let pool = semel_core::database::pool(&db.url, "semel-test", 20);
        let authenticator = Arc::new(Authenticator::new(pool));
        let mut stopped = db.pool.begin().await.unwrap();
        stopped.execute("LOCK TABLE api_credentials").await.unwrap();
        let mut asking = JoinSet::new();
        for number in 0..16 {
            let (authenticator, token) =
                (Arc::clone(&authenticator), format!("sml_{number:016x}_{}", "0".repeat(64)));
            asking.spawn(async move { authenticator.authenticate(&token).await });
        }
        // Each waits for the lock as long as the guard lets it, and then the next one asks.
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0";
        let mut most = 0;
        while asking.try_join_next().is_none() {
            most = most.max(db.count(waiting).await);
        }
        stopped.rollback().await.unwrap();
        assert!((1..=4).contains(&most), "{most} at a time");
        // Whoever still waited is answered.
        while let Some(answer) = asking.join_next().await {
            assert!(!matches!(answer.unwrap(), Ok(Some(_))));
        }
    })
    .await;
}

#[tokio::test]
async fn the_secret_is_not_stored() {
    with_database(async |db: Database| {
        let created = create(&db.pool, &"acme".parse().unwrap(), &Scopes::all()).await.unwrap();
        let (_, secret) = created.token.expose_secret().rsplit_once('_').unwrap();
        let row: String = sqlx::query_scalar("SELECT row_to_json(c)::TEXT FROM api_credentials AS c")
            .fetch_one(&db.pool)
            .await
            .unwrap();
        assert!(!row.contains(secret) && !format!("{created:?}").contains(secret));
    })
    .await;
}

const BY: By<'_> = By { actor: "ada", reason: "it leaked" };

#[tokio::test]
async fn a_client_that_has_a_credential_in_force_gets_no_other_where_none_is_wanted() {
    with_database(async |db: Database| {
        let acme: ClientId = "acme".parse().unwrap();
        let everything = Scopes::all();
        // Of many at once one makes it.
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let (pool, acme) = (db.pool.clone(), acme.clone());
            tasks.spawn(async move { create_unless_any(&pool, &acme, &Scopes::all()).await.unwrap() });
        }
        let made: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
        let [made] = made.as_slice() else { panic!("{made:?}") };
        let authenticator = Authenticator::new(db.pool.clone());
        let caller = authenticator.authenticate(made.token.expose_secret()).await.unwrap();
        assert_eq!(caller, Some(Caller { client: acme.clone(), scopes: everything.clone() }));

        // One that is to end is still in force; one that has ended is not, and that of another client is another's.
        db.execute("UPDATE api_credentials SET revoked_at = clock_timestamp() + INTERVAL '1 hour'").await;
        assert!(create_unless_any(&db.pool, &acme, &everything).await.unwrap().is_none());
        db.execute("UPDATE api_credentials SET revoked_at = clock_timestamp()").await;
        create(&db.pool, &"umbrella".parse().unwrap(), &everything).await.unwrap();
        assert!(create_unless_any(&db.pool, &acme, &everything).await.unwrap().is_some());
        assert_eq!(db.count("SELECT count(*) FROM api_credentials").await, 3);
    })
    .await;
}

#[tokio::test]
async fn a_new_credential_takes_over_from_the_others_after_a_while() {
    with_database(async |db: Database| {
        let acme: ClientId = "acme".parse().unwrap();
        let error = rotate(&db.pool, &acme, Duration::ZERO, None, BY).await.unwrap_err();
        assert!(matches!(error, CredentialError::UnknownClient(_)), "{error}");

        let old = create(&db.pool, &acme, &Scopes::all()).await.unwrap();
        let stranger = create(&db.pool, &"umbrella".parse().unwrap(), &Scopes::all()).await.unwrap();
        let (second, ending) = rotate(&db.pool, &acme, Duration::from_hours(1), None, BY).await.unwrap();
        assert_eq!(ending, 1);
        // Asked anew each time, so that nothing remembered answers.
        let is_good = async |token: &secrecy::SecretString| {
            Authenticator::new(db.pool.clone()).authenticate(token.expose_secret()).await.unwrap().is_some()
        };
        assert!(
            is_good(&old.token).await && is_good(&second.token).await,
            "both, for the time of the overlap"
        );

        // Ends the second at once, and the old one earlier than it was to.
        let (third, ending) = rotate(&db.pool, &acme, Duration::ZERO, None, BY).await.unwrap();
        assert_eq!(ending, 2);
        assert!(!is_good(&old.token).await && !is_good(&second.token).await);
        assert!(is_good(&third.token).await && is_good(&stranger.token).await);
        // A later end does not put off an earlier one.
        let (_, ending) = rotate(&db.pool, &acme, Duration::from_hours(1), None, BY).await.unwrap();
        assert_eq!(ending, 1);
        assert!(!is_good(&old.token).await);
        assert_eq!(db.count("SELECT count(*) FROM operator_actions WHERE subject = 'acme'").await, 3);
    })
    .await;
}

#[tokio::test]
async fn a_revoked_credential_is_refused_and_the_deed_told() {
    with_database(async |db: Database| {
        let acme: ClientId = "acme".parse().unwrap();
        let credential = create(&db.pool, &acme, &Scopes::all()).await.unwrap();
        let (other, _) = rotate(&db.pool, &acme, Duration::from_hours(1), None, BY).await.unwrap();
        let id = credential.token.expose_secret().parse().unwrap();
        assert_eq!(id, credential.credential_id.parse().unwrap(), "a whole token names it, too");
        revoke(&db.pool, &id, BY).await.unwrap();
        let authenticator = Authenticator::new(db.pool.clone());
        assert_eq!(authenticator.authenticate(credential.token.expose_secret()).await.unwrap(), None);
        assert!(!is_shut_out(&db.pool, &acme).await.unwrap());
        // One that is still to end shuts nobody out.
        rotate(&db.pool, &acme, Duration::from_hours(1), None, BY).await.unwrap();
        assert!(!is_shut_out(&db.pool, &acme).await.unwrap());

        let error = revoke(&db.pool, &id, BY).await.unwrap_err();
        assert!(matches!(error, CredentialError::Revoked { .. }), "{error}");
        let error = revoke(&db.pool, &"0123456789abcdef".parse().unwrap(), BY).await.unwrap_err();
        assert!(matches!(error, CredentialError::Unknown(_)), "{error}");
        for left in list(&db.pool, Some(&acme), 10).await.unwrap() {
            if left.credential_id != credential.credential_id {
                revoke(&db.pool, &left.credential_id.parse().unwrap(), BY).await.unwrap();
            }
        }
        assert!(is_shut_out(&db.pool, &acme).await.unwrap());
        assert_eq!(authenticator.authenticate(other.token.expose_secret()).await.unwrap(), None);
        let told = "SELECT count(*) FROM operator_actions
                    WHERE action = 'credentials revoke' AND actor = 'ada' AND reason = 'it leaked'";
        assert_eq!(db.count(told).await, 3);
    })
    .await;
}

#[tokio::test]
async fn a_new_credential_may_be_used_for_what_is_said_or_for_what_the_others_may() {
    with_database(async |db: Database| {
        let acme: ClientId = "acme".parse().unwrap();
        let reads = Scopes::only(["orders:read".to_owned()]);
        let scopes = async |token: &secrecy::SecretString| {
            // One that has not met it before.
            let authenticator = Authenticator::new(db.pool.clone());
            authenticator.authenticate(token.expose_secret()).await.unwrap().unwrap().scopes
        };
        let first = create(&db.pool, &acme, &reads).await.unwrap();
        assert_eq!(scopes(&first.token).await, reads);
        // Replacing gives nobody more than they had.
        let (second, _) = rotate(&db.pool, &acme, Duration::ZERO, None, BY).await.unwrap();
        assert_eq!(scopes(&second.token).await, reads);
        create(&db.pool, &acme, &Scopes::all()).await.unwrap();
        let error = rotate(&db.pool, &acme, Duration::ZERO, None, BY).await.unwrap_err();
        assert!(matches!(error, CredentialError::ScopesDiffer(_)), "{error}");
        assert_eq!(scopes(&second.token).await, reads, "what was refused ended nothing");
        let writes = Scopes::only(["orders:write", "orders:read"].map(str::to_owned));
        let (third, ending) = rotate(&db.pool, &acme, Duration::ZERO, Some(&writes), BY).await.unwrap();
        assert_eq!((scopes(&third.token).await, ending), (writes.clone(), 2));
        // After a leak nothing is in force, and still nobody gets more than they had.
        let leaked = create(&db.pool, &"leaky".parse().unwrap(), &reads).await.unwrap();
        revoke(&db.pool, &leaked.credential_id.parse().unwrap(), BY).await.unwrap();
        let (anew, _) = rotate(&db.pool, &"leaky".parse().unwrap(), Duration::ZERO, None, BY).await.unwrap();
        assert_eq!(scopes(&anew.token).await, reads);

        let listed = list(&db.pool, Some(&acme), 10).await.unwrap();
        let lists: Vec<_> = listed.into_iter().map(|record| Scopes::from(record.scopes)).collect();
        assert_eq!(lists, [reads.clone(), reads, Scopes::all(), writes]);
        let none = db.pool.execute("UPDATE api_credentials SET scopes = '{}'").await.unwrap_err();
        let constraint = none.as_database_error().and_then(|error| error.constraint());
        assert_eq!(constraint, Some("api_credentials_scopes_some"));
    })
    .await;
}

#[tokio::test]
async fn lists_those_of_a_client_or_all() {
    with_database(async |db: Database| {
        for client in ["umbrella", "acme", "acme"] {
            create(&db.pool, &client.parse().unwrap(), &Scopes::all()).await.unwrap();
        }
        let clients = async |client: Option<&str>, limit| {
            let client = client.map(|client| client.parse().unwrap());
            let found = list(&db.pool, client.as_ref(), limit).await.unwrap();
            found.into_iter().map(|record| record.client_id).collect::<Vec<_>>()
        };
        assert_eq!(clients(None, 10).await, ["acme", "acme", "umbrella"]);
        assert_eq!(clients(None, 1).await, ["acme"]);
        assert_eq!(clients(Some("umbrella"), 10).await, ["umbrella"]);
        assert_eq!(clients(Some("nobody"), 10).await, [""; 0]);
    })
    .await;
}

#[test]
fn what_names_no_credential_is_refused_without_being_quoted() {
    let secret = "f".repeat(64);
    for text in ["", "0123", "0123456789ABCDEF", &format!("sml_0123456789abcde_{secret}"), &secret] {
        let error = text.parse::<CredentialId>().unwrap_err().to_string();
        assert!(text.is_empty() || !error.contains(text), "{error}");
    }
}

#[tokio::test]
async fn who_asks_and_goes_away_costs_no_connection() {
    with_database(async |db: Database| {
        let acme: ClientId = "acme".parse().unwrap();
        let credential = create(&db.pool, &acme, &Scopes::all()).await.unwrap();
        let alone = semel_core::database::pool(&db.url, "semel-test", 1);
        let pid = async || -> i32 {
            let mut connection = alone.acquire().await.unwrap();
            sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *connection).await.unwrap()
        };
        let before = pid().await;
        let mut stopped = db.pool.begin().await.unwrap();
        stopped.execute("LOCK TABLE api_credentials IN ACCESS EXCLUSIVE MODE").await.unwrap();
        let asked = tokio::spawn({
            let (authenticator, token) = (Authenticator::new(alone.clone()), credential.token.clone());
            async move { authenticator.authenticate(token.expose_secret()).await }
        });
        db.until_blocked(before).await;
        asked.abort();
        assert!(asked.await.unwrap_err().is_cancelled());
        stopped.rollback().await.unwrap();
        assert_eq!(
            pid().await,
            before,
            "the question ended by itself, and its connection is as good as before"
        );
    })
    .await;
}
