//! A model on disk, of either kind: a GGUF file or its parts ([`super::gguf`]) or a safetensors directory
//! ([`super::safetensors`]). Whoever loads a model needs only what stands here.
use std::path::Path;

use super::config::LlamaConfig;
use super::gguf::GgufFile;
use super::safetensors::SafetensorsDirectory;
use super::sizes::TensorSize;
use super::weights::Weights;
use crate::error::EngineError;

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
        let config = LlamaConfig::from_gguf(&file)?;
        file.check_types()?;
        Ok(Self { config, files: Files::Gguf(file) })
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

    /// XXH3-64 of the file, or of several files as `tandem_proto::model` defines it. Reads all of them.
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
