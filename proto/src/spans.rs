//! Spans on their way from a node to the router: the bytes of a `v1::Spans`. The router keeps them as they came and reads
//! them when somebody looks at the trace, which for nearly all requests nobody does. Two packs are joined by putting one
//! behind the other.
use prost::Message;

use crate::v1;

/// The bytes; none for no span.
pub fn pack(spans: Vec<v1::Span>) -> Vec<u8> {
    v1::Spans { spans }.encode_to_vec()
}

/// The spans, of damaged bytes those before the damage.
pub fn unpack(packed: &[u8]) -> Vec<v1::Span> {
    let mut spans = v1::Spans::default();
    // A trace is worth no error of its own.
    let _ = spans.merge(packed);
    spans.spans
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(name: &str) -> v1::Span {
        v1::Span { name: name.to_owned(), trace_id: vec![7; 16], end_unix_ns: 9, ..v1::Span::default() }
    }

    #[test]
    fn packs_are_joined_one_behind_the_other() {
        let all = ["a", "b", "c"].map(span).to_vec();
        let mut packed = pack(all[..2].to_vec());
        packed.extend(pack(Vec::new()));
        packed.extend(pack(all[2..].to_vec()));
        assert_eq!(unpack(&packed), all);
        assert!(pack(Vec::new()).is_empty() && unpack(&[]).is_empty());
    }

    #[test]
    fn what_stands_before_the_damage_is_read() {
        let mut packed = pack(vec![span("a")]);
        packed.extend([0x0a, 0x7f, 1]);
        assert_eq!(unpack(&packed), [span("a")]);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            unpack(&bytes);
        }
    }
}
