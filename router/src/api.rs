//! The border between the API edges ([`crate::grpc`], [`crate::http`]) and the request's flow: the handle that an edge
//! asks, and the answer as it runs; what they say to each other is [`crate::generation`]. Edges know nothing of nodes,
//! legs or spans; the flow knows nothing of protocols. Read [`crate::flow`] next.
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::Either;
use futures::stream::{Stream, StreamExt, select_all};
use tandem_etcd::register::Standing;
use tandem_ports::Places;
use tandem_proto::{Error, ErrorCode, ErrorKind, TraceContext};
use tandem_telemetry::{Exporter, clock};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::admission::cache_salt::CacheSalts;
use crate::admission::keys::Keys;
use crate::admission::tenant::DEFAULT_TENANT;
use crate::admission::{Admission, Counts, Tenant};
use crate::caller::{Credentials, Parent};
use crate::flow;
use crate::flow::refused::Refused;
use crate::flow::retry_budget::{Retries, RetryBudget};
use crate::generation::{GenerationEvent, GenerationRequest};
use crate::intake::Intake;
use crate::limits::{CurrentLimits, Limits};
use crate::membership::{JoinService, Membership};
use crate::metrics::{Metrics, Seen};
use crate::text::ModelText;
use crate::traces::{DEFAULT_RING, JaegerUi, Traces};

/// The running answer. Dropping it cancels both legs of the request at once.
#[derive(Debug)]
pub struct GenerationStream {
    events: mpsc::Receiver<Result<GenerationEvent, Error>>,
    root: TraceContext,
    _cancel: DropGuard,
}

impl GenerationStream {
    /// The root span of this request: `traceparent` of the response.
    pub fn trace(&self) -> TraceContext {
        self.root
    }
}

impl Stream for GenerationStream {
    type Item = Result<GenerationEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_recv(context)
    }
}

/// What all answers of a call say, as it comes, with their numbers.
pub fn merged<S: Stream + Send + Unpin>(answers: Vec<S>) -> impl Stream<Item = (u32, S::Item)> + Send + Unpin {
    let one = answers.len() == 1;
    let mut numbered = (0..).zip(answers).map(|(choice, answer)| answer.map(move |event| (choice, event)));
    match numbered.next() {
        // Nearly always: there is nothing to select.
        Some(only) if one => Either::Left(only),
        first => Either::Right(select_all(first.into_iter().chain(numbered))),
    }
}

/// What becomes of traces.
#[derive(Clone, Debug)]
pub struct Telling {
    /// Sends them to a collector.
    pub exporter: Exporter,
    /// Of those that begin here, the share that is sent; slow and failed requests always are.
    pub sample_ratio: f64,
    /// Traces that the router keeps itself.
    pub ring: usize,
}

impl From<Exporter> for Telling {
    fn from(exporter: Exporter) -> Self {
        Self { exporter, sample_ratio: 1.0, ring: DEFAULT_RING }
    }
}

/// Handle to the router, as its edges see it. Each layer of a route has one, and clones it for each request.
#[derive(Clone)]
pub struct Service(Arc<Parts>);

#[derive(Clone)]
struct Parts {
    flow: Arc<flow::Shared>,
    keys: Keys,
    intake: Intake,
    /// The process's ports, for metrics.
    ports: Arc<[(&'static str, Places)]>,
    /// Where clients that speak gRPC find it.
    grpc_port: Option<u16>,
    /// Where people look at traces.
    jaeger_ui: Option<JaegerUi>,
    /// Where nodes look for it.
    standing: Option<Standing>,
}

impl Service {
    /// Joins the parts. `limits` bound admission and every wait of a request; `instance` names this router in traces.
    pub fn new(
        model: Arc<ModelText>,
        membership: Membership,
        telling: impl Into<Telling>,
        limits: Limits,
        instance: String,
    ) -> Self {
        Self::with_keys(model, membership, telling, limits, instance, Keys::default())
    }

    /// The same for clients with API keys.
    pub fn with_keys(
        model: Arc<ModelText>,
        membership: Membership,
        telling: impl Into<Telling>,
        limits: Limits,
        instance: String,
        keys: Keys,
    ) -> Self {
        let Telling { exporter, sample_ratio, ring } = telling.into();
        let admission = Admission::new(&limits, membership.clone(), keys.required());
        let traces = Traces::new(ring);
        let flow = flow::Shared {
            cache_salts: CacheSalts::new(membership.cache_secret()),
            membership,
            exporter,
            traces,
            sample_ratio,
            metrics: Metrics::new(&model.model_name, &instance, &flow::labels()),
            admission,
            retry_budget: RetryBudget::new(limits.retry_budget_percent),
            limits: CurrentLimits::new(limits),
            instance: instance.into(),
            model,
            ending: CancellationToken::new(),
        };
        let (intake, ports) = (Intake::default(), Arc::default());
        let flow = Arc::new(flow);
        Self(Arc::new(Parts { flow, keys, intake, ports, grpc_port: None, jaeger_ui: None, standing: None }))
    }

    /// The same with the ports that it is asked at, by name: their connections are in its metrics.
    pub fn at_ports(self, ports: Vec<(&'static str, Places)>) -> Self {
        self.with(|parts| parts.ports = ports.into())
    }

    /// The same where clients that speak gRPC find it.
    pub fn with_grpc_port(self, port: u16) -> Self {
        self.with(|parts| parts.grpc_port = Some(port))
    }

    /// The same with a Jaeger that has its traces, too: they come with a link to it.
    pub fn with_jaeger_ui(self, jaeger_ui: Option<JaegerUi>) -> Self {
        self.with(|parts| parts.jaeger_ui = jaeger_ui)
    }

    /// The same for a router that is to stand in etcd: whether it does is in its metrics.
    pub fn with_standing(self, standing: Option<Standing>) -> Self {
        self.with(|parts| parts.standing = standing)
    }

    fn with(mut self, change: impl FnOnce(&mut Parts)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// Where people look at traces, if that is known.
    pub fn jaeger_ui(&self) -> Option<&JaegerUi> {
        self.0.jaeger_ui.as_ref()
    }

    /// Whose request it is, by its credentials, or by its `x-tandem-tenant` header or metadata.
    ///
    /// # Errors
    /// `Unauthenticated` where keys are needed and this is none, `InvalidArgument` for a tenant's name that is none.
    pub fn tenant<'a>(&self, shown: impl Into<Credentials<'a>>, name: Option<&str>) -> Result<Tenant, Error> {
        self.0.keys.tenant(shown, name)
    }

    /// Whether a request of this tenant could start or wait at all now: asked before its body is read, so that who is
    /// refused anyhow costs no more than a look at the headers.
    ///
    /// # Errors
    /// `Unavailable` while the router drains, `Overloaded` for a full queue or a rate that is used up.
    pub fn may_enter(&self, tenant: &Tenant) -> Result<(), Error> {
        flow::admit::may_enter(&self.0.flow, tenant)
    }

    /// Takes one request from the tenant's rates for work that no node does, as `/tokenize`.
    ///
    /// # Errors
    /// As [`Self::may_enter`].
    pub fn charge(&self, tenant: &Tenant) -> Result<(), Error> {
        flow::admit::charge(&self.0.flow, tenant)
    }

    /// The bounds of what is read and tokenized before a request has its place.
    pub fn intake(&self) -> &Intake {
        &self.0.intake
    }

    /// Draws the span of a whole request.
    pub fn root(&self, parent: Option<&Parent>) -> TraceContext {
        self.0.flow.root(parent)
    }

    /// Leaves the trace of a request that was refused, here or by its edge, and a line in the log.
    pub fn turned_away(&self, refused: &Refused<'_>, error: &Error) {
        flow::refused::tell(&self.0.flow, refused, error);
    }

    /// Counts a request that its edge refused, so that it never came to [`Self::generate`], which counts its own
    /// refusals.
    pub fn refused(&self, kind: ErrorKind) {
        self.0.flow.metrics.refused(kind);
    }

    /// Starts a request. Nothing was sent to a node when this returns.
    ///
    /// # Errors
    /// `InvalidArgument` for a request that can never be answered, `Overloaded` when it may not wait (with the time
    /// after which it is worth another try), `Unavailable` when the nodes of no plan are there or the router is
    /// draining.
    pub fn generate(&self, request: GenerationRequest) -> Result<GenerationStream, Error> {
        let mut streams = self.generate_all(vec![request])?;
        streams.pop().ok_or_else(|| Error::new(ErrorKind::Internal, "a request without an answer"))
    }

    /// Starts the requests of one call, all of one tenant: all of them or none.
    ///
    /// # Errors
    /// As [`Self::generate`], of the first one that cannot start.
    pub fn generate_all(&self, requests: Vec<GenerationRequest>) -> Result<Vec<GenerationStream>, Error> {
        let entries = flow::admit::all(&self.0.flow, &requests)?;
        let start = |(request, entry)| {
            let (sender, events) = mpsc::channel(flow::CLIENT_QUEUE_EVENTS);
            let cancel = CancellationToken::new();
            let identities = flow::start(&self.0.flow, request, entry, sender, cancel.clone());
            GenerationStream { events, root: identities.root, _cancel: cancel.drop_guard() }
        };
        Ok(requests.into_iter().zip(entries).map(start).collect())
    }

    /// Whether a prompt can be answered at all; asked before anything is made of it.
    ///
    /// # Errors
    /// `InvalidArgument` (param `prompt`): it is empty, as long as the context, or holds ids outside the vocabulary.
    pub fn check_prompt(&self, ids: &[u32]) -> Result<(), Error> {
        flow::check::prompt(ids, &self.0.flow.model)
    }

    /// The tokens to generate: what the client asked for, or the default (see [`Limits::max_tokens_default`]) as far as
    /// the context and the nodes' KV memory have room for it beside the prompt.
    ///
    /// # Errors
    /// `InvalidArgument` (param `max_tokens`) for 0 or more than the context leaves.
    pub fn resolve_max_tokens(&self, asked: Option<u32>, prompt_tokens: usize) -> Result<u32, Error> {
        let context = self.0.flow.model.context_len;
        let prompt = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        let left = context.saturating_sub(prompt);
        match asked {
            Some(0) => Err(Error::invalid("max_tokens", "max_tokens must be at least 1")),
            Some(asked) if asked > left => {
                let message = format!(
                    "the context holds {context} tokens: {prompt_tokens} of the prompt leave {left}, {asked} were asked for"
                );
                Err(Error::invalid("max_tokens", message).with_code(ErrorCode::ContextLengthExceeded))
            }
            Some(asked) => Ok(asked),
            None => {
                let most = self.0.flow.membership.most_tokens().map_or(u32::MAX, |most| most.saturating_sub(prompt));
                // A prompt without any room is refused by `generate`, whose message is about the prompt.
                Ok(self.0.flow.limits.get().max_tokens_default.min(left).min(most).max(1))
            }
        }
    }

    /// Tokenizer, chat template and names of the served model.
    pub fn model(&self) -> &Arc<ModelText> {
        &self.0.flow.model
    }

    /// Runs `work` on so many bytes of text without holding up the other requests.
    ///
    /// # Errors
    /// Those of `work`, and `Overloaded` when too many texts wait for a worker.
    pub async fn with_model<T: Send + 'static, E: From<Error> + Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&ModelText) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let model = Arc::clone(self.model());
        self.0.intake.work(bytes, move || work(&model)).await
    }

    /// Whether a request could start now: a compatible pair of nodes is there, or a decode node that may prefill.
    pub fn ready(&self) -> bool {
        let flow = &self.0.flow;
        !flow.admission.is_closed() && flow.membership.has_pair()
    }

    /// Whether it takes no new request any more.
    pub fn is_draining(&self) -> bool {
        self.0.flow.admission.is_closed()
    }

    /// The nodes, for `/debug/cluster`.
    pub fn cluster_json(&self) -> serde_json::Value {
        self.0.flow.membership.json()
    }

    /// Where clients that speak gRPC find it, if that is known.
    pub fn grpc_port(&self) -> Option<u16> {
        self.0.grpc_port
    }

    /// One trace (32 hexadecimal digits, or "last").
    ///
    /// # Errors
    /// `NotFound` when the ring does not hold it.
    pub fn trace_json(&self, id: &str) -> Result<serde_json::Value, Error> {
        self.trace_json_of(self.traces(), id)
    }

    /// The same of what these traces show, for `/api/traces/{id}`.
    ///
    /// # Errors
    /// As there.
    pub fn trace_json_of(&self, traces: &Traces, id: &str) -> Result<serde_json::Value, Error> {
        let mut trace = traces.json(id).ok_or_else(|| no_trace(id))?;
        let link = self.0.jaeger_ui.as_ref().zip(trace["trace_id"].as_str()).map(|(ui, id)| ui.trace(id));
        if let Some(link) = link {
            trace["jaeger"] = link.into();
        }
        Ok(trace)
    }

    /// Whether clients need a key: then their port says nothing of the whole cluster, that is operators' alone.
    pub fn is_reserved(&self) -> bool {
        self.0.keys.required()
    }

    /// The traces that somebody may see: with keys, those of the key's tenant alone.
    ///
    /// # Errors
    /// As [`Self::tenant`].
    pub fn traces_for<'a>(&self, shown: impl Into<Credentials<'a>>) -> Result<Traces, Error> {
        let tenant = self.0.keys.required().then(|| self.tenant(shown, None)).transpose()?;
        Ok(self.traces().of(tenant.map(|tenant| Arc::clone(tenant.name()))))
    }

    /// The recent traces.
    pub fn traces(&self) -> &Traces {
        &self.0.flow.traces
    }

    /// `/metrics`: the content type and the text that a scraper with this `Accept` header understands.
    pub fn metrics_text(&self, accept: Option<&str>) -> (&'static str, String) {
        let flow = &self.0.flow;
        let (Counts { inflight, queued }, intake) = (flow.admission.counts(), self.0.intake.load());
        let Retries { now: retrying, limit: retry_limit } = flow.retry_budget.retries(inflight);
        let seen = Seen {
            nodes: flow.membership.totals(),
            breakers: flow.membership.breakers(clock::now()),
            inflight,
            queued,
            retrying,
            retry_limit,
            tenants: self.tenants(),
            depths: flow.admission.depths_of(self.0.keys.names()),
            spans_dropped: flow.exporter.dropped(),
            body_bytes: intake.body_bytes,
            texts_working: intake.working,
            texts_waiting: intake.waiting,
            intake_refused: intake.refused,
            strangers: flow.membership.strangers().refused(),
            registrations: flow.membership.refusals().counts(),
            index: flow.membership.index(),
            ports: self.0.ports.iter().map(|(name, places)| (*name, places.occupancy())).collect(),
            way_fallbacks: flow.membership.way_fallbacks(),
            registered: self.0.standing.as_ref().map(|key| (Arc::clone(key.etcd()), key.is_there(clock::now()))),
        };
        flow.metrics.text(accept, &seen)
    }

    /// Whose service is counted.
    fn tenants(&self) -> Vec<Arc<str>> {
        if self.0.keys.required() { self.0.keys.names() } else { vec![DEFAULT_TENANT.into()] }
    }

    /// Requests that run and wait.
    pub fn counts(&self) -> Counts {
        self.0.flow.admission.counts()
    }

    /// The node table.
    pub fn membership(&self) -> &Membership {
        &self.0.flow.membership
    }

    /// The service for nodes, which fills the table.
    pub fn join_service(&self) -> JoinService {
        let (traces, exporter) = (self.0.flow.traces.clone(), self.0.flow.exporter.clone());
        JoinService::new(self.0.flow.membership.clone(), move |packed| exporter.export(traces.stray(packed)))
    }

    /// Requests that may wait.
    pub fn max_queue(&self) -> usize {
        self.0.flow.admission.max_queue()
    }

    /// Holds to other limits from now on. Requests that run keep theirs; those of admission are for all, see
    /// [`Admission::set_limits`]. Pools stay as they are.
    pub fn set_limits(&self, limits: Limits) {
        let flow = &self.0.flow;
        flow.admission.set_limits(&limits);
        flow.retry_budget.set_percent(limits.retry_budget_percent);
        flow.limits.set(limits);
    }

    /// The limits that hold now.
    #[cfg(test)]
    pub(crate) fn limits(&self) -> Arc<Limits> {
        self.0.flow.limits.get()
    }

    /// Takes no new request and waits until the running ones have ended or `limit` has passed.
    pub async fn drain(&self, limit: std::time::Duration) {
        self.0.flow.admission.drain(limit).await;
    }

    /// Takes no new request and ends the running and waiting ones with an error (`Unavailable`): none is tried again.
    /// Waits until their clients' edges have it, no longer than `limit`.
    pub async fn end(&self, limit: std::time::Duration) {
        self.0.flow.ending.cancel();
        self.0.flow.admission.drain(limit).await;
    }
}

/// The ring does not hold it, or not any more.
pub fn no_trace(id: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("no trace `{id}` among the recent ones"))
}

/// Runs work that takes long beside the reactor's threads, where no stream waits for it.
///
/// # Errors
/// `Internal`, with what has `failed`: the work panicked.
pub async fn run_blocking<T: Send + 'static>(
    failed: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|_| Error::new(ErrorKind::Internal, failed))
}
