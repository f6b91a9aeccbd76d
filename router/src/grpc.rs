//! The gRPC edge: `tandem.v1.Inference`, health and reflection, and the port that nodes join on. Messages to requests
//! and back; it knows nothing of nodes. `grpc-timeout` is read here, because tonic does not enforce it on streams.
//! `guard` stands before it: keys and bounds.
#[cfg(test)]
mod certificates;
mod guard;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use futures::{Stream, StreamExt};
use prost::Message;
use tandem_proto::{Error, ErrorKind, MAX_MESSAGE_BYTES, TraceContext, v1};
use tandem_telemetry::clock;
use tonic::codec::CompressionEncoding;
use tonic::metadata::{BinaryMetadataValue, MetadataMap, MetadataValue};
use tonic::server::NamedService;
use tonic::service::{Routes, RoutesBuilder};
use tonic::{Code, Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::admission::Tenant;
use crate::api::{GenerationStream, Service, merged};
use crate::caller::{MAX_REQUEST_ID_BYTES, Parent, is_request_id, parent, request_id};
use crate::flow::refused::Refused;
use crate::generation::{GenerationEvent, GenerationRequest, MAX_CHOICES};
use crate::text::{ModelText, SpecialTokens};
use guard::{Guarded, MessageRoom};

/// What a call that is refused was about, as far as its headers tell.
const API: &str = "generate_content";
/// Bytes of a message to health and reflection, which anybody may ask: a service's name.
const MAX_QUESTION_BYTES: usize = 4096;
/// Bytes of a node's message: a registration, or a report with 1,024 block hashes, is a tenth of it. Many streams may
/// each be in the middle of a message, and who sends them may not be known yet.
const MAX_REPORT_BYTES: usize = 256 << 10;
/// How long the head of an answer waits for its first message.
const HEAD_WAITS: Duration = Duration::from_millis(100);
/// How often health follows the cluster.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);

type Inference = v1::inference_server::InferenceServer<Edge>;

/// What nodes need, for a port of their own.
pub fn node_routes(service: &Service) -> Routes {
    let nodes = v1::membership_server::MembershipServer::new(service.join_service());
    let nodes = nodes.max_decoding_message_size(MAX_REPORT_BYTES);
    Routes::new(service.membership().strangers().around(nodes))
}

/// All gRPC services of the router, for clients and nodes on one port.
///
/// # Errors
/// The descriptor set is damaged, which would be a bug of the build.
pub fn routes(service: &Service, health: HealthReporter) -> anyhow::Result<Routes> {
    for_clients(node_routes(service).into(), service, health)
}

/// Those for clients alone: nodes have a port of their own.
///
/// # Errors
/// As [`routes`].
pub fn client_routes(service: &Service, health: HealthReporter) -> anyhow::Result<Routes> {
    for_clients(RoutesBuilder::default(), service, health)
}

fn for_clients(mut routes: RoutesBuilder, service: &Service, health: HealthReporter) -> anyhow::Result<Routes> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // What the cluster's programs say to each other is no client's business.
            .with_service_name(Inference::NAME)
            .with_service_name("grpc.health.v1.Health")
    };
    routes
        .add_service(Guarded::new(inference(service), service.clone()))
        .add_service(reflection().build_v1()?.max_decoding_message_size(MAX_QUESTION_BYTES))
        .add_service(reflection().build_v1alpha()?.max_decoding_message_size(MAX_QUESTION_BYTES))
        .add_service(
            tonic_health::pb::health_server::HealthServer::new(
                tonic_health::server::HealthService::from_health_reporter(health),
            )
            .max_decoding_message_size(MAX_QUESTION_BYTES),
        );
    let mut routes = routes.routes();
    let (router, service) = (std::mem::take(routes.axum_router_mut()), service.clone());
    *routes.axum_router_mut() = router.fallback(move || async move { no_service(&service) });
    Ok(routes)
}

/// What nobody serves here, such as the nodes' own service where they have a port of their own. Without a message, as
/// tonic says it: by that a node knows that it is at the wrong port, and of which kind.
fn no_service(service: &Service) -> http::Response<Body> {
    service.refused(ErrorKind::NotFound);
    Status::unimplemented("").into_http()
}

fn inference(service: &Service) -> Inference {
    Inference::new(Edge { service: service.clone() })
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        // Prompts may be long. Answers go out token by token, which no compression makes smaller.
        .accept_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Zstd)
}

/// Keeps the health of `Inference` in step with the cluster: serving while the nodes of a plan are there. Ends never.
pub async fn follow_health(service: Service, health: HealthReporter) {
    let mut ticks = tokio::time::interval(HEALTH_INTERVAL);
    let mut told = None;
    loop {
        ticks.tick().await;
        let ready = service.ready();
        if told.replace(ready) != Some(ready) {
            let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
            // The empty name is the whole server: what probes ask for that know no service.
            for name in ["", Inference::NAME] {
                health.set_service_status(name, status).await;
            }
        }
    }
}

struct Edge {
    service: Service,
}

type Responses = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl v1::inference_server::Inference for Edge {
    type GenerateStream = Responses;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Responses>, Status> {
        let received = clock::now();
        let (metadata, mut extensions, message) = request.into_parts();
        let refused = |error: &Error| self.service.refused(error.kind);
        extensions.get::<MessageRoom>().inspect(|room| room.read());
        // As the guard found out: no call comes past it.
        let unknown = || Error::new(ErrorKind::Unauthenticated, "nobody has asked whose call this is");
        let tenant = extensions.remove::<Tenant>().ok_or_else(unknown).inspect_err(refused)?;
        let parent = parent(metadata.as_ref());
        let root = self.service.root(parent.as_ref());
        let who = (tenant, root, parent.clone());
        let caller = match Caller::read(&metadata, &message, who, received).inspect_err(refused) {
            Ok(caller) => caller,
            Err(error) => {
                let request_id = request_id(metadata.as_ref());
                let (api, tenant) = (API, None);
                let parent = parent.as_ref();
                let refused = Refused { api, request_id: &request_id, tenant, root, parent, received };
                return Err(turned_away(&self.service, &refused, error));
            }
        };
        let checked = self.check(message, &caller, received).await;
        // The message is tokens by now: its room is for others.
        drop(extensions.remove::<MessageRoom>());
        let started = match checked.inspect_err(refused) {
            // What the flow refuses, it counts itself.
            Ok(requests) => self.service.generate_all(requests),
            Err(error) => Err(error),
        };
        match started {
            Ok(choices) => respond(choices, caller, Arc::clone(self.service.model())).await,
            Err(error) => {
                let Caller { request_id, tenant, .. } = &caller;
                let (api, tenant, parent) = (API, Some(&**tenant.name()), parent.as_ref());
                Err(turned_away(&self.service, &Refused { api, request_id, tenant, root, parent, received }, error))
            }
        }
    }
}

/// Leaves the trace of a call that is refused, and tells the client which one it is.
fn turned_away(service: &Service, refused: &Refused<'_>, error: Error) -> Status {
    service.turned_away(refused, &error);
    identified(error, &head(&refused.root.to_string(), refused.request_id))
}

impl Edge {
    /// The requests for all answers to one prompt.
    async fn check(
        &self,
        message: v1::GenerateRequest,
        caller: &Caller,
        received: Instant,
    ) -> Result<Vec<GenerationRequest>, Error> {
        let n = message.n.max(1);
        if n > MAX_CHOICES {
            return Err(Error::invalid("n", format!("n must be 1 to {MAX_CHOICES}, not {n}")));
        }
        Ok(self.request(message, caller, received).await?.choices(n))
    }

    async fn request(
        &self,
        message: v1::GenerateRequest,
        caller: &Caller,
        received: Instant,
    ) -> Result<GenerationRequest, Error> {
        let model = self.service.model();
        if !message.model.is_empty() && message.model != model.model_name {
            let text = format!("no model `{}`: this cluster serves `{}`", message.model, model.model_name);
            return Err(Error { param: Some("model"), ..Error::new(ErrorKind::NotFound, text) });
        }
        let input =
            message.input.ok_or_else(|| Error::invalid("input", "give the prompt as `text`, `token_ids` or `chat`"))?;
        let api = match input {
            v1::generate_request::Input::Chat(_) => "chat",
            _ => "text_completion",
        };
        let prompt_ids = tokenize(&self.service, input).await?;
        self.service.check_prompt(&prompt_ids)?;
        Ok(GenerationRequest {
            request_id: caller.request_id.clone(),
            max_tokens: self.service.resolve_max_tokens(message.max_tokens, prompt_ids.len())?,
            prompt_ids: prompt_ids.into(),
            sampling: message.sampling.unwrap_or_default(),
            ignore_eos: message.ignore_eos,
            stop_token_ids: message.stop_token_ids,
            stop: message.stop,
            // Clients count like vLLM, lower ones first; the queue the other way round.
            priority: message.priority.saturating_neg(),
            tenant: caller.tenant.clone(),
            cache_salt: message.cache_salt.into(),
            deadline: caller.deadline,
            parent: caller.parent.clone(),
            root: Some(caller.root),
            received,
            api,
        })
    }
}

/// Who asks, from the call's metadata.
struct Caller {
    request_id: String,
    parent: Option<Parent>,
    root: TraceContext,
    deadline: Option<Instant>,
    tenant: Tenant,
}

impl Caller {
    fn read(
        metadata: &MetadataMap,
        message: &v1::GenerateRequest,
        (tenant, root, parent): (Tenant, TraceContext, Option<Parent>),
        received: Instant,
    ) -> Result<Self, Error> {
        let timeout = match metadata.get("grpc-timeout") {
            Some(value) => Some(value.to_str().ok().and_then(parse_timeout).ok_or_else(|| {
                Error::invalid("grpc-timeout", "grpc-timeout is 1 to 8 digits and one of H, M, S, m, u, n")
            })?),
            None => None,
        };
        let request_id = match message.request_id.as_str() {
            "" => request_id(metadata.as_ref()),
            id if is_request_id(id) => id.to_owned(),
            _ => {
                let why = format!("a request id has 1 to {MAX_REQUEST_ID_BYTES} visible ASCII characters");
                return Err(Error::invalid("request_id", why));
            }
        };
        Ok(Self {
            request_id,
            parent,
            root,
            deadline: timeout.and_then(|timeout| received.checked_add(timeout)),
            tenant,
        })
    }
}

/// <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>: `TimeoutValue TimeoutUnit`.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value * 3600)),
        "M" => Some(Duration::from_secs(value * 60)),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

async fn tokenize(service: &Service, input: v1::generate_request::Input) -> Result<Vec<u32>, Error> {
    use v1::generate_request::Input;
    let bytes = match &input {
        Input::Text(text) => text.len(),
        Input::Chat(chat) => chat.messages.iter().map(|message| message.content.len()).sum(),
        Input::TokenIds(_) => 0,
    };
    let encode = move |model: &ModelText| match input {
        Input::Text(text) => model.encode(&text, SpecialTokens::Parse),
        Input::Chat(chat) => model.encode_chat(&chat.messages),
        Input::TokenIds(tokens) => Ok(tokens.ids),
    };
    service.with_model(bytes, encode).await
}

/// The answers' messages as they come; the first error ends them all. The head of the call goes with the first message,
/// in one write, unless that takes long.
async fn respond(
    choices: Vec<GenerationStream>,
    caller: Caller,
    model: Arc<ModelText>,
) -> Result<Response<Responses>, Status> {
    // The requests go first: what follows is of use when there are tokens.
    tokio::task::yield_now().await;
    let head = head(&caller.root.to_string(), &caller.request_id);
    let (mut trailer, trailing_head) = (Trailer::new(choices.len()), head.clone());
    let mut events = merged(choices);
    // tonic ends a call whose head is not out by its deadline, without a word of ours.
    let hurries = caller.deadline.is_some_and(|deadline| deadline <= clock::now() + 2 * HEAD_WAITS);
    let head_waits = if hurries { Duration::ZERO } else { HEAD_WAITS };
    let first = match tokio::time::timeout(head_waits, events.next()).await {
        Ok(Some((_, Err(error)))) => return Err(identified(error, &head)),
        Ok(first) => first,
        Err(_) => None,
    };
    // Dropped with the call: that cancels every answer still running.
    let mut events = futures::stream::iter(first).chain(events);
    let messages = async_stream::stream! {
        while let Some((choice, event)) = events.next().await {
            match event {
                Ok(event) => {
                    let message = message(event, choice, &caller.request_id, &model);
                    trailer.note(&message);
                    yield Ok(message);
                }
                Err(error) => {
                    yield Err(identified(error, &trailing_head));
                    return;
                }
            }
        }
        // tonic's way of adding metadata to a call that ended well.
        yield Err(Status::with_metadata(Code::Ok, "", trailer.metadata(trailing_head)));
    };
    let mut response: Response<Responses> = Response::new(Box::pin(messages));
    *response.metadata_mut() = head;
    Ok(response)
}

/// What is told of every call, at its beginning and at its end.
fn head(trace: &str, request_id: &str) -> MetadataMap {
    let mut head = MetadataMap::new();
    for (key, value) in [("traceparent", trace), ("x-request-id", request_id)] {
        if let Some(value) = MetadataValue::try_from(value).ok().filter(|_| !value.is_empty()) {
            head.insert(key, value);
        }
    }
    head
}

fn identified(error: Error, head: &MetadataMap) -> Status {
    let mut status = Status::from(error);
    for key in ["traceparent", "x-request-id"] {
        if let Some(value) = head.get(key) {
            status.metadata_mut().insert(key, value.clone());
        }
    }
    status
}

/// The timings of a call's answers, as trailing metadata: `server-timing` is answer 0's, for people and proxies
/// (<https://www.w3.org/TR/server-timing/>), `tandem-timings-bin` has an encoded `Timings` for each answer, by number.
struct Trailer {
    timings: Vec<v1::Timings>,
}

impl Trailer {
    fn new(answers: usize) -> Self {
        Self { timings: vec![v1::Timings::default(); answers] }
    }

    fn note(&mut self, message: &v1::GenerateResponse) {
        if let Some(v1::generate_response::Event::Finish(finish)) = &message.event
            && let (Some(place), Some(timings)) = (self.timings.get_mut(finish.choice as usize), &finish.timings)
        {
            place.clone_from(timings);
        }
    }

    fn metadata(&self, mut metadata: MetadataMap) -> MetadataMap {
        for timings in &self.timings {
            let value = BinaryMetadataValue::from_bytes(&timings.encode_to_vec());
            metadata.append_bin("tandem-timings-bin", value);
        }
        let Some(first) = self.timings.first() else { return metadata };
        let phases = [
            ("queue", first.queue_ms),
            ("route", first.route_ms),
            ("prefill", first.prefill_ms),
            ("transfer", first.transfer_exposed_ms),
            ("decode", first.decode_ms),
            ("total", first.e2e_ms),
        ];
        // As whole microseconds: to print six floats takes 2 % of a request's instructions.
        let text = phases.map(|(phase, ms)| {
            let us = (ms * 1e3).round() as u64;
            format!("{phase};dur={}.{:03}", us / 1000, us % 1000)
        });
        let text = text.join(", ");
        if let Ok(value) = MetadataValue::try_from(text) {
            metadata.insert("server-timing", value);
        }
        metadata
    }
}

fn message(event: GenerationEvent, choice: u32, request_id: &str, model: &ModelText) -> v1::GenerateResponse {
    use v1::generate_response::Event;
    let event = match event {
        GenerationEvent::Token { id, text, logprob, mut top, index, .. } => {
            top.iter_mut().for_each(|top| top.token = model.token(top.token_id).bytes);
            Event::Token(v1::TokenChunk { token_id: id, text, logprob, index, top_logprobs: top, choice })
        }
        GenerationEvent::Finish { reason, text, usage, timings, trace_id } => Event::Finish(v1::Finish {
            reason: reason.into(),
            text,
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            cached_tokens: usage.cached,
            timings: Some(*timings),
            trace_id,
            request_id: request_id.to_owned(),
            choice,
        }),
    };
    v1::GenerateResponse { event: Some(event) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::tests::fakes;
    use crate::limits::Limits;
    use tower::ServiceExt;
    use v1::inference_server::Inference as _;

    #[tokio::test]
    async fn what_the_edge_refuses_is_counted_once() {
        let edge = Edge { service: fakes::router(Limits::default()) };
        let ask = |message: v1::GenerateRequest, metadata: (&'static str, &str)| {
            let mut request = Request::new(message);
            request.metadata_mut().insert(metadata.0, metadata.1.parse().unwrap());
            request.extensions_mut().insert(Tenant::default());
            edge.generate(request)
        };
        let message = v1::GenerateRequest::default();
        let other = v1::GenerateRequest { model: "another".into(), ..message.clone() };
        let tokens = v1::generate_request::Input::TokenIds(v1::TokenIds { ids: vec![1] });
        let good = v1::GenerateRequest { input: Some(tokens), ..message.clone() };
        for (message, metadata, code, counted) in [
            (message.clone(), ("grpc-timeout", "soon"), Code::InvalidArgument, "invalid_argument\"} 1"),
            (message, ("x-request-id", "r"), Code::InvalidArgument, "invalid_argument\"} 2"),
            (other, ("x-request-id", "r"), Code::NotFound, "not_found\"} 1"),
            // The flow's own refusal.
            (good, ("x-request-id", "r"), Code::Unavailable, "unavailable\"} 1"),
        ] {
            assert_eq!(ask(message, metadata).await.err().unwrap().code(), code);
            let text = edge.service.metrics_text(None).1;
            assert!(text.contains(&format!("outcome=\"{counted}")), "{counted}\n{text}");
        }
    }

    #[tokio::test]
    async fn a_service_that_nobody_serves_is_counted_and_the_others_are_served() {
        let service = fakes::router(Limits::default());
        let routes = client_routes(&service, HealthReporter::new()).unwrap().into_axum_router();
        let call = async |path: &str| {
            let request = http::Request::post(path).header("content-type", "application/grpc");
            let answer = routes.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
            let code = answer.headers()["grpc-status"].to_str().unwrap().parse().unwrap();
            (Code::from_i32(code), service.metrics_text(None).1.contains("outcome=\"not_found\"} 1"))
        };
        assert_eq!(call("/tandem.v1.Inference/Nothing").await, (Code::Unimplemented, false));
        assert_eq!(call("/tandem.v1.Membership/Join").await, (Code::Unimplemented, true));
        assert_eq!(call("/grpc.health.v1.Health/Nothing").await, (Code::Unimplemented, true));
    }

    #[test]
    fn timeouts_by_the_specification() {
        assert_eq!(parse_timeout("100m"), Some(Duration::from_millis(100)));
        assert_eq!(parse_timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "m", "100", "-1S", "123456789S", "1é", "1 S", "１S"] {
            assert_eq!(parse_timeout(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_trailer_tells_the_timings_of_every_answer() {
        let mut trailer = Trailer::new(2);
        for (choice, queue_ms) in [(1, 2.5), (0, 1.25), (7, 9.0)] {
            let timings = Some(v1::Timings { queue_ms, ..v1::Timings::default() });
            let finish = v1::Finish { choice, timings, ..v1::Finish::default() };
            trailer.note(&v1::GenerateResponse { event: Some(v1::generate_response::Event::Finish(finish)) });
        }
        let metadata = trailer.metadata(head("00-aa", "mine"));
        let timing = metadata.get("server-timing").unwrap().to_str().unwrap();
        assert!(timing.starts_with("queue;dur=1.250, route;dur=0.000"), "{timing}");
        let all = metadata.get_all_bin("tandem-timings-bin").iter();
        let all: Vec<f64> = all.map(|value| v1::Timings::decode(value.to_bytes().unwrap()).unwrap().queue_ms).collect();
        assert_eq!((all, metadata.get("x-request-id").unwrap()), (vec![1.25, 2.5], &"mine".parse().unwrap()));
        let refused = identified(Error::invalid("n", "no"), &head("", "mine"));
        assert_eq!((refused.code(), refused.metadata().get("traceparent")), (Code::InvalidArgument, None));
        assert_eq!(refused.metadata().get("x-request-id").unwrap(), "mine");
    }

    #[test]
    fn the_caller_is_read_from_metadata() {
        let mut metadata = MetadataMap::new();
        metadata.insert("grpc-timeout", "2S".parse().unwrap());
        metadata.insert("x-request-id", "mine".parse().unwrap());
        metadata.insert("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap());
        let now = Instant::now();
        let parent = parent(metadata.as_ref());
        let who = || (Tenant::default(), TraceContext::root(&mut rand::rng()), parent.clone());
        let caller = Caller::read(&metadata, &v1::GenerateRequest::default(), who(), now).unwrap();
        assert_eq!((&*caller.request_id, caller.deadline), ("mine", Some(now + Duration::from_secs(2))));
        assert_eq!(caller.parent.unwrap().span.span_id[7], 0xb7);
        metadata.insert("grpc-timeout", "soon".parse().unwrap());
        assert!(Caller::read(&metadata, &v1::GenerateRequest::default(), who(), now).is_err());
    }
}
