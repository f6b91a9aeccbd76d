//! Spans on their way from a node to the router and on to a collector: the bytes of a `v1::Spans`, each span in OTLP's
//! own form. Who passes them on decodes none: [`Raw`] finds in the bytes what it takes to put a span into its parent,
//! and the rest stays as it came. [`unpack`] reads them whole, when somebody looks at the trace; [`write`](mod@write)
//! writes them. Two packs are joined by putting one behind the other.
pub mod write;

use std::ops::Range;

use prost::Message;
use prost::encoding::decode_varint;

use crate::v1::{self, SpanKind, any_value};
use write::number;

/// What stands before each span: number 1, with a length.
const SPAN: u8 = 1 << 3 | 2;
/// OTLP's code of a status for what failed.
pub const FAILED: i32 = 2;

/// The spans, each in its bytes; of damaged bytes those before the damage: a trace is worth no error of its own.
pub fn each(mut packed: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (rest, mut at) = (packed.strip_prefix(&[SPAN])?, 0);
        let length = usize::try_from(varint(rest, &mut at)?).ok()?;
        let span = take(rest, &mut at, length)?;
        packed = &rest[at..];
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// Where the fields are that somebody leaves out: one that passes is read once.
    parent_at: Range<usize>,
    start_at: Range<usize>,
    end_at: Range<usize>,
    process_at: Range<usize>,
}

impl<'a> Raw<'a> {
    /// `None`: damaged, without a place in a trace, or in the form of another version.
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let (mut raw, mut end) = (Self { bytes, ..Self::default() }, 0);
        while end < bytes.len() {
            let start = end;
            let (number, value) = field(bytes, &mut end)?;
            let at = start..end;
            match (number, value) {
                (number::TRACE_ID, Value::Bytes(id)) => raw.trace_id = id,
                (number::SPAN_ID, Value::Bytes(id)) => raw.span_id = id,
                (number::PARENT_SPAN_ID, Value::Bytes(id)) => {
                    (raw.parent_span_id, raw.parent_at) = (id, once(&raw.parent_at, at)?)
                }
                (number::KIND, Value::Varint(kind)) => {
                    raw.kind = i32::try_from(kind).ok().and_then(|kind| SpanKind::try_from(kind).ok())?;
                }
                (number::START, Value::Fixed(unix_ns)) => {
                    (raw.start_unix_ns, raw.start_at) = (unix_ns, once(&raw.start_at, at)?)
                }
                (number::END, Value::Fixed(unix_ns)) => {
                    (raw.end_unix_ns, raw.end_at) = (unix_ns, once(&raw.end_at, at)?)
                }
                (number::PROCESS, Value::Bytes(process)) => {
                    (raw.process, raw.process_at) = (process, once(&raw.process_at, at)?)
                }
                (number::NAME | number::ATTRIBUTE | number::EVENT | number::LINK, Value::Bytes(_)) => {}
                (known, _) if number::NEEDED.contains(&known) => return None,
                _ => {}
            }
        }
        let ids = (raw.trace_id.len(), raw.span_id.len(), raw.parent_span_id.len());
        matches!(ids, (16, 8, 0 | 8)).then_some(raw)
    }

    /// As it came.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Its bytes as they came, behind those of `packed`.
    pub fn pass(&self, packed: &mut Vec<u8>) {
        write::bytes(packed, number::SPAN, self.bytes);
    }

    /// Its bytes without what says where it is: its parent, its start and its end.
    pub fn without_place(&self, span: &mut Vec<u8>) {
        self.without([&self.parent_at, &self.start_at, &self.end_at], span);
    }

    /// Its bytes without the process that it is of.
    pub fn without_process(&self, span: &mut Vec<u8>) {
        self.without([&self.process_at], span);
    }

    /// Its bytes without its events, of which there are many.
    pub fn without_events(&self, span: &mut Vec<u8>) {
        let (mut start, mut end) = (0, 0);
        while let Some((number, _)) = field(self.bytes, &mut end) {
            if number != number::EVENT {
                span.extend_from_slice(&self.bytes[start..end]);
            }
            start = end;
        }
    }

    fn without<const N: usize>(&self, mut fields: [&Range<usize>; N], span: &mut Vec<u8>) {
        fields.sort_unstable_by_key(|field| field.start);
        let mut kept = 0;
        for field in fields.into_iter().filter(|field| !field.is_empty()) {
            span.extend_from_slice(&self.bytes[kept..field.start]);
            kept = field.end;
        }
        span.extend_from_slice(&self.bytes[kept..]);
    }
}

/// Where a field is that was not there `before`.
fn once(before: &Range<usize>, at: Range<usize>) -> Option<Range<usize>> {
    before.is_empty().then_some(at)
}

enum Value<'a> {
    Varint(u64),
    Fixed(u64),
    Bytes(&'a [u8]),
    /// Of no interest here.
    Short,
}

/// The field that begins there, with its number; `at` is its end then. `None`: the end of all, or damage.
#[inline(always)]
fn field<'a>(bytes: &'a [u8], at: &mut usize) -> Option<(u32, Value<'a>)> {
    let key = u32::try_from(varint(bytes, at)?).ok()?;
    let value = match key & 7 {
        0 => Value::Varint(varint(bytes, at)?),
        1 => Value::Fixed(u64::from_le_bytes(*take(bytes, at, 8)?.first_chunk()?)),
        2 => {
            let length = usize::try_from(varint(bytes, at)?).ok()?;
            Value::Bytes(take(bytes, at, length)?)
        }
        5 => take(bytes, at, 4).map(|_| Value::Short)?,
        // A group, or nothing that there is.
        _ => return None,
    };
    Some((key >> 3, value))
}

#[inline(always)]
fn take<'a>(bytes: &'a [u8], at: &mut usize, length: usize) -> Option<&'a [u8]> {
    let taken = bytes.get(*at..at.checked_add(length)?)?;
    *at += length;
    Some(taken)
}

/// Nearly all are of one byte or two.
#[inline(always)]
fn varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    match bytes.get(*at..)? {
        [first @ 0..0x80, ..] => {
            *at += 1;
            Some(u64::from(*first))
        }
        [first, second @ 0..0x80, ..] => {
            *at += 2;
            Some(u64::from(first & 0x7f) | u64::from(*second) << 7)
        }
        _ => long_varint(bytes, at),
    }
}

#[cold]
fn long_varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut rest = &bytes[*at..];
    let number = decode_varint(&mut rest).ok()?;
    *at = bytes.len() - rest.len();
    Some(number)
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
        let (mut anywhere, mut nobodys) = (Vec::new(), Vec::new());
        first.without_place(&mut anywhere);
        assert_eq!(v1::Span::decode(&anywhere[..]).unwrap(), v1::Span { end_unix_ns: 0, ..span("a") });
        first.without_process(&mut nobodys);
        assert_eq!(v1::Span::decode(&nobodys[..]).unwrap(), v1::Span { process: None, ..span("a") });
        let busy = v1::Span { events: vec![v1::SpanEvent::default(); 2], ..span("a") };
        let (bytes, mut quiet) = (busy.encode_to_vec(), Vec::new());
        Raw::read(&bytes).unwrap().without_events(&mut quiet);
        assert_eq!(quiet, span("a").encode_to_vec());
    }

    #[test]
    fn what_has_no_place_in_a_trace_does_not_pass() {
        let none = v1::Span { span_id: Vec::new(), ..span("a") };
        let wrong = v1::Span { parent_span_id: vec![1; 7], ..span("a") };
        let short = v1::Span { trace_id: vec![1; 15], ..span("a") };
        assert_eq!(raw(&pack(&[none, wrong, short, span("b")])).count(), 1);
        // What is there twice would be left out once.
        let twice =
            [pack(&[span("a")])[2..].to_vec(), vec![(number::END << 3 | 1) as u8, 1, 0, 0, 0, 0, 0, 0, 0]].concat();
        assert_eq!(Raw::read(&twice), None);
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
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            assert!(unpack(&bytes).count() <= bytes.len());
            Raw::read(&bytes);
            assert!(raw(&bytes).count() <= each(&bytes).count());
        }

        #[test]
        fn what_is_left_out_is_all_that_is_missing(
            parent in prop::bool::ANY, start_unix_ns in 0..u64::MAX, end_unix_ns in 0..3_u64, name in ".{0,200}", of_process in prop::bool::ANY,
        ) {
            let parent_span_id = if parent { vec![4; 8] } else { Vec::new() };
            let process = of_process.then(|| v1::Process { service: name.clone(), instance: name.clone() });
            let whole = v1::Span { parent_span_id, start_unix_ns, end_unix_ns, process, ..span(&name) };
            let bytes = whole.encode_to_vec();
            let (raw, mut anywhere, mut nobodys) = (Raw::read(&bytes).unwrap(), Vec::new(), Vec::new());
            raw.without_place(&mut anywhere);
            raw.without_process(&mut nobodys);
            let expected = v1::Span { parent_span_id: Vec::new(), start_unix_ns: 0, end_unix_ns: 0, ..whole.clone() };
            assert_eq!(v1::Span::decode(&anywhere[..]).unwrap(), expected);
            assert_eq!(v1::Span::decode(&nobodys[..]).unwrap(), v1::Span { process: None, ..whole });
        }
    }
}
