//! A client of the simulated cluster, and what it saw.
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tandem_proto::{Error, ErrorKind, v1};
use tandem_router::admission::Tenant;
use tandem_router::generation::{GenerationEvent, GenerationRequest};
use tandem_telemetry::clock;
use tokio::time::Instant;

use crate::oracle::Expected;
use crate::router::RouterProcess;
use crate::schedule::{Client, Request};

/// What one client saw.
#[derive(Debug)]
pub struct Outcome {
    pub request: usize,
    pub tokens: Vec<u32>,
    pub end: End,
    /// From the request to its end, in virtual time.
    pub took: Duration,
}

/// How it ended.
#[derive(Debug)]
pub enum End {
    Finished {
        reason: v1::FinishReason,
        timings: Box<v1::Timings>,
    },
    /// Refused at once, or failed later.
    Failed(Error),
    /// The client left.
    Left,
    /// The router died.
    RouterDied,
    /// The stream broke a rule.
    Broken(String),
}

/// Asks, and reads as the client does.
pub async fn run(index: usize, request: &Request, expected: &Expected, router: Option<Arc<RouterProcess>>) -> Outcome {
    let begin = Instant::now();
    let mut tokens = Vec::new();
    let end = match router {
        None => End::RouterDied,
        Some(router) => {
            let leaving = async {
                match request.client {
                    Client::LeavesIn(after) => tokio::time::sleep(after).await,
                    _ => std::future::pending().await,
                }
            };
            let process = router.process.clone();
            tokio::select! {
                biased;
                () = process.died() => End::RouterDied,
                () = leaving => End::Left,
                end = read(index, request, expected, router, &mut tokens) => end,
            }
        }
    };
    Outcome { request: index, tokens, end, took: begin.elapsed() }
}

async fn read(
    index: usize,
    request: &Request,
    expected: &Expected,
    router: Arc<RouterProcess>,
    tokens: &mut Vec<u32>,
) -> End {
    let wish = GenerationRequest {
        request_id: format!("r{index}"),
        prompt_ids: expected.prompt.as_slice().into(),
        max_tokens: request.max_tokens,
        sampling: request.sampling.clone(),
        ignore_eos: request.ignore_eos,
        stop_token_ids: request.stop_token_ids.clone(),
        stop: Vec::new(),
        priority: 0,
        tenant: Tenant::default(),
        cache_salt: "".into(),
        deadline: Some(clock::now() + request.deadline),
        parent: None,
        root: None,
        received: clock::now(),
        api: "simulation",
    };
    let mut stream = match router.service.generate(wish) {
        Ok(stream) => stream,
        Err(error) => return End::Failed(error),
    };
    // It goes with its process; a client does not keep it.
    drop(router);
    loop {
        match stream.next().await {
            Some(Ok(GenerationEvent::Token { id, index, .. })) => {
                if index as usize != tokens.len() {
                    return End::Broken(format!("token {} came as number {index}", tokens.len()));
                }
                tokens.push(id);
                match request.client {
                    Client::LeavesAfter(count) if tokens.len() >= count as usize => return End::Left,
                    Client::Slow(pause) => tokio::time::sleep(pause).await,
                    _ => {}
                }
            }
            Some(Ok(GenerationEvent::Finish { reason, timings, usage, .. })) => {
                if usage.completion as usize != tokens.len() {
                    return End::Broken(format!("{} tokens came, {} were counted", tokens.len(), usage.completion));
                }
                if stream.next().await.is_some() {
                    return End::Broken("something came after the end".to_owned());
                }
                return End::Finished { reason, timings };
            }
            Some(Err(error)) => return End::Failed(error),
            None => return End::Broken("the stream ended without an end".to_owned()),
        }
    }
}

impl Outcome {
    /// In one word, for counting.
    pub fn label(&self) -> &'static str {
        match &self.end {
            End::Finished { .. } => "finished",
            End::Left => "left",
            End::RouterDied => "router died",
            End::Broken(_) => "broken",
            End::Failed(error) => match error.kind {
                ErrorKind::Overloaded => "overloaded",
                ErrorKind::DeadlineExceeded => "deadline",
                ErrorKind::Unavailable => "unavailable",
                ErrorKind::Aborted => "aborted",
                ErrorKind::Cancelled => "cancelled",
                _ => "other error",
            },
        }
    }
}
