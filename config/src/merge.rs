//! One argument vector out of command line, environment and file, for a single parse by clap. Pure.
//!
//! A flag takes its value from the first of these that has it: the command line, the variable of the program's own
//! table, that of the table that it shares, a variable that the flag had before (`OTEL_…`), the program's own table of
//! the file, the shared one, the keys before all tables. What the first has replaces what the others have, repeatable
//! flags included. A flag that does not go with one from a higher place (`--kv-memory` on the command line, `kv-blocks`
//! in the file) is left out; two from the same place are clap's to refuse. The command line comes last in the vector,
//! so that where flags override each other, its word is the last one.
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::file::{Document, Entry, FileError, Given};
use crate::flag::{Flag, Kind};
use crate::{Program, TopLevel, variable};

/// The environment, by name.
pub type Environment = BTreeMap<OsString, OsString>;

/// Where a value is from; later ones win.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Nobody said anything.
    Default,
    /// The file, as `path:line`.
    File(String),
    /// The variable of this name.
    Variable(String),
    /// The command line.
    Flag,
}

impl Source {
    fn rank(&self) -> u8 {
        match self {
            Self::Default => 0,
            Self::File(_) => 1,
            Self::Variable(_) => 2,
            Self::Flag => 3,
        }
    }
}

/// The words of the process, looked at once.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub words: Vec<OsString>,
    /// Where flags of the (sub)command begin.
    pub at: usize,
    /// Ids of the flags that are there.
    pub given: BTreeSet<String>,
    /// `--config`, if it is one of them.
    pub config: Option<PathBuf>,
}

/// What clap gets, and where each flag in it is from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Merged {
    pub words: Vec<OsString>,
    /// By id; absent: default.
    pub sources: BTreeMap<String, Source>,
}

/// A flag with what a variable or the file says of it.
struct Chosen<'a> {
    flag: &'a Flag,
    source: Source,
    given: Given,
}

impl Chosen<'_> {
    /// Whether clap would see it.
    fn is_there(&self) -> bool {
        match &self.given {
            Given::Switch(on) => *on,
            Given::Values(values) => !values.is_empty(),
        }
    }

    fn words(&self) -> Vec<OsString> {
        let flag = || OsString::from(format!("--{}", self.flag.key));
        let with = |value: &OsString| {
            let mut word = flag();
            word.push("=");
            word.push(value);
            word
        };
        match &self.given {
            Given::Switch(on) => on.then(flag).into_iter().collect(),
            Given::Values(values) => values.iter().map(with).collect(),
        }
    }
}

/// The file that the flag or a variable names.
pub(crate) fn config_path(program: &Program, line: &Line, environment: &Environment) -> Option<PathBuf> {
    let variables = || program.tables.iter().map(|table| variable(table, "config"));
    line.config.clone().or_else(|| variables().find_map(|name| set(environment, &name)).map(PathBuf::from))
}

/// # Errors
/// The file has a key that is no flag or a value of the wrong type; a variable of a switch says neither yes nor no.
pub(crate) fn merge(
    program: &Program,
    flags: &[Flag],
    line: &Line,
    environment: &Environment,
    document: Option<&Document>,
) -> Result<Merged, String> {
    let file = document.map(|document| from_file(program, flags, document)).transpose();
    let mut file = file.map_err(|error| error.to_string())?.unwrap_or_default();
    let (mut chosen, mut sources) = (Vec::new(), BTreeMap::new());
    for flag in flags {
        if line.given.contains(&flag.id) {
            sources.insert(flag.id.clone(), Source::Flag);
        } else if let Some((name, given)) = from_environment(program, flag, environment)? {
            chosen.push(Chosen { flag, source: Source::Variable(name), given });
        } else if let Some((source, given)) = file.remove(flag.key.as_str()) {
            chosen.push(Chosen { flag, source, given });
        }
    }
    let on_the_line: Vec<&Flag> = flags.iter().filter(|flag| line.given.contains(&flag.id)).collect();
    let is_displaced = |one: &Chosen<'_>| {
        let stronger = |other: &Chosen<'_>| other.is_there() && other.source.rank() > one.source.rank();
        on_the_line.iter().any(|flag| flag.conflicts_with(one.flag))
            || chosen.iter().any(|other| stronger(other) && other.flag.conflicts_with(one.flag))
    };
    let mut kept: Vec<&Chosen<'_>> = chosen.iter().filter(|one| !is_displaced(one)).collect();
    kept.sort_by_key(|one| one.source.rank());
    let (before, behind) = line.words.split_at(line.at.min(line.words.len()));
    let words = before.iter().cloned().chain(kept.iter().flat_map(|one| one.words())).chain(behind.iter().cloned());
    let words = words.collect();
    sources.extend(kept.into_iter().map(|one| (one.flag.id.clone(), one.source.clone())));
    Ok(Merged { words, sources })
}

/// By key.
type FromFile = BTreeMap<String, (Source, Given)>;

fn from_file(program: &Program, flags: &[Flag], document: &Document) -> Result<FromFile, FileError> {
    let mut found: BTreeMap<String, (usize, Source, Given)> = BTreeMap::new();
    for entry in &document.entries {
        let place = match entry.table {
            None => program.tables.len(),
            Some(table) => match program.tables.iter().position(|own| *own == table) {
                Some(place) => place,
                None => continue,
            },
        };
        let Some(flag) = flags.iter().find(|flag| flag.key == entry.key && flag.key != "config") else {
            if entry.table.is_none() && program.top_level == TopLevel::Shared {
                continue;
            }
            return Err(document.refuse(entry, unknown(program, flags, entry)));
        };
        let given = document.given(entry, flag)?;
        let stronger = found.get(&flag.key).is_some_and(|(other, ..)| *other < place);
        if !stronger {
            let source = Source::File(document.place(entry.line));
            found.insert(flag.key.clone(), (place, source, given));
        }
    }
    Ok(found.into_iter().map(|(key, (_, source, given))| (key, (source, given))).collect())
}

fn unknown(program: &Program, flags: &[Flag], entry: &Entry) -> String {
    let (key, name) = (&entry.key, program.name);
    if matches!(key.as_str(), "config" | "check") {
        return format!("`{key}` stands on the command line alone");
    }
    let meant = key.to_lowercase().replace('_', "-");
    if meant != *key && flags.iter().any(|flag| flag.key == meant) {
        return format!("`{key}` is no flag of {name}; `{meant}` is");
    }
    match entry.table {
        Some(_) => format!("`{key}` is no flag of {name}"),
        None => format!("`{key}` is no flag of {name}: only flags that all programs have stand before the tables"),
    }
}

fn from_environment(
    program: &Program,
    flag: &Flag,
    environment: &Environment,
) -> Result<Option<(String, Given)>, String> {
    let own = program.tables.iter().map(|table| variable(table, &flag.key));
    let set = own.chain(flag.native.clone()).find_map(|name| Some((set(environment, &name)?, name)));
    set.map(|(value, name)| {
        given(flag, value).map(|given| (name.clone(), given)).map_err(|why| format!("{name} {why}"))
    })
    .transpose()
}

/// An empty variable is none.
fn set<'a>(environment: &'a Environment, name: &str) -> Option<&'a OsStr> {
    environment.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
}

fn given(flag: &Flag, value: &OsStr) -> Result<Given, String> {
    match (flag.kind, value.to_str()) {
        (Kind::Switch, Some("true" | "1")) => Ok(Given::Switch(true)),
        (Kind::Switch, Some("false" | "0")) => Ok(Given::Switch(false)),
        (Kind::Switch, _) => Err("wants true or false".to_owned()),
        (_, Some(text)) if flag.repeatable => Ok(Given::Values(text.split_whitespace().map(OsString::from).collect())),
        _ => Ok(Given::Values(vec![value.to_owned()])),
    }
}

/// Variables that are named as the program's, and are no flag's. Kubernetes makes some of every service's name.
pub(crate) fn unknown_variables(program: &Program, flags: &[Flag], environment: &Environment) -> Vec<String> {
    let known: BTreeSet<String> =
        program.tables.iter().flat_map(|table| flags.iter().map(|flag| variable(table, &flag.key))).collect();
    let prefixes: Vec<String> = program.tables.iter().map(|table| variable(table, "")).collect();
    let is_service = |rest: &str| {
        rest.starts_with("SERVICE_HOST")
            || rest.starts_with("SERVICE_PORT")
            || rest == "PORT"
            || rest.starts_with("PORT_")
    };
    let is_unknown = |name: &&str| {
        let rest = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix.as_str()));
        rest.is_some_and(|rest| !is_service(rest)) && !known.contains(*name)
    };
    environment.keys().filter_map(|name| name.to_str()).filter(is_unknown).map(str::to_owned).collect()
}
