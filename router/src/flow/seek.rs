//! The search for the nodes of the next attempt: at once if a sound plan is there, else when nodes come or go, else a
//! plan that failed before, after a pause; never beyond its bound. It sleeps in between: the node table tells when to
//! look again.
use tandem_proto::SequenceHash;
use tandem_telemetry::clock;
use tokio::time::timeout_at;

use super::replan::Retry;
use crate::membership::{Ask, Membership, Route};
use crate::metrics::Metrics;
use crate::select::{NoPair, Wish};

/// Tokens of prompt and answer for which room is sought.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// Of the prompt, with what was generated before.
    pub prompt: u32,
    /// Still to be generated at most.
    pub max: u32,
    /// See [`Ask::hashes`].
    pub hashes: Vec<SequenceHash>,
}

impl Tokens {
    /// As the node table is asked.
    pub fn ask(&self) -> Ask<'_> {
        Ask { prompt_tokens: self.prompt, max_tokens: self.max, hashes: &self.hashes }
    }
}

/// Finds a plan's nodes by the terms of `retry`.
///
/// # Errors
/// Why there were none when the time was over.
pub async fn nodes(
    membership: Membership,
    metrics: Metrics,
    tokens: Tokens,
    wish: Wish,
    retry: Retry,
) -> Result<Route, NoPair> {
    let mut waiting = None;
    loop {
        // Before the look: what changes behind it is not missed.
        let changed = membership.changed();
        let now = clock::now();
        let look_again = match membership.route(tokens.ask(), &wish, now) {
            Ok(route) if route.is_sound() || now >= retry.second_choice => return Ok(route),
            Ok(_) => retry.second_choice,
            Err(none) if now >= retry.until => return Err(none),
            Err(_) => retry.until,
        };
        waiting.get_or_insert_with(|| metrics.waits_for_node());
        // Whichever it was, the table is asked again.
        let _ = timeout_at(look_again.into(), changed).await;
    }
}
