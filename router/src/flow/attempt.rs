//! One attempt at an answer: the nodes of a plan, the call to each, and what they have said. It turns everything that
//! can happen to them into one [`Happening`] or one [`Failure`], and decides nothing: whether there is another attempt
//! is [`super::replan`]'s matter. Dropping it cancels its calls, and with them the work on the nodes.
//!
//! A local plan has a decode leg only, which brings the first token, too.
//!
//! Decode may fail while prefill is still worth something. Then the attempt lives on with a *search* in the place of
//! the decode leg ([`Attempt::seek_decode`]), and prefill's events are taken meanwhile.
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, Fuse};
use futures::{FutureExt, StreamExt};
use tandem_proto::{Error, ErrorKind, v1};
use tandem_telemetry::clock;
use tokio::time::{Instant, Sleep};

use super::attempt_protocol::{AttemptProtocol, Step};
use super::find_nodes::Sought;
use super::legs::{DecodeLeg, PrefillLeg, Rest};
use crate::failure::{Cause, Failure};
use crate::membership::Route;
use crate::select::{Plan, Role};

/// How long a finished answer waits for the prefill node's last message, which carries its spans.
const LAST_SPANS: Duration = Duration::from_millis(50);

/// The search for another pair; bounded by itself.
pub type Search = Pin<Box<dyn Future<Output = Sought> + Send>>;

/// What happened next.
pub enum Happening {
    /// A node said something in order.
    Step(Step),
    /// The search that [`Attempt::seek_decode`] began ended.
    Sought(Box<Sought>),
}

/// The legs of a request.
pub struct Attempt {
    /// The nodes.
    pub route: Route,
    /// What they have said.
    pub protocol: AttemptProtocol,
    /// Tokens that the client had when the prompt of this attempt was made.
    pub basis: usize,
    deaths: Deaths,
    /// When it has been silent for too long.
    silent: Pin<Box<Sleep>>,
    /// `None` in a local plan.
    prefill: Option<PrefillLeg>,
    prefill_open: bool,
    decode: DecodeSide,
    /// The first token of this attempt was here.
    computed: bool,
    /// Decode has shown that it works.
    decode_works: bool,
}

/// The deaths of its nodes. They are waited for as long as the attempt lives, and not anew with each token.
struct Deaths {
    prefill: Fuse<BoxFuture<'static, String>>,
    decode: Fuse<BoxFuture<'static, String>>,
}

impl Deaths {
    fn of(route: &Route) -> Self {
        let of = |role| {
            let node = Arc::clone(route.node(role));
            async move { node.died().await }.boxed().fuse()
        };
        Self { prefill: of(Role::Prefill), decode: of(Role::Decode) }
    }
}

enum DecodeSide {
    Leg(DecodeLeg),
    Sought(Search),
}

impl Attempt {
    /// Opens all legs; the call that computes the prompt begins at once, the other one with the first [`Self::next`]:
    /// of two connections that have something to write, nobody says which one the reactor runs first. `prompt` is for
    /// the prefill node, if the plan has one; `basis` tokens of the answer are in the prompt of `start`.
    pub fn open(route: Route, prompt: Option<v1::RequestSpec>, start: v1::DecodeStart, basis: usize) -> Self {
        let protocol = AttemptProtocol::new(route.plan(), start.spec.as_ref().map_or(0, |spec| spec.max_tokens));
        let mut prefill = route.prefill.as_ref().zip(prompt).map(|(node, prompt)| PrefillLeg::open(node, prompt));
        let mut decode = DecodeLeg::open(&route.decode, start);
        match &mut prefill {
            Some(prefill) => prefill.begin(),
            None => decode.begin(),
        }
        let (decode, prefill_open) = (DecodeSide::Leg(decode), prefill.is_some());
        let (deaths, silent) = (Deaths::of(&route), Box::pin(tokio::time::sleep(Duration::ZERO)));
        let (computed, decode_works) = (false, false);
        Self { route, protocol, basis, deaths, silent, prefill, prefill_open, decode, computed, decode_works }
    }

    /// Whether the prefill call can serve another decode node after `failure`: it is open and has not handed over.
    pub fn keeps_prefill(&self, failure: &Failure) -> bool {
        let has_it = self.protocol.verified.is_none() && self.protocol.delivered.is_none();
        failure.role == Role::Decode && self.prefill_open && has_it
    }

    /// Whether decode is being sought.
    pub fn seeks_decode(&self) -> bool {
        matches!(self.decode, DecodeSide::Sought(_))
    }

    /// Cancels the decode call and goes on with prefill alone until `search` ends.
    pub fn seek_decode(&mut self, search: Search) {
        self.protocol.decode_lost();
        self.route.decode_lost();
        self.decode = DecodeSide::Sought(search);
        self.decode_works = false;
    }

    /// The search found another decode node for the same prefill call.
    pub fn take_decode(&mut self, route: Route, start: v1::DecodeStart) {
        self.decode = DecodeSide::Leg(DecodeLeg::open(&route.decode, start));
        self.deaths = Deaths::of(&route);
        self.route = route;
        if self.computed {
            // The first token of this attempt was here before this node was chosen.
            self.route.computed(clock::now());
        }
    }

    /// Hands decode's ticket to prefill.
    pub fn deliver(&self, ticket: Vec<u8>) {
        if let Some(prefill) = &self.prefill {
            prefill.deliver(ticket);
        }
    }

    /// Waits for what happens next. Cancel-safe. An attempt that says nothing for `silence` has failed.
    ///
    /// # Errors
    /// The failure that ends this attempt.
    pub async fn next(&mut self, silence: Duration) -> Result<Happening, Failure> {
        let Self { route, protocol, deaths, silent, prefill, prefill_open, decode, .. } = self;
        let leg = match decode {
            DecodeSide::Leg(leg) => leg,
            DecodeSide::Sought(search) => {
                let step = tokio::select! {
                    biased;
                    why = &mut deaths.prefill => return Err(died(Role::Prefill, &why)),
                    found = search => return Ok(Happening::Sought(Box::new(found))),
                    event = said(prefill) => on_prefill(protocol, event)?,
                };
                return self.taken(Role::Prefill, step);
            }
        };
        silent.as_mut().reset(Instant::now() + silence);
        let (role, step) = tokio::select! {
            biased;
            why = &mut deaths.decode => return Err(died(Role::Decode, &why)),
            why = &mut deaths.prefill, if protocol.needs_prefill() => return Err(died(Role::Prefill, &why)),
            event = said(prefill), if *prefill_open => match event {
                // Decode has all it needs: what is missing now is only prefill's report.
                None | Some(Err(_)) if !protocol.needs_prefill() => {
                    tracing::debug!(ended = ?event, "prefill leg ended");
                    *prefill_open = false;
                    (Role::Prefill, Step::Wait)
                }
                event => {
                    let step = on_prefill(protocol, event)?;
                    // That was its last word.
                    *prefill_open = protocol.delivered.is_none();
                    (Role::Prefill, step)
                }
            },
            event = leg.events.next(), if protocol.takes_decode() => {
                let event = event.unwrap_or_else(|| Err(too_early())).map_err(Error::from);
                let step = event.and_then(|event| protocol.on_decode(event));
                (Role::Decode, step.map_err(|error| of_decode(route.plan(), error))?)
            }
            () = silent => return Err(self.silent(silence)),
        };
        self.taken(role, step)
    }

    /// What a step says of the nodes that made it.
    fn taken(&mut self, role: Role, step: Step) -> Result<Happening, Failure> {
        if matches!(step, Step::Token { .. }) && !self.computed {
            self.computed = true;
            self.route.computed(clock::now());
        }
        // A verified hand-off says so too, where the first token came in an earlier attempt.
        if matches!(step, Step::Verified) || (matches!(step, Step::Token { .. }) && role == Role::Prefill) {
            self.route.prefilled();
        }
        match &step {
            Step::Verified => {
                self.route.succeeded(Role::Prefill);
                self.protocol.verified.iter().for_each(|kv| self.route.handed_off(kv));
            }
            Step::Token { finished: Some(_), .. } if role == Role::Prefill => self.route.succeeded(Role::Prefill),
            Step::Token { .. } | Step::Finished(_) if role == Role::Decode && !self.decode_works => {
                self.decode_works = true;
                self.route.succeeded(Role::Decode);
            }
            Step::LetGo => self.stop_prefill(),
            Step::Undelivered(error) => return Err(Failure::undelivered(error.clone())),
            Step::Spent => {
                let error = Error::new(ErrorKind::Unavailable, "its KV went to a decode node that failed");
                return Err(Failure { role: Role::Prefill, cause: Cause::Spent, error });
            }
            _ => {}
        }
        Ok(Happening::Step(step))
    }

    fn silent(&self, silence: Duration) -> Failure {
        let role = if self.protocol.waits_for_prefill() { Role::Prefill } else { Role::Decode };
        let error = Error::new(ErrorKind::Unavailable, format!("it said nothing for {silence:?}"));
        Failure { role, cause: Cause::Silent, error }
    }

    /// Prefill's last message carries its spans and is nearly always there already.
    pub async fn last_spans(&mut self) {
        let Self { protocol, prefill, .. } = self;
        if prefill.is_none() {
            return;
        }
        let last = async {
            while protocol.delivered.is_none()
                && let Some(Ok(event)) = said(prefill).await
                && protocol.on_prefill(event).is_ok()
            {}
        };
        let _ = tokio::time::timeout(LAST_SPANS, last).await;
    }

    /// The answer is complete without more tokens: the nodes end their work well. `whole`: prefill's token was all of
    /// it.
    pub async fn stop(mut self, whole: bool) -> (Rest, Vec<u8>) {
        if let DecodeSide::Leg(leg) = &mut self.decode {
            leg.stop(whole || !self.protocol.hands_off());
        }
        if !self.protocol.hands_off() {
            self.stop_prefill();
        }
        if whole {
            self.last_spans().await;
        }
        let Self { protocol, prefill, prefill_open, decode, .. } = self;
        let prefill = prefill.filter(|_| prefill_open && protocol.delivered.is_none());
        let decode = match decode {
            DecodeSide::Leg(leg) => Some(leg),
            DecodeSide::Sought(_) => None,
        };
        (Rest { prefill, decode }, protocol.spans)
    }

    fn stop_prefill(&mut self) {
        if let Some(prefill) = &mut self.prefill {
            prefill.stop();
        }
    }
}

/// The prefill node's next event; without one there is none, ever.
async fn said(prefill: &mut Option<PrefillLeg>) -> Option<Result<v1::PrefillEvent, tonic::Status>> {
    match prefill {
        Some(leg) => leg.events.next().await,
        None => std::future::pending().await,
    }
}

fn of_decode(plan: Plan, error: Error) -> Failure {
    match plan {
        Plan::Pair => Failure::of_leg(Role::Decode, error),
        Plan::Local => Failure::of_local(error),
    }
}

fn on_prefill(
    protocol: &mut AttemptProtocol,
    event: Option<Result<v1::PrefillEvent, tonic::Status>>,
) -> Result<Step, Failure> {
    let event = event.unwrap_or_else(|| Err(too_early())).map_err(Error::from);
    event.and_then(|event| protocol.on_prefill(event)).map_err(|error| Failure::of_leg(Role::Prefill, error))
}

fn too_early() -> tonic::Status {
    tonic::Status::unavailable("it ended the call too early")
}

fn died(role: Role, why: &str) -> Failure {
    let error = Error::new(ErrorKind::Unavailable, format!("the node was lost, {why}"));
    Failure { role, cause: Cause::Died, error }
}
