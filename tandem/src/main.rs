//! `tandem`: its life is in the library, `tandem`; read `lib.rs` next.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    tandem::run_process()
}
