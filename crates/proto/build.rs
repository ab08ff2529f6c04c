//! Generates the code from `proto/`, without `protoc`.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

use tonic_prost_build::FileDescriptorSet;

/// The interface of a provider, relative to `proto/`: offered by the simulator, called by the others.
const PROVIDER: [&str; 2] = ["semel/provider/v1/control.proto", "semel/provider/v1/provider.proto"];
/// The API over gRPC, which serves its messages itself.
const API: [&str; 2] = ["grpc/health/v1/health.proto", "semel/payments/v1/payments.proto"];
/// Messages that hold a secret; `src/` says what may be shown of them.
const SECRETIVE: [&str; 2] = [".semel.payments.v1.CreatePaymentRequest", ".semel.provider.v1.ChargeOrder"];

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let generate = |files: [&str; 2], with_server: bool| -> Result<FileDescriptorSet, Box<dyn Error>> {
        let descriptors = protox::compile(files, [&root])?;
        let generator = tonic_prost_build::configure().build_server(with_server).skip_debug(SECRETIVE);
        generator.compile_fds(descriptors.clone())?;
        Ok(descriptors)
    };
    generate(PROVIDER, true)?;
    let api = generate(API, false)?;
    fs::write(out.join("api.descriptors"), prost::Message::encode_to_vec(&api))?;
    Ok(())
}
