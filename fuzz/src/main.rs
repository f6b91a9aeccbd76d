//! One libFuzzer program for all parsers: `TANDEM_FUZZ_TARGET` names the one to run, `TANDEM_FUZZ_SEEDS` a directory
//! that its first inputs are written into. `run.sh` builds and runs it, each target for a time. A target panics where
//! its parser broke a promise; a crash, a hang, a leak or memory without end is a finding by itself.
//!
//! - [`edges`]: what clients send to the router: HTTP bodies, request heads, gRPC messages, trace queries.
//! - [`text`]: prompts and chats to tokens, and tokens back.
//! - [`cluster`]: what nodes and peers send: reports, spans, statuses, KV frames, transports.
//! - [`files`]: what operators write: configuration, keys, tokens, certificates, GGUF headers, flags with a grammar.
#![no_main]

mod cluster;
mod edges;
mod files;
mod text;

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

/// A parser and its first inputs.
pub struct Target {
    /// As `TANDEM_FUZZ_TARGET` has it.
    pub name: &'static str,
    /// Takes whatever comes.
    pub run: fn(&[u8]),
    /// Well-formed inputs, to be damaged.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    let all = || edges::TARGETS.iter().chain(text::TARGETS).chain(cluster::TARGETS).chain(files::TARGETS);
    let wanted = std::env::var("TANDEM_FUZZ_TARGET").unwrap_or_default();
    all().find(|target| target.name == wanted).unwrap_or_else(|| {
        // For `run.sh`, which asks so for the list.
        all().for_each(|target| println!("{}", target.name));
        std::process::exit(0)
    })
});

fuzz_target!(
    init: {
        let target = *TARGET;
        if let Some(directory) = std::env::var_os("TANDEM_FUZZ_SEEDS") {
            for (number, seed) in (target.seeds)().into_iter().enumerate() {
                let path = Path::new(&directory).join(format!("seed-{number}"));
                std::fs::write(path, seed).expect("the directory of seeds");
            }
        }
    },
    |data: &[u8]| (TARGET.run)(data)
);
