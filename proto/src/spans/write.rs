//! The bytes of spans, written as they come about: no message of values in between, which would be allocated, measured
//! and freed again for some two hundred attributes of a request.
use prost::encoding::{WireType, encode_varint, encoded_len_varint};

use crate::v1::SpanKind;

/// The numbers of a span's fields in `cluster.proto`, which are OTLP's.
#[allow(missing_docs, reason = "their names say it")]
pub mod number {
    /// In a `v1::Spans`.
    pub const SPAN: u32 = 1;

    pub const TRACE_ID: u32 = 1;
    pub const SPAN_ID: u32 = 2;
    pub const TRACESTATE: u32 = 3;
    pub const PARENT_SPAN_ID: u32 = 4;
    pub const NAME: u32 = 5;
    pub const KIND: u32 = 6;
    pub const START: u32 = 7;
    pub const END: u32 = 8;
    pub const ATTRIBUTE: u32 = 9;
    pub const EVENT: u32 = 11;
    pub const LINK: u32 = 13;
    pub const STATUS: u32 = 15;
    pub const FLAGS: u32 = 16;
    pub const PROCESS: u32 = 100;

    /// Those that a span is placed by.
    pub(in crate::spans) const NEEDED: [u32; 11] =
        [TRACE_ID, SPAN_ID, PARENT_SPAN_ID, NAME, KIND, START, END, ATTRIBUTE, EVENT, LINK, PROCESS];
}

/// W3C's flag of a trace that is kept: others are not sent.
const SAMPLED: u32 = 1;
/// OTLP's: whether the parent is in another process is known.
const KNOWS_WHERE: u32 = 0x100;
/// And that it is.
const ELSEWHERE: u32 = 0x200;

/// OTLP's flags of a span of this kind, which says where its parent is.
pub fn flags(kind: SpanKind) -> u32 {
    let elsewhere = matches!(kind, SpanKind::Server | SpanKind::Consumer);
    SAMPLED | KNOWS_WHERE | if elsewhere { ELSEWHERE } else { 0 }
}

/// A message whose fields `content` writes.
#[inline]
pub fn message(buf: &mut Vec<u8>, number: u32, content: impl FnOnce(&mut Vec<u8>)) {
    key(buf, number, WireType::LengthDelimited);
    let at = buf.len();
    // Most lengths take one byte; for others what was written makes room.
    buf.push(0);
    content(buf);
    let length = buf.len() - at - 1;
    if let Ok(length @ 0..0x80) = u8::try_from(length) {
        buf[at] = length;
        return;
    }
    let more = encoded_len_varint(length as u64) - 1;
    buf.resize(buf.len() + more, 0);
    buf.copy_within(at + 1..at + 1 + length, at + 1 + more);
    encode_varint(length as u64, &mut &mut buf[at..at + 1 + more]);
}

/// Bytes, or a text.
#[inline]
pub fn bytes(buf: &mut Vec<u8>, number: u32, value: &[u8]) {
    key(buf, number, WireType::LengthDelimited);
    plain(buf, value.len() as u64);
    buf.extend_from_slice(value);
}

/// A number of an enum, an `int64`, or a `bool`.
#[inline]
pub fn varint(buf: &mut Vec<u8>, number: u32, value: u64) {
    key(buf, number, WireType::Varint);
    plain(buf, value);
}

/// A `fixed64`, or the bits of a `double`.
#[inline]
pub fn fixed64(buf: &mut Vec<u8>, number: u32, value: u64) {
    key(buf, number, WireType::SixtyFourBit);
    buf.extend_from_slice(&value.to_le_bytes());
}

/// A `fixed32`.
#[inline]
pub fn fixed32(buf: &mut Vec<u8>, number: u32, value: u32) {
    key(buf, number, WireType::ThirtyTwoBit);
    buf.extend_from_slice(&value.to_le_bytes());
}

#[inline]
fn key(buf: &mut Vec<u8>, number: u32, wire_type: WireType) {
    plain(buf, u64::from(number << 3 | wire_type as u32));
}

/// Nearly all are of one byte.
#[inline]
fn plain(buf: &mut Vec<u8>, value: u64) {
    match u8::try_from(value) {
        Ok(byte @ 0..0x80) => buf.push(byte),
        _ => encode_varint(value, buf),
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::v1;

    #[test]
    fn messages_of_any_length_are_read() {
        for length in [0, 1, 127, 128, 200, 16_383, 16_384, 70_000] {
            let name = "x".repeat(length);
            let mut packed = Vec::new();
            message(&mut packed, number::SPAN, |span| {
                bytes(span, number::NAME, name.as_bytes());
                varint(span, number::KIND, 2);
                fixed64(span, number::END, 7);
                fixed32(span, number::FLAGS, 0x301);
            });
            let expected = v1::Span { name, kind: 2, end_unix_ns: 7, flags: 0x301, ..v1::Span::default() };
            assert_eq!(v1::Spans::decode(&packed[..]).unwrap().spans, [expected], "{length}");
        }
    }
}
