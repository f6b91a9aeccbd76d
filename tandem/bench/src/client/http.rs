//! OpenAI's HTTP API, streaming: completions and chat completions of any server that speaks it.
use std::time::Duration;

use anyhow::Context;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Request, Response, StatusCode};
use serde_json::{Map, Value, json};
use tandem_client::connect::Tls;
use tandem_client::sse::Parser;

use super::chunk::{Chunk, TokenRule};
use super::{Asking, Heard, failed};
use crate::metronome::Clock;
use crate::prompt::Prompt;
use crate::record::Outcome;

/// The event behind the last one.
const DONE: &[u8] = b"[DONE]";
/// Bytes of an error's body that are read.
const ERROR_BYTES: usize = 16 << 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Which endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`: the prompt as it is.
    Completions,
    /// `/v1/chat/completions`: the prompt as one message of the user.
    Chat,
}

/// Whose server it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Ours: sends timings when asked, and every token as a chunk.
    Tandem,
    /// Any other.
    OpenAi,
}

/// What every request of one server shares.
#[derive(Clone)]
pub struct HttpClient {
    http: reqwest::Client,
    url: String,
    api: Api,
    dialect: Dialect,
    asking: Asking,
    extra: Map<String, Value>,
}

/// A request with all its bytes.
pub struct HttpCall {
    http: reqwest::Client,
    request: Request,
    rule: TokenRule,
    max_tokens: u32,
}

/// Connections for measuring: kept open, without a proxy in between, nothing held back to fill packets.
///
/// # Errors
/// TLS files that cannot be used.
pub fn connections(headers: HeaderMap, tls: &Tls, url: &str) -> anyhow::Result<reqwest::Client> {
    let builder = reqwest::Client::builder()
        .default_headers(headers)
        .no_proxy()
        .tcp_nodelay(true)
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(None);
    tls.for_http(builder, url)?.build().context("the HTTP client cannot be made")
}

impl HttpClient {
    /// A client of the server whose API begins at `base` (with or without `/v1`). `extra` fields go into every body
    /// and replace what would be there.
    pub fn new(
        http: reqwest::Client,
        base: &str,
        (api, dialect): (Api, Dialect),
        asking: Asking,
        extra: Map<String, Value>,
    ) -> Self {
        let path = match api {
            Api::Completions => "completions",
            Api::Chat => "chat/completions",
        };
        let url = format!("{}/v1/{path}", root(base));
        Self { http, url, api, dialect, asking, extra }
    }

    /// # Errors
    /// A URL that is none.
    pub fn call(&self, prompt: Prompt, max_tokens: u32) -> anyhow::Result<HttpCall> {
        let body = serde_json::to_vec(&self.body(prompt, max_tokens))?;
        let mut request = self.http.post(&self.url).header("content-type", "application/json").body(body);
        if self.dialect == Dialect::OpenAi {
            // Some servers close a connection after so many requests (llama-server does): one that is being sent then
            // would be lost, and nobody may send it twice.
            request = request.header("connection", "close");
        }
        let request = request.build().with_context(|| format!("no request can be made to {}", self.url))?;
        let rule = match self.dialect {
            Dialect::Tandem => TokenRule::Unfinished,
            Dialect::OpenAi => TokenRule::WithText,
        };
        Ok(HttpCall { http: self.http.clone(), request, rule, max_tokens })
    }

    fn body(&self, prompt: Prompt, max_tokens: u32) -> Value {
        let mut options = json!({"include_usage": true});
        if self.dialect == Dialect::Tandem {
            options["include_timings"] = true.into();
        }
        let mut body = json!({
            "model": self.asking.model, "max_tokens": max_tokens, "temperature": 0.0, "stream": true, "stream_options": options,
        });
        if self.asking.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        let prompt = match prompt {
            Prompt::Text(text) => Value::from(text),
            Prompt::Ids(ids) => Value::from(ids),
        };
        match self.api {
            Api::Completions => body["prompt"] = prompt,
            Api::Chat => body["messages"] = json!([{"role": "user", "content": prompt}]),
        }
        for (name, value) in &self.extra {
            body[name] = value.clone();
        }
        body
    }
}

/// `http://host/v1/` and `http://host` mean the same server.
pub fn root(base: &str) -> &str {
    let base = base.trim_end_matches('/');
    base.strip_suffix("/v1").unwrap_or(base)
}

impl HttpCall {
    pub(super) async fn send(self, clock: Clock, heard: &mut Heard) -> Result<(), Outcome> {
        heard.sent_s = clock.now_s();
        let response = self.http.execute(self.request).await.map_err(|error| broken(&error))?;
        if !response.status().is_success() {
            return Err(refusal(response).await);
        }
        let mut stream =
            Stream { parser: Parser::default(), rule: self.rule, max_tokens: self.max_tokens, ended: false };
        let mut response = response;
        while let Some(bytes) = response.chunk().await.map_err(|error| broken(&error))? {
            stream.read(&bytes, clock.now_s(), heard)?;
            if stream.ended {
                return heard.settle();
            }
        }
        Err(failed("cut", "the stream ended without [DONE]".to_owned()))
    }
}

/// The events of one answer.
struct Stream {
    parser: Parser,
    rule: TokenRule,
    max_tokens: u32,
    ended: bool,
}

impl Stream {
    /// Takes in bytes that came at `now_s`.
    fn read(&mut self, bytes: &[u8], now_s: f64, heard: &mut Heard) -> Result<(), Outcome> {
        let events = self.parser.push(bytes).map_err(|error| failed("protocol", error.to_string()))?;
        for event in events {
            if event == DONE {
                self.ended = true;
                return Ok(());
            }
            let chunk: Chunk = serde_json::from_slice(&event)
                .map_err(|error| failed("protocol", format!("{error} in {}", String::from_utf8_lossy(&event))))?;
            if let Some(message) = chunk.error() {
                return Err(failed("error event", message));
            }
            let tokens = chunk.tokens(self.rule);
            if tokens > 0 {
                heard.tokens(now_s, tokens, self.max_tokens)?;
            }
            heard.usage = chunk.usage().or(heard.usage);
            heard.phases = chunk.phases().or(heard.phases);
            heard.nodes = chunk.nodes().or(heard.nodes.take());
            if let Some(id) = chunk.trace_id() {
                heard.trace_id = Some(id.to_owned());
            }
        }
        Ok(())
    }
}

/// A status that is no success.
async fn refusal(mut response: Response) -> Outcome {
    let status = response.status();
    let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let mut body = Vec::new();
    // What is left of it matters no more, nor does an error on the way.
    while let Ok(Some(bytes)) = response.chunk().await {
        body.extend_from_slice(&bytes);
        if body.len() > ERROR_BYTES {
            break;
        }
    }
    if status == StatusCode::TOO_MANY_REQUESTS {
        return Outcome::Refused { retry_after_s: seconds.filter(|seconds: &f64| seconds.is_finite()) };
    }
    let said = serde_json::from_slice::<Chunk>(&body).ok().and_then(|chunk| chunk.error());
    let message = said.unwrap_or_else(|| String::from_utf8_lossy(&body).into_owned());
    failed(&format!("http {}", status.as_u16()), message)
}

fn broken(error: &reqwest::Error) -> Outcome {
    let kind = if error.is_connect() { "connect" } else { "cut" };
    // The outermost message says only that something failed.
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        message = format!("{message}: {inner}");
        source = inner.source();
    }
    failed(kind, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(api: Api, dialect: Dialect, extra: &str) -> HttpClient {
        let asking = Asking { model: "m".into(), ignore_eos: true, timeout: Duration::from_secs(1) };
        let extra = serde_json::from_str(extra).unwrap();
        HttpClient::new(
            connections(HeaderMap::new(), &Tls::default(), "").unwrap(),
            "http://h:1/v1/",
            (api, dialect),
            asking,
            extra,
        )
    }

    #[test]
    fn bodies_are_what_servers_read() {
        let ours = client(Api::Completions, Dialect::Tandem, "{}");
        assert_eq!(ours.url, "http://h:1/v1/completions");
        let body = ours.body(Prompt::Ids(vec![1, 2]), 7);
        assert_eq!(
            (&body["prompt"], &body["max_tokens"], &body["ignore_eos"]),
            (&json!([1, 2]), &json!(7), &json!(true))
        );
        assert_eq!(body["stream_options"], json!({"include_usage": true, "include_timings": true}));
        let theirs = client(Api::Chat, Dialect::OpenAi, r#"{"temperature": 0.7, "top_k": 3}"#);
        assert_eq!(theirs.url, "http://h:1/v1/chat/completions");
        let body = theirs.body(Prompt::Text("hi".into()), 7);
        assert_eq!(body["messages"], json!([{"role": "user", "content": "hi"}]));
        assert_eq!(body["stream_options"], json!({"include_usage": true}));
        assert_eq!((&body["temperature"], &body["top_k"]), (&json!(0.7), &json!(3)));
    }

    #[test]
    fn roots_of_servers() {
        for base in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            assert_eq!(root(base), "http://h:1");
        }
    }
}
