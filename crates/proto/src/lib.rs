//! The gRPC services that Semel offers and uses, generated from `proto/`; what each message means stands there.
//!
//! Beside the generated code there is only what both sides of a service need to agree on its refusals.

pub mod provider;
