//! A JSON object, read field by field, so that each error names its field. Fields that nobody asks for are ignored and
//! never built; values are read into their own type without a tree in between.
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;
use tandem_proto::{Error, ErrorKind};

/// Fields of one object at most: no API has so many, and each would take ten times its room in the body.
const MAX_FIELDS: usize = 256;

/// The fields of one object, unparsed. They are few, and asked for forty times: none is hashed.
pub(super) struct Fields<'a> {
    fields: BTreeMap<Cow<'a, str>, &'a RawValue>,
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = BTreeMap<Cow<'de, str>, &'de RawValue>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = BTreeMap::new();
                while let Some((name, value)) = map.next_entry()? {
                    fields.insert(name, value);
                    if fields.len() > MAX_FIELDS {
                        return Err(A::Error::custom(format!("more than {MAX_FIELDS} fields")));
                    }
                }
                Ok(fields)
            }
        }
        Ok(Self { fields: deserializer.deserialize_map(Object)? })
    }
}

/// A string, lent by the body where nothing in it is escaped: some have megabytes.
#[derive(Deserialize)]
#[serde(transparent)]
pub(super) struct Lent<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// Up to `MOST` items; an array of more is an error before they are all in memory.
#[derive(Debug)]
pub(super) struct AtMost<T, const MOST: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for AtMost<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Array<T, const MOST: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Array<T, MOST> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = items.next_element()? {
                    if all.len() == MOST {
                        return Err(A::Error::custom(format!("more than {MOST} items")));
                    }
                    all.push(item);
                }
                Ok(all)
            }
        }
        Ok(Self(deserializer.deserialize_seq(Array::<T, MOST>(PhantomData))?))
    }
}

/// An integer, also where it is written as `3.0` or `1e2`: as OpenAI's and vLLM's servers read it.
pub(super) struct Integer(pub i64);

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = serde_json::Number::deserialize(deserializer)?;
        // Floating-point numbers are integers up to 2⁵³ without a doubt.
        let whole = |float: f64| (float.fract() == 0.0 && float.abs() <= (1u64 << 53) as f64).then_some(float as i64);
        let integer = number.as_i64().or_else(|| number.as_f64().filter(|_| number.is_f64()).and_then(whole));
        integer.map(Self).ok_or_else(|| D::Error::custom(format!("{number} is no integer, or too large a one")))
    }
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
    /// None: only `null` is let through.
    Nothing,
    /// An array of this string alone.
    Only(&'static str),
}

impl<'a> Fields<'a> {
    /// # Errors
    /// `InvalidArgument` for anything but a JSON object.
    pub fn parse(json: &'a str) -> Result<Self, Error> {
        serde_json::from_str(json).map_err(|error| {
            Error::new(ErrorKind::InvalidArgument, format!("the request body is not a JSON object: {error}"))
        })
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

    /// An integer field within the type's range, see [`Integer`].
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn integer<T: TryFrom<i64>>(&self, name: &'static str) -> Result<Option<T>, Error> {
        let Some(Integer(number)) = self.get(name)? else { return Ok(None) };
        T::try_from(number).map(Some).map_err(|_| Error::invalid(name, format!("{name}: {number} is out of range")))
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
        // Nothing neutral is long, and a tree of much else would be many times its text.
        let Some(Ok(value)) = (raw.len() <= 64).then(|| serde_json::from_str::<Value>(raw)) else { return false };
        match (self, value) {
            (Self::Number(neutral), Value::Number(number)) => number.as_f64() == Some(neutral),
            (Self::Flag(neutral), Value::Bool(flag)) => flag == neutral,
            (Self::Text(neutral), Value::String(text)) => text == neutral,
            (Self::Only(neutral), Value::Array(items)) => items.iter().all(|item| item.as_str() == Some(neutral)),
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
    seeded(name, raw, PhantomData)
}

/// The same, read as `seed` says.
///
/// # Errors
/// As [`value`].
pub(super) fn seeded<'a, S: DeserializeSeed<'a>>(name: &'static str, raw: &'a str, seed: S) -> Result<S::Value, Error> {
    let mut deserializer = serde_json::Deserializer::from_str(raw);
    let read = seed.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    read.map_err(|error| {
        let message = error.to_string();
        // Positions within the field help nobody.
        let reason = message.split(" at line ").next().unwrap_or_default();
        Error::invalid(name, format!("{name}: {reason}"))
    })
}

/// A string or an array of at most `MOST` strings, in field `name`.
///
/// # Errors
/// As [`value`].
pub(super) fn one_or_many<const MOST: usize>(name: &'static str, raw: &str) -> Result<Vec<String>, Error> {
    if raw.starts_with('"') { Ok(vec![value(name, raw)?]) } else { Ok(value::<AtMost<String, MOST>>(name, raw)?.0) }
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
    fn a_text_without_escapes_is_no_copy() {
        let json = r#"{"plain": "héllo", "escaped": "h\u00e9llo\n", "empty": "", "number": 1}"#;
        let fields = Fields::parse(json).unwrap();
        let text = |name| fields.get::<Lent>(name).map(|text| text.map(|Lent(text)| text));
        assert!(matches!(text("plain"), Ok(Some(Cow::Borrowed("héllo")))));
        assert_eq!(text("escaped"), Ok(Some(Cow::Borrowed("héllo\n"))));
        assert_eq!(text("empty"), Ok(Some(Cow::Borrowed(""))));
        let error = text("number").unwrap_err();
        assert!(error.message.contains("expected a string"), "{}", error.message);
    }

    #[test]
    fn only_objects() {
        for text in ["", "[]", "1", "{", "{\"a\":}", "{\"a\":1} x"] {
            assert!(Fields::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn integers_may_be_written_as_floating_point_numbers() {
        let fields =
            Fields::parse(r#"{"a": 3.0, "b": 1e2, "c": -1.0, "d": 3.5, "e": 1e300, "f": 4294967296.0}"#).unwrap();
        assert_eq!((fields.integer::<u32>("a"), fields.integer::<u32>("b")), (Ok(Some(3)), Ok(Some(100))));
        assert_eq!((fields.integer::<i64>("c"), fields.integer::<u32>("z")), (Ok(Some(-1)), Ok(None)));
        for name in ["c", "d", "e", "f"] {
            assert_eq!(fields.integer::<u32>(name).unwrap_err().param, Some(name));
        }
    }

    #[test]
    fn what_is_too_much_is_refused_before_it_is_all_in_memory() {
        let many: Vec<String> = (0..=MAX_FIELDS).map(|n| format!("\"f{n}\": 1")).collect();
        assert!(Fields::parse(&format!("{{{}}}", many.join(","))).err().unwrap().message.contains("256 fields"));
        assert!(Fields::parse(&format!("{{{}}}", many[1..].join(","))).is_ok());
        assert_eq!(value::<AtMost<u32, 3>>("a", "[1,2,3]").unwrap().0, [1, 2, 3]);
        assert!(value::<AtMost<u32, 3>>("a", "[1,2,3,4]").unwrap_err().message.contains("more than 3"));
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
