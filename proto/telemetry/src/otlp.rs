//! `v1::Span` to the SDK's `SpanData`. The tracing bridge cannot set start times, so spans are built by hand.
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::{Event, Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use tandem_proto::v1;

/// `None` when an id has the wrong length: such a span has no place in a trace.
pub(crate) fn span_data(span: v1::Span) -> Option<SpanData> {
    let trace_id = TraceId::from_bytes(span.trace_id.try_into().ok()?);
    let span_id = SpanId::from_bytes(span.span_id.try_into().ok()?);
    let parent_span_id = match span.parent_span_id.is_empty() {
        true => SpanId::INVALID,
        false => SpanId::from_bytes(span.parent_span_id.try_into().ok()?),
    };
    let mut events = SpanEvents::default();
    events.events = span.events.into_iter().map(event).collect();
    let mut links = SpanLinks::default();
    links.links = span.links.into_iter().filter_map(link).collect();
    Some(SpanData {
        span_context: context(trace_id, span_id, state(&span.tracestate)),
        parent_span_id,
        parent_span_is_remote: matches!(span.kind.as_str(), "server" | "consumer"),
        span_kind: kind(&span.kind),
        name: span.name.into(),
        start_time: time(span.start_unix_ns),
        end_time: time(span.end_unix_ns),
        attributes: attributes(span.attributes),
        dropped_attributes_count: 0,
        events,
        links,
        status: if span.error.is_empty() { Status::Unset } else { Status::error(span.error) },
        instrumentation_scope: InstrumentationScope::builder("tandem").build(),
    })
}

fn context(trace_id: TraceId, span_id: SpanId, state: TraceState) -> SpanContext {
    SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, state)
}

/// The edges have checked it by W3C's rules. What the SDK's stricter ones refuse is left out.
fn state(text: &str) -> TraceState {
    text.parse().unwrap_or_default()
}

/// `None` when an id has the wrong length: the span itself is worth more than its link.
fn link(link: v1::SpanLink) -> Option<Link> {
    let trace_id = TraceId::from_bytes(link.trace_id.try_into().ok()?);
    let span_id = SpanId::from_bytes(link.span_id.try_into().ok()?);
    Some(Link::new(context(trace_id, span_id, TraceState::default()), Vec::new(), 0))
}

fn event(event: v1::SpanEvent) -> Event {
    Event::new(event.name, time(event.unix_ns), attributes(event.attributes), 0)
}

fn attributes(attributes: Vec<v1::Attribute>) -> Vec<KeyValue> {
    attributes.into_iter().filter_map(|attribute| Some(KeyValue::new(attribute.key, value(attribute.value?)))).collect()
}

fn value(value: v1::attribute::Value) -> Value {
    match value {
        v1::attribute::Value::Text(text) => Value::String(text.into()),
        v1::attribute::Value::Texts(list) => {
            Value::Array(list.items.into_iter().map(StringValue::from).collect::<Vec<_>>().into())
        }
        v1::attribute::Value::Integer(integer) => Value::I64(integer),
        v1::attribute::Value::Number(number) => Value::F64(number),
        v1::attribute::Value::Flag(flag) => Value::Bool(flag),
    }
}

fn kind(kind: &str) -> SpanKind {
    match kind {
        "server" => SpanKind::Server,
        "client" => SpanKind::Client,
        "producer" => SpanKind::Producer,
        "consumer" => SpanKind::Consumer,
        _ => SpanKind::Internal,
    }
}

fn time(unix_ns: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(unix_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_ids_are_refused() {
        let good = v1::Span { trace_id: vec![1; 16], span_id: vec![1; 8], ..v1::Span::default() };
        assert!(span_data(good.clone()).is_some());
        assert!(span_data(v1::Span { trace_id: vec![1; 15], ..good.clone() }).is_none());
        assert!(span_data(v1::Span { span_id: Vec::new(), ..good.clone() }).is_none());
        assert!(span_data(v1::Span { parent_span_id: vec![1; 7], ..good.clone() }).is_none());
        let links = vec![v1::SpanLink { trace_id: vec![1; 16], span_id: Vec::new() }];
        assert!(span_data(v1::Span { links, ..good }).unwrap().links.is_empty());
    }
}
