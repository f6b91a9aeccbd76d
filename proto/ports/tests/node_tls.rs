//! The cluster's own TLS: who is taken for whom by its certificate, in both directions, that refusals are counted and
//! have reasons, that files are read again, and that wrong ones are named.
use std::convert::Infallible;
use std::fs;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
    date_time_ymd,
};
use tandem_ports::{
    CLIENT_STREAMS, JoinGuard, KeepAlive, Limits, NodeTls, NodeTlsFiles, PeerRole, Port, TlsError, Wanted, serve_grpc,
};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{self, ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::{Code, Status};

/// Much patience with a busy machine.
const BOUND: Duration = Duration::from_secs(10);
const ROUTER: &str = "spiffe://ours/tandem/router";
const PREFILL: &str = "spiffe://ours/tandem/prefill";
const D0: &str = "spiffe://ours/tandem/decode/d0";

/// An authority, and the files of what it signed.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let dir = tempfile::tempdir().expect("directory");
        // No two have one name: what another one signed is not taken for a broken signature of this one.
        params.distinguished_name.push(DnType::CommonName, dir.path().display().to_string());
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("key")).expect("authority");
        fs::write(dir.path().join("ca.pem"), issuer.pem()).expect("written");
        Self { issuer, dir }
    }

    /// The files of a certificate with these URIs.
    fn sign(&self, uris: &[&str]) -> NodeTlsFiles {
        self.sign_with(uris, |_| {})
    }

    fn sign_with(&self, uris: &[&str], change: impl FnOnce(&mut CertificateParams)) -> NodeTlsFiles {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.subject_alt_names =
            uris.iter().map(|uri| SanType::URI((*uri).try_into().expect("an ASCII string"))).collect();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().expect("key");
        let cert = params.signed_by(&key, &*self.issuer).expect("signed");
        let name = fs::read_dir(self.dir.path()).expect("a directory").count();
        let file = |what: &str| self.dir.path().join(format!("{name}.{what}"));
        fs::write(file("pem"), cert.pem()).expect("written");
        fs::write(file("key"), key.serialize_pem()).expect("written");
        NodeTlsFiles { cert: file("pem"), key: file("key"), ca: self.path("ca.pem"), any_name: false }
    }

    fn of(&self, uri: &str, role: PeerRole) -> NodeTls {
        NodeTls::read(&self.sign(&[uri]), role).expect("good files")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

type Answer = Arc<dyn Fn(&http::Extensions) -> Result<(), Status> + Send + Sync>;

/// A gRPC port of this process, with a guard before a service that answers every call so.
async fn serve_answer(tls: &NodeTls, answer: impl FnOnce(JoinGuard) -> Answer) -> (SocketAddr, JoinGuard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("bound");
    let port = Port::new(listener, Limits { connections: 4, silence: BOUND }).of_cluster(Some(tls.clone()));
    let guard = JoinGuard::default().within(Some(tls));
    let keep_alive = KeepAlive { interval: BOUND, timeout: BOUND };
    let routes = tonic::service::Routes::new(guard.around(Asked(answer(guard.clone()))));
    tokio::spawn(serve_grpc(port, routes, CLIENT_STREAMS, keep_alive, CancellationToken::new()));
    (address, guard)
}

async fn serve(tls: &NodeTls) -> (SocketAddr, JoinGuard) {
    serve_answer(tls, |_| Arc::new(|_| Ok(()))).await
}

/// A router's, to which each call is the registration of this node.
async fn serve_registration(router: &NodeTls, role: PeerRole, id: &'static str) -> (SocketAddr, JoinGuard) {
    serve_answer(router, |guard| Arc::new(move |extensions| guard.registers(extensions, role, id))).await
}

#[derive(Clone)]
struct Asked(Answer);

impl tonic::server::NamedService for Asked {
    const NAME: &'static str = "asked";
}

impl tower::Service<http::Request<Body>> for Asked {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = (self.0)(request.extensions()).err().unwrap_or_else(|| Status::ok(""));
        ready(Ok(answer.into_http()))
    }
}

/// What the call of such a process is answered: nothing, or the words of a refusal, or what became of the connection.
async fn call(address: SocketAddr, tls: &NodeTls, wanted: Wanted) -> Result<(), String> {
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    ask(tls.dial(stream, wanted).await).await
}

/// The same by one that takes everybody for whom it wants.
async fn call_as(client: ClientConfig, address: SocketAddr) -> Result<(), String> {
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let name = ServerName::try_from("tandem").expect("a name");
    ask(TlsConnector::from(Arc::new(client)).connect(name, stream).await).await
}

async fn ask(stream: std::io::Result<TlsStream<TcpStream>>) -> Result<(), String> {
    let exchange = async {
        let stream = stream.map_err(|error| error.to_string())?;
        let (mut client, connection) = h2::client::handshake(stream).await.map_err(|error| error.to_string())?;
        // What the connection says of its end is more than what its calls do.
        let connection = tokio::spawn(connection);
        let request = http::Request::post("https://tandem/asked/Asked").body(()).expect("a request");
        let answered = match client.send_request(request, true) {
            Ok((answer, _)) => answer.await,
            Err(error) => Err(error),
        };
        match answered {
            Ok(answer) => {
                let status = Status::from_header_map(answer.headers()).expect("a status");
                if status.code() == Code::Ok { Ok(()) } else { Err(status.message().to_owned()) }
            }
            Err(_) => Err(connection.await.expect("no panic").expect_err("it broke").to_string()),
        }
    };
    tokio::time::timeout(BOUND, exchange).await.expect("in time")
}

/// What a process makes of a server with these files, which is one that checks nothing.
async fn call_server_of(files: &NodeTlsFiles, tls: &NodeTls) -> Result<(), String> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("bound");
    let (certs, key) = pair(files);
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
    let config = config.with_single_cert(certs, key).expect("a pair");
    let server = async {
        let (stream, _) = listener.accept().await.expect("accepted");
        TlsAcceptor::from(Arc::new(config)).accept(stream).await
    };
    let client = async {
        let stream = TcpStream::connect(address).await.expect("connect");
        tls.dial(stream, d0()).await.map(drop).map_err(|error| error.to_string())
    };
    let (_, dialled) = tokio::time::timeout(BOUND, async { tokio::join!(server, client) }).await.expect("in time");
    dialled
}

/// A client with this certificate, if with one, that takes every server.
fn credulous(files: Option<&NodeTlsFiles>) -> ClientConfig {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone());
    let builder = builder.with_safe_default_protocol_versions().expect("versions").dangerous();
    let builder = builder.with_custom_certificate_verifier(Arc::new(Credulous(provider)));
    let mut config = match files.map(pair) {
        None => builder.with_no_client_auth(),
        Some((certs, key)) => builder.with_client_auth_cert(certs, key).expect("a pair"),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

fn pair(files: &NodeTlsFiles) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let cert = CertificateDer::from_pem_file(&files.cert).expect("PEM");
    (vec![cert], PrivateKeyDer::from_pem_file(&files.key).expect("PEM"))
}

#[derive(Debug)]
struct Credulous(Arc<CryptoProvider>);

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

fn d0() -> Wanted {
    Wanted::Node { role: PeerRole::Decode, node_id: "d0".to_owned() }
}

#[tokio::test]
async fn those_who_have_business_with_each_other_do_it() {
    let ours = Authority::new();
    let (router, node) = (ours.of(ROUTER, PeerRole::Router), ours.of(D0, PeerRole::Decode));
    assert_eq!((router.node_id(), node.node_id().as_deref()), (None, Some("d0")));
    let ((at_router, of_router), (at_node, of_node)) = (serve(&router).await, serve(&node).await);
    assert_eq!(call(at_router, &node, Wanted::Router).await, Ok(()));
    assert_eq!(call(at_node, &router, d0()).await, Ok(()));
    assert_eq!((of_router.refused(), of_node.refused()), (0, 0));
}

#[tokio::test]
async fn who_has_another_role_is_refused_call_by_call() {
    let ours = Authority::new();
    let (router, node, prefill) =
        (ours.of(ROUTER, PeerRole::Router), ours.of(D0, PeerRole::Decode), ours.of(PREFILL, PeerRole::Prefill));
    let ((at_router, of_router), (at_node, of_node)) = (serve(&router).await, serve(&node).await);
    let refused = call(at_node, &prefill, d0()).await.expect_err("a node calls a node");
    assert!(refused.contains(PREFILL) && refused.contains("not of a router"), "{refused}");
    let refused = call(at_router, &router, Wanted::Router).await.expect_err("a router calls a router");
    assert!(refused.contains("not of a node"), "{refused}");
    assert_eq!((of_router.refused(), of_node.refused()), (1, 1));
}

#[tokio::test]
async fn who_is_called_is_whom_the_caller_wants() {
    let ours = Authority::new();
    let router = ours.of(ROUTER, PeerRole::Router);
    let foreign = Authority::new().of(D0, PeerRole::Decode);
    let as_node = |role, id: &str| Wanted::Node { role, node_id: id.to_owned() };
    let prefill = ours.of(PREFILL, PeerRole::Prefill);
    let d0_tls = ours.of(D0, PeerRole::Decode);
    let other_domain = ours.of("spiffe://theirs/tandem/decode", PeerRole::Decode);
    for (server, wanted, said) in [
        (&prefill, d0(), "not of the decode node `d0`"),
        (&d0_tls, as_node(PeerRole::Decode, "d1"), "not of the decode node `d1`"),
        (&d0_tls, Wanted::Router, "not of a router"),
        (&other_domain, d0(), "of the trust domain ours"),
        (&foreign, d0(), "no authority of --node-tls-ca signed its certificate"),
    ] {
        let (address, _) = serve(server).await;
        let error = call(address, &router, wanted).await.expect_err(said);
        assert!(error.contains(said), "{error}");
    }
}

#[tokio::test]
async fn a_certificate_that_ran_out_or_has_no_name_is_refused_by_both_ends() {
    let ours = Authority::new();
    let router = ours.of(ROUTER, PeerRole::Router);
    // These processes do not start with such files: others might.
    let expired = ours.sign_with(&[D0], |params| params.not_after = date_time_ymd(2020, 1, 1));
    let nameless = ours.sign(&[]);
    for (files, said, to_caller) in [
        (expired, "not valid any more", "CertificateExpired"),
        (nameless, "no name of the form", "no name of the form"),
    ] {
        let error = call_server_of(&files, &router).await.expect_err(said);
        assert!(error.contains(said), "{error}");
        let (at_router, guard) = serve(&router).await;
        let before = guard.refused();
        let error = call_as(credulous(Some(&files)), at_router).await.expect_err(to_caller);
        assert!(error.contains(to_caller), "{error}");
        assert_eq!(guard.refused(), before + 1, "{said}");
    }
}

#[tokio::test]
async fn who_speaks_no_tls_or_shows_nothing_is_refused_and_counted() {
    let ours = Authority::new();
    let (address, guard) = serve(&ours.of(D0, PeerRole::Decode)).await;
    let mut plain = TcpStream::connect(address).await.expect("connect");
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("sent");
    let mut said = Vec::new();
    let _ = tokio::time::timeout(BOUND, plain.read_to_end(&mut said)).await.expect("closed");
    assert!(said.first().is_none_or(|kind| *kind == 21), "nothing but an alert: {said:?}");
    assert_eq!(guard.refused(), 1);
    let error = call_as(credulous(None), address).await.expect_err("nobody");
    assert!(error.contains("CertificateRequired"), "{error}");
    let error = call_as(credulous(Some(&Authority::new().sign(&[ROUTER]))), address).await.expect_err("a stranger");
    assert!(error.contains("UnknownCA"), "{error}");
    assert_eq!(guard.refused(), 3);
    // One that only looks whether somebody listens is nobody's affair.
    drop(TcpStream::connect(address).await.expect("connect"));
    let router = ours.of(ROUTER, PeerRole::Router);
    assert_eq!(call(address, &router, d0()).await, Ok(()));
    assert_eq!(guard.refused(), 3);
}

#[tokio::test]
async fn a_registration_is_held_to_its_certificate() {
    let ours = Authority::new();
    let router = ours.of(ROUTER, PeerRole::Router);
    for (uri, own, role, id, said) in [
        (PREFILL, PeerRole::Prefill, PeerRole::Prefill, "p0", None),
        (D0, PeerRole::Decode, PeerRole::Decode, "d0", None),
        (D0, PeerRole::Decode, PeerRole::Decode, "d1", Some("not of the decode node `d1`")),
        (PREFILL, PeerRole::Prefill, PeerRole::Decode, "p0", Some("not of the decode node `p0`")),
    ] {
        let (address, guard) = serve_registration(&router, role, id).await;
        let before = guard.refused();
        let answer = call(address, &ours.of(uri, own), Wanted::Router).await;
        match said {
            None => assert_eq!((answer, guard.refused()), (Ok(()), before), "{uri} as {id}"),
            Some(said) => {
                assert!(answer.as_ref().is_err_and(|error| error.contains(said)), "{answer:?}");
                assert_eq!(guard.refused(), before + 1);
            }
        }
    }
}

#[tokio::test]
async fn names_may_be_done_without() {
    let ours = Authority::new();
    let nameless = |role| {
        let files = NodeTlsFiles { any_name: true, ..ours.sign(&[]) };
        NodeTls::read(&files, role).expect("good files")
    };
    let (router, node) = (nameless(PeerRole::Router), nameless(PeerRole::Decode));
    let ((at_router, _), (at_node, _)) = (serve(&router).await, serve(&node).await);
    assert_eq!(call(at_router, &node, Wanted::Router).await, Ok(()));
    assert_eq!(call(at_node, &router, d0()).await, Ok(()));
    let named = ours.of(PREFILL, PeerRole::Prefill);
    let error = call(at_node, &named, d0()).await.expect_err("strict itself");
    assert!(error.contains("--node-tls-any-name"), "{error}");
}

#[tokio::test]
async fn files_are_read_again_for_connections_that_come_later() {
    let (first, second) = (Authority::new(), Authority::new());
    let (router_files, node_files) = (first.sign(&[ROUTER]), first.sign(&[D0]));
    let (router, node) = (
        NodeTls::read(&router_files, PeerRole::Router).expect("good files"),
        NodeTls::read(&node_files, PeerRole::Decode).expect("good files"),
    );
    let (address, _) = serve(&node).await;
    let stream = TcpStream::connect(address).await.expect("connect");
    let open = router.dial(stream, d0()).await.expect("TLS");
    let (mut client, connection) = h2::client::handshake(open).await.expect("HTTP/2");
    tokio::spawn(connection);

    // A certificate whose key is not there yet changes nothing.
    let (next_router, next_node) = (second.sign(&[ROUTER]), second.sign(&[D0]));
    fs::copy(&next_node.cert, &node_files.cert).expect("replaced");
    assert!(node.reload().is_err(), "a pair that is none");
    node.read_changed();
    assert_eq!(call(address, &router, d0()).await, Ok(()));

    for (from, to) in [(&next_router, &router_files), (&next_node, &node_files)] {
        fs::copy(&from.cert, &to.cert).expect("replaced");
        fs::copy(&from.key, &to.key).expect("replaced");
    }
    fs::copy(second.path("ca.pem"), first.path("ca.pem")).expect("replaced");
    node.read_changed();
    assert!(call(address, &router, d0()).await.is_err(), "the first certificate is still taken");
    router.read_again();
    assert_eq!(call(address, &router, d0()).await, Ok(()));
    let request = http::Request::post("https://tandem/asked/Asked").body(()).expect("a request");
    let answer = client.send_request(request, true).expect("sent").0.await.expect("an open connection goes on");
    assert_eq!(Status::from_header_map(answer.headers()).map(|status| status.code()), Some(Code::Ok));

    let another = second.sign(&["spiffe://ours/tandem/decode/d1"]);
    fs::copy(&another.cert, &node_files.cert).expect("replaced");
    fs::copy(&another.key, &node_files.key).expect("replaced");
    assert!(node.reload().expect_err("another node").to_string().contains("takes a restart"));
}

#[tokio::test]
async fn a_port_tells_until_when_its_certificate_is_good() {
    let ours = Authority::new();
    let until = |year| ours.sign_with(&[D0], |params| params.not_after = date_time_ymd(year, 1, 1));
    let files = until(2090);
    let tls = NodeTls::read(&files, PeerRole::Decode).expect("good files");
    let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let places = Port::new(bind().await, Limits::default()).of_cluster(Some(tls.clone())).places();
    assert_eq!(places.occupancy().certificate_not_after, Some(3_786_912_000));
    let next = until(2095);
    fs::copy(&next.cert, &files.cert).expect("replaced");
    fs::copy(&next.key, &files.key).expect("replaced");
    tls.reload().expect("good files");
    assert_eq!(places.occupancy().certificate_not_after, Some(3_944_678_400));
    let plain = Port::new(bind().await, Limits::default()).places();
    assert_eq!(plain.occupancy().certificate_not_after, None);
}

#[test]
fn wrong_files_are_named() {
    let (ours, others) = (Authority::new(), Authority::new());
    let good = ours.sign(&[D0]);
    let missing = PathBuf::from("/nowhere/at/all.pem");
    let only = |purpose| ours.sign_with(&[D0], |params| params.extended_key_usages = vec![purpose]);
    let read = |files: &NodeTlsFiles| NodeTls::read(files, PeerRole::Decode).map(drop);
    let of = |cert: NodeTlsFiles| (cert.cert.file_name().expect("a name").to_string_lossy().into_owned(), cert);
    let named = |name: &str, files: NodeTlsFiles| (name.to_owned(), files);
    let past = date_time_ymd(2020, 1, 1);
    for ((file, files), why) in [
        (named("/nowhere/at/all.pem", NodeTlsFiles { cert: missing.clone(), ..good.clone() }), "No such file"),
        (named("/nowhere/at/all.pem", NodeTlsFiles { key: missing.clone(), ..good.clone() }), "No such file"),
        (named("/nowhere/at/all.pem", NodeTlsFiles { ca: missing, ..good.clone() }), "No such file"),
        (named(".key", NodeTlsFiles { cert: good.key.clone(), ..good.clone() }), "no certificate in PEM"),
        (named(".pem", NodeTlsFiles { key: good.cert.clone(), ..good.clone() }), "no private key in PEM"),
        (named(".key", NodeTlsFiles { ca: good.key.clone(), ..good.clone() }), "no certificate in PEM"),
        (named(".key", NodeTlsFiles { key: others.sign(&[D0]).key, ..good.clone() }), "do not belong together"),
        (named(".pem", NodeTlsFiles { ca: others.path("ca.pem"), ..good.clone() }), "no authority"),
        (of(ours.sign_with(&[D0], |params| params.not_after = past)), "not valid any more"),
        (of(ours.sign_with(&[D0], |params| params.not_before = date_time_ymd(2999, 1, 1))), "not valid yet"),
        (of(only(ExtendedKeyUsagePurpose::ServerAuth)), "both serverAuth and clientAuth"),
        (of(only(ExtendedKeyUsagePurpose::ClientAuth)), "both serverAuth and clientAuth"),
        (of(ours.sign(&[])), "--node-tls-any-name"),
        (of(ours.sign(&["spiffe://ours/ns/a"])), "--node-tls-any-name"),
        (of(ours.sign(&["spiffe://ours/tandem/decoder"])), "is not of the form"),
        (of(ours.sign(&[D0, "https://example.org"])), "no other URI"),
        (of(ours.sign(&[PREFILL])), "this process is of role decode"),
    ] {
        let error: TlsError = read(&files).expect_err(why);
        let error = error.to_string();
        assert!(error.contains(&file) && error.contains(why), "{error}");
        assert!(!error.contains('\n'), "one line: {error}");
    }
    assert!(read(&good).is_ok());
}

#[test]
fn the_commands_of_the_documents_make_certificates() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/mtls.md");
    let page = fs::read_to_string(page).expect("the page");
    let commands = page.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).expect("commands");
    let dir = tempfile::tempdir().expect("directory");
    let shell = Command::new("bash").args(["-euc", commands]).current_dir(dir.path()).output().expect("bash");
    assert!(shell.status.success(), "{}", String::from_utf8_lossy(&shell.stderr));
    for (name, role) in [("router", PeerRole::Router), ("prefill", PeerRole::Prefill), ("decode", PeerRole::Decode)] {
        let file = |name: String| dir.path().join(name);
        let (cert, key, ca) = (file(format!("{name}.pem")), file(format!("{name}.key")), file("ca.pem".to_owned()));
        let tls = NodeTls::read(&NodeTlsFiles { cert, key, ca, any_name: false }, role);
        assert!(tls.is_ok(), "{tls:?}");
    }
}
