//! What a caller's headers say of its request, the same at both edges: which id it has, which span it is under, and by
//! what its tenant is known.
use http::{Extensions, HeaderMap, header};
use tandem_ports::ClientName;
use tandem_proto::{TraceContext, TraceState};

/// Bytes of a client's request id at most.
pub const MAX_REQUEST_ID_BYTES: usize = 128;

/// The client's `x-request-id`; what is no usable one is replaced by a new one.
pub fn request_id(headers: &HeaderMap) -> String {
    let sent = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    sent.filter(|id| is_request_id(id)).map_or_else(new_request_id, str::to_owned)
}

/// Whether it is 1 to [`MAX_REQUEST_ID_BYTES`] visible ASCII characters.
pub fn is_request_id(id: &str) -> bool {
    !id.is_empty() && id.len() <= MAX_REQUEST_ID_BYTES && id.bytes().all(|byte| byte.is_ascii_graphic())
}

/// A request id for clients that sent none.
fn new_request_id() -> String {
    format!("req-{:016x}", rand::random::<u64>())
}

/// The client's span.
#[derive(Clone, Debug)]
pub struct Parent {
    /// Its identity.
    pub span: TraceContext,
    /// What others say of its trace.
    pub state: TraceState,
}

/// A malformed `traceparent` starts a new trace, as W3C asks: no `tracestate` belongs to that.
pub fn parent(headers: &HeaderMap) -> Option<Parent> {
    let span = headers.get("traceparent").and_then(|value| value.to_str().ok()?.parse().ok())?;
    // What is no text spoils the list as what is malformed does.
    let states = headers.get_all("tracestate").iter().map(|value| value.to_str().unwrap_or("?"));
    Some(Parent { span, state: TraceState::read(states) })
}

/// By what the tenant of a request is known, where there are API keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct Credentials<'a> {
    /// The `authorization` header or metadata.
    pub authorization: Option<&'a str>,
    /// What the certificate of its connection says.
    pub certificate: Option<&'a ClientName>,
}

impl<'a> Credentials<'a> {
    /// Of a request with these.
    pub fn of(headers: &'a HeaderMap, extensions: &'a Extensions) -> Self {
        // A header that is no text is a wrong one, and not none.
        let authorization = headers.get(header::AUTHORIZATION).map(|value| value.to_str().unwrap_or_default());
        Self { authorization, certificate: extensions.get() }
    }
}

impl<'a> From<Option<&'a str>> for Credentials<'a> {
    /// By the header alone.
    fn from(authorization: Option<&'a str>) -> Self {
        Self { authorization, certificate: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_is_no_text_is_not_none() {
        let (mut headers, mut extensions) = (HeaderMap::new(), Extensions::new());
        extensions.insert(ClientName { spiffe_id: None, common_name: Some("a".to_owned()) });
        let shown = Credentials::of(&headers, &extensions);
        assert_eq!(shown.authorization, None);
        assert_eq!(shown.certificate.unwrap().common_name.as_deref(), Some("a"));
        headers.insert("authorization", http::HeaderValue::from_bytes(b"Bearer \xff").unwrap());
        assert_eq!(Credentials::of(&headers, &extensions).authorization, Some(""));
    }

    #[test]
    fn a_tracestate_belongs_to_a_traceparent() {
        let mut headers = HeaderMap::new();
        headers.append("tracestate", "a=1".parse().unwrap());
        assert!(parent(&headers).is_none());
        headers.insert("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap());
        headers.append("tracestate", "b=2".parse().unwrap());
        assert_eq!(parent(&headers).unwrap().state.as_str(), "a=1,b=2");
        headers.append("tracestate", http::HeaderValue::from_bytes(b"c=\xff").unwrap());
        assert_eq!(parent(&headers).unwrap().state.as_str(), "");
    }
}
