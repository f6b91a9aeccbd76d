//! What spans, metrics and log lines say of the process that they are from, in OTLP's own messages. Pure.
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;

/// Who spans and figures are from; `version` where it is known.
pub(crate) fn resource(service: &str, instance: &str, version: Option<&str>) -> Resource {
    let who = [("service.name", Some(service)), ("service.instance.id", Some(instance)), ("service.version", version)];
    let attributes = who.into_iter().filter_map(|(key, value)| Some(attribute(key, value?))).collect();
    Resource { attributes, ..Resource::default() }
}

/// What made them there.
pub(crate) fn scope() -> InstrumentationScope {
    InstrumentationScope { name: "tandem".to_owned(), ..InstrumentationScope::default() }
}

/// A text with a name.
pub(crate) fn attribute(key: &str, value: &str) -> KeyValue {
    let value = Some(AnyValue { value: Some(Value::StringValue(value.to_owned())) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}
