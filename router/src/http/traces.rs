//! The recent traces over HTTP: ours at `/api/traces/{id}`, and beside it Jaeger's query API, classic and v3, so that a
//! Jaeger UI or Grafana can be pointed at the router. What the ring holds is in [`crate::traces`].
use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query as Parameters, State};
use axum::routing::get;
use serde::Deserialize;
use serde_json::{Value, json};
use tandem_proto::{Error, ErrorKind};

use super::error::ApiError;
use crate::api::Service;
use crate::traces::{Form, Query, Traces};

type Answer = Result<Json<Value>, ApiError>;

/// The routes.
pub(super) fn routes() -> axum::Router<Service> {
    axum::Router::new()
        .route("/api/traces", get(find_classic))
        .route("/api/traces/{id}", get(one))
        .route("/api/services", get(services_classic))
        .route("/api/services/{service}/operations", get(operations_classic))
        .route("/api/v3/services", get(services))
        .route("/api/v3/operations", get(operations))
        .route("/api/v3/traces", get(find))
        .route("/api/v3/traces/{id}", get(one_otlp))
        .route("/api/v3/trace-summaries", get(summaries))
}

/// What both APIs ask with; times and durations are not looked at: the ring is short.
#[derive(Debug, Default, Deserialize)]
struct Asked {
    #[serde(default, alias = "query.service_name", alias = "query.serviceName")]
    service: String,
    #[serde(default, alias = "query.operation_name", alias = "query.operationName")]
    operation: String,
    #[serde(default, alias = "query.search_depth", alias = "query.searchDepth", alias = "query.num_traces")]
    limit: usize,
}

type AskedOf = Result<Parameters<Asked>, QueryRejection>;
type Id = Result<Path<String>, PathRejection>;

fn query(asked: AskedOf) -> Result<Query, ApiError> {
    let Parameters(asked) = asked.map_err(|rejection| wrong(rejection.body_text()))?;
    Ok(Query { service: asked.service, operation: asked.operation, limit: asked.limit })
}

fn id(path: Id) -> Result<String, ApiError> {
    Ok(path.map_err(|rejection| wrong(rejection.body_text()))?.0)
}

fn wrong(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

async fn one(State(service): State<Service>, path: Id) -> Answer {
    Ok(Json(service.trace_json(&id(path)?)?))
}

async fn one_otlp(State(service): State<Service>, path: Id) -> Answer {
    let id = id(path)?;
    let missing = || Error::new(ErrorKind::NotFound, format!("no trace `{id}` among the recent ones"));
    Ok(Json(service.traces().one(&id, Form::Otlp).ok_or_else(missing)?))
}

/// Reads the ring beside the reactor's threads: a thousand traces take longer than a stream may wait for its token.
async fn aside<T: Send + 'static>(
    service: &Service,
    read: fn(&Traces, &Query) -> T,
    query: Query,
) -> Result<T, ApiError> {
    let traces = service.traces().clone();
    let failed = |_| Error::new(ErrorKind::Internal, "the traces cannot be read");
    Ok(tokio::task::spawn_blocking(move || read(&traces, &query)).await.map_err(failed)?)
}

async fn find(State(service): State<Service>, asked: AskedOf) -> Answer {
    Ok(Json(aside(&service, |traces, query| traces.find(query, Form::Otlp), query(asked)?).await?))
}

async fn find_classic(State(service): State<Service>, asked: AskedOf) -> Answer {
    Ok(Json(aside(&service, |traces, query| traces.find(query, Form::Classic), query(asked)?).await?))
}

async fn summaries(State(service): State<Service>, asked: AskedOf) -> Answer {
    Ok(Json(aside(&service, |traces, query| traces.find(query, Form::Summary), query(asked)?).await?))
}

async fn services(State(service): State<Service>) -> Answer {
    let services = aside(&service, |traces, _| traces.services(), Query::default()).await?;
    Ok(Json(json!({"services": services})))
}

async fn services_classic(State(service): State<Service>) -> Answer {
    let services = aside(&service, |traces, _| traces.services(), Query::default()).await?;
    Ok(Json(json!({"total": services.len(), "data": services, "limit": 0, "offset": 0, "errors": null})))
}

async fn operations(State(service): State<Service>, asked: AskedOf) -> Answer {
    let operations = aside(&service, |traces, query| traces.operations(&query.service), query(asked)?).await?;
    let operations = operations.into_iter().map(|(name, kind)| json!({"name": name, "spanKind": kind}));
    Ok(Json(json!({"operations": operations.collect::<Vec<_>>()})))
}

async fn operations_classic(State(service): State<Service>, path: Id) -> Answer {
    let query = Query { service: id(path)?, ..Query::default() };
    let operations = aside(&service, |traces, query| traces.operations(&query.service), query).await?;
    let mut names: Vec<String> = operations.into_iter().map(|(name, _)| name).collect();
    names.dedup();
    Ok(Json(json!({"total": names.len(), "data": names, "limit": 0, "offset": 0, "errors": null})))
}
