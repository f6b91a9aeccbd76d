//! One request in one line, out of the router's own spans of it. Pure: a row says no more than the trace does.
use serde::Serialize;
use tandem_proto::trace::hex;
use tandem_proto::v1::{self, any_value};

/// Milliseconds are written with so many parts.
const PARTS: f64 = 1e3;

/// A request that ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// Of its root span, which is its own; a trace may have several requests.
    pub id: String,
    /// 32 hexadecimal digits.
    pub trace: String,
    /// The client's.
    pub request: String,
    /// Unix milliseconds when it came.
    pub at_ms: u64,
    /// `pair` or `local`; empty where no nodes were chosen.
    pub plan: String,
    /// Who computed the prompt.
    pub prefill: String,
    /// Who generated.
    pub decode: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// How it ended: a finish reason, or the kind of the error.
    pub outcome: String,
    /// Why it failed; empty: it did not.
    pub error: String,
    /// Times that it went on with other nodes.
    pub replans: u64,
    /// To the first token, if there was one.
    pub ttft_ms: Option<f64>,
    /// For each further token.
    pub tpot_ms: Option<f64>,
    /// To its end.
    pub e2e_ms: f64,
    /// Until it started.
    pub queue_ms: f64,
    /// Until nodes were chosen.
    pub route_ms: f64,
    /// Until the first token.
    pub prefill_ms: f64,
    /// From then until its KV was there.
    pub exposed_ms: f64,
    /// Of the transfer, what the computation of the prompt hid.
    pub hidden_ms: f64,
    /// From then to its end.
    pub decode_ms: f64,
}

impl Row {
    /// The requests of all these traces, at most so many: the last ones.
    pub fn read(traces: impl Iterator<Item = Vec<v1::Span>>, most: usize) -> Vec<Self> {
        let mut rows: Vec<Self> = traces.flat_map(|spans| Self::of(&spans)).collect();
        rows.sort_by_key(Self::ended_ms);
        rows.split_off(rows.len().saturating_sub(most))
    }

    /// Unix milliseconds when it ended.
    pub fn ended_ms(&self) -> u64 {
        self.at_ms + self.e2e_ms as u64
    }

    /// The requests of these spans.
    fn of(spans: &[v1::Span]) -> Vec<Self> {
        let roots = spans.iter().filter(|span| text(span, "tandem.request_id").is_some());
        roots.map(|root| Self::of_root(root, spans)).collect()
    }

    fn of_root(root: &v1::Span, spans: &[v1::Span]) -> Self {
        let told = |key: &str| text(root, key).unwrap_or_default().to_owned();
        let count = |key: &str| number(root, key).unwrap_or(0.0) as u64;
        let phase = |name: &str| {
            let of_root = |span: &&v1::Span| span.name == name && span.parent_span_id == root.span_id;
            spans.iter().filter(of_root).map(length_ms).sum()
        };
        let outcome = text(root, "error.type").or_else(|| text(root, "gen_ai.response.finish_reasons"));
        Self {
            id: hex(&root.span_id),
            trace: hex(&root.trace_id),
            request: told("tandem.request_id"),
            at_ms: root.start_unix_ns / 1_000_000,
            plan: told("tandem.route.plan"),
            prefill: told("tandem.prefill.instance"),
            decode: told("tandem.decode.instance"),
            prompt_tokens: count("gen_ai.usage.input_tokens"),
            output_tokens: count("gen_ai.usage.output_tokens"),
            outcome: outcome.unwrap_or("ended").to_owned(),
            error: root.error().to_owned(),
            replans: count("tandem.replans"),
            ttft_ms: number(root, "tandem.ttft_ms").map(parts),
            tpot_ms: number(root, "tandem.tpot_ms").map(parts),
            e2e_ms: length_ms(root),
            queue_ms: phase("queue"),
            route_ms: phase("route"),
            prefill_ms: phase("prefill"),
            exposed_ms: phase("transfer"),
            hidden_ms: parts(number(root, "tandem.kv.hidden_ms").unwrap_or(0.0)),
            decode_ms: phase("decode"),
        }
    }
}

fn length_ms(span: &v1::Span) -> f64 {
    parts(span.end_unix_ns.saturating_sub(span.start_unix_ns) as f64 / 1e6)
}

fn parts(ms: f64) -> f64 {
    (ms * PARTS).round() / PARTS
}

fn value<'a>(span: &'a v1::Span, key: &str) -> Option<&'a any_value::Value> {
    span.attributes.iter().find(|attribute| attribute.key == key)?.said()
}

fn text<'a>(span: &'a v1::Span, key: &str) -> Option<&'a str> {
    match value(span, key)? {
        any_value::Value::Text(text) => Some(text),
        any_value::Value::Texts(list) => Some(&list.items.first()?.text),
        _ => None,
    }
}

fn number(span: &v1::Span, key: &str) -> Option<f64> {
    match value(span, key)? {
        any_value::Value::Integer(integer) => Some(*integer as f64),
        any_value::Value::Number(number) => Some(*number),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tandem_proto::spans::FAILED;

    use super::*;

    const START_NS: u64 = 1_790_000_000_000_000_000;

    fn attribute(key: &str, value: any_value::Value) -> v1::Attribute {
        v1::Attribute { key: key.into(), value: Some(v1::AnyValue { value: Some(value) }) }
    }

    /// A span `from_ms` to `to_ms` after the start.
    fn span(name: &str, id: u8, parent: u8, from_ms: u64, to_ms: u64) -> v1::Span {
        v1::Span {
            trace_id: vec![7; 16],
            span_id: vec![id; 8],
            parent_span_id: vec![parent; 8],
            name: name.into(),
            start_unix_ns: START_NS + from_ms * 1_000_000,
            end_unix_ns: START_NS + to_ms * 1_000_000,
            ..v1::Span::default()
        }
    }

    fn request() -> Vec<v1::Span> {
        use any_value::Value::{Integer, Number, Text, Texts};
        let mut root = span("chat m", 1, 9, 0, 100);
        root.attributes = vec![
            attribute("tandem.request_id", Text("req-1".into())),
            attribute("tandem.route.plan", Text("pair".into())),
            attribute("tandem.decode.instance", Text("d0".into())),
            attribute("tandem.ttft_ms", Number(40.000_04)),
            attribute("tandem.kv.hidden_ms", Number(1.5)),
            attribute("gen_ai.usage.input_tokens", Integer(12)),
            attribute(
                "gen_ai.response.finish_reasons",
                Texts(v1::TextList { items: vec![v1::Text { text: "stop".into() }] }),
            ),
        ];
        vec![
            span("queue", 2, 1, 0, 3),
            span("route", 3, 1, 3, 4),
            span("prefill", 4, 1, 4, 40),
            span("prefill", 5, 4, 5, 39),
            span("transfer", 6, 1, 40, 42),
            span("decode", 7, 1, 42, 100),
            root,
        ]
    }

    #[test]
    fn a_request_is_told_in_one_line() {
        let rows = Row::read([request()].into_iter(), 10);
        let row = Row {
            id: "01".repeat(8),
            trace: "07".repeat(16),
            request: "req-1".into(),
            at_ms: START_NS / 1_000_000,
            plan: "pair".into(),
            decode: "d0".into(),
            prompt_tokens: 12,
            outcome: "stop".into(),
            ttft_ms: Some(40.0),
            e2e_ms: 100.0,
            queue_ms: 3.0,
            route_ms: 1.0,
            prefill_ms: 36.0,
            exposed_ms: 2.0,
            hidden_ms: 1.5,
            decode_ms: 58.0,
            ..Row::default()
        };
        assert_eq!(rows, [row]);
    }

    #[test]
    fn requests_of_one_trace_are_several_and_the_last_ones_count() {
        let mut failed = span("chat m", 8, 9, 200, 210);
        failed.attributes = vec![
            attribute("tandem.request_id", any_value::Value::Text("req-2".into())),
            attribute("error.type", any_value::Value::Text("Overloaded".into())),
        ];
        failed.status = Some(v1::SpanStatus { message: "too many".into(), code: FAILED });
        let spans = || [request(), vec![failed.clone(), span("queue", 10, 8, 200, 210)]].concat();
        let rows = Row::read([spans()].into_iter(), 10);
        assert_eq!((rows.len(), rows[1].outcome.as_str(), rows[1].queue_ms), (2, "Overloaded", 10.0));
        assert_eq!((rows[1].error.as_str(), rows[1].ttft_ms), ("too many", None));
        let last = Row::read([spans()].into_iter(), 1);
        assert_eq!(last, [rows[1].clone()]);
        assert!(Row::read([vec![span("decode", 1, 2, 0, 1)]].into_iter(), 10).is_empty(), "no request of ours");
    }
}
