//! What clap knows of a program's flags, as far as a file or a variable must know it: names, kinds, conflicts.
use std::num::{NonZeroU32, NonZeroUsize};

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, Command, value_parser};

/// One flag.
#[derive(Clone, Debug)]
pub(crate) struct Flag {
    /// Its long name, which is its key in the file.
    pub key: String,
    /// clap's name for it.
    pub id: String,
    pub kind: Kind,
    /// It may be given several times.
    pub repeatable: bool,
    /// A variable that it had before there were those of all flags.
    pub native: Option<String>,
    /// Its value is not to be shown.
    pub secret: bool,
    /// Ids of those that it cannot stand beside, as far as it says so itself.
    conflicts: Vec<String>,
}

/// What a value looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// There or not.
    Switch,
    /// A number.
    Number,
    /// Anything else, numbers included: sizes, addresses, words.
    Text,
}

/// All flags of a command that is built, in its order. Without `--help`, `--version` and `--check`, which are about one
/// start of the program alone.
pub(crate) fn flags(command: &Command) -> Vec<Flag> {
    let about_this_start = |arg: &&Arg| !matches!(arg.get_id().as_str(), "help" | "version" | "check");
    command.get_arguments().filter(about_this_start).filter_map(|arg| flag(command, arg)).collect()
}

fn flag(command: &Command, arg: &Arg) -> Option<Flag> {
    let (kind, repeatable) = match arg.get_action() {
        ArgAction::SetTrue => (Kind::Switch, false),
        ArgAction::Set => (kind(arg.get_value_parser()), false),
        ArgAction::Append => (kind(arg.get_value_parser()), true),
        _ => return None,
    };
    let conflicts = command.get_arg_conflicts_with(arg).into_iter().map(|other| other.get_id().to_string());
    Some(Flag {
        key: arg.get_long()?.to_owned(),
        id: arg.get_id().to_string(),
        kind,
        repeatable,
        native: arg.get_env().map(|name| name.to_string_lossy().into_owned()),
        secret: arg.is_hide_env_values_set(),
        conflicts: conflicts.collect(),
    })
}

impl Flag {
    /// Whether clap would refuse both.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        self.id != other.id && (self.conflicts.contains(&other.id) || other.conflicts.contains(&self.id))
    }
}

fn kind(parser: &ValueParser) -> Kind {
    let numbers: [ValueParser; 13] = [
        value_parser!(u8).into(),
        value_parser!(u16).into(),
        value_parser!(u32).into(),
        value_parser!(u64).into(),
        value_parser!(usize).into(),
        value_parser!(i8).into(),
        value_parser!(i16).into(),
        value_parser!(i32).into(),
        value_parser!(i64).into(),
        value_parser!(f32).into(),
        value_parser!(f64).into(),
        value_parser!(NonZeroU32).into(),
        value_parser!(NonZeroUsize).into(),
    ];
    let is_number = numbers.iter().any(|number| number.type_id() == parser.type_id());
    if is_number { Kind::Number } else { Kind::Text }
}
