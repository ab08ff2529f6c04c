//! Each daemon's role may do what `grant` gives it, which is all that its statements need, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::{Intent, Payment, Refund};
use semel_tests::net::unique_name;
use semel_tests::process::{Daemon, binary};
use semel_tests::services::{Database, Permissions, Services};
use semel_tests::skip::skip;
use semel_tests::system::{Place, READY, Running, System, call};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Row as _};

pub(crate) const PASSWORD: &str = "secret";

/// A role's name, what it may do with whole tables, and with which of them what else.
type Role = (&'static str, &'static [&'static str], &'static [(&'static str, &'static str)]);

/// What each role may do with whole tables, and, behind a colon, with some columns of them.
const PAYMENTS: [Role; 5] = [
    (
        "semel-api",
        &[],
        &[
            ("schema_versions", "SELECT"),
            ("api_credentials", "SELECT"),
            ("orders", "SELECT INSERT"),
            ("idempotency_keys", "SELECT INSERT update"),
            ("payments", "SELECT INSERT update"),
            ("refunds", "SELECT INSERT update"),
            ("provider_answers", "SELECT INSERT"),
            ("outbox", "insert"),
        ],
    ),
    (
        "semel-relay",
        &[],
        &[
            ("schema_versions", "SELECT"),
            ("outbox", "SELECT update"),
            ("outbox_held", "SELECT INSERT UPDATE DELETE"),
        ],
    ),
    (
        "semel-reaper",
        &["--with-payments"],
        &[
            ("schema_versions", "SELECT"),
            ("api_credentials", "SELECT"),
            ("idempotency_keys", "SELECT update DELETE"),
            ("outbox", "SELECT insert update DELETE"),
            ("provider_answers", "SELECT INSERT update DELETE"),
            ("operator_actions", "SELECT update DELETE"),
            ("payments", "SELECT update"),
            ("refunds", "SELECT update"),
        ],
    ),
    (
        "semel-relay",
        &["--operator"],
        &[
            ("schema_versions", "SELECT"),
            ("outbox", "SELECT update"),
            ("outbox_held", "SELECT INSERT UPDATE DELETE"),
            ("operator_actions", "INSERT"),
        ],
    ),
    (
        "semel-reaper",
        &["--operator"],
        &[
            ("schema_versions", "SELECT"),
            ("idempotency_keys", "SELECT update"),
            ("payments", "SELECT update"),
            ("refunds", "SELECT update"),
            ("provider_answers", "SELECT INSERT"),
            ("operator_actions", "SELECT INSERT"),
            ("outbox", "insert"),
        ],
    ),
];

/// The same in the ledger's database.
const BOOKS: [Role; 4] = [
    (
        "semel-ledger",
        &[],
        &[
            ("schema_versions", "SELECT"),
            ("processed_events", "SELECT INSERT"),
            ("parked_events", "SELECT INSERT UPDATE DELETE"),
            ("aggregate_versions", "SELECT INSERT UPDATE"),
            ("ledger_transactions", "SELECT INSERT"),
            ("ledger_entries", "SELECT INSERT"),
            ("outbox", "insert"),
        ],
    ),
    (
        "semel-relay",
        &[],
        &[
            ("schema_versions", "SELECT"),
            ("outbox", "SELECT update"),
            ("outbox_held", "SELECT INSERT UPDATE DELETE"),
        ],
    ),
    (
        "semel-reaper",
        &[],
        &[
            ("schema_versions", "SELECT"),
            ("idempotency_keys", "SELECT update DELETE"),
            ("outbox", "SELECT update DELETE"),
            ("processed_events", "SELECT update DELETE"),
            ("aggregate_versions", "SELECT update DELETE"),
            ("operator_actions", "SELECT update DELETE"),
        ],
    ),
    (
        "semel-ledger",
        &["--operator"],
        &[
            ("schema_versions", "SELECT"),
            ("processed_events", "SELECT"),
            ("parked_events", "SELECT update DELETE"),
            ("operator_actions", "SELECT INSERT"),
        ],
    ),
];

/// Roles of a test; they go with it.
pub(crate) struct Roles {
    admin: String,
    names: Vec<String>,
}

impl Roles {
    pub(crate) fn new(database: &Database) -> Self {
        Self { admin: database.admin_url(), names: Vec::new() }
    }

    pub(crate) async fn make(&mut self, prefix: &str) -> Result<String> {
        let name = unique_name(prefix);
        let mut connection = PgConnection::connect(&self.admin).await?;
        let create = format!("CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'");
        connection.execute(AssertSqlSafe(create)).await?;
        self.names.push(name.clone());
        Ok(name)
    }

    /// Drops them; what they were granted in these databases goes first.
    pub(crate) async fn drop_in(self, databases: &[&Database]) -> Result<()> {
        for database in databases {
            let mut connection = database.connect().await?;
            for name in &self.names {
                connection.execute(AssertSqlSafe(format!("DROP OWNED BY {name}"))).await?;
            }
        }
        let mut connection = PgConnection::connect(&self.admin).await?;
        for name in &self.names {
            connection.execute(AssertSqlSafe(format!("DROP ROLE {name}"))).await?;
        }
        Ok(())
    }
}

/// What a role may do with each table: a verb in capitals for all of its columns, in small letters for some.
async fn cells(connection: &mut PgConnection, role: &str) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let rows = sqlx::query(
        "SELECT c.relname, v.verb,
                has_table_privilege($1, c.oid, v.verb) AS whole,
                v.verb IN ('SELECT', 'INSERT', 'UPDATE') AND has_any_column_privilege($1, c.oid, v.verb) AS some
           FROM pg_class c
           CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS v (verb)
          WHERE c.relkind IN ('r', 'p', 'v') AND c.relnamespace = 'public'::regnamespace",
    )
    .bind(role)
    .fetch_all(connection)
    .await?;
    let mut cells: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in rows {
        let (table, verb): (String, String) = (row.try_get("relname")?, row.try_get("verb")?);
        let said = if row.try_get("whole")? {
            verb
        } else if row.try_get("some")? {
            verb.to_lowercase()
        } else {
            continue;
        };
        cells.entry(table).or_default().insert(said);
    }
    Ok(cells)
}

#[tokio::test]
async fn a_role_may_do_what_it_was_granted_and_nothing_else() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    let mut roles = Roles::new(&place.payments);
    for (database, table) in [(&place.payments, &PAYMENTS[..]), (&place.books, &BOOKS[..])] {
        let mut connection = database.connect().await?;
        for (program, args, expected) in table {
            let role = roles.make("granted").await?;
            ensure!(cells(&mut connection, &role).await?.is_empty(), "a new role may do something");
            // Twice, as after the next migration.
            for _ in 0..2 {
                let args: Vec<&str> = ["grant", &role].into_iter().chain(args.iter().copied()).collect();
                call(program, &args, &database.url()).await?;
            }
            let expected: BTreeMap<String, BTreeSet<String>> = expected
                .iter()
                .map(|(table, verbs)| ((*table).to_owned(), verbs.split(' ').map(str::to_owned).collect()))
                .collect();
            assert_eq!(cells(&mut connection, &role).await?, expected, "{program} {args:?}");
        }
    }
    let missing = call("semel-relay", &["grant", "nobody_of_this_name"], &place.payments.url()).await;
    ensure!(missing.unwrap_err().to_string().contains("nobody_of_this_name"));
    roles.drop_in(&[&place.payments, &place.books]).await
}

/// Forbidden cells, as statements: what each would be tempted to.
async fn expect_forbidden(urls: &BTreeMap<&str, String>) -> Result<()> {
    for (name, statement) in [
        ("api", "DELETE FROM outbox"),
        ("api", "SELECT payload FROM outbox"),
        ("api", "UPDATE orders SET amount = 1"),
        ("api", "UPDATE payments SET amount = 1"),
        ("api", "UPDATE refunds SET amount = 1"),
        ("api", "UPDATE idempotency_keys SET request_hash = 'x'"),
        ("reaper", "UPDATE payments SET client_id = 'x'"),
        ("reaper", "UPDATE refunds SET payment_id = gen_random_uuid()"),
        ("reaper", "UPDATE idempotency_keys SET provider_key = 'x'"),
        ("relay", "UPDATE outbox SET payload = '{}'"),
        ("relay", "SELECT * FROM payments"),
        ("reaper", "DELETE FROM payments"),
        ("ledger", "UPDATE ledger_entries SET amount = 1"),
        ("ledger", "DELETE FROM processed_events"),
        ("ledger-relay", "SELECT * FROM ledger_entries"),
    ] {
        let mut connection = PgConnection::connect(&urls[name]).await?;
        let executed = connection.execute(statement).await;
        let error = executed.err().with_context(|| format!("{name} may: {statement}"))?;
        let code = error
            .as_database_error()
            .and_then(sqlx::error::DatabaseError::code)
            .map(std::borrow::Cow::into_owned);
        assert_eq!(code.as_deref(), Some("42501"), "{name}: {statement}: {error}");
    }
    Ok(())
}

#[tokio::test]
async fn a_system_whose_daemons_have_their_own_roles_and_broker_users_does_all_its_work() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    let management = place.vhost.management().context("no management")?;
    if !management.is_administrator().await? {
        let name = "a_system_whose_daemons_have_their_own_roles_and_broker_users_does_all_its_work";
        return Ok(skip(name, "the broker's user may not make users")?);
    }
    let mut roles = Roles::new(&place.payments);
    let mut urls = BTreeMap::new();
    let wanted: [(&str, &Database, &str, &[&str]); 5] = [
        ("api", &place.payments, "semel-api", &[]),
        ("relay", &place.payments, "semel-relay", &[]),
        ("reaper", &place.payments, "semel-reaper", &["--with-payments"]),
        ("ledger", &place.books, "semel-ledger", &[]),
        ("ledger-relay", &place.books, "semel-relay", &[]),
    ];
    for (name, database, program, more) in wanted {
        let role = roles.make(&name.replace('-', "_")).await?;
        let args: Vec<&str> = ["grant", &role].into_iter().chain(more.iter().copied()).collect();
        call(program, &args, &database.url()).await?;
        urls.insert(name, database.url_as(&role, PASSWORD));
    }
    // Who sets the broker up: an exchange, and the ledger's queues, made once by a ledger that may.
    let first = place.ledger("first", &[]).await?;
    first.daemon.terminate()?;
    first.daemon.wait_exit(READY).await?;
    let (exchange, queue) = (&place.exchange, &place.queue);
    let vhost = place.vhost.name();
    let mut brokers = BTreeMap::new();
    for (user, write, read) in [
        ("relay", format!("^{exchange}$"), "^$".to_owned()),
        ("ledger", format!("^{queue}[.].*$|^amq[.]default$"), format!("^{queue}$")),
    ] {
        let name = unique_name(user);
        management.create_user(&name, PASSWORD).await?;
        let permissions = Permissions { configure: "^$".to_owned(), write, read };
        management.set_permissions(vhost, &name, &permissions).await?;
        brokers.insert(user, (place.vhost.url_as(&name, PASSWORD), name));
    }
    let tap = place.tap().await?;
    let provider = place.provider("provider", &[]).await?;
    let start = async |program: &str, name: &str, broker: Option<&str>| {
        let mut env = vec![("DATABASE_URL", urls[name].clone()), ("SEMEL_TOPOLOGY", "verify".to_owned())];
        env.extend(broker.map(|user| ("AMQP_URL", brokers[user].0.clone())));
        let admin = semel_tests::net::free_port()?;
        let listen = semel_tests::net::free_port()?;
        env.push(("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}")));
        env.push(("SEMEL_API_LISTEN", format!("127.0.0.1:{listen}")));
        let command =
            Daemon::command(&format!("own-{name}"), binary(program)?).envs(place.environment()).envs(env);
        let daemon = command.start().await?;
        daemon.wait_ready(admin, READY).await?;
        Ok::<_, anyhow::Error>(Running { daemon, admin, address: Some(([127, 0, 0, 1], listen).into()) })
    };
    let ledger = start("semel-ledger", "ledger", Some("ledger")).await?;
    let api = start("semel-api", "api", None).await?;
    let relay = start("semel-relay", "relay", Some("relay")).await?;
    let reaper = start("semel-reaper", "reaper", None).await?;
    let ledger_relay = start("semel-relay", "ledger-relay", Some("relay")).await?;
    let system =
        System { place, provider, apis: vec![api], relays: vec![relay], reaper, ledger, ledger_relay, tap };

    let client = system.client(0)?;
    let (mut acknowledged, mut told, mut refunded) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..20 {
        let intent = Intent::new(&format!("order-{number}"), 100 + number);
        acknowledged.push(client.place_until_final(&intent).await?.acknowledged(&intent.key)?);
        let mut payment = Payment::new(&format!("payment-{number}"), 300 + number);
        if number % 5 == 0 {
            "tok_declined".clone_into(&mut payment.source);
        }
        let answer = client.pay_until_final(&payment).await?.told(&payment.key)?;
        if answer.status == "succeeded" {
            let refund = Refund::new(answer.payment_id, 100);
            refunded.push(client.refund_until_final(&refund).await?.told_refund(&refund.key)?);
        }
        told.push(answer);
    }
    // A payment that nobody answers for is the reaper's.
    system.place.settled(Duration::from_mins(1)).await?;
    let sources = system.sources_with_refunds(acknowledged, told, refunded).await?;
    assert_eq!(semel_tests::reconcile::reconcile(&sources), []);

    expect_forbidden(&urls).await?;
    let System { place, provider, apis, relays, reaper, ledger, ledger_relay, tap } = system;
    drop((provider, apis, relays, reaper, ledger, ledger_relay, tap));
    let management = place.vhost.management().context("no management")?;
    for (_, name) in brokers.values() {
        management.delete_user(name).await?;
    }
    roles.drop_in(&[&place.payments, &place.books]).await
}
