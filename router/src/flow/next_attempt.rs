//! From a failure of a node to the next attempt: what [`replan`](super::replan) decides is done here. The nodes are
//! blamed, the legs dropped or kept, the search for the next plan is awaited, and all of it noted for metrics and
//! trace.
use tandem_proto::Error;
use tandem_telemetry::clock;

use super::attempt::{Attempt, Search};
use super::find_nodes::{Finder, Found, Lost, Setback, Sought};
use super::replan::{Retry, Verdict};
use super::{Run, legs};
use crate::admission::Slot;
use crate::failure::{Bound, Failure};
use crate::limits::Limits;
use crate::membership::Route;
use crate::record::{Names, Replanned};
use crate::select::Wish;
use crate::select::numerics::Numerics;

impl Run {
    /// After a failure: another attempt, or the same one with prefill alone while decode is sought.
    ///
    /// # Errors
    /// What the client hears: no attempt would be different, or there were enough.
    pub(super) async fn next_attempt(&mut self, mut attempt: Attempt, failure: Failure) -> Result<Attempt, Error> {
        let (now, phase) = (clock::now(), self.record.timeline.phase());
        self.retrying = None;
        let failure = failure.judged(now >= self.deadline);
        failure.blamed().iter().for_each(|role| attempt.route.failed(*role, now));
        if failure.session_is_over() {
            // Before the stream says so: all that is asked there would fail at once, and the node would look idle.
            let session = attempt.route.node(failure.role).session;
            self.shared.membership.leave(session, &failure.error.message);
        }
        if failure.of_handoff() {
            self.shared.metrics.handoff_failed();
            attempt.route.handoff_failed(&failure.error.message, now);
        }
        let verdict = self.replan.failed(&failure, attempt.route.sessions(), now);
        let keep = attempt.route.sessions().0.filter(|_| attempt.keeps_prefill(&failure));
        let setback = Setback { node: attempt.route.node(failure.role).clone(), failure, at: now, phase };
        let told = self.client_error(&setback);
        tracing::info!(request = self.record.request_id, error = told.message, ?verdict, "attempt failed");
        let retry = match verdict {
            Verdict::Retry(retry) => retry,
            Verdict::Hopeless => return Err(told),
            Verdict::Exhausted(bound) => return Err(self.exhausted(told, bound)),
        };
        let search = self.search(setback, keep, self.continues(&attempt.route, keep.is_some()), retry);
        if keep.is_some() {
            attempt.seek_decode(search);
            return Ok(attempt);
        }
        // Cancels the work on both nodes before any other has it.
        drop(attempt);
        let route = self.found(search.await)?;
        Ok(self.open(route))
    }

    /// How the next nodes must compute: as those before them, once the client has a token of theirs, or may get one
    /// from the prefill node that is kept.
    fn continues(&self, route: &Route, kept: bool) -> Option<Numerics> {
        (kept || !self.progress.sent.is_empty()).then(|| Numerics::of(&route.decode.info))
    }

    fn search(&self, setback: Setback, keep: Option<u64>, continues: Option<Numerics>, retry: Retry) -> Search {
        let shared = &self.shared;
        let finder = Finder {
            membership: shared.membership.clone(),
            metrics: shared.metrics.clone(),
            admission: shared.admission.clone(),
            budget: shared.retry_budget.clone(),
            // As in the queue: without one, nobody waits for room.
            node_queue: (shared.admission.max_queue() > 0).then_some(self.limits.node_queue),
            claim: self.slot.as_ref().map(Slot::claim),
            demand: self.demand(),
            wish: Wish { keep, avoid: self.replan.avoid().clone(), continues },
            retry,
        };
        Box::pin(async move { Sought { found: finder.find().await, setback } })
    }

    /// The search beside a prefill call ended: with a decode node for that call, or with another plan.
    ///
    /// # Errors
    /// There was none.
    pub(super) fn go_on(&mut self, attempt: &mut Attempt, sought: Sought) -> Result<(), Error> {
        let route = self.found(sought)?;
        if route.sessions().0 == attempt.route.sessions().0 {
            let start = self.decode_start(&route, attempt.basis);
            attempt.take_decode(route, start);
        } else {
            *attempt = self.open(route);
        }
        Ok(())
    }

    /// The next attempt has its nodes, if they were found.
    fn found(&mut self, sought: Sought) -> Result<Route, Error> {
        let Sought { setback, found } = sought;
        let Found { route, retrying } = found.map_err(|lost| {
            let told = self.client_error(&setback);
            match lost {
                Lost::Budget => self.exhausted(told, Bound::Budget),
                Lost::NoNodes(why) => {
                    self.exhausted(Error { message: format!("{}; {why}", told.message), ..told }, Bound::Time)
                }
            }
        })?;
        self.retrying = Some(retrying);
        let Setback { failure, node, at, phase } = setback;
        self.replan.began();
        self.shared.metrics.replanned(failure.role, failure.cause.as_str());
        self.record.replans.push(Replanned {
            at,
            search: clock::now().saturating_duration_since(at),
            phase,
            role: failure.role,
            node: node.info.node_id.clone(),
            cause: failure.cause.as_str(),
            nodes: Names::of(&route),
        });
        self.shared.metrics.planned(route.plan());
        Ok(route)
    }

    /// What the client hears of it, if nothing can be done: by what it has now, which may be more than it had then.
    fn client_error(&self, setback: &Setback) -> Error {
        let Setback { failure, node, phase, .. } = setback;
        legs::failed(node, *phase, &failure.error, !self.progress.sent.is_empty())
    }

    /// The error of a request that had all its attempts, or all its time for them.
    fn exhausted(&self, told: Error, bound: Bound) -> Error {
        self.shared.metrics.replan_exhausted(bound.as_str());
        let Limits { max_attempts, replan, .. } = *self.limits;
        let attempts = self.replan.attempts();
        let gave_up = match bound {
            Bound::Attempts => format!("attempt {attempts} of {max_attempts}"),
            Bound::Time => format!("gave up after {replan:?} without progress"),
            Bound::Budget => {
                let percent = self.shared.retry_budget.percent();
                format!("gave up: too much fails, {percent} % of the running requests are retries already")
            }
        };
        Error { message: format!("{} ({gave_up})", told.message), ..told }
    }
}
