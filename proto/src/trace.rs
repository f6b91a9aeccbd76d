//! W3C trace context (<https://www.w3.org/TR/trace-context/>): parsing, writing, and making child identities.
use std::fmt;
use std::str::FromStr;

/// The identity of one span and its trace. All-zero ids are not representable by the constructors.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// Shared by all spans of a request.
    pub trace_id: [u8; 16],
    /// This span.
    pub span_id: [u8; 8],
    /// The caller wants the trace kept.
    pub sampled: bool,
}

impl TraceContext {
    /// Starts a new trace.
    pub fn root(rng: &mut impl rand::Rng) -> Self {
        let (mut trace_id, mut span_id): ([u8; 16], [u8; 8]) = (rng.random(), rng.random());
        trace_id[0] |= 1;
        span_id[0] |= 1;
        Self { trace_id, span_id, sampled: true }
    }

    /// The same, sampled with this probability, which the id decides: all who ask of one trace get the same answer.
    pub fn root_sampled(ratio: f64, rng: &mut impl rand::Rng) -> Self {
        let root = Self::root(rng);
        // The last seven bytes are random, as W3C's level 2 has it.
        let [.., a, b, c, d, e, f, g] = root.trace_id;
        let random = u64::from_be_bytes([0, a, b, c, d, e, f, g]) as f64 / (1_u64 << 56) as f64;
        Self { sampled: random < ratio, ..root }
    }

    /// A new span of the same trace.
    pub fn child(&self, rng: &mut impl rand::Rng) -> Self {
        Self { trace_id: self.trace_id, sampled: self.sampled, ..Self::root(rng) }
    }

    /// 32 hexadecimal digits.
    pub fn trace_id_hex(&self) -> String {
        hex(&self.trace_id)
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::with_capacity(55);
        text.push_str("00-");
        push_hex(&mut text, &self.trace_id);
        text.push('-');
        push_hex(&mut text, &self.span_id);
        text.push_str(if self.sampled { "-01" } else { "-00" });
        f.write_str(&text)
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TraceContext({self})")
    }
}

/// The text is not a `traceparent`; the specification says to start a new trace then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a W3C traceparent")]
pub struct BadTraceParent;

impl FromStr for TraceContext {
    type Err = BadTraceParent;

    fn from_str(text: &str) -> Result<Self, BadTraceParent> {
        let mut parts = text.trim().split('-');
        let mut next = || parts.next().ok_or(BadTraceParent);
        let (version, trace_id, span_id, flags) = (next()?, next()?, next()?, next()?);
        let version: [u8; 1] = unhex(version).ok_or(BadTraceParent)?;
        // Later versions may append fields, version 00 may not; ff is forbidden.
        if version[0] == 0xff || (version[0] == 0 && parts.next().is_some()) {
            return Err(BadTraceParent);
        }
        let (trace_id, span_id) = unhex::<16>(trace_id).zip(unhex::<8>(span_id)).ok_or(BadTraceParent)?;
        if trace_id == [0; 16] || span_id == [0; 8] {
            return Err(BadTraceParent);
        }
        let flags: [u8; 1] = unhex(flags).ok_or(BadTraceParent)?;
        Ok(Self { trace_id, span_id, sampled: flags[0] & 1 == 1 })
    }
}

/// Lower-case hexadecimal digits of `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    push_hex(&mut text, bytes);
    text
}

fn push_hex(text: &mut String, bytes: &[u8]) {
    let digit = |half: u8| char::from(b"0123456789abcdef"[usize::from(half)]);
    for byte in bytes {
        text.push(digit(byte >> 4));
        text.push(digit(byte & 15));
    }
}

/// The bytes of as many lower-case hexadecimal digits; `None` for any other text.
pub fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    let lower = |d: &u8| d.is_ascii_digit() || (b'a'..=b'f').contains(d);
    if digits.len() != 2 * N || !digits.iter().all(lower) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn round_trip_and_child() {
        let mut rng = rand::rngs::StdRng::seed_from_u64(1);
        let root = TraceContext::root(&mut rng);
        assert_eq!(root.to_string().parse(), Ok(root));
        let child = root.child(&mut rng);
        assert_eq!(child.trace_id, root.trace_id);
        assert_ne!(child.span_id, root.span_id);
    }

    #[test]
    fn so_many_are_sampled() {
        let mut rng = rand::rngs::StdRng::seed_from_u64(2);
        let mut sampled = |ratio| (0..10_000).filter(|_| TraceContext::root_sampled(ratio, &mut rng).sampled).count();
        assert_eq!([sampled(0.0), sampled(1.0)], [0, 10_000]);
        assert!((900..1_100).contains(&sampled(0.1)));
    }

    #[test]
    fn refuses_zeros_and_version_ff() {
        for text in [
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(text.parse::<TraceContext>(), Err(BadTraceParent), "{text}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC{0,80}") {
            let _ = text.parse::<TraceContext>();
        }
    }
}
