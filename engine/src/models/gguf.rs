//! GGUF files (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>): candle parses the header, this file checks
//! what a header claims against what the file holds before any of it is used. Whatever the bytes are, the outcome is a
//! model or an error that names the file.
use std::borrow::Cow;
use std::fmt::Display;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use memmap2::Mmap;
use xxhash_rust::xxh3::xxh3_64;

use super::checkpoint::Weights;
use super::mmap;
use super::reading::Reading;
use super::rope::RowOrder;
use crate::error::EngineError;
use crate::footprint::{Purpose, TensorSize};
use crate::ops::matmul::{PackedMatrix, WeightFormat};

/// An open file.
pub struct GgufFile {
    path: PathBuf,
    bytes: Mmap,
    content: Content,
    reading: Reading,
}

impl GgufFile {
    /// Maps and parses the file; tensors are checked when they are read.
    ///
    /// # Errors
    /// `Model` when the file cannot be read or its header is not a whole GGUF header.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        let bytes = mmap::map(path)?;
        let fail = |why: &dyn Display| EngineError::Model(format!("{}: {why}", path.display()));
        if !bytes.starts_with(b"GGUF") {
            return Err(fail(&"not a GGUF file (it does not start with \"GGUF\")"));
        }
        if declares_zero_alignment(&bytes) {
            return Err(fail(&"general.alignment is 0"));
        }
        let content = Content::read(&mut Cursor::new(&bytes[..]))
            .map_err(|error| fail(&format!("not a whole GGUF header, is the file truncated? {error}")))?;
        let start = usize::try_from(content.tensor_data_offset).unwrap_or(usize::MAX);
        let reading = Reading::new(bytes.len().saturating_sub(start));
        Ok(Self { path: path.into(), bytes, content, reading })
    }

    /// XXH3-64 of the whole file.
    pub fn digest(&self) -> u64 {
        xxh3_64(&self.bytes)
    }

    /// The file's name without its extension.
    pub fn stem(&self) -> String {
        self.path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }

    /// An error about this file.
    pub fn error(&self, why: impl Display) -> EngineError {
        EngineError::Model(format!("{}: {why}", self.path.display()))
    }

    /// A string of the metadata, if there is one under this key.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.content.metadata.get(key).and_then(|value| value.to_string().ok()).map(String::as_str)
    }

    /// An unsigned number of the metadata, if there is one under this key.
    pub fn optional_number(&self, key: &str) -> Option<usize> {
        let number = match self.content.metadata.get(key)? {
            Value::I32(number) => u64::try_from(*number).ok()?,
            value => value.to_u64().ok()?,
        };
        // No count in a header is larger; products of two of them fit a usize.
        usize::try_from(number).ok().filter(|&number| number <= u32::MAX as usize)
    }

    /// An unsigned number that must be there.
    ///
    /// # Errors
    /// `Model` when it is not.
    pub fn number(&self, key: &str) -> Result<usize, EngineError> {
        self.optional_number(key).ok_or_else(|| self.error(format_args!("no number {key} in the metadata")))
    }

    /// A floating-point number, if there is one under this key.
    pub fn optional_float(&self, key: &str) -> Option<f32> {
        self.content.metadata.get(key).and_then(|value| value.to_f32().ok())
    }

    /// Number of tensors.
    pub fn tensors(&self) -> usize {
        self.content.tensor_infos.len()
    }

    /// Whether the file has a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// Rows of a two-dimensional tensor.
    ///
    /// # Errors
    /// `Model` when there is no such tensor or it is no matrix.
    pub fn rows(&self, name: &str) -> Result<usize, EngineError> {
        match self.content.tensor_infos.get(name).map(|info| info.shape.dims()) {
            Some(&[rows, _]) => Ok(rows),
            Some(dims) => Err(self.error(format_args!("tensor {name} is no matrix: {dims:?}"))),
            None => Err(self.error(format_args!("no tensor {name}"))),
        }
    }

    /// Type and bytes of a tensor whose shape is `dims`.
    fn checked(&self, name: &str, dims: &[usize]) -> Result<(GgmlDType, &[u8]), EngineError> {
        let info = self.content.tensor_infos.get(name).ok_or_else(|| self.error(format_args!("no tensor {name}")))?;
        if info.shape.dims() != dims {
            let is = info.shape.dims();
            return Err(self.error(format_args!("tensor {name} has the shape {is:?} instead of {dims:?}")));
        }
        // The types that candle turns into f32; for the others it panics.
        use GgmlDType::*;
        if !matches!(info.ggml_dtype, F32 | F16 | BF16 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q2K | Q3K | Q4K | Q5K | Q6K)
        {
            return Err(self.error(format_args!("tensor {name} has the unsupported type {:?}", info.ggml_dtype)));
        }
        let (group, group_bytes) = (info.ggml_dtype.block_size(), info.ggml_dtype.type_size());
        let rows = dims[..dims.len() - 1].iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let row = dims.last().copied().filter(|row| *row > 0 && row.is_multiple_of(group));
        let size = rows.zip(row).and_then(|(rows, row)| rows.checked_mul(row / group)?.checked_mul(group_bytes));
        let start = self.content.tensor_data_offset.checked_add(info.offset);
        let bytes = size.zip(start).and_then(|(size, start)| {
            let start = usize::try_from(start).ok()?;
            self.bytes.get(start..start.checked_add(size)?)
        });
        let bytes = bytes.filter(|bytes| !bytes.is_empty()).ok_or_else(|| {
            let file = self.bytes.len();
            self.error(format_args!("tensor {name} does not lie within the file's {file} bytes; is it truncated?"))
        })?;
        self.reading.note(name, bytes.len());
        Ok((info.ggml_dtype, bytes))
    }

    fn dequantized(&self, name: &str) -> Result<Vec<f32>, EngineError> {
        let read = || {
            let tensor = self.content.tensor(&mut Cursor::new(&self.bytes[..]), name, &Device::Cpu)?;
            tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()
        };
        read().map_err(|error| self.error(format_args!("tensor {name}: {error}")))
    }
}

impl Weights for GgufFile {
    fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, EngineError> {
        self.checked(name, &[n])?;
        self.dequantized(name)
    }

    fn matrix(&self, name: &str, rows: usize, k: usize, order: RowOrder) -> Result<PackedMatrix, EngineError> {
        let (dtype, raw) = self.checked(name, &[rows, k])?;
        // A row's groups are its own, so whole rows change places.
        let raw = || order.apply(Cow::Borrowed(raw), raw.len() / rows);
        Ok(match format_of(dtype) {
            WeightFormat::Q4_1 => PackedMatrix::from_q4_1(&raw(), k),
            WeightFormat::Q8_0 => PackedMatrix::from_q8_0(&raw(), k),
            _ => PackedMatrix::from_f32(&order.apply(Cow::Owned(self.dequantized(name)?), k), k),
        })
    }

    fn sizes(&self) -> Vec<TensorSize> {
        let size = |(name, info): (&String, &TensorInfo)| {
            let purpose = match name.as_str() {
                "token_embd.weight" => Purpose::Embedding,
                "output.weight" => Purpose::Head,
                _ => Purpose::Layer,
            };
            let (columns, k, format) = match *info.shape.dims() {
                [columns, k] => (columns, k, Some(format_of(info.ggml_dtype))),
                ref dims => (1, dims.iter().fold(1, |values: usize, &dim| values.saturating_mul(dim)), None),
            };
            let (columns, k) = (columns as u64, k as u64);
            let groups = columns.saturating_mul(k) / info.ggml_dtype.block_size() as u64;
            // Candle copies what it unpacks; the others are packed from where they are mapped.
            let copied = match format {
                Some(WeightFormat::F32) => groups.saturating_mul(info.ggml_dtype.type_size() as u64),
                _ => 0,
            };
            TensorSize { purpose, columns, k, format, copied }
        };
        self.content.tensor_infos.iter().map(size).collect()
    }

    fn finish(&self) -> Result<(), EngineError> {
        match self.reading.finish(self.content.tensor_infos.keys().map(String::as_str)) {
            Some(name) => Err(self.error(format_args!("tensor {name} is of no use to this architecture"))),
            None => Ok(()),
        }
    }
}

/// In which format a matrix is packed as it is read.
fn format_of(dtype: GgmlDType) -> WeightFormat {
    match dtype {
        GgmlDType::Q4_1 => WeightFormat::Q4_1,
        GgmlDType::Q8_0 => WeightFormat::Q8_0,
        _ => WeightFormat::F32,
    }
}

/// Whether the metadata has a `general.alignment` of zero, by which candle would divide.
fn declares_zero_alignment(bytes: &[u8]) -> bool {
    let key = b"general.alignment";
    bytes.windows(key.len()).enumerate().filter(|(_, window)| window == key).any(|(at, _)| {
        let after = &bytes[at + key.len()..];
        // A type (u8, i8, u16, i16, u32, i32 are 0 to 5) and a value in little-endian order.
        let Some((kind, value)) = after.split_first_chunk::<4>() else { return false };
        let width = match u32::from_le_bytes(*kind) {
            0 | 1 => 1,
            2 | 3 => 2,
            4 | 5 => 4,
            _ => return false,
        };
        value.get(..width).is_some_and(|value| value.iter().all(|&byte| byte == 0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(name: &str, bytes: &[u8]) -> Result<GgufFile, EngineError> {
        let path = std::env::temp_dir().join(format!("tandem-gguf-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).expect("temporary file");
        let file = GgufFile::open(&path);
        std::fs::remove_file(&path).expect("temporary file");
        file
    }

    fn message(file: Result<GgufFile, EngineError>) -> String {
        file.err().expect("refused").to_string()
    }

    #[test]
    fn files_that_are_no_gguf_are_refused_with_a_reason() {
        assert!(message(GgufFile::open(Path::new("/nonexistent/model.gguf"))).contains("/nonexistent/model.gguf"));
        assert!(message(GgufFile::open(&std::env::temp_dir())).contains("no regular file"));
        assert!(message(open("empty", b"")).contains("empty"));
        assert!(message(open("zip", b"PK\x03\x04 and so on")).contains("GGUF"));
        assert!(message(open("short", b"GGUF\x03\0\0\0")).contains("truncated"));
    }

    #[test]
    fn zero_alignment_is_refused() {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend(17u64.to_le_bytes());
        bytes.extend(b"general.alignment");
        bytes.extend(4u32.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        assert!(message(open("alignment", &bytes)).contains("alignment"));
    }
}
