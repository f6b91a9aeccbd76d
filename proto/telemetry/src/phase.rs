//! A phase of a request with exact times. Build it when the phase is over; its identity (`TraceContext`) is drawn
//! beforehand, because children and peers need it while the phase runs. It becomes the bytes of a span at once, those
//! that a collector takes: nobody between here and there makes other values of them.
use std::time::Instant;

use tandem_proto::TraceContext;
use tandem_proto::spans::FAILED;
use tandem_proto::spans::write::{self, flags, number};
pub use tandem_proto::v1::SpanKind as Kind;

use crate::clock::clock;

/// Room for what a span says beside its identity; those of whole requests take some more.
const BODY_BYTES: usize = 512;
/// And for its identity.
const IDENTITY_BYTES: usize = 192;

/// An attribute's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A string.
    Text(String),
    /// Several strings, where the conventions ask for a list.
    Texts(Vec<String>),
    /// A whole number; larger ones than `i64` holds are capped.
    Integer(i64),
    /// A real number.
    Number(f64),
    /// Yes or no.
    Flag(bool),
}

/// Builder of a span.
#[derive(Clone, Debug, Default)]
#[must_use = "a phase becomes a span by `end`"]
pub struct Phase {
    trace_id: [u8; 16],
    span_id: [u8; 8],
    parent: Option<[u8; 8]>,
    name: String,
    kind: Kind,
    state: String,
    /// Attributes, events and links, written.
    body: Vec<u8>,
    events: usize,
    error: String,
}

impl Phase {
    /// A phase whose own identity is `context`; `parent` is the span id of the phase that it belongs to.
    pub fn new(name: impl Into<String>, kind: Kind, context: TraceContext, parent: Option<[u8; 8]>) -> Self {
        Self {
            trace_id: context.trace_id,
            span_id: context.span_id,
            parent,
            name: name.into(),
            kind,
            body: Vec::with_capacity(BODY_BYTES),
            ..Self::default()
        }
    }

    /// Adds the `tracestate` of its trace.
    pub fn in_state(mut self, state: &str) -> Self {
        state.clone_into(&mut self.state);
        self
    }

    /// Adds an attribute.
    pub fn attr(mut self, key: &str, value: impl Into<Value>) -> Self {
        attribute(&mut self.body, number::ATTRIBUTE, key, &value.into());
        self
    }

    /// Adds an event with its attributes.
    pub fn event(
        mut self,
        name: &str,
        at: Instant,
        attributes: impl IntoIterator<Item = (&'static str, Value)>,
    ) -> Self {
        write::message(&mut self.body, number::EVENT, |event| {
            write::fixed64(event, 1, clock().unix_ns(at));
            write::bytes(event, 2, name.as_bytes());
            attributes.into_iter().for_each(|(key, value)| attribute(event, 3, key, &value));
        });
        self.events += 1;
        self
    }

    /// Points to a span that belongs to it without being its parent or child.
    pub fn link(mut self, to: TraceContext) -> Self {
        write::message(&mut self.body, number::LINK, |link| {
            write::bytes(link, 1, &to.trace_id);
            write::bytes(link, 2, &to.span_id);
            write::fixed32(link, 6, flags(Kind::Internal));
        });
        self
    }

    /// Makes it a child of `parent`, in that span's trace.
    pub fn child_of(mut self, parent: TraceContext) -> Self {
        (self.trace_id, self.parent) = (parent.trace_id, Some(parent.span_id));
        self
    }

    /// Events so far.
    pub fn events(&self) -> usize {
        self.events
    }

    /// Marks the phase as failed.
    pub fn error(mut self, message: impl Into<String>) -> Self {
        self.error = message.into();
        self
    }

    /// The finished span, as a pack of one (`tandem_proto::spans`). An `end` before `start` counts as `start`.
    pub fn end(&self, service: &str, instance: &str, start: Instant, end: Instant) -> Vec<u8> {
        let mut packed = Vec::with_capacity(self.body.len() + IDENTITY_BYTES);
        write::message(&mut packed, number::SPAN, |span| {
            write::bytes(span, number::TRACE_ID, &self.trace_id);
            write::bytes(span, number::SPAN_ID, &self.span_id);
            if !self.state.is_empty() {
                write::bytes(span, number::TRACESTATE, self.state.as_bytes());
            }
            if let Some(parent) = &self.parent {
                write::bytes(span, number::PARENT_SPAN_ID, parent);
            }
            write::bytes(span, number::NAME, self.name.as_bytes());
            write::varint(span, number::KIND, self.kind as u64);
            write::fixed64(span, number::START, clock().unix_ns(start));
            write::fixed64(span, number::END, clock().unix_ns(end.max(start)));
            span.extend_from_slice(&self.body);
            if !self.error.is_empty() {
                write::message(span, number::STATUS, |status| {
                    write::bytes(status, 2, self.error.as_bytes());
                    write::varint(status, 3, FAILED as u64);
                });
            }
            write::fixed32(span, number::FLAGS, flags(self.kind));
            write::message(span, number::PROCESS, |process| {
                write::bytes(process, 1, service.as_bytes());
                write::bytes(process, 2, instance.as_bytes());
            });
        });
        packed
    }
}

/// An attribute, behind what is there of the message whose field `number` it is.
pub fn attribute(buf: &mut Vec<u8>, number: u32, key: &str, value: &Value) {
    write::message(buf, number, |attribute| {
        write::bytes(attribute, 1, key.as_bytes());
        write::message(attribute, 2, |any| match value {
            Value::Text(text) => write::bytes(any, 1, text.as_bytes()),
            Value::Flag(flag) => write::varint(any, 2, u64::from(*flag)),
            Value::Integer(integer) => write::varint(any, 3, integer.cast_unsigned()),
            Value::Number(number) => write::fixed64(any, 4, number.to_bits()),
            Value::Texts(items) => write::message(any, 5, |list| {
                items.iter().for_each(|text| write::message(list, 1, |any| write::bytes(any, 1, text.as_bytes())));
            }),
        });
    });
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}
impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}
impl From<Vec<String>> for Value {
    fn from(texts: Vec<String>) -> Self {
        Self::Texts(texts)
    }
}
impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}
impl From<f32> for Value {
    fn from(number: f32) -> Self {
        Self::Number(number.into())
    }
}
impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}
impl From<i64> for Value {
    fn from(integer: i64) -> Self {
        Self::Integer(integer)
    }
}
impl From<i32> for Value {
    fn from(integer: i32) -> Self {
        Self::Integer(integer.into())
    }
}
impl From<u32> for Value {
    fn from(integer: u32) -> Self {
        Self::Integer(integer.into())
    }
}
impl From<u64> for Value {
    fn from(integer: u64) -> Self {
        Self::Integer(i64::try_from(integer).unwrap_or(i64::MAX))
    }
}
impl From<usize> for Value {
    fn from(integer: usize) -> Self {
        Self::Integer(i64::try_from(integer).unwrap_or(i64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tandem_proto::spans::unpack;
    use tandem_proto::v1::{self, any_value};

    use super::*;

    fn context() -> TraceContext {
        TraceContext { trace_id: [1; 16], span_id: [2; 8], sampled: true }
    }

    fn only(packed: &[u8]) -> v1::Span {
        let mut spans = unpack(packed);
        let span = spans.next().unwrap();
        assert!(spans.next().is_none());
        span
    }

    #[test]
    fn carries_identity_times_and_attributes() {
        let start = Instant::now();
        let packed = Phase::new("prefill", Kind::Server, context(), Some([3; 8]))
            .in_state("a=b")
            .attr("blocks", 4_u32)
            .event("chunk.done", start, [("tokens", Value::from(16_u32))])
            .link(TraceContext { span_id: [5; 8], ..context() })
            .end("tandem-prefill", "p0", start, start + Duration::from_micros(7));
        let span = only(&packed);
        assert_eq!((&span.trace_id[..], &span.parent_span_id[..]), ([1; 16].as_slice(), [3; 8].as_slice()));
        assert_eq!((span.service(), span.instance(), span.kind_name()), ("tandem-prefill", "p0", "server"));
        assert_eq!((span.name.as_str(), span.tracestate.as_str(), span.error()), ("prefill", "a=b", ""));
        assert_eq!(span.end_unix_ns - span.start_unix_ns, 7_000);
        assert_eq!((span.events[0].unix_ns, span.events[0].name.as_str()), (span.start_unix_ns, "chunk.done"));
        assert_eq!(span.events[0].attributes[0].said(), Some(&any_value::Value::Integer(16)));
        assert_eq!((&span.links[0].span_id[..], span.links[0].flags), ([5; 8].as_slice(), 0x101));
    }

    #[test]
    fn values_come_as_they_went() {
        use any_value::Value as Wire;
        let texts = vec!["a".to_owned(), "b".to_owned()];
        let start = Instant::now();
        let packed = Phase::new("x", Kind::Internal, context(), None)
            .attr("text", "é".repeat(100))
            .attr("texts", texts.clone())
            .attr("integer", -3_i64)
            .attr("number", -0.5)
            .attr("flag", true)
            .error("no")
            .end("s", "i", start, start);
        let span = only(&packed);
        let said: Vec<_> = span.attributes.iter().map(|of| (of.key.as_str(), of.said().unwrap().clone())).collect();
        let items = texts.into_iter().map(|text| v1::Text { text }).collect();
        let expected = [
            ("text", Wire::Text("é".repeat(100))),
            ("texts", Wire::Texts(v1::TextList { items })),
            ("integer", Wire::Integer(-3)),
            ("number", Wire::Number(-0.5)),
            ("flag", Wire::Flag(true)),
        ];
        assert_eq!(said, expected);
        assert_eq!((span.error(), span.status.as_ref().unwrap().code), ("no", FAILED));
    }

    #[test]
    fn what_handles_a_call_has_its_parent_elsewhere() {
        let of = |kind: Kind| {
            let now = Instant::now();
            let span = only(&Phase::new("x", kind, context(), None).end("s", "i", now, now));
            (span.kind, span.flags)
        };
        assert_eq!([Kind::Server, Kind::Client, Kind::Internal].map(of), [(2, 0x301), (3, 0x101), (1, 0x101)]);
    }

    #[test]
    fn never_ends_before_it_starts() {
        let start = Instant::now();
        let phase = Phase::new("x", Kind::Internal, context(), None);
        let span = only(&phase.end("s", "i", start, start - Duration::from_secs(1)));
        assert_eq!(span.start_unix_ns, span.end_unix_ns);
        assert!(span.parent_span_id.is_empty());
    }
}
