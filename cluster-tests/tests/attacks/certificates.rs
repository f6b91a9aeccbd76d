//! Processes that show the nodes' port within TLS a certificate which does not belong: one that ran out, one of another
//! authority, and none. It is the port of the router without keys. Names are held to calls (`proto/ports/tests`).
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use futures::FutureExt;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
    date_time_ymd,
};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::Attack;
use crate::sockets::PATIENCE;
use crate::target::{Seen, Target};

const ROUTER: &str = "spiffe://cluster.test/tandem/router";
const NODE: &str = "spiffe://cluster.test/tandem/decode";
/// By which a client of this file knows the router.
const HOST: &str = "router";

/// All of them.
pub fn attacks() -> Vec<Attack> {
    let seen = Seen::Open("tandem_strangers_refused_total");
    let attack = |name, run| Attack { name, door: "nodes' port, TLS", seen, run };
    vec![
        attack("an old certificate", |target| refused(target, |them| &them.old, "CertificateExpired").boxed_local()),
        attack("a certificate of another authority", |target| {
            refused(target, |them| &them.foreign, "UnknownCA").boxed_local()
        }),
        attack("no certificate", |target| refused(target, |them| &them.none, "CertificateRequired").boxed_local()),
    ]
}

/// What is shown to the port.
pub struct Certificates {
    /// A node's, as it should be.
    ours: Arc<ClientConfig>,
    old: Arc<ClientConfig>,
    foreign: Arc<ClientConfig>,
    none: Arc<ClientConfig>,
}

impl Certificates {
    /// Writes the router's own into the directory, and says with which flags it has them.
    pub fn new(dir: &Path) -> anyhow::Result<(Self, String)> {
        let (ours, theirs) = (authority("ours")?, authority("theirs")?);
        let (certificate, key) = signed(&ours, ROUTER, |_| {})?;
        let path = |name: &str| dir.join(name);
        std::fs::write(path("node-ca.pem"), ours.pem())?;
        std::fs::write(path("router.pem"), certificate)?;
        std::fs::write(path("router.key"), key)?;
        let [ca, cert, key] = ["node-ca.pem", "router.pem", "router.key"].map(|name| path(name).display().to_string());
        let these = Self {
            ours: client(&ours, Some(signed(&ours, NODE, |_| {})?))?,
            old: client(&ours, Some(signed(&ours, NODE, |params| params.not_after = date_time_ymd(2020, 1, 1))?))?,
            foreign: client(&ours, Some(signed(&theirs, NODE, |_| {})?))?,
            none: client(&ours, None)?,
        };
        Ok((these, format!("--node-tls-ca {ca} --node-tls-cert {cert} --node-tls-key {key}")))
    }
}

/// Each handshake ends with this alert, before HTTP/2 says a word.
async fn refused(
    target: &Target,
    which: fn(&Certificates) -> &Arc<ClientConfig>,
    alert: &str,
) -> anyhow::Result<String> {
    let door = target.open.ready("nodes");
    let door: SocketAddr = door.strip_prefix("https://").unwrap_or(door).parse()?;
    let welcome = shown(door, &target.certificates.ours).await?;
    ensure!(welcome.is_ok(), "a node of the cluster is refused: {welcome:?}");
    let mut how = String::new();
    for _ in 0..target.count(30, 1000) {
        match shown(door, which(&target.certificates)).await? {
            Ok(()) => anyhow::bail!("it is let in"),
            Err(said) => {
                ensure!(said.contains(alert), "{said}");
                how = said;
            }
        }
    }
    Ok(how)
}

/// Whether HTTP/2 greets who shows this, or what ends it.
async fn shown(door: SocketAddr, tls: &Arc<ClientConfig>) -> anyhow::Result<Result<(), String>> {
    let exchange = async {
        let stream = TcpStream::connect(door).await?;
        let mut stream = TlsConnector::from(Arc::clone(tls)).connect(ServerName::try_from(HOST)?, stream).await?;
        let mut greeting = [0; 9];
        stream.read_exact(&mut greeting).await?;
        anyhow::Ok(())
    };
    let ended = timeout(10 * PATIENCE, exchange).await.context("neither an alert nor a greeting")?;
    Ok(ended.map_err(|error| error.to_string()))
}

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> anyhow::Result<Authority> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    Ok(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?)
}

/// Certificate and key in PEM.
fn signed(by: &Authority, name: &str, change: impl FnOnce(&mut CertificateParams)) -> anyhow::Result<(String, String)> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.subject_alt_names = vec![SanType::URI(name.try_into()?), SanType::DnsName(HOST.try_into()?)];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    change(&mut params);
    let key = KeyPair::generate()?;
    Ok((params.signed_by(&key, &**by)?.pem(), key.serialize_pem()))
}

/// A client of the router, as which it shows this.
fn client(router: &Authority, shows: Option<(String, String)>) -> anyhow::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(router.der().clone())?;
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(roots);
    let mut config = match shows {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let certificate = CertificateDer::from_pem_slice(certificate.as_bytes())?;
            builder.with_client_auth_cert(vec![certificate], PrivateKeyDer::from_pem_slice(key.as_bytes())?)?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}
