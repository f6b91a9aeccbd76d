//! GGUF headers (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>): keys, values, and where each tensor
//! lies. Pure: bytes in, a [`Header`] or an error out. Engine and router both read files through it, each in its own
//! way.
//!
//! Nothing in a header is trusted. Lengths are compared with the bytes that are there before memory is taken for them,
//! and every count has a limit. What a tensor's bytes mean is the engine's matter.
//!
//! - [`Header`]: read it first. [`value`]: what stands under a key. `cursor.rs`: the bounded reading.
//! - [`tensor_type`]: GGML's number formats by name and size.
//! - [`split`]: models in several files.
#![forbid(unsafe_code)]

mod cursor;
pub mod split;
pub mod tensor_type;
pub mod value;

use std::collections::{BTreeMap, HashMap};

use cursor::Cursor;
pub use split::Split;
pub use tensor_type::TensorType;
pub use value::Value;

/// No header is longer: the largest public ones (vocabularies of 256k tokens with merges) are below 20 MB.
pub const MAX_HEADER_BYTES: usize = 1 << 28;
/// Keys of a header at most.
const MAX_KEYS: u64 = 1 << 16;
/// Tensors of a file at most.
const MAX_TENSORS: u64 = 1 << 18;
/// Dimensions of a tensor at most (`GGML_MAX_DIMS`).
const MAX_DIMS: u32 = 4;
/// Where tensors begin when no key says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;
/// An alignment beyond a huge page is no alignment.
const MAX_ALIGNMENT: u64 = 1 << 21;

/// Why bytes are no header that we read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// More bytes are needed. If these are all, the file was cut.
    #[error("not a whole GGUF header in {0} bytes, is the file truncated?")]
    Truncated(usize),
    /// Another kind of file.
    #[error("not a GGUF file: it begins with {0:02x?} instead of \"GGUF\"")]
    Foreign(Vec<u8>),
    /// A kind of GGUF that we do not read.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// What no writer writes.
    #[error("damaged GGUF header: {0}")]
    Damaged(String),
}

/// A header.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    values: HashMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
    /// The first byte behind the header, aligned.
    data_at: u64,
}

/// A tensor, as the header has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Number format.
    pub dtype: TensorType,
    /// Sizes, the outermost first: rows, then the values of a row.
    pub dims: Vec<u64>,
    /// Where it begins, in bytes of the file.
    pub at: u64,
}

impl Header {
    /// Reads the header at the beginning of `bytes`, a file or as much of its beginning as the caller has.
    ///
    /// # Errors
    /// `Truncated` when the header goes on behind `bytes`; the others whatever follows.
    pub fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        let mut cursor = Cursor::new(bytes);
        let (tensors, keys) = cursor.start()?;
        if keys > MAX_KEYS || tensors > MAX_TENSORS {
            return Err(GgufError::Damaged(format!("{keys} keys and {tensors} tensors")));
        }
        let mut values = HashMap::new();
        for _ in 0..keys {
            let key = cursor.string()?;
            let value = cursor.value()?;
            if let Some(_earlier) = values.insert(key.clone(), value) {
                return Err(GgufError::Damaged(format!("the key {key} is there twice")));
            }
        }
        let alignment = alignment(&values)?;
        let mut infos = BTreeMap::new();
        for _ in 0..tensors {
            let name = cursor.string()?;
            let info = tensor_info(&mut cursor, &name, alignment)?;
            if infos.insert(name.clone(), info).is_some() {
                return Err(GgufError::Damaged(format!("the tensor {name} is there twice")));
            }
        }
        let data_at = (cursor.at() as u64).next_multiple_of(alignment);
        for (name, info) in &mut infos {
            let at = info.at.checked_add(data_at);
            info.at = at.ok_or_else(|| GgufError::Damaged(format!("tensor {name} begins nowhere in a file")))?;
        }
        Ok(Self { values, tensors: infos, data_at })
    }

    /// What stands under a key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// The keys' values.
    pub fn into_values(self) -> HashMap<String, Value> {
        self.values
    }

    /// A tensor.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// Where the tensors' bytes begin.
    pub fn data_at(&self) -> u64 {
        self.data_at
    }

    /// The first byte behind the last tensor: what the file holds at least. Tensors of types whose sizes we do not have
    /// count from their beginning only. `None` when a size is more than any file holds.
    pub fn end(&self) -> Option<u64> {
        self.tensors.values().try_fold(0u64, |end, info| {
            let bytes = match info.dtype.group() {
                Some(_) => info.bytes()?,
                None => 0,
            };
            Some(end.max(info.at.checked_add(bytes)?))
        })
    }
}

impl TensorInfo {
    /// Values.
    pub fn values(&self) -> Option<u64> {
        self.dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
    }

    /// Bytes in the file: rows of whole groups. `None` where a row is none, where the sizes overflow, or for a type
    /// whose size we do not have.
    pub fn bytes(&self) -> Option<u64> {
        let group = self.dtype.group()?;
        let row = self.dims.last().copied().unwrap_or(1);
        if !row.is_multiple_of(group.values) {
            return None;
        }
        (self.values()? / group.values).checked_mul(group.bytes)
    }
}

fn tensor_info(cursor: &mut Cursor<'_>, name: &str, alignment: u64) -> Result<TensorInfo, GgufError> {
    let damaged = |why: String| GgufError::Damaged(format!("tensor {name} {why}"));
    let count = cursor.u32()?;
    if count > MAX_DIMS {
        return Err(damaged(format!("has {count} dimensions")));
    }
    // The file has the innermost first.
    let mut dims = (0..count).map(|_| cursor.length()).collect::<Result<Vec<u64>, _>>()?;
    dims.reverse();
    let dtype = TensorType(cursor.u32()?);
    let at = cursor.u64()?;
    if !at.is_multiple_of(alignment) {
        return Err(damaged(format!("begins at {at}, which is no multiple of {alignment}")));
    }
    Ok(TensorInfo { dtype, dims, at })
}

fn alignment(values: &HashMap<String, Value>) -> Result<u64, GgufError> {
    let Some(value) = values.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    match value.unsigned() {
        Some(alignment) if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT => Ok(alignment),
        _ => Err(GgufError::Damaged(format!("general.alignment is {value:?}, no power of two"))),
    }
}
