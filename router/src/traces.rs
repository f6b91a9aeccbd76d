//! The recent traces, so that `tandem trace` and `/api/traces` work without a collector. Bounded in traces and in spans;
//! the oldest goes first. Knows nothing of what the spans mean.
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value, json};
use tandem_proto::trace::hex;
use tandem_proto::v1::{self, attribute};

/// Traces kept.
const MAX_TRACES: usize = 1_000;
/// Spans kept of one trace.
const MAX_SPANS: usize = 256;

type TraceId = [u8; 16];

/// Handle to the ring.
#[derive(Clone, Debug, Default)]
pub struct Traces {
    ring: Arc<Mutex<Ring>>,
}

#[derive(Debug, Default)]
struct Ring {
    spans: HashMap<TraceId, Vec<v1::Span>>,
    /// By age; the newest is at the back.
    order: VecDeque<TraceId>,
}

impl Traces {
    /// Adds the spans of a request that ended; spans of another trace are left out. It is the last one now.
    pub fn finish(&self, trace_id: TraceId, spans: impl IntoIterator<Item = v1::Span>) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let Ring { spans: kept, order } = &mut *ring;
        // A client may send several requests under one trace: they share an entry.
        order.retain(|id| *id != trace_id);
        order.push_back(trace_id);
        add(kept.entry(trace_id).or_default(), trace_id, spans);
        while order.len() > MAX_TRACES {
            if let Some(oldest) = order.pop_front() {
                kept.remove(&oldest);
            }
        }
    }

    /// Adds what became known after the end of a request, if its trace is still here. The last one stays the last one.
    pub fn complete(&self, trace_id: TraceId, spans: impl IntoIterator<Item = v1::Span>) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = ring.spans.get_mut(&trace_id) {
            add(entry, trace_id, spans);
        }
    }

    /// A trace by its 32 hexadecimal digits, or the "last" one that ended.
    pub fn json(&self, id: &str) -> Option<Value> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let trace_id = match id {
            "last" => *ring.order.back()?,
            digits => parse(digits)?,
        };
        let mut spans: Vec<&v1::Span> = ring.spans.get(&trace_id)?.iter().collect();
        spans.sort_by_key(|span| (span.start_unix_ns, std::cmp::Reverse(span.end_unix_ns)));
        let spans: Vec<Value> = spans.into_iter().map(span_json).collect();
        Some(json!({ "trace_id": hex(&trace_id), "spans": spans }))
    }
}

fn add(entry: &mut Vec<v1::Span>, trace_id: TraceId, spans: impl IntoIterator<Item = v1::Span>) {
    let room = MAX_SPANS.saturating_sub(entry.len());
    entry.extend(spans.into_iter().filter(|span| span.trace_id == trace_id).take(room));
}

fn parse(digits: &str) -> Option<TraceId> {
    let valid = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    valid.then(|| u128::from_str_radix(digits, 16).ok()).flatten().map(u128::to_be_bytes)
}

fn span_json(span: &v1::Span) -> Value {
    let events = span.events.iter().map(|event| {
        json!({ "name": event.name, "unix_ns": event.unix_ns, "attributes": attributes_json(&event.attributes) })
    });
    let links = span.links.iter().map(|link| json!({ "trace_id": hex(&link.trace_id), "span_id": hex(&link.span_id) }));
    json!({
        "name": span.name,
        "kind": span.kind,
        "service": span.service,
        "instance": span.instance,
        "span_id": hex(&span.span_id),
        "parent_span_id": hex(&span.parent_span_id),
        "start_unix_ns": span.start_unix_ns,
        "end_unix_ns": span.end_unix_ns,
        "attributes": attributes_json(&span.attributes),
        "events": events.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
        "error": span.error,
    })
}

fn attributes_json(attributes: &[v1::Attribute]) -> Value {
    let pairs = attributes.iter().filter_map(|attribute| {
        let value = match attribute.value.as_ref()? {
            attribute::Value::Text(text) => json!(text),
            attribute::Value::Texts(list) => json!(list.items),
            attribute::Value::Integer(integer) => json!(integer),
            attribute::Value::Number(number) => json!(number),
            attribute::Value::Flag(flag) => json!(flag),
        };
        Some((attribute.key.clone(), value))
    });
    Value::Object(pairs.collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> TraceId {
        u128::from(number + 1).to_be_bytes()
    }

    fn span(trace_id: TraceId, name: &str) -> v1::Span {
        v1::Span { trace_id: trace_id.to_vec(), name: name.into(), ..v1::Span::default() }
    }

    #[test]
    fn keeps_the_recent_ones() {
        let traces = Traces::default();
        for number in 0..1_100 {
            traces.finish(id(number), [span(id(number), "a"), span(id(0), "a stranger's")]);
        }
        assert!(traces.json(&hex(&id(99))).is_none());
        let last = traces.json("last").unwrap();
        assert_eq!((&last["trace_id"], last["spans"].as_array().unwrap().len()), (&json!(hex(&id(1_099))), 1));
    }

    #[test]
    fn spans_of_one_trace_are_bounded() {
        let traces = Traces::default();
        for _ in 0..3 {
            traces.finish(id(1), (0..200).map(|_| span(id(1), "a")));
        }
        assert_eq!(traces.json("last").unwrap()["spans"].as_array().unwrap().len(), MAX_SPANS);
    }

    #[test]
    fn late_spans_join_their_trace_and_change_no_order() {
        let traces = Traces::default();
        traces.finish(id(1), [span(id(1), "a")]);
        traces.finish(id(2), [span(id(2), "a")]);
        traces.complete(id(1), [span(id(1), "late"), span(id(2), "a stranger's")]);
        traces.complete(id(3), [span(id(3), "forgotten")]);
        assert_eq!(traces.json(&hex(&id(1))).unwrap()["spans"].as_array().unwrap().len(), 2);
        assert_eq!(traces.json("last").unwrap()["trace_id"], json!(hex(&id(2))));
        assert!(traces.json(&hex(&id(3))).is_none());
    }

    #[test]
    fn nonsense_is_not_found() {
        let traces = Traces::default();
        for id in ["last", "", "+0000000000000000000000000000001", "x", "é"] {
            assert!(traces.json(id).is_none(), "{id}");
        }
    }
}
