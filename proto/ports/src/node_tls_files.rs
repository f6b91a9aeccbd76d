//! The files of a process's certificate among those of its cluster. They are read in `node_tls.rs`.
use std::path::PathBuf;

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

impl NodeTlsFiles {
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        vec![self.cert.clone(), self.key.clone(), self.ca.clone()]
    }
}
