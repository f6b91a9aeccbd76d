//! The OpenAI-compatible HTTP edge: bytes to [`GenerationRequest`](crate::generation::GenerationRequest) and events
//! back to bytes. It knows nothing of nodes; everything it needs stands in [`crate::api`].
//!
//! - `fields`, `options`: a JSON body to checked values; pure. `completions`, `chat`: one endpoint each.
//! - `answer`: prompts to running generations. `sse`: generations to a stream of events; `types`: the JSON sent, with
//!   `logprobs` and `timings` within it. `traces`: the recent ones.
//! - `media`: whether a body is JSON at all. `error`: every failure in OpenAI's shape. `auth`: whose request it is.
//!   `cors`: which web pages may read all that. `page`: the live page, which is served beside all that.
mod answer;
mod auth;
mod body;
mod chat;
mod completions;
mod cors;
mod error;
mod fields;
mod ids;
mod kind;
mod logprobs;
mod media;
mod options;
mod page;
mod rates;
mod sse;
#[cfg(test)]
mod tests;
mod timings;
mod tokenize;
mod traces;
mod types;

use std::time::{Duration, Instant};

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Extension, Json};
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use serde_json::json;
use tandem_proto::{Error, ErrorKind, TraceContext};
use tandem_telemetry::clock;

pub use self::cors::{Origin, with_cors};
use self::error::{ApiError, Failed};
use self::kind::Kind;
pub use self::page::page;
use crate::admission::Tenant;
use crate::api::Service;
use crate::caller::{self, Parent};
use crate::flow::refused::Refused;
use crate::text::ModelText;

/// Bytes of a request body at most.
const MAX_BODY_BYTES: usize = 8 << 20;
/// Milliseconds that the client is willing to wait for the whole answer.
const TIMEOUT_HEADER: &str = "x-request-timeout-ms";
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// All HTTP routes of the router process.
pub fn router(service: Service) -> axum::Router {
    // A layer is cloned for each request, with all that lie within it: there are few around the routes for tokens.
    let guarded = axum::Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        // When its model is from, as far as clients are concerned.
        .route_layer(Extension(Started(types::unix_seconds())))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route_layer(from_fn_with_state(service.clone(), auth::enter));
    let own_traces = from_fn_with_state(service.clone(), auth::with_own_traces);
    let of_all = match service.is_reserved() {
        true => reserved(&service),
        false => axum::Router::new().route("/metrics", get(metrics)).route("/debug/cluster", get(cluster)),
    };
    // What probes look at needs no key.
    of_all
        .merge(probes())
        .merge(traces::routes().route_layer(own_traces))
        .merge(guarded)
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(service.clone(), with_request_id))
        .with_state(service)
}

/// The routes of a port for probes, scrapers and operators, which answers whatever the others are at. It asks for no
/// key and shows everything: who reaches it is the network's matter.
pub fn admin(service: Service) -> axum::Router {
    let all_traces = traces::routes().route_layer(Extension(service.traces().clone()));
    axum::Router::new()
        .merge(all_traces)
        .route("/debug/cluster", get(cluster))
        .merge(probes())
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(service)
}

/// In place of what tells of all clients, where each of them has a key of its own. The state is not even named to who
/// has none.
fn reserved(service: &Service) -> axum::Router<Service> {
    let of_a_client = from_fn_with_state(service.clone(), auth::of_a_client);
    let state = axum::Router::new().route("/debug/{*path}", any(for_operators)).route_layer(of_a_client);
    let others = ["/", "/metrics", "/page/{*path}"];
    others.into_iter().fold(state, |routes, path| routes.route(path, any(for_operators)))
}

/// What probes look at: whether the process answers, and whether the cluster can serve.
fn probes() -> axum::Router<Service> {
    let ready = || get(ready);
    axum::Router::new().route("/health/live", get(live)).route("/health/ready", ready()).route("/health", ready())
}

/// Unix seconds.
#[derive(Clone, Copy)]
struct Started(u64);

/// Who asks, from the request's headers.
#[derive(Clone, Debug)]
struct Caller {
    request_id: String,
    parent: Option<Parent>,
    /// The span of the whole request; of its first answer, where there are several.
    root: TraceContext,
    timeout: Option<Duration>,
    /// As [`auth::enter`] found out.
    tenant: Tenant,
}

impl Caller {
    fn deadline(&self, received: Instant) -> Option<Instant> {
        self.timeout.and_then(|timeout| received.checked_add(timeout))
    }
}

/// Reads the caller's headers, keeps the request id on the answer, whatever the answer is. A request for tokens that
/// was refused, wherever, leaves a trace.
async fn with_request_id(State(service): State<Service>, mut request: Request, next: Next) -> Response {
    let received = clock::now();
    let request_id = caller::request_id(request.headers());
    let api = api(request.method(), request.uri().path());
    let parent = caller::parent(request.headers());
    let root = service.root(parent.as_ref());
    let timeout = timeout(request.headers()).inspect_err(|error| service.refused(error.kind));
    let tenant = Tenant::default();
    let of_caller = parent.clone();
    let known =
        timeout.map(|timeout| Caller { request_id: request_id.clone(), parent: of_caller, root, timeout, tenant });
    let mut response = match known {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => ApiError::from(error).into_response(),
    };
    let failed = response.extensions_mut().remove::<Failed>();
    let untold = !response.headers().contains_key(TRACEPARENT);
    if let (Some(api), Some(Failed(error)), true) = (api, failed, untold) {
        let tenant = response.extensions().get::<Tenant>().map(|tenant| &**tenant.name());
        let (request_id, parent) = (&request_id, parent.as_ref());
        service.turned_away(&Refused { api, request_id, tenant, root, parent, received }, &error);
        response.headers_mut().extend(traceparent(root));
    }
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// Of a request for tokens.
fn api(method: &Method, path: &str) -> Option<&'static str> {
    let of_path = match path {
        "/v1/completions" => Kind::Completion,
        "/v1/chat/completions" => Kind::Chat,
        _ => return None,
    };
    (method == Method::POST).then(|| of_path.operation())
}

/// The header that tells a client which trace its request is.
fn traceparent(root: TraceContext) -> Option<(HeaderName, HeaderValue)> {
    HeaderValue::from_str(&root.to_string()).ok().map(|value| (TRACEPARENT, value))
}

fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Error> {
    let Some(value) = headers.get(TIMEOUT_HEADER) else { return Ok(None) };
    let millis = value.to_str().ok().and_then(|text| text.parse::<u32>().ok()).filter(|millis| *millis > 0);
    match millis {
        Some(millis) => Ok(Some(Duration::from_millis(millis.into()))),
        None => Err(Error::invalid(TIMEOUT_HEADER, format!("header {TIMEOUT_HEADER} wants milliseconds, 1 or more"))),
    }
}

/// The process answers, and says where gRPC is: a client that has one port finds the other.
async fn live(State(service): State<Service>) -> Response {
    Json(json!({"status": "ok", "grpc_port": service.grpc_port()})).into_response()
}

/// 200 as soon as the nodes of a plan are there: a compatible pair or, with local prefill, a decode node.
async fn ready(State(service): State<Service>) -> Result<Response, ApiError> {
    if service.ready() {
        return Ok(Json(json!({"status": "ok"})).into_response());
    }
    let reason = "no node or pair of nodes is ready to serve, or the router is draining";
    Err(Error::new(ErrorKind::Unavailable, reason).into())
}

async fn metrics(State(service): State<Service>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let (content_type, text) = service.metrics_text(accept);
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

async fn models(State(service): State<Service>, Extension(started): Extension<Started>) -> Response {
    Json(json!({"object": "list", "data": [model_card(&service, started)]})).into_response()
}

async fn model(
    State(service): State<Service>,
    Extension(started): Extension<Started>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(id) = id.map_err(|rejection| Error::new(ErrorKind::InvalidArgument, rejection.body_text()))?;
    check_model(service.model(), Some(&id))?;
    Ok(Json(model_card(&service, started)).into_response())
}

fn model_card(service: &Service, Started(created): Started) -> serde_json::Value {
    let model = service.model();
    json!({
        "id": model.model_name, "object": "model", "created": created, "owned_by": "tandem",
        "max_model_len": model.context_len,
    })
}

/// An absent model means the only one.
fn check_model(model: &ModelText, asked: Option<&str>) -> Result<(), ApiError> {
    match asked {
        Some(name) if name != model.model_name => Err(ApiError::no_model(name, &model.model_name)),
        _ => Ok(()),
    }
}

async fn cluster(State(service): State<Service>) -> Response {
    Json(service.cluster_json()).into_response()
}

/// Counted, as what is not there at all.
async fn for_operators(State(service): State<Service>, request: Request) -> ApiError {
    service.refused(ErrorKind::NotFound);
    let path: String = request.uri().path().chars().take(200).collect();
    let why = format!("{path} is not on this port, as its clients have API keys: the router's --admin ADDR has it");
    Error::new(ErrorKind::NotFound, why).into()
}

/// Counted: who looks for doors finds none, and is seen.
async fn no_route(State(service): State<Service>, request: Request) -> ApiError {
    service.refused(ErrorKind::NotFound);
    let path: String = request.uri().path().chars().take(200).collect();
    Error::new(ErrorKind::NotFound, format!("no such route: {} {path}", request.method())).into()
}

async fn wrong_method(State(service): State<Service>) -> ApiError {
    service.refused(ErrorKind::InvalidArgument);
    ApiError::wrong_method()
}
