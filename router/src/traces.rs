//! The recent traces, so that `tandem trace` and `/api/traces` work without a collector. Bounded in traces, spans and
//! bytes; `ring` says which stay. Spans come about when somebody looks or a collector gets them: the router's are told
//! by the request's record, nodes' stay the bytes that came, and `nesting` puts them into the router's. Only who looks
//! decodes them. Knows nothing of what they mean. `jaeger` tells them as Jaeger does.
mod jaeger;
mod jaeger_ui;
mod nesting;
pub mod query;
mod ring;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value, json};
use tandem_proto::spans::{raw, unpack};
use tandem_proto::trace::hex;
use tandem_proto::v1::{self, any_value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use jaeger_ui::JaegerUi;
use nesting::nest;
use query::Query;
pub use ring::{Class, DEFAULT_RING};
use ring::{Early, Ring, TraceId};

/// Spans of one trace: the router's, and as many of nodes.
const MAX_SPANS: usize = 256;
/// Requests of one trace: none has less than two spans, what failed and the root.
const MAX_REQUESTS: usize = MAX_SPANS / 2;
/// Bytes kept of nodes' spans of one trace; a request without events has some 2 KiB.
const MAX_NODE_BYTES: usize = 256 << 10;
/// Traces in one answer at most.
const MAX_FOUND: usize = 100;

/// Tells the router's spans of one request, packed. What it holds has a bound.
pub type Own = Arc<dyn Fn() -> Vec<u8> + Send + Sync>;

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
#[derive(Clone)]
pub struct Traces {
    ring: Arc<Mutex<Held>>,
    /// Whose traces it shows; `None`: all.
    tenant: Option<Arc<str>>,
    /// Of those who read them: one at a time.
    turn: Arc<Semaphore>,
}

impl Default for Traces {
    fn default() -> Self {
        Self::new(DEFAULT_RING)
    }
}

struct Held {
    kept: Ring<Arc<Kept>>,
    /// Of requests that have not ended.
    early: Early,
    /// Requests that ended, those included whose trace is gone.
    finished: u64,
}

/// The router's spans of the traces with requests that ended lately.
pub struct Since {
    /// Requests that ended so far: what to ask with next.
    pub finished: u64,
    /// The oldest first. A trace has all its requests, older ones too.
    pub traces: Vec<Vec<Own>>,
}

/// A trace as it came. Whoever looks at it reads it outside the ring's lock.
#[derive(Clone, Default)]
struct Kept {
    own: Vec<Own>,
    /// Packed (`tandem_proto::spans`), of whatever trace the nodes say.
    of_nodes: Vec<u8>,
    /// Whose requests it has; `None`: of nobody who is known. Nearly always one.
    tenants: Vec<Option<Arc<str>>>,
    /// A collector gets what is still to come.
    exported: bool,
}

impl Kept {
    fn add(&mut self, own: Own, of_nodes: Vec<u8>) {
        if self.own.len() < MAX_REQUESTS {
            self.own.push(own);
        }
        append_pack(&mut self.of_nodes, of_nodes);
    }

    fn spans(&self, trace_id: TraceId) -> Vec<v1::Span> {
        unpack(&nested(trace_id, &self.own, &self.of_nodes)).collect()
    }
}

/// The router's spans of a trace, then the nodes', each within its parent, packed.
pub fn nested(trace_id: TraceId, own: &[Own], of_nodes: &[u8]) -> Vec<u8> {
    let own = own.iter().map(|own| own()).collect::<Vec<_>>().concat();
    let own: Vec<_> = raw(&own).take(MAX_SPANS).collect();
    let of_nodes: Vec<_> = raw(of_nodes).filter(|span| span.trace_id == trace_id).take(MAX_SPANS).collect();
    nest(&own, &of_nodes)
}

/// Puts one pack of nodes' spans behind another: whole or, where that would be too much, not at all. Behind a part of
/// one nothing could be read.
pub fn append_pack<'a>(spans: &mut Vec<u8>, more: impl Into<Cow<'a, [u8]>>) {
    let more = more.into();
    if spans.len() + more.len() > MAX_NODE_BYTES {
        return;
    }
    // The first one moves.
    if spans.is_empty() { *spans = more.into_owned() } else { spans.extend_from_slice(&more) }
}

/// How a request ended, as far as its trace is concerned.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Whose it was, where that is known.
    pub tenant: Option<Arc<str>>,
    /// What the trace says.
    pub class: Class,
    /// A collector gets the trace, and with it what is still to come.
    pub exported: bool,
}

impl Traces {
    /// Room for so many traces.
    pub fn new(most: usize) -> Self {
        let held = Held { kept: Ring::new(most), early: Early::default(), finished: 0 };
        Self { ring: Arc::new(Mutex::new(held)), tenant: None, turn: Arc::new(Semaphore::new(1)) }
    }

    /// The same ring, of which only the traces of one tenant are shown. A trace with another one's requests as well is
    /// nobody's: clients choose their traces' ids.
    pub fn of(&self, tenant: Option<Arc<str>>) -> Self {
        Self { tenant, ..self.clone() }
    }

    /// Adds the router's spans of a request that ended, and the nodes', packed; those of another trace are left out. It
    /// is the last one now. Gives back what came before outside of the request's calls.
    pub fn finish(&self, trace_id: TraceId, own: Own, of_nodes: Vec<u8>, ended: Ended) -> Vec<u8> {
        let mut held = self.lock();
        held.finished += 1;
        let early = held.early.take(trace_id);
        // A client may send several requests under one trace: they share an entry.
        let trace = Arc::make_mut(held.kept.renew(trace_id, ended.class));
        trace.add(own, of_nodes);
        append_pack(&mut trace.of_nodes, &early);
        trace.exported |= ended.exported;
        if !trace.tenants.contains(&ended.tenant) {
            trace.tenants.push(ended.tenant);
        }
        early
    }

    /// Adds what nodes told after the end of a request, if its trace is still here. The last one stays the last one.
    pub fn complete(&self, trace_id: TraceId, of_nodes: &[u8]) {
        if let Some(kept) = self.lock().kept.get_mut(&trace_id) {
            append_pack(&mut Arc::make_mut(kept).of_nodes, of_nodes);
        }
    }

    /// Takes packed spans of calls that ended without a last message. What belongs to a request that has ended is
    /// added, and given back where a collector gets it; the rest waits for the end of its request, within bounds.
    pub fn stray(&self, packed: &[u8]) -> Vec<u8> {
        let mut traces: HashMap<TraceId, (BTreeSet<&[u8]>, Vec<u8>)> = HashMap::new();
        for span in raw(packed) {
            if let Ok(trace_id) = TraceId::try_from(span.trace_id) {
                let (ids, packed) = traces.entry(trace_id).or_default();
                ids.insert(span.span_id);
                span.pass(packed);
            }
        }
        let mut of_exported = Vec::new();
        for (trace_id, (ids, packed)) in traces {
            let all = self.add_stray(trace_id, &packed).map(|kept| nested(trace_id, &kept.own, &kept.of_nodes));
            let all = all.unwrap_or_default();
            raw(&all).filter(|span| ids.contains(span.span_id)).for_each(|span| span.pass(&mut of_exported));
        }
        of_exported
    }

    /// The trace that they were added to, where a collector gets it.
    fn add_stray(&self, trace_id: TraceId, packed: &[u8]) -> Option<Arc<Kept>> {
        let mut held = self.lock();
        let Held { kept, early, .. } = &mut *held;
        let Some(kept) = kept.get_mut(&trace_id) else {
            append_pack(early.entry(trace_id), packed);
            return None;
        };
        append_pack(&mut Arc::make_mut(kept).of_nodes, packed);
        kept.exported.then(|| Arc::clone(kept))
    }

    /// A trace by its 32 hexadecimal digits, or the "last" one that ended.
    pub fn json(&self, id: &str) -> Option<Value> {
        let trace_id = match id {
            "last" if self.tenant.is_none() => self.lock().kept.last()?,
            "last" => self.newest_shown().first()?.0,
            digits => parse(digits)?,
        };
        let mut spans = self.spans(trace_id)?;
        spans.sort_by_key(|span| (span.start_unix_ns, std::cmp::Reverse(span.end_unix_ns)));
        let data = [jaeger::classic(&hex(&trace_id), &spans)];
        let spans: Vec<Value> = spans.iter().map(span_json).collect();
        // Ours, and Jaeger's beside it.
        Some(json!({ "trace_id": hex(&trace_id), "spans": spans, "data": data }))
    }

    /// One trace by its 32 hexadecimal digits, in one of Jaeger's forms.
    pub fn one(&self, id: &str, form: Form) -> Option<Value> {
        let trace_id = parse(id)?;
        Some(render(&[(trace_id, self.spans(trace_id)?)], form))
    }

    /// The newest traces, at most so many, with requests that ended when `finished` others had.
    pub fn since(&self, finished: u64, most: usize) -> Since {
        let held = self.lock();
        let ended = usize::try_from(held.finished.saturating_sub(finished)).unwrap_or(usize::MAX).min(most);
        let traces = held.kept.newest(ended).into_iter().rev().map(|(_, kept)| kept.own.clone()).collect();
        Since { finished: held.finished, traces }
    }

    /// The newest traces that match. Reads all traces where few match.
    pub fn find(&self, query: &Query, form: Form) -> Value {
        let limit = if query.limit == 0 { 20 } else { query.limit.min(MAX_FOUND) };
        let matching = self.newest_first().filter(|(_, spans)| spans.iter().any(|span| query.matches(span)));
        render(&matching.take(limit).collect::<Vec<_>>(), form)
    }

    /// The services that have spans here. Reads all traces.
    pub fn services(&self) -> BTreeSet<String> {
        self.newest_first().flat_map(|(_, spans)| spans).map(|span| span.service().to_owned()).collect()
    }

    /// The names of the spans of `service`, each with its kind. Reads all traces.
    pub fn operations(&self, service: &str) -> BTreeSet<(String, String)> {
        let spans = self.newest_first().flat_map(|(_, spans)| spans).filter(|span| span.service() == service);
        spans.map(|span| (span.name.clone(), span.kind_name().to_owned())).collect()
    }

    /// Waits until nobody else reads. `None`: never, and it does not happen.
    pub async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.turn).acquire_owned().await.ok()
    }

    fn spans(&self, trace_id: TraceId) -> Option<Vec<v1::Span>> {
        let kept = self.lock().kept.get(&trace_id).filter(|kept| self.shows(kept)).cloned()?;
        Some(kept.spans(trace_id))
    }

    fn newest_first(&self) -> impl Iterator<Item = (TraceId, Vec<v1::Span>)> + use<> {
        self.newest_shown().into_iter().map(|(id, kept)| (id, kept.spans(id)))
    }

    fn newest_shown(&self) -> Vec<(TraceId, Arc<Kept>)> {
        let held = self.lock();
        let shown = held.kept.newest_first().into_iter().filter(|(_, kept)| self.shows(kept));
        shown.map(|(id, kept)| (id, Arc::clone(kept))).collect()
    }

    fn shows(&self, kept: &Kept) -> bool {
        self.tenant.is_none() || kept.tenants.iter().all(|tenant| *tenant == self.tenant)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn render(traces: &[(TraceId, Vec<v1::Span>)], form: Form) -> Value {
    let each = |tell: fn(&str, &[v1::Span]) -> Value| {
        traces.iter().map(|(id, spans)| tell(&hex(id), spans)).collect::<Vec<Value>>()
    };
    match form {
        Form::Classic => {
            json!({"data": each(jaeger::classic), "errors": null, "limit": 0, "offset": 0, "total": traces.len()})
        }
        Form::Summary => json!({"summaries": each(jaeger::summary)}),
        Form::Otlp => json!({"result": jaeger::otlp(traces.iter().flat_map(|(_, spans)| spans))}),
    }
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
        "kind": span.kind_name(),
        "service": span.service(),
        "instance": span.instance(),
        "span_id": hex(&span.span_id),
        "parent_span_id": hex(&span.parent_span_id),
        "start_unix_ns": span.start_unix_ns,
        "end_unix_ns": span.end_unix_ns,
        "attributes": attributes_json(&span.attributes),
        "events": events.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
        "error": span.error(),
        "tracestate": span.tracestate,
    })
}

fn attributes_json(attributes: &[v1::Attribute]) -> Value {
    let pairs = attributes.iter().filter_map(|attribute| Some((attribute.key.clone(), value_json(attribute)?)));
    Value::Object(pairs.collect::<Map<_, _>>())
}

fn value_json(attribute: &v1::Attribute) -> Option<Value> {
    Some(match attribute.said()? {
        any_value::Value::Text(text) => json!(text),
        any_value::Value::Texts(list) => json!(list.texts()),
        any_value::Value::Integer(integer) => json!(integer),
        any_value::Value::Number(number) => json!(number),
        any_value::Value::Flag(flag) => json!(flag),
    })
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use tandem_proto::spans::FAILED;

    use super::*;

    fn id(number: u64) -> TraceId {
        u128::from(number + 1).to_be_bytes()
    }

    const USUAL: Ended = Ended { tenant: None, class: Class::Usual, exported: false };

    fn span(trace_id: TraceId, name: &str) -> v1::Span {
        v1::Span { trace_id: trace_id.to_vec(), span_id: vec![8; 8], name: name.into(), ..v1::Span::default() }
    }

    fn pack(spans: Vec<v1::Span>) -> Vec<u8> {
        v1::Spans { spans }.encode_to_vec()
    }

    fn numbered(number: u64, name: &str, span_id: u8) -> v1::Span {
        v1::Span { span_id: vec![span_id; 8], ..span(id(number), name) }
    }

    fn own(spans: Vec<v1::Span>) -> Own {
        Arc::new(move || pack(spans.clone()))
    }

    fn process(service: &str, instance: &str) -> Option<v1::Process> {
        Some(v1::Process { service: service.into(), instance: instance.into() })
    }

    #[test]
    fn keeps_the_recent_ones() {
        let traces = Traces::default();
        for number in 0..1_100 {
            let stranger = pack(vec![span(id(0), "a stranger's")]);
            traces.finish(id(number), own(vec![span(id(number), "a")]), stranger, USUAL);
        }
        assert!(traces.json(&hex(&id(99))).is_none());
        let last = traces.json("last").unwrap();
        assert_eq!((&last["trace_id"], last["spans"].as_array().unwrap().len()), (&json!(hex(&id(1_099))), 1));
    }

    #[test]
    fn who_looks_again_gets_what_ended_since() {
        let traces = Traces::default();
        let names = |since: &Since| {
            since
                .traces
                .iter()
                .flatten()
                .flat_map(|own| unpack(&own()).collect::<Vec<_>>())
                .map(|span| span.name)
                .collect::<Vec<_>>()
        };
        let finish = |number, name: &str| {
            traces.finish(id(number), own(vec![span(id(number), name)]), Vec::new(), USUAL);
        };
        assert!(traces.since(0, 10).traces.is_empty());
        [(1, "a"), (2, "b"), (3, "c")].into_iter().for_each(|(number, name)| finish(number, name));
        let first = traces.since(0, 2);
        assert_eq!((first.finished, names(&first)), (3, vec!["b".to_owned(), "c".to_owned()]), "the newest");
        assert!(traces.since(first.finished, 10).traces.is_empty());
        finish(1, "again");
        assert_eq!(names(&traces.since(first.finished, 10)), ["a", "again"], "all requests of the trace");
        assert_eq!(traces.since(u64::MAX, 10).finished, 4, "a count of another life");
    }

    #[test]
    fn spans_of_one_trace_are_bounded() {
        let traces = Traces::default();
        for number in [1, 2] {
            for _ in 0..3 {
                let many: Vec<_> = (0..200).map(|_| span(id(number), "a")).collect();
                let (own_spans, of_nodes) = if number == 1 { (many, Vec::new()) } else { (Vec::new(), pack(many)) };
                traces.finish(id(number), own(own_spans), of_nodes, USUAL);
            }
            assert_eq!(traces.json("last").unwrap()["spans"].as_array().unwrap().len(), MAX_SPANS);
        }
        // Each request has its place, with what its nodes told.
        for _ in 0..50 {
            let of = |spans| (0..spans).map(|_| span(id(3), "a")).collect::<Vec<_>>();
            traces.finish(id(3), own(of(6)), pack(of(5)), USUAL);
        }
        assert_eq!(traces.json("last").unwrap()["spans"].as_array().unwrap().len(), MAX_SPANS + 250);
        for _ in 0..MAX_REQUESTS {
            traces.finish(id(3), own(Vec::new()), Vec::new(), USUAL);
        }
        assert_eq!(traces.lock().kept.get(&id(3)).unwrap().own.len(), MAX_REQUESTS);
        let many = pack((0..10_000).map(|_| span(id(2), "a")).collect());
        (0..100).for_each(|_| traces.complete(id(2), &many));
        assert!(traces.lock().kept.get(&id(2)).unwrap().of_nodes.len() <= MAX_NODE_BYTES);
    }

    #[test]
    fn late_spans_join_their_trace_and_change_no_order() {
        let traces = Traces::default();
        traces.finish(id(1), own(vec![span(id(1), "a")]), Vec::new(), USUAL);
        traces.finish(id(2), own(vec![span(id(2), "a")]), Vec::new(), USUAL);
        traces.complete(id(1), &pack(vec![span(id(1), "late"), span(id(2), "a stranger's")]));
        traces.complete(id(3), &pack(vec![span(id(3), "forgotten")]));
        assert_eq!(traces.json(&hex(&id(1))).unwrap()["spans"].as_array().unwrap().len(), 2);
        assert_eq!(traces.json("last").unwrap()["trace_id"], json!(hex(&id(2))));
        assert!(traces.json(&hex(&id(3))).is_none());
    }

    #[test]
    fn spans_outside_of_a_call_wait_for_their_request_and_follow_it_to_the_collector() {
        let traces = Traces::default();
        assert!(traces.stray(&pack(vec![numbered(1, "cut off", 1), numbered(2, "cut off", 2)])).is_empty());
        assert_eq!(
            unpack(&traces.finish(
                id(1),
                own(vec![numbered(1, "chat", 9)]),
                Vec::new(),
                Ended { exported: true, ..USUAL }
            ))
            .count(),
            1
        );
        assert_eq!(traces.json(&hex(&id(1))).unwrap()["spans"].as_array().unwrap().len(), 2);
        assert!(traces.finish(id(3), own(vec![numbered(3, "chat", 9)]), Vec::new(), USUAL).is_empty());
        // What comes later goes where the trace went.
        let late = traces.stray(&pack(vec![numbered(1, "late", 3), numbered(3, "late", 4)]));
        let late: Vec<_> = unpack(&late).collect();
        let told: Vec<_> = late.iter().map(|span| (&*span.name, &*span.parent_span_id)).collect();
        assert_eq!(told, [("late", [9; 8].as_slice())]);
        assert_eq!(traces.json(&hex(&id(3))).unwrap()["spans"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn a_tenant_sees_its_own_traces_alone() {
        let traces = Traces::default();
        let of = |tenant: &str| Some(Arc::from(tenant));
        for (number, tenant) in [(1, of("a")), (2, of("b")), (3, None), (4, of("a")), (4, of("b")), (5, of("b"))] {
            traces.finish(id(number), own(vec![numbered(number, "chat", 9)]), Vec::new(), Ended { tenant, ..USUAL });
        }
        let seen = |traces: &Traces| -> Vec<u64> {
            (1..=5).filter(|number| traces.json(&hex(&id(*number))).is_some()).collect()
        };
        let found = |traces: &Traces| traces.find(&Query::default(), Form::Classic)["data"].as_array().unwrap().len();
        let last = |traces: &Traces| traces.json("last").unwrap()["trace_id"].as_str().unwrap().to_owned();
        assert_eq!((seen(&traces), found(&traces), last(&traces)), (vec![1, 2, 3, 4, 5], 5, hex(&id(5))));
        let a = traces.of(of("a"));
        assert_eq!((seen(&a), found(&a), last(&a)), (vec![1], 1, hex(&id(1))), "none of b's, and none that both have");
        assert_eq!((traces.of(of("c")).json("last"), traces.of(of("c")).services().len()), (None, 0));
    }

    #[test]
    fn jaeger_finds_services_operations_and_traces() {
        let traces = Traces::default();
        for number in 0..130 {
            let root = v1::Span {
                span_id: vec![1; 8],
                process: process("tandem-router", "r0"),
                kind: v1::SpanKind::Server.into(),
                start_unix_ns: 5_000,
                end_unix_ns: 25_000,
                attributes: vec![v1::Attribute {
                    key: "n".into(),
                    value: Some(v1::AnyValue { value: Some(any_value::Value::Integer(7)) }),
                }],
                ..span(id(number), "chat m")
            };
            let child = v1::Span {
                span_id: vec![2; 8],
                parent_span_id: vec![1; 8],
                process: process("tandem-decode", ""),
                start_unix_ns: 6_000,
                end_unix_ns: 7_000,
                status: Some(v1::SpanStatus { message: "no".into(), code: FAILED }),
                ..span(id(number), if number == 3 { "rare" } else { "decode" })
            };
            traces.finish(id(number), own(vec![root]), pack(vec![child]), USUAL);
        }
        assert_eq!(traces.services().into_iter().collect::<Vec<_>>(), ["tandem-decode", "tandem-router"]);
        assert_eq!(traces.operations("tandem-router"), [("chat m".to_owned(), "server".to_owned())].into());
        let count = |query: &Query| traces.find(query, Form::Classic)["data"].as_array().unwrap().len();
        assert_eq!(count(&Query::default()), 20);
        assert_eq!(count(&Query { limit: 9_999, ..Query::default() }), MAX_FOUND, "bounded");
        let rare = Query { service: "tandem-decode".into(), operation: "rare".into(), limit: 5, ..Query::default() };
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
