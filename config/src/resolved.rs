//! A program's flags out of all sources, and the shell around that: the process's words, its environment, the file.
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, value_parser};

use crate::file::{Document, read};
use crate::flag::{Flag, Kind, flags};
use crate::merge::{Environment, Line, Merged, Source, config_path, merge, unknown_variables};
use crate::report::{Row, report};
use crate::userinfo::{hidden, hidden_in};
use crate::{Program, shell};

/// Of wrong flags, as clap has it.
const WRONG_FLAGS: i32 = 2;

/// The process's flags, from all sources; ends the process with a message where they are wrong, and for `--help`,
/// `completions` and `man`.
pub fn load<P: CommandFactory + FromArgMatches>(program: Program) -> (P, Resolved) {
    let (words, environment): (Vec<_>, _) = (std::env::args_os().collect(), std::env::vars_os().collect());
    let command = P::command().after_long_help(shell::AFTER);
    if let Some(code) = shell::done(&command, &words) {
        std::process::exit(code)
    }
    let resolved = Resolved::of(program, command, words, environment).unwrap_or_else(|refused| refused.exit());
    let flags = P::from_arg_matches(&resolved.matches).unwrap_or_else(|error| error.exit());
    (flags, resolved)
}

/// What all sources make together.
#[derive(Clone)]
pub struct Resolved {
    asked: Asked,
    found: Found,
    matches: ArgMatches,
}

/// What a process has from its start to its end.
#[derive(Clone)]
struct Asked {
    program: Program,
    command: Command,
    words: Vec<OsString>,
    environment: Environment,
}

/// What it says of the program's flags, with the file. Empty where it asks for another command.
#[derive(Clone, Default)]
struct Found {
    flags: Vec<Flag>,
    path: Option<PathBuf>,
    document: Option<Document>,
    merged: Merged,
}

/// A flag whose value is another one since the file was read before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Its long name.
    pub flag: String,
    /// For people; empty: not set, or not to be shown.
    pub from: String,
    /// The same.
    pub to: String,
}

/// Why there is no configuration, or a wish such as `--help`.
#[derive(Debug)]
pub struct Refused(Why);

#[derive(Debug)]
enum Why {
    /// clap's word, and where the flags in it are from.
    Clap(Box<clap::Error>, Vec<String>),
    Wrong(String),
}

impl Resolved {
    /// From these words, of which the first one is the program's name.
    ///
    /// # Errors
    /// A file that cannot be used, a key that is no flag, a value that clap refuses; each names its place.
    pub fn of(
        program: Program,
        command: Command,
        words: Vec<OsString>,
        environment: Environment,
    ) -> Result<Self, Refused> {
        Asked { program, command, words, environment }.resolve()
    }

    /// As clap has them.
    pub fn matches(&self) -> &ArgMatches {
        &self.matches
    }

    /// The file.
    pub fn path(&self) -> Option<&Path> {
        self.found.path.as_deref()
    }

    /// `--check`.
    pub fn is_check(&self) -> bool {
        self.own_matches().try_get_one::<bool>("check").ok().flatten().is_some_and(|check| *check)
    }

    /// All values with their sources, as a file.
    pub fn report(&self) -> String {
        let Asked { program, environment, .. } = &self.asked;
        report(program, &self.rows(), &unknown_variables(program, &self.found.flags, environment))
    }

    /// The end of a program that was asked to `--check`: its report, and what `checked` says.
    pub fn answer(&self, checked: Result<(), impl Display>) -> ExitCode {
        // Whoever closes them early has read enough: the exit code says the rest.
        let _ = std::io::stdout().write_all(self.report().as_bytes());
        match checked {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "error: {error:#}");
                ExitCode::FAILURE
            }
        }
    }

    /// The same, with the file as it is now.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn again(&self) -> Result<Self, Refused> {
        self.asked.clone().resolve()
    }

    /// What is otherwise in `next`.
    pub fn changes(&self, next: &Self) -> Vec<Change> {
        let shown = |row: &Row<'_>| match row.flag.secret {
            true => String::new(),
            false => {
                let shown = row.values.iter().map(|value| hidden(&value.to_string_lossy()).into_owned());
                shown.collect::<Vec<_>>().join(" ")
            }
        };
        let differs = |(old, new): &(Row<'_>, Row<'_>)| old.values != new.values;
        let both = self.rows().into_iter().zip(next.rows()).filter(differs);
        both.map(|(old, new)| Change { flag: old.flag.key.clone(), from: shown(&old), to: shown(&new) }).collect()
    }

    /// Flags that the file gives `other` in tables of its own, each with its place: whoever starts that program with
    /// such flags of his own would silently win over them.
    pub fn flags_for(&self, other: &Program) -> Vec<(String, String)> {
        let Some(document) = &self.found.document else { return Vec::new() };
        let own =
            document.entries.iter().filter(|entry| entry.table.is_some_and(|table| other.tables.contains(&table)));
        own.map(|entry| (entry.key.clone(), document.place(entry.line))).collect()
    }

    fn own_matches(&self) -> &ArgMatches {
        let own = self.asked.program.subcommand.and_then(|name| self.matches.subcommand_matches(name));
        own.unwrap_or(&self.matches)
    }

    fn rows(&self) -> Vec<Row<'_>> {
        self.found.flags.iter().map(|flag| self.row(flag)).collect()
    }

    fn row<'a>(&'a self, flag: &'a Flag) -> Row<'a> {
        let matches = self.own_matches();
        let is_set = matches.value_source(&flag.id) == Some(ValueSource::CommandLine);
        let source = self.found.merged.sources.get(&flag.id).filter(|_| is_set).cloned();
        let raw = matches.get_raw(&flag.id).into_iter().flatten().map(OsString::from);
        let values = match flag.kind {
            // clap keeps no raw value of a flag without one.
            Kind::Switch => is_set.then(|| OsString::from("true")).into_iter().collect(),
            _ => raw.collect(),
        };
        Row { flag, values, source: source.unwrap_or(Source::Default) }
    }
}

impl fmt::Debug for Resolved {
    /// Without the environment and the flags, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resolved({})", self.asked.program.name)
    }
}

impl Asked {
    fn resolve(self) -> Result<Resolved, Refused> {
        let mut built = self.command.clone();
        built.build();
        let target = self.program.subcommand.map_or(Some(&built), |name| built.find_subcommand(name));
        let flags = target.map(flags).unwrap_or_default();
        let Some(line) = look(&self.program, &self.command, &flags, &self.words) else {
            // Another subcommand, `--help`, or words that clap is to refuse.
            let matches = self.command.clone().try_get_matches_from(&self.words);
            let matches = matches.map_err(|error| Refused(Why::Clap(Box::new(error), Vec::new())))?;
            return Ok(Resolved { asked: self, found: Found::default(), matches });
        };
        let wrong = |why: String| Refused(Why::Wrong(why));
        let path = config_path(&self.program, &line, &self.environment);
        let document = path.as_deref().map(read).transpose().map_err(|error| wrong(error.to_string()))?;
        let merged = merge(&self.program, &flags, &line, &self.environment, document.as_ref()).map_err(wrong)?;
        let parsed = without_variables(self.command.clone()).try_get_matches_from(&merged.words);
        let matches = parsed.map_err(|error| Refused::by_clap(error, &flags, &merged))?;
        Ok(Resolved { asked: self, found: Found { flags, path, document, merged }, matches })
    }
}

impl Refused {
    fn by_clap(error: clap::Error, flags: &[Flag], merged: &Merged) -> Self {
        let named = [ContextKind::InvalidArg, ContextKind::PriorArg].into_iter().filter_map(|kind| error.get(kind));
        let named: Vec<&str> = named.flat_map(texts).filter_map(|text| text.split([' ', '=']).next()).collect();
        let note = |flag: &Flag| {
            let is_named = named.iter().any(|name| name.strip_prefix("--") == Some(&flag.key));
            match merged.sources.get(&flag.id).filter(|_| is_named)? {
                Source::File(place) => Some(format!("{place}: this is where --{} is from", flag.key)),
                Source::Variable(name) => Some(format!("{name}: this is where --{} is from", flag.key)),
                Source::Default | Source::Flag => None,
            }
        };
        let notes = flags.iter().filter_map(note).collect();
        Self(Why::Clap(Box::new(error), notes))
    }

    /// Says it, and ends the process.
    pub fn exit(self) -> ! {
        let mut stderr = std::io::stderr();
        // Without a reader there is nobody to tell.
        match self.0 {
            Why::Clap(error, notes) => {
                let text = error.render().to_string();
                let shown = hidden_in(&text);
                let _ = if shown == text { error.print() } else { stderr.write_all(shown.as_bytes()) };
                for note in notes {
                    let _ = writeln!(stderr, "{note}");
                }
                std::process::exit(error.exit_code())
            }
            Why::Wrong(why) => {
                let _ = writeln!(stderr, "error: {}", hidden_in(&why));
                std::process::exit(WRONG_FLAGS)
            }
        }
    }
}

impl Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Why::Clap(error, notes) => {
                let text = error.render().to_string();
                // What follows is how to use it.
                let said: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
                let said = said.join(" ");
                f.write_str(&hidden_in(said.strip_prefix("error: ").unwrap_or(&said)))?;
                notes.iter().try_for_each(|note| write!(f, "; {note}"))
            }
            Why::Wrong(why) => f.write_str(&hidden_in(why)),
        }
    }
}

impl std::error::Error for Refused {}

fn texts(value: &ContextValue) -> Vec<&str> {
    match value {
        ContextValue::String(text) => vec![text],
        ContextValue::Strings(texts) => texts.iter().map(String::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Which flags the words have. `None` where that is not to be asked: another subcommand, `--help`.
fn look(program: &Program, command: &Command, flags: &[Flag], words: &[OsString]) -> Option<Line> {
    let lenient = lenient(command.clone());
    let parse = |words: &[OsString]| lenient.clone().try_get_matches_from(words).ok();
    let matches = parse(words)?;
    let (at, own) = match program.subcommand {
        None => (1, &matches),
        Some(name) => {
            let own = matches.subcommand_matches(name)?;
            // The first of these words that is not some flag's value.
            let mut ends = (1..=words.len()).filter(|end| words[end - 1] == name);
            let is_it =
                |end: &usize| parse(&words[..*end]).is_some_and(|so_far| so_far.subcommand_name() == Some(name));
            (ends.find(is_it)?, own)
        }
    };
    let is_given = |flag: &&Flag| own.value_source(&flag.id) == Some(ValueSource::CommandLine);
    let given = flags.iter().filter(is_given).map(|flag| flag.id.clone()).collect();
    let config = own.get_raw("config").and_then(|mut values| values.next_back()).map(PathBuf::from);
    let config = config.filter(|_| own.value_source("config") == Some(ValueSource::CommandLine));
    Some(Line { words: words.to_vec(), at, given, config })
}

/// Takes any value, and misses none.
fn lenient(command: Command) -> Command {
    let any = |arg: clap::Arg| match arg.get_action() {
        clap::ArgAction::Set | clap::ArgAction::Append => arg.value_parser(value_parser!(OsString)),
        _ => arg,
    };
    without_variables(command).ignore_errors(true).args_override_self(true).mut_args(any).mut_subcommands(lenient)
}

/// The environment was read already.
fn without_variables(command: Command) -> Command {
    command.mut_args(|arg| arg.env(None)).mut_subcommands(without_variables)
}
