//! Traces as Jaeger tells them, so that its UI and Grafana can look into the ring without a Jaeger: the classic JSON of
//! `/api/traces` and the OTLP JSON of query API v3 (<https://www.jaegertracing.io/docs/latest/architecture/apis/>).
//! Pure.
use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use tandem_proto::spans::FAILED;
use tandem_proto::trace::hex;
use tandem_proto::v1::{self, any_value};

/// One trace of `data` in the classic form. Times are microseconds.
pub(super) fn classic(trace_id: &str, spans: &[v1::Span]) -> Value {
    let mut processes: BTreeMap<(&str, &str), String> = BTreeMap::new();
    for span in spans {
        let number = processes.len() + 1;
        processes.entry((span.service(), span.instance())).or_insert_with(|| format!("p{number}"));
    }
    let spans: Vec<Value> =
        spans.iter().map(|span| classic_span(span, &processes[&(span.service(), span.instance())])).collect();
    let processes = processes.into_iter().map(|((service, instance), name)| {
        (name, json!({"serviceName": service, "tags": [tag("service.instance.id", json!(instance))]}))
    });
    json!({"traceID": trace_id, "spans": spans, "processes": processes.collect::<Map<_, _>>(), "warnings": null})
}

fn classic_span(span: &v1::Span, process: &str) -> Value {
    let reference =
        |kind: &str, trace: &[u8], id: &[u8]| json!({"refType": kind, "traceID": hex(trace), "spanID": hex(id)});
    let parent = (!span.parent_span_id.is_empty()).then(|| reference("CHILD_OF", &span.trace_id, &span.parent_span_id));
    let links = span.links.iter().map(|link| reference("FOLLOWS_FROM", &link.trace_id, &link.span_id));
    let mut tags = tags(&span.attributes);
    tags.push(tag("span.kind", json!(span.kind_name())));
    if !span.error().is_empty() {
        tags.extend([tag("error", json!(true)), tag("otel.status_description", json!(span.error()))]);
    }
    let logs = span.events.iter().map(|event| {
        let mut fields = tags_of_event(event);
        fields.insert(0, tag("event", json!(event.name)));
        json!({"timestamp": event.unix_ns / 1000, "fields": fields})
    });
    json!({
        "traceID": hex(&span.trace_id),
        "spanID": hex(&span.span_id),
        "operationName": span.name,
        "references": parent.into_iter().chain(links).collect::<Vec<_>>(),
        "startTime": span.start_unix_ns / 1000,
        "duration": span.end_unix_ns.saturating_sub(span.start_unix_ns) / 1000,
        "tags": tags,
        "logs": logs.collect::<Vec<_>>(),
        "processID": process,
        "warnings": null,
    })
}

fn tags_of_event(event: &v1::SpanEvent) -> Vec<Value> {
    tags(&event.attributes)
}

fn tags(attributes: &[v1::Attribute]) -> Vec<Value> {
    attributes.iter().filter_map(|attribute| Some(tag(&attribute.key, super::value_json(attribute)?))).collect()
}

fn tag(key: &str, value: Value) -> Value {
    let kind = match &value {
        Value::Bool(_) => "bool",
        Value::Number(number) if number.is_f64() => "float64",
        Value::Number(_) => "int64",
        _ => "string",
    };
    let value = if value.is_array() || value.is_object() { Value::String(value.to_string()) } else { value };
    json!({"key": key, "type": kind, "value": value})
}

/// `result` of v3: OTLP's `TracesData`, a resource for each process.
pub(super) fn otlp<'a>(spans: impl Iterator<Item = &'a v1::Span>) -> Value {
    let mut resources: BTreeMap<(&str, &str), Vec<Value>> = BTreeMap::new();
    for span in spans {
        resources.entry((span.service(), span.instance())).or_default().push(otlp_span(span));
    }
    let resources = resources.into_iter().map(|((service, instance), spans)| {
        let pair = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
        json!({
            "resource": {"attributes": [pair("service.name", service), pair("service.instance.id", instance)]},
            "scopeSpans": [{"scope": {"name": "tandem"}, "spans": spans}],
        })
    });
    json!({"resourceSpans": resources.collect::<Vec<_>>()})
}

fn otlp_span(span: &v1::Span) -> Value {
    let events = span.events.iter().map(|event| {
        let attributes = otlp_attributes(&event.attributes);
        // 64-bit integers are strings in protobuf's JSON.
        json!({"name": event.name, "timeUnixNano": event.unix_ns.to_string(), "attributes": attributes})
    });
    let links = span.links.iter().map(|link| json!({"traceId": hex(&link.trace_id), "spanId": hex(&link.span_id)}));
    let status = if span.error().is_empty() { json!({}) } else { json!({"code": FAILED, "message": span.error()}) };
    json!({
        "traceId": hex(&span.trace_id),
        "spanId": hex(&span.span_id),
        "parentSpanId": hex(&span.parent_span_id),
        "traceState": span.tracestate,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": span.start_unix_ns.to_string(),
        "endTimeUnixNano": span.end_unix_ns.to_string(),
        "attributes": otlp_attributes(&span.attributes),
        "events": events.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
        "status": status,
    })
}

fn otlp_attributes(attributes: &[v1::Attribute]) -> Vec<Value> {
    let value = |value: &any_value::Value| match value {
        any_value::Value::Text(text) => json!({"stringValue": text}),
        any_value::Value::Integer(integer) => json!({"intValue": integer.to_string()}),
        any_value::Value::Number(number) => json!({"doubleValue": number}),
        any_value::Value::Flag(flag) => json!({"boolValue": flag}),
        any_value::Value::Texts(list) => {
            let texts: Vec<Value> = list.texts().iter().map(|text| json!({"stringValue": text})).collect();
            json!({"arrayValue": {"values": texts}})
        }
    };
    let pair = |attribute: &v1::Attribute| Some(json!({"key": attribute.key, "value": value(attribute.said()?)}));
    attributes.iter().filter_map(pair).collect()
}

/// One line of a list of traces: its root, its length, who took part.
pub(super) fn summary(trace_id: &str, spans: &[v1::Span]) -> Value {
    let ids: Vec<&[u8]> = spans.iter().map(|span| span.span_id.as_slice()).collect();
    let root = spans.iter().find(|span| !ids.contains(&span.parent_span_id.as_slice()));
    let start = spans.iter().map(|span| span.start_unix_ns).min().unwrap_or(0);
    let end = spans.iter().map(|span| span.end_unix_ns).max().unwrap_or(0);
    let mut services: BTreeMap<&str, [u32; 2]> = BTreeMap::new();
    for span in spans {
        let counts = services.entry(span.service()).or_default();
        counts[0] += 1;
        counts[1] += u32::from(!span.error().is_empty());
    }
    let errors: u32 = services.values().map(|counts| counts[1]).sum();
    let services = services
        .into_iter()
        .map(|(name, [spans, errors])| json!({"name": name, "spanCount": spans, "errorSpanCount": errors}));
    json!({
        "traceId": trace_id,
        "rootServiceName": root.map_or("", |root| root.service()),
        "rootSpanName": root.map_or("", |root| &root.name),
        "startTimeUnixNano": start.to_string(),
        "durationNano": end.saturating_sub(start).to_string(),
        "spanCount": spans.len(),
        "errorSpanCount": errors,
        "services": services.collect::<Vec<_>>(),
    })
}
