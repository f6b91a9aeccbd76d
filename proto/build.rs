//! Compiles the .proto files without protoc and keeps the descriptor set for gRPC reflection.
use std::{env, fs, path::PathBuf};

use prost::Message;

#[allow(clippy::disallowed_methods, reason = "cargo speaks to build scripts through the environment")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["tandem/v1/inference.proto", "tandem/v1/cluster.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?).join("tandem_descriptor.bin");
    fs::write(out, descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .codec_path("crate::codec::Codec")
        // They hold secrets: `src/secrets.rs` prints them without.
        .skip_debug(
            ["HandoffKey", "LifeSecret", "Deliver", "Reserved", "RequestSpec"].map(|of| format!("tandem.v1.{of}")),
        )
        .compile_fds(descriptors)?;
    Ok(())
}
