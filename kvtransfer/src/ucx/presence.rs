//! For tests that need UCX: a machine without it may skip them, and only such a one. `TANDEM_REQUIRE_UCX=1` says that
//! this machine has it; a UCX that is there and does not work is a failure in any case.
#![allow(clippy::disallowed_methods, reason = "a test has no command line to be told by")]

use ucx_sys::Api;

use crate::error::{TransferError, TransferErrorKind};

/// What was started; `None`: there is no UCX here, and the test is to be skipped.
///
/// # Panics
/// When UCX is there, or has to be, and does not start.
pub fn or_skip<T>(started: Result<T, TransferError>) -> Option<T> {
    let error = match started {
        Ok(started) => return Some(started),
        Err(error) => error,
    };
    let is_required = std::env::var("TANDEM_REQUIRE_UCX").is_ok_and(|value| value == "1");
    let is_absent = error.kind == TransferErrorKind::Incompatible && Api::load(None).is_err();
    assert!(is_absent, "UCX is there and does not start: {error}");
    assert!(!is_required, "TANDEM_REQUIRE_UCX=1, and there is no UCX: {error}");
    println!("skipped: {error}");
    None
}
