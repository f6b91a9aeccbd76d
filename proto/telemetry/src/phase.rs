//! A phase of a request with exact times. Build it when the phase is over; its identity (`TraceContext`) is drawn
//! beforehand, because children and peers need it while the phase runs.
use std::time::Instant;

use tandem_proto::{TraceContext, v1};

use crate::clock::clock;

/// OpenTelemetry's span kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Work inside one process.
    Internal,
    /// Handles a call.
    Server,
    /// Makes a call and waits for it.
    Client,
    /// Hands work to somebody and does not wait.
    Producer,
    /// Does what a producer handed over.
    Consumer,
}

impl Kind {
    /// The form in `v1::Span.kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Internal => "internal",
            Self::Server => "server",
            Self::Client => "client",
            Self::Producer => "producer",
            Self::Consumer => "consumer",
        }
    }
}

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

/// Builder of a `v1::Span`.
#[derive(Clone, Debug, Default)]
#[must_use = "a phase becomes a span by `end`"]
pub struct Phase {
    span: v1::Span,
}

impl Phase {
    /// A phase whose own identity is `context`; `parent` is the span id of the phase that it belongs to.
    pub fn new(name: impl Into<String>, kind: Kind, context: TraceContext, parent: Option<[u8; 8]>) -> Self {
        let span = v1::Span {
            trace_id: context.trace_id.to_vec(),
            span_id: context.span_id.to_vec(),
            parent_span_id: parent.map(|id| id.to_vec()).unwrap_or_default(),
            name: name.into(),
            kind: kind.as_str().to_owned(),
            ..v1::Span::default()
        };
        Self { span }
    }

    /// Adds the `tracestate` of its trace.
    pub fn in_state(mut self, state: &str) -> Self {
        state.clone_into(&mut self.span.tracestate);
        self
    }

    /// Adds an attribute.
    pub fn attr(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.span.attributes.push(attribute(key.into(), value.into()));
        self
    }

    /// Adds an event with its attributes.
    pub fn event(
        mut self,
        name: impl Into<String>,
        at: Instant,
        attributes: impl IntoIterator<Item = (&'static str, Value)>,
    ) -> Self {
        let attributes = attributes.into_iter().map(|(key, value)| attribute(key.to_owned(), value)).collect();
        self.span.events.push(v1::SpanEvent { name: name.into(), unix_ns: clock().unix_ns(at), attributes });
        self
    }

    /// Points to a span that belongs to it without being its parent or child.
    pub fn link(mut self, to: TraceContext) -> Self {
        self.span.links.push(v1::SpanLink { trace_id: to.trace_id.to_vec(), span_id: to.span_id.to_vec() });
        self
    }

    /// Makes it a child of `parent`, in that span's trace.
    pub fn child_of(mut self, parent: TraceContext) -> Self {
        self.span.trace_id = parent.trace_id.to_vec();
        self.span.parent_span_id = parent.span_id.to_vec();
        self
    }

    /// Events so far.
    pub fn events(&self) -> usize {
        self.span.events.len()
    }

    /// Marks the phase as failed.
    pub fn error(mut self, message: impl Into<String>) -> Self {
        self.span.error = message.into();
        self
    }

    /// The finished span. An `end` before `start` counts as `start`.
    pub fn end(
        mut self,
        service: impl Into<String>,
        instance: impl Into<String>,
        start: Instant,
        end: Instant,
    ) -> v1::Span {
        self.span.service = service.into();
        self.span.instance = instance.into();
        self.span.start_unix_ns = clock().unix_ns(start);
        self.span.end_unix_ns = clock().unix_ns(end.max(start));
        self.span
    }
}

fn attribute(key: String, value: Value) -> v1::Attribute {
    use v1::attribute::Value as Wire;
    let value = match value {
        Value::Text(text) => Wire::Text(text),
        Value::Texts(items) => Wire::Texts(v1::TextList { items }),
        Value::Integer(integer) => Wire::Integer(integer),
        Value::Number(number) => Wire::Number(number),
        Value::Flag(flag) => Wire::Flag(flag),
    };
    v1::Attribute { key, value: Some(value) }
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

    use super::*;

    fn context() -> TraceContext {
        TraceContext { trace_id: [1; 16], span_id: [2; 8], sampled: true }
    }

    #[test]
    fn carries_identity_times_and_attributes() {
        let start = Instant::now();
        let span = Phase::new("prefill", Kind::Server, context(), Some([3; 8]))
            .attr("blocks", 4_u32)
            .event("chunk.done", start, [("tokens", Value::from(16_u32))])
            .end("tandem-prefill", "p0", start, start + Duration::from_micros(7));
        assert_eq!((span.trace_id, span.parent_span_id), (vec![1; 16], vec![3; 8]));
        assert_eq!(span.end_unix_ns - span.start_unix_ns, 7_000);
        assert_eq!(span.attributes[0].value, Some(v1::attribute::Value::Integer(4)));
        assert_eq!(span.events[0].unix_ns, span.start_unix_ns);
    }

    #[test]
    fn never_ends_before_it_starts() {
        let start = Instant::now();
        let span =
            Phase::new("x", Kind::Internal, context(), None).end("s", "i", start, start - Duration::from_secs(1));
        assert_eq!(span.start_unix_ns, span.end_unix_ns);
        assert!(span.parent_span_id.is_empty());
    }
}
