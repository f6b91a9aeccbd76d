//! What stands under a key of a header.

/// A value. Integers keep their width, because two keys of the same name may have different ones in different files;
/// most readers want [`Value::unsigned`].
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "GGUF's own names")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Vec<Value>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// A string.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// An integer of any width that is not negative.
    pub fn unsigned(&self) -> Option<u64> {
        match *self {
            Self::U64(number) => Some(number),
            _ => u64::try_from(self.signed()?).ok(),
        }
    }

    /// An integer of any width.
    pub fn signed(&self) -> Option<i64> {
        match *self {
            Self::U8(number) => Some(number.into()),
            Self::I8(number) => Some(number.into()),
            Self::U16(number) => Some(number.into()),
            Self::I16(number) => Some(number.into()),
            Self::U32(number) => Some(number.into()),
            Self::I32(number) => Some(number.into()),
            Self::U64(number) => i64::try_from(number).ok(),
            Self::I64(number) => Some(number),
            _ => None,
        }
    }

    /// A floating-point number.
    pub fn float(&self) -> Option<f32> {
        match *self {
            Self::F32(number) => Some(number),
            Self::F64(number) => Some(number as f32),
            _ => None,
        }
    }

    /// A boolean.
    pub fn flag(&self) -> Option<bool> {
        match *self {
            Self::Bool(flag) => Some(flag),
            _ => None,
        }
    }

    /// Elements of an array.
    pub fn array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(values) => Some(values),
            _ => None,
        }
    }

    /// Name of the type, for people.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F64(_) => "f64",
        }
    }
}
