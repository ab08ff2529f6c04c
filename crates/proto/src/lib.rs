//! The gRPC services that Semel offers and uses, generated from `proto/`; what each message means stands there.
//!
//! Beside the generated code there is only what both sides of a service need to agree on its refusals.

pub mod health;
pub mod payments;
pub mod provider;

/// The services of the API and all that they need, as an encoded `google.protobuf.FileDescriptorSet`.
pub const API_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/api.descriptors"));
