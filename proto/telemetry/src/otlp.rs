//! `v1::Span` to OTLP's own message, whose strings are those of the span. Pure.
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::{Event, Link, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, SpanFlags, Status};
use tandem_proto::v1;

/// W3C's flag of a trace that is kept: others are not sent.
const SAMPLED: u32 = 1;

/// `None` when an id has the wrong length: such a span has no place in a trace.
pub(crate) fn span(span: v1::Span) -> Option<Span> {
    let parent_fits = matches!(span.parent_span_id.len(), 0 | 8);
    if !ids_fit(&span.trace_id, &span.span_id) || !parent_fits {
        return None;
    }
    let (kind, remote) = kind(&span.kind);
    Some(Span {
        trace_id: span.trace_id,
        span_id: span.span_id,
        trace_state: span.tracestate,
        parent_span_id: span.parent_span_id,
        flags: flags(remote),
        name: span.name,
        kind: kind.into(),
        start_time_unix_nano: span.start_unix_ns,
        end_time_unix_nano: span.end_unix_ns,
        attributes: attributes(span.attributes),
        events: span.events.into_iter().map(event).collect(),
        links: span.links.into_iter().filter_map(link).collect(),
        status: Some(status(span.error)),
        ..Span::default()
    })
}

/// Who spans and figures are from; `version` where it is known.
pub(crate) fn resource(service: &str, instance: &str, version: Option<&str>) -> Resource {
    let who = [("service.name", Some(service)), ("service.instance.id", Some(instance)), ("service.version", version)];
    let attributes = who.into_iter().filter_map(|(key, value)| Some(attribute(key, value?))).collect();
    Resource { attributes, ..Resource::default() }
}

/// A text with a name.
pub(crate) fn attribute(key: &str, value: &str) -> KeyValue {
    key_value(key.to_owned(), Value::StringValue(value.to_owned()))
}

fn ids_fit(trace_id: &[u8], span_id: &[u8]) -> bool {
    trace_id.len() == 16 && span_id.len() == 8
}

/// Whether the parent of a span is in another process is known of every span.
fn flags(remote: bool) -> u32 {
    let remote = if remote { SpanFlags::ContextIsRemoteMask as u32 } else { 0 };
    SAMPLED | SpanFlags::ContextHasIsRemoteMask as u32 | remote
}

/// The kind, and whether the parent of such a span is in another process.
fn kind(kind: &str) -> (SpanKind, bool) {
    match kind {
        "server" => (SpanKind::Server, true),
        "client" => (SpanKind::Client, false),
        "producer" => (SpanKind::Producer, false),
        "consumer" => (SpanKind::Consumer, true),
        _ => (SpanKind::Internal, false),
    }
}

/// `None` when an id has the wrong length: the span itself is worth more than its link.
fn link(link: v1::SpanLink) -> Option<Link> {
    let v1::SpanLink { trace_id, span_id } = link;
    ids_fit(&trace_id, &span_id).then(|| Link { trace_id, span_id, flags: flags(false), ..Link::default() })
}

fn event(event: v1::SpanEvent) -> Event {
    let attributes = attributes(event.attributes);
    Event { time_unix_nano: event.unix_ns, name: event.name, attributes, ..Event::default() }
}

fn status(error: String) -> Status {
    let code = if error.is_empty() { StatusCode::Unset } else { StatusCode::Error };
    Status { message: error, code: code.into() }
}

fn attributes(attributes: Vec<v1::Attribute>) -> Vec<KeyValue> {
    attributes.into_iter().filter_map(|attribute| Some(key_value(attribute.key, value(attribute.value?)))).collect()
}

fn key_value(key: String, value: Value) -> KeyValue {
    KeyValue { key, value: Some(any(value)), ..KeyValue::default() }
}

fn any(value: Value) -> AnyValue {
    AnyValue { value: Some(value) }
}

fn value(value: v1::attribute::Value) -> Value {
    match value {
        v1::attribute::Value::Text(text) => Value::StringValue(text),
        v1::attribute::Value::Texts(list) => {
            let values = list.items.into_iter().map(|text| any(Value::StringValue(text))).collect();
            Value::ArrayValue(ArrayValue { values })
        }
        v1::attribute::Value::Integer(integer) => Value::IntValue(integer),
        v1::attribute::Value::Number(number) => Value::DoubleValue(number),
        v1::attribute::Value::Flag(flag) => Value::BoolValue(flag),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_ids_are_refused() {
        let good = v1::Span { trace_id: vec![1; 16], span_id: vec![1; 8], ..v1::Span::default() };
        assert!(span(good.clone()).is_some());
        assert!(span(v1::Span { trace_id: vec![1; 15], ..good.clone() }).is_none());
        assert!(span(v1::Span { span_id: Vec::new(), ..good.clone() }).is_none());
        assert!(span(v1::Span { parent_span_id: vec![1; 7], ..good.clone() }).is_none());
        let links = vec![v1::SpanLink { trace_id: vec![1; 16], span_id: Vec::new() }];
        assert!(span(v1::Span { links, ..good }).unwrap().links.is_empty());
    }

    #[test]
    fn what_handles_a_call_has_its_parent_elsewhere() {
        let of = |kind: &str| {
            let of_kind =
                v1::Span { trace_id: vec![1; 16], span_id: vec![1; 8], kind: kind.into(), ..v1::Span::default() };
            let span = span(of_kind).unwrap();
            (span.kind, span.flags)
        };
        assert_eq!(
            [of("server"), of("client"), of("internal"), of("?")],
            [(2, 0x301), (3, 0x101), (1, 0x101), (1, 0x101)]
        );
    }
}
