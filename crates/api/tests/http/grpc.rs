//! The same operations as calls: what they are answered, and that it is what HTTP answers.

mod answers;
mod bounds;
pub(crate) mod call;
mod refunds;
mod services;
mod switching;

use semel_proto::payments::v1;
use tonic::Code;

use crate::bed::{Database, Server, with_database};
use call::{Call, order};

#[tokio::test]
async fn an_order_is_placed_once_replayed_and_read() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let first = order(&server, "k", 1200).send(&server).await;
        let placed: v1::Order = first.message();
        assert_eq!((placed.status(), placed.amount), (v1::order::Status::Placed, 1200));
        assert_eq!((placed.reference.as_str(), placed.currency.as_str()), ("A-1", "EUR"));
        assert!(first.metadata("idempotency-key-expires").unwrap().ends_with(" GMT"));
        assert_eq!(first.metadata("idempotent-replayed"), None);

        let again = order(&server, "\"k\"", 1200).send(&server).await;
        assert_eq!(again.message::<v1::Order>(), placed);
        assert_eq!(again.metadata("idempotent-replayed"), Some("true"));
        assert_eq!(again.metadata("original-request-id"), first.metadata("request-id"));
        assert_eq!(again.metadata("idempotency-key-expires"), first.metadata("idempotency-key-expires"));

        let read = Call::new(&server, "GetOrder", &v1::GetOrderRequest { id: placed.id.clone() });
        let read = read.send(&server).await;
        assert_eq!(read.message::<v1::Order>(), placed);
        assert_eq!(read.metadata("idempotency-key-expires"), None);
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn the_generated_client_places_an_order() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let mut client =
            v1::payments_client::PaymentsClient::connect(format!("http://{}", server.address)).await.unwrap();
        let mut request = tonic::Request::new(call::order_of(1200));
        request.metadata_mut().insert("authorization", format!("Bearer {}", server.token).parse().unwrap());
        request.metadata_mut().insert("idempotency-key", "k".parse().unwrap());
        let placed = client.create_order(request).await.unwrap();
        assert_eq!(placed.get_ref().status(), v1::order::Status::Placed);
        let refused = client.create_order(call::order_of(1200)).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
    })
    .await;
}

#[tokio::test]
async fn orders_are_listed_page_by_page() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        for number in 0..3 {
            order(&server, &format!("k{number}"), 100 + number).send(&server).await.message::<v1::Order>();
        }
        let page = async |limit: u32, cursor: &str| {
            let request = v1::ListOrdersRequest { limit, cursor: cursor.to_owned() };
            Call::new(&server, "ListOrders", &request).send(&server).await
        };
        let amounts =
            |page: &v1::ListOrdersResponse| page.orders.iter().map(|order| order.amount).collect::<Vec<_>>();
        let first: v1::ListOrdersResponse = page(2, "").await.message();
        assert_eq!(amounts(&first), [102, 101]);
        let second: v1::ListOrdersResponse = page(2, &first.next_cursor).await.message();
        assert_eq!((amounts(&second), second.next_cursor.as_str()), (vec![100], ""));
        assert_eq!(amounts(&page(0, "").await.message()), [102, 101, 100]);
        for (limit, cursor, field) in [(101, "", "limit"), (2, "x", "cursor")] {
            let details = page(limit, cursor).await.expect_refusal(Code::InvalidArgument, "REQUEST_INVALID");
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, field);
        }
        let other = Server { token: db.token("other").await, ..server.clone() };
        let none = Call::new(&other, "ListOrders", &v1::ListOrdersRequest::default()).send(&other).await;
        assert_eq!(none.message::<v1::ListOrdersResponse>(), v1::ListOrdersResponse::default());
    })
    .await;
}

#[tokio::test]
async fn a_client_that_lost_its_request_learns_what_became_of_it() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let made = order(&server, "k", 1200).send(&server).await;
        let ask = |server: &Server, operation: &str| {
            let request = v1::GetIdempotencyKeyRequest { operation: operation.to_owned() };
            Call::new(server, "GetIdempotencyKey", &request)
        };
        let told: v1::IdempotencyKey =
            ask(&server, "orders.create").with("idempotency-key", "\"k\"").send(&server).await.message();
        assert_eq!((told.state(), told.http_status), (v1::idempotency_key::State::Completed, Some(201)));
        assert_eq!(told.resource_id, made.message::<v1::Order>().id);
        assert_eq!(
            (told.operation.as_str(), told.request_id.as_deref()),
            ("orders.create", made.metadata("request-id"))
        );
        let http = server.get("/v1/idempotency-keys/orders.create").header("Idempotency-Key", "k");
        let expires_at = http.send(server.address).await.json()["expires_at"].clone();
        let expires_at: prost_types::Timestamp = expires_at.as_str().unwrap().parse().unwrap();
        assert_eq!(told.expires_at, Some(expires_at));

        db.execute("DELETE FROM idempotency_keys").await;
        let outlived: v1::IdempotencyKey =
            ask(&server, "orders.create").with("idempotency-key", "k").send(&server).await.message();
        assert_eq!(outlived.state(), v1::idempotency_key::State::Expired);
        assert_eq!(
            (outlived.resource_id, outlived.request_id, outlived.expires_at),
            (told.resource_id, None, None)
        );

        let other = Server { token: db.token("other").await, ..server.clone() };
        for (server, operation) in [(&other, "orders.create"), (&server, "payments.create"), (&server, "")] {
            let nobody = ask(server, operation).with("idempotency-key", "k").send(server).await;
            nobody.expect_refusal(Code::NotFound, "NOT_FOUND");
        }
        let missing = ask(&server, "orders.create").send(&server).await;
        missing.expect_refusal(Code::InvalidArgument, "IDEMPOTENCY_KEY_MISSING");
        let doubled = ask(&server, "orders.create").with("idempotency-key", "k").with("idempotency-key", "k");
        doubled.send(&server).await.expect_refusal(Code::InvalidArgument, "IDEMPOTENCY_KEY_INVALID");
    })
    .await;
}
