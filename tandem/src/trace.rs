//! `tandem trace`: fetches a trace from the router and prints its waterfall.
//!
//! Next: [`crate::waterfall`], which draws.
use anyhow::{Context, bail};
use tandem_client::connect::Router;
use tandem_client::terminal::print;

use crate::config;
use crate::span::Trace;
use crate::waterfall;

/// Fetches and draws.
///
/// # Errors
/// No router, no such trace.
pub async fn run(config: config::Trace) -> anyhow::Result<()> {
    let trace = fetch(&config.router, &config.id).await?;
    print(&format!("{}{}", trace.head(), waterfall::render(&trace.spans, config.width)))
}

/// The trace `id` (32 hexadecimal digits, or `last`) of this router.
///
/// # Errors
/// No router, no such trace.
pub async fn fetch(router: &Router, id: &str) -> anyhow::Result<Trace> {
    let of_trace = format!("{}/api/traces/{id}", router.http_url()?);
    fetch_with(&router.http_client()?, &of_trace).await
}

/// The trace at this address.
///
/// # Errors
/// No router, no such trace.
pub async fn fetch_with(client: &reqwest::Client, of_trace: &str) -> anyhow::Result<Trace> {
    let response = client.get(of_trace).send().await.with_context(|| format!("no router answers at {of_trace}"))?;
    let status = response.status();
    let body = response.bytes().await?;
    if !status.is_success() {
        bail!("{of_trace}: {status}: {}", String::from_utf8_lossy(&body));
    }
    serde_json::from_slice(&body).with_context(|| format!("{of_trace} did not answer with a trace"))
}
