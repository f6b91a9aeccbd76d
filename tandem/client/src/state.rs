//! The small file by which `tandem up` tells the other commands where the cluster is, and the lock beside it that gives
//! the file to one `tandem up` at a time. Knows no processes.
use std::fs::{self, File, TryLockError};
use std::io::Write;
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
    /// URL of the live page; empty in files of earlier versions.
    #[serde(default)]
    pub page: String,
    /// Process id of `tandem up`.
    pub pid: u32,
    /// Its children by name.
    pub processes: Vec<(String, u32)>,
    /// Directory of the logs.
    pub logs: PathBuf,
    /// File of the secret by which nodes join; empty in files of earlier versions.
    #[serde(default)]
    pub join_token_file: PathBuf,
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

/// The right to write a state file. Another process gets it when this one drops it or ends, in whatever way: the kernel
/// keeps it with the open lock file, and children do not inherit that.
pub struct Claim {
    state: PathBuf,
    lock: PathBuf,
    /// Locked for as long as it is open.
    _file: File,
}

/// Takes the state file at `path` for this process.
///
/// # Errors
/// A running cluster has it, which the error names; the lock file beside it cannot be made or locked.
pub fn claim(path: &Path) -> anyhow::Result<Claim> {
    make_directory_of(path)?;
    // Not the state file itself, which is replaced at every write.
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    let lock = PathBuf::from(lock);
    let cannot = || format!("cannot lock {}: choose another state file with --state FILE", lock.display());
    loop {
        let open = fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&lock);
        let mut file = open.with_context(cannot)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => anyhow::bail!(taken(path, &lock)),
            Err(TryLockError::Error(error)) => return Err(error).with_context(cannot),
        }
        // Its last owner may have removed it between our opening and our lock: then it locks nothing.
        if is_at(&file, &lock)? {
            file.set_len(0).with_context(cannot)?;
            // For people alone: a full disk is no reason not to start.
            let _ = writeln!(file, "{}", std::process::id());
            return Ok(Claim { state: path.to_owned(), lock, _file: file });
        }
    }
}

/// Whose cluster it is: the process id is in the lock file from the start on, the address in the state file once it is
/// ready.
fn taken(path: &Path, lock: &Path) -> String {
    let pid = fs::read_to_string(lock).unwrap_or_default();
    let pid = if pid.trim().is_empty() { "unknown" } else { pid.trim() };
    let address = load(path).map(|state| format!(", {}", state.http)).unwrap_or_default();
    format!("a cluster runs already, pid {pid}{address}, state file {}; --state FILE for another", path.display())
}

/// Whether `path` still names the open file.
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    let open = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (open.dev(), open.ino())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl Claim {
    /// Writes the state until the result is dropped.
    pub fn publish(&self, state: &State) -> anyhow::Result<Published> {
        write(&self.state, state)?;
        Ok(Published { path: self.state.clone(), pid: state.pid })
    }
}

impl Drop for Claim {
    /// The file goes before the lock, which ends with the open file.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.lock);
    }
}

/// The published state; removed on drop, if it is still this process's.
pub struct Published {
    path: PathBuf,
    pid: u32,
}

/// In one step: a reader sees the old file or the new one.
pub fn write(path: &Path, state: &State) -> anyhow::Result<()> {
    make_directory_of(path)?;
    let partial = path.with_extension(format!("{}.partial", state.pid));
    let replace = || -> std::io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
        serde_json::to_writer_pretty(&mut file, state)?;
        fs::rename(&partial, path)
    };
    replace().with_context(|| {
        let _ = fs::remove_file(&partial);
        format!("cannot write {}", path.display())
    })
}

fn make_directory_of(path: &Path) -> anyhow::Result<()> {
    let dir = path.parent().context("the state file has no directory")?;
    // A bare file name lies here.
    if dir.as_os_str().is_empty() {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.with_context(|| format!("cannot make {}", dir.display()))
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
            page: "http://a".into(),
            pid,
            processes: vec![("router".into(), 7)],
            logs: "/l".into(),
            join_token_file: "/t".into(),
        }
    }

    #[test]
    fn what_is_published_is_read_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/cluster.json");
        let claim = claim(&path).unwrap();
        let published = claim.publish(&state(1)).unwrap();
        assert_eq!(load(&path).unwrap(), state(1));
        drop(published);
        assert!(load(&path).unwrap_err().to_string().contains("tandem up"));
        drop(claim);
        assert_eq!(fs::read_dir(dir.path().join("deep")).unwrap().count(), 0, "the lock file is left behind");
    }

    #[test]
    fn a_state_file_of_another_process_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.json");
        let claim = claim(&path).unwrap();
        let old = claim.publish(&state(1)).unwrap();
        write(&path, &state(2)).unwrap();
        drop(old);
        assert_eq!(load(&path).unwrap().pid, 2);
    }

    #[test]
    fn a_state_file_has_one_owner_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.json");
        let first = claim(&path).unwrap();
        let refusal = || claim(&path).err().unwrap().to_string();
        let pid = std::process::id();
        assert!(refusal().contains(&format!("a cluster runs already, pid {pid}, state file")), "{}", refusal());
        let _published = first.publish(&state(1)).unwrap();
        assert!(refusal().contains(&format!("pid {pid}, http://a, ")), "{}", refusal());
        assert!(claim(&dir.path().join("other.json")).is_ok());
        drop(first);
        assert!(claim(&path).is_ok());
    }

    #[test]
    fn a_lock_file_that_nobody_holds_is_no_claim() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.json");
        // As a `kill -9` leaves both.
        write(&path, &state(1)).unwrap();
        fs::write(dir.path().join("cluster.json.lock"), "1\n").unwrap();
        let claim = claim(&path).unwrap();
        let pid = fs::read_to_string(dir.path().join("cluster.json.lock")).unwrap();
        assert_eq!(pid.trim(), std::process::id().to_string());
        drop(claim);
    }
}
