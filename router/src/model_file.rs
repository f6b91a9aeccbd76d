//! A model's file as the router reads it: the keys of a GGUF header ([`tandem_gguf`]), and why a file is of no use
//! ([`ModelTextError`]), whoever finds that out. The weights are never loaded here, but a file that is too short to
//! hold them is refused, and all files of the model are digested.
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use tandem_gguf::{GgufError, Header, MAX_HEADER_BYTES, Value};
use tandem_proto::model;
use xxhash_rust::xxh3::Xxh3;

/// Bytes that are read of a file at first. Most headers are in them; a longer one is read twice as far, and so on.
const FIRST_BYTES: usize = 1 << 23;

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
    /// Reads the headers of the model whose only or first file this is, and checks that each file is as long as its
    /// tensors say. Gives the paths of all.
    ///
    /// # Errors
    /// `Unreadable` or `Damaged`, naming the file.
    pub fn read(path: &Path) -> Result<(Self, Vec<PathBuf>), ModelTextError> {
        let first = header(path)?;
        let mut paths = vec![path.to_owned()];
        let wrong = |path: &Path| {
            let path = path.to_owned();
            move |error: GgufError| damaged(&path, error.to_string())
        };
        if let Some(split) = first.split().map_err(wrong(path))? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let mut tensors = first.tensors().len();
            for (name, number) in split.names_of_the_others(&name).map_err(wrong(path))?.iter().zip(1..) {
                let part = path.with_file_name(name);
                let other = header(&part)?;
                split.check_part(&first, number, &other).map_err(wrong(&part))?;
                tensors += other.tensors().len();
                paths.push(part);
            }
            split.check_tensors(tensors).map_err(wrong(path))?;
        }
        Ok((Self { values: first.into_values() }, paths))
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
        let number = value.and_then(Value::unsigned).and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| unusable(key, "an unsigned integer", value))
    }

    /// A boolean.
    pub fn flag(&self, key: &str, absent: bool) -> bool {
        self.values.get(key).and_then(Value::flag).unwrap_or(absent)
    }

    /// The elements of an array of strings.
    pub fn texts(&self, key: &str) -> Result<Vec<&str>, ModelTextError> {
        self.array(key, "an array of strings", Value::text)
    }

    /// The elements of an array of integers.
    pub fn integers(&self, key: &str) -> Result<Vec<i64>, ModelTextError> {
        self.array(key, "an array of integers", Value::signed)
    }

    /// The elements of an array of floating-point numbers.
    pub fn floats(&self, key: &str) -> Result<Vec<f32>, ModelTextError> {
        self.array(key, "an array of numbers", Value::float)
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

/// Digest of a model's files, as `tandem_proto::model` defines it.
pub(crate) fn digest_of_parts(paths: &[PathBuf]) -> Result<u64, ModelTextError> {
    let digests = paths.iter().map(|path| digest(path)).collect::<Result<Vec<_>, _>>()?;
    Ok(model::digest_of_parts(&digests))
}

/// XXH3-64 of the whole file, read in pieces of 1 MiB.
pub(crate) fn digest(path: &Path) -> Result<u64, ModelTextError> {
    let mut file = File::open(path).map_err(unreadable(path))?;
    let mut hasher = Xxh3::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece).map_err(unreadable(path))? {
            0 => return Ok(hasher.digest()),
            count => hasher.update(&piece[..count]),
        }
    }
}

fn header(path: &Path) -> Result<Header, ModelTextError> {
    let file = File::open(path).map_err(unreadable(path))?;
    let status = file.metadata().map_err(unreadable(path))?;
    if !status.is_file() {
        return Err(damaged(path, "not a regular file".into()));
    }
    let (mut bytes, mut wanted) = (Vec::new(), FIRST_BYTES);
    let header = loop {
        let missing = (wanted - bytes.len()) as u64;
        (&file).take(missing).read_to_end(&mut bytes).map_err(unreadable(path))?;
        match Header::parse(&bytes) {
            Ok(header) => break header,
            // A byte more than a header may have says that there is none.
            Err(GgufError::Truncated(_)) if bytes.len() == wanted && wanted <= MAX_HEADER_BYTES => wanted *= 2,
            Err(error) => return Err(damaged(path, error.to_string())),
        }
    };
    let needed = header.end().ok_or_else(|| damaged(path, "a tensor of an impossible size".into()))?;
    if needed > status.len() {
        return Err(damaged(path, format!("truncated: {} bytes of at least {needed}", status.len())));
    }
    Ok(header)
}

fn unreadable(path: &Path) -> impl Fn(std::io::Error) -> ModelTextError {
    let path = path.to_owned();
    move |source| ModelTextError::Unreadable { path: path.clone(), source }
}

fn damaged(path: &Path, reason: String) -> ModelTextError {
    ModelTextError::Damaged { path: path.to_owned(), reason }
}

fn unusable(key: &str, wanted: &str, found: Option<&Value>) -> ModelTextError {
    let reason = match found {
        Some(value) => format!("wanted {wanted}, found {}", value.kind()),
        None => format!("wanted {wanted}"),
    };
    ModelTextError::Metadata { key: key.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(bytes: &[u8]) -> Result<Metadata, ModelTextError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        Metadata::read(file.path()).map(|(metadata, _)| metadata)
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
