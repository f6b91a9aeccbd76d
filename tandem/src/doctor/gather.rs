//! Looks at the machine: asks a node program what it finds, and reads the system's files. Judges nothing; what cannot
//! be read is absent. The only file of the command that touches anything outside of the process.
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::statvfs::statvfs;
use tokio::process::Command;
use tokio::time::timeout;

use super::facts::{Facts, Found, GpuLink, MemoryLock, Model, NodeFacts};
use crate::compose::topology::Topology;
use crate::config::doctor::Doctor;

/// A driver may take seconds to wake its cards.
const PATIENCE: Duration = Duration::from_secs(60);
/// Both nodes find the same.
const NODE_PROGRAM: &str = "tandem-decode-node";

/// All of it.
pub async fn machine(config: &Doctor) -> Facts {
    let (node, gpu_links) = tokio::join!(node(config.ucx_lib_dir.as_deref()), gpu_links());
    Facts {
        node,
        nvidia_module: read("/proc/driver/nvidia/version").as_deref().and_then(module_version),
        gpu_links,
        rdma_devices: names("/sys/class/infiniband"),
        gdrcopy: Path::new("/dev/gdrdrv").exists(),
        transparent_huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled").as_deref().and_then(chosen),
        memlock: read("/proc/self/limits").as_deref().map_or(MemoryLock::Unknown, memory_lock),
        shared_memory_bytes: statvfs("/dev/shm").ok().map(|shm| shm.blocks_available() * shm.fragment_size()),
        model: Model { path: config.model.clone(), exists: config.model.exists() },
    }
}

/// What a node finds here, by asking the program that stands beside this one.
pub async fn node(ucx_lib_dir: Option<&Path>) -> Found<NodeFacts> {
    ask(ucx_lib_dir).await.map_or_else(|missing| Found::Missing { missing }, Found::There)
}

async fn ask(ucx_lib_dir: Option<&Path>) -> Result<NodeFacts, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let program = own.with_file_name(NODE_PROGRAM);
    let mut command = Command::new(&program);
    command.arg("facts").stdin(Stdio::null()).kill_on_drop(true);
    if let Some(dir) = ucx_lib_dir {
        command.arg("--ucx-lib-dir").arg(dir);
    }
    // What it cannot open is the answer, not an error to print.
    command.env("UCX_LOG_LEVEL", "fatal");
    let output = timeout(PATIENCE, command.output())
        .await
        .map_err(|_| format!("{NODE_PROGRAM} found out nothing within {} s", PATIENCE.as_secs()))?
        .map_err(|error| format!("{} cannot be started: {error}", program.display()))?;
    let last = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().lines().last().unwrap_or_default().to_owned();
    if !output.status.success() {
        return Err(format!("{NODE_PROGRAM} ended while it looked ({}): {}", output.status, last(&output.stderr)));
    }
    // A library may have printed before it.
    serde_json::from_str(&last(&output.stdout))
        .map_err(|error| format!("{NODE_PROGRAM} is of another version: {error}"))
}

/// Of all pairs; none where `nvidia-smi` is not there.
async fn gpu_links() -> Vec<GpuLink> {
    let printed = timeout(PATIENCE, Command::new("nvidia-smi").args(["topo", "-m"]).kill_on_drop(true).output()).await;
    let Ok(Ok(output)) = printed else { return Vec::new() };
    let Ok(topology) = Topology::parse(&String::from_utf8_lossy(&output.stdout)) else { return Vec::new() };
    let links = topology.links().filter(|((one, other), _)| one < other);
    links.map(|(between, link)| GpuLink { between, link: link.to_owned() }).collect()
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn names(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed …": the first word that is a version.
fn module_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// "always [madvise] never": the word in brackets.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// The soft limit, which a process has without asking for more.
fn memory_lock(limits: &str) -> MemoryLock {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    match line.and_then(|line| line.split_whitespace().next()) {
        Some("unlimited") => MemoryLock::Unlimited,
        Some(bytes) => bytes.parse().map_or(MemoryLock::Unknown, MemoryLock::Bytes),
        None => MemoryLock::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_files_are_read() {
        let module =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27 16:53:28 UTC 2025\nGCC 12\n";
        assert_eq!(module_version(module).as_deref(), Some("580.82.07"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n";
        assert_eq!(module_version(open).as_deref(), Some("580.95.05"));
        assert_eq!(module_version(""), None);
        assert_eq!(chosen("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(chosen("nothing"), None);
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         8388608  8388608  bytes\n";
        assert_eq!(memory_lock(limits), MemoryLock::Bytes(8 << 20));
        assert_eq!(memory_lock("Max locked memory  unlimited unlimited bytes"), MemoryLock::Unlimited);
        assert_eq!(memory_lock(""), MemoryLock::Unknown);
    }
}
