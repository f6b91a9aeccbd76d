//! Standard output and standard error. Whoever reads them may end first, as `head` does, or write to a full disk:
//! neither may become a panic, as it does with `println!` and `eprintln!`, which the programs forbid.
use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

use anyhow::Context;

/// Exit status after [`OutputClosed`]: that of a program that `SIGPIPE` ended (128 + 13), which is what shells expect
/// there.
pub const OUTPUT_CLOSED_STATUS: u8 = 141;

/// The reader of standard output is gone, so that there is nothing left to do and nothing to say about it.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads standard output any more")]
pub struct OutputClosed;

/// Writes to standard output at once.
///
/// # Errors
/// [`OutputClosed`], or the system's reason.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        written => written.context("cannot write to standard output"),
    }
}

/// Writes to standard error. What cannot be said there can be said nowhere: errors are dropped.
pub fn write_error(text: Arguments<'_>) {
    let mut out = std::io::stderr().lock();
    let _ = out.write_fmt(text);
    let _ = out.flush();
}

/// A line on standard error, as `eprintln!` without its panic.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        $crate::terminal::write_error(format_args!("{}\n", format_args!($($text)*)))
    };
}
pub use say;
