//! `tandem completions` and `tandem man`: what a shell and `man` can have of the flags. Both are made from the same
//! definitions that parse the command line, so they cannot differ from it.
use std::path::Path;

use anyhow::Context;
use tandem_client::terminal::print;
use tandem_config::shell::{self, Shell};

use crate::config;

/// The script that makes `shell` complete commands and flags, to standard output.
///
/// # Errors
/// Standard output is closed.
pub fn completions(shell: Shell) -> anyhow::Result<()> {
    let script = shell::completions(config::command(), shell);
    print(&String::from_utf8(script).context("clap wrote a script that is no text")?)
}

/// One man page of `tandem` and one of each command, into `dir`.
///
/// # Errors
/// The directory cannot be made or written.
pub fn man(dir: &Path) -> anyhow::Result<()> {
    Ok(shell::man(config::command(), dir)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_man_page() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("man1");
        man(&pages).unwrap();
        for (page, words) in [
            ("tandem.1", "completions"),
            ("tandem.1", "Exit codes"),
            ("tandem-up.1", "\\-\\-aggregated"),
            ("tandem-generate.1", "\\-\\-tls\\-ca"),
            ("tandem-bench-report.1", "records"),
        ] {
            let text = std::fs::read_to_string(pages.join(page)).unwrap();
            assert!(text.contains(".TH ") && text.contains(words), "{page}:\n{text}");
        }
    }
}
