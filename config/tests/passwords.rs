//! A password in an address is nowhere to be read: not in what `--check` prints, nor in changes, nor in errors.
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use clap::{CommandFactory, Parser};
use tandem_config::{Change, ConfigArgs, ROUTER, Resolved};

#[derive(Parser)]
struct Server {
    #[arg(long)]
    blocks: Option<u32>,
    #[arg(long)]
    origin: Vec<String>,
    #[arg(long)]
    endpoint: Option<String>,
    #[command(flatten)]
    sources: ConfigArgs,
}

#[test]
fn what_may_be_a_password_in_an_address_is_nowhere_to_be_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let path: PathBuf = dir.path().join("t.toml");
    let write = |text: &str| fs::write(&path, text).expect("written");
    write("origin = ['http://a', 'http://root:geheim@b:1']");
    let words = ["server", "--endpoint", "http://root:geheim@h", "--config", path.to_str().expect("text")];
    let words = words.map(OsString::from).into();
    let started = Resolved::of(ROUTER, Server::command(), words, BTreeMap::new()).expect("good");
    let report = started.report();
    assert!(!report.contains("geheim") && report.contains("# origin is set, and not shown  # "), "{report}");
    assert!(report.contains("# endpoint is set, and not shown  # command line"), "{report}");
    write("origin = ['http://root:geheimer@c:1']");
    let changes = started.changes(&started.again().expect("good"));
    let (from, to) = ("http://a http://…@b:1".to_owned(), "http://…@c:1".to_owned());
    assert_eq!(changes, [Change { flag: "origin".into(), from, to }]);
    for (file, words) in [
        ("blocks = 'http://root:geheim@h'", "t.toml:1"),
        ("[router]\nblock = 1\norigin = ['http://root:geheim@h']", "t.toml:2"),
    ] {
        write(file);
        let refused = started.again().unwrap_err().to_string();
        assert!(!refused.contains("geheim") && refused.contains(words), "{refused}");
    }
    let words = ["server", "--blocks", "http://root:geheim@h"].map(OsString::from).into();
    let refused = Resolved::of(ROUTER, Server::command(), words, BTreeMap::new()).expect_err("no number").to_string();
    assert!(!refused.contains("geheim") && refused.contains("http://…@h"), "{refused}");
}
