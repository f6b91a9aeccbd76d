//! The files of a certificate or a token while a process runs: whether one of them is another one now, and reading them
//! again. Secrets are replaced at any time, and nobody sends a signal (Kubernetes, cert-manager, SPIFFE's helper).
use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Between two looks at the files.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// A file as it was looked at; `None`: it is not there.
type Stamp = Option<(u64, i64, i64, u64)>;

/// Files that are read again.
#[derive(Debug)]
pub(crate) struct Followed {
    /// What is in them, for people.
    what: &'static str,
    paths: Vec<PathBuf>,
    seen: Mutex<Seen>,
}

/// As they were seen last, and what they were good for.
#[derive(Debug)]
struct Seen {
    stamps: Vec<Stamp>,
    error: Option<String>,
}

impl Followed {
    /// Files that are about to be read.
    pub fn new(what: &'static str, paths: Vec<PathBuf>) -> Self {
        let seen = Seen { stamps: stamps(&paths), error: None };
        Self { what, paths, seen: Mutex::new(seen) }
    }

    /// Reads them, as SIGHUP asks for, and logs how that went.
    pub fn read_again<E: Display>(&self, read: impl FnOnce() -> Result<(), E>) {
        self.look();
        self.log("at SIGHUP", read());
    }

    /// The same, if one of them is another one than when they were looked at last, or could not be used then.
    pub fn read_changed<E: Display>(&self, read: impl FnOnce() -> Result<(), E>) {
        if self.look() {
            self.log("changed files", read());
        }
    }

    /// Whether they are to be read.
    fn look(&self) -> bool {
        let now = stamps(&self.paths);
        let mut seen = self.seen();
        let changed = seen.stamps != now || seen.error.is_some();
        seen.stamps = now;
        changed
    }

    fn log<E: Display>(&self, why: &str, read: Result<(), E>) {
        let error = read.err().map(|error| error.to_string());
        // Files that stay wrong are in the log once.
        let is_news = error.is_none() || self.seen().error != error;
        self.seen().error.clone_from(&error);
        match error {
            None => tracing::info!("{} read again ({why}), for what is new", self.what),
            Some(error) if is_news => tracing::error!(error, "the old {} stay", self.what),
            Some(_) => {}
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks from time to time. Ends never.
pub(crate) async fn at_intervals(look: impl Fn() + Clone + Send + 'static) {
    let mut ticks = tokio::time::interval(LOOK_INTERVAL);
    loop {
        ticks.tick().await;
        // Files may lie on slow disks, and a panic there is in the log.
        let _ = tokio::task::spawn_blocking(look.clone()).await;
    }
}

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    paths.iter().map(|path| stamp(path)).collect()
}

fn stamp(path: &Path) -> Stamp {
    // Links are followed: Kubernetes replaces the one that all files of a secret lie behind.
    let file = std::fs::metadata(path).ok()?;
    Some((file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
}
