//! The small file by which `tandem up` tells the other commands where the cluster is. Knows no processes.
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// A running cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// URL of the HTTP API.
    pub http: String,
    /// URL of the gRPC API.
    pub grpc: String,
    /// Process id of `tandem up`.
    pub pid: u32,
    /// Its children by name.
    pub processes: Vec<(String, u32)>,
    /// Directory of the logs.
    pub logs: PathBuf,
}

/// The state file of `runtime_dir`.
pub fn default_path(runtime_dir: PathBuf) -> PathBuf {
    // A directory that is already ours alone needs no second level.
    let ours = runtime_dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("tandem-"));
    if ours { runtime_dir.join("cluster.json") } else { runtime_dir.join("tandem").join("cluster.json") }
}

/// A directory below the system's temporary one that only this user can write to; made when missing.
pub fn private_temp_dir() -> anyhow::Result<PathBuf> {
    let uid = nix::unistd::getuid();
    let dir = std::env::temp_dir().join(format!("tandem-{uid}"));
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.with_context(|| format!("cannot make {}", dir.display()))?;
    // Anybody can make this name in /tmp first: what is not ours is not used.
    let found = fs::symlink_metadata(&dir)?;
    if !found.is_dir() || found.uid() != uid.as_raw() {
        anyhow::bail!("{} belongs to someone else: set XDG_RUNTIME_DIR or --state and --log-dir", dir.display());
    }
    Ok(dir)
}

/// Reads the state of the running cluster.
pub fn load(path: &Path) -> anyhow::Result<State> {
    let text = fs::read_to_string(path).with_context(|| {
        format!("no running cluster ({}): start one with `tandem up`, or give --url", path.display())
    })?;
    serde_json::from_str(&text).with_context(|| format!("{} is not a state file of `tandem up`", path.display()))
}

/// The published state; removed on drop, unless another `tandem up` has replaced it meanwhile.
pub struct Published {
    path: PathBuf,
    pid: u32,
}

/// Writes the state until the result is dropped.
pub fn publish(path: &Path, state: &State) -> anyhow::Result<Published> {
    write(path, state)?;
    Ok(Published { path: path.to_owned(), pid: state.pid })
}

/// In one step: a reader sees the old file or the new one.
pub fn write(path: &Path, state: &State) -> anyhow::Result<()> {
    let dir = path.parent().context("the state file has no directory")?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let partial = path.with_extension(format!("{}.partial", state.pid));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
    serde_json::to_writer_pretty(&mut file, state)?;
    fs::rename(&partial, path).with_context(|| format!("cannot write {}", path.display()))
}

impl Drop for Published {
    fn drop(&mut self) {
        if load(&self.path).is_ok_and(|state| state.pid == self.pid) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(pid: u32) -> State {
        State {
            http: "http://a".into(),
            grpc: "http://b".into(),
            pid,
            processes: vec![("router".into(), 7)],
            logs: "/l".into(),
        }
    }

    #[test]
    fn what_is_published_is_read_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/cluster.json");
        let published = publish(&path, &state(1)).unwrap();
        assert_eq!(load(&path).unwrap(), state(1));
        drop(published);
        assert!(load(&path).unwrap_err().to_string().contains("tandem up"));
    }

    #[test]
    fn a_newer_cluster_keeps_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.json");
        let old = publish(&path, &state(1)).unwrap();
        let _new = publish(&path, &state(2)).unwrap();
        drop(old);
        assert_eq!(load(&path).unwrap().pid, 2);
    }
}
