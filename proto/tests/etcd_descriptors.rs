//! `proto/etcd/protoc/etcd-client-VERSION.bin` is what the .proto files of the crate `etcd-client` say: this test
//! compiles them as ours are, without protoc, and compares. `TANDEM_WRITE_DESCRIPTORS=1` writes the file instead. It is
//! a test of this crate because that one cannot be built before the file is there (`proto/etcd/protoc/protoc.sh`).
use std::path::{Path, PathBuf};
use std::process::Command;

use prost::Message;
use serde_json::Value;

const CRATE: &str = "etcd-client";
const WRITE: &str = "TANDEM_WRITE_DESCRIPTORS";
/// Those that its build script names.
const FILES: [&str; 5] = [
    "etcd/api/authpb/auth.proto",
    "etcd/api/etcdserverpb/rpc.proto",
    "etcd/api/mvccpb/kv.proto",
    "etcd/server/etcdserver/api/v3election/v3electionpb/v3election.proto",
    "etcd/server/etcdserver/api/v3lock/v3lockpb/v3lock.proto",
];

#[test]
fn descriptors_are_those_of_the_locked_etcd_client() {
    let (version, sources) = package();
    let mut descriptors = protox::compile(FILES, [sources.join("proto")]).expect("files that compile");
    // Half of the bytes, and comments for code that nobody reads.
    descriptors.file.iter_mut().for_each(|file| file.source_code_info = None);
    let bytes = descriptors.encode_to_vec();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("etcd/protoc/{CRATE}-{version}.bin"));
    if std::env::var_os(WRITE).is_some_and(|value| !value.is_empty()) {
        return std::fs::write(&path, bytes).expect("a file that can be written");
    }
    let written = std::fs::read(&path).unwrap_or_default();
    assert!(written == bytes, "{} is not of that version: {WRITE}=1 writes it", path.display());
}

/// Its version, and where cargo keeps its sources.
fn package() -> (String, PathBuf) {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    // Crates of other systems need not be here.
    let system = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    cargo.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", system.as_str()]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = cargo.output().expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let package = packages.iter().find(|package| package["name"] == CRATE).expect("the crate is locked");
    let text = |key: &str| package[key].as_str().expect("a text").to_owned();
    let manifest = PathBuf::from(text("manifest_path"));
    (text("version"), manifest.parent().expect("a folder").to_owned())
}
