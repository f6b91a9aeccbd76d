//! `docs/reference/flags.md` is what the programs' own command lines say: this test makes the page from them and
//! compares. `TANDEM_WRITE_REFERENCE=1` writes it instead (`make reference`).
use std::fmt::Write;
use std::path::Path;

use clap::builder::PossibleValue;
use clap::{Arg, ArgAction, Command, CommandFactory};

const PAGE: &str = "docs/reference/flags.md";
const WRITE: &str = "TANDEM_WRITE_REFERENCE";

const HEAD: &str = "\
# Flags

Every flag of every program, with its environment variable, default and meaning. This page is made
from the programs themselves by `make reference`; a test fails where it is out of date. `--help` of
each program says the same.

- A value `N` is a number, `MS` milliseconds, `ADDR` an address such as `127.0.0.1:8000`.
- Every flag can stand in the environment or in a file as well: see
  [Configuration](../configuration.md). The command line wins over variables, and these over the
  file. An empty variable counts as none.
- [Exit codes](../operate.md#exit-codes) are on a page of their own.

Variables that are no flags: `RUST_LOG` chooses log lines where `--log-filter` does not (`info` by
default; `access=off` leaves out the line of each request), `UCX_*` reach UCX as they are,
`CUDA_VISIBLE_DEVICES` chooses the GPUs that a node may see.
";

#[test]
fn the_reference_of_flags_is_up_to_date() {
    let page = page();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join(PAGE);
    if std::env::var_os(WRITE).is_some_and(|value| !value.is_empty()) {
        std::fs::write(&path, page).expect("a page that can be written");
        return;
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = page.lines().zip(written.lines()).find(|(now, then)| now != then);
    assert!(page == written, "{PAGE} is out of date, `make reference` writes it: {differs:#?}");
}

fn page() -> String {
    let router = built(tandem_router::config::command());
    let prefill = built(tandem_prefill_node::Args::command());
    let decode = built(tandem_decode_node::Args::command());
    let tool = built(tandem::command());
    let mut page = HEAD.to_owned();
    section(&mut page, "`tandem-router`", about(&router), flags(&router), Some("router"));
    let (of_both, of_prefill, of_decode) = shared(&flags(&prefill), &flags(&decode));
    let both = "What prefill and decode nodes have in common. TANDEM_PREFILL_… and TANDEM_DECODE_… are for one kind.";
    section(&mut page, "Both kinds of nodes", both, of_both, Some("node"));
    section(&mut page, "`tandem-prefill-node` alone", about(&prefill), of_prefill, Some("prefill"));
    section(&mut page, "`tandem-decode-node` alone", about(&decode), of_decode, Some("decode"));
    tool_sections(&mut page, "tandem", &tool);
    page
}

/// With global flags where they are taken, and everything else that clap fills in late.
fn built(mut command: Command) -> Command {
    command.build();
    command
}

fn about(command: &Command) -> String {
    command.get_about().map(ToString::to_string).unwrap_or_default()
}

/// A section for each command, whatever its depth. Flags of all commands stand with the first one alone.
fn tool_sections(page: &mut String, name: &str, command: &Command) {
    let is_first = !name.contains(' ');
    let arguments = command.get_arguments().filter(|arg| is_shown(arg) && (is_first || !arg.is_global_set()));
    let table = (name == "tandem up").then_some("up");
    section(page, &format!("`{name}`"), about(command), arguments.map(row).collect(), table);
    let visible = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
    for command in command.get_subcommands().filter(visible) {
        tool_sections(page, &format!("{name} {}", command.get_name()), command);
    }
}

/// `table`: of the file, after which variables are named.
fn section(page: &mut String, title: &str, about: impl AsRef<str>, rows: Vec<Row>, table: Option<&str>) {
    let about = about.as_ref().trim().trim_end_matches('.');
    let _ = write!(page, "\n## {title}\n\n{}\n", wrapped(&format!("{about}.")));
    if rows.is_empty() {
        return;
    }
    page.push_str("\n| flag | variable | default | meaning |\n|---|---|---|---|\n");
    for row in rows {
        let variable = variables(&row, table).join(", ");
        let Row { flag, default, meaning, .. } = row;
        let _ = writeln!(page, "| {flag} | {variable} | {default} | {meaning} |");
    }
}

/// One flag.
#[derive(Clone, PartialEq)]
struct Row {
    flag: String,
    /// `None`: it is no flag, or one for the command line alone.
    key: Option<String>,
    /// A variable that it has whatever the program.
    variable: Option<String>,
    default: String,
    meaning: String,
}

fn flags(command: &Command) -> Vec<Row> {
    command.get_arguments().filter(|arg| is_shown(arg)).map(row).collect()
}

fn is_shown(arg: &Arg) -> bool {
    !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version")
}

fn row(arg: &Arg) -> Row {
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    // Defaults that depend on something stand in the text.
    let (meaning, in_text) = without_default(&help);
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    let default = match defaults.is_empty() || !takes_value {
        true => cell(&in_text),
        false => code(&defaults.join(",")),
    };
    let values: Vec<PossibleValue> = if takes_value { arg.get_possible_values() } else { Vec::new() };
    let meaning = with_values(meaning, &values);
    let names = arg.get_value_names().unwrap_or_default();
    let value = match (values.is_empty(), names.first()) {
        (false, _) => values.iter().map(PossibleValue::get_name).collect::<Vec<_>>().join("|"),
        (true, Some(name)) => name.to_string(),
        (true, None) => String::new(),
    };
    let flag = match arg.get_long() {
        Some(long) if takes_value => format!("--{long} {value}"),
        Some(long) => format!("--{long}"),
        None => value,
    };
    let key = arg.get_long().filter(|long| *long != "check").map(str::to_owned);
    let variable = arg.get_env().map(|name| name.to_string_lossy().into_owned());
    Row { flag: code(flag.trim()), key, variable, default, meaning: cell(&meaning) }
}

/// What stands around `[default: …]`, and what is in it.
fn without_default(help: &str) -> (String, String) {
    let parts = help.split_once("[default: ").and_then(|(before, rest)| Some((before, rest.split_once(']')?)));
    match parts {
        Some((before, (default, behind))) => (format!("{}{behind}", before.trim_end()), default.to_owned()),
        None => (help.to_owned(), String::new()),
    }
}

/// The same, with what each value means, as far as that is said.
fn with_values(meaning: String, values: &[PossibleValue]) -> String {
    let of = |value: &PossibleValue| value.get_help().map(|help| format!("`{}`: {help}", value.get_name()));
    match values.iter().filter_map(of).collect::<Vec<_>>().join("; ") {
        all if all.is_empty() => meaning,
        all => format!("{}. {all}", meaning.trim_end_matches('.')),
    }
}

/// The one that wins first.
fn variables(row: &Row, table: Option<&str>) -> Vec<String> {
    let own = table.zip(row.key.as_deref()).map(|(table, key)| tandem_config::variable(table, key));
    own.into_iter().chain(row.variable.clone()).map(|name| code(&name)).collect()
}

/// What both have, and what each has alone.
fn shared(one: &[Row], other: &[Row]) -> (Vec<Row>, Vec<Row>, Vec<Row>) {
    let (both, alone): (Vec<Row>, Vec<Row>) = one.iter().cloned().partition(|row| other.contains(row));
    let alone_there = other.iter().filter(|row| !both.contains(row)).cloned().collect();
    (both, alone, alone_there)
}

/// A `|` ends a cell, code or not.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

/// In lines that fit the page.
fn wrapped(text: &str) -> String {
    let (mut out, mut columns) = (String::new(), 0);
    for word in text.split_whitespace() {
        let width = word.chars().count();
        if columns > 0 && columns + 1 + width > 100 {
            out.push('\n');
            columns = 0;
        } else if columns > 0 {
            out.push(' ');
            columns += 1;
        }
        out.push_str(word);
        columns += width;
    }
    out
}

#[test]
fn a_flag_becomes_a_row() {
    let arg = Arg::new("size").long("size").value_name("A|B").env("SIZE").help("How much [default: all]");
    let row = row(&built(Command::new("x").arg(arg)).get_arguments().next().expect("one").clone());
    assert_eq!(
        (variables(&row, None), variables(&row, Some("up")).join(" ")),
        (vec!["`SIZE`".into()], "`TANDEM_UP_SIZE` `SIZE`".into())
    );
    assert_eq!([row.flag, row.default, row.meaning], ["`--size A\\|B`", "all", "How much"]);
    let arg = Arg::new("way").long("way").help("How [default: best]. Or else").value_parser([
        PossibleValue::new("a").help("By air"),
        PossibleValue::new("b"),
        PossibleValue::new("c").help("By car"),
    ]);
    let row = self::row(&built(Command::new("x").arg(arg)).get_arguments().next().expect("one").clone());
    assert_eq!(
        [row.flag, row.default, row.meaning],
        ["`--way a\\|b\\|c`", "best", "How. Or else. `a`: By air; `c`: By car"]
    );
    let switch = Arg::new("on").long("on").action(ArgAction::SetTrue).help("On < off");
    let row = self::row(&built(Command::new("x").arg(switch)).get_arguments().next().expect("one").clone());
    assert_eq!((variables(&row, None).len(), row.key.as_deref()), (0, Some("on")));
    assert_eq!([row.flag, row.default, row.meaning], ["`--on`", "", "On &lt; off"]);
}

/// Compose replaces `${TANDEM_…}` by variables of the same environment. And Kubernetes makes variables out of the names
/// of services: one called `tandem-router` leaves `TANDEM_ROUTER_PORT` and `TANDEM_ROUTER_SERVICE_…` in each container.
#[test]
fn no_variable_of_a_flag_has_another_meaning() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("deploy/compose");
    let files = std::fs::read_dir(folder).expect("compose files").map(|file| file.expect("a file").path());
    let texts = files.filter(|path| path.is_file()).map(|path| std::fs::read_to_string(path).expect("text"));
    let texts = texts.collect::<String>();
    let taken: Vec<&str> = texts
        .split("${TANDEM_")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_uppercase() && c != '_' && !c.is_ascii_digit()).next())
        .collect();
    assert!(taken.contains(&"NODE_MEMORY") && taken.len() > 10, "{taken:?}");
    let commands = [
        ("router", built(tandem_router::config::command())),
        ("node", built(tandem_prefill_node::Args::command())),
        ("prefill", built(tandem_prefill_node::Args::command())),
        ("node", built(tandem_decode_node::Args::command())),
        ("decode", built(tandem_decode_node::Args::command())),
        ("up", built(tandem::command()).find_subcommand("up").expect("up").clone()),
    ];
    for (table, command) in &commands {
        for key in command.get_arguments().filter_map(Arg::get_long) {
            let name = tandem_config::variable(table, key);
            assert!(!taken.iter().any(|taken| name == format!("TANDEM_{taken}")), "{name} is compose's");
            let of_service = key == "port" || key.starts_with("port-") || key.starts_with("service-");
            assert!(!of_service, "--{key}: Kubernetes sets {name}");
        }
    }
}

#[test]
fn long_lines_are_wrapped() {
    let text = wrapped(&"word ".repeat(50));
    assert!(text.lines().count() == 3 && text.lines().all(|line| line.chars().count() <= 100), "{text}");
}
