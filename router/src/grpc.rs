//! The gRPC edge: `tandem.v1.Inference`, health and reflection, and the port that nodes join on. Messages to requests
//! and back; it knows nothing of nodes. `grpc-timeout` is read here, because tonic does not enforce it on streams.
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tandem_telemetry::clock;

use futures::stream::select_all;
use futures::{Stream, StreamExt};
use tandem_proto::{Error, ErrorKind, MAX_MESSAGE_BYTES, TraceContext, v1};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::server::NamedService;
use tonic::service::{Routes, RoutesBuilder};
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::admission::Tenant;
use crate::api::{GenerationEvent, GenerationRequest, GenerationStream, MAX_CHOICES, Service, new_request_id};
use crate::text::{ModelText, SpecialTokens};

/// Bytes of text above which the tokenizer runs beside the reactor's threads.
const INLINE_TEXT_BYTES: usize = 4096;
/// Bytes of a client's request id at most.
const MAX_REQUEST_ID_BYTES: usize = 128;
/// How often health follows the cluster.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);

type Inference = v1::inference_server::InferenceServer<Edge>;

/// All gRPC services of the router process.
///
/// # Errors
/// The descriptor set is damaged, which would be a bug of the build.
pub fn routes(service: &Service, health: HealthReporter) -> anyhow::Result<Routes> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let inference = Inference::new(Edge { service: service.clone() }).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let membership = v1::membership_server::MembershipServer::new(service.membership().clone());
    let mut routes = RoutesBuilder::default();
    routes
        .add_service(inference)
        .add_service(membership)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .add_service(tonic_health::pb::health_server::HealthServer::new(
            tonic_health::server::HealthService::from_health_reporter(health),
        ));
    Ok(routes.routes())
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
        let (metadata, _, message) = request.into_parts();
        let mut caller = Caller::read(&metadata, &message, received)?;
        caller.tenant = tenant(&self.service, &metadata)?;
        let n = message.n.max(1);
        if n > MAX_CHOICES {
            return Err(Error::invalid("n", format!("n must be 1 to {MAX_CHOICES}, not {n}")).into());
        }
        let request = self.request(message, &caller, received).await?;
        let choices = (0..n).map(|choice| self.service.generate(request.choice(choice, n)));
        let choices = choices.collect::<Result<Vec<_>, Error>>()?;
        Ok(respond(choices, caller.request_id, Arc::clone(self.service.model())))
    }
}

impl Edge {
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
        let prompt_ids = tokenize(model, input).await?;
        Ok(GenerationRequest {
            request_id: caller.request_id.clone(),
            max_tokens: self.service.resolve_max_tokens(message.max_tokens, prompt_ids.len())?,
            prompt_ids,
            sampling: message.sampling.unwrap_or_default(),
            ignore_eos: message.ignore_eos,
            stop_token_ids: message.stop_token_ids,
            stop: message.stop,
            priority: message.priority,
            tenant: caller.tenant.clone(),
            deadline: caller.deadline,
            parent: caller.parent,
            received,
            api,
        })
    }
}

/// Who asks, from the call's metadata.
struct Caller {
    request_id: String,
    parent: Option<TraceContext>,
    deadline: Option<Instant>,
    tenant: Tenant,
}

impl Caller {
    fn read(metadata: &MetadataMap, message: &v1::GenerateRequest, received: Instant) -> Result<Self, Error> {
        let text = |key| metadata.get(key).and_then(|value| value.to_str().ok());
        let timeout = match metadata.get("grpc-timeout") {
            Some(value) => Some(value.to_str().ok().and_then(parse_timeout).ok_or_else(|| {
                Error::invalid("grpc-timeout", "grpc-timeout is 1 to 8 digits and one of H, M, S, m, u, n")
            })?),
            None => None,
        };
        let asked = if message.request_id.is_empty() { text("x-request-id") } else { Some(&*message.request_id) };
        let valid =
            |id: &&str| !id.is_empty() && id.len() <= MAX_REQUEST_ID_BYTES && id.chars().all(|c| c.is_ascii_graphic());
        let request_id = match asked {
            Some(id) if valid(&id) => id.to_owned(),
            Some(_) if !message.request_id.is_empty() => {
                let why = format!("a request id has 1 to {MAX_REQUEST_ID_BYTES} visible ASCII characters");
                return Err(Error::invalid("request_id", why));
            }
            _ => new_request_id(),
        };
        Ok(Self {
            request_id,
            // The specification: what is not a traceparent starts a new trace.
            parent: text("traceparent").and_then(|parent| parent.parse().ok()),
            deadline: timeout.and_then(|timeout| received.checked_add(timeout)),
            tenant: Tenant::default(),
        })
    }
}

/// Whose call it is, by its key or its own word.
fn tenant(service: &Service, metadata: &MetadataMap) -> Result<Tenant, Error> {
    let text = |key| metadata.get(key).and_then(|value| value.to_str().ok());
    service.tenant(text("authorization"), text("x-tandem-tenant"))
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

async fn tokenize(model: &Arc<ModelText>, input: v1::generate_request::Input) -> Result<Vec<u32>, Error> {
    use v1::generate_request::Input;
    let bytes = match &input {
        Input::Text(text) => text.len(),
        Input::Chat(chat) => chat.messages.iter().map(|message| message.content.len()).sum(),
        Input::TokenIds(_) => 0,
    };
    let encode = |model: &ModelText, input| match input {
        Input::Text(text) => model.encode(&text, SpecialTokens::Parse),
        Input::Chat(chat) => model.encode_chat(&chat.messages),
        Input::TokenIds(tokens) => Ok(tokens.ids),
    };
    if bytes <= INLINE_TEXT_BYTES {
        return encode(model, input);
    }
    let model = Arc::clone(model);
    tokio::task::spawn_blocking(move || encode(&model, input))
        .await
        .map_err(|_| Error::new(ErrorKind::Internal, "the tokenizer failed on this prompt"))?
}

/// The answers' messages as they come; the first error ends them all.
fn respond(choices: Vec<GenerationStream>, request_id: String, model: Arc<ModelText>) -> Response<Responses> {
    let trace = choices.first().map(|stream| stream.trace().to_string()).unwrap_or_default();
    let header_id = MetadataValue::try_from(&request_id);
    let numbered = (0..).zip(choices).map(|(choice, stream)| stream.map(move |event| (choice, event)));
    let events = select_all(numbered)
        .map(move |(choice, event)| Ok(message(event.map_err(Status::from)?, choice, &request_id, &model)));
    let mut response: Response<Responses> = Response::new(Box::pin(events));
    let metadata = response.metadata_mut();
    if let (Ok(trace), Ok(request_id)) = (MetadataValue::try_from(&trace), header_id) {
        metadata.insert("traceparent", trace);
        metadata.insert("x-request-id", request_id);
    }
    response
}

fn message(event: GenerationEvent, choice: u32, request_id: &str, model: &ModelText) -> v1::GenerateResponse {
    use v1::generate_response::Event;
    let event = match event {
        GenerationEvent::Token { id, text, logprob, mut top, index } => {
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

    #[test]
    fn timeouts_by_the_specification() {
        assert_eq!(parse_timeout("100m"), Some(Duration::from_millis(100)));
        assert_eq!(parse_timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "m", "100", "-1S", "123456789S", "1é", "1 S", "１S"] {
            assert_eq!(parse_timeout(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_caller_is_read_from_metadata() {
        let mut metadata = MetadataMap::new();
        metadata.insert("grpc-timeout", "2S".parse().unwrap());
        metadata.insert("x-request-id", "mine".parse().unwrap());
        metadata.insert("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap());
        let now = Instant::now();
        let caller = Caller::read(&metadata, &v1::GenerateRequest::default(), now).unwrap();
        assert_eq!((&*caller.request_id, caller.deadline), ("mine", Some(now + Duration::from_secs(2))));
        assert_eq!(caller.parent.unwrap().span_id[7], 0xb7);
        metadata.insert("grpc-timeout", "soon".parse().unwrap());
        assert!(Caller::read(&metadata, &v1::GenerateRequest::default(), now).is_err());
    }
}
