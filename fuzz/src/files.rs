//! What operators write: configuration, keys in files and directories, tokens, PEM, certificates' names, GGUF headers,
//! and flags that have a grammar. They are no strangers, but a file may come from elsewhere, and is read again while
//! the router serves.
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

use rcgen::{CertificateParams, DnType, KeyPair, SanType};
use tandem_config::{Environment, ROUTER, Resolved};
use tandem_etcd::{EtcdAddress, HostPort};
use tandem_gguf::Header;
use tandem_ports::{ClientName, JoinToken, JoinTokens, PeerName, Tls, TlsFiles};
use tandem_router::admission::keys::{KeySource, Keys, Rules};
use tandem_router::http::Origin;
use tandem_router::limits::pools::Pools;
use tandem_router::text::ModelText;
use tandem_router::traces::JaegerUi;
use tandem_telemetry::Collector;

use crate::Target;

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "config", run: config, seeds: config_seeds },
    Target { name: "api_keys", run: api_keys, seeds: key_seeds },
    Target { name: "key_directories", run: key_directories, seeds: directory_seeds },
    Target { name: "certificates", run: certificates, seeds: certificate_seeds },
    Target { name: "secrets", run: secrets, seeds: secret_seeds },
    Target { name: "gguf", run: gguf, seeds: gguf_seeds },
    Target { name: "flags", run: flags, seeds: flag_seeds },
];

/// Calls `read` with a file of these bytes, in memory.
pub fn with_file<T>(bytes: &[u8], read: impl FnOnce(&Path) -> T) -> T {
    let path = PathBuf::from(format!("/dev/shm/tandem-fuzz-{}", std::process::id()));
    std::fs::write(&path, bytes).expect("/dev/shm");
    let value = read(&path);
    std::fs::remove_file(&path).expect("it is ours");
    value
}

/// The router's TOML file. Of one that is taken `--check` prints something; it differs not from itself.
fn config(data: &[u8]) {
    let resolve = |text: &[u8]| {
        with_file(text, |path| {
            let words = ["tandem-router", "--config", &path.display().to_string()].map(Into::into).to_vec();
            Resolved::of(ROUTER, tandem_router::config::command(), words, Environment::new())
        })
    };
    let Ok(resolved) = resolve(data) else { return };
    let report = resolved.report();
    assert!(!report.is_empty());
    assert!(resolved.changes(&resolved).is_empty());
}

fn config_seeds() -> Vec<Vec<u8>> {
    [
        "model = \"/m.gguf\"\nlog-format = \"json\"\n[router]\nhttp = \"127.0.0.1:8000\"\nmax-queue = 10\n\
         cors-origin = [\"https://a.example\"]\npools = \"a=0-9,b=10-:2\"\n[node]\nthreads = 2\n",
        "model = '/m.gguf'\n[router]\nnext-free-port = [\"http\", \"grpc\"]\ntrace-sample-ratio = 0.5\n\
         lease-ms = 3_000\n[prefill]\nlisten = \"[::1]:0\"\n[up]\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

/// The JSON file of API keys. Who is in it is let in by none but its own key.
fn api_keys(data: &[u8]) {
    let Ok(keys) = with_file(data, |path| Keys::load(path, Instant::now())) else { return };
    assert!(keys.required() && !keys.names().is_empty());
    for wrong in [None, Some("Bearer "), Some("Bearer x"), Some("Basic x")] {
        assert!(keys.tenant(wrong, None).is_err());
    }
    let text = String::from_utf8_lossy(data);
    let _ = keys.tenant(Some(&*text), Some(&*text));
}

fn key_seeds() -> Vec<Vec<u8>> {
    vec![
        br#"{"keys": [{"name": "alice", "key": "sk-alice-0123456789abcdef", "weight": 4, "requests_per_minute": 2,
        "tokens_per_minute": 9, "max_concurrent_requests": 3, "min_priority": -3}, {"name": "bob",
        "sha256": "2BB80D537B1DA3E38BD30361AA855686BDE0EACD7162FEF6A25FE97BF527A25B"}]}"#
            .to_vec(),
    ]
}

/// A directory of keys. Bytes of 0 separate its files: a name, a key, a name, a key. A client is let in only with a key
/// of such a file, and as the tenant of its name.
fn key_directories(data: &[u8]) {
    let fields: Vec<&[u8]> = data.split(|byte| *byte == 0).collect();
    let directory = PathBuf::from(format!("/dev/shm/tandem-fuzz-keys-{}", std::process::id()));
    // Of a process that was killed, and had this one's number.
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir(&directory).expect("/dev/shm");
    for pair in fields.chunks_exact(2) {
        let name = OsStr::from_bytes(pair[0]);
        // Others are no names of a file, or files elsewhere.
        if name.len() <= 255 && Path::new(name).file_name() == Some(name) {
            std::fs::write(directory.join(name), pair[1]).expect("/dev/shm");
        }
    }
    let of_directory = Keys::load_by(&KeySource::Path(directory.clone()), Rules::default(), Instant::now());
    std::fs::remove_dir_all(&directory).expect("it is ours");
    if let Ok(keys) = of_directory {
        assert!(keys.required() && !keys.names().is_empty() && keys.names().len() <= fields.len());
        let keys_of: Vec<(&[u8], &str)> = fields
            .chunks_exact(2)
            .filter_map(|pair| Some((pair[0], std::str::from_utf8(pair[1]).ok()?.trim())))
            .collect();
        for (_, key) in &keys_of {
            if let Ok(tenant) = keys.tenant(Some(&*format!("Bearer {key}")), None) {
                assert!(keys_of.contains(&(tenant.name().as_bytes(), *key)), "{tenant:?} by {key}");
            }
        }
    }
}

fn directory_seeds() -> Vec<Vec<u8>> {
    vec![
        b"alice\0sk-alice-0123456789abcdef\n\0bob\0sk-bob-0123456789abcdefgh".to_vec(),
        b"..data\0x\0alice\0 sk-alice-0123456789abcdef".to_vec(),
    ]
}

/// A certificate as DER, of which a client's names are read; and lines that are the URIs of a peer's.
fn certificates(data: &[u8]) {
    let names = ClientName::of(&data.to_vec().into());
    assert!(names.spiffe_id.is_none_or(|id| id.starts_with("spiffe://") && id.len() <= 2048));
    assert!(names.common_name.is_none_or(|name| name.len() <= data.len()));
    let text = String::from_utf8_lossy(data);
    if let Ok(Some(name)) = PeerName::among(text.lines()) {
        let uri = name.to_string();
        assert!(text.lines().eq([&*uri]), "a name stands alone, and is written in one way: {uri}");
        assert_eq!(PeerName::among([&*uri].into_iter()), Ok(Some(name)));
    }
}

fn certificate_seeds() -> Vec<Vec<u8>> {
    let key = KeyPair::generate().expect("a key");
    let certificate = |uris: &[&str], names: &[(DnType, &str)]| {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        let uri = |uri: &&str| SanType::URI((*uri).try_into().expect("ASCII"));
        params.subject_alt_names.extend(uris.iter().map(uri));
        names.iter().for_each(|(kind, name)| params.distinguished_name.push(kind.clone(), *name));
        params.self_signed(&key).expect("a certificate").der().to_vec()
    };
    vec![
        certificate(&["spiffe://example.org/tandem/decode/d0"], &[(DnType::CommonName, "team a")]),
        certificate(&["https://example.org", "spiffe://a/b"], &[(DnType::OrganizationName, "Example")]),
        certificate(&[], &[(DnType::OrganizationName, "Example"), (DnType::CommonName, &"x".repeat(300))]),
        b"spiffe://example.org/tandem/router".to_vec(),
        b"spiffe://example.org/tandem/prefill/p-0.Z_9\nhttps://example.org".to_vec(),
    ]
}

/// A join token, and PEM files, of which the three are one.
fn secrets(data: &[u8]) {
    if let Ok(token) = JoinToken::of(&String::from_utf8_lossy(data)) {
        assert_eq!(token.header().len(), 64);
    }
    with_file(data, |path| {
        let _ = JoinTokens::load(path);
        let path = path.to_owned();
        let _ = Tls::read(&TlsFiles { cert: path.clone(), key: path.clone(), client_ca: Some(path) });
    });
}

fn secret_seeds() -> Vec<Vec<u8>> {
    let pair = rcgen::generate_simple_self_signed(["fuzz".to_owned()]).expect("a certificate");
    let pem = pair.cert.pem() + &pair.signing_key.serialize_pem();
    vec![b"our-cluster-s-secret\n".to_vec(), pem.into_bytes()]
}

/// A model's header, and what the router makes of its keys.
fn gguf(data: &[u8]) {
    if let Ok(header) = Header::parse(data) {
        let _ = header.end();
        for tensor in header.tensors().values() {
            let _ = (tensor.values(), tensor.bytes());
        }
        if let Ok(Some(split)) = header.split() {
            let _ = split.names_of_the_others("m-00001-of-00002.gguf");
            let _ = split.check_part(&header, 0, &header);
            let _ = split.check_tensors(header.tensors().len());
        }
    }
    let _ = with_file(data, ModelText::check);
}

/// A whole model without tensors: its vocabulary is the bytes, and one merge.
fn gguf_seeds() -> Vec<Vec<u8>> {
    const U32: u32 = 4;
    const I32: u32 = 5;
    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let texts = |texts: &[String]| {
        let head = [&STRING.to_le_bytes()[..], &(texts.len() as u64).to_le_bytes()].concat();
        [head, texts.iter().flat_map(|text| string(text)).collect()].concat()
    };
    // Visible characters stand for themselves in such a vocabulary, U+0120 for the space.
    let mut tokens: Vec<String> = ('!'..='~').map(String::from).collect();
    tokens.extend(["\u{120}", "ab", "<|im_start|>", "<|im_end|>"].map(str::to_owned));
    let (count, end) = (tokens.len() as u64, tokens.len() as u32 - 1);
    let kinds: Vec<u8> = (0..count).flat_map(|id| if id >= count - 2 { 3_i32 } else { 1 }.to_le_bytes()).collect();
    let kinds = [&I32.to_le_bytes()[..], &count.to_le_bytes(), &kinds].concat();
    let template = "{% for m in messages %}<|im_start|>{{ m['role'] }}{{ m['content'] }}<|im_end|>{% endfor %}";
    let keys: [(&str, u32, Vec<u8>); 9] = [
        ("general.architecture", STRING, string("llama")),
        ("llama.context_length", U32, 64_u32.to_le_bytes().to_vec()),
        ("tokenizer.ggml.model", STRING, string("gpt2")),
        ("tokenizer.ggml.pre", STRING, string("smollm")),
        ("tokenizer.ggml.tokens", ARRAY, texts(&tokens)),
        ("tokenizer.ggml.merges", ARRAY, texts(&["a b".to_owned()])),
        ("tokenizer.ggml.token_type", ARRAY, kinds),
        ("tokenizer.ggml.eos_token_id", U32, end.to_le_bytes().to_vec()),
        ("tokenizer.chat_template", STRING, string(template)),
    ];
    let mut file = [&b"GGUF"[..], &3_u32.to_le_bytes(), &0_u64.to_le_bytes(), &9_u64.to_le_bytes()].concat();
    for (key, kind, value) in keys {
        file.extend([string(key), kind.to_le_bytes().to_vec(), value].concat());
    }
    vec![file]
}

/// Flags whose values have a grammar of their own.
fn flags(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(pools) = Pools::from_str(&text) {
        for tokens in [0, 1, 1000, u32::MAX] {
            assert!(pools.of(tokens) < pools.iter().len());
        }
        assert!(pools.slots(512).iter().all(|slots| *slots > 0));
    }
    if let Ok(address) = EtcdAddress::from_str(&text) {
        assert_eq!(EtcdAddress::from_str(&address.to_string()), Ok(address));
    }
    // What routers write into etcd, too.
    if let Ok(address) = HostPort::from_str(&text) {
        assert_eq!(HostPort::from_str(&address.to_string()), Ok(address));
    }
    let _ = Origin::from_str(&text);
    let _ = JaegerUi::from_str(&text);
    if let Ok(collector) = Collector::at("http://127.0.0.1:1").with_headers(&text) {
        let _ = collector.check();
    }
    let _ = Collector::at(&*text).check();
}

fn flag_seeds() -> Vec<Vec<u8>> {
    [
        "short=0-999,long=1000-:3",
        "https://a.example:8443",
        "authorization=Bearer%20x,b=c",
        "http://127.0.0.1:16686/ui",
        "etcds://10.0.0.1:2379,etcd-2,[fd00::1]:1/tandem/routers",
        "[fd00::1]:8002",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}
