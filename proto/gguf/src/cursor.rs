//! Reading a header's pieces one after another, within bounds. All numbers are little-endian.
use crate::{GgufError, MAX_HEADER_BYTES, Value};

/// No key, name, token or chat template is longer.
const MAX_STRING_BYTES: u64 = 1 << 24;
/// Elements of all arrays together: what they take in memory is bounded, however small each is in the file.
const MAX_ELEMENTS: u64 = 1 << 23;
/// Arrays of arrays of arrays; no public file has even two of them.
const MAX_DEPTH: u32 = 4;

pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Whether `bytes` ends where a header must have ended.
    clipped: bool,
    /// Version 1 has lengths of 32 bits.
    short_lengths: bool,
    elements: u64,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        let clipped = bytes.len() > MAX_HEADER_BYTES;
        let bytes = &bytes[..bytes.len().min(MAX_HEADER_BYTES)];
        Self { bytes, at: 0, clipped, short_lengths: false, elements: 0 }
    }

    pub fn at(&self) -> usize {
        self.at
    }

    /// Magic number and version; the numbers of tensors and keys.
    pub fn start(&mut self) -> Result<(u64, u64), GgufError> {
        let begin = &self.bytes[..self.bytes.len().min(4)];
        if !b"GGUF".starts_with(begin) {
            return Err(GgufError::Foreign(begin.to_vec()));
        }
        self.take(4)?;
        match self.u32()? {
            1 => self.short_lengths = true,
            2 | 3 => {}
            version if (1..=3).contains(&version.swap_bytes()) => {
                return Err(GgufError::Unsupported("a GGUF file of big-endian numbers".into()));
            }
            version => return Err(GgufError::Unsupported(format!("version {version} of GGUF"))),
        }
        Ok((self.length()?, self.length()?))
    }

    pub fn u32(&mut self) -> Result<u32, GgufError> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, GgufError> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn length(&mut self) -> Result<u64, GgufError> {
        if self.short_lengths { self.u32().map(u64::from) } else { self.u64() }
    }

    /// Some writers put zeros at the end; some vocabularies have bytes that are no UTF-8.
    pub fn string(&mut self) -> Result<String, GgufError> {
        let length = self.length()?;
        if length > MAX_STRING_BYTES {
            return Err(GgufError::Damaged(format!("a string of {length} bytes")));
        }
        let bytes = self.take(length as usize)?;
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    /// A value behind its type.
    pub fn value(&mut self) -> Result<Value, GgufError> {
        let kind = self.u32()?;
        self.value_of(kind, 0)
    }

    fn value_of(&mut self, kind: u32, depth: u32) -> Result<Value, GgufError> {
        Ok(match kind {
            0 => Value::U8(self.array().map(u8::from_le_bytes)?),
            1 => Value::I8(self.array().map(i8::from_le_bytes)?),
            2 => Value::U16(self.array().map(u16::from_le_bytes)?),
            3 => Value::I16(self.array().map(i16::from_le_bytes)?),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(self.array().map(i32::from_le_bytes)?),
            6 => Value::F32(self.array().map(f32::from_le_bytes)?),
            7 => match self.array()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(GgufError::Damaged(format!("a boolean of {other}"))),
            },
            8 => Value::String(self.string()?),
            9 => self.values(depth + 1)?,
            10 => Value::U64(self.u64()?),
            11 => Value::I64(self.array().map(i64::from_le_bytes)?),
            12 => Value::F64(self.array().map(f64::from_le_bytes)?),
            other => return Err(GgufError::Damaged(format!("a value of the type {other}"))),
        })
    }

    fn values(&mut self, depth: u32) -> Result<Value, GgufError> {
        let (kind, count) = (self.u32()?, self.length()?);
        self.elements = self.elements.saturating_add(count);
        if depth > MAX_DEPTH || self.elements > MAX_ELEMENTS {
            return Err(GgufError::Damaged(format!("an array of {count} elements at depth {depth}")));
        }
        // Grows as elements are found: the count is not believed beforehand.
        let mut values = Vec::new();
        for _ in 0..count {
            values.push(self.value_of(kind, depth)?);
        }
        Ok(Value::Array(values))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], GgufError> {
        let taken = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| match self.clipped {
            true => GgufError::Damaged(format!("longer than {MAX_HEADER_BYTES} bytes")),
            false => GgufError::Truncated(self.bytes.len()),
        })?;
        self.at += count;
        Ok(taken)
    }
}
