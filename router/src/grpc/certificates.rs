//! Tests: clients that are known by their certificates alone, over gRPC within TLS.
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use prost::Message;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
};
use tandem_ports::{CLIENT_STREAMS, KeepAlive, Port, Tls, TlsFiles, serve_grpc};
use tandem_proto::v1;
use tandem_telemetry::clock;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivatePkcs8KeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::admission::keys::{KeySource, Keys, Rules};
use crate::api::Service;
use crate::flow::tests::fakes::{Cluster, router_with_keys};
use crate::limits::Limits;

const KEYS: &str = r#"{"keys": [
    {"name": "alice", "certificate": "spiffe://example.org/team/a"},
    {"name": "bob", "certificate": "bob's laptop"},
    {"name": "carol", "key": "sk-carol-0123456789abcdefgh"}
]}"#;
const LONG: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_client_s_certificate_makes_its_calls_the_tenant_s() {
    let ours = Authority::new();
    let path = ours.dir.path().join("keys.json");
    std::fs::write(&path, KEYS).unwrap();
    let rules = Rules { client_certificates: true, ..Rules::default() };
    let keys = Keys::load_by(&KeySource::Path(path), rules, clock::now()).unwrap();
    // One runs, and the others are counted as they wait.
    let limits = Limits { max_inflight: 1, ..Limits::default() };
    let cluster = Cluster::of(router_with_keys(limits, keys)).await;
    let address = ours.serve(&cluster.service).await;

    let alice = ours.client(|params| params.subject_alt_names.push(uri("spiffe://example.org/team/a")));
    let bob = ours.client(|params| params.distinguished_name.push(DnType::CommonName, "bob's laptop"));
    let nobody = ours.client(|params| params.subject_alt_names.push(uri("spiffe://example.org/team/b")));
    let carol = Some("Bearer sk-carol-0123456789abcdefgh");
    let running = tokio::spawn(generate(address, nobody.clone(), carol));
    until("it runs", || cluster.service.counts().inflight == 1).await;
    let mut calls = vec![running];
    for (client, key, waiting) in [
        (&alice, None, [1, 0, 0]),
        (&bob, None, [1, 1, 0]),
        // What the call says itself goes before.
        (&bob, carol, [1, 1, 1]),
        (&alice, None, [2, 1, 1]),
    ] {
        calls.push(tokio::spawn(generate(address, client.clone(), key)));
        let depths = ["alice", "bob", "carol"].into_iter().zip(waiting);
        let lines = depths.map(|(tenant, depth)| {
            format!("tandem_queue_depth{{role=\"router\",instance=\"router-test\",tenant=\"{tenant}\"}} {depth}\n")
        });
        let lines = Vec::from_iter(lines);
        until("it waits", || {
            let shown = cluster.service.metrics_text(None).1;
            lines.iter().all(|line| shown.contains(line))
        })
        .await;
    }
    calls.iter().for_each(tokio::task::JoinHandle::abort);
    // A certificate of the authority that is no tenant's, and a tenant's beside a wrong key.
    for (client, key) in [(nobody, None), (alice, Some("Bearer sk-other-0123456789abcdefgh"))] {
        let refused = generate(address, client, key).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    }
}

fn uri(id: &str) -> SanType {
    SanType::URI(id.try_into().unwrap())
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let holding = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, holding).await.expect(what);
}

/// The router's answer to a prompt, on a connection of its own.
async fn generate(address: SocketAddr, client: TlsConnector, key: Option<&'static str>) -> Result<(), Status> {
    let stream = client.connect(ServerName::try_from("localhost").unwrap(), TcpStream::connect(address).await.unwrap());
    let (mut calls, connection) = h2::client::handshake(stream.await.unwrap()).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut request = http::Request::post("https://localhost/tandem.v1.Inference/Generate")
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    if let Some(key) = key {
        request = request.header("authorization", key);
    }
    let (answer, mut body) = calls.send_request(request.body(()).unwrap(), false).unwrap();
    let ids = (1..9).collect();
    let input = Some(v1::generate_request::Input::TokenIds(v1::TokenIds { ids }));
    let message = v1::GenerateRequest { input, ..v1::GenerateRequest::default() }.encode_to_vec();
    let framed = [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes(), &message].concat();
    body.send_data(Bytes::from(framed), true).unwrap();
    let head = answer.await.unwrap();
    connection.abort();
    Status::from_header_map(head.headers()).map_or(Ok(()), Err)
}

/// Signs what clients and the server show.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer, dir: tempfile::tempdir().unwrap() }
    }

    /// The router's gRPC port, within TLS, for clients of this authority.
    async fn serve(&self, service: &Service) -> SocketAddr {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().unwrap();
        let write = |name: &str, pem: String| {
            let path = self.dir.path().join(name);
            std::fs::write(&path, pem).map(|()| path).unwrap()
        };
        let files = TlsFiles {
            cert: write("server.pem", params.signed_by(&key, &*self.issuer).unwrap().pem()),
            key: write("server.key", key.serialize_pem()),
            client_ca: Some(write("ca.pem", self.issuer.pem())),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let port = Port::new(listener, tandem_ports::Limits::default()).secured(Some(Tls::read(&files).unwrap()));
        let routes = super::client_routes(service, tonic_health::server::HealthReporter::new()).unwrap();
        let keep_alive = KeepAlive { interval: LONG, timeout: LONG };
        tokio::spawn(serve_grpc(port, routes, CLIENT_STREAMS, keep_alive, CancellationToken::new()));
        address
    }

    /// A client whose certificate has these names.
    fn client(&self, named: impl FnOnce(&mut CertificateParams)) -> TlsConnector {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        named(&mut params);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &*self.issuer).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let mut config = builder.with_client_auth_cert(vec![cert.der().clone()], key.into()).unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Arc::new(config).into()
    }
}
