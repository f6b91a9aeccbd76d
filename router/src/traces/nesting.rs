//! Nodes' spans inside the router's, so that every child lies within its parent. Pure. As they were measured they need
//! not: decode begins before the client has its first token, a node notices the end of a cancelled call after the
//! router, and two hosts' clocks differ. Jaeger takes each of these for a wrong clock and moves the span. So a node's
//! span is cut to the part that lies in its parent, and tells what was cut (`tandem.cut_start_ms`,
//! `tandem.cut_end_ms`). One that has no time in common with its parent, or whose parent never came about, goes to the
//! next one above.
//!
//! A consumer's span is the exception, as in Jaeger: what a producer began outlives it. `kv.transfer` starts with its
//! `kv.post` and ends within the request.
use tandem_proto::spans::Raw;
use tandem_proto::spans::write::{self, number};
use tandem_proto::v1::SpanKind;
use tandem_telemetry::{Value, phase};

/// What is a child of the request itself ends so long before it: Jaeger's critical path goes from the end of a span to
/// the child that ended last, which shall be a phase.
const BEFORE_END_NS: u64 = 2_000;
/// Room for what a span says beside what it came with: that it was cut, and how long it is.
const MORE_BYTES: usize = 64;

/// The router's spans as they are, and behind them the nodes' in their parents, packed.
pub fn nest(own: &[Raw<'_>], of_nodes: &[Raw<'_>]) -> Vec<u8> {
    let mut nest = Nest::of(own, of_nodes);
    (own.len()..nest.places.len()).for_each(|index| nest.place(index));
    let mut packed = Vec::with_capacity(own.iter().chain(of_nodes).map(|span| span.bytes().len() + MORE_BYTES).sum());
    own.iter().for_each(|span| span.pass(&mut packed));
    for (span, place) in of_nodes.iter().zip(&nest.places[own.len()..]) {
        place.write(span, &mut packed);
    }
    packed
}

/// Where a span is.
#[derive(Clone, Copy, PartialEq)]
struct Place {
    id: u64,
    parent: Option<u64>,
    kind: SpanKind,
    start_ns: u64,
    end_ns: u64,
    /// What was cut of it.
    before_ns: u64,
    behind_ns: u64,
}

impl Place {
    /// As it came.
    fn of(span: &Raw<'_>) -> Self {
        Self {
            id: id(span.span_id).unwrap_or_default(),
            parent: id(span.parent_span_id),
            kind: span.kind,
            start_ns: span.start_unix_ns,
            end_ns: span.end_unix_ns,
            before_ns: 0,
            behind_ns: 0,
        }
    }

    fn meets(&self, other: &Self) -> bool {
        self.start_ns <= other.end_ns && self.end_ns >= other.start_ns
    }

    /// Leaves of a span what lies within these times.
    fn cut(&mut self, from: u64, to: u64) {
        let to = to.max(from);
        let (mut start, mut end) = (self.start_ns.clamp(from, to), self.end_ns.clamp(from, to));
        (self.before_ns, self.behind_ns) = (start.saturating_sub(self.start_ns), self.end_ns.saturating_sub(end));
        // Jaeger takes a span without length for one that ends before it starts.
        if end <= start {
            (start, end) =
                if start < to { (start, start + 1) } else { (to.saturating_sub(1).max(from), to.max(from + 1)) };
        }
        (self.start_ns, self.end_ns) = (start, end);
    }

    /// Writes the span where it is now, behind those of `packed`.
    fn write(&self, span: &Raw<'_>, packed: &mut Vec<u8>) {
        if *self == Self::of(span) {
            return span.pass(packed);
        }
        write::message(packed, number::SPAN, |to| {
            span.without_place(to);
            if let Some(parent) = self.parent {
                write::bytes(to, number::PARENT_SPAN_ID, &parent.to_be_bytes());
            }
            write::fixed64(to, number::START, self.start_ns);
            write::fixed64(to, number::END, self.end_ns);
            for (key, ns) in [("tandem.cut_start_ms", self.before_ns), ("tandem.cut_end_ms", self.behind_ns)] {
                if ns > 0 {
                    phase::attribute(to, number::ATTRIBUTE, key, &Value::Number(ns as f64 / 1e6));
                }
            }
        });
    }
}

/// Whether a span's parent is known.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Open,
    /// Its parent is looked for: who leads back here is in a circle.
    Sought,
    Placed,
}

struct Nest {
    /// The router's first.
    places: Vec<Place>,
    own: usize,
    /// Their ids, sorted: for a few dozen a search takes less than a hash.
    ids: Vec<(u64, usize)>,
    states: Vec<State>,
    /// Of those that are placed; none above the router's spans of whole requests.
    parents: Vec<Option<usize>>,
}

impl Nest {
    fn of(own: &[Raw<'_>], of_nodes: &[Raw<'_>]) -> Self {
        let places: Vec<_> = own.iter().chain(of_nodes).map(Place::of).collect();
        let own = own.len();
        let mut ids: Vec<_> = places.iter().enumerate().map(|(index, place)| (place.id, index)).collect();
        ids.sort_unstable();
        let states = (0..places.len()).map(|index| if index < own { State::Placed } else { State::Open }).collect();
        let parent = |place: &Place| first(&ids, place.parent?).filter(|parent| *parent < own);
        let parents = places.iter().map(parent).collect();
        Self { places, own, ids, states, parents }
    }

    fn named_parent(&self, at: usize) -> Option<usize> {
        first(&self.ids, self.places[at].parent?)
    }

    /// Places a span, and before it those above it.
    fn place(&mut self, index: usize) {
        let (mut way, mut next) = (Vec::new(), Some(index));
        while let Some(at) = next.filter(|at| self.states[*at] == State::Open) {
            self.states[at] = State::Sought;
            way.push(at);
            next = self.named_parent(at);
        }
        for at in way.into_iter().rev() {
            let named = self.named_parent(at).filter(|parent| self.states[*parent] == State::Placed);
            if let Some(parent) = named.or_else(|| self.request_of(at)) {
                self.put(at, parent);
            }
            self.states[at] = State::Placed;
        }
    }

    /// The router's span of a whole request in whose time `at` is; the last one where several are.
    fn request_of(&self, at: usize) -> Option<usize> {
        let requests = || (0..self.own).rev().filter(|index| self.parents[*index].is_none());
        requests().find(|request| self.meet(at, *request)).or_else(|| requests().next())
    }

    fn meet(&self, at: usize, other: usize) -> bool {
        self.places[at].meets(&self.places[other])
    }

    fn put(&mut self, at: usize, named: usize) {
        let consumes = self.places[at].kind == SpanKind::Consumer && self.places[named].kind == SpanKind::Producer;
        let mut parent = named;
        while !consumes
            && !self.meet(at, parent)
            && let Some(above) = self.parents[parent]
        {
            parent = above;
        }
        self.parents[at] = Some(parent);
        let Place { id, start_ns, end_ns, .. } = self.places[parent];
        let of_request = self.parents[parent].is_none();
        let end = match (consumes, of_request) {
            (true, _) => self.end_of_request(parent).saturating_sub(BEFORE_END_NS),
            (false, true) => end_ns.saturating_sub(BEFORE_END_NS),
            (false, false) => end_ns,
        };
        let place = &mut self.places[at];
        place.parent = Some(id);
        if consumes {
            // It has that time by another host's clock.
            place.start_ns = start_ns;
        }
        place.cut(start_ns, end);
    }

    fn end_of_request(&self, mut at: usize) -> u64 {
        while let Some(above) = self.parents[at] {
            at = above;
        }
        self.places[at].end_ns
    }
}

/// The first that has this id: the router's ids are no node's to take.
fn first(ids: &[(u64, usize)], id: u64) -> Option<usize> {
    let at = ids.partition_point(|(known, _)| *known < id);
    ids.get(at).filter(|(known, _)| *known == id).map(|(_, index)| *index)
}

fn id(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().ok().map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;
    use tandem_proto::spans::{raw, unpack};
    use tandem_proto::v1::{self, any_value};

    use super::*;

    /// Nanoseconds.
    const UNIT: u64 = 10_000;

    fn span(name: &str, number: u64, parent: u64, (start, end): (u64, u64)) -> v1::Span {
        let kind = match name {
            "kv.post" => SpanKind::Producer,
            "kv.transfer" => SpanKind::Consumer,
            _ => SpanKind::Internal,
        };
        v1::Span {
            trace_id: vec![7; 16],
            span_id: number.to_be_bytes().to_vec(),
            parent_span_id: if parent == 0 { Vec::new() } else { parent.to_be_bytes().to_vec() },
            name: name.into(),
            kind: kind.into(),
            start_unix_ns: start * UNIT,
            end_unix_ns: end * UNIT,
            ..v1::Span::default()
        }
    }

    /// The router's spans of one request: its root last, as a record tells them.
    fn own() -> Vec<v1::Span> {
        vec![
            span("queue", 2, 1, (0, 9)),
            span("prefill", 3, 1, (10, 99)),
            span("transfer", 4, 1, (100, 109)),
            span("decode", 5, 1, (110, 200)),
            span("chat m", 1, 77, (0, 200)),
        ]
    }

    /// All of them, the first `own` ones the router's.
    fn nested_in(spans: &[v1::Span], own: usize) -> Vec<v1::Span> {
        let packed = v1::Spans { spans: spans.to_vec() }.encode_to_vec();
        let raw: Vec<_> = raw(&packed).collect();
        unpack(&nest(&raw[..own], &raw[own..])).collect()
    }

    /// Name, parent and times of the nodes' spans.
    fn nested(of_nodes: Vec<v1::Span>) -> Vec<(String, u64, (u64, u64))> {
        let spans = nested_in(&[own(), of_nodes].concat(), 5);
        let told = |span: v1::Span| {
            let times = (span.start_unix_ns.div_ceil(UNIT), span.end_unix_ns.div_ceil(UNIT));
            (span.name, id(&span.parent_span_id).unwrap_or_default(), times)
        };
        spans.into_iter().skip(5).map(told).collect()
    }

    fn one(of_node: v1::Span) -> (u64, (u64, u64)) {
        let (_, parent, times) = nested(vec![of_node]).remove(0);
        (parent, times)
    }

    #[test]
    fn what_lies_inside_stays_as_it_is() {
        assert_eq!(one(span("prefill", 10, 3, (11, 98))), (3, (11, 98)));
        assert_eq!(nested_in(&own(), 5), own());
    }

    #[test]
    fn what_sticks_out_is_cut_and_tells_so() {
        let spans = nested_in(&[own(), vec![span("decode", 10, 5, (105, 300))]].concat(), 5);
        let decode = &spans[5];
        assert_eq!((decode.start_unix_ns, decode.end_unix_ns), (110 * UNIT, 200 * UNIT));
        let told: Vec<_> =
            decode.attributes.iter().map(|cut| (cut.key.as_str(), cut.said().unwrap().clone())).collect();
        let number = any_value::Value::Number;
        assert_eq!(told, [("tandem.cut_start_ms", number(0.05)), ("tandem.cut_end_ms", number(1.0))]);
    }

    #[test]
    fn what_has_no_time_in_common_with_its_parent_goes_above() {
        assert_eq!(one(span("decode", 10, 5, (101, 108))), (1, (101, 108)));
        assert_eq!(one(span("prefill.queue", 10, 3, (120, 130))), (1, (120, 130)));
        let below = vec![span("prefill.queue", 11, 10, (130, 140)), span("prefill", 10, 3, (20, 150))];
        assert_eq!(nested(below)[0].1, 1, "its parent is cut first, wherever it stands");
    }

    #[test]
    fn a_parent_that_never_came_about_is_the_request() {
        assert_eq!(one(span("decode", 10, 99, (101, 230))), (1, (101, 200)));
        assert_eq!(one(span("decode", 10, 0, (300, 400))), (1, (200, 200)));
    }

    #[test]
    fn a_copy_begins_with_its_post_and_outlives_it() {
        let transfer = |times| nested(vec![span("kv.transfer", 11, 10, times), span("kv.post", 10, 3, (50, 60))])[0].2;
        assert_eq!(transfer((50, 105)), (50, 105));
        assert_eq!(transfer((55, 105)), (50, 105));
        assert_eq!(transfer((40, 58)), (50, 58));
        assert_eq!(transfer((55, 500)), (50, 200));
        // A ticket that came when the prompt was computed.
        let late = nested(vec![span("kv.post", 10, 3, (101, 102)), span("kv.transfer", 11, 10, (101, 108))]);
        assert_eq!((late[0].1, late[1].1, late[1].2), (1, 10, (101, 108)));
    }

    #[test]
    fn several_requests_of_one_trace_keep_their_own() {
        let second = own().into_iter().map(|mut span| {
            span.start_unix_ns += 1_000 * UNIT;
            span.end_unix_ns += 1_000 * UNIT;
            span.span_id[0] = 1;
            span.parent_span_id[0] |= u8::from(span.parent_span_id[7] != 77);
            span
        });
        let mut spans: Vec<v1::Span> = own().into_iter().chain(second).collect();
        spans.extend([span("kv.reserve", 20, 99, (20, 30)), span("kv.reserve", 21, 99, (1_020, 1_030))]);
        let spans = nested_in(&spans, 10);
        let parents: Vec<_> = spans[10..].iter().map(|span| span.parent_span_id[0]).collect();
        assert_eq!(parents, [0, 1]);
    }

    proptest! {
        /// Jaeger's own test for a wrong clock (`adjuster/clockskew.go`) finds none, whatever nodes tell.
        #[test]
        fn jaeger_finds_no_clock_skew(
            told in prop::collection::vec((0_usize..3, 6_u64..16, 0_u64..16, 0_u64..300, 0_u64..300), 0..12),
        ) {
            let mut spans = own();
            let names = ["kv.post", "kv.transfer", "decode"];
            let of_node = |(name, number, parent, start, end)| span(names[name], number, parent, (start, end));
            spans.extend(told.into_iter().map(of_node));
            // Nobody draws an id twice.
            let mut seen = std::collections::HashSet::new();
            spans.retain(|span| seen.insert(span.span_id.clone()));
            let spans = nested_in(&spans, 5);
            let requests = spans.iter().filter(|span| id(&span.parent_span_id) == Some(77)).count();
            prop_assert_eq!(requests, 1);
            for child in spans.iter().filter(|span| id(&span.parent_span_id) != Some(77)) {
                let parent = spans.iter().find(|span| span.span_id == child.parent_span_id);
                let parent = parent.expect("a parent that is here");
                let length = |span: &v1::Span| span.end_unix_ns - span.start_unix_ns;
                prop_assert!(child.start_unix_ns >= parent.start_unix_ns && child.end_unix_ns > child.start_unix_ns);
                prop_assert!(length(child) > length(parent) || child.end_unix_ns <= parent.end_unix_ns, "{:?}", spans);
                prop_assert!(child.end_unix_ns <= 200 * UNIT);
            }
        }
    }
}
