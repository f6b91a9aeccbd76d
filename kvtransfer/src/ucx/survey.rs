//! Which UCX this machine has and what it can open here, for those who set a machine up. Opens one context with
//! everything that UCX knows, and moves nothing.
use std::path::Path;

use ucx_sys::Api;

use super::owners::Context;
use super::profile::opened_transports;
use crate::error::{TransferError, TransferErrorKind};

/// What UCX is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Of the library: "1.22.0".
    pub version: String,
    /// As UCX names them, each once: "posix", "tcp", "cuda_ipc", "rc_mlx5".
    pub transports: Vec<String>,
}

/// Opens UCX from `lib_dir`, or from where the dynamic linker finds it.
///
/// # Errors
/// `Incompatible` when it is absent or of a version that is not served, `Io` when it opens nothing.
pub fn survey(lib_dir: Option<&Path>) -> Result<Survey, TransferError> {
    let api =
        Api::load(lib_dir).map_err(|error| TransferError::new(TransferErrorKind::Incompatible, error.to_string()))?;
    let context = Context::open(api, &[("TLS", "all".to_owned())])?;
    let description = context.describe();
    let transports = opened_transports(&description).into_iter().map(str::to_owned).collect();
    Ok(Survey { version: api.version.to_string(), transports })
}

#[cfg(test)]
mod tests {
    use super::super::presence::or_skip;
    use super::*;

    #[test]
    fn an_absent_ucx_is_an_error_and_the_systems_opens_something() {
        let error = survey(Some(Path::new("/nonexistent/ucx"))).expect_err("nothing is there");
        assert!(error.to_string().contains("/nonexistent/ucx"), "{error}");
        if let Some(Survey { version, transports }) = or_skip(survey(None)) {
            assert!(version.starts_with("1."), "{version}");
            assert!(transports.iter().any(|name| name == "tcp"), "{transports:?}");
            assert!(!transports.iter().any(|name| name == "self"), "{transports:?}");
        }
    }
}
