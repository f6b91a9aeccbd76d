//! What a caller's headers say of its request, the same at both edges: which id it has, and which span it is under.
use http::HeaderMap;
use tandem_proto::TraceContext;

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

/// The client's span. A malformed `traceparent` starts a new trace, as W3C asks.
pub fn parent(headers: &HeaderMap) -> Option<TraceContext> {
    headers.get("traceparent").and_then(|value| value.to_str().ok()?.parse().ok())
}
