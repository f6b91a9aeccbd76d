//! Nodes for which there are too few cores warm up in turns. Two that warm up at once on the same core would both
//! measure steps twice as long as theirs are, and predictions of the first requests would be as far off. A node takes
//! one core for each of its threads, of those that it may run on: two nodes of one thread each warm up at the same time
//! on two cores. A file has a byte for each core of the machine. A node locks the bytes of the cores that it takes, and
//! the system releases the locks with the process. Only time depends on it: a node that cannot lock warms up at once.
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use tokio::time::{Instant, sleep};

/// Longer than small models take. A node does not wait longer for others.
pub const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The turn, until it is dropped.
pub struct WarmTurn(Option<File>);

impl WarmTurn {
    /// The file of this machine.
    pub fn file() -> PathBuf {
        std::env::temp_dir().join("tandem-warm-up.lock")
    }

    /// Waits until `wanted` of `cores` are nobody else's, at most `patience`. It holds none while it waits, so that two
    /// nodes never wait for each other.
    pub async fn take(path: &Path, cores: &BTreeSet<usize>, wanted: usize, patience: Duration) -> Self {
        let begun = Instant::now();
        loop {
            match lock_some(path, cores, wanted.min(cores.len())) {
                Some(Locked::All(file)) => return Self(Some(file)),
                Some(Locked::TooFew) if begun.elapsed() < patience => sleep(LOOK_EVERY).await,
                Some(Locked::TooFew) | None => return Self(None),
            }
        }
    }

    /// Whether no other node has its cores.
    pub fn is_alone(&self) -> bool {
        self.0.is_some()
    }
}

/// What came of one look.
enum Locked {
    /// As many cores as were wanted.
    All(File),
    /// Others have too many of them. What was locked is free again.
    TooFew,
}

/// The locks are those of an opening of its own. `None`: the file cannot be locked at all.
fn lock_some(path: &Path, cores: &BTreeSet<usize>, wanted: usize) -> Option<Locked> {
    let file = open(path)?;
    let mut locked = 0;
    for &core in cores {
        if locked == wanted {
            break;
        }
        match lock(&file, core) {
            Ok(()) => locked += 1,
            Err(Errno::EAGAIN | Errno::EACCES) => {}
            Err(_) => return None,
        }
    }
    Some(if locked == wanted { Locked::All(file) } else { Locked::TooFew })
}

/// Locks the byte of `core` for this opening of the file, see `fcntl(2)`, "Open file description locks". A byte need
/// not exist to be locked.
fn lock(file: &File, core: usize) -> Result<(), Errno> {
    let byte = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: libc::off_t::try_from(core).map_err(|_| Errno::EINVAL)?,
        l_len: 1,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&byte)).map(drop)
}

/// The folder is everybody's: a link is not followed, and what is no plain file (a FIFO that would block) is left
/// alone. Another user's file cannot be locked.
fn open(path: &Path) -> Option<File> {
    let careful = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().create(true).append(true).custom_flags(careful).open(path).ok()?;
    file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    fn path(of: &str) -> PathBuf {
        std::env::temp_dir().join(format!("tandem-turn-{of}-{}", std::process::id()))
    }

    #[tokio::test]
    async fn one_after_another_and_nobody_for_ever() {
        let path = path("wait");
        let core = BTreeSet::from([1]);
        let first = WarmTurn::take(&path, &core, 1, PATIENCE).await;
        assert!(first.is_alone());
        assert!(!WarmTurn::take(&path, &core, 1, SHORT).await.is_alone(), "it goes on without");
        let (second, ()) = tokio::join!(WarmTurn::take(&path, &core, 1, PATIENCE), async {
            sleep(SHORT).await;
            drop(first);
        });
        assert!(second.is_alone());
        std::fs::remove_file(&path).unwrap();
    }

    #[tokio::test]
    async fn only_nodes_that_share_a_core_wait_for_each_other() {
        let path = path("cores");
        let low = WarmTurn::take(&path, &BTreeSet::from([0, 1]), 2, SHORT).await;
        let high = WarmTurn::take(&path, &BTreeSet::from([2, 3]), 2, SHORT).await;
        assert!(low.is_alone() && high.is_alone());
        let across = BTreeSet::from([1, 2]);
        assert!(!WarmTurn::take(&path, &across, 2, SHORT).await.is_alone());
        drop((low, high));
        // What the one that gave up had locked is free, too.
        assert!(WarmTurn::take(&path, &BTreeSet::from([1]), 1, SHORT).await.is_alone());
        assert!(WarmTurn::take(&path, &across, 2, SHORT).await.is_alone());
        std::fs::remove_file(&path).unwrap();
    }

    #[tokio::test]
    async fn as_many_nodes_as_there_are_cores_for() {
        let path = path("many");
        let both = BTreeSet::from([0, 1]);
        let first = WarmTurn::take(&path, &both, 1, SHORT).await;
        let second = WarmTurn::take(&path, &both, 1, SHORT).await;
        assert!(first.is_alone() && second.is_alone());
        assert!(!WarmTurn::take(&path, &both, 1, SHORT).await.is_alone(), "there is no third core");
        drop(first);
        assert!(!WarmTurn::take(&path, &both, 2, SHORT).await.is_alone());
        // The one that wanted two has left none locked.
        assert!(WarmTurn::take(&path, &both, 1, SHORT).await.is_alone());
        drop(second);
        assert!(WarmTurn::take(&path, &both, 5, SHORT).await.is_alone(), "more threads than cores: all cores");
        std::fs::remove_file(&path).unwrap();
    }

    #[tokio::test]
    async fn a_strange_file_delays_nobody() {
        // A link that somebody else left there creates nothing where it leads.
        let path = path("strange");
        let elsewhere = path.with_extension("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        let core = BTreeSet::from([0]);
        assert!(!WarmTurn::take(&path, &core, 1, PATIENCE).await.is_alone() && !elsewhere.exists());
        std::fs::remove_file(&path).unwrap();
        assert!(!WarmTurn::take(Path::new("/nonexistent/turn"), &core, 1, PATIENCE).await.is_alone());
    }
}
