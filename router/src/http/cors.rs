//! Which web pages may read answers: none, unless `--cors-origin` names their origin. Browsers ask first (`OPTIONS`)
//! and keep what they are told for an hour.
use std::str::FromStr;
use std::time::Duration;

use http::{HeaderName, HeaderValue, Method, Uri, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

const MAX_AGE: Duration = Duration::from_secs(3600);

/// `*`, or `scheme://host[:port]` as browsers send it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Every page.
    Any,
    /// Pages from there.
    Of(HeaderValue),
}

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self::Any);
        }
        let wrong = || format!("{text:?} is no origin: `*`, or scheme://host[:port] without a path");
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(wrong()) };
        // What a browser sends: compared byte by byte.
        let origin = format!("{scheme}://{authority}").to_ascii_lowercase();
        if origin != text.to_ascii_lowercase() || authority.as_str().contains('@') {
            return Err(wrong());
        }
        HeaderValue::from_str(&origin).map(Self::Of).map_err(|_| wrong())
    }
}

/// `router` whose answers pages of `origins` may read; without any it stays as it is.
pub fn with_cors(router: axum::Router, origins: &[Origin]) -> axum::Router {
    let named = origins.iter().filter_map(|origin| match origin {
        Origin::Any => None,
        Origin::Of(origin) => Some(origin.clone()),
    });
    let allowed = if origins.contains(&Origin::Any) { AllowOrigin::any() } else { AllowOrigin::list(named) };
    if origins.is_empty() {
        return router;
    }
    let told = [
        "x-request-id",
        "traceparent",
        "retry-after",
        "x-ratelimit-limit-requests",
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-requests",
        "x-ratelimit-reset-tokens",
    ]
    .map(HeaderName::from_static);
    router.layer(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods([Method::GET, Method::POST])
            // Whatever the page wants to send: `*` would leave out `authorization`.
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(told.into_iter().chain([header::CONTENT_TYPE]).collect::<Vec<_>>())
            .max_age(MAX_AGE),
    )
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::routing::post;
    use http::{Request, Response};
    use tower::ServiceExt;

    use super::*;

    #[test]
    fn origins_are_what_browsers_send() {
        for good in ["https://example.org", "http://localhost:3000", "*", "https://EXAMPLE.org"] {
            assert!(good.parse::<Origin>().is_ok(), "{good}");
        }
        for wrong in ["example.org", "https://example.org/", "https://a@b", "", "https://", "a b", "null"] {
            assert!(wrong.parse::<Origin>().is_err(), "{wrong}");
        }
    }

    async fn preflight(origins: &[&str], origin: &str) -> Response<Body> {
        let origins: Vec<Origin> = origins.iter().map(|origin| origin.parse().unwrap()).collect();
        let router = axum::Router::new().route("/v1/completions", post(|| async { "done" }));
        let request = Request::options("/v1/completions")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type");
        with_cors(router, &origins).oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    #[tokio::test]
    async fn only_named_origins_are_let_in() {
        let allowed = |response: &Response<Body>| response.headers().get("access-control-allow-origin").cloned();
        let closed = preflight(&[], "https://a.example").await;
        assert_eq!((closed.status().as_u16(), allowed(&closed)), (405, None));
        let named = preflight(&["https://a.example", "https://b.example"], "https://b.example").await;
        assert_eq!(named.status(), 200);
        assert_eq!(allowed(&named).unwrap(), "https://b.example");
        assert_eq!(named.headers()["access-control-allow-headers"], "authorization,content-type");
        assert_eq!(allowed(&preflight(&["https://a.example"], "https://b.example").await), None);
        assert_eq!(allowed(&preflight(&["*"], "https://b.example").await).unwrap(), "*");
    }
}
