//! Whether the body of a request is said to be JSON. A web page may send anything to anybody in three content types
//! without asking first (a "simple" request, <https://fetch.spec.whatwg.org/#cors-safelisted-request-header>); with
//! JSON it has to ask, and [`super::cors`] answers. So another type is refused, and none at all is good enough only for
//! what is no web page.
use axum::extract::Request;
use http::{HeaderMap, Method, header};

use super::error::ApiError;

/// Lets POSTs pass whose body is JSON.
///
/// # Errors
/// 415 for another content type or a content encoding.
pub(super) fn is_json(request: &Request) -> Result<(), ApiError> {
    if request.method() == Method::POST { check(request.headers()) } else { Ok(()) }
}

fn check(headers: &HeaderMap) -> Result<(), ApiError> {
    let refuse = |what: &str, said: &str, wanted: &str| {
        let said: String = said.chars().take(100).collect();
        Err(ApiError::unsupported_media(format!("{what} {said:?} is not supported: {wanted}")))
    };
    for value in headers.get_all(header::CONTENT_ENCODING) {
        let value = String::from_utf8_lossy(value.as_bytes());
        if !value.trim().eq_ignore_ascii_case("identity") {
            return refuse("content-encoding", &value, "send the body as it is");
        }
    }
    let mut types = headers.get_all(header::CONTENT_TYPE).iter().peekable();
    if types.peek().is_none() && headers.contains_key(header::ORIGIN) {
        return refuse("content-type", "", "send application/json");
    }
    for value in types {
        let value = String::from_utf8_lossy(value.as_bytes());
        if !names_json(&value) {
            return refuse("content-type", &value, "send application/json");
        }
    }
    Ok(())
}

/// `application/json`, or anything whose suffix says that it is written as JSON (RFC 6839, 3.1); with parameters or
/// without.
fn names_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let Some((kind, subtype)) = essence.split_once('/') else { return false };
    (kind, subtype) == ("application", "json") || (!kind.is_empty() && subtype.ends_with("+json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(headers: &[(&'static str, &'static str)]) -> u16 {
        use axum::response::IntoResponse;
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        check(&map).map_or_else(|error| error.into_response().status().as_u16(), |()| 200)
    }

    #[test]
    fn json_and_what_is_written_as_json() {
        for good in
            ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "text/x+json;a=b"]
        {
            assert_eq!(status(&[("content-type", good), ("origin", "https://a.example")]), 200, "{good}");
        }
        for wrong in
            ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=json", "json", ""]
        {
            assert_eq!(status(&[("content-type", wrong)]), 415, "{wrong}");
        }
        let two = [("content-type", "application/json"), ("content-type", "text/plain")];
        assert_eq!(status(&two), 415);
    }

    #[test]
    fn without_a_type_only_what_is_no_web_page() {
        assert_eq!(status(&[]), 200);
        assert_eq!(status(&[("origin", "https://a.example")]), 415);
    }

    #[test]
    fn encodings_are_not_known() {
        assert_eq!(status(&[("content-encoding", "identity")]), 200);
        for encoding in ["gzip", "br", "identity, gzip", ""] {
            assert_eq!(status(&[("content-encoding", encoding)]), 415, "{encoding}");
        }
    }
}
