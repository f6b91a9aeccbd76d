//! The command line of `tandem compose`, resolved: which nodes, on which GPUs, with which model.
//!
//! Next: [`crate::compose`], which writes the file.
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;

/// Ports of nodes have two digits, and every division of the GPUs is tried.
const MOST_NODES: usize = 16;

/// A compose file for this host.
pub struct Compose {
    /// GPUs by their numbers, one for each node; `None`: nodes compute on CPUs.
    pub gpus: Option<Vec<usize>>,
    /// Prefill nodes.
    pub prefill: usize,
    /// Decode nodes.
    pub decode: usize,
    /// Absolute folder and name of the model; `None`: that of compose.yaml.
    pub model: Option<(PathBuf, String)>,
    /// Where to write; `None`: standard output.
    pub output: Option<PathBuf>,
    /// The command in words, for the file's head.
    pub command: String,
}

/// Write a docker-compose file for the GPUs or the cores of this host; it goes behind deploy/compose/compose.yaml
#[derive(Args)]
pub struct ComposeArgs {
    /// GPUs, one for each node, such as 0-3 or 0,2 [default: none, and each node gets its part of the CPUs]
    #[arg(long, value_name = "LIST")]
    gpus: Option<String>,
    /// Prefill nodes
    #[arg(long, value_name = "N", default_value_t = 1)]
    prefill: usize,
    /// Decode nodes [default: one, or as many as GPUs are left]
    #[arg(long, value_name = "N")]
    decode: Option<usize>,
    /// GGUF file or safetensors directory on this host [default: the one that compose.yaml fetches]
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Where to write [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl ComposeArgs {
    /// # Errors
    /// A number of nodes that cannot be, GPUs that do not fit it, or no such model.
    pub fn resolve(self) -> anyhow::Result<Compose> {
        let gpus = self.gpus.as_deref().map(list).transpose().context("--gpus")?;
        let left = gpus.as_ref().map_or(1, |gpus| gpus.len().saturating_sub(self.prefill));
        let decode = self.decode.unwrap_or(left);
        let nodes = self.prefill.saturating_add(decode);
        ensure!(self.prefill > 0 && decode > 0, "a cluster wants a prefill and a decode node at least");
        ensure!(nodes <= MOST_NODES, "{nodes} nodes: one host has {MOST_NODES} at most");
        if let Some(gpus) = &gpus {
            let (prefill, count) = (self.prefill, gpus.len());
            ensure!(
                count == nodes,
                "{prefill} prefill and {decode} decode nodes want {nodes} GPUs, and --gpus names {count}"
            );
        }
        let command = match &self.gpus {
            Some(gpus) => format!("tandem compose --gpus {gpus} --prefill {} --decode {decode}", self.prefill),
            None => format!("tandem compose --prefill {} --decode {decode}", self.prefill),
        };
        let model = self.model.as_deref().map(model).transpose()?;
        Ok(Compose { gpus, prefill: self.prefill, decode, model, output: self.output, command })
    }
}

/// "0-3,6": each once.
fn list(text: &str) -> anyhow::Result<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number =
            |text: &str| text.trim().parse::<usize>().with_context(|| format!("{part:?} is no number or range"));
        let (first, last) = (number(first)?, number(last)?);
        ensure!(first <= last && last - first < MOST_NODES, "{part:?} is no range of {MOST_NODES} at most");
        for number in first..=last {
            ensure!(!numbers.contains(&number), "{number} stands twice in {text:?}");
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// A container sees the folder alone.
fn model(path: &Path) -> anyhow::Result<(PathBuf, String)> {
    let path = path.canonicalize().with_context(|| format!("--model {}", path.display()))?;
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(folder), Some(name)) => Ok((folder.to_owned(), name.to_owned())),
        _ => bail!("--model {}: neither a file nor a folder with a name in UTF-8", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(gpus: Option<&str>, prefill: usize, decode: Option<usize>) -> anyhow::Result<Compose> {
        let gpus = gpus.map(str::to_owned);
        ComposeArgs { gpus, prefill, decode, model: None, output: None }.resolve()
    }

    #[test]
    fn lists_are_numbers_and_ranges() {
        assert_eq!(list("0-3").unwrap(), [0, 1, 2, 3]);
        assert_eq!(list("6, 0-1").unwrap(), [6, 0, 1]);
        for wrong in ["", "a", "3-1", "0,0", "0-1,1", "-1", "0-99999999999", "1-"] {
            assert!(list(wrong).is_err(), "{wrong:?} was taken");
        }
    }

    #[test]
    fn every_node_has_a_gpu_and_every_gpu_a_node() {
        assert_eq!(resolved(Some("0-3"), 1, Some(3)).unwrap().gpus, Some(vec![0, 1, 2, 3]));
        assert_eq!(resolved(Some("0-3"), 1, None).unwrap().decode, 3);
        for (gpus, prefill, decode) in [("0-3", 1, Some(2)), ("0", 1, None), ("0-1", 0, Some(2)), ("0-1", 2, None)] {
            assert!(resolved(Some(gpus), prefill, decode).is_err(), "{gpus} {prefill} {decode:?}");
        }
        assert!(resolved(None, 9, Some(9)).is_err());
        assert!(resolved(None, usize::MAX, Some(1)).is_err());
    }
}
