//! The same operations as calls: what they are answered, and that it is what HTTP answers.

mod call;
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
