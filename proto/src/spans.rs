//! Spans on their way from a node to the router and on to a collector: the bytes of a `v1::Spans`, each span in OTLP's
//! own form. Who passes them on decodes none: [`Raw`] finds in the bytes what it takes to put a span into its parent,
//! and the rest stays as it came. [`unpack`] reads them whole, when somebody looks at the trace; [`write`](mod@write)
//! writes them. Two packs are joined by putting one behind the other.
pub mod write;

use prost::Message;
use prost::encoding::{WireType, decode_varint};

use crate::v1::{self, SpanKind, any_value};
use write::number;

/// What stands before each span: number 1, with a length.
const SPAN: u8 = 1 << 3 | 2;
/// OTLP's code of a status for what failed.
pub const FAILED: i32 = 2;

/// The spans, each in its bytes; of damaged bytes those before the damage: a trace is worth no error of its own.
pub fn each(mut packed: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let mut rest = packed.strip_prefix(&[SPAN])?;
        let length = usize::try_from(varint(&mut rest)?).ok()?;
        let (span, rest) = rest.split_at_checked(length)?;
        packed = rest;
        Some(span)
    })
}

/// Those that have a place in a trace, for who passes them on.
pub fn raw(packed: &[u8]) -> impl Iterator<Item = Raw<'_>> {
    each(packed).filter_map(Raw::read)
}

/// Those that can be read, whole.
pub fn unpack(packed: &[u8]) -> impl Iterator<Item = v1::Span> {
    each(packed).map_while(|span| v1::Span::decode(span).ok())
}

/// A span in its bytes, and what it takes to find its place. Its ids have the right lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Raw<'a> {
    /// 16 bytes.
    pub trace_id: &'a [u8],
    /// 8 bytes.
    pub span_id: &'a [u8],
    /// As many, or none.
    pub parent_span_id: &'a [u8],
    /// Who began it.
    pub kind: SpanKind,
    /// When it began.
    pub start_unix_ns: u64,
    /// When it ended.
    pub end_unix_ns: u64,
    /// Bytes of a `v1::Process`.
    pub process: &'a [u8],
    bytes: &'a [u8],
}

impl<'a> Raw<'a> {
    /// `None`: damaged, without a place in a trace, or in the form of another version.
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let (mut raw, mut rest) = (Self { bytes, ..Self::default() }, bytes);
        while !rest.is_empty() {
            let field = Field::next(&mut rest)?;
            match (field.number, field.value) {
                (number::TRACE_ID, Value::Bytes(id)) => raw.trace_id = id,
                (number::SPAN_ID, Value::Bytes(id)) => raw.span_id = id,
                (number::PARENT_SPAN_ID, Value::Bytes(id)) => raw.parent_span_id = id,
                (number::KIND, Value::Varint(kind)) => {
                    raw.kind = i32::try_from(kind).ok().and_then(|kind| SpanKind::try_from(kind).ok())?;
                }
                (number::START, Value::Fixed(unix_ns)) => raw.start_unix_ns = unix_ns,
                (number::END, Value::Fixed(unix_ns)) => raw.end_unix_ns = unix_ns,
                (number::PROCESS, Value::Bytes(process)) => raw.process = process,
                (number::NAME | number::ATTRIBUTE | number::EVENT | number::LINK, Value::Bytes(_)) => {}
                (known, _) if number::NEEDED.contains(&known) => return None,
                _ => {}
            }
        }
        let ids = (raw.trace_id.len(), raw.span_id.len(), raw.parent_span_id.len());
        matches!(ids, (16, 8, 0 | 8)).then_some(raw)
    }

    /// Its bytes as they came, behind those of `packed`.
    pub fn pass(&self, packed: &mut Vec<u8>) {
        write::bytes(packed, number::SPAN, self.bytes);
    }

    /// Its bytes without some fields.
    pub fn without(&self, numbers: &[u32], span: &mut Vec<u8>) {
        let (mut rest, mut kept) = (self.bytes, self.bytes);
        while let Some(field) = Field::next(&mut rest) {
            if numbers.contains(&field.number) {
                span.extend_from_slice(&kept[..kept.len() - rest.len() - field.length]);
                kept = rest;
            }
        }
        span.extend_from_slice(kept);
    }
}

/// One field of a message.
struct Field<'a> {
    number: u32,
    value: Value<'a>,
    /// Bytes, with those that say its number.
    length: usize,
}

enum Value<'a> {
    Varint(u64),
    Fixed(u64),
    Bytes(&'a [u8]),
    /// Of no interest here.
    Short,
}

impl<'a> Field<'a> {
    /// Takes the first field off `rest`, whose end and damage are `None`.
    fn next(rest: &mut &'a [u8]) -> Option<Self> {
        let before = rest.len();
        let key = u32::try_from(varint(rest)?).ok()?;
        let (number, wire_type) = (key >> 3, WireType::try_from(u64::from(key & 7)).ok()?);
        let value = match wire_type {
            WireType::Varint => Value::Varint(varint(rest)?),
            WireType::SixtyFourBit => Value::Fixed(u64::from_le_bytes(*rest.split_off(..8)?.first_chunk()?)),
            WireType::ThirtyTwoBit => rest.split_off(..4).map(|_| Value::Short)?,
            WireType::LengthDelimited => {
                let length = usize::try_from(varint(rest)?).ok()?;
                Value::Bytes(rest.split_off(..length)?)
            }
            WireType::StartGroup | WireType::EndGroup => return None,
        };
        Some(Self { number, value, length: before - rest.len() })
    }
}

/// Nearly all are of one byte.
fn varint(rest: &mut &[u8]) -> Option<u64> {
    match *rest {
        [byte @ 0..0x80, behind @ ..] => {
            *rest = behind;
            Some(u64::from(*byte))
        }
        _ => decode_varint(rest).ok(),
    }
}

impl v1::Span {
    /// `service.name`.
    pub fn service(&self) -> &str {
        self.process.as_ref().map_or("", |process| &process.service)
    }

    /// `service.instance.id`.
    pub fn instance(&self) -> &str {
        self.process.as_ref().map_or("", |process| &process.instance)
    }

    /// Why it failed; empty: it did not.
    pub fn error(&self) -> &str {
        self.status.as_ref().map_or("", |status| &status.message)
    }

    /// The kind as people write it.
    pub fn kind_name(&self) -> &'static str {
        match self.kind() {
            SpanKind::Unspecified | SpanKind::Internal => "internal",
            SpanKind::Server => "server",
            SpanKind::Client => "client",
            SpanKind::Producer => "producer",
            SpanKind::Consumer => "consumer",
        }
    }
}

impl v1::Attribute {
    /// What it says.
    pub fn said(&self) -> Option<&any_value::Value> {
        self.value.as_ref()?.value.as_ref()
    }
}

impl v1::TextList {
    /// Its texts.
    pub fn texts(&self) -> Vec<&str> {
        self.items.iter().map(|item| item.text.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(name: &str) -> v1::Span {
        v1::Span {
            trace_id: vec![7; 16],
            span_id: vec![3; 8],
            name: name.to_owned(),
            kind: SpanKind::Consumer.into(),
            end_unix_ns: 9,
            process: Some(v1::Process { service: "s".into(), instance: "i".into() }),
            ..v1::Span::default()
        }
    }

    fn pack(spans: &[v1::Span]) -> Vec<u8> {
        v1::Spans { spans: spans.to_vec() }.encode_to_vec()
    }

    #[test]
    fn packs_are_joined_one_behind_the_other() {
        let all = ["a", "b", "c"].map(span);
        let mut packed = pack(&all[..2]);
        packed.extend(pack(&[]));
        packed.extend(pack(&all[2..]));
        assert_eq!(unpack(&packed).collect::<Vec<_>>(), all);
        assert!(unpack(&[]).next().is_none());
    }

    #[test]
    fn what_stands_before_the_damage_is_read() {
        let mut packed = pack(&[span("a")]);
        packed.extend([SPAN, 0x7f, 1]);
        packed.extend(pack(&[span("b")]));
        assert_eq!(unpack(&packed).collect::<Vec<_>>(), [span("a")]);
        assert_eq!(raw(&packed).count(), 1);
    }

    #[test]
    fn a_span_passes_as_it_came_or_without_some_of_it() {
        let came = pack(&[span("a"), span("b")]);
        let mut went = Vec::new();
        raw(&came).for_each(|span| span.pass(&mut went));
        assert_eq!(went, came);
        let first = raw(&came).next().unwrap();
        assert_eq!((first.trace_id, first.kind, first.end_unix_ns), ([7; 16].as_slice(), SpanKind::Consumer, 9));
        assert_eq!(v1::Process::decode(first.process).unwrap().instance, "i");
        let mut rest = Vec::new();
        first.without(&[number::NAME, number::PROCESS, number::END], &mut rest);
        let expected = v1::Span { name: String::new(), end_unix_ns: 0, process: None, ..span("a") };
        assert_eq!(v1::Span::decode(&rest[..]).unwrap(), expected);
    }

    #[test]
    fn what_has_no_place_in_a_trace_does_not_pass() {
        let none = v1::Span { span_id: Vec::new(), ..span("a") };
        let wrong = v1::Span { parent_span_id: vec![1; 7], ..span("a") };
        let short = v1::Span { trace_id: vec![1; 15], ..span("a") };
        assert_eq!(raw(&pack(&[none, wrong, short, span("b")])).count(), 1);
        // Number 6 was a text once.
        let mut of_old = Vec::new();
        write::message(&mut of_old, number::SPAN, |span| {
            write::bytes(span, number::TRACE_ID, &[7; 16]);
            write::bytes(span, number::SPAN_ID, &[7; 8]);
            write::bytes(span, number::KIND, b"tandem-decode");
        });
        assert_eq!((each(&of_old).count(), raw(&of_old).count()), (1, 0));
    }

    proptest! {
        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), numbers in prop::collection::vec(1_u32..20, 0..3)) {
            assert!(unpack(&bytes).count() <= bytes.len());
            Raw::read(&bytes);
            let mut rest = Vec::new();
            Raw { bytes: &bytes, ..Raw::default() }.without(&numbers, &mut rest);
            assert!(rest.len() <= bytes.len());
            assert!(raw(&bytes).count() <= each(&bytes).count());
        }
    }
}
