//! Spans on their way from a node to the router: the bytes of a `v1::Spans`. The router keeps them as they came and
//! reads them when somebody looks at the trace, which for nearly all requests nobody does. Two packs are joined by
//! putting one behind the other.
use prost::Message;

use crate::v1;

/// What stands before each span: number 1, with a length.
const SPAN: u8 = 1 << 3 | 2;

/// The bytes; none for no span.
pub fn pack(spans: Vec<v1::Span>) -> Vec<u8> {
    v1::Spans { spans }.encode_to_vec()
}

/// The spans, one after the other; of damaged bytes those before the damage: a trace is worth no error of its own.
pub fn unpack(mut packed: &[u8]) -> impl Iterator<Item = v1::Span> {
    std::iter::from_fn(move || {
        packed = packed.strip_prefix(&[SPAN])?;
        v1::Span::decode_length_delimited(&mut packed).inspect_err(|_| packed = &[]).ok()
    })
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
        assert_eq!(unpack(&packed).collect::<Vec<_>>(), all);
        assert!(pack(Vec::new()).is_empty() && unpack(&[]).next().is_none());
    }

    #[test]
    fn what_stands_before_the_damage_is_read() {
        let mut packed = pack(vec![span("a")]);
        packed.extend([SPAN, 0x7f, 1]);
        packed.extend(pack(vec![span("b")]));
        assert_eq!(unpack(&packed).collect::<Vec<_>>(), [span("a")]);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            assert!(unpack(&bytes).count() <= bytes.len());
        }
    }
}
