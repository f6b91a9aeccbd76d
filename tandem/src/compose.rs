//! `tandem compose`: writes the docker-compose file of this host, which goes behind deploy/compose/compose.yaml: how
//! many nodes there are, and which GPU or which cores each of them has.
//!
//! - [`topology`]: what `nvidia-smi` says of the GPUs' links. [`plan`]: who gets which. [`file`]: the text.
mod file;
mod plan;
pub mod topology;

use std::fs::File;
use std::io::Write;
use std::process::Command;

use anyhow::Context;
use tandem_client::terminal::{print, say};

use crate::config::compose::Compose;
use crate::cores;
use topology::Topology;

/// Plans and writes.
///
/// # Errors
/// The file cannot be written.
pub fn run(config: &Compose) -> anyhow::Result<()> {
    let mut notes = Vec::new();
    let nodes = match &config.gpus {
        Some(gpus) => {
            let topology = topology(&mut notes);
            notes.push(
                "Nodes have their GPU and compute on the CPU, unless TANDEM_DEVICE=cuda: docs/gpu.md.".to_owned(),
            );
            let nodes = plan::on_gpus(gpus, config.prefill, topology.as_ref());
            notes.extend(topology.as_ref().and_then(|topology| links(topology, &nodes)));
            nodes
        }
        None => {
            let parts = cores::split(&cores::available(), config.prefill + config.decode);
            let parts = parts.map(|parts| parts.iter().map(|cpus| cores::list(cpus)).collect());
            plan::on_cpus(parts, config.prefill, config.decode)
        }
    };
    let model = config.model.as_ref().map(|(folder, file)| (folder.as_path(), file.as_str()));
    let text = file::Written { command: &config.command, notes: &notes, nodes: &nodes, model }.text();
    let Some(path) = &config.output else { return print(&text) };
    File::create(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))?;
    say!("{}: {} nodes", path.display(), nodes.len());
    Ok(())
}

/// What this host's `nvidia-smi` prints; a note where there is none.
fn topology(notes: &mut Vec<String>) -> Option<Topology> {
    let printed = Command::new("nvidia-smi").args(["topo", "-m"]).output();
    let read = match printed {
        Ok(output) if output.status.success() => Topology::parse(&String::from_utf8_lossy(&output.stdout)),
        Ok(output) => Err(format!("nvidia-smi failed ({})", output.status)),
        Err(error) => Err(format!("nvidia-smi cannot be started ({error})")),
    };
    read.map_err(|reason| notes.push(format!("{reason}: GPUs in the order given, on all CPUs."))).ok()
}

/// The worst link that KV takes.
fn links(topology: &Topology, nodes: &[plan::Node]) -> Option<String> {
    let gpus_of = |role: &'static str| nodes.iter().filter(move |node| node.role == role).filter_map(|node| node.gpu);
    let pairs = gpus_of("prefill").flat_map(|one| gpus_of("decode").map(move |other| (one, other)));
    let (one, other) = pairs.min_by_key(|&(one, other)| topology.rank(one, other))?;
    let link = topology.link(one, other)?;
    Some(format!("The slowest link from a prefill to a decode node is that of GPUs {one} and {other}: {link}."))
}
