//! Reads the header of a GGUF model file (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>): the key-value
//! pairs only. The weights are never loaded here, but a file that is too short to hold them is refused, and the whole
//! file is digested.
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value};
use xxhash_rust::xxh3::Xxh3;

/// Why a model file gives no tokenizer or template. The caller can only use another file.
#[derive(Debug, thiserror::Error)]
pub enum ModelTextError {
    /// The file cannot be opened or read.
    #[error("cannot read the model file {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// Not a file of its kind, or a damaged or truncated one.
    #[error("{path} is not a usable model file: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A key that the tokenizer needs is absent or has another type.
    #[error("the model file's metadata has no usable `{key}`: {reason}")]
    Metadata {
        /// GGUF key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tokenizer or template of a kind that is not implemented.
    #[error("unsupported model: {0}")]
    Unsupported(String),
}

/// The header's key-value pairs with typed access.
pub(crate) struct Metadata {
    values: HashMap<String, Value>,
}

impl Metadata {
    /// Reads the header of the file and checks that the file is as long as its tensor table says.
    ///
    /// # Errors
    /// `Unreadable` or `Damaged`, naming the file.
    pub fn read(path: &Path) -> Result<Self, ModelTextError> {
        let unreadable = |source| ModelTextError::Unreadable { path: path.to_owned(), source };
        let damaged = |reason: String| ModelTextError::Damaged { path: path.to_owned(), reason };
        let file = File::open(path).map_err(unreadable)?;
        let status = file.metadata().map_err(unreadable)?;
        if !status.is_file() {
            return Err(damaged("not a regular file".into()));
        }
        let file_bytes = status.len();
        let mut reader = BufReader::with_capacity(1 << 18, file);
        check_magic(&mut reader).map_err(damaged)?;
        // candle divides by `general.alignment` unchecked: a zero there must not end the process.
        let content = catch_unwind(AssertUnwindSafe(|| Content::read(&mut reader)))
            .map_err(|_| damaged("the header holds an impossible value".into()))?
            .map_err(|error| damaged(format!("damaged or truncated header: {}", first_line(&error))))?;
        let needed_bytes = tensor_end(&content).ok_or_else(|| damaged("a tensor of an impossible size".into()))?;
        if needed_bytes > file_bytes {
            return Err(damaged(format!("truncated: {file_bytes} bytes of at least {needed_bytes}")));
        }
        Ok(Self { values: content.metadata })
    }

    #[cfg(test)]
    pub fn from_values(values: HashMap<String, Value>) -> Self {
        Self { values }
    }

    /// A string value.
    pub fn text(&self, key: &str) -> Result<&str, ModelTextError> {
        match self.values.get(key) {
            Some(Value::String(text)) => Ok(text),
            other => Err(unusable(key, "a string", other)),
        }
    }

    /// An unsigned integer of any width.
    pub fn integer(&self, key: &str) -> Result<u32, ModelTextError> {
        let value = self.values.get(key);
        let wide = value.and_then(|value| match value {
            Value::I32(number) => u64::try_from(*number).ok(),
            Value::I64(number) => u64::try_from(*number).ok(),
            Value::Bool(_) => None,
            other => other.to_u64().ok(),
        });
        wide.and_then(|number| u32::try_from(number).ok()).ok_or_else(|| unusable(key, "an unsigned integer", value))
    }

    /// A boolean.
    pub fn flag(&self, key: &str, absent: bool) -> bool {
        match self.values.get(key) {
            Some(Value::Bool(flag)) => *flag,
            _ => absent,
        }
    }

    /// The elements of an array of strings.
    pub fn texts(&self, key: &str) -> Result<Vec<&str>, ModelTextError> {
        self.array(key, "an array of strings", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// The elements of an array of integers.
    pub fn integers(&self, key: &str) -> Result<Vec<i64>, ModelTextError> {
        let element = |value: &Value| match value {
            Value::I32(number) => Some(i64::from(*number)),
            Value::U32(number) => Some(i64::from(*number)),
            Value::U8(number) => Some(i64::from(*number)),
            _ => None,
        };
        self.array(key, "an array of integers", element)
    }

    /// The elements of an array of floating-point numbers.
    pub fn floats(&self, key: &str) -> Result<Vec<f32>, ModelTextError> {
        self.array(key, "an array of numbers", |value| value.to_f32().ok())
    }

    fn array<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        element: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Vec<T>, ModelTextError> {
        match self.values.get(key) {
            Some(Value::Array(values)) => {
                values.iter().map(element).collect::<Option<_>>().ok_or_else(|| unusable(key, wanted, None))
            }
            other => Err(unusable(key, wanted, other)),
        }
    }
}

/// XXH3-64 of the whole file, read in pieces of 1 MiB.
pub(crate) fn digest(path: &Path) -> Result<u64, ModelTextError> {
    let unreadable = |source| ModelTextError::Unreadable { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(unreadable)?;
    let mut hasher = Xxh3::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece).map_err(unreadable)? {
            0 => return Ok(hasher.digest()),
            count => hasher.update(&piece[..count]),
        }
    }
}

fn check_magic(reader: &mut (impl Read + Seek)) -> Result<(), String> {
    let mut magic = [0; 4];
    reader.read_exact(&mut magic).map_err(|_| "shorter than its magic number".to_owned())?;
    reader.seek(SeekFrom::Start(0)).map_err(|error| error.to_string())?;
    if magic == *b"GGUF" { Ok(()) } else { Err(format!("magic number {magic:02x?} instead of \"GGUF\"")) }
}

/// The first byte after the last tensor, or nothing when the sizes overflow.
fn tensor_end(content: &Content) -> Option<u64> {
    content.tensor_infos.values().try_fold(0u64, |end, tensor| {
        let elements =
            tensor.shape.dims().iter().try_fold(1u64, |product, &dim| product.checked_mul(u64::try_from(dim).ok()?))?;
        let blocks = elements.div_ceil(tensor.ggml_dtype.block_size() as u64);
        let bytes = blocks.checked_mul(tensor.ggml_dtype.type_size() as u64)?;
        let start = content.tensor_data_offset.checked_add(tensor.offset)?;
        Some(end.max(start.checked_add(bytes)?))
    })
}

fn unusable(key: &str, wanted: &str, found: Option<&Value>) -> ModelTextError {
    let reason = match found {
        Some(value) => format!("wanted {wanted}, found {:?}", value.value_type()),
        None => format!("wanted {wanted}"),
    };
    ModelTextError::Metadata { key: key.to_owned(), reason }
}

/// candle's errors may carry a backtrace behind their first line.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(bytes: &[u8]) -> Result<Metadata, ModelTextError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        Metadata::read(file.path())
    }

    fn header(key: &str, value_type: u32, value: &[u8]) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend((key.len() as u64).to_le_bytes());
        bytes.extend(key.as_bytes());
        bytes.extend(value_type.to_le_bytes());
        bytes.extend(value);
        bytes
    }

    #[test]
    fn reads_a_value() {
        let metadata = read(&header("answer", 4, &42u32.to_le_bytes())).unwrap();
        assert_eq!(metadata.integer("answer").unwrap(), 42);
        assert!(metadata.text("answer").unwrap_err().to_string().contains("`answer`"));
        assert!(metadata.text("absent").is_err());
    }

    #[test]
    fn damaged_files_are_errors() {
        let whole = header("answer", 4, &42u32.to_le_bytes());
        for cut in 0..whole.len() {
            assert!(matches!(read(&whole[..cut]), Err(ModelTextError::Damaged { .. })), "{cut}");
        }
        assert!(matches!(read(b"PK\x03\x04 a zip file"), Err(ModelTextError::Damaged { .. })));
        assert!(matches!(read(&header("general.alignment", 4, &[0; 4])), Err(ModelTextError::Damaged { .. })));
        let missing = Metadata::read(Path::new("/nonexistent/model.gguf"));
        assert!(missing.is_err_and(|error| error.to_string().contains("/nonexistent/model.gguf")));
    }
}
