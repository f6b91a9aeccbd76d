//! Ports within TLS: who is let in, what a silent handshake costs, that files are read again, and that wrong ones are
//! named.
use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::Body;
use axum::routing::get;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
};
use tandem_ports::{CLIENT_STREAMS, ClientName, KeepAlive, Limits, Port, Tls, TlsFiles, serve_grpc, serve_http};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_util::sync::CancellationToken;

const SILENCE: Duration = Duration::from_millis(300);
/// Much patience with a busy machine.
const BOUND: Duration = Duration::from_secs(10);

/// An authority, and the files of what it signed.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("key")).expect("authority");
        let dir = tempfile::tempdir().expect("directory");
        fs::write(dir.path().join("ca.pem"), issuer.pem()).expect("written");
        Self { issuer, dir }
    }

    /// `<name>.pem` and `<name>.key`.
    fn sign(&self, name: &str, purpose: ExtendedKeyUsagePurpose) -> (PathBuf, PathBuf) {
        self.sign_with(name, purpose, |_| {})
    }

    fn sign_with(
        &self,
        name: &str,
        purpose: ExtendedKeyUsagePurpose,
        more: impl FnOnce(&mut CertificateParams),
    ) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        params.extended_key_usages = vec![purpose];
        more(&mut params);
        let key = KeyPair::generate().expect("key");
        let cert = params.signed_by(&key, &*self.issuer).expect("signed");
        let (cert_path, key_path) = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        fs::write(&cert_path, cert.pem()).expect("written");
        fs::write(&key_path, key.serialize_pem()).expect("written");
        (cert_path, key_path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn server(&self, client_ca: Option<PathBuf>) -> TlsFiles {
        let (cert, key) = self.sign("server", ExtendedKeyUsagePurpose::ServerAuth);
        TlsFiles { cert, key, client_ca }
    }

    /// A client that trusts this authority, with a certificate if one is given.
    fn client(&self, identity: Option<(PathBuf, PathBuf)>, protocol: &str) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).expect("root");
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().expect("versions").with_root_certificates(roots);
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let cert = CertificateDer::from_pem_slice(&fs::read(cert).expect("file")).expect("PEM");
                let key = PrivateKeyDer::from_pem_slice(&fs::read(key).expect("file")).expect("PEM");
                builder.with_client_auth_cert(vec![cert], key).expect("identity")
            }
        };
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        Arc::new(config).into()
    }
}

async fn serve(files: &TlsFiles) -> SocketAddr {
    serve_within(Tls::read(files).expect("good files")).await
}

async fn bind(tls: Tls) -> (Port, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("bound");
    (Port::new(listener, Limits { connections: 2, silence: SILENCE }).secured(Some(tls)), address)
}

async fn serve_within(tls: Tls) -> SocketAddr {
    let (port, address) = bind(tls).await;
    let app = axum::Router::new().route("/", get(|| async { "well" }));
    tokio::spawn(serve_http(port, app, CancellationToken::new()));
    address
}

/// What the server says; nothing when it lets nobody in.
async fn ask(address: SocketAddr, client: &TlsConnector) -> std::io::Result<String> {
    let exchange = async {
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("localhost").expect("a name");
        let mut stream = client.connect(name, stream).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
        let mut said = String::new();
        stream.read_to_string(&mut said).await?;
        Ok(said)
    };
    tokio::time::timeout(BOUND, exchange).await.expect("in time")
}

#[tokio::test]
async fn who_causes_many_errors_within_tls_waits_and_is_answered() {
    const AT_ONCE: usize = 100;
    let ours = Authority::new();
    let (port, address) = bind(Tls::read(&ours.server(None)).expect("good files")).await;
    let port = port.throttling_errors();
    let places = port.places();
    tokio::spawn(serve_http(port, axum::Router::new(), CancellationToken::new()));
    let stream = TcpStream::connect(address).await.expect("connect");
    let name = ServerName::try_from("localhost").expect("a name");
    let mut stream = ours.client(None, "http/1.1").connect(name, stream).await.expect("let in");
    // The first ones are read at once, and paid for before others are. A record of long ones is read in pieces, whose
    // rest is with rustls meanwhile.
    for long in ["", &"x".repeat(300)] {
        let request = format!("GET /nonsense?{long} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        stream.write_all(request.repeat(AT_ONCE).as_bytes()).await.expect("written");
        let mut said = String::new();
        while said.matches("404 Not Found").count() < AT_ONCE {
            let mut piece = [0; 4096];
            let read = tokio::time::timeout(BOUND, stream.read(&mut piece)).await.expect("in time").expect("open");
            assert_ne!(read, 0, "{said}");
            said += str::from_utf8(&piece[..read]).expect("text");
        }
    }
    assert!(places.occupancy().throttled > 0);
}

#[tokio::test]
async fn clients_are_answered_within_tls_and_strangers_are_not() {
    let ours = Authority::new();
    let address = serve(&ours.server(None)).await;
    assert!(ask(address, &ours.client(None, "http/1.1")).await.expect("answer").ends_with("well"));
    let speaks_both = TcpStream::connect(address).await.expect("connect");
    let name = ServerName::try_from("localhost").expect("a name");
    let stream = ours.client(None, "h2").connect(name, speaks_both).await.expect("TLS");
    let (mut client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    let request = http::Request::get("https://localhost/").body(()).expect("a request");
    assert_eq!(client.send_request(request, true).expect("sent").0.await.expect("an answer").status(), 200);
    assert!(ask(address, &Authority::new().client(None, "http/1.1")).await.is_err(), "another authority is trusted");
    let mut plain = TcpStream::connect(address).await.expect("connect");
    plain.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("sent");
    let mut said = Vec::new();
    let _ = tokio::time::timeout(BOUND, plain.read_to_end(&mut said)).await.expect("closed");
    assert!(!String::from_utf8_lossy(&said).contains("200"), "answered in the clear");
}

#[tokio::test]
async fn mutual_tls_lets_in_whom_its_authority_signed() {
    let (ours, others) = (Authority::new(), Authority::new());
    let address = serve(&ours.server(Some(ours.path("ca.pem")))).await;
    let signed = ours.sign("client", ExtendedKeyUsagePurpose::ClientAuth);
    let stranger = others.sign("client", ExtendedKeyUsagePurpose::ClientAuth);
    assert!(ask(address, &ours.client(Some(signed), "http/1.1")).await.expect("answer").ends_with("well"));
    assert!(ask(address, &ours.client(None, "http/1.1")).await.is_err(), "nobody asked for a certificate");
    assert!(ask(address, &ours.client(Some(stranger), "http/1.1")).await.is_err(), "anybody's certificate will do");
}

#[tokio::test]
async fn a_request_carries_the_names_of_its_client_s_certificate() {
    let ours = Authority::new();
    let id = "spiffe://example.org/team/a";
    let named = ours.sign_with("client", ExtendedKeyUsagePurpose::ClientAuth, |params| {
        params.subject_alt_names.push(SanType::URI(id.try_into().expect("a URI")));
        params.distinguished_name.push(DnType::CommonName, "team a");
    });
    for (client_ca, identity, expected) in [
        (Some(ours.path("ca.pem")), Some(named.clone()), format!("{id}, team a")),
        (None, Some(named), "nobody".to_owned()),
    ] {
        let tls = Tls::read(&ours.server(client_ca)).expect("good files");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("bound");
        let port = Port::new(listener, Limits { connections: 2, silence: SILENCE }).secured(Some(tls));
        let told = |client: Option<Extension<ClientName>>| async move {
            let told = client.map(|Extension(client)| [client.spiffe_id, client.common_name].map(Option::unwrap));
            told.map_or_else(|| "nobody".to_owned(), |names| names.join(", "))
        };
        tokio::spawn(serve_http(port, axum::Router::new().route("/", get(told)), CancellationToken::new()));
        let answer = ask(address, &ours.client(identity, "http/1.1")).await.expect("answer");
        assert!(answer.ends_with(&format!("\r\n\r\n{expected}")), "{answer}");
    }
}

#[tokio::test]
async fn files_are_read_again_for_connections_that_come_later() {
    let (first, second) = (Authority::new(), Authority::new());
    let (cert, key) = first.sign("server", ExtendedKeyUsagePurpose::ServerAuth);
    let tls = Tls::read(&TlsFiles { cert: cert.clone(), key: key.clone(), client_ca: None }).expect("good files");
    let address = serve_within(tls.clone()).await;
    let name = ServerName::try_from("localhost").expect("a name");
    let (of_first, of_second) = (first.client(None, "http/1.1"), second.client(None, "http/1.1"));
    let stream = TcpStream::connect(address).await.expect("connect");
    let mut open = of_first.connect(name, stream).await.expect("TLS");
    assert!(ask(address, &of_second).await.is_err(), "another authority is trusted");

    // A certificate whose key is not there yet changes nothing.
    let (next_cert, next_key) = second.sign("server", ExtendedKeyUsagePurpose::ServerAuth);
    fs::copy(&next_cert, &cert).expect("replaced");
    assert!(tls.reload().expect_err("a pair that is none").to_string().contains("do not belong together"));
    assert!(ask(address, &of_first).await.expect("answer").ends_with("well"));

    tls.read_changed();
    assert!(ask(address, &of_first).await.expect("answer").ends_with("well"));

    fs::copy(&next_key, &key).expect("replaced");
    tls.read_changed();
    assert!(ask(address, &of_second).await.expect("answer").ends_with("well"));
    assert!(ask(address, &of_first).await.is_err(), "the first certificate is still shown");
    open.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.expect("sent");
    let mut said = String::new();
    tokio::time::timeout(BOUND, open.read_to_string(&mut said)).await.expect("in time").expect("answered");
    assert!(said.ends_with("well"), "an open connection goes on: {said}");
}

#[tokio::test]
async fn silence_in_the_handshake_ends_the_connection() {
    let ours = Authority::new();
    let address = serve(&ours.server(None)).await;
    for said in [&b""[..], &[0x16, 3, 1, 2, 0, 1]] {
        let start = Instant::now();
        let mut stream = TcpStream::connect(address).await.expect("connect");
        stream.write_all(said).await.expect("sent");
        let _ = tokio::time::timeout(BOUND, stream.read_to_end(&mut Vec::new())).await.expect("closed in time");
        assert!(start.elapsed() >= SILENCE, "{said:?}");
    }
    // Two silent ones fill the port; they go, and the next client is served.
    let _silent = [TcpStream::connect(address).await, TcpStream::connect(address).await];
    assert!(ask(address, &ours.client(None, "http/1.1")).await.expect("answer").ends_with("well"));
}

#[tokio::test]
async fn who_takes_nothing_of_what_it_is_sent_within_tls_is_ended() {
    let ours = Authority::new();
    let (port, address) = bind(Tls::read(&ours.server(None)).expect("good files")).await;
    let places = port.places();
    let endless =
        || async { Body::from_stream(futures::stream::repeat_with(|| Ok::<_, Infallible>(vec![0; 1 << 16]))) };
    tokio::spawn(serve_http(port, axum::Router::new().route("/", get(endless)), CancellationToken::new()));
    let stream = TcpStream::connect(address).await.expect("connect");
    let name = ServerName::try_from("localhost").expect("a name");
    let mut stream = ours.client(None, "http/1.1").connect(name, stream).await.expect("let in");
    stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("sent");
    let begun = Instant::now();
    while places.occupancy().failed == 0 {
        assert!(begun.elapsed() < BOUND, "it is still there");
        tokio::time::sleep(SILENCE / 10).await;
    }
    assert!(begun.elapsed() >= 2 * SILENCE);
}

#[tokio::test]
async fn grpc_is_spoken_within_tls() {
    let ours = Authority::new();
    let (port, address) = bind(Tls::read(&ours.server(None)).expect("good files")).await;
    let keep_alive = KeepAlive { interval: BOUND, timeout: BOUND };
    tokio::spawn(serve_grpc(
        port,
        tonic::service::Routes::default(),
        CLIENT_STREAMS,
        keep_alive,
        CancellationToken::new(),
    ));
    let stream = TcpStream::connect(address).await.expect("connect");
    let name = ServerName::try_from("localhost").expect("a name");
    let mut stream = ours.client(None, "h2").connect(name, stream).await.expect("handshake");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("greeting");
    // A SETTINGS frame is the server's first word.
    let mut frame = [0; 9];
    tokio::time::timeout(BOUND, stream.read_exact(&mut frame)).await.expect("in time").expect("a frame");
    assert_eq!(frame[3], 4);
}

#[test]
fn wrong_files_are_named() {
    let (ours, others) = (Authority::new(), Authority::new());
    let good = ours.server(None);
    let others_key = others.sign("other", ExtendedKeyUsagePurpose::ServerAuth).1;
    let missing = Path::new("/nowhere/at/all.pem").to_owned();
    for (files, named, why) in [
        (TlsFiles { cert: missing.clone(), ..good.clone() }, "/nowhere/at/all.pem", "No such file"),
        (TlsFiles { key: missing.clone(), ..good.clone() }, "/nowhere/at/all.pem", "No such file"),
        (TlsFiles { cert: good.key.clone(), ..good.clone() }, "server.key", "no certificate"),
        (TlsFiles { key: good.cert.clone(), ..good.clone() }, "server.pem", "no private key"),
        (TlsFiles { key: others_key, ..good.clone() }, "other.key", "do not belong together"),
        (TlsFiles { client_ca: Some(good.key.clone()), ..good.clone() }, "server.key", "no certificate"),
        (TlsFiles { client_ca: Some(missing), ..good.clone() }, "/nowhere/at/all.pem", "No such file"),
    ] {
        let error = Tls::read(&files).expect_err(named).to_string();
        assert!(error.contains(named) && error.contains(why), "{error}");
    }
    assert!(Tls::read(&good).is_ok());
}
