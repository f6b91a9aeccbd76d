//! The files of a certificate, and which of them were seen last: whether one of them is another one now. Secrets are
//! replaced at any time, and nobody sends a signal (Kubernetes, cert-manager, SPIFFE's helper).
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where they are, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTlsFiles {
    /// This process's certificate, then those of the authorities between it and the root. It is for servers and for
    /// clients.
    pub cert: PathBuf,
    /// Its private key: PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
    /// The authorities: of this certificate, and of those that are taken.
    pub ca: PathBuf,
    /// Certificates without a name are taken, too, as anybody's.
    pub any_name: bool,
}

/// A file as it was looked at; `None`: it is not there.
type Stamp = Option<(u64, i64, i64, u64)>;

/// The three of them, and what they were good for.
#[derive(Debug)]
pub(crate) struct Seen {
    stamps: [Stamp; 3],
    error: Option<String>,
}

impl Seen {
    /// Files that are about to be read.
    pub fn of(files: &NodeTlsFiles) -> Self {
        Self { stamps: stamps(files), error: None }
    }

    /// Looks again: whether they are to be read.
    pub fn look(&mut self, files: &NodeTlsFiles) -> bool {
        let now = stamps(files);
        std::mem::replace(&mut self.stamps, now) != now || self.error.is_some()
    }

    /// They were read, with this error if with any; whether that is to be told.
    pub fn is_news(&mut self, error: Option<&str>) -> bool {
        let news = error.is_none() || self.error.as_deref() != error;
        self.error = error.map(str::to_owned);
        news
    }
}

fn stamps(files: &NodeTlsFiles) -> [Stamp; 3] {
    [&files.cert, &files.key, &files.ca].map(|path| stamp(path))
}

fn stamp(path: &Path) -> Stamp {
    // Links are followed: Kubernetes replaces the one that all files of a secret lie behind.
    let file = std::fs::metadata(path).ok()?;
    Some((file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
}
