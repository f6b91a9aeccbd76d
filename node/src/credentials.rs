//! What this process shows to the others of its cluster, and asks of them: the join token, and a certificate. Flags to
//! files to [`Credentials`], once; the files are read again while the node runs.
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use http::HeaderMap;
use tandem_ports::{JOIN_HEADER, JoinGuard, JoinTokens, NodeTls, NodeTlsFiles, PeerRole, Wanted};
use tandem_proto::v1::Role;
use tonic::Request;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::router_address::RouterAddress;

/// Their flags.
#[derive(Args, Debug)]
pub struct CredentialsArgs {
    /// File with the cluster's secret, the same on router and nodes: calls without it are refused. A second line holds
    /// a token that is accepted and not shown. Read again at SIGHUP, and when it changes.
    #[arg(long, value_name = "FILE")]
    pub join_token_file: Option<PathBuf>,
    /// This node's certificate, PEM: it joins by https:// and is called within TLS 1.3 only, and both sides show a
    /// certificate (mTLS). Its URI is spiffe://TRUST-DOMAIN/tandem/prefill or .../decode, with /NODE-ID behind it if it
    /// is for that node alone; only .../router may call. These three files are read again at SIGHUP, and when they
    /// change.
    #[arg(long, value_name = "FILE", requires_all = ["node_tls_key", "node_tls_ca"])]
    pub node_tls_cert: Option<PathBuf>,
    /// That certificate's private key, PEM.
    #[arg(long, value_name = "FILE", requires = "node_tls_cert")]
    pub node_tls_key: Option<PathBuf>,
    /// Authorities of that certificate and of the routers', PEM.
    #[arg(long, value_name = "FILE", requires = "node_tls_cert")]
    pub node_tls_ca: Option<PathBuf>,
    /// Take routers' certificates without such a name, too: whoever has one of these authorities may be a router.
    #[arg(long, requires = "node_tls_cert")]
    pub node_tls_any_name: bool,
}

/// What the files held. Without any, the process trusts its network.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    /// The cluster's secret.
    pub join: Option<JoinTokens>,
    /// This process's certificate.
    pub tls: Option<NodeTls>,
}

impl CredentialsArgs {
    /// Reads the files, for a node of this role.
    ///
    /// # Errors
    /// The first file that cannot be used, and why.
    pub fn read(self, role: Role) -> anyhow::Result<Credentials> {
        let join = self.join_token_file.as_deref().map(JoinTokens::load).transpose()?;
        let files = self.node_tls_cert.zip(self.node_tls_key).zip(self.node_tls_ca);
        let files = files.map(|((cert, key), ca)| NodeTlsFiles { cert, key, ca, any_name: self.node_tls_any_name });
        let role = if role == Role::Decode { PeerRole::Decode } else { PeerRole::Prefill };
        Ok(Credentials { join, tls: files.map(|files| NodeTls::read(&files, role)).transpose()? })
    }
}

impl Credentials {
    /// Of the URLs of this cluster's processes.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// Whether a router there is dialled with these: what is in the clear says so.
    ///
    /// # Errors
    /// What to write instead.
    pub fn fit(&self, router: &RouterAddress) -> anyhow::Result<()> {
        match (router, &self.tls) {
            (RouterAddress::Url(router), Some(_)) if router.uri().scheme_str() == Some("http") => {
                bail!("--router {}: with --node-tls-cert it is https://host:port", router.uri())
            }
            (RouterAddress::Url(router), None) if router.uri().scheme_str() == Some("https") => bail!(
                "--router {}: without --node-tls-cert, --node-tls-key and --node-tls-ca it is http://host:port",
                router.uri()
            ),
            _ => Ok(()),
        }
    }

    /// The node's name: the one `given`, which is the certificate's if that has one.
    ///
    /// # Errors
    /// The two differ.
    pub fn node_id(&self, given: Option<String>) -> anyhow::Result<Option<String>> {
        match (given, self.tls.as_ref().and_then(NodeTls::node_id)) {
            (Some(given), Some(own)) if given != own => {
                bail!("--node-id {given}: the certificate of --node-tls-cert is for the node {own} alone")
            }
            (given, own) => Ok(given.or(own)),
        }
    }

    /// Who may call.
    pub fn guard(&self) -> JoinGuard {
        JoinGuard::new(self.join.as_ref()).within(self.tls.as_ref())
    }

    /// A connection to a router.
    ///
    /// # Errors
    /// Nobody is there, or it is no router of this cluster.
    pub async fn connect(&self, router: &Endpoint) -> Result<Channel, tonic::transport::Error> {
        match &self.tls {
            None => router.connect().await,
            Some(tls) => {
                let tls = tls.clone();
                router.connect_with_connector(service_fn(move |url| tls.clone().dial_url(url, Wanted::Router))).await
            }
        }
    }

    /// A call with these messages.
    pub fn call<T>(&self, messages: T) -> Request<T> {
        let mut request = Request::new(messages);
        if let Some(token) = &self.join {
            let mut metadata = HeaderMap::new();
            metadata.insert(JOIN_HEADER, token.header());
            *request.metadata_mut() = MetadataMap::from_headers(metadata);
        }
        request
    }

    /// Reads the files again, as SIGHUP asks for.
    pub fn read_again(&self) {
        self.join.iter().for_each(JoinTokens::read_again);
        self.tls.iter().for_each(NodeTls::read_again);
    }

    /// Reads the files again when they change, until the process ends.
    pub fn follow_files(self) {
        self.join.map(|join| tokio::spawn(join.follow_file()));
        self.tls.map(|tls| tokio::spawn(tls.follow_files()));
    }
}
