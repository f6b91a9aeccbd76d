//! Where the set-up put the model file: `$TANDEM_MODEL`, or the cache directory.
use std::path::PathBuf;

/// The model file of the tests.
pub fn path() -> PathBuf {
    let from_env = |key| std::env::var_os(key).map(PathBuf::from);
    from_env("TANDEM_MODEL").unwrap_or_else(|| {
        let cache = from_env("TANDEM_CACHE")
            .unwrap_or_else(|| from_env("HOME").expect("HOME is set").join(".cache").join("tandem"));
        cache.join("SmolLM2-135M-Instruct.Q4_1.gguf")
    })
}
