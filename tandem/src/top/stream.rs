//! The connection of `tandem top` to the router's live page: server-sent events, and one trace. A connection that is
//! lost, or says nothing, is made again, later and later.
use std::time::Duration;

use anyhow::{Context, bail};
use futures::StreamExt;
use tandem_client::sse::Parser;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::model::Event;
use crate::span::Trace;
use crate::trace;

/// Without a word for so long the connection is lost: the router says something every second.
const SILENCE: Duration = Duration::from_secs(5);
/// Before the next connection; doubles.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// What comes of it.
pub enum Said {
    /// The router says so.
    Event(Box<Event>),
    /// There is no connection, and why.
    Lost(String),
}

/// The router's live page.
#[derive(Clone)]
pub struct Router {
    url: String,
    client: reqwest::Client,
}

impl Router {
    /// At `url`, asked by `client`.
    pub fn new(url: String, client: reqwest::Client) -> Self {
        Self { url, client }
    }

    /// One trace by its id.
    ///
    /// # Errors
    /// No router, no such trace.
    pub async fn trace(&self, id: &str) -> anyhow::Result<Trace> {
        let url = format!("{}/page/traces/{id}", self.url);
        timeout(SILENCE, trace::fetch_with(&self.client, &url)).await.context("the router does not answer")?
    }

    /// Says what comes, until nobody takes it.
    pub async fn follow(self, said: mpsc::Sender<Said>) {
        let mut wait = RETRY.0;
        loop {
            let mut heard = false;
            let lost = match self.events(&said, &mut heard).await {
                Ok(()) => return,
                Err(why) => format!("{why:#}"),
            };
            if said.send(Said::Lost(lost)).await.is_err() {
                return;
            }
            wait = if heard { RETRY.0 } else { (wait * 2).min(RETRY.1) };
            sleep(wait).await;
        }
    }

    /// One connection; `Ok` when nobody takes what it says.
    async fn events(&self, said: &mpsc::Sender<Said>, heard: &mut bool) -> anyhow::Result<()> {
        let asked = self.client.get(format!("{}/page/events", self.url)).send();
        let answer = timeout(SILENCE, asked).await.context("it does not answer")??;
        if !answer.status().is_success() {
            bail!(refusal(answer).await);
        }
        let (mut bytes, mut parser) = (answer.bytes_stream(), Parser::default());
        loop {
            let silence = || format!("it said nothing for {} s", SILENCE.as_secs());
            let Some(piece) = timeout(SILENCE, bytes.next()).await.with_context(silence)? else {
                bail!("it ended the stream");
            };
            for event in parser.push(&piece?)? {
                *heard = true;
                let event = serde_json::from_slice(&event).context("it said what is not understood here")?;
                if said.send(Said::Event(Box::new(event))).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// What a router says of a refusal.
async fn refusal(answer: reqwest::Response) -> String {
    let status = answer.status();
    let body: serde_json::Value = answer.json().await.unwrap_or_default();
    match body["error"]["message"].as_str() {
        Some(message) => format!("{message} ({status})"),
        None => format!("it answers {status}: is it a router with a live page?"),
    }
}
