//! A trace and its spans, in the JSON form in which the router tells them.
use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// As `GET /api/traces/{id}` answers.
#[derive(Debug, Default, Deserialize)]
pub struct Trace {
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// In no order.
    pub spans: Vec<Span>,
    /// Its page in Jaeger, where the router knows of one.
    #[serde(default)]
    pub jaeger: Option<String>,
}

impl Trace {
    /// Its first lines.
    pub fn head(&self) -> String {
        let link = self.jaeger.as_ref().map(|link| format!("jaeger {link}\n")).unwrap_or_default();
        format!("trace {}\n{link}", self.trace_id)
    }
}

/// One span of any process.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Span {
    /// What was done.
    pub name: String,
    /// Which kind of process.
    #[serde(default)]
    pub service: String,
    /// Which process.
    #[serde(default)]
    pub instance: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// Empty or absent for the root.
    #[serde(default, deserialize_with = "text_or_null")]
    pub parent_span_id: String,
    /// Unix nanoseconds.
    #[serde(deserialize_with = "nanoseconds")]
    pub start_unix_ns: u64,
    /// Unix nanoseconds.
    #[serde(deserialize_with = "nanoseconds")]
    pub end_unix_ns: u64,
    /// By name.
    #[serde(default)]
    pub attributes: BTreeMap<String, Value>,
    /// Absent or empty: ok.
    #[serde(default, deserialize_with = "text_or_null")]
    pub error: String,
    /// In the order in which they were told.
    #[serde(default)]
    pub events: Vec<Event>,
}

impl Span {
    /// Milliseconds from start to end.
    pub fn length_ms(&self) -> f64 {
        self.end_unix_ns.saturating_sub(self.start_unix_ns) as f64 / 1e6
    }
}

/// Something that happened within a span.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Event {
    /// What.
    pub name: String,
    /// By name.
    #[serde(default)]
    pub attributes: BTreeMap<String, Value>,
}

fn text_or_null<'de, D: Deserializer<'de>>(input: D) -> Result<String, D::Error> {
    Ok(Option::<String>::deserialize(input)?.unwrap_or_default())
}

/// A number, or a string as JSON writers use for integers above 2^53.
fn nanoseconds<'de, D: Deserializer<'de>>(input: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(input)?;
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    number.ok_or_else(|| serde::de::Error::custom("a time is not a number of nanoseconds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_numbers_and_absent_fields_are_read() {
        let text = r#"{"trace_id":"ab","spans":[
            {"name":"a","span_id":"01","start_unix_ns":1790000000000000001,"end_unix_ns":"1790000000000000002"},
            {"name":"b","span_id":"02","parent_span_id":null,"start_unix_ns":1,"end_unix_ns":2,"error":null,"events":[]}]}"#;
        let trace: Trace = serde_json::from_str(text).unwrap();
        assert_eq!(trace.spans[0].end_unix_ns - trace.spans[0].start_unix_ns, 1);
        assert_eq!(trace.spans[1].parent_span_id, "");
        assert_eq!(trace.head(), "trace ab\n");
        let linked = Trace { jaeger: Some("http://j/trace/ab".into()), ..trace };
        assert_eq!(linked.head(), "trace ab\njaeger http://j/trace/ab\n");
    }
}
