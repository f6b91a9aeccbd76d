//! `tandem.v1.Inference`: one token a message, and a last one with counts, timings and the trace's id.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use tandem_client::connect::Tls;
use tandem_proto::v1;
use tandem_proto::v1::generate_request::Input;
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_client::InferenceClient;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, ConnectError, Request, Status};
use tonic_types::StatusExt;

use super::chunk::is_local;
use super::{Asking, Heard, Usage, failed};
use crate::metronome::Clock;
use crate::prompt::Prompt;
use crate::record::{Nodes, Outcome, Phases};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Connections to one server, used in turn.
#[derive(Clone)]
pub struct GrpcClient {
    channels: Arc<[InferenceClient<Channel>]>,
    next: Arc<AtomicUsize>,
    metadata: MetadataMap,
    asking: Asking,
}

/// A request with its connection.
pub struct GrpcCall {
    inference: InferenceClient<Channel>,
    request: Request<v1::GenerateRequest>,
    max_tokens: u32,
}

impl GrpcClient {
    /// Opens all connections.
    ///
    /// # Errors
    /// A URL that is none, or nobody there.
    pub async fn connect(
        url: &str,
        tls: &Tls,
        connections: usize,
        metadata: MetadataMap,
        asking: Asking,
    ) -> anyhow::Result<Self> {
        let endpoint = Endpoint::from_shared(url.to_owned())
            .with_context(|| format!("`{url}` is not http://host:port"))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        let mut channels = Vec::with_capacity(connections);
        for _ in 0..connections.max(1) {
            let channel = tls.connect(&endpoint).await.with_context(|| format!("nobody answers at {url}"))?;
            channels.push(InferenceClient::new(channel).max_decoding_message_size(tandem_proto::MAX_MESSAGE_BYTES));
        }
        Ok(Self { channels: channels.into(), next: Arc::default(), metadata, asking })
    }

    /// A request on the connection whose turn it is.
    pub fn call(&self, prompt: Prompt, max_tokens: u32) -> GrpcCall {
        let input = match prompt {
            Prompt::Text(text) => Input::Text(text),
            Prompt::Ids(ids) => Input::TokenIds(v1::TokenIds { ids }),
        };
        let message = v1::GenerateRequest {
            model: self.asking.model.clone(),
            input: Some(input),
            max_tokens: Some(max_tokens),
            ignore_eos: self.asking.ignore_eos,
            ..v1::GenerateRequest::default()
        };
        let mut request = Request::new(message);
        *request.metadata_mut() = self.metadata.clone();
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.channels.len();
        GrpcCall { inference: self.channels[turn].clone(), request, max_tokens }
    }
}

impl GrpcCall {
    pub(super) async fn send(mut self, clock: Clock, timeout: Duration, heard: &mut Heard) -> Result<(), Outcome> {
        self.request.set_timeout(timeout);
        heard.sent_s = clock.now_s();
        let answer = self.inference.generate(self.request).await;
        let mut stream = answer.map_err(|status| refusal(&status))?.into_inner();
        while let Some(message) = stream.message().await.map_err(|status| refusal(&status))? {
            match message.event {
                Some(Event::Token(_)) => heard.tokens(clock.now_s(), 1, self.max_tokens)?,
                Some(Event::Finish(finish)) => {
                    heard.finish(finish);
                    return heard.settle();
                }
                None => {}
            }
        }
        Err(failed("cut", "the stream ended without a last message".to_owned()))
    }
}

impl Heard {
    fn finish(&mut self, finish: v1::Finish) {
        self.usage = Some(Usage {
            prompt: finish.prompt_tokens,
            cached: finish.cached_tokens,
            completion: finish.completion_tokens,
        });
        let timings = finish.timings.as_ref();
        self.nodes = timings.and_then(|timings| Nodes::named(&timings.prefill_instance, &timings.decode_instance));
        self.phases = finish.timings.map(|timings| Phases {
            queue_ms: timings.queue_ms,
            route_ms: timings.route_ms,
            prefill_ms: timings.prefill_ms,
            ttft_ms: timings.ttft_ms,
            transfer_exposed_ms: timings.transfer_exposed_ms,
            transfer_total_ms: timings.transfer_total_ms,
            decode_ms: timings.decode_ms,
            handoff_gap_ms: timings.handoff_gap_ms,
            kv_bytes: timings.kv_bytes,
            kv_gbps: timings.kv_gbps,
            predicted_ttft_ms: timings.predicted_ttft_ms,
            local: is_local(&timings.prefill_instance, &timings.decode_instance),
        });
        self.trace_id = Some(finish.trace_id).filter(|id| !id.is_empty());
    }
}

fn refusal(status: &Status) -> Outcome {
    match status.code() {
        Code::ResourceExhausted => {
            let delay = status.get_details_retry_info().and_then(|info| info.retry_delay);
            Outcome::Refused { retry_after_s: delay.map(|delay| delay.as_secs_f64()) }
        }
        Code::Unavailable if is_connect(status) => failed("connect", status.message().to_owned()),
        Code::DeadlineExceeded => failed("timeout", status.message().to_owned()),
        code => failed(&format!("grpc {code:?}"), status.message().to_owned()),
    }
}

/// Nobody could be reached, as far as the status knows: one that a server sent has no source.
fn is_connect(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use tandem_proto::{Error, ErrorKind};

    use super::*;

    #[test]
    fn a_refusal_says_when_to_come_again() {
        let status = Status::from(Error::new(ErrorKind::Overloaded, "full"));
        assert_eq!(refusal(&status), Outcome::Refused { retry_after_s: Some(1.0) });
        let Outcome::Failed { kind, message } = refusal(&Status::unavailable("away")) else { panic!() };
        assert_eq!((kind.as_str(), message.as_str()), ("grpc Unavailable", "away"));
    }
}
