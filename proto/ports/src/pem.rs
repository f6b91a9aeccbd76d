//! Files of certificates and keys, all in PEM, and what can be wrong with them.
use std::io;
use std::path::{Path, PathBuf};

use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, RootCertStore};

/// Bytes of a PEM file at most.
const MAX_PEM_BYTES: u64 = 1 << 20;

/// Why there is no TLS with these files. Each names the file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file is not there, not readable, or much too large.
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The file holds no PEM of the kind that is needed.
    #[error("{}: no {what} in PEM", path.display())]
    Empty {
        /// Which.
        path: PathBuf,
        /// "certificate", "private key".
        what: &'static str,
    },
    /// The file holds PEM that cannot be used.
    #[error("{}: {why}", path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The key is of another certificate.
    #[error("{} and {} do not belong together: {why}", cert.display(), key.display())]
    Pair {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What rustls says.
        why: String,
    },
}

/// The authorities of a file.
///
/// # Errors
/// [`TlsError`]: there is none, or one cannot be used.
pub fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for root in certificates(path)? {
        let unusable = |error: rustls::Error| TlsError::Unusable { path: path.to_owned(), why: error.to_string() };
        roots.add(root).map_err(unusable)?;
    }
    Ok(roots)
}

/// The first private key of a file: PKCS#8, PKCS#1 or SEC1.
///
/// # Errors
/// [`TlsError`]: there is none.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let what = "private key";
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|_| TlsError::Empty { path: path.to_owned(), what })
}

/// The certificates of a file, one at least.
///
/// # Errors
/// [`TlsError`]: there is none, or one cannot be used.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem = read(path)?;
    let certs: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certs = certs.map_err(|error| TlsError::Unusable { path: path.to_owned(), why: error.to_string() })?;
    if certs.is_empty() {
        return Err(TlsError::Empty { path: path.to_owned(), what: "certificate" });
    }
    Ok(certs)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let bytes = std::fs::metadata(path).and_then(|file| match file.len() {
        0..=MAX_PEM_BYTES => std::fs::read(path),
        len => Err(io::Error::other(format!("{len} bytes are no PEM file"))),
    });
    bytes.map_err(|error| TlsError::Unreadable { path: path.to_owned(), error })
}
