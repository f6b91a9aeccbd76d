//! mTLS among the processes of one cluster: each has one certificate, with which it answers calls and makes them, and
//! the authorities that signed those of the others. They know each other by role ([`crate::peer_name`]), not by DNS
//! name: nodes come and go at addresses that no certificate foresees. rustls over ring, TLS 1.3, and no resumption,
//! which would let an old certificate in again. The files can be read again: what they hold then is for connections
//! that come later.
use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use axum::http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::server::{NoServerSessionStorage, ParsedCertificate};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig};

use crate::expiry::not_after;
use crate::followed::{Followed, at_intervals};
use crate::node_tls_files::NodeTlsFiles;
use crate::peer_name::{FORM, PeerName, PeerRole, Policy, Wanted};
use crate::pem::{TlsError, certificates, private_key, roots};
use crate::refusals::Refusals;
use crate::socket::Socket;
use crate::tls;
use crate::verify::{PeerVerifier, describe, described, name, of_certificate};

/// What all connections speak: gRPC.
const PROTOCOL: &[u8] = b"h2";
/// What these are, in the log.
const CERTIFICATES: &str = "certificates among router and nodes";

/// A process's certificate among those of its cluster. Clones are one: what is read again is for all of them.
#[derive(Clone)]
pub struct NodeTls {
    shared: Arc<Shared>,
}

struct Shared {
    files: NodeTlsFiles,
    role: PeerRole,
    current: RwLock<Arc<Current>>,
    followed: Followed,
    refusals: Refusals,
}

/// What the files held when they were read last.
struct Current {
    name: Option<PeerName>,
    not_after: Option<u64>,
    policy: Policy,
    identity: Arc<SingleCertAndKey>,
    roots: Arc<RootCertStore>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for NodeTls {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeTls")
    }
}

impl NodeTls {
    /// Reads the files of a process of this role.
    ///
    /// # Errors
    /// [`TlsError`]: a file is missing or holds something else; the certificate has another key, is not signed by one
    /// of the authorities, is not valid now, or is another role's.
    pub fn read(files: &NodeTlsFiles, role: PeerRole) -> Result<Self, TlsError> {
        let followed = Followed::new(CERTIFICATES, files.paths());
        let current = RwLock::new(Arc::new(Current::read(files, role)?));
        let (files, refusals) = (files.clone(), Refusals::default());
        Ok(Self { shared: Arc::new(Shared { files, role, current, followed, refusals }) })
    }

    /// The node that the certificate is for, if it is for one.
    pub fn node_id(&self) -> Option<String> {
        self.current().name.as_ref()?.node_id.clone()
    }

    /// The Unix second at which its certificate ends, or one of the authorities' behind it.
    pub(crate) fn not_after(&self) -> Option<u64> {
        self.current().not_after
    }

    /// Reads the files again, for connections that come from now on.
    ///
    /// # Errors
    /// As [`Self::read`], or the certificate is of another node; what was read before stays.
    pub fn reload(&self) -> Result<(), TlsError> {
        let Shared { files, role, current, .. } = &*self.shared;
        let next = Current::read(files, *role)?;
        let node_of = |current: &Current| current.name.as_ref().and_then(|name| name.node_id.clone());
        let mut current = current.write().unwrap_or_else(PoisonError::into_inner);
        if node_of(&next) != node_of(&current) {
            let why = "it is of another node than the one before: that takes a restart".to_owned();
            return Err(TlsError::Unusable { path: files.cert.clone(), why });
        }
        *current = Arc::new(next);
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

    /// Makes a connection to whom is wanted, within TLS over `stream`. Nothing is said to another one.
    ///
    /// # Errors
    /// The other end is not whom is wanted, or the connection broke.
    pub async fn dial(&self, stream: TcpStream, wanted: Wanted) -> io::Result<TlsStream<TcpStream>> {
        let config = self.current().client(wanted).map_err(io::Error::other)?;
        // Nobody is known by this name, and it is not sent.
        let nobody = ServerName::try_from("tandem").map_err(io::Error::other)?;
        TlsConnector::from(Arc::new(config)).connect(nobody, stream).await.map_err(described)
    }

    /// The same for tonic's channels, from a URL on.
    ///
    /// # Errors
    /// As [`Self::dial`].
    pub async fn dial_url(self, url: Uri, wanted: Wanted) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
        let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
        let stream = TcpStream::connect((host, url.port_u16().unwrap_or(443))).await?;
        stream.set_nodelay(true)?;
        self.dial(stream, wanted).await.map(TokioIo::new)
    }

    /// Whether a caller with this certificate has business here.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn admit(&self, caller: &Caller) -> Result<(), String> {
        let wanted = if self.shared.role == PeerRole::Router { Wanted::AnyNode } else { Wanted::Router };
        self.is(caller, &wanted)
    }

    /// Whether this caller is whom is wanted.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn is(&self, caller: &Caller, wanted: &Wanted) -> Result<(), String> {
        self.current().policy.check(caller.name(), wanted)
    }

    /// Counts those who were not let in.
    pub(crate) fn refusals(&self) -> &Refusals {
        &self.shared.refusals
    }

    /// For a connection that is accepted now.
    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        self.current().server.clone()
    }

    /// A caller's handshake failed. One that left, or never began, is nobody's affair.
    pub(crate) fn handshake_failed(&self, socket: &Socket, error: &io::Error) -> bool {
        let Some(error) = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>()) else { return false };
        self.shared.refusals.add(socket.peer_addr(), &describe(error));
        true
    }

    fn current(&self) -> Arc<Current> {
        self.shared.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Current {
    fn read(files: &NodeTlsFiles, role: PeerRole) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let certs = certificates(&files.cert)?;
        let key = private_key(&files.key)?;
        let roots = Arc::new(roots(&files.ca)?);
        let clients = tls::verifier(roots.clone(), provider.clone())
            .map_err(|why| TlsError::Unusable { path: files.ca.clone(), why })?;
        let unusable = |why: String| TlsError::Unusable { path: files.cert.clone(), why };
        valid_now(&certs, &roots, &*clients, &provider).map_err(|error| unusable(own(&error)))?;
        let name = name(&certs[0]).map_err(unusable)?;
        is_of(role, name.as_ref(), files.any_name).map_err(unusable)?;
        let not_after = not_after(&certs);
        let identity = identity(files, certs, key, &provider)?;
        let server = server(identity.clone(), clients, provider).map_err(|error| unusable(error.to_string()))?;
        let trust_domain = name.as_ref().map(|name| name.trust_domain.clone());
        let policy = Policy { any_name: files.any_name, trust_domain };
        Ok(Self { name, not_after, policy, identity, roots, server: Arc::new(server) })
    }

    fn client(&self, wanted: Wanted) -> Result<ClientConfig, rustls::Error> {
        let provider = Arc::new(ring::default_provider());
        let verifier = PeerVerifier::new(self.roots.clone(), provider.clone(), self.policy.clone(), wanted);
        let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13])?;
        let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = builder.with_client_cert_resolver(self.identity.clone());
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        config.resumption = Resumption::disabled();
        config.enable_sni = false;
        Ok(config)
    }
}

fn server(
    identity: Arc<SingleCertAndKey>,
    clients: Arc<dyn ClientCertVerifier>,
    provider: Arc<CryptoProvider>,
) -> Result<ServerConfig, rustls::Error> {
    let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13])?;
    let mut config = builder.with_client_cert_verifier(clients).with_cert_resolver(identity);
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn identity(
    files: &NodeTlsFiles,
    certs: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    provider: &CryptoProvider,
) -> Result<Arc<SingleCertAndKey>, TlsError> {
    let pair = CertifiedKey::from_der(certs, key, provider).map_err(|error| TlsError::Pair {
        cert: files.cert.clone(),
        key: files.key.clone(),
        why: error.to_string(),
    })?;
    Ok(Arc::new(SingleCertAndKey::from(pair)))
}

/// Whether the others would take this chain now, from a server and from a client.
fn valid_now(
    certs: &[CertificateDer<'static>],
    roots: &RootCertStore,
    clients: &dyn ClientCertVerifier,
    provider: &CryptoProvider,
) -> Result<(), rustls::Error> {
    let (leaf, others) = certs.split_first().ok_or(rustls::Error::NoCertificatesPresented)?;
    let now = UnixTime::now();
    let parsed = ParsedCertificate::try_from(leaf)?;
    let algorithms = provider.signature_verification_algorithms.all;
    verify_server_cert_signed_by_trust_anchor(&parsed, roots, others, now, algorithms)?;
    clients.verify_client_cert(leaf, others, now).map(drop)
}

/// What is wrong with this process's own certificate.
fn own(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(why) => of_certificate("this certificate", why),
        error => error.to_string(),
    }
}

/// A process has a certificate of its own role.
fn is_of(role: PeerRole, name: Option<&PeerName>, any_name: bool) -> Result<(), String> {
    match name {
        Some(name) if name.role == role => Ok(()),
        Some(name) => Err(format!("this certificate is that of {name}, and this process is of role {}", role.as_str())),
        None if any_name => Ok(()),
        None => Err(format!(
            "this certificate has no URI of the form {FORM} among its alternative names; --node-tls-any-name does \
             without"
        )),
    }
}

/// Who calls over a connection, once that is known. Every call on the connection carries it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller(Arc<OnceLock<Result<Option<PeerName>, String>>>);

impl Caller {
    /// The handshake is over, and the caller's certificate was good.
    pub fn is_of(&self, certs: Option<&[CertificateDer<'_>]>) {
        // A server that asks for certificates has one.
        let name = certs.and_then(<[_]>::first).map_or_else(|| Err("there is none".to_owned()), name);
        let _ = self.0.set(name);
    }

    fn name(&self) -> Result<Option<&PeerName>, &str> {
        match self.0.get() {
            Some(Ok(name)) => Ok(name.as_ref()),
            Some(Err(why)) => Err(why),
            None => Err("there is none"),
        }
    }
}
