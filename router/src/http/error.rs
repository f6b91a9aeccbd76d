//! Failures as OpenAI's clients expect them: `{"error": {message, type, param, code}}` with the right status.
use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use tandem_proto::error::RETRY_AFTER;
use tandem_proto::{Error, ErrorCode, ErrorKind};

/// An error with its place in HTTP.
#[derive(Debug)]
pub(super) struct ApiError {
    kind: ErrorKind,
    status: StatusCode,
    error_type: &'static str,
    code: Option<&'static str>,
    message: String,
    param: Option<&'static str>,
    /// Of 429 and 503.
    retry_after: Duration,
}

impl ApiError {
    /// The body of a request was larger than `limit` bytes.
    pub fn body_too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than {limit} bytes");
        Self::refusal(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    /// The body did not arrive in time.
    pub fn body_too_slow() -> Self {
        let message = "the request body did not arrive in time".to_owned();
        Self::refusal(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
    }

    /// The body is of another kind than JSON, or encoded.
    pub fn unsupported_media(message: String) -> Self {
        Self::refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    }

    /// The path exists, the method does not.
    pub fn wrong_method() -> Self {
        let message = "this route does not know this method".to_owned();
        Self::refusal(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// Another model than the served one was asked for.
    pub fn no_model(asked: &str, served: &str) -> Self {
        let asked: String = asked.chars().take(200).collect();
        let message = format!("the model {asked:?} does not exist; this cluster serves {served:?}");
        let refusal = Self::refusal(StatusCode::NOT_FOUND, "model_not_found", message);
        Self { kind: ErrorKind::NotFound, param: Some("model"), ..refusal }
    }

    /// What it is for metrics.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The JSON body; also the data of an error event within a stream.
    pub fn json(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.error_type, "param": self.param, "code": self.code,
        }})
    }

    fn refusal(status: StatusCode, code: &'static str, message: String) -> Self {
        Self {
            kind: ErrorKind::InvalidArgument,
            status,
            error_type: "invalid_request_error",
            code: Some(code),
            message,
            param: None,
            retry_after: RETRY_AFTER,
        }
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let (status, error_type, code) = match error.kind {
            ErrorKind::InvalidArgument => (StatusCode::BAD_REQUEST, "invalid_request_error", None),
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, "invalid_request_error", Some("not_found")),
            ErrorKind::Overloaded => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("overloaded")),
            ErrorKind::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "server_error", Some("unavailable")),
            ErrorKind::Incompatible => (StatusCode::SERVICE_UNAVAILABLE, "server_error", Some("incompatible_nodes")),
            // Between router and nodes; no client hears it.
            ErrorKind::DeclaredDead => (StatusCode::SERVICE_UNAVAILABLE, "server_error", Some("unavailable")),
            ErrorKind::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, "timeout_error", Some("deadline_exceeded")),
            // Nobody reads it: nginx's "client closed request".
            ErrorKind::Cancelled => (
                StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
                "invalid_request_error",
                Some("cancelled"),
            ),
            ErrorKind::Unauthenticated => (StatusCode::UNAUTHORIZED, "invalid_request_error", Some("invalid_api_key")),
            ErrorKind::Aborted => (StatusCode::BAD_GATEWAY, "server_error", Some("aborted")),
            ErrorKind::Corrupt => (StatusCode::BAD_GATEWAY, "server_error", Some("corrupt_kv")),
            ErrorKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "server_error", Some("internal_error")),
        };
        let code = error.code.map(ErrorCode::name).or(code);
        let retry_after = error.retry_after.unwrap_or(RETRY_AFTER);
        Self { kind: error.kind, status, error_type, code, message: error.message, param: error.param, retry_after }
    }
}

/// Rides on the response of a failure, for who tells of it.
#[derive(Clone, Debug)]
pub(super) struct Failed(pub Error);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        let failed = Error { param: self.param, ..Error::new(self.kind, self.message) };
        response.extensions_mut().insert(Failed(failed));
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(self.retry_after)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Rounded up, at least 1: a client that waits so long does not come too early.
fn whole_seconds(duration: Duration) -> u64 {
    (duration.as_secs() + u64::from(duration.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_status() {
        for (kind, status) in [
            (ErrorKind::InvalidArgument, 400),
            (ErrorKind::NotFound, 404),
            (ErrorKind::Overloaded, 429),
            (ErrorKind::Unauthenticated, 401),
            (ErrorKind::Unavailable, 503),
            (ErrorKind::Aborted, 502),
            (ErrorKind::DeadlineExceeded, 504),
            (ErrorKind::Cancelled, 499),
            (ErrorKind::Internal, 500),
        ] {
            let response = ApiError::from(Error::new(kind, "why")).into_response();
            assert_eq!(response.status(), status, "{kind:?}");
            assert_eq!(response.headers().contains_key("retry-after"), [429, 503].contains(&status));
        }
    }

    #[test]
    fn retry_after_is_rounded_up() {
        for (millis, seconds) in [(1, "1"), (1000, "1"), (1001, "2"), (59_999, "60")] {
            let retry_after = Some(Duration::from_millis(millis));
            let error = Error { retry_after, ..Error::new(ErrorKind::Overloaded, "full") };
            assert_eq!(ApiError::from(error).into_response().headers()["retry-after"], seconds);
        }
        let unknown = ApiError::from(Error::new(ErrorKind::Unauthenticated, "who")).into_response();
        assert_eq!(unknown.headers()["www-authenticate"], "Bearer");
    }

    #[test]
    fn the_shape_is_openai_s() {
        let error = ApiError::from(Error::invalid("n", "only 1"));
        assert_eq!(
            error.json(),
            json!({"error": {"message": "only 1", "type": "invalid_request_error", "param": "n", "code": null}})
        );
    }

    #[test]
    fn a_code_of_the_error_goes_before_that_of_its_kind() {
        let code = |error: Error| ApiError::from(error).json()["error"]["code"].clone();
        let overloaded = || Error::new(ErrorKind::Overloaded, "why");
        assert_eq!(code(overloaded()), "overloaded");
        assert_eq!(code(overloaded().with_code(ErrorCode::RateLimitExceeded)), "rate_limit_exceeded");
        let long = Error::invalid("prompt", "long").with_code(ErrorCode::ContextLengthExceeded);
        assert_eq!(code(long), "context_length_exceeded");
    }
}
