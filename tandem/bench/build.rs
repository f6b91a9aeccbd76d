//! Tells the program which commit it is built from, for the reports of `tandem bench`.
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The log of HEAD changes with every commit and checkout, also in linked work trees.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    println!("cargo::rustc-env=TANDEM_COMMIT={}", git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_default());
}

/// What git prints; `None` without git or outside a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
