//! A JSON object, read field by field, so that each error names its field. Fields that nobody asks for are ignored and
//! never built; values are read into their own type without a tree in between.
use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tandem_proto::{Error, ErrorKind};

/// The fields of one object, unparsed. They are few, and asked for forty times: none is hashed.
pub(super) struct Fields<'a> {
    fields: BTreeMap<Cow<'a, str>, &'a RawValue>,
}

/// The value of an unsupported field that changes nothing and is therefore let through; `null` always is.
#[derive(Clone, Copy)]
pub(super) enum Neutral {
    /// This number.
    Number(f64),
    /// This boolean.
    Flag(bool),
    /// This string.
    Text(&'static str),
    /// An empty array, object or string.
    Empty,
}

impl<'a> Fields<'a> {
    /// # Errors
    /// `InvalidArgument` for anything but a JSON object.
    pub fn parse(json: &'a str) -> Result<Self, Error> {
        let fields = serde_json::from_str(json).map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, format!("the request body is not a JSON object: {error}"))
        })?;
        Ok(Self { fields })
    }

    /// The field's JSON text; `null` counts as absent.
    pub fn raw(&self, name: &str) -> Option<&'a str> {
        self.fields.get(name).map(|raw| raw.get()).filter(|raw| *raw != "null")
    }

    /// The field's value.
    ///
    /// # Errors
    /// `InvalidArgument` with the field's name for a value of another type or out of the type's range.
    pub fn get<T: Deserialize<'a>>(&self, name: &'static str) -> Result<Option<T>, Error> {
        self.raw(name).map(|raw| value(name, raw)).transpose()
    }

    /// A boolean field; absent means false.
    pub fn flag(&self, name: &'static str) -> Result<bool, Error> {
        Ok(self.get(name)?.unwrap_or(false))
    }

    /// A finite number for which `allowed` holds; `range` says in words what that is.
    pub fn number(&self, name: &'static str, range: &str, allowed: impl Fn(f64) -> bool) -> Result<Option<f64>, Error> {
        match self.get::<f64>(name)? {
            Some(number) if !allowed(number) => {
                Err(Error::invalid(name, format!("{name} must be {range}, not {number}")))
            }
            other => Ok(other),
        }
    }

    /// Refuses `names` unless they are absent or neutral: silently dropping them would change the answer.
    pub fn refuse(&self, names: &[(&'static str, Neutral)]) -> Result<(), Error> {
        for (name, neutral) in names {
            if self.raw(name).is_some_and(|raw| !neutral.is(raw)) {
                return Err(Error::invalid(name, format!("{name} is not supported")));
            }
        }
        Ok(())
    }
}

impl Neutral {
    fn is(self, raw: &str) -> bool {
        let Ok(value) = serde_json::from_str::<Value>(raw) else { return false };
        match (self, value) {
            (Self::Number(neutral), Value::Number(number)) => number.as_f64() == Some(neutral),
            (Self::Flag(neutral), Value::Bool(flag)) => flag == neutral,
            (Self::Text(neutral), Value::String(text)) => text == neutral,
            (Self::Empty, Value::Array(items)) => items.is_empty(),
            (Self::Empty, Value::Object(fields)) => fields.is_empty(),
            (Self::Empty, Value::String(text)) => text.is_empty(),
            _ => false,
        }
    }
}

/// Reads `raw`, a part of field `name`.
///
/// # Errors
/// `InvalidArgument` with the field's name.
pub(super) fn value<'a, T: Deserialize<'a>>(name: &'static str, raw: &'a str) -> Result<T, Error> {
    serde_json::from_str(raw).map_err(|error| {
        let message = error.to_string();
        // Positions within the field help nobody.
        let reason = message.split(" at line ").next().unwrap_or_default();
        Error::invalid(name, format!("{name}: {reason}"))
    })
}

/// A string or an array of strings, in field `name`.
///
/// # Errors
/// As [`value`].
pub(super) fn one_or_many(name: &'static str, raw: &str) -> Result<Vec<String>, Error> {
    if raw.starts_with('"') { Ok(vec![value(name, raw)?]) } else { value(name, raw) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn errors_name_the_field() {
        let fields = Fields::parse(r#"{"a": -1, "b": "x", "c": 3.5, "d": null, "e": 99999999999}"#).unwrap();
        for name in ["a", "b", "c", "e"] {
            let error = fields.get::<u32>(name).unwrap_err();
            assert_eq!((error.kind, error.param), (ErrorKind::InvalidArgument, Some(name)));
            assert!(error.message.starts_with(&format!("{name}: ")) && !error.message.contains("line"));
        }
        assert_eq!(fields.get::<u32>("d"), Ok(None));
        assert_eq!(fields.get::<u32>("z"), Ok(None));
    }

    #[test]
    fn only_objects() {
        for text in ["", "[]", "1", "{", "{\"a\":}", "{\"a\":1} x"] {
            assert!(Fields::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn neutral_values_pass() {
        let fields = Fields::parse(r#"{"n": 1, "b": {}, "t": [1], "p": 0.0, "f": true}"#).unwrap();
        let neutral = [("n", Neutral::Number(1.0)), ("b", Neutral::Empty), ("p", Neutral::Number(0.0))];
        assert_eq!(fields.refuse(&neutral), Ok(()));
        assert_eq!(fields.refuse(&[("t", Neutral::Empty)]).unwrap_err().param, Some("t"));
        assert_eq!(fields.refuse(&[("f", Neutral::Flag(false))]).unwrap_err().param, Some("f"));
    }

    proptest! {
        #[test]
        fn never_panics(text in "[\\[\\]{}\",:0-9a-z\\\\ ]{0,60}") {
            if let Ok(fields) = Fields::parse(&text) {
                let _ = fields.get::<Vec<u32>>("a");
            }
        }
    }
}
