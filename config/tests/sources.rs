//! A program's flags from command line, environment and file: who wins, what is refused and where, what `--check`
//! prints, and that no file is a panic.
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use proptest::prelude::*;
use tandem_config::{Change, ConfigArgs, DECODE, PREFILL, Program, ROUTER, Refused, Resolved, UP, variable};
use tempfile::TempDir;

/// One of each kind of flag that the programs have.
#[derive(Clone, Debug, Parser, PartialEq)]
#[command(name = "server")]
struct Server {
    #[arg(long)]
    model: PathBuf,
    #[arg(long, default_value_t = 256)]
    max_queue: u16,
    #[arg(long, default_value_t = 1.0)]
    share: f64,
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    offset: i32,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    blocks: Option<u32>,
    #[arg(long, conflicts_with = "blocks")]
    memory: Option<String>,
    #[arg(long)]
    origin: Vec<String>,
    #[arg(long, value_delimiter = ',', value_enum, default_value = "auto")]
    way: Vec<Way>,
    #[arg(long)]
    encrypt: bool,
    #[arg(long, overrides_with = "no_cache")]
    cache: bool,
    #[arg(long, overrides_with = "cache")]
    no_cache: bool,
    #[arg(long, env = "OTEL_ENDPOINT")]
    endpoint: Option<String>,
    #[arg(long, env = "OTEL_HEADERS", hide_env_values = true, default_value = "")]
    headers: String,
    #[arg(long, requires = "key")]
    cert: Option<PathBuf>,
    #[arg(long, requires = "cert")]
    key: Option<PathBuf>,
    #[command(flatten)]
    sources: Sources,
}

/// `ConfigArgs`, comparable.
#[derive(Clone, Debug, clap::Args)]
struct Sources {
    #[command(flatten)]
    config: ConfigArgs,
}

impl PartialEq for Sources {
    /// Where it is from does not change what it is.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Way {
    Auto,
    #[value(name = "ucx/shm")]
    Shm,
    Tcp,
}

/// A program of subcommands, as `tandem` is.
#[derive(Parser)]
#[command(name = "tool")]
struct Tool {
    #[command(subcommand)]
    command: Command,
    #[arg(long, global = true, env = "TOOL_STATE")]
    state: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    Up {
        #[arg(long)]
        prefill: Option<u16>,
        #[arg(long)]
        http: Option<String>,
        #[command(flatten)]
        sources: ConfigArgs,
    },
    Ask {
        text: String,
    },
}

/// A directory with a file `t.toml` in it.
struct Place {
    dir: TempDir,
    environment: BTreeMap<OsString, OsString>,
}

impl Place {
    fn new(file: &str) -> Self {
        let place = Self { dir: tempfile::tempdir().expect("a directory"), environment: BTreeMap::new() };
        place.write(file);
        place
    }

    fn write(&self, file: &str) {
        fs::write(self.path(), file).expect("written");
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("t.toml")
    }

    fn with(mut self, variables: &[(&str, &str)]) -> Self {
        self.environment.extend(variables.iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    fn words(&self, flags: &str) -> Vec<OsString> {
        let config = ["server".into(), "--config".into(), self.path().into_os_string()];
        config.into_iter().chain(flags.split_whitespace().map(OsString::from)).collect()
    }

    fn resolve(&self, program: Program, flags: &str) -> Result<Resolved, Refused> {
        Resolved::of(program, Server::command(), self.words(flags), self.environment.clone())
    }

    fn server(&self, flags: &str) -> Server {
        flags_of(&self.resolve(ROUTER, flags).unwrap_or_else(|refused| panic!("{flags}: {refused}")))
    }

    fn error(&self, flags: &str) -> String {
        let refused = self.resolve(ROUTER, flags).err();
        refused
            .unwrap_or_else(|| panic!("{flags} is taken"))
            .to_string()
            .replace(&self.path().display().to_string(), "t.toml")
    }
}

fn flags_of(resolved: &Resolved) -> Server {
    Server::from_arg_matches(resolved.matches()).expect("clap took it")
}

#[test]
fn the_command_line_wins_over_variables_and_these_over_the_file() {
    let file = "model = 'm'\n[router]\nmax-queue = 1\n";
    assert_eq!(Place::new("model = 'm'").server("").max_queue, 256);
    assert_eq!(Place::new(file).server("").max_queue, 1);
    let place = Place::new(file).with(&[("TANDEM_ROUTER_MAX_QUEUE", "2")]);
    assert_eq!((place.server("").max_queue, place.server("--max-queue 3").max_queue), (2, 3));
    let empty = Place::new(file).with(&[("TANDEM_ROUTER_MAX_QUEUE", ""), ("TANDEM_MAX_QUEUE", "9")]);
    assert_eq!(empty.server("").max_queue, 1);
    assert_eq!(empty.server("--max-queue=3 --model n").model, PathBuf::from("n"));
}

#[test]
fn a_variable_can_name_the_file() {
    let place = Place::new("model = 'm'");
    let environment = BTreeMap::from([("TANDEM_ROUTER_CONFIG".into(), place.path().into_os_string())]);
    let words = vec!["server".into()];
    let resolved = Resolved::of(ROUTER, Server::command(), words.clone(), environment.clone()).expect("a file");
    assert_eq!((flags_of(&resolved).model, resolved.path()), (PathBuf::from("m"), Some(&*place.path())));
    assert!(Resolved::of(DECODE, Server::command(), words, environment).is_err(), "another program's");
}

#[test]
fn a_program_reads_its_tables_the_shared_one_and_what_stands_before() {
    let place = Place::new(
        "model = 'all'\nmax-queue = 1\n[node]\nmax-queue = 2\nblocks = 20\n[decode]\nmax-queue = 3\n[router]\nwhat = 1",
    );
    let of = |program| flags_of(&place.resolve(program, "").expect("a file"));
    let (prefill, decode) = (of(PREFILL), of(DECODE));
    assert_eq!((prefill.max_queue, prefill.blocks), (2, Some(20)));
    assert_eq!((decode.max_queue, decode.blocks, decode.model), (3, Some(20), PathBuf::from("all")));
    let place = Place::new("[decode]\nmodel = 'd'\nmax-queue = 3").with(&[
        ("TANDEM_NODE_MAX_QUEUE", "4"),
        ("TANDEM_DECODE_SHARE", "0.5"),
        ("TANDEM_NODE_SHARE", "0.25"),
    ]);
    let decode = flags_of(&place.resolve(DECODE, "").expect("a file"));
    assert_eq!((decode.max_queue, decode.share), (4, 0.5));
}

#[test]
fn every_kind_of_flag_has_a_value_in_the_file_and_in_the_environment() {
    let place = Place::new(
        "[router]\nmodel = 'a b'\nmax-queue = 0x10\nshare = 0.5\noffset = -3\nblocks = 1_000\n\
         origin = ['https://a', 'https://b']\nway = ['ucx/shm', 'tcp']\nencrypt = true\nendpoint = 'http://c:1'",
    );
    let server = place.server("");
    assert_eq!((server.model, server.max_queue, server.share), ("a b".into(), 16, 0.5));
    assert_eq!((server.offset, server.blocks, server.encrypt), (-3, Some(1000), true));
    assert_eq!((server.origin, server.way), (vec!["https://a".into(), "https://b".into()], vec![Way::Shm, Way::Tcp]));
    assert_eq!(place.server("--origin https://c").origin, ["https://c"], "replaced, not added to");

    let place = place.with(&[
        ("TANDEM_ROUTER_ORIGIN", "https://d https://e"),
        ("TANDEM_ROUTER_WAY", "tcp,auto"),
        ("TANDEM_ROUTER_ENCRYPT", "false"),
        ("TANDEM_ROUTER_OFFSET", "-4"),
        ("TANDEM_ROUTER_MODEL", "c d"),
    ]);
    let server = place.server("");
    assert_eq!((server.model, server.offset, server.encrypt), ("c d".into(), -4, false));
    assert_eq!((server.origin, server.way), (vec!["https://d".into(), "https://e".into()], vec![Way::Tcp, Way::Auto]));
}

#[test]
fn variables_that_a_flag_had_before_stand_between_its_own_and_the_file() {
    let file = "model = 'm'\nendpoint = 'http://file:1'";
    let place = Place::new(file).with(&[("OTEL_ENDPOINT", "http://otel:1")]);
    assert_eq!(place.server("").endpoint.as_deref(), Some("http://otel:1"));
    let place = place.with(&[("TANDEM_ROUTER_ENDPOINT", "http://own:1")]);
    assert_eq!(place.server("").endpoint.as_deref(), Some("http://own:1"));
    let place = Place::new(file).with(&[("OTEL_ENDPOINT", "")]);
    assert_eq!(place.server("").endpoint.as_deref(), Some("http://file:1"));
}

#[test]
fn a_stronger_flag_displaces_what_does_not_go_with_it() {
    let place = Place::new("model = 'm'\nblocks = 7");
    let server = place.server("--memory 2GiB");
    assert_eq!((server.blocks, server.memory.as_deref()), (None, Some("2GiB")));
    let place = Place::new("model = 'm'\nmemory = '2GiB'").with(&[("TANDEM_ROUTER_BLOCKS", "7")]);
    assert_eq!((place.server("").blocks, place.server("").memory), (Some(7), None));
    let same = Place::new("model = 'm'\nblocks = 7\nmemory = '2GiB'").error("");
    assert!(same.contains("cannot be used with") && same.contains("t.toml:2") && same.contains("t.toml:3"), "{same}");
    // Flags of which the last one counts.
    let place = Place::new("model = 'm'\nno-cache = true");
    assert!(place.server("").no_cache && !place.server("--cache").no_cache && place.server("--cache").cache);
    let place = place.with(&[("TANDEM_ROUTER_CACHE", "1")]);
    assert!(place.server("").cache && place.server("--no-cache").no_cache);
}

#[test]
fn errors_name_file_line_and_key() {
    for (file, words) in [
        ("model = 'm'\n\nmax_queue = 1", &["t.toml:3: `max_queue` is no flag of tandem-router; `max-queue` is"][..]),
        ("model = 'm'\nfoo = 1", &["t.toml:2: `foo` is no flag", "before the tables"]),
        ("[router]\nmodel = 'm'\nfoo = 1", &["t.toml:3: `foo` is no flag of tandem-router"]),
        ("[rooter]\nmodel = 'm'", &["t.toml:1: no program has the table [rooter]", "[prefill], [decode]"]),
        ("router = 'http://r'", &["t.toml:1: `router` is a table"]),
        ("[[router]]\nmodel = 'm'", &["t.toml:1: `router` is a table"]),
        ("[router]\nmodel = 'm'\nconfig = 'other'", &["t.toml:3: `config` stands on the command line"]),
        ("[router]\ncheck = true", &["t.toml:2: `check` stands on the command line"]),
        ("[router]\nmodel = 'm'\nmax-queue = '1'", &["t.toml:3: `max-queue` wants a number, not a string"]),
        ("[router]\nmodel = true", &["t.toml:2: `model` wants a string, not true or false"]),
        ("[router]\nmodel = 2026-01-01", &["wants a string, not a date"]),
        ("[router]\nmodel = {}", &["wants a string, not a table"]),
        ("[router.model]", &["t.toml:1: `model` wants a string, not a table"]),
        ("[router]\nmodel = ['a']", &["wants a string, not an array"]),
        ("[router]\nencrypt = 1", &["wants true or false, not a number"]),
        ("[router]\norigin = [1979-05-27]", &["wants strings in an array, not a date"]),
        ("model = 'm'\nmodel = 'n'", &["t.toml:2: ", "duplicate key"]),
        ("[router\n", &["t.toml:1: "]),
        ("model = 'm'\n[router]\nmax-queue = 70000", &["70000", "--max-queue", "t.toml:3: this is where"]),
        ("model = 'm'\nmax-queue = 1.5", &["1.5", "t.toml:2: this is where"]),
        ("model = 'm'\nblocks = 0", &["--blocks", "t.toml:2: this is where"]),
        ("model = 'm'\nway = ['air']", &["air", "t.toml:2: this is where"]),
        ("model = 'm'\nblocks = 99999999999999999999999999999999999999999999", &["t.toml:2: "]),
        ("model = 'm'\ncert = 'c.pem'", &["required", "--key <KEY>"]),
        ("", &["required", "--model <MODEL>"]),
    ] {
        let error = Place::new(file).error("");
        words.iter().for_each(|word| assert!(error.contains(word), "{file:?}: {error}"));
    }
    let error = Place::new("model = 'm'").with(&[("TANDEM_ROUTER_MAX_QUEUE", "many")]).error("");
    assert!(error.contains("many") && error.contains("TANDEM_ROUTER_MAX_QUEUE: this is where"), "{error}");
    let error = Place::new("model = 'm'").with(&[("TANDEM_ROUTER_ENCRYPT", "perhaps")]).error("");
    assert_eq!(error, "TANDEM_ROUTER_ENCRYPT wants true or false");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let place = Place::new("");
    fs::write(place.path(), b"model = '\xff'").expect("written");
    assert!(place.error("").contains("--config t.toml: not UTF-8"), "{}", place.error(""));
    place.write(&"#".repeat((1 << 20) + 1));
    assert!(place.error("").contains("more than 1048576 bytes"), "{}", place.error(""));
    fs::remove_file(place.path()).expect("removed");
    assert!(place.error("").contains("--config t.toml: No such file"), "{}", place.error(""));
    fs::create_dir(place.path()).expect("made");
    assert!(place.error("").contains("--config t.toml: Is a directory"), "{}", place.error(""));
}

#[test]
fn words_that_clap_refuses_stay_its_own() {
    let place = Place::new("model = 'm'\nmax-queue = 1");
    for (flags, words) in [
        ("--max-queue many", "invalid value 'many'"),
        ("--what --max-queue 3", "unexpected argument '--what'"),
        ("--max-queue", "a value is required"),
        ("--max-queue 1 --max-queue 2", "cannot be used multiple times"),
    ] {
        let error = place.error(flags);
        assert!(error.contains(words) && !error.contains("this is where"), "{flags}: {error}");
    }
    // It is asked for before anything is read.
    let help = Place::new("nonsense").resolve(ROUTER, "--help").unwrap_err().to_string();
    assert!(help.starts_with("One of each kind"), "{help}");
}

#[test]
fn one_command_of_several_has_a_file() {
    let place =
        Place::new("otlp-headers = 'of its children'\nhttp = 'all:1'\n[up]\nprefill = 2\n[router]\nhttp = 'r:1'");
    let file = place.path().display().to_string();
    let resolve = |line: &str, variables: &[(&str, &str)]| {
        let words = line.replace("FILE", &file).split_whitespace().map(OsString::from).collect();
        let environment = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        Resolved::of(UP, Tool::command(), words, environment)
    };
    let tool = |line: &str, variables: &[(&str, &str)]| {
        Tool::from_arg_matches(resolve(line, variables).expect(line).matches()).expect(line)
    };
    let up = |line: &str, variables: &[(&str, &str)]| {
        let Tool { command: Command::Up { prefill, http, .. }, state } = tool(line, variables) else {
            panic!("{line}")
        };
        (prefill, http.unwrap_or_default(), state.unwrap_or_default())
    };
    assert_eq!(up("tool up --config FILE", &[]), (Some(2), "all:1".into(), PathBuf::new()));
    assert_eq!(up("tool up --prefill 3 --config FILE", &[]).0, Some(3));
    // A value that is the command's name, before it.
    let line = "tool --state up up --config FILE";
    assert_eq!(up(line, &[("TANDEM_UP_HTTP", "v:1")]), (Some(2), "v:1".into(), "up".into()));
    assert_eq!(up("tool up --config FILE", &[("TOOL_STATE", "s")]).2, PathBuf::from("s"));
    let Command::Ask { text } = tool("tool ask up", &[("TANDEM_UP_PREFILL", "nonsense")]).command else { panic!() };
    assert_eq!(text, "up");
    let own = resolve("tool up --config FILE", &[]).expect("a file");
    let places: Vec<_> =
        own.flags_for(&ROUTER).into_iter().map(|(flag, place)| (flag, place.replace(&file, "F"))).collect();
    assert_eq!((places, own.flags_for(&DECODE)), (vec![("http".to_owned(), "F:6".to_owned())], Vec::new()));
}

#[test]
fn a_report_has_every_value_with_its_source() {
    let place = Place::new("model = 'a\"\\b'\n[router]\norigin = ['https://a']\nencrypt = true").with(&[
        ("TANDEM_ROUTER_SHARE", "0.5"),
        ("OTEL_HEADERS", "secret=1"),
        ("TANDEM_ROUTER_MAX_QUEU", "1"),
        ("TANDEM_ROUTER_SERVICE_HOST", "10.0.0.1"),
        ("TANDEM_ROUTER_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
    ]);
    let resolved = place.resolve(ROUTER, "--offset -1 --check").expect("good");
    assert!(resolved.is_check() && !place.resolve(ROUTER, "").expect("good").is_check());
    let report = resolved.report().replace(&place.path().display().to_string(), "t.toml");
    let expected = r#"# tandem-router: each value with its source; defaults are comments.
[router]
model = "a\"\\b"  # t.toml:1
# max-queue = 256  # default
share = 0.5  # TANDEM_ROUTER_SHARE
offset = -1  # command line
# blocks: not set
# memory: not set
origin = ["https://a"]  # t.toml:3
# way = ["auto"]  # default
encrypt = true  # t.toml:4
# cache: not set
# no-cache: not set
# endpoint: not set
# headers is set, and not shown  # OTEL_HEADERS
# cert: not set
# key: not set
# config = "t.toml"  # command line
# TANDEM_ROUTER_MAX_QUEU in the environment is no flag's variable.
"#;
    assert_eq!(report, expected);
}

#[test]
fn a_changed_file_is_compared_with_what_runs() {
    let place = Place::new("model = 'm'\nmax-queue = 1\norigin = ['a', 'b']\nheaders = 'secret=1'");
    let started = place.resolve(ROUTER, "--share 0.5").expect("good");
    assert_eq!(started.changes(&started.again().expect("the same")), []);
    place.write("model = 'm'\nmax-queue = 2\nshare = 0.25\nencrypt = true\nheaders = 'secret=2'");
    let change = |flag: &str, from: &str, to: &str| Change { flag: flag.into(), from: from.into(), to: to.into() };
    let changes = started.changes(&started.again().expect("good"));
    let queue = change("max-queue", "1", "2");
    assert_eq!(changes, [queue, change("origin", "a b", ""), change("encrypt", "", "true"), change("headers", "", "")]);
    place.write("model = 1 2");
    assert!(started.again().unwrap_err().to_string().contains("t.toml:1"));
}

#[test]
fn variables_are_named_by_table_and_flag() {
    assert_eq!(variable("router", "max-queue"), "TANDEM_ROUTER_MAX_QUEUE");
}

/// Values as a file can have them, most of them right ones.
fn values() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("'text'".to_owned()),
        any::<i64>().prop_map(|number| number.to_string()),
        (1_u16..9).prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:?}").to_lowercase()),
        any::<bool>().prop_map(|on| on.to_string()),
        Just("['tcp', 'ucx/shm']".to_owned()),
        Just("[1, 'a', [true]]".to_owned()),
        Just("{ a = 1 }".to_owned()),
        "\"[a-z \\\\\\\\]{0,9}\"",
    ]
}

fn keys() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "model",
        "max-queue",
        "share",
        "offset",
        "blocks",
        "memory",
        "origin",
        "way",
        "encrypt",
        "cache",
        "no-cache",
        "endpoint",
        "headers",
        "cert",
        "key",
        "config",
        "check",
        "max_queue",
        "[router]",
        "[node]",
        "[x]",
    ])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_is_a_panic(text in ".{0,200}") {
        let _ = Place::new(&text).resolve(ROUTER, "");
    }

    #[test]
    fn no_file_and_no_variable_is_a_panic(
        lines in prop::collection::vec((keys(), values()), 0..8),
        variables in prop::collection::vec((keys(), ".{0,20}"), 0..4),
    ) {
        let line = |(key, value): &(&str, String)| match key.starts_with('[') {
            true => format!("{key}\n"),
            false => format!("{key} = {value}\n"),
        };
        let mut place = Place::new(&lines.iter().map(line).collect::<String>());
        for (key, value) in variables {
            place.environment.insert(variable("router", key).into(), value.into());
        }
        if let Ok(resolved) = place.resolve(ROUTER, "--model m") {
            let _ = resolved.report();
        }
    }

    /// What `--check` prints is a file of the same meaning.
    #[test]
    fn a_report_is_a_file_again(
        max_queue in any::<u16>(), share in 0.0..1e9, offset in any::<i32>(), blocks in prop::option::of(1_u32..),
        origin in prop::collection::vec("[ -~]{0,12}", 0..4), encrypt in any::<bool>(), model in "\\PC{1,20}",
        endpoint in prop::option::of("[^\u{0}]{1,12}"),
    ) {
        // Of an address that may have a password the report says that it is set, and no more.
        prop_assume!(!origin.iter().chain([&model]).chain(&endpoint).any(|value| value.contains("://")));
        let mut words: Vec<OsString> = vec!["server".into()];
        words.extend([format!("--max-queue={max_queue}"), format!("--share={share}")].map(OsString::from));
        words.extend([format!("--offset={offset}"), format!("--model={model}")].map(OsString::from));
        words.extend(blocks.map(|blocks| format!("--blocks={blocks}").into()));
        words.extend(origin.iter().map(|origin| format!("--origin={origin}").into()));
        words.extend(encrypt.then(|| "--encrypt".into()));
        words.extend(endpoint.map(|endpoint| format!("--endpoint={endpoint}").into()));
        let first = Resolved::of(ROUTER, Server::command(), words, BTreeMap::new());
        let first = first.map_err(|refused| TestCaseError::fail(refused.to_string()))?;
        let place = Place::new(&first.report());
        let second = place.resolve(ROUTER, "").map_err(|refused| {
            TestCaseError::fail(format!("{refused}\n{}", first.report()))
        })?;
        prop_assert_eq!(flags_of(&first), flags_of(&second));
    }
}
