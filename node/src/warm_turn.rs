//! Nodes of one machine warm up one after another. Two that warm up at once on the same cores would both measure steps
//! twice as long as theirs are, and predictions of the first requests would be as far off. A file that one of them
//! locks says whose turn it is; the system gives the lock back with the process. Nothing but time hangs on it: who
//! cannot lock goes on.
use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Longer than small models take. A node does not wait longer for another.
pub const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The turn, until it is dropped.
pub struct WarmTurn(Option<File>);

impl WarmTurn {
    /// The file of this machine.
    pub fn file() -> PathBuf {
        std::env::temp_dir().join("tandem-warm-up.lock")
    }

    /// Waits for the turn, at most `patience`.
    pub async fn take(path: &Path, patience: Duration) -> Self {
        let Some(file) = open(path) else { return Self(None) };
        let begun = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Self(Some(file)),
                Err(TryLockError::WouldBlock) if begun.elapsed() < patience => sleep(LOOK_EVERY).await,
                Err(_) => return Self(None),
            }
        }
    }

    /// Whether nobody else has it.
    pub fn is_alone(&self) -> bool {
        self.0.is_some()
    }
}

/// The folder is everybody's: a link is not followed, and what is no plain file (a FIFO that would block) is left
/// alone. Another user's file can be locked if it can be read.
fn open(path: &Path) -> Option<File> {
    let careful = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let writable = OpenOptions::new().create(true).append(true).custom_flags(careful).open(path);
    let file = writable.or_else(|_| OpenOptions::new().read(true).custom_flags(careful).open(path)).ok()?;
    file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_after_another_and_nobody_for_ever() {
        let path = std::env::temp_dir().join(format!("tandem-turn-{}", std::process::id()));
        let first = WarmTurn::take(&path, PATIENCE).await;
        assert!(first.is_alone());
        assert!(!WarmTurn::take(&path, Duration::from_millis(50)).await.is_alone(), "it goes on without");
        let (second, ()) = tokio::join!(WarmTurn::take(&path, PATIENCE), async {
            sleep(Duration::from_millis(50)).await;
            drop(first);
        });
        assert!(second.is_alone());
        std::fs::remove_file(&path).unwrap();
        // A link that somebody else left there creates nothing where it leads.
        let elsewhere = path.with_extension("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(!WarmTurn::take(&path, PATIENCE).await.is_alone() && !elsewhere.exists());
        std::fs::remove_file(&path).unwrap();
        assert!(!WarmTurn::take(Path::new("/nonexistent/turn"), PATIENCE).await.is_alone());
    }
}
