//! How every command reaches a router: its address, an API key, headers, TLS. Knows nothing of what is asked there.
//!
//! `--url` means the same everywhere: the router. Its scheme says which of the router's two ports it names, `http://`
//! and `https://` that of the OpenAI API, `grpc://` and `grpcs://` that of gRPC. A command that speaks gRPC and was
//! given the other port asks the router there.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hyper_util::rt::TokioIo;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::metadata::{Ascii, MetadataKey, MetadataMap};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::state::State;
use crate::wrong_port;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// It tells its other port from memory.
const PORT_TIMEOUT: Duration = Duration::from_secs(5);

/// A router, and how to speak with it.
#[derive(Clone, Debug)]
pub struct Router {
    /// Which of its ports is known.
    pub address: Address,
    /// The running `tandem up`, where there is one: for hints.
    pub cluster: Option<State>,
    /// Sent with every request; a key is among them.
    pub headers: Headers,
    /// For `https://` and `grpcs://`.
    pub tls: Tls,
}

/// One port of a router, or both. URLs are `http://` or `https://` here, as clients of both kinds want them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// The OpenAI API's.
    Http(String),
    /// gRPC's.
    Grpc(String),
    /// Of a cluster of `tandem up`.
    Both {
        /// The OpenAI API's.
        http: String,
        /// gRPC's.
        grpc: String,
    },
}

/// Names in lower case, and values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(Vec<(String, String)>);

/// Whom to trust, and who this is. Paths of PEM files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// Authorities; `None`: those that the system trusts.
    pub ca: Option<PathBuf>,
    /// A certificate for routers that want one, and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Whom to trust, and who this is.
#[derive(Args, Clone)]
pub struct TlsArgs {
    /// Authorities to trust, PEM, for https:// and grpcs:// [default: those that the system trusts]
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// Certificate to show to routers that want one (mTLS), PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

impl TlsArgs {
    /// The same, resolved.
    pub fn resolve(self) -> Tls {
        Tls { ca: self.tls_ca, identity: self.tls_cert.zip(self.tls_key) }
    }
}

impl Address {
    /// By the scheme; without one it is the HTTP port.
    ///
    /// # Errors
    /// Another scheme.
    pub fn parse(url: &str) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/');
        Ok(match url.split_once("://") {
            None => Self::Http(format!("http://{url}")),
            Some(("http" | "https", _)) => Self::Http(url.to_owned()),
            Some(("grpc", rest)) => Self::Grpc(format!("http://{rest}")),
            Some(("grpcs", rest)) => Self::Grpc(format!("https://{rest}")),
            Some(_) => bail!("{url}: wanted http://, https://, grpc:// or grpcs://"),
        })
    }
}

impl Router {
    /// The HTTP port's URL.
    ///
    /// # Errors
    /// Only the gRPC port is known.
    pub fn http_url(&self) -> anyhow::Result<&str> {
        match &self.address {
            Address::Http(http) | Address::Both { http, .. } => Ok(http),
            Address::Grpc(_) => bail!("this command speaks HTTP: give the router's HTTP port, --url http://HOST:PORT"),
        }
    }

    /// A client for the HTTP port.
    ///
    /// # Errors
    /// Headers or TLS files that cannot be used.
    pub fn http_client(&self) -> anyhow::Result<reqwest::Client> {
        let builder = reqwest::Client::builder().default_headers(self.headers.http()?).connect_timeout(CONNECT_TIMEOUT);
        Ok(self.tls.for_http(builder, self.http_url()?)?.build()?)
    }

    /// A connection to the gRPC port at `url`, see [`Self::grpc_url`].
    ///
    /// # Errors
    /// Nobody listens there, or TLS files that cannot be used.
    pub async fn channel(&self, url: &str) -> anyhow::Result<Channel> {
        let endpoint = Endpoint::from_shared(url.to_owned())
            .with_context(|| format!("`{url}` is not HOST:PORT"))?
            .connect_timeout(CONNECT_TIMEOUT);
        match self.tls.connect(&endpoint).await {
            Ok(channel) => Ok(channel),
            Err(error) => {
                let hint = wrong_port::hint(url, self.cluster.as_ref()).await;
                Err(error).context(hint.unwrap_or_else(|| format!("no router answers gRPC at {url}")))
            }
        }
    }

    /// The gRPC port's URL: known, or as the router says at its HTTP port.
    ///
    /// # Errors
    /// No router at the HTTP port, or one that does not say.
    pub async fn grpc_url(&self) -> anyhow::Result<String> {
        let http = match &self.address {
            Address::Grpc(grpc) | Address::Both { grpc, .. } => return Ok(grpc.clone()),
            Address::Http(http) => http,
        };
        let asked = self.http_client()?.get(format!("{http}/health/live")).timeout(PORT_TIMEOUT).send().await;
        let otherwise = "its gRPC port is --url grpc://HOST:PORT";
        let answer = asked.with_context(|| format!("no router answers HTTP at {http}; {otherwise}"))?;
        let live: Value = answer.json().await.unwrap_or_default();
        let port = live["grpc_port"].as_u64().and_then(|port| u16::try_from(port).ok());
        let port = port.with_context(|| format!("{http} does not say where gRPC is; {otherwise}"))?;
        with_port(http, port)
    }
}

/// The same host, another port.
fn with_port(url: &str, port: u16) -> anyhow::Result<String> {
    let mut url = reqwest::Url::parse(url).with_context(|| format!("`{url}` is no URL"))?;
    if url.set_port(Some(port)).is_err() {
        bail!("{url} has no host");
    }
    url.set_path("");
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

impl Headers {
    /// From `name: value` lines, and an API key.
    ///
    /// # Errors
    /// A line without a colon, or what no header can carry.
    pub fn new(lines: &[String], api_key: Option<&str>) -> anyhow::Result<Self> {
        let mut headers = Vec::new();
        for line in lines {
            let (name, value) = line.split_once(':').with_context(|| format!("--header `{line}` has no `:`"))?;
            headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
        if let Some(key) = api_key {
            HeaderValue::from_str(key).ok().context("--api-key has characters that no header may have")?;
            headers.push((AUTHORIZATION.as_str().to_owned(), format!("Bearer {key}")));
        }
        let headers = Self(headers);
        headers.http()?;
        Ok(headers)
    }

    /// For HTTP; no log prints the values.
    ///
    /// # Errors
    /// What no header can carry.
    pub fn http(&self) -> anyhow::Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.0 {
            let name: HeaderName = name.parse().with_context(|| format!("`{name}` is no name of a header"))?;
            let mut value =
                HeaderValue::from_str(value).with_context(|| format!("the value of header {name} is none"))?;
            value.set_sensitive(true);
            headers.append(name, value);
        }
        Ok(headers)
    }

    /// For gRPC.
    ///
    /// # Errors
    /// What no metadata can carry.
    pub fn grpc(&self) -> anyhow::Result<MetadataMap> {
        let mut metadata = MetadataMap::new();
        for (name, value) in &self.0 {
            let key: MetadataKey<Ascii> =
                name.parse().with_context(|| format!("`{name}` is no name of gRPC metadata"))?;
            let value = value.parse().with_context(|| format!("the value of metadata {name} is none"))?;
            metadata.append(key, value);
        }
        Ok(metadata)
    }
}

impl Tls {
    /// A client of HTTP that trusts and shows this, where `url` is `https://`.
    ///
    /// # Errors
    /// A file that cannot be read or used.
    pub fn for_http(&self, builder: reqwest::ClientBuilder, url: &str) -> anyhow::Result<reqwest::ClientBuilder> {
        Ok(if url.starts_with("https://") { builder.use_preconfigured_tls(self.client(&[])?) } else { builder })
    }

    /// A gRPC connection, which trusts and shows this where its URL is `https://`.
    ///
    /// # Errors
    /// Nobody answers there, or a file that cannot be read or used.
    pub async fn connect(&self, endpoint: &Endpoint) -> anyhow::Result<Channel> {
        if endpoint.uri().scheme_str() != Some("https") {
            return Ok(endpoint.connect().await?);
        }
        let connector = TlsConnector::from(Arc::new(self.client(&[b"h2".as_slice()])?));
        let secured = move |uri: Uri| {
            let connector = connector.clone();
            async move {
                // An IPv6 address has brackets in a URL, and nowhere else.
                let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
                let stream = TcpStream::connect((&*host, uri.port_u16().unwrap_or(443))).await?;
                stream.set_nodelay(true)?;
                let name = ServerName::try_from(host).map_err(std::io::Error::other)?;
                Ok::<_, std::io::Error>(TokioIo::new(connector.connect(name, stream).await?))
            }
        };
        Ok(endpoint.connect_with_connector(service_fn(secured)).await?)
    }

    /// TLS 1.2 and 1.3 over ring, for these protocols of ALPN.
    fn client(&self, protocols: &[&[u8]]) -> anyhow::Result<ClientConfig> {
        let roots = self.roots()?;
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(roots);
        let mut config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let private = PrivateKeyDer::from_pem_slice(&read(key)?)
                    .ok()
                    .with_context(|| format!("{} has no private key in PEM", key.display()))?;
                let pair = || format!("{} and {} do not belong together", cert.display(), key.display());
                builder.with_client_auth_cert(certificates(cert)?, private).with_context(pair)?
            }
        };
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(config)
    }

    /// Authorities to trust.
    fn roots(&self) -> anyhow::Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(path) => {
                for root in certificates(path)? {
                    roots.add(root).with_context(|| format!("{} has no authority's certificate", path.display()))?;
                }
            }
            None => {
                // Some systems have a few that nobody can read; the others do.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    bail!("this system trusts no authority: give --tls-ca FILE");
                }
            }
        }
        Ok(roots)
    }
}

fn certificates(path: &std::path::Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let pem = read(path)?;
    let unusable = || format!("{} has no certificates in PEM", path.display());
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>().ok().with_context(unusable)?;
    if certificates.is_empty() {
        bail!(unusable());
    }
    Ok(certificates)
}

fn read(path: &std::path::Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// `host:port` becomes `http://host:port`.
pub fn with_scheme(address: &str) -> String {
    if address.contains("://") { address.trim_end_matches('/').to_owned() } else { format!("http://{address}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_get_a_scheme_once() {
        assert_eq!(with_scheme("127.0.0.1:1"), "http://127.0.0.1:1");
        assert_eq!(with_scheme("http://127.0.0.1:1/"), "http://127.0.0.1:1");
    }

    #[test]
    fn the_scheme_says_which_port_it_is() {
        let http = |url: &str| Address::Http(url.to_owned());
        assert_eq!(Address::parse("127.0.0.1:1").unwrap(), http("http://127.0.0.1:1"));
        assert_eq!(Address::parse("https://h:1/").unwrap(), http("https://h:1"));
        assert_eq!(Address::parse("grpc://h:1").unwrap(), Address::Grpc("http://h:1".into()));
        assert_eq!(Address::parse("grpcs://h:1").unwrap(), Address::Grpc("https://h:1".into()));
        assert!(Address::parse("ftp://h").unwrap_err().to_string().contains("grpc://"));
    }

    #[test]
    fn the_other_port_is_at_the_same_host() {
        assert_eq!(with_port("http://127.0.0.1:8000", 8001).unwrap(), "http://127.0.0.1:8001");
        assert_eq!(with_port("https://[::1]:8000/x", 9).unwrap(), "https://[::1]:9");
        assert_eq!(with_port("http://router.example", 80).unwrap(), "http://router.example");
    }

    #[test]
    fn keys_and_headers_are_checked_before_they_are_sent() {
        let lines = ["X-Tandem-Tenant: a".to_owned()];
        let headers = Headers::new(&lines, Some("sk-1")).unwrap();
        assert_eq!(headers.http().unwrap()["x-tandem-tenant"], "a");
        assert_eq!(headers.grpc().unwrap().get("authorization").unwrap(), "Bearer sk-1");
        for (line, key) in [("no colon", None), ("a b: c", None), ("a: b", Some("sk-\n"))] {
            assert!(Headers::new(&[line.to_owned()], key).is_err(), "{line:?} {key:?}");
        }
    }

    #[tokio::test]
    async fn a_tls_file_that_is_none_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ca.pem");
        let tls = Tls { ca: Some(path.clone()), identity: None };
        let error = || tls.for_http(reqwest::Client::builder(), "https://h").err().unwrap().to_string();
        assert!(error().contains("cannot read") && error().contains("ca.pem"), "{}", error());
        for wrong in ["", "-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(error().contains("ca.pem"), "{}", error());
        }
        assert!(tls.for_http(reqwest::Client::builder(), "http://h").is_ok(), "without TLS no file is read");
        let secured = Endpoint::from_static("https://127.0.0.1:1");
        let error = tls.connect(&secured).await.unwrap_err().to_string();
        assert!(error.contains("ca.pem"), "{error}");
    }
}
