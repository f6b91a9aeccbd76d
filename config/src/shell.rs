//! `completions SHELL` and `man DIR`: what a shell and `man` can have of a program's flags, made from the definitions
//! that parse the command line. A program without subcommands takes them as its first word.
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Command, Parser};
pub use clap_complete::Shell;

/// What stands below the flags of a program that serves, in `--help` and in its man page.
pub(crate) const AFTER: &str = "\
Exit codes: 0 drained after SIGTERM or SIGINT, or --check found nothing wrong; 1 an error, which is the last line on \
standard error; 2 wrong flags, variables or configuration file.

Completions and a man page: `completions bash` (elvish, fish, powershell, zsh) writes to standard output, `man DIR` \
into a directory.";

#[derive(Parser)]
#[command(disable_version_flag = true)]
enum Wish {
    /// Write the script that makes a shell complete the program's flags
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Write the program's man page into a directory
    Man {
        /// Made when missing
        dir: PathBuf,
    },
}

/// Does what the first word asks for, if it is one of these, and has the exit code; ends the process where the other
/// words are wrong.
pub(crate) fn done(command: &Command, words: &[OsString]) -> Option<i32> {
    let is_wish = |word: &OsString| word == "completions" || word == "man";
    words.get(1).filter(|word| is_wish(word))?;
    let written = match Wish::parse_from(words) {
        Wish::Completions { shell } => io::stdout().write_all(&completions(command.clone(), shell)),
        Wish::Man { dir } => man(command.clone(), &dir),
    };
    Some(match written {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: {error}");
            1
        }
    })
}

/// The script that makes `shell` complete commands and flags.
pub fn completions(mut command: Command, shell: Shell) -> Vec<u8> {
    let (name, mut script) = (command.get_name().to_owned(), Vec::new());
    clap_complete::generate(shell, &mut command, name, &mut script);
    script
}

/// One man page of the program and one of each of its commands, into `dir`.
///
/// # Errors
/// The directory cannot be made or written; the error names it.
pub fn man(command: Command, dir: &Path) -> io::Result<()> {
    let named = |doing: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("cannot {doing} {}: {error}", dir.display()))
    };
    std::fs::create_dir_all(dir).map_err(|error| named("make", error))?;
    clap_mangen::generate_to(command, dir).map_err(|error| named("write", error))
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    fn command() -> Command {
        Command::new("tandem-thing").arg(Arg::new("queue").long("max-queue").help("Many")).after_long_help(AFTER)
    }

    fn words(text: &str) -> Vec<OsString> {
        std::iter::once("tandem-thing").chain(text.split_whitespace()).map(OsString::from).collect()
    }

    #[test]
    fn the_first_word_decides() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("deep/man1");
        assert!(done(&command(), &words("--max-queue man")).is_none() && done(&command(), &words("")).is_none());
        assert_eq!(done(&command(), &words(&format!("man {}", pages.display()))), Some(0));
        let page = std::fs::read_to_string(pages.join("tandem-thing.1")).unwrap();
        assert!(
            page.contains(".TH ") && page.contains("\\-\\-max\\-queue") && page.contains("Exit codes: 0"),
            "{page}"
        );
        let taken = dir.path().join("file");
        std::fs::write(&taken, "").unwrap();
        assert_eq!(done(&command(), &words(&format!("man {}", taken.display()))), Some(1));
        assert!(man(command(), &taken).unwrap_err().to_string().contains("file"));
    }

    #[test]
    fn every_shell_has_a_script_with_the_flags() {
        for shell in [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::PowerShell, Shell::Zsh] {
            let script = String::from_utf8(completions(command(), shell)).unwrap();
            assert!(script.contains("max-queue") && script.contains("tandem-thing"), "{shell}:\n{script}");
        }
    }
}
