//! Whose clock a source asks. What a simulation runs in virtual time asks tokio's, which stands still there between two
//! events; the system's goes on, so that a run on a slow or stopped machine would end otherwise.

/// Crates and modules that the simulation runs.
const SIMULATED: [&str; 5] =
    ["router/src/", "node/src/", "prefill-node/src/", "decode-node/src/", "kvtransfer/src/mem/"];

/// Whether a simulation runs this source.
pub fn is_simulated(path: &str) -> bool {
    SIMULATED.iter().any(|room| path.starts_with(room)) && !path.ends_with("tests.rs")
}

/// Whether an `Instant` of this code is the standard library's, and is taken or compared with the present.
pub fn asks_the_systems(code: &str) -> bool {
    let imported = |line: &str| line.starts_with("use std::time::") && line.contains("Instant");
    let asked = code.contains("Instant::now()") || code.contains(".elapsed()");
    code.contains("std::time::Instant::now()") || code.lines().any(|line| imported(line.trim_start())) && asked
}

#[test]
fn it_is_seen_whose_instant_it_is() {
    assert!(asks_the_systems("use std::time::{Duration, Instant};\nlet it = at.elapsed() > LONG;"));
    assert!(asks_the_systems("let it = std::time::Instant::now();"));
    assert!(!asks_the_systems("use std::time::Duration;\nuse tokio::time::Instant;\nInstant::now().elapsed()"));
    assert!(!asks_the_systems("use std::time::Instant;\nlet it = clock::now().duration_since(at);"));
}
