//! The recent traces, so that `tandem trace` and `/api/traces` work without a collector. Bounded in traces and in spans;
//! the oldest goes first. Knows nothing of what the spans mean. `jaeger` tells them as Jaeger does.
mod jaeger;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value, json};
use tandem_proto::trace::hex;
use tandem_proto::v1::{self, attribute};

/// Traces kept.
const MAX_TRACES: usize = 1_000;
/// Spans kept of one trace.
const MAX_SPANS: usize = 256;
/// Traces in one answer at most.
const MAX_FOUND: usize = 100;

type TraceId = [u8; 16];

/// Which traces are looked for; empty matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// A span of this service...
    pub service: String,
    /// ...and this name.
    pub operation: String,
    /// How many, the newest first; 0 is 20, and 100 is the most.
    pub limit: usize,
}

/// In which words traces are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `{"data": […]}` of Jaeger's `/api/traces`.
    Classic,
    /// `{"result": {"resourceSpans": […]}}` of `/api/v3/traces`.
    Otlp,
    /// `{"summaries": […]}` of `/api/v3/trace-summaries`.
    Summary,
}

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
        let data = [jaeger::classic(&hex(&trace_id), &spans)];
        let spans: Vec<Value> = spans.into_iter().map(span_json).collect();
        // Ours, and Jaeger's beside it.
        Some(json!({ "trace_id": hex(&trace_id), "spans": spans, "data": data }))
    }

    /// One trace by its 32 hexadecimal digits, in one of Jaeger's forms.
    pub fn one(&self, id: &str, form: Form) -> Option<Value> {
        let trace_id = parse(id)?;
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let spans: Vec<&v1::Span> = ring.spans.get(&trace_id)?.iter().collect();
        Some(told([(trace_id, spans)].into(), form))
    }

    /// The newest traces that match.
    pub fn find(&self, query: &Query, form: Form) -> Value {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let matches = |span: &v1::Span| {
            (query.service.is_empty() || span.service == query.service)
                && (query.operation.is_empty() || span.name == query.operation)
        };
        let limit = if query.limit == 0 { 20 } else { query.limit.min(MAX_FOUND) };
        let traces = ring.order.iter().rev().filter_map(|id| {
            let spans = ring.spans.get(id)?;
            spans.iter().any(matches).then(|| (*id, spans.iter().collect()))
        });
        told(traces.take(limit).collect(), form)
    }

    /// The services that have spans here.
    pub fn services(&self) -> BTreeSet<String> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.spans.values().flatten().map(|span| span.service.clone()).collect()
    }

    /// The names of the spans of `service`, each with its kind.
    pub fn operations(&self, service: &str) -> BTreeSet<(String, String)> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let spans = ring.spans.values().flatten().filter(|span| span.service == service);
        spans.map(|span| (span.name.clone(), span.kind.clone())).collect()
    }
}

fn told(traces: Vec<(TraceId, Vec<&v1::Span>)>, form: Form) -> Value {
    let each = |tell: fn(&str, &[&v1::Span]) -> Value| {
        traces.iter().map(|(id, spans)| tell(&hex(id), spans)).collect::<Vec<Value>>()
    };
    match form {
        Form::Classic => {
            json!({"data": each(jaeger::classic), "errors": null, "limit": 0, "offset": 0, "total": traces.len()})
        }
        Form::Summary => json!({"summaries": each(jaeger::summary)}),
        Form::Otlp => {
            let all: Vec<&v1::Span> = traces.iter().flat_map(|(_, spans)| spans.iter().copied()).collect();
            json!({"result": jaeger::otlp(&all)})
        }
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
    let pairs = attributes.iter().filter_map(|attribute| Some((attribute.key.clone(), value_json(attribute)?)));
    Value::Object(pairs.collect::<Map<_, _>>())
}

fn value_json(attribute: &v1::Attribute) -> Option<Value> {
    Some(match attribute.value.as_ref()? {
        attribute::Value::Text(text) => json!(text),
        attribute::Value::Texts(list) => json!(list.items),
        attribute::Value::Integer(integer) => json!(integer),
        attribute::Value::Number(number) => json!(number),
        attribute::Value::Flag(flag) => json!(flag),
    })
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
    fn jaeger_finds_services_operations_and_traces() {
        let traces = Traces::default();
        for number in 0..130 {
            let root = v1::Span {
                span_id: vec![1; 8],
                service: "tandem-router".into(),
                instance: "r0".into(),
                kind: "server".into(),
                start_unix_ns: 5_000,
                end_unix_ns: 25_000,
                attributes: vec![v1::Attribute { key: "n".into(), value: Some(attribute::Value::Integer(7)) }],
                ..span(id(number), "chat m")
            };
            let child = v1::Span {
                span_id: vec![2; 8],
                parent_span_id: vec![1; 8],
                service: "tandem-decode".into(),
                start_unix_ns: 6_000,
                end_unix_ns: 7_000,
                error: "no".into(),
                ..span(id(number), if number == 3 { "rare" } else { "decode" })
            };
            traces.finish(id(number), [child, root]);
        }
        assert_eq!(traces.services().into_iter().collect::<Vec<_>>(), ["tandem-decode", "tandem-router"]);
        assert_eq!(traces.operations("tandem-router"), [("chat m".to_owned(), "server".to_owned())].into());
        let count = |query: &Query| traces.find(query, Form::Classic)["data"].as_array().unwrap().len();
        assert_eq!(count(&Query::default()), 20);
        assert_eq!(count(&Query { limit: 9_999, ..Query::default() }), MAX_FOUND, "bounded");
        let rare = Query { service: "tandem-decode".into(), operation: "rare".into(), limit: 5 };
        assert_eq!(count(&rare), 1);
        assert_eq!(count(&Query { service: "tandem-router".into(), ..rare.clone() }), 0, "both of one span");

        let found = traces.find(&rare, Form::Classic);
        let (data, processes) = (&found["data"][0], &found["data"][0]["processes"]);
        assert_eq!(data["traceID"], hex(&id(3)));
        let child = data["spans"].as_array().unwrap().iter().find(|span| span["operationName"] == "rare").unwrap();
        assert_eq!(child["references"][0]["spanID"], "0101010101010101");
        assert_eq!((&child["startTime"], &child["duration"]), (&json!(6), &json!(1)));
        assert_eq!(processes[child["processID"].as_str().unwrap()]["serviceName"], "tandem-decode");
        assert!(child["tags"].as_array().unwrap().contains(&json!({"key": "error", "type": "bool", "value": true})));

        let otlp = traces.one(&hex(&id(3)), Form::Otlp).unwrap();
        let resources = otlp["result"]["resourceSpans"].as_array().unwrap();
        assert_eq!(resources.len(), 2);
        let root = &resources[1]["scopeSpans"][0]["spans"][0];
        assert_eq!((&root["kind"], &root["startTimeUnixNano"]), (&json!(2), &json!("5000")));
        assert_eq!(root["attributes"][0], json!({"key": "n", "value": {"intValue": "7"}}));

        let summary = &traces.find(&rare, Form::Summary)["summaries"][0];
        assert_eq!((&summary["rootSpanName"], &summary["durationNano"]), (&json!("chat m"), &json!("20000")));
        assert_eq!((&summary["spanCount"], &summary["errorSpanCount"]), (&json!(2), &json!(1)));
        assert_eq!(traces.one("nonsense", Form::Otlp), None);
    }

    #[test]
    fn nonsense_is_not_found() {
        let traces = Traces::default();
        for id in ["last", "", "+0000000000000000000000000000001", "x", "é"] {
            assert!(traces.json(id).is_none(), "{id}");
        }
    }
}
