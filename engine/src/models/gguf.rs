//! GGUF files (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>): one, or the parts of one model.
//! [`tandem_gguf`] reads the headers; this file checks what a header claims against what the file holds before any of
//! it is used. Whatever the bytes are, the outcome is a model or an error that names the file.
use std::collections::HashMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use tandem_gguf::{GgufError, Header, TensorInfo, TensorType, split};
use tandem_proto::model;

use super::mmap::Map;
use super::reading::Reading;
use super::sizes::{Purpose, TensorSize};
use super::weights::{RawTensor, Weights};
use crate::error::EngineError;
use crate::ops::dequantize::SUPPORTED;

/// An open model.
pub struct GgufFile {
    /// The first one has the keys.
    parts: Vec<Part>,
    /// Part of each tensor.
    tensors: HashMap<String, usize>,
    reading: Reading,
}

struct Part {
    path: PathBuf,
    map: Map,
    header: Header,
}

impl GgufFile {
    /// Maps the file and reads its header; of a model in parts all of them, of which `path` is the first. Tensors are
    /// checked when they are read.
    ///
    /// # Errors
    /// `Model` when a file cannot be read, its header is not a whole GGUF header, or it is not the part that it should
    /// be.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        let parts = with_the_others(Part::open(path.into())?)?;
        let mut tensors = HashMap::new();
        for (index, part) in parts.iter().enumerate() {
            for name in part.header.tensors().keys() {
                if tensors.insert(name.clone(), index).is_some() {
                    return Err(part.error(format_args!("tensor {name} is in another part, too")));
                }
            }
        }
        let bytes = |part: &Part| part.map.len() as u64 - part.header.data_at().min(part.map.len() as u64);
        let reading = Reading::new(parts.iter().map(bytes).sum());
        Ok(Self { parts, tensors, reading })
    }

    /// That all tensors have types that can be unpacked.
    ///
    /// # Errors
    /// `Model`, naming the first tensor that has not, and its type.
    pub fn check_types(&self) -> Result<(), EngineError> {
        let odd = self.parts.iter().find_map(|part| {
            let mut tensors = part.header.tensors().iter();
            tensors.find(|(_, info)| !SUPPORTED.contains(&info.dtype)).map(|found| (part, found))
        });
        odd.map_or(Ok(()), |(part, (name, info))| Err(part.unsupported(name, info.dtype)))
    }

    /// XXH3-64 of the file, or of its parts as `tandem_proto::model` defines it.
    pub fn digest(&self) -> u64 {
        let digests: Vec<u64> = self.parts.iter().map(|part| part.map.digest()).collect();
        model::digest_of_parts(&digests)
    }

    /// The file's name without its extension, or what its parts have in common.
    pub fn name(&self) -> String {
        let stem = self.parts[0].path.file_stem();
        stem.map_or_else(String::new, |stem| split::model_name(&stem.to_string_lossy()).to_owned())
    }

    /// An error about this model.
    pub fn error(&self, why: impl Display) -> EngineError {
        self.parts[0].error(why)
    }

    /// A string of the metadata, if there is one under this key.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.parts[0].header.value(key)?.text()
    }

    /// An unsigned number of the metadata, if there is one under this key.
    pub fn optional_number(&self, key: &str) -> Option<usize> {
        let number = self.parts[0].header.value(key)?.unsigned()?;
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
        self.parts[0].header.value(key)?.float()
    }

    /// Number of tensors.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Rows of a two-dimensional tensor.
    ///
    /// # Errors
    /// `Model` when there is no such tensor or it is no matrix.
    pub fn rows(&self, name: &str) -> Result<usize, EngineError> {
        let (part, info) = self.find(name)?;
        match info.dims[..] {
            [rows, _] => usize::try_from(rows).map_err(|_| part.error(format_args!("tensor {name} is too large"))),
            _ => Err(part.error(format_args!("tensor {name} is no matrix: {:?}", info.dims))),
        }
    }

    fn find(&self, name: &str) -> Result<(&Part, &TensorInfo), EngineError> {
        let part = self.tensors.get(name).map(|&part| &self.parts[part]);
        let found = part.and_then(|part| Some((part, part.header.tensor(name)?)));
        found.ok_or_else(|| self.error(format_args!("no tensor {name}")))
    }
}

impl Weights for GgufFile {
    fn tensor(&self, name: &str, dims: &[usize]) -> Result<RawTensor<'_>, EngineError> {
        let (part, info) = self.find(name)?;
        if !info.dims.iter().eq(dims.iter().map(|&dim| dim as u64).collect::<Vec<_>>().iter()) {
            let is = &info.dims;
            return Err(part.error(format_args!("tensor {name} has the shape {is:?} instead of {dims:?}")));
        }
        if !SUPPORTED.contains(&info.dtype) {
            return Err(part.unsupported(name, info.dtype));
        }
        let range = info.bytes().and_then(|size| {
            let start = usize::try_from(info.at).ok()?;
            part.map.get(start..start.checked_add(usize::try_from(size).ok()?)?)
        });
        let bytes = range.filter(|bytes| !bytes.is_empty()).ok_or_else(|| {
            let file = part.map.len();
            part.error(format_args!("tensor {name} does not lie within the file's {file} bytes; is it truncated?"))
        })?;
        self.reading.begin(name);
        Ok(RawTensor::new(info.dtype, dims, bytes, &part.map, &self.reading))
    }

    fn sizes(&self) -> Vec<TensorSize> {
        let size = |(name, info): (&String, &TensorInfo)| {
            let purpose = match name.as_str() {
                "token_embd.weight" => Purpose::Embedding,
                "output.weight" => Purpose::Head,
                _ => Purpose::Layer,
            };
            TensorSize::of(purpose, &info.dims, info.dtype)
        };
        self.parts.iter().flat_map(|part| part.header.tensors()).map(size).collect()
    }

    fn finish(&self) -> Result<(), EngineError> {
        match self.reading.finish(self.tensors.keys().map(String::as_str)) {
            Some(name) => Err(self.error(format_args!("tensor {name} is of no use to this architecture"))),
            None => Ok(()),
        }
    }
}

impl Part {
    fn open(path: PathBuf) -> Result<Self, EngineError> {
        let map = Map::open(&path)?;
        let header = Header::parse(&map).map_err(|error| failure(&path, error))?;
        Ok(Self { path, map, header })
    }

    fn error(&self, why: impl Display) -> EngineError {
        failure(&self.path, why)
    }

    fn unsupported(&self, name: &str, dtype: TensorType) -> EngineError {
        let supported: Vec<String> = SUPPORTED.iter().map(TensorType::to_string).collect();
        self.error(format_args!(
            "tensor {name} has the type {dtype}, which is not supported; supported are {}",
            supported.join(", ")
        ))
    }
}

/// All parts of the model that `first` is the first part, or the whole, of.
fn with_the_others(first: Part) -> Result<Vec<Part>, EngineError> {
    let wrong = |error: GgufError| first.error(error);
    let Some(split) = first.header.split().map_err(wrong)? else { return Ok(vec![first]) };
    let name = first.path.file_name().unwrap_or_default().to_string_lossy();
    let names = split.names_of_the_others(&name).map_err(wrong)?;
    let mut others = Vec::with_capacity(names.len());
    for (name, number) in names.iter().zip(1..) {
        let part = Part::open(first.path.with_file_name(name))?;
        split.check_part(&first.header, number, &part.header).map_err(|error| part.error(error))?;
        others.push(part);
    }
    let tensors = others.iter().chain([&first]).map(|part| part.header.tensors().len()).sum();
    split.check_tensors(tensors).map_err(wrong)?;
    Ok(std::iter::once(first).chain(others).collect())
}

fn failure(path: &Path, why: impl Display) -> EngineError {
    EngineError::Model(format!("{}: {why}", path.display()))
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
