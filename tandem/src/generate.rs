//! `tandem generate`: one prompt over gRPC, the text as it comes, then one line of figures.
//!
//! [`Client`] is also what [`crate::chat`] talks through.
use anyhow::bail;
use tandem_client::terminal::{print, say};
use tandem_client::wrong_port;
use tandem_proto::v1;
use tandem_proto::v1::generate_request::Input;
use tandem_proto::v1::generate_response::Event;
use tandem_proto::v1::inference_client::InferenceClient;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::config::{Generate, Sampling};

/// Streams the answer to standard output, and the figures to standard error.
///
/// # Errors
/// No router, or the error that the router answers with.
pub async fn run(config: Generate) -> anyhow::Result<()> {
    let mut client = Client::connect(config.options).await?;
    let answer = client.answer(Input::Text(config.text)).await?;
    say!("{}", summary(&answer.finish));
    Ok(())
}

/// A connection to a router, with the options of the command line.
pub struct Client {
    inference: InferenceClient<Channel>,
    /// gRPC's.
    url: String,
    metadata: MetadataMap,
    options: Sampling,
}

/// A finished answer.
pub struct Answer {
    /// All of it.
    pub text: String,
    /// Reason, counts, timings.
    pub finish: v1::Finish,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens there.
    pub async fn connect(options: Sampling) -> anyhow::Result<Self> {
        let metadata = options.router.headers.grpc()?;
        let url = options.router.grpc_url().await?;
        let channel = options.router.channel(&url).await?;
        let inference = InferenceClient::new(channel).max_decoding_message_size(tandem_proto::MAX_MESSAGE_BYTES);
        Ok(Self { inference, url, metadata, options })
    }

    /// Asks, prints the text as it comes, and returns all of it.
    ///
    /// # Errors
    /// The router's error, or an answer that ends without `finish`.
    pub async fn answer(&mut self, input: Input) -> anyhow::Result<Answer> {
        let mut request = Request::new(self.request(input));
        *request.metadata_mut() = self.metadata.clone();
        request.set_timeout(self.options.timeout);
        let mut stream = match self.inference.generate(request).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => return Err(self.refusal(status).await),
        };
        let mut text = String::new();
        while let Some(message) = stream.message().await.map_err(explain)? {
            let part = match &message.event {
                Some(Event::Token(token)) => &token.text,
                Some(Event::Finish(finish)) => &finish.text,
                None => continue,
            };
            print(part)?;
            text.push_str(part);
            if let Some(Event::Finish(finish)) = message.event {
                print("\n")?;
                return Ok(Answer { text, finish });
            }
        }
        bail!("the answer ended without a last message")
    }

    /// What came of the transport (it has a source) or knows no such call may have met the wrong port.
    async fn refusal(&self, status: Status) -> anyhow::Error {
        let may_be_elsewhere = std::error::Error::source(&status).is_some() || status.code() == Code::Unimplemented;
        let error = explain(status);
        match may_be_elsewhere {
            true => match wrong_port::hint(&self.url, self.options.router.cluster.as_ref()).await {
                Some(hint) => error.context(hint),
                None => error,
            },
            false => error,
        }
    }

    fn request(&self, input: Input) -> v1::GenerateRequest {
        let options = &self.options;
        let sampling = v1::Sampling {
            temperature: options.temperature,
            top_p: options.top_p,
            top_k: options.top_k,
            min_p: options.min_p,
            repetition_penalty: options.repetition_penalty,
            presence_penalty: options.presence_penalty,
            frequency_penalty: options.frequency_penalty,
            min_tokens: options.min_tokens,
            seed: options.seed,
            ..v1::Sampling::default()
        };
        v1::GenerateRequest {
            input: Some(input),
            max_tokens: Some(options.max_tokens),
            sampling: Some(sampling),
            stop: options.stop.clone(),
            ignore_eos: options.ignore_eos,
            ..v1::GenerateRequest::default()
        }
    }
}

/// One line of figures: first token, pace, transfer, trace.
pub fn summary(finish: &v1::Finish) -> String {
    let timings = finish.timings.clone().unwrap_or_default();
    let reason = match finish.reason() {
        v1::FinishReason::Stop => "stop",
        v1::FinishReason::Length => "length",
        v1::FinishReason::Unspecified => "unspecified",
    };
    let transfer = if timings.kv_bytes == 0 {
        "no KV transfer".to_owned()
    } else {
        format!("KV {:.2} MB over {}", timings.kv_bytes as f64 / 1e6, timings.kv_transport)
    };
    format!(
        "[{} prompt + {} new tokens, {reason} · TTFT {:.1} ms · TPOT {:.1} ms · {transfer} · trace {}]",
        finish.prompt_tokens, finish.completion_tokens, timings.ttft_ms, timings.tpot_ms, finish.trace_id,
    )
}

fn explain(status: Status) -> anyhow::Error {
    let message = if status.message().is_empty() { status.code().description() } else { status.message() };
    anyhow::anyhow!(wrong_port::with_causes(format!("{:?}: {message}", status.code()), &status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_what_matters() {
        let timings = v1::Timings {
            ttft_ms: 12.34,
            tpot_ms: 5.0,
            kv_bytes: 1_500_000,
            kv_transport: "ucx/posix".into(),
            ..Default::default()
        };
        let finish = v1::Finish {
            reason: v1::FinishReason::Length.into(),
            prompt_tokens: 3,
            completion_tokens: 4,
            timings: Some(timings),
            trace_id: "abc".into(),
            ..Default::default()
        };
        let line =
            "[3 prompt + 4 new tokens, length · TTFT 12.3 ms · TPOT 5.0 ms · KV 1.50 MB over ucx/posix · trace abc]";
        assert_eq!(summary(&finish), line);
    }
}
