//! `tandem completions` and `tandem man`: what a shell and `man` can have of the flags. Both are made from the same
//! definitions that parse the command line, so they cannot differ from it.
use std::path::Path;

use anyhow::Context;
use clap_complete::Shell;

use crate::config;
use crate::terminal::print;

/// The script that makes `shell` complete commands and flags, to standard output.
///
/// # Errors
/// Standard output is closed.
pub fn completions(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut config::command(), "tandem", &mut script);
    print(&String::from_utf8(script).context("clap wrote a script that is no text")?)
}

/// One man page of `tandem` and one of each command, into `dir`.
///
/// # Errors
/// The directory cannot be made or written.
pub fn man(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    clap_mangen::generate_to(config::command(), dir).with_context(|| format!("cannot write {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_man_page() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("deep/man1");
        man(&pages).unwrap();
        for (page, words) in [
            ("tandem.1", "completions"),
            ("tandem-up.1", "\\-\\-aggregated"),
            ("tandem-generate.1", "\\-\\-tls\\-ca"),
            ("tandem-bench-report.1", "records"),
        ] {
            let text = std::fs::read_to_string(pages.join(page)).unwrap();
            assert!(text.contains(".TH ") && text.contains(words), "{page}:\n{text}");
        }
        let taken = dir.path().join("file");
        std::fs::write(&taken, "").unwrap();
        assert!(man(&taken).unwrap_err().to_string().contains("file"));
    }
}
