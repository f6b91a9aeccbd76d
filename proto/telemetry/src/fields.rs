//! What a log line says: its message, and its fields as JSON values.
use std::fmt::{Debug, Write};

use serde_json::{Value, json};
use tracing::field::{Field, Visit};

use crate::phase::Value as Attribute;

/// Target of the line that every request leaves. It says what the request's span says, and is no event of it.
pub const ACCESS: &str = "access";

/// What a line says.
#[derive(Debug, Default)]
pub(crate) struct Fields {
    pub message: String,
    pub rest: Vec<(&'static str, Value)>,
}

impl Fields {
    /// The fields as attributes of a span or of a log record have them.
    pub fn attributes(&self) -> impl Iterator<Item = (&'static str, Attribute)> {
        self.rest.iter().map(|(key, value)| (*key, attribute(value)))
    }
}

fn attribute(value: &Value) -> Attribute {
    match value {
        Value::Bool(flag) => Attribute::Flag(*flag),
        Value::Number(number) => match number.as_i64() {
            Some(integer) => Attribute::Integer(integer),
            None => Attribute::Number(number.as_f64().unwrap_or_default()),
        },
        Value::String(text) => Attribute::Text(text.clone()),
        other => Attribute::Text(other.to_string()),
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.rest.push((field.name(), json!(value)));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.rest.push((field.name(), json!(value)));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.rest.push((field.name(), json!(value)));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.rest.push((field.name(), json!(value)));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.rest.push((name, json!(value))),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => {
                let _ = write!(self.message, "{value:?}");
            }
            name => self.rest.push((name, Value::String(format!("{value:?}")))),
        }
    }
}
