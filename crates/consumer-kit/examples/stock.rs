//! Reserves stock for each order that is placed, exactly once.

use semel_consumer_kit::{Consumer, Event, Handler, HandlerError};
use semel_core::lifecycle::Lifecycle;
use sqlx::{PgConnection, PgPool};

#[derive(serde::Deserialize)]
struct OrderPlaced {
    order_id: uuid::Uuid,
}

struct ReserveStock;

impl Handler for ReserveStock {
    type Payload = OrderPlaced;

    async fn handle(&self, tx: &mut PgConnection, event: Event<OrderPlaced>) -> Result<(), HandlerError> {
        let insert = sqlx::query("INSERT INTO reservations (order_id) VALUES ($1)");
        insert.bind(event.payload.order_id).execute(tx).await?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let broker = std::env::var("AMQP_URL")?.parse()?;
    let life = Lifecycle::new();
    life.listen_to_signals()?;
    let consumer = Consumer::builder("stock", pool, broker, "stock.orders").bind("order.OrderPlaced");
    Ok(consumer.build(ReserveStock)?.run(&life).await?)
}
