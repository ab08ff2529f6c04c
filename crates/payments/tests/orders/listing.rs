//! Pages of orders.

use std::time::Duration;

use semel_payments::orders;
use semel_payments::page::Page;
use sqlx::{Executor as _, Row as _};

use crate::database::{Database, with_database};

/// The statement as it was sent, planned for no page in particular, must walk the index from where the page begins.
#[tokio::test]
async fn a_late_page_costs_as_much_as_the_first() {
    with_database(async |db: Database| {
        db.execute(
            "INSERT INTO orders (order_id, client_id, operation, idempotency_key, reference, amount, currency, status, created_at)
             SELECT gen_random_uuid(), 'client-' || n % 2, 'orders.create', n::TEXT, 'r', 1, 'EUR', 'placed',
                    now() - n * INTERVAL '1 ms'
             FROM generate_series(1, 20000) AS n",
        )
        .await;
        db.execute("ANALYZE orders").await;
        let pool = db.patient_pool(1, Duration::from_secs(20));
        let client = "client-1".parse().unwrap();
        let (_, next) = orders::list(&pool, &client, Page { limit: 20, after: None }).await.unwrap();
        let mut connection = pool.acquire().await.unwrap();
        let name: String = sqlx::query_scalar(
            "SELECT name FROM pg_prepared_statements WHERE statement LIKE '-- orders_list%'",
        )
        .fetch_one(&mut *connection)
        .await
        .unwrap();
        connection.execute("SET plan_cache_mode = force_generic_plan").await.unwrap();
        let id = next.unwrap().id;
        let late = format!(
            "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) EXECUTE {name} ('client-1', now() - INTERVAL '15 s', '{id}', 21)"
        );
        let plan = connection.fetch_all(sqlx::AssertSqlSafe(late)).await.unwrap();
        let plan: Vec<String> = plan.iter().map(|line| line.get(0)).collect();
        let plan = plan.join("\n");
        let good = plan.contains("orders_newest") && !plan.contains("Rows Removed") && !plan.contains("Sort");
        assert!(good, "{plan}");
    })
    .await;
}
