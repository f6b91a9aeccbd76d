//! Which traces somebody looks for, in the words of Jaeger's two query APIs (`/api/traces` and `/api/v3/traces`). Pure.
//! As in Jaeger, all that is asked must hold of one span of the trace.
use std::time::Duration;

use prost_types::Timestamp;
use tandem_proto::v1::{self, any_value};
use tandem_proto::{Error, ErrorKind};

/// Tags of one question at most.
const MAX_TAGS: usize = 16;

/// What a span must have; empty matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// This service...
    pub service: String,
    /// ...and name.
    pub operation: String,
    /// How many traces, the newest first; 0 is 20, and 100 is the most.
    pub limit: usize,
    /// Began then or later; Unix nanoseconds.
    pub start_min_ns: Option<u64>,
    /// Began then or before.
    pub start_max_ns: Option<u64>,
    /// Took so long or longer.
    pub duration_min: Option<Duration>,
    /// Took so long or less.
    pub duration_max: Option<Duration>,
    /// Has these attributes, on itself or on one of its events, each with this value as text.
    pub tags: Vec<(String, String)>,
}

impl Query {
    /// Reads the parameters of either API; others are left alone, as Jaeger does.
    ///
    /// # Errors
    /// `InvalidArgument` with the parameter whose value cannot be read.
    pub fn parse(parameters: &[(String, String)]) -> Result<Self, Error> {
        let mut query = Self::default();
        for (key, value) in parameters.iter().filter(|(_, value)| !value.is_empty()) {
            let wrong = |what: &str| Error::new(ErrorKind::InvalidArgument, format!("{key} must be {what}"));
            let micros = || value.parse::<u64>().ok().and_then(|micros| micros.checked_mul(1_000));
            let micros = || micros().ok_or_else(|| wrong("Unix microseconds"));
            let time = || unix_ns(value).ok_or_else(|| wrong("a time as 2026-01-31T23:59:59.5Z"));
            let length = || duration(value).ok_or_else(|| wrong("a duration as 1.5s or 200ms"));
            let count = || value.parse().map_err(|_| wrong("a number"));
            match key.as_str() {
                "service" | "query.service_name" | "query.serviceName" => query.service.clone_from(value),
                "operation" | "query.operation_name" | "query.operationName" => query.operation.clone_from(value),
                "limit" | "query.search_depth" | "query.searchDepth" | "query.num_traces" => query.limit = count()?,
                "start" => query.start_min_ns = Some(micros()?),
                "end" => query.start_max_ns = Some(micros()?),
                "query.start_time_min" | "query.startTimeMin" => query.start_min_ns = Some(time()?),
                "query.start_time_max" | "query.startTimeMax" => query.start_max_ns = Some(time()?),
                "minDuration" | "query.duration_min" | "query.durationMin" => query.duration_min = Some(length()?),
                "maxDuration" | "query.duration_max" | "query.durationMax" => query.duration_max = Some(length()?),
                "tag" => {
                    let (key, value) = value.split_once(':').ok_or_else(|| wrong("a tag as key:value"))?;
                    query.tags.push((key.to_owned(), value.to_owned()));
                }
                "tags" | "query.attributes" => {
                    query.tags.extend(tags(value).ok_or_else(|| wrong("tags as {\"key\": \"value\"}"))?);
                }
                _ => {}
            }
            if query.tags.len() > MAX_TAGS {
                return Err(wrong(&format!("at most {MAX_TAGS} tags")));
            }
        }
        Ok(query)
    }

    /// Whether all of it holds of this span.
    pub fn matches(&self, span: &v1::Span) -> bool {
        let length = Duration::from_nanos(span.end_unix_ns.saturating_sub(span.start_unix_ns));
        (self.service.is_empty() || span.service() == self.service)
            && (self.operation.is_empty() || span.name == self.operation)
            && self.start_min_ns.is_none_or(|min| span.start_unix_ns >= min)
            && self.start_max_ns.is_none_or(|max| span.start_unix_ns <= max)
            && self.duration_min.is_none_or(|min| length >= min)
            && self.duration_max.is_none_or(|max| length <= max)
            && self.tags.iter().all(|tag| has(span, tag))
    }
}

/// What Jaeger makes a tag of that is no attribute here has its name there.
fn has(span: &v1::Span, (key, value): &(String, String)) -> bool {
    match key.as_str() {
        "error" => return value == if span.error().is_empty() { "false" } else { "true" },
        "span.kind" => return value == span.kind_name(),
        "service.instance.id" => return value == span.instance(),
        "otel.status_description" => return value == span.error(),
        _ => {}
    }
    let attributes = span.attributes.iter().chain(span.events.iter().flat_map(|event| &event.attributes));
    attributes.filter(|attribute| attribute.key == *key).any(|attribute| text(attribute).as_ref() == Some(value))
}

fn text(attribute: &v1::Attribute) -> Option<String> {
    Some(match attribute.said()? {
        any_value::Value::Text(text) => text.clone(),
        any_value::Value::Texts(list) => serde_json::json!(list.texts()).to_string(),
        any_value::Value::Integer(integer) => integer.to_string(),
        any_value::Value::Number(number) => number.to_string(),
        any_value::Value::Flag(flag) => flag.to_string(),
    })
}

fn tags(json: &str) -> Option<Vec<(String, String)>> {
    let serde_json::Value::Object(map) = serde_json::from_str(json).ok()? else { return None };
    let tag = |(key, value): (String, serde_json::Value)| match value {
        serde_json::Value::String(text) => Some((key, text)),
        serde_json::Value::Number(_) | serde_json::Value::Bool(_) => Some((key, value.to_string())),
        _ => None,
    };
    map.into_iter().map(tag).collect()
}

/// RFC 3339; `None` before 1970 too.
fn unix_ns(text: &str) -> Option<u64> {
    let time: Timestamp = text.parse().ok()?;
    let seconds = u64::try_from(time.seconds).ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(u64::try_from(time.nanos).ok()?)
}

/// Go's form, as Jaeger's UI and Grafana write it: numbers with units, one behind the other.
fn duration(text: &str) -> Option<Duration> {
    const UNITS: [(&str, f64); 7] =
        [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let (mut rest, mut seconds) = (text, 0.0);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let (_, unit) = UNITS.iter().find(|(name, _)| *name == &rest[..end])?;
        seconds += number * unit;
        rest = &rest[end..];
    }
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(parameters: &[(&str, &str)]) -> Result<Query, Error> {
        let owned: Vec<_> = parameters.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        Query::parse(&owned)
    }

    #[test]
    fn both_apis_ask_the_same() {
        let classic = parse(&[
            ("service", "tandem-router"),
            ("operation", "chat m"),
            ("limit", "5"),
            ("start", "1700000000000000"),
            ("end", "1700000001500000"),
            ("minDuration", "1.5ms"),
            ("maxDuration", "1m2s"),
            ("tags", r#"{"error":"true"}"#),
            ("lookback", "1h"),
        ]);
        let v3 = parse(&[
            ("query.service_name", "tandem-router"),
            ("query.operation_name", "chat m"),
            ("query.num_traces", "5"),
            ("query.start_time_min", "2023-11-14T22:13:20Z"),
            ("query.start_time_max", "2023-11-14T23:13:21.5+01:00"),
            ("query.duration_min", "1500us"),
            ("query.duration_max", "62s"),
            ("query.attributes", r#"{"error":true}"#),
        ]);
        let classic = classic.unwrap();
        assert_eq!(classic, v3.unwrap());
        assert_eq!((classic.start_max_ns, classic.duration_max), (Some(1_700_000_001_500_000_000), duration("62s")));
        assert_eq!(parse(&[("tag", "a:b:c"), ("minDuration", "")]).unwrap().tags, [("a".into(), "b:c".into())]);
        assert_eq!(parse(&[]).unwrap(), Query::default());
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let many: Vec<_> = (0..17).map(|_| ("tag", "a:b")).collect();
        for wrong in [
            [("limit", "many")].as_slice(),
            &[("start", "yesterday")],
            &[("end", "99999999999999999999")],
            &[("query.start_time_min", "1700000000")],
            &[("minDuration", "5")],
            &[("maxDuration", "5 s")],
            &[("query.duration_max", "s")],
            &[("tag", "error")],
            &[("tags", "error=true")],
            &[("tags", r#"{"a": {}}"#)],
            &many,
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.kind == ErrorKind::InvalidArgument && error.message.starts_with(wrong[0].0), "{error}");
        }
    }

    #[test]
    fn all_must_hold_of_one_span() {
        let value = |value| Some(v1::AnyValue { value: Some(value) });
        let attribute = |key: &str, of| v1::Attribute { key: key.into(), value: value(of) };
        let span = v1::Span {
            process: Some(v1::Process { service: "tandem-router".into(), instance: String::new() }),
            name: "chat m".into(),
            kind: v1::SpanKind::Server.into(),
            start_unix_ns: 5_000,
            end_unix_ns: 25_000,
            status: Some(v1::SpanStatus { message: "no".into(), code: 2 }),
            attributes: vec![
                attribute("tandem.replans", any_value::Value::Integer(2)),
                attribute("tandem.route.plan", any_value::Value::Text("local".into())),
            ],
            events: vec![v1::SpanEvent {
                attributes: vec![attribute("cause", any_value::Value::Text("engine".into()))],
                ..v1::SpanEvent::default()
            }],
            ..v1::Span::default()
        };
        for (parameters, expected) in [
            ([("service", "tandem-router"), ("operation", "chat m")], true),
            ([("service", "tandem-router"), ("operation", "queue")], false),
            ([("start", "5"), ("end", "5")], true),
            ([("start", "6"), ("end", "9")], false),
            ([("minDuration", "20us"), ("maxDuration", "20us")], true),
            ([("minDuration", "21us"), ("maxDuration", "1s")], false),
            ([("tag", "error:true"), ("tag", "span.kind:server")], true),
            ([("tag", "error:false"), ("tag", "span.kind:server")], false),
            ([("tag", "tandem.replans:2"), ("tag", "cause:engine")], true),
            ([("tag", "tandem.replans:3"), ("tag", "cause:engine")], false),
            ([("tags", r#"{"tandem.route.plan":"local"}"#), ("tag", "otel.status_description:no")], true),
        ] {
            assert_eq!(parse(&parameters).unwrap().matches(&span), expected, "{parameters:?}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(key in "(tag|tags|start|minDuration|query.start_time_min)", value in "\\PC{0,30}") {
            let _ = parse(&[(&key, &value)]);
        }
    }
}
