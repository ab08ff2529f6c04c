//! Generates the code from `proto/`, without `protoc`.

use std::error::Error;
use std::path::Path;

/// The files to generate from, relative to `proto/`.
const FILES: [&str; 2] = ["semel/provider/v1/control.proto", "semel/provider/v1/provider.proto"];
/// Messages that hold a secret; `src/` says what may be shown of them.
const SECRETIVE: [&str; 1] = [".semel.provider.v1.ChargeOrder"];

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let descriptors = protox::compile(FILES, [&root])?;
    tonic_prost_build::configure().skip_debug(SECRETIVE).compile_fds(descriptors)?;
    Ok(())
}
