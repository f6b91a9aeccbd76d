//! The search for the nodes of the next attempt: at once if a sound plan with room is there and the retry budget allows
//! it; never beyond its bound. What it waits for is one of these, and each has its own time, see [`Retry`]:
//!
//! - a place in the [retry budget](super::retry_budget): the next retry that ends gives one;
//! - nodes: they come;
//! - others than those that failed: from `second_choice` on these are good enough;
//! - room on a node: from `crowded` on the request waits on the node. Meanwhile requests that have not started come
//!   behind it ([`Claim`]), and it looks again and again, at times that differ from those of others.
use std::sync::Arc;
use std::time::Instant;

use tandem_telemetry::clock;
use tokio::time::sleep_until;

use super::replan::Retry;
use super::retry_budget::{RetryBudget, Retrying};
use crate::admission::{Admission, Claim};
use crate::capacity::Demand;
use crate::failure::Failure;
use crate::membership::{Accepts, Membership, Node, NotYet, Route};
use crate::metrics::Metrics;
use crate::record::timeline::Phase;
use crate::select::{NoPair, Wish};

/// A failure, in its place.
pub struct Setback {
    /// What failed.
    pub failure: Failure,
    /// Which node.
    pub node: Arc<Node>,
    /// When the router saw it.
    pub at: Instant,
    /// What the client waited for then.
    pub phase: Phase,
}

/// How the search after a failure ended.
pub struct Sought {
    /// The failure.
    pub setback: Setback,
    /// What was found.
    pub found: Result<Found, Lost>,
}

/// The nodes of the next attempt.
#[derive(Debug)]
pub struct Found {
    /// Booked.
    pub route: Route,
    /// Its part of the budget.
    pub retrying: Retrying,
}

/// Why there were none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The time was over, and the nodes made no plan.
    NoNodes(NoPair),
    /// As many requests were retries as may be, when the time was over or for one that does not wait.
    Budget,
}

/// What is missing now.
enum Missing {
    Budget,
    Nodes(NoPair),
    SoundNodes,
    Room,
}

/// One search.
pub struct Finder {
    /// The nodes.
    pub membership: Membership,
    /// Who waits is counted.
    pub metrics: Metrics,
    /// How many requests run.
    pub admission: Admission,
    /// How many of them may be retries.
    pub budget: RetryBudget,
    /// Requests that may wait on each node; `None`: whether it has room does not matter.
    pub node_queue: Option<u32>,
    /// The request's own place.
    pub claim: Option<Claim>,
    /// What it needs.
    pub demand: Demand,
    /// What it wishes.
    pub wish: Wish,
    /// What it takes, and when.
    pub retry: Retry,
}

impl Finder {
    /// Finds the nodes.
    ///
    /// # Errors
    /// [`Lost`]
    pub async fn find(self) -> Result<Found, Lost> {
        let (mut waiting, mut looks) = (None, 0);
        // A search that was given up may have left a claim.
        let mut claims = None;
        loop {
            // Before the look: what changes behind it is not missed.
            let (changed, ended) = (self.membership.changed(), self.budget.ended());
            let now = clock::now();
            let missing = match self.look(now) {
                Ok(found) => {
                    self.claim(&mut claims, false);
                    return Ok(found);
                }
                Err(missing) => missing,
            };
            let (for_budget, for_room) = (matches!(missing, Missing::Budget), matches!(missing, Missing::Room));
            self.claim(&mut claims, for_room);
            let look_again = self.look_again(missing, looks, now)?;
            looks += u32::from(for_room);
            waiting.get_or_insert_with(|| self.metrics.waits_for_node());
            let _turn = for_budget.then(|| self.budget.wait());
            // Whichever it was, all is looked at again.
            tokio::select! {
                () = changed => {}
                () = ended, if for_budget => {}
                () = sleep_until(look_again.into()) => {}
            }
        }
    }

    fn look(&self, now: Instant) -> Result<Found, Missing> {
        let Self { retry, wish, node_queue, .. } = self;
        let running = self.admission.counts().inflight;
        // The table is asked only by those who may go on.
        if !self.budget.has_room(running, retry.waits) {
            return Err(Missing::Budget);
        }
        let accepts = Accepts {
            unsound: now >= retry.second_choice,
            without_room: now >= retry.crowded || node_queue.is_none(),
            node_queue: node_queue.unwrap_or_default(),
        };
        let route = self.membership.route_again(&self.demand, wish, accepts, now);
        let route = route.map_err(|not_yet| match not_yet {
            NotYet::NoPair(none) => Missing::Nodes(none),
            NotYet::Unsound => Missing::SoundNodes,
            NotYet::NoRoom => Missing::Room,
        })?;
        let retrying = self.budget.begin(running, retry.waits).ok_or(Missing::Budget)?;
        Ok(Found { route, retrying })
    }

    /// While it waits for room nobody takes that room who has not started.
    fn claim(&self, claims: &mut Option<bool>, waits_for_room: bool) {
        let Some(claim) = self.claim.as_ref().filter(|_| *claims != Some(waits_for_room)) else { return };
        *claims = Some(waits_for_room);
        if waits_for_room {
            claim.waits_for_room(&self.demand);
        } else {
            claim.routed();
        }
    }

    /// When to look again, unless this was the last time.
    fn look_again(&self, missing: Missing, looks: u32, now: Instant) -> Result<Instant, Lost> {
        let retry = &self.retry;
        let over = now >= retry.until;
        let then = match missing {
            Missing::Budget if over || !retry.waits => return Err(Lost::Budget),
            Missing::Nodes(none) if over => return Err(Lost::NoNodes(none)),
            Missing::Budget | Missing::Nodes(_) => retry.until,
            Missing::SoundNodes => retry.second_choice,
            Missing::Room => retry.crowded.min(now + retry.pause(looks)),
        };
        Ok(then)
    }
}
