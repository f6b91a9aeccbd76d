//! Whose request it is: asked before its body is read, of every route that computes.
use std::time::Instant;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, header};
use tandem_proto::Error;

use super::error::ApiError;
use super::{Caller, rates};
use crate::admission::Tenant;
use crate::api::Service;

/// Names the tenant of a request where there are no API keys.
const TENANT_HEADER: &str = "x-tandem-tenant";

/// Enters the tenant into the request's [`Caller`].
///
/// # Errors
/// 401 for a key that is missing or unknown.
pub(super) async fn identify(
    State(service): State<Service>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let tenant = tenant(&service, request.headers()).inspect_err(|error| service.refused(error.kind))?;
    if let Some(caller) = request.extensions_mut().get_mut::<Caller>() {
        caller.tenant = tenant.clone();
    }
    let mut response = next.run(request).await;
    response.headers_mut().extend(rates::headers(&tenant.allowances(Instant::now())));
    // For the trace of a request that is refused.
    response.extensions_mut().insert(tenant);
    Ok(response)
}

/// Refuses what would be refused anyhow, before its body is read.
///
/// # Errors
/// As [`Service::may_enter`].
pub(super) async fn admit(State(service): State<Service>, request: Request, next: Next) -> Result<Response, ApiError> {
    if let Some(caller) = request.extensions().get::<Caller>() {
        service.may_enter(&caller.tenant).inspect_err(|error| service.refused(error.kind))?;
    }
    Ok(next.run(request).await)
}

fn tenant(service: &Service, headers: &HeaderMap) -> Result<Tenant, Error> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    service.tenant(text(header::AUTHORIZATION.as_str()), text(TENANT_HEADER))
}
