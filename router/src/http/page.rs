//! The live page over HTTP: its files, which the program carries with it, the stream of events that they and
//! `tandem top` read, and one trace. What is streamed is [`crate::page`]'s matter. Where there are API keys, the files
//! are anybody's and what they show wants a key.
use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderValue, header};
use serde_json::Value;
use tandem_proto::Error;
use tandem_proto::ErrorKind;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::auth;
use super::error::ApiError;
use super::traces::aside;
use crate::page::Page;

/// Of one subscriber. What the largest cluster has to say is below it; who comes gets the past at this pace.
const BYTES_PER_SECOND: u32 = 256 << 10;
/// Of these, so many may come at once.
const BURST: Duration = Duration::from_millis(500);

/// Scripts and styles are the page's own, it talks to nobody else, and nobody may put it into a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Path, type and text of all files.
const FILES: [(&str, &str, &str); 9] = [
    ("/", "text/html; charset=utf-8", include_str!("../page/web/index.html")),
    ("/page/page.css", "text/css; charset=utf-8", include_str!("../page/web/page.css")),
    ("/page/page.js", SCRIPT, include_str!("../page/web/page.js")),
    ("/page/stream.js", SCRIPT, include_str!("../page/web/stream.js")),
    ("/page/cluster.js", SCRIPT, include_str!("../page/web/cluster.js")),
    ("/page/requests.js", SCRIPT, include_str!("../page/web/requests.js")),
    ("/page/waterfall.js", SCRIPT, include_str!("../page/web/waterfall.js")),
    ("/page/elements.js", SCRIPT, include_str!("../page/web/elements.js")),
    ("/page/icon.svg", "image/svg+xml", include_str!("../page/web/icon.svg")),
];
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// What the routes need.
#[derive(Clone)]
struct Shown {
    page: Page,
    /// Ends the streams: they have no end of their own.
    stop: CancellationToken,
}

/// The routes of `page`. Its streams end at `stop`.
pub fn page(page: Page, stop: CancellationToken) -> axum::Router {
    let shown = Shown { page, stop };
    let guarded = axum::Router::new()
        .route("/page/events", get(events))
        .route("/page/traces/{id}", get(trace))
        .route_layer(from_fn_with_state(shown.page.service().clone(), auth::of_a_client));
    let files = FILES.into_iter().fold(axum::Router::new(), |router, (path, kind, text)| {
        router.route(path, get(move || async move { ([(header::CONTENT_TYPE, kind)], text) }))
    });
    files.merge(guarded).layer(from_fn(with_policy)).with_state(shown)
}

async fn with_policy(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Files are those of this program, whichever program had the port before.
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Of all clients: where there are keys, the page is on operators' port alone.
async fn trace(State(shown): State<Shown>, id: Result<Path<String>, PathRejection>) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|rejection| Error::new(ErrorKind::InvalidArgument, rejection.body_text()))?;
    let service = shown.page.service().clone();
    Ok(Json(aside(service, move |service| service.trace_json(&id)).await??))
}

async fn events(State(Shown { page, stop }): State<Shown>) -> Result<Response, ApiError> {
    let subscribed = page.subscribe().await.inspect_err(|error| page.service().refused(error.kind));
    let (mut subscription, beginning) = subscribed?;
    let stream = async_stream::stream! {
        let (mut pace, mut events) = (Pace::new(), beginning);
        loop {
            for event in events {
                pace.wait().await;
                pace.sent(event.len());
                yield Ok::<Bytes, Infallible>(event);
            }
            let Some(next) = subscription.next().await else { return };
            events = next;
        }
    };
    let stream = futures::StreamExt::take_until(stream, stop.cancelled_owned());
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (X_ACCEL_BUFFERING, "no")];
    Ok((headers, Body::from_stream(stream)).into_response())
}

/// nginx would collect the events otherwise.
const X_ACCEL_BUFFERING: header::HeaderName = header::HeaderName::from_static("x-accel-buffering");

/// Holds a stream back that would send more than it may.
struct Pace {
    /// When what was sent so far would be over at the highest rate.
    over: Instant,
}

impl Pace {
    fn new() -> Self {
        Self { over: Instant::now() }
    }

    async fn wait(&self) {
        sleep_until(self.over.checked_sub(BURST).unwrap_or(self.over)).await;
    }

    fn sent(&mut self, bytes: usize) {
        let takes = Duration::from_secs(bytes as u64) / BYTES_PER_SECOND;
        self.over = self.over.max(Instant::now()) + takes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_subscriber_gets_no_more_than_its_bytes_a_second() {
        let (mut pace, begun) = (Pace::new(), Instant::now());
        for _ in 0..40 {
            pace.wait().await;
            pace.sent(BYTES_PER_SECOND as usize / 4);
        }
        let took = begun.elapsed();
        assert!((9.0..=10.0).contains(&took.as_secs_f64()), "{took:?} for ten seconds' bytes");
        tokio::time::sleep(Duration::from_secs(60)).await;
        let later = Instant::now();
        for _ in 0..8 {
            pace.wait().await;
            pace.sent(BYTES_PER_SECOND as usize / 4);
        }
        assert!(later.elapsed() >= Duration::from_secs(1), "a quiet minute saves nothing up");
    }
}
