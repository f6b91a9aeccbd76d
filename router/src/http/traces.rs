//! The recent traces over HTTP: ours at `/api/traces/{id}`, and beside it Jaeger's query API, classic and v3, so that a
//! Jaeger UI or Grafana can be pointed at the router. What the ring holds is in [`crate::traces`].
use std::collections::BTreeSet;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query as Parameters, State};
use axum::routing::get;
use serde_json::{Value, json};
use tandem_proto::{Error, ErrorKind};

use super::error::ApiError;
use crate::api::{Service, no_trace, run_blocking};
use crate::traces::query::Query;
use crate::traces::{Form, Traces};

type Answer = Result<Json<Value>, ApiError>;

/// The routes. What they show is entered into the request by a layer: a [`Traces`].
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

type AskedOf = Result<Parameters<Vec<(String, String)>>, QueryRejection>;
type Id = Result<Path<String>, PathRejection>;
type Shown = Extension<Traces>;

fn query(asked: AskedOf) -> Result<Query, ApiError> {
    let Parameters(asked) = asked.map_err(|rejection| wrong(rejection.body_text()))?;
    Ok(Query::parse(&asked)?)
}

fn id(path: Id) -> Result<String, ApiError> {
    Ok(path.map_err(|rejection| wrong(rejection.body_text()))?.0)
}

fn wrong(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

/// Reads traces beside the reactor's threads, one reader at a time: a thousand of them take longer than a stream may
/// wait for its token.
pub(super) async fn aside<T: Send + 'static>(
    service: Service,
    read: impl FnOnce(&Service) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let turn = service.traces().turn().await;
    let read = move || {
        let _turn = turn;
        read(&service)
    };
    Ok(run_blocking("the traces cannot be read", read).await?)
}

async fn one(State(service): State<Service>, Extension(traces): Shown, path: Id) -> Answer {
    let id = id(path)?;
    Ok(Json(aside(service, move |service| service.trace_json_of(&traces, &id)).await??))
}

async fn one_otlp(State(service): State<Service>, Extension(traces): Shown, path: Id) -> Answer {
    let id = id(path)?;
    let found = move |_: &Service| traces.one(&id, Form::Otlp).ok_or_else(|| no_trace(&id));
    Ok(Json(aside(service, found).await??))
}

async fn find_in(service: Service, traces: Traces, asked: AskedOf, form: Form) -> Answer {
    let query = query(asked)?;
    Ok(Json(aside(service, move |_| traces.find(&query, form)).await?))
}

async fn find(State(service): State<Service>, Extension(traces): Shown, asked: AskedOf) -> Answer {
    find_in(service, traces, asked, Form::Otlp).await
}

async fn find_classic(State(service): State<Service>, Extension(traces): Shown, asked: AskedOf) -> Answer {
    find_in(service, traces, asked, Form::Classic).await
}

async fn summaries(State(service): State<Service>, Extension(traces): Shown, asked: AskedOf) -> Answer {
    find_in(service, traces, asked, Form::Summary).await
}

async fn services(State(service): State<Service>, Extension(traces): Shown) -> Answer {
    let services = aside(service, move |_| traces.services()).await?;
    Ok(Json(json!({"services": services})))
}

async fn services_classic(State(service): State<Service>, Extension(traces): Shown) -> Answer {
    let services = aside(service, move |_| traces.services()).await?;
    Ok(Json(json!({"total": services.len(), "data": services, "limit": 0, "offset": 0, "errors": null})))
}

async fn operations_of(service: Service, traces: Traces, name: String) -> Result<BTreeSet<(String, String)>, ApiError> {
    aside(service, move |_| traces.operations(&name)).await
}

async fn operations(State(service): State<Service>, Extension(traces): Shown, asked: AskedOf) -> Answer {
    let operations = operations_of(service, traces, query(asked)?.service).await?.into_iter();
    let operations = operations.map(|(name, kind)| json!({"name": name, "spanKind": kind}));
    Ok(Json(json!({"operations": operations.collect::<Vec<_>>()})))
}

async fn operations_classic(State(service): State<Service>, Extension(traces): Shown, path: Id) -> Answer {
    let operations = operations_of(service, traces, id(path)?).await?;
    let mut names: Vec<String> = operations.into_iter().map(|(name, _)| name).collect();
    names.dedup();
    Ok(Json(json!({"total": names.len(), "data": names, "limit": 0, "offset": 0, "errors": null})))
}
