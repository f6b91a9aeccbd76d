//! What a key may still ask for in this minute, in the headers that OpenAI's clients read
//! (`x-ratelimit-limit-requests` and so on). Only answers to keys that have rates carry them.
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::admission::limiter::Allowance;

/// The headers of every rate that has a limit.
pub(super) fn headers(allowances: &[Allowance]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for Allowance { what, per_minute, remaining, full_in } in allowances {
        let values =
            [("limit", per_minute.to_string()), ("remaining", remaining.to_string()), ("reset", text(*full_in))];
        for (about, value) in values {
            let name = HeaderName::try_from(format!("x-ratelimit-{about}-{what}"));
            if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
                headers.insert(name, value);
            }
        }
    }
    headers
}

/// `120ms`, `7s`, `1m30s`: rounded up, so that a client that waits so long is not early.
fn text(duration: Duration) -> String {
    let millis = duration.as_nanos().div_ceil(1_000_000);
    match (millis, millis.div_ceil(1000)) {
        (0..1000, _) => format!("{millis}ms"),
        (_, seconds @ 0..60) => format!("{seconds}s"),
        (_, seconds) => format!("{}m{}s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_openai_writes_them() {
        for (millis, expected) in [
            (0, "0ms"),
            (120, "120ms"),
            (999, "999ms"),
            (1000, "1s"),
            (1001, "2s"),
            (59_001, "1m0s"),
            (90_000, "1m30s"),
        ] {
            assert_eq!(text(Duration::from_millis(millis)), expected);
        }
        assert_eq!(text(Duration::from_nanos(1)), "1ms");
    }

    #[test]
    fn every_rate_has_three_headers() {
        let tokens = Allowance { what: "tokens", per_minute: 600, remaining: 7, full_in: Duration::from_secs(61) };
        let headers = headers(&[tokens]);
        assert_eq!(headers.len(), 3);
        assert_eq!(headers["x-ratelimit-limit-tokens"], "600");
        assert_eq!(headers["x-ratelimit-remaining-tokens"], "7");
        assert_eq!(headers["x-ratelimit-reset-tokens"], "1m1s");
    }
}
