//! The JSON of one event of a streamed answer: tokens, counts, Tandem's timings, an error; pure.
//!
//! What servers agree on is little, so only that is asked for: everything may be missing.
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::Usage;
use crate::record::{Nodes, Phases};

/// One event.
#[derive(Debug, Default, Deserialize)]
pub struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<UsageBody>,
    tandem: Option<Told>,
    error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Delta {
    content: Option<String>,
    /// What vLLM and others call the tokens before the answer proper.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
}

#[derive(Debug, Deserialize)]
struct UsageBody {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    prompt_tokens_details: Option<Details>,
}

#[derive(Debug, Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

/// What a server says under `tandem`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Told {
    /// Of the one answer.
    One(Box<Tandem>),
    /// Of several answers to one request (`n`), by their index.
    Several(Vec<Tandem>),
    /// Nothing of ours.
    Other(IgnoredAny),
}

/// The timings' fields stand beside the trace's id.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Tandem {
    trace_id: Option<String>,
    #[serde(flatten)]
    timings: Timings,
}

/// As `v1::Timings` names them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Timings {
    queue_ms: f64,
    route_ms: f64,
    prefill_ms: f64,
    /// Without it, no timings were sent.
    ttft_ms: Option<f64>,
    transfer_exposed_ms: f64,
    transfer_total_ms: f64,
    decode_ms: f64,
    handoff_gap_ms: f64,
    kv_bytes: u64,
    kv_gbps: f64,
    predicted_ttft_ms: f64,
    prefill_instance: String,
    decode_instance: String,
}

/// Which chunks carry a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenRule {
    /// Tandem: each without a reason to end, with text or without (a character may be in parts).
    Unfinished,
    /// Everybody else: each with text.
    WithText,
}

impl Chunk {
    /// Tokens that it carries: 1, or none.
    pub fn tokens(&self, rule: TokenRule) -> u32 {
        let carries = |choice: &Choice| match rule {
            TokenRule::Unfinished => choice.finish_reason.is_none(),
            TokenRule::WithText => choice.has_text(),
        };
        u32::from(self.choices.iter().any(carries))
    }

    /// Counts, where it has them.
    pub fn usage(&self) -> Option<Usage> {
        let usage = self.usage.as_ref()?;
        let cached = usage.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens);
        Some(Usage { prompt: usage.prompt_tokens, cached: cached.unwrap_or(0), completion: usage.completion_tokens })
    }

    /// Where the time went, from a Tandem server.
    pub fn phases(&self) -> Option<Phases> {
        let timings = &self.told()?.timings;
        Some(Phases {
            queue_ms: timings.queue_ms,
            route_ms: timings.route_ms,
            prefill_ms: timings.prefill_ms,
            ttft_ms: timings.ttft_ms?,
            transfer_exposed_ms: timings.transfer_exposed_ms,
            transfer_total_ms: timings.transfer_total_ms,
            decode_ms: timings.decode_ms,
            handoff_gap_ms: timings.handoff_gap_ms,
            kv_bytes: timings.kv_bytes,
            kv_gbps: timings.kv_gbps,
            predicted_ttft_ms: timings.predicted_ttft_ms,
            local: is_local(&timings.prefill_instance, &timings.decode_instance),
        })
    }

    /// The nodes that served it, from a Tandem server.
    pub fn nodes(&self) -> Option<Nodes> {
        let timings = &self.told()?.timings;
        Nodes::named(&timings.prefill_instance, &timings.decode_instance)
    }

    /// Of a Tandem server's trace.
    pub fn trace_id(&self) -> Option<&str> {
        self.told()?.trace_id.as_deref().filter(|id| !id.is_empty())
    }

    /// Of several answers the first: they share a prompt, and a record has room for one.
    fn told(&self) -> Option<&Tandem> {
        match self.tandem.as_ref()? {
            Told::One(tandem) => Some(tandem),
            Told::Several(answers) => answers.first(),
            Told::Other(_) => None,
        }
    }

    /// The server's error, for people.
    pub fn error(&self) -> Option<String> {
        let error = self.error.as_ref().filter(|error| !error.is_null())?;
        Some(error.get("message").and_then(Value::as_str).map_or_else(|| error.to_string(), str::to_owned))
    }
}

impl Choice {
    fn has_text(&self) -> bool {
        let delta = self.delta.as_ref();
        let of_delta = |field: fn(&Delta) -> &Option<String>| delta.and_then(|delta| field(delta).as_ref());
        let texts = [
            self.text.as_ref(),
            of_delta(|delta| &delta.content),
            of_delta(|delta| &delta.reasoning_content),
            of_delta(|delta| &delta.reasoning),
        ];
        texts.into_iter().flatten().any(|text| !text.is_empty())
    }
}

/// Whether decode prefilled the prompt itself, by the names of the two nodes.
pub fn is_local(prefill_instance: &str, decode_instance: &str) -> bool {
    !decode_instance.is_empty() && (prefill_instance.is_empty() || prefill_instance == decode_instance)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(json: &str) -> Chunk {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn tokens_of_tandems_and_of_others_chunks() {
        let cases = [
            (r#"{"choices":[{"text":" a","finish_reason":null}]}"#, 1, 1),
            (r#"{"choices":[{"text":"","finish_reason":null}]}"#, 1, 0),
            (r#"{"choices":[{"text":"x","finish_reason":"length"}]}"#, 0, 1),
            (r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#, 1, 0),
            (r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, 1, 1),
            (r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#, 0, 0),
            (r#"{"choices":[],"usage":null}"#, 0, 0),
        ];
        for (json, tandem, others) in cases {
            let chunk = chunk(json);
            assert_eq!(
                (chunk.tokens(TokenRule::Unfinished), chunk.tokens(TokenRule::WithText)),
                (tandem, others),
                "{json}"
            );
        }
    }

    #[test]
    fn counts_timings_and_errors() {
        let last = chunk(
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":8}},
                "tandem":{"queue_ms":1.5,"ttft_ms":2,"kv_bytes":7,"prefill_instance":"decode-0","decode_instance":"decode-0","new":[],"trace_id":"ab"}}"#,
        );
        assert_eq!(last.usage(), Some(Usage { prompt: 9, cached: 8, completion: 4 }));
        assert_eq!(
            last.phases(),
            Some(Phases { queue_ms: 1.5, ttft_ms: 2.0, kv_bytes: 7, local: true, ..Phases::default() })
        );
        assert_eq!(last.trace_id(), Some("ab"));
        assert_eq!(chunk(r#"{"error":{"message":"full"}}"#).error().as_deref(), Some("full"));
        assert_eq!(chunk(r#"{"error":"full"}"#).error().as_deref(), Some("\"full\""));
        assert_eq!(chunk(r#"{"error":null}"#).error(), None);
        let bare = chunk(r#"{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}"#);
        assert_eq!(bare.usage(), Some(Usage { prompt: 3, cached: 0, completion: 0 }));
    }

    /// The file is what the router's own test compares its answers with.
    #[test]
    fn timings_are_read_as_the_router_sends_them() {
        let one = include_str!("../../../../router/src/http/timings.json");
        let wanted = Phases {
            queue_ms: 1.5,
            route_ms: 0.25,
            prefill_ms: 40.0,
            ttft_ms: 42.5,
            transfer_exposed_ms: 2.0,
            transfer_total_ms: 9.0,
            decode_ms: 300.0,
            handoff_gap_ms: 15.0,
            kv_bytes: 4_194_304,
            kv_gbps: 2.5,
            predicted_ttft_ms: 38.0,
            local: false,
        };
        let nodes = Nodes { prefill: Some("prefill-0".into()), decode: Some("decode-1".into()) };
        for told in [one.to_owned(), format!("[{one},{one}]")] {
            let last = chunk(&format!(r#"{{"choices":[],"tandem":{told}}}"#));
            assert_eq!((last.phases(), last.nodes()), (Some(wanted), Some(nodes.clone())), "{told}");
            assert_eq!(last.trace_id(), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
        }
        for nothing in ["{}", "[]", "null", "7", r#"{"trace_id":"ab"}"#, r#"{"queue_ms":null}"#] {
            let last = chunk(&format!(r#"{{"choices":[],"tandem":{nothing}}}"#));
            assert_eq!((last.phases(), last.nodes()), (None, None), "{nothing}");
        }
    }
}
