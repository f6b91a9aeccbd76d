//! TLS of a port for clients: its certificate, its key, and whose certificates clients must show. rustls over ring, TLS
//! 1.2 and 1.3. The files are read again when they change: what they hold then is for connections that come later.
//! Among the cluster's own processes it is `node_tls.rs`.
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};

use crate::expiry::not_after;
use crate::followed::{Followed, at_intervals};
use crate::pem::{TlsError, certificates, private_key, roots};

/// Where certificate and key are, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The server's certificate, then those of the authorities between it and the root.
    pub cert: PathBuf,
    /// Its private key: PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
    /// Clients must show a certificate that one of these signed (mTLS); `None`: anybody may connect.
    pub client_ca: Option<PathBuf>,
}

impl TlsFiles {
    fn paths(&self) -> Vec<PathBuf> {
        [&self.cert, &self.key].into_iter().chain(&self.client_ca).cloned().collect()
    }
}

/// What every connection of a port is secured with. Clones are one: what is read again is for all of them.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<Shared>,
}

struct Shared {
    files: TlsFiles,
    current: RwLock<Current>,
    followed: Followed,
}

/// What the files held when they were read last.
struct Current {
    config: ServerConfig,
    not_after: Option<u64>,
}

impl fmt::Debug for Tls {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`]: a file is missing or holds something else, or the key is another certificate's.
    pub fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let followed = Followed::new("certificates", files.paths());
        let current = RwLock::new(Current::read(files)?);
        Ok(Self { shared: Arc::new(Shared { files: files.clone(), current, followed }) })
    }

    /// Reads the files again, for connections that come from now on. Sessions of earlier ones are not resumed.
    ///
    /// # Errors
    /// As [`Self::read`]; what was read before stays.
    pub fn reload(&self) -> Result<(), TlsError> {
        let next = Current::read(&self.shared.files)?;
        *self.shared.current.write().unwrap_or_else(PoisonError::into_inner) = next;
        Ok(())
    }

    /// Reads the files again, as SIGHUP asks for, and logs how that went.
    pub fn read_again(&self) {
        self.shared.followed.read_again(|| self.reload());
    }

    /// The same, if one of the files is another one than when they were looked at last, or could not be used then.
    pub fn read_changed(&self) {
        self.shared.followed.read_changed(|| self.reload());
    }

    /// Looks at the files from time to time, and reads those that changed. Ends never.
    pub async fn follow_files(self) {
        at_intervals(move || self.read_changed()).await;
    }

    /// The Unix second at which its certificate ends, or one of the authorities' behind it.
    pub(crate) fn not_after(&self) -> Option<u64> {
        self.shared.current.read().unwrap_or_else(PoisonError::into_inner).not_after
    }

    /// Whether clients have certificates.
    pub(crate) fn asks_clients(&self) -> bool {
        self.shared.files.client_ca.is_some()
    }

    /// For a connection that speaks one of `protocols` (`h2`, `http/1.1`), the first that the client knows. A copy
    /// costs some counters, a handshake a thousand times that.
    pub(crate) fn speaking(&self, protocols: &[&str]) -> Arc<ServerConfig> {
        let mut config = self.shared.current.read().unwrap_or_else(PoisonError::into_inner).config.clone();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

impl Current {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let certs = certificates(&files.cert)?;
        let not_after = not_after(&certs);
        Ok(Self { config: config(files, certs)?, not_after })
    }
}

fn config(files: &TlsFiles, certs: Vec<CertificateDer<'static>>) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let key = private_key(&files.key)?;
    let pair = |error: rustls::Error| TlsError::Pair {
        cert: files.cert.clone(),
        key: files.key.clone(),
        why: error.to_string(),
    };
    let builder = ServerConfig::builder_with_provider(provider.clone());
    let builder = builder.with_safe_default_protocol_versions().map_err(pair)?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let unusable = |why| TlsError::Unusable { path: ca.clone(), why };
            builder.with_client_cert_verifier(verifier(Arc::new(roots(ca)?), provider).map_err(unusable)?)
        }
    };
    builder.with_single_cert(certs, key).map_err(pair)
}

/// Takes clients whose certificates one of these signed.
pub(crate) fn verifier(
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
    verifier.build().map_err(|error| error.to_string())
}
