//! Health, reflection, and what is no call of ours.

use futures_util::{Stream, StreamExt as _, stream};
use prost::Message as _;
use prost_types::{FileDescriptorProto, FileDescriptorSet};
use semel_core::lifecycle::Drained;
use semel_proto::health::v1::health_check_response::ServingStatus;
use semel_proto::health::v1::{HealthCheckRequest, HealthCheckResponse};
use semel_proto::payments::{SERVICE, v1};
use tokio::sync::oneshot;
use tonic::transport::Endpoint;
use tonic::{Code, Status, Streaming};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};
use tonic_types::StatusExt as _;

use super::call::{Call, framed, order, order_of, payment};
use crate::bed::{DEADLINE, Database, Server, until, with_database};

const CHECK: &str = "/grpc.health.v1.Health/Check";

fn check(service: &str) -> Call {
    Call::at(CHECK, &HealthCheckRequest { service: service.to_owned() })
}

#[tokio::test]
async fn health_tells_whether_calls_are_taken_and_needs_no_credential() {
    with_database(async |db: Database| {
        let server = Server::start_closed(db.pool.clone(), db.token("acme").await).await;
        let told = async |service: &str| {
            check(service).send(&server).await.message::<HealthCheckResponse>().status()
        };
        assert_eq!(told("").await, ServingStatus::NotServing);
        server.api.open();
        assert_eq!((told("").await, told(SERVICE).await), (ServingStatus::Serving, ServingStatus::Serving));
        check("other").send(&server).await.expect_refusal(Code::NotFound, "NOT_FOUND");
        // Anyone may send it, so little is read.
        let long = check(&"x".repeat(300)).send(&server).await;
        long.expect_refusal(Code::ResourceExhausted, "CONTENT_TOO_LARGE");
        let watch = Call::at("/grpc.health.v1.Health/Watch", &HealthCheckRequest::default());
        watch.send(&server).await.expect_refusal(Code::Unauthenticated, "UNAUTHENTICATED");
        let watch = watch.with("authorization", format!("Bearer {}", server.token));
        watch.send(&server).await.expect_refusal(Code::Unimplemented, "NOT_FOUND");
    })
    .await;
}

fn ask(what: MessageRequest) -> ServerReflectionRequest {
    ServerReflectionRequest { host: String::new(), message_request: Some(what) }
}

/// Opens a stream.
async fn reflection(
    server: &Server,
    token: Option<&str>,
    asked: impl Stream<Item = ServerReflectionRequest> + Send + 'static,
) -> Result<Streaming<ServerReflectionResponse>, Status> {
    let address = format!("http://{}", server.address);
    let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
    let mut request = tonic::Request::new(asked);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    Ok(ServerReflectionClient::new(channel).server_reflection_info(request).await?.into_inner())
}

/// Asks on a stream of its own.
async fn reflect(
    server: &Server,
    token: Option<&str>,
    what: MessageRequest,
) -> Result<MessageResponse, Status> {
    let mut answers = reflection(server, token, stream::iter([ask(what)])).await?;
    Ok(answers.message().await?.unwrap().message_response.unwrap())
}

#[tokio::test]
async fn reflection_describes_the_services_to_whoever_has_a_credential() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let list = MessageRequest::ListServices(String::new());
        let refused = reflect(&server, None, list.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let MessageResponse::ListServicesResponse(listed) =
            reflect(&server, Some(&server.token), list).await.unwrap()
        else {
            panic!("another answer");
        };
        let mut names: Vec<_> = listed.service.into_iter().map(|service| service.name).collect();
        names.sort();
        assert_eq!(names, ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", SERVICE]);

        let symbol = MessageRequest::FileContainingSymbol(SERVICE.to_owned());
        let MessageResponse::FileDescriptorResponse(file) =
            reflect(&server, Some(&server.token), symbol).await.unwrap()
        else {
            panic!("another answer");
        };
        let told = FileDescriptorProto::decode(file.file_descriptor_proto[0].as_slice()).unwrap();
        let all = FileDescriptorSet::decode(semel_proto::API_DESCRIPTORS).unwrap();
        assert!(all.file.contains(&told), "{}", told.name());
    })
    .await;
}

#[tokio::test]
async fn what_is_no_call_is_unimplemented_and_never_a_problem_document() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let token = format!("Bearer {}", server.token);
        for path in [
            "/semel.payments.v1.Payments/DeleteOrder",
            "/semel.payments.v1.Payments",
            "/semel.payments.v2.Payments/CreateOrder",
            // A route of HTTP.
            "/v1/orders",
            "/",
        ] {
            let call =
                Call::at(path, &order_of(1)).with("authorization", &token).with("idempotency-key", "k");
            let details = call.send(&server).await.expect_refusal(Code::Unimplemented, "NOT_FOUND");
            assert!(details.retry_info().is_none(), "{path}");
        }
        // Without a provider there are no payments.
        payment(&server, "k", 1).send(&server).await.expect_refusal(Code::Unimplemented, "NOT_FOUND");
        let get = Call::new(&server, "GetPayment", &v1::GetPaymentRequest::default());
        get.send(&server).await.expect_refusal(Code::Unimplemented, "NOT_FOUND");
        assert_eq!(db.rows().await, (0, 0, 0));
    })
    .await;
}

#[tokio::test]
async fn a_call_without_the_media_type_of_grpc_is_a_request_for_a_route_that_is_none() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let path = "/semel.payments.v1.Payments/CreateOrder";
        for kind in ["application/json", "application/grpc-web+proto"] {
            let ask = server.post_to(path, "{}").without("Content-Type").header("Content-Type", kind);
            ask.send(server.address).await.expect_problem(404, "not-found");
        }
        // Over HTTP/1.1 a status could not follow a message.
        let body = framed(&order_of(1).encode_to_vec());
        let ask =
            server.post_to(path, body).without("Content-Type").header("Content-Type", "application/grpc");
        let answer = ask.header("Idempotency-Key", "k").send(server.address).await;
        assert_eq!((answer.status, answer.header("grpc-status")), (200, Some("3")));
        assert_eq!(db.rows().await, (0, 0, 0));
        assert_eq!(order(&server, "k", 1).send(&server).await.status.code(), Code::Ok);
    })
    .await;
}

#[tokio::test]
async fn a_stop_does_not_wait_for_a_stream_that_stays_open() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        let list = MessageRequest::ListServices(String::new());
        let asked = stream::iter([ask(list)]).chain(stream::pending());
        let mut answers = reflection(&server, Some(&server.token), asked).await.unwrap();
        answers.message().await.unwrap().unwrap();
        assert_eq!(server.life.drain(DEADLINE).await, Drained::Finished);
        assert!(!matches!(answers.message().await, Ok(Some(_))), "the stream goes on");
    })
    .await;
}

#[tokio::test]
async fn so_many_streams_stay_open_at_a_time_and_one_that_ends_makes_room() {
    with_database(async |db: Database| {
        let server = db.serve_guarded().await;
        // Each lasts until its other end is dropped.
        let open = async || {
            let (end, ended) = oneshot::channel::<()>();
            let asked = stream::iter([ask(MessageRequest::ListServices(String::new()))]);
            let asked = asked.chain(stream::once(ended).filter_map(async |_| None));
            let answers = reflection(&server, Some(&server.token), asked).await?;
            Ok::<_, Status>((end, answers))
        };
        let mut streams = Vec::new();
        for _ in 0..32 {
            streams.push(open().await.unwrap());
        }
        let Err(refused) = open().await else { panic!("one too many") };
        let reason = refused.get_details_error_info().unwrap().reason;
        assert_eq!((refused.code(), reason.as_str()), (Code::Unavailable, "TEMPORARILY_UNAVAILABLE"));
        // They take no place among the requests.
        assert_eq!(order(&server, "k", 1).send(&server).await.status.code(), Code::Ok);
        streams.pop();
        until("the place of a stream that ended", async || open().await.ok()).await;
        // Those that are open go on.
        let first = streams[0].1.message().await.unwrap().unwrap();
        assert!(
            matches!(first.message_response, Some(MessageResponse::ListServicesResponse(_))),
            "{first:?}"
        );
    })
    .await;
}
