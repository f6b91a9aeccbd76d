//! The TOML file: which table has which key, with what value, in which line. Pure but for [`read`]. Whether a key is a
//! flag and whether clap takes its value is not known here.
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeInteger, DeString, DeTable, DeValue};

use crate::TABLES;
use crate::flag::{Flag, Kind};

/// Bytes of a file at most.
const MAX_BYTES: u64 = 1 << 20;

/// A file that cannot be used; says which file, where in it, and why.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileError {
    path: PathBuf,
    line: Option<usize>,
    why: String,
}

impl Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, why } = self;
        match line {
            Some(line) => write!(f, "{}:{line}: {why}", path.display()),
            None => write!(f, "--config {}: {why}", path.display()),
        }
    }
}

impl std::error::Error for FileError {}

/// What stands in the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Document {
    path: PathBuf,
    /// Empty tables leave nothing.
    pub entries: Vec<Entry>,
}

/// One key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// `None`: before all tables.
    pub table: Option<&'static str>,
    pub key: String,
    pub line: usize,
    value: Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Text(String),
    Number(String),
    Switch(bool),
    List(Vec<Value>),
    /// No flag takes it: a date, a table.
    Other(&'static str),
}

/// What a flag gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    Switch(bool),
    /// One, or any number where the flag is repeatable.
    Values(Vec<OsString>),
}

/// Reads the file.
pub(crate) fn read(path: &Path) -> Result<Document, FileError> {
    let refused = |why: String| FileError { path: path.to_owned(), line: None, why };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| refused(error.to_string()))?;
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| refused(error.to_string()))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(refused(format!("more than {MAX_BYTES} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(|_| refused("not UTF-8".to_owned()))?;
    Document::parse(path, &text)
}

impl Document {
    pub fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
        let line = |offset: usize| 1 + ends.partition_point(|end| *end < offset);
        let refused = |offset: Option<usize>, why: String| {
            let line = Some(offset.map_or(1, line));
            FileError { path: path.to_owned(), line, why }
        };
        let root = DeTable::parse(text)
            .map_err(|error| refused(error.span().map(|span| span.start), error.message().to_owned()))?;
        let mut entries = Vec::new();
        let mut add = |table, key: &Spanned<DeString<'_>>, value: &Spanned<DeValue<'_>>| {
            let line = line(key.span().start);
            entries.push(Entry { table, key: key.get_ref().to_string(), line, value: Value::of(value.get_ref()) });
        };
        for (key, value) in root.get_ref() {
            let name: &str = key.get_ref();
            let known = TABLES.into_iter().find(|table| *table == name);
            match (known, value.get_ref()) {
                (Some(table), DeValue::Table(keys)) => {
                    keys.iter().for_each(|(key, value)| add(Some(table), key, value))
                }
                (None, DeValue::Table(_)) => {
                    let why = format!("no program has the table [{name}]; there are [{}]", TABLES.join("], ["));
                    return Err(refused(Some(key.span().start), why));
                }
                (Some(table), _) => {
                    let why = format!("`{table}` is a table: write [{table}] and its keys below");
                    return Err(refused(Some(key.span().start), why));
                }
                (None, _) => add(None, key, value),
            }
        }
        entries.sort_by_key(|entry| entry.line);
        Ok(Self { path: path.to_owned(), entries })
    }

    /// The error that is at this entry.
    pub fn refuse(&self, entry: &Entry, why: impl Display) -> FileError {
        FileError { path: self.path.clone(), line: Some(entry.line), why: why.to_string() }
    }

    /// For people.
    pub fn place(&self, line: usize) -> String {
        format!("{}:{line}", self.path.display())
    }

    /// The entry's value for this flag.
    pub fn given(&self, entry: &Entry, flag: &Flag) -> Result<Given, FileError> {
        entry.value.given(flag).map_err(|why| self.refuse(entry, format!("`{}` {why}", entry.key)))
    }
}

impl Value {
    fn of(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Self::Text(text.clone().into_owned()),
            DeValue::Integer(number) => Self::Number(decimal(number)),
            DeValue::Float(number) => Self::Number(number.as_str().to_owned()),
            DeValue::Boolean(on) => Self::Switch(*on),
            DeValue::Array(values) => Self::List(values.iter().map(|value| Self::of(value.get_ref())).collect()),
            DeValue::Datetime(_) => Self::Other("a date"),
            DeValue::Table(_) => Self::Other("a table"),
        }
    }

    fn given(&self, flag: &Flag) -> Result<Given, String> {
        let wanted = match flag.kind {
            Kind::Switch => "true or false",
            Kind::Number if flag.repeatable => "numbers in an array",
            Kind::Number => "a number",
            Kind::Text if flag.repeatable => "strings in an array",
            Kind::Text => "a string",
        };
        let wrong = |value: &Self| format!("wants {wanted}, not {}", value.name());
        let one = |value: &Self| match (value, flag.kind) {
            (Self::Text(text), Kind::Text) => Ok(OsString::from(text)),
            // A number of tokens is one, a size such as 25% is none: the flag takes both.
            (Self::Number(number), Kind::Text | Kind::Number) => Ok(OsString::from(number)),
            _ => Err(wrong(value)),
        };
        match (self, flag.kind) {
            (Self::Switch(on), Kind::Switch) => Ok(Given::Switch(*on)),
            (Self::List(values), _) if flag.repeatable => {
                Ok(Given::Values(values.iter().map(one).collect::<Result<_, _>>()?))
            }
            (value, _) => Ok(Given::Values(vec![one(value)?])),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Text(_) => "a string",
            Self::Number(_) => "a number",
            Self::Switch(_) => "true or false",
            Self::List(_) => "an array",
            Self::Other(name) => name,
        }
        .to_owned()
    }
}

/// As people write it on a command line. One that no integer type holds stays as it is, and clap refuses it.
fn decimal(number: &DeInteger<'_>) -> String {
    i128::from_str_radix(number.as_str(), number.radix())
        .map_or_else(|_| number.to_string(), |number| number.to_string())
}
