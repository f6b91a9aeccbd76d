//! What `--check` prints: a file that would give the program the same configuration without variables and flags.
//! Defaults are comments in it: said aloud, some of them would not go with other flags. Pure.
use std::ffi::OsString;
use std::fmt::Write;

use crate::Program;
use crate::flag::{Flag, Kind};
use crate::merge::Source;
use crate::userinfo::hidden;

/// A flag as clap has it in the end.
pub(crate) struct Row<'a> {
    pub flag: &'a Flag,
    /// Empty: not set, a switch that is off included.
    pub values: Vec<OsString>,
    pub source: Source,
}

/// `unknown`: variables that look like the program's.
pub(crate) fn report(program: &Program, rows: &[Row<'_>], unknown: &[String]) -> String {
    let table = program.tables.first().unwrap_or(&"");
    let mut text = format!("# {}: each value with its source; defaults are comments.\n[{table}]\n", program.name);
    for row in rows {
        let _ = writeln!(text, "{}", line(row));
    }
    for name in unknown {
        let _ = writeln!(text, "# {name} in the environment is no flag's variable.");
    }
    text
}

fn line(Row { flag, values, source }: &Row<'_>) -> String {
    let key = &flag.key;
    let secret = flag.secret || values.iter().map(|value| value.to_string_lossy()).any(|value| hidden(&value) != value);
    let value = match (flag.kind, values.as_slice()) {
        (_, []) => return format!("# {key}: not set"),
        (Kind::Switch, [on, ..]) => on.to_string_lossy().into_owned(),
        (kind, [one]) if !flag.repeatable => written(kind, one),
        (kind, all) => format!("[{}]", all.iter().map(|one| written(kind, one)).collect::<Vec<_>>().join(", ")),
    };
    match source {
        Source::Default if flag.secret => format!("# {key}: not set"),
        Source::Default => format!("# {key} = {value}  # default"),
        // No file names another one.
        source if key == "config" => format!("# {key} = {value}  # {}", name(source)),
        source if secret => format!("# {key} is set, and not shown  # {}", name(source)),
        source => format!("{key} = {value}  # {}", name(source)),
    }
}

fn name(source: &Source) -> &str {
    match source {
        Source::Default => "default",
        Source::File(place) => place,
        Source::Variable(name) => name,
        Source::Flag => "command line",
    }
}

/// In TOML.
fn written(kind: Kind, value: &OsString) -> String {
    let text = value.to_string_lossy();
    match kind {
        Kind::Number => number(&text),
        Kind::Text | Kind::Switch => quoted(&text),
    }
}

/// Rust reads `+07` as a number, TOML does not.
fn number(text: &str) -> String {
    let whole = || text.parse::<i128>().ok().map(|number| number.to_string());
    let float = || text.parse::<f64>().ok().map(|number| format!("{number:?}").to_lowercase());
    whole().or_else(float).unwrap_or_else(|| quoted(text))
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
