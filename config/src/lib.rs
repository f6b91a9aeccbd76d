//! Where a program's flags come from: the command line, the environment, and one TOML file that all programs of a
//! cluster can share. Knows no flag of any program but its own two ([`ConfigArgs`]); what flags there are and which
//! values they take is clap's, so that nothing is parsed or checked twice.
//!
//! - [`Program`]: which tables of the file and which variables are a program's.
//! - [`Resolved`]: what the three sources make together, with the source of each value.
//! - `flag`: what clap says of a flag. `file`: the TOML file as keys, values and lines (pure). `merge`: one argument
//!   vector out of the sources (pure). `report`: what `--check` prints, which is such a file again (pure). `userinfo`:
//!   what it does not show, nor the log.
//! - [`shell`]: completions and man pages of the same flags.
//!
//! Next: `merge.rs`, where precedence is decided.
#![forbid(unsafe_code)]

mod file;
mod flag;
mod merge;
mod report;
mod resolved;
pub mod shell;
mod userinfo;

use std::path::PathBuf;

use clap::Args;

pub use merge::Environment;
pub use resolved::{Change, Refused, Resolved, load};

/// The two flags of this crate, for every program that takes a file.
#[derive(Args, Clone, Debug, Default)]
pub struct ConfigArgs {
    /// TOML file of flags, by their long names: those of all programs first, then tables [router], [prefill], [decode],
    /// [node] (both kinds of nodes), [up]. The command line wins over variables (TANDEM_ROUTER_MAX_QUEUE and so on),
    /// and these over the file.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check flags, variables and all files that they name, print each value with its source, and end.
    #[arg(long)]
    pub check: bool,
}

/// What is a program's in the file and in the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// For people.
    pub name: &'static str,
    /// The subcommand whose flags these are; `None`: the program's own.
    pub subcommand: Option<&'static str>,
    /// Tables of the file, the one that wins first. Variables are named by them, too.
    pub tables: &'static [&'static str],
    /// Whether keys before all tables must be flags of this program. A program that starts others leaves this to them.
    pub top_level: TopLevel,
}

/// What to make of a key before all tables that is no flag of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopLevel {
    /// An error: it would have no effect here.
    Strict,
    /// Somebody else's.
    Shared,
}

/// `tandem-router`.
pub const ROUTER: Program =
    Program { name: "tandem-router", subcommand: None, tables: &["router"], top_level: TopLevel::Strict };
/// `tandem-prefill-node`.
pub const PREFILL: Program = Program {
    name: "tandem-prefill-node",
    subcommand: None,
    tables: &["prefill", "node"],
    top_level: TopLevel::Strict,
};
/// `tandem-decode-node`.
pub const DECODE: Program =
    Program { name: "tandem-decode-node", subcommand: None, tables: &["decode", "node"], top_level: TopLevel::Strict };
/// `tandem up`.
pub const UP: Program =
    Program { name: "tandem up", subcommand: Some("up"), tables: &["up"], top_level: TopLevel::Shared };

/// All tables that a file may have.
const TABLES: [&str; 5] = ["router", "prefill", "decode", "node", "up"];

/// The variable of a flag: `max-queue` of `router` is `TANDEM_ROUTER_MAX_QUEUE`.
pub fn variable(table: &str, flag: &str) -> String {
    format!("TANDEM_{table}_{flag}").to_uppercase().replace('-', "_")
}
