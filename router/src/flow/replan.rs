//! Whether a request goes on after a failure, and what the next attempt must avoid. Pure: failures and the time go in,
//! verdicts come out. Attempts and the time that re-planning takes are bounded here; the request's deadline bounds
//! both. How many requests may be there at once is [`super::retry_budget`]'s matter.
//!
//! Three questions are answered from the same [`Cause`], so that they cannot disagree: is it worth another attempt,
//! which nodes does it speak against ([`Failure::blamed`], for the circuit breakers), and what is avoided next. The
//! causes are in [`crate::failure`].
use std::time::{Duration, Instant};

use crate::failure::{Bound, Cause, Failure};
use crate::select::policy::draw;
use crate::select::{Avoid, Role};

/// Pause before the second attempt where nothing sound is left: the node that failed is tried again. Doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Pause between two looks for room on the nodes. Doubles each time.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LONGEST_LOOK: Duration = Duration::from_millis(100);
/// Part of the time for another attempt in which it does not go where there is no room.
const ROOM_PART: u32 = 2;

/// What to do after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Another attempt.
    Retry(Retry),
    /// No attempt would be different.
    Hopeless,
    /// It would, but there were enough.
    Exhausted(Bound),
}

/// Terms of the search for the next pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// A sound pair is taken at once, one that failed before not before this; at the latest at `until`.
    pub second_choice: Instant,
    /// Nodes with room are taken at once, those without not before this: the request then waits on the node.
    pub crowded: Instant,
    /// No pair until then: the request fails.
    pub until: Instant,
    /// Whether it waits while the retry budget is used up. Not after a retry that brought nothing: where retries fail,
    /// more of them only keep others from their work.
    pub waits: bool,
    /// Of the jitter.
    seed: u64,
}

impl Retry {
    /// Until the next look for room, after so many.
    pub fn pause(&self, looks: u32) -> Duration {
        let pause = (FIRST_LOOK * 2_u32.saturating_pow(looks.min(16))).min(LONGEST_LOOK);
        jittered(pause, self.seed, u64::from(looks))
    }
}

/// Between half and all of a pause. Requests that failed together do not come back together.
fn jittered(pause: Duration, seed: u64, index: u64) -> Duration {
    const STEPS: u32 = 1024;
    let step = (draw(seed, index) % u64::from(STEPS)) as u32;
    pause / 2 + pause / 2 * step / STEPS
}

/// The attempts of one request.
#[derive(Clone, Debug)]
pub struct Replan {
    max_attempts: u32,
    within: Duration,
    attempts: u32,
    failures: u32,
    /// Time without progress, before the present outage.
    spent: Duration,
    /// Since when the request has made no progress; `None` while it does.
    since: Option<Instant>,
    /// Since then another attempt began.
    retried: bool,
    avoid: Avoid,
    /// Of the jitter.
    seed: u64,
}

impl Replan {
    /// A request whose first attempt begins: `max_attempts` in all, `within` this time without progress, in all. `seed`
    /// is all the chance that there is in its pauses.
    pub fn new(max_attempts: u32, within: Duration, seed: u64) -> Self {
        let (avoid, spent) = (Avoid::default(), Duration::ZERO);
        Self { max_attempts, within, attempts: 1, failures: 0, spent, since: None, retried: false, avoid, seed }
    }

    /// Attempts so far.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// What failed so far.
    pub fn avoid(&self) -> &Avoid {
        &self.avoid
    }

    /// The attempt on these (prefill, decode) nodes failed; without prefill the plan was local.
    pub fn failed(&mut self, failure: &Failure, nodes: (Option<u64>, u64), now: Instant) -> Verdict {
        let since = *self.since.get_or_insert(now);
        let (prefill, decode) = nodes;
        let node = match failure.role {
            Role::Prefill => prefill.unwrap_or(decode),
            Role::Decode => decode,
        };
        match failure.cause {
            Cause::Request => return Verdict::Hopeless,
            Cause::Died | Cause::Failed | Cause::Silent | Cause::Overloaded => self.avoid.nodes.push(node),
            Cause::Undelivered | Cause::Refused => match prefill {
                Some(prefill) => self.avoid.pairs.push((prefill, decode)),
                None => self.avoid.nodes.push(decode),
            },
            Cause::Spent => {}
        }
        let until = since + self.within.saturating_sub(self.spent);
        if self.attempts >= self.max_attempts {
            return Verdict::Exhausted(Bound::Attempts);
        }
        if now >= until {
            return Verdict::Exhausted(Bound::Time);
        }
        let pause = (FIRST_PAUSE * 2_u32.saturating_pow(self.failures)).min(LONGEST_PAUSE);
        self.failures += 1;
        // Of its own, apart from that of looks for room.
        let seed = draw(self.seed, self.failures.into());
        let second_choice = until.min(now + jittered(pause, self.seed, u64::MAX - u64::from(self.failures)));
        // A prefill call that has no KV any more cost the retry nothing yet.
        let waits = !self.retried || failure.cause == Cause::Spent;
        Verdict::Retry(Retry { second_choice, crowded: now + (until - now) / ROOM_PART, until, waits, seed })
    }

    /// A pair was found: the next attempt begins.
    pub fn began(&mut self) {
        self.attempts += 1;
        self.retried = true;
    }

    /// The client has another token.
    pub fn progressed(&mut self, now: Instant) {
        self.retried = false;
        if let Some(since) = self.since.take() {
            self.spent += now.saturating_duration_since(since);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tandem_proto::{Error, ErrorKind};

    use super::*;
    use crate::limits::MOST_ATTEMPTS;

    const WITHIN: Duration = Duration::from_secs(30);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn failure(role: Role, kind: ErrorKind) -> Failure {
        Failure::of_leg(role, Error::new(kind, "x"))
    }

    #[test]
    fn attempts_are_counted_and_pauses_grow() {
        let now = Instant::now();
        let mut replan = Replan::new(4, WITHIN, 7);
        for pause in [50, 100, 200] {
            let verdict = replan.failed(&failure(Role::Decode, ErrorKind::Unavailable), (Some(1), 2), now);
            let Verdict::Retry(retry) = verdict else { panic!("{verdict:?}") };
            let paused = retry.second_choice - now;
            assert!(paused >= ms(pause) / 2 && paused <= ms(pause), "{paused:?} of {pause} ms");
            assert_eq!((retry.crowded, retry.until), (now + WITHIN / 2, now + WITHIN));
            replan.began();
        }
        let verdict = replan.failed(&failure(Role::Prefill, ErrorKind::Unavailable), (Some(1), 2), now);
        assert_eq!(verdict, Verdict::Exhausted(Bound::Attempts));
        assert_eq!(replan.avoid().nodes, [2, 2, 2, 1]);
    }

    #[test]
    fn time_counts_while_nothing_moves() {
        let start = Instant::now();
        let mut replan = Replan::new(16, WITHIN, 7);
        let died = Failure { cause: Cause::Died, ..failure(Role::Decode, ErrorKind::Unavailable) };
        assert!(matches!(replan.failed(&died, (Some(1), 2), start), Verdict::Retry(_)));
        replan.progressed(start + ms(10_000));
        // Ten seconds are spent; the hour in which tokens came is not.
        let later = start + Duration::from_secs(3600);
        let Verdict::Retry(retry) = replan.failed(&died, (Some(1), 2), later) else { panic!("time is left") };
        assert_eq!(retry.until, later + ms(20_000));
        // The second failure of one outage does not start it anew.
        let again = replan.failed(&died, (Some(1), 2), later + ms(19_999));
        assert!(matches!(again, Verdict::Retry(retry) if retry.until == later + ms(20_000)));
        assert_eq!(replan.failed(&died, (Some(1), 2), later + ms(20_000)), Verdict::Exhausted(Bound::Time));
    }

    #[test]
    fn a_clients_error_is_nobodys_failure() {
        for kind in [ErrorKind::InvalidArgument, ErrorKind::DeadlineExceeded] {
            let mut replan = Replan::new(4, WITHIN, 7);
            let failure = failure(Role::Decode, kind).judged(true);
            assert_eq!(replan.failed(&failure, (Some(1), 2), Instant::now()), Verdict::Hopeless);
            assert!(failure.blamed().is_empty() && *replan.avoid() == Avoid::default());
        }
    }

    #[test]
    fn a_node_is_no_judge_of_the_request_s_time() {
        for role in [Role::Prefill, Role::Decode] {
            let failure = failure(role, ErrorKind::DeadlineExceeded).judged(false);
            assert_eq!((failure.cause, failure.error.kind), (Cause::Failed, ErrorKind::Unavailable));
            assert_eq!(failure.blamed(), [role]);
            let verdict = Replan::new(4, WITHIN, 7).failed(&failure, (Some(1), 2), Instant::now());
            assert!(matches!(verdict, Verdict::Retry(_)), "another node goes on");
        }
        let local = Failure::of_local(Error::new(ErrorKind::DeadlineExceeded, "x"));
        assert_eq!(local.judged(false).cause, Cause::Failed);
    }

    #[test]
    fn a_node_that_does_not_know_the_router_is_no_matter_of_the_client() {
        let failure = failure(Role::Prefill, ErrorKind::Unauthenticated).judged(false);
        assert_eq!((failure.cause, failure.error.kind), (Cause::Failed, ErrorKind::Unavailable));
    }

    #[test]
    fn overload_is_avoided_and_not_blamed() {
        let mut replan = Replan::new(4, WITHIN, 7);
        let failure = failure(Role::Decode, ErrorKind::Overloaded);
        assert!(matches!(replan.failed(&failure, (Some(1), 2), Instant::now()), Verdict::Retry(_)));
        assert!(failure.blamed().is_empty());
        assert_eq!(replan.avoid().nodes, [2]);
    }

    #[test]
    fn what_may_be_the_fault_of_either_is_the_pairs() {
        for failure in [
            failure(Role::Decode, ErrorKind::Corrupt),
            failure(Role::Prefill, ErrorKind::Incompatible),
            failure(Role::Decode, ErrorKind::Cancelled),
            Failure::undelivered(Error::new(ErrorKind::Unavailable, "x")),
        ] {
            let mut replan = Replan::new(4, WITHIN, 7);
            assert!(matches!(replan.failed(&failure, (Some(1), 2), Instant::now()), Verdict::Retry(_)));
            assert_eq!((replan.avoid().nodes.len(), replan.avoid().pairs.as_slice()), (0, [(1, 2)].as_slice()));
            assert_eq!(failure.blamed(), [Role::Prefill, Role::Decode]);
        }
    }

    #[test]
    fn what_fails_alone_has_nobody_else_to_blame() {
        for kind in [ErrorKind::Corrupt, ErrorKind::Cancelled, ErrorKind::Unavailable] {
            let mut replan = Replan::new(4, WITHIN, 7);
            let failure = Failure::of_local(Error::new(kind, "x"));
            assert!(matches!(replan.failed(&failure, (None, 2), Instant::now()), Verdict::Retry(_)));
            assert_eq!(
                (failure.blamed(), replan.avoid().nodes.as_slice()),
                ([Role::Decode].as_slice(), [2].as_slice())
            );
        }
        let overloaded = Failure::of_local(Error::new(ErrorKind::Overloaded, "x"));
        assert!(overloaded.blamed().is_empty());
    }

    #[test]
    fn a_retry_that_brought_nothing_does_not_wait_for_the_budget() {
        let (mut replan, now) = (Replan::new(8, WITHIN, 7), Instant::now());
        let waits = |replan: &mut Replan, failure: &Failure| match replan.failed(failure, (Some(1), 2), now) {
            Verdict::Retry(retry) => retry.waits,
            verdict => panic!("{verdict:?}"),
        };
        let failed = failure(Role::Decode, ErrorKind::Unavailable);
        assert!(waits(&mut replan, &failed) && waits(&mut replan, &failed), "the search failed, no attempt did");
        replan.began();
        assert!(!waits(&mut replan, &failed));
        let spent = Failure { cause: Cause::Spent, ..failure(Role::Prefill, ErrorKind::Unavailable) };
        assert!(waits(&mut replan, &spent), "its work was the one before");
        replan.began();
        replan.progressed(now);
        assert!(waits(&mut replan, &failed), "that was another outage");
    }

    #[test]
    fn pauses_differ_between_requests_and_repeat_with_their_seed() {
        let now = Instant::now();
        let retry = |seed| match Replan::new(4, WITHIN, seed).failed(
            &failure(Role::Decode, ErrorKind::Unavailable),
            (Some(1), 2),
            now,
        ) {
            Verdict::Retry(retry) => retry,
            verdict => panic!("{verdict:?}"),
        };
        assert_eq!(retry(1), retry(1));
        let different = |of: &dyn Fn(Retry) -> Duration| {
            (0..64).map(|seed| of(retry(seed))).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert!(different(&|retry| retry.second_choice - now) > 32);
        assert!(different(&|retry| retry.pause(0)) > 32);
        for looks in 0..100 {
            let (pause, longest) = (retry(3).pause(looks), FIRST_LOOK * 2u32.pow(looks.min(5)));
            let longest = longest.min(LONGEST_LOOK);
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?} after {looks} looks");
        }
    }

    const KINDS: [ErrorKind; 6] = [
        ErrorKind::Unavailable,
        ErrorKind::Overloaded,
        ErrorKind::Corrupt,
        ErrorKind::Internal,
        ErrorKind::Cancelled,
        ErrorKind::Aborted,
    ];

    proptest! {
        /// Whatever fails, and however often a request makes progress in between: attempts and the time without
        /// progress are bounded, and so is what is remembered.
        #[test]
        fn attempts_and_time_are_bounded(
            max_attempts in 1u32..=MOST_ATTEMPTS, within_ms in 0u64..5_000,
            steps in prop::collection::vec((0usize..KINDS.len(), 0u64..3_000, any::<bool>(), any::<bool>()), 1..80),
        ) {
            let mut replan = Replan::new(max_attempts, ms(within_ms), within_ms);
            let (mut now, mut waited) = (Instant::now(), Duration::ZERO);
            for (kind, wait_ms, found, progress) in steps {
                let role = if kind % 2 == 0 { Role::Prefill } else { Role::Decode };
                match replan.failed(&failure(role, KINDS[kind]), (Some(1), 2), now) {
                    Verdict::Hopeless | Verdict::Exhausted(Bound::Budget) => {
                        prop_assert!(false, "another attempt may be different, and the budget is not its matter")
                    }
                    Verdict::Exhausted(Bound::Attempts) => {
                        prop_assert_eq!(replan.attempts(), max_attempts);
                        break;
                    }
                    Verdict::Exhausted(Bound::Time) => break,
                    Verdict::Retry(retry) => {
                        prop_assert!(retry.until > now && retry.second_choice > now);
                        prop_assert!(retry.crowded >= now && retry.crowded < retry.until);
                        // The search ends with a pair, or at its bound.
                        let end = if found { retry.until.min(now + ms(wait_ms)) } else { retry.until };
                        waited += end - now;
                        now = end;
                        if !found { break }
                        replan.began();
                        if progress { replan.progressed(now) }
                    }
                }
                prop_assert!(replan.attempts() <= max_attempts);
                prop_assert!(replan.avoid().nodes.len() + replan.avoid().pairs.len() <= max_attempts as usize);
            }
            prop_assert!(waited <= ms(within_ms), "{waited:?}");
        }
    }
}
