//! One request to a server and what is heard of it: the part that [`grpc`] and [`http`] have in common.
//!
//! A [`Call`] is made ahead of its time, with all bytes ready, and sent once. Whatever happens ends as an
//! [`Outcome`]; a server that hangs or dies costs a record, never the run.
//!
//! - [`http`]: OpenAI's streams, of any server; [`chunk`] reads their JSON, [`tandem_client::sse`] finds it in the
//!   bytes.
//! - [`grpc`]: Tandem's own service, `tandem.v1.Inference`.
pub mod chunk;
pub mod grpc;
pub mod http;

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::metronome::Clock;
use super::prompt::Prompt;
use super::record::{Nodes, Outcome, Phases};

/// Messages of errors are kept up to this length, characters.
const MESSAGE_CHARACTERS: usize = 300;
/// Chunks that an answer may have beyond its tokens: a stream that never ends is no answer.
const SPARE_CHUNKS: usize = 1_024;

/// A server, by the API that it is asked through.
#[derive(Clone)]
pub enum Client {
    /// OpenAI's HTTP API.
    Http(http::HttpClient),
    /// Tandem's own.
    Grpc(grpc::GrpcClient),
}

/// A request that is ready to go.
pub enum Call {
    /// Over HTTP.
    Http(Box<http::HttpCall>),
    /// Over gRPC.
    Grpc(Box<grpc::GrpcCall>),
}

/// How every request of a run is asked, beside its prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Asking {
    /// Name of the model; empty: the only one.
    pub model: String,
    /// Go on to the last token wanted.
    pub ignore_eos: bool,
    /// Bound of one whole answer.
    pub timeout: Duration,
}

/// What came back, so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heard {
    /// When the request was handed to the connection, seconds of the run.
    pub sent_s: f64,
    /// Arrival and number of tokens of each chunk that had some.
    pub chunks: Vec<(f64, u32)>,
    /// Counts by the server itself.
    pub usage: Option<Usage>,
    /// Where the time went, by the server itself.
    pub phases: Option<Phases>,
    /// The nodes that served it, by the server itself.
    pub nodes: Option<Nodes>,
    /// Of the server's trace.
    pub trace_id: Option<String>,
}

/// Tokens as the server counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt: u32,
    /// Of the prompt, those that were cached; 0 where it does not say.
    pub cached: u32,
    /// Of the answer.
    pub completion: u32,
}

impl Client {
    /// Makes the bytes of a request.
    ///
    /// # Errors
    /// A request that HTTP cannot carry.
    pub fn call(&self, prompt: Prompt, max_tokens: u32) -> anyhow::Result<Call> {
        Ok(match self {
            Self::Http(client) => Call::Http(Box::new(client.call(prompt, max_tokens)?)),
            Self::Grpc(client) => Call::Grpc(Box::new(client.call(prompt, max_tokens))),
        })
    }
}

impl Call {
    /// Sends and reads to the end, to the timeout, or until `stop`.
    pub async fn ask(self, clock: Clock, timeout: Duration, stop: &CancellationToken) -> (Heard, Outcome) {
        let mut heard = Heard::default();
        let answered = async {
            match self {
                Self::Http(call) => call.send(clock, &mut heard).await,
                Self::Grpc(call) => call.send(clock, timeout, &mut heard).await,
            }
        };
        let outcome = tokio::select! {
            biased;
            outcome = tokio::time::timeout(timeout, answered) => match outcome {
                Ok(Ok(())) => Outcome::Ok,
                Ok(Err(outcome)) => outcome,
                Err(_) => failed("timeout", format!("no end within {} s", timeout.as_secs_f64())),
            },
            () = stop.cancelled() => Outcome::Unfinished,
        };
        (heard, outcome)
    }
}

impl Heard {
    /// Notes a chunk of `tokens` that has just come; an answer longer than was asked for is an error.
    fn tokens(&mut self, now_s: f64, tokens: u32, max_tokens: u32) -> Result<(), Outcome> {
        if self.chunks.len() >= max_tokens as usize + SPARE_CHUNKS {
            return Err(failed("too long", format!("more chunks than {max_tokens} tokens can fill")));
        }
        self.chunks.push((now_s, tokens));
        Ok(())
    }

    /// Where the server's count is another than that of the chunks (several tokens in one, or an end without one), its
    /// count is right: it is spread over the chunks, and chunks for which nothing is left go.
    fn settle(&mut self) -> Result<(), Outcome> {
        let counted: u32 = self.chunks.iter().map(|(_, tokens)| tokens).sum();
        if self.chunks.is_empty() {
            return Err(failed("empty", "the answer ended well, without a token".to_owned()));
        }
        let Some(said) = self.usage.map(|usage| usage.completion).filter(|said| *said > 0 && *said != counted) else {
            return Ok(());
        };
        let chunks = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        let (each, more) = (said / chunks, said % chunks);
        // The first chunk of an answer is one token where any is: the surplus goes to the later ones.
        let first_with_more = if each == 0 { 0 } else { chunks - more };
        for (index, (_, tokens)) in (0..).zip(&mut self.chunks) {
            let one_more = if each == 0 { index < more } else { index >= first_with_more };
            *tokens = each + u32::from(one_more);
        }
        self.chunks.retain(|(_, tokens)| *tokens > 0);
        Ok(())
    }
}

/// A failure of this kind; the message cut to a sane length.
pub fn failed(kind: &str, message: String) -> Outcome {
    let message: String = message.chars().take(MESSAGE_CHARACTERS).collect();
    Outcome::Failed { kind: kind.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(chunks: &[u32], completion: u32) -> Vec<u32> {
        let chunks = chunks.iter().map(|tokens| (0.0, *tokens)).collect();
        let usage = Some(Usage { completion, ..Usage::default() });
        let mut heard = Heard { chunks, usage, ..Heard::default() };
        heard.settle().unwrap();
        heard.chunks.into_iter().map(|(_, tokens)| tokens).collect()
    }

    #[test]
    fn the_servers_count_of_tokens_is_right() {
        assert_eq!(settled(&[1, 1, 1], 3), [1, 1, 1]);
        assert_eq!(settled(&[1, 1, 1], 5), [1, 2, 2]);
        assert_eq!(settled(&[1, 1, 1], 2), [1, 1]);
        assert_eq!(settled(&[1, 1], 6), [3, 3]);
        assert_eq!(settled(&[1, 1], 0), [1, 1], "a server that counts nothing says nothing");
    }

    #[test]
    fn an_answer_has_tokens_and_an_end() {
        assert!(matches!(Heard::default().settle(), Err(Outcome::Failed { kind, .. }) if kind == "empty"));
        let mut heard = Heard::default();
        assert!((0..4 + SPARE_CHUNKS).all(|_| heard.tokens(0.0, 1, 4).is_ok()));
        assert!(heard.tokens(0.0, 1, 4).is_err());
    }

    #[test]
    fn messages_are_short() {
        let Outcome::Failed { message, .. } = failed("k", "é".repeat(10_000)) else { panic!() };
        assert_eq!(message.chars().count(), MESSAGE_CHARACTERS);
    }
}
