//! Whose request it is: asked before its body is read, of every route that computes.
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tandem_proto::{Error, ErrorKind};
use tandem_telemetry::clock;

use super::error::ApiError;
use super::{Caller, media, rates};
use crate::admission::Tenant;
use crate::api::Service;
use crate::caller::Credentials;

/// Names the tenant of a request where there are no API keys.
const TENANT_HEADER: &str = "x-tandem-tenant";

/// Lets a request to its handler whose body is said to be JSON, with its tenant in its [`Caller`].
///
/// # Errors
/// 401 for a key that is missing or unknown, 415 for another body.
pub(super) async fn enter(
    State(service): State<Service>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let tenant = tenant(&service, &request).inspect_err(|error| service.refused(error.kind))?;
    if let Some(caller) = request.extensions_mut().get_mut::<Caller>() {
        caller.tenant = tenant.clone();
    }
    let mut response = match media::is_json(&request).inspect_err(|error| service.refused(error.kind())) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    response.headers_mut().extend(rates::headers(&tenant.allowances(clock::now())));
    // For the trace of a request that is refused.
    response.extensions_mut().insert(tenant);
    Ok(response)
}

/// Refuses what would be refused anyhow, before its body is read.
///
/// # Errors
/// As [`Service::may_enter`].
pub(super) fn admit(service: &Service, caller: &Caller) -> Result<(), Error> {
    service.may_enter(&caller.tenant).inspect_err(|error| service.refused(error.kind))
}

/// Enters the traces that the caller may see.
///
/// # Errors
/// 401 for a key that is missing or unknown.
pub(super) async fn with_own_traces(
    State(service): State<Service>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let traces = service.traces_for(credentials(&request));
    let traces = traces.inspect_err(|error| service.refused(error.kind))?;
    request.extensions_mut().insert(traces);
    let response = next.run(request).await;
    // Whoever tries ids is seen.
    if response.status() == StatusCode::NOT_FOUND {
        service.refused(ErrorKind::NotFound);
    }
    Ok(response)
}

/// Asks for a key, whosever it is, where there are keys.
///
/// # Errors
/// 401 for a key that is missing or unknown.
pub(super) async fn of_a_client(
    State(service): State<Service>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    service.traces_for(credentials(&request)).inspect_err(|error| service.refused(error.kind))?;
    Ok(next.run(request).await)
}

pub(super) fn credentials(request: &Request) -> Credentials<'_> {
    Credentials::of(request.headers(), request.extensions())
}

fn tenant(service: &Service, request: &Request) -> Result<Tenant, Error> {
    let name = request.headers().get(TENANT_HEADER).and_then(|value| value.to_str().ok());
    service.tenant(credentials(request), name)
}
