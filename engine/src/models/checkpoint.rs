//! A model on disk, of either kind: a GGUF file ([`super::gguf`]) or a safetensors directory ([`super::safetensors`]).
//! Whoever loads a model needs only what stands here.
use std::path::Path;

use super::config::LlamaConfig;
use super::gguf::GgufFile;
use super::rope::RowOrder;
use super::safetensors::SafetensorsDirectory;
use crate::error::EngineError;
use crate::footprint::TensorSize;
use crate::ops::matmul::PackedMatrix;

/// Tensors by name. The names are GGUF's (`blk.0.attn_q.weight`), whatever the source calls them.
pub trait Weights {
    /// A vector of `n` values.
    ///
    /// # Errors
    /// `Model` when there is no such tensor of this length, wholly in its file, in a type that we read.
    fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, EngineError>;

    /// A matrix of `rows` × `k` (`[out, in]`), its rows in `order`, packed.
    ///
    /// # Errors
    /// As for [`Weights::vector`].
    fn matrix(&self, name: &str, rows: usize, k: usize, order: RowOrder) -> Result<PackedMatrix, EngineError>;

    /// What the headers say of the tensors that a network needs, in any order. Nothing of it is checked against the files.
    fn sizes(&self) -> Vec<TensorSize>;

    /// All that a network needs was read: a tensor that nobody asked for (a bias, a frequency table) would change the
    /// results.
    ///
    /// # Errors
    /// `Model`, naming such a tensor.
    fn finish(&self) -> Result<(), EngineError>;
}

/// An open checkpoint.
pub struct Checkpoint {
    config: LlamaConfig,
    files: Files,
}

enum Files {
    Gguf(GgufFile),
    Directory(SafetensorsDirectory),
}

impl Checkpoint {
    /// Opens the GGUF file or the safetensors directory at `path`; reads headers only.
    ///
    /// # Errors
    /// `Model` when it is neither, is damaged, incomplete, or of a kind that cannot be served.
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        if path.is_dir() {
            let directory = SafetensorsDirectory::open(path)?;
            return Ok(Self { config: directory.config().clone(), files: Files::Directory(directory) });
        }
        let file = GgufFile::open(path)?;
        Ok(Self { config: LlamaConfig::from_gguf(&file)?, files: Files::Gguf(file) })
    }

    /// What network it holds.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Its weights.
    pub fn weights(&self) -> &dyn Weights {
        match &self.files {
            Files::Gguf(file) => file,
            Files::Directory(directory) => directory,
        }
    }

    /// Sizes of its tensors.
    pub fn sizes(&self) -> Vec<TensorSize> {
        self.weights().sizes()
    }

    /// XXH3-64 of the file, or of the directory's files as `tandem_proto::model` defines it. Reads all of them.
    ///
    /// # Errors
    /// `Model` when one cannot be read.
    pub fn digest(&self) -> Result<u64, EngineError> {
        match &self.files {
            Files::Gguf(file) => Ok(file.digest()),
            Files::Directory(directory) => directory.digest(),
        }
    }
}
