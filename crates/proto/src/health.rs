//! The gRPC health checking protocol.

/// Version 1 of the service.
#[expect(
    clippy::pedantic,
    unused_qualifications,
    reason = "generated: what matters to a reader stands in proto/grpc/health/v1"
)]
pub mod v1 {
    tonic::include_proto!("grpc.health.v1");
}
