//! Server-sent events out of bytes that come in any pieces; pure.
//! <https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation>; only `data` matters
//! here.

/// Bytes of a line, and of an event, at most: what is longer is no stream of tokens.
const MOST_BYTES: usize = 4 << 20;

/// A line or an event that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {MOST_BYTES} bytes")]
pub struct TooLong;

/// What was begun and is not yet ended.
#[derive(Default)]
pub struct Parser {
    line: Vec<u8>,
    data: Option<Vec<u8>>,
    after_carriage_return: bool,
}

impl Parser {
    /// The data of all events that `bytes` end.
    ///
    /// # Errors
    /// An event that is too long; the stream is then of no more use.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<Vec<u8>>, TooLong> {
        let mut events = Vec::new();
        if std::mem::take(&mut self.after_carriage_return) && bytes.first() == Some(&b'\n') {
            bytes = &bytes[1..];
        }
        while let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.keep(&bytes[..end])?;
            let line = std::mem::take(&mut self.line);
            events.extend(self.end_line(&line)?);
            let carriage_return = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            if carriage_return {
                match bytes.first() {
                    Some(b'\n') => bytes = &bytes[1..],
                    Some(_) => {}
                    None => self.after_carriage_return = true,
                }
            }
        }
        self.keep(bytes)?;
        Ok(events)
    }

    fn keep(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        if self.line.len() + bytes.len() > MOST_BYTES {
            return Err(TooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    /// An empty line ends an event.
    fn end_line(&mut self, line: &[u8]) -> Result<Option<Vec<u8>>, TooLong> {
        if line.is_empty() {
            return Ok(self.data.take());
        }
        let value = match line.strip_prefix(b"data") {
            Some([b':', b' ', value @ ..] | [b':', value @ ..]) => value,
            Some([]) => &[],
            // Comments, other fields, names that only begin like ours.
            _ => return Ok(None),
        };
        match &mut self.data {
            Some(data) if data.len() + value.len() >= MOST_BYTES => return Err(TooLong),
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
            None => self.data = Some(value.to_vec()),
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(parser: &mut Parser, bytes: &[u8]) -> Vec<String> {
        parser.push(bytes).unwrap().into_iter().map(|event| String::from_utf8(event).unwrap()).collect()
    }

    #[test]
    fn events_come_out_whatever_the_pieces() {
        let stream = ": hello\n\ndata: {\"a\": \"é\"}\r\n\r\nevent: x\ndata:one\ndata: two\rid: 7\r\rdatum: no\n\ndata\n\ndata: [DONE]\n\nrest";
        let wanted = ["{\"a\": \"é\"}", "one\ntwo", "", "[DONE]"];
        assert_eq!(all(&mut Parser::default(), stream.as_bytes()), wanted);
        for size in 1..stream.len() {
            let mut parser = Parser::default();
            let events: Vec<String> =
                stream.as_bytes().chunks(size).flat_map(|piece| all(&mut parser, piece)).collect();
            assert_eq!(events, wanted, "in pieces of {size}");
        }
    }

    #[test]
    fn a_stream_without_ends_is_refused() {
        let piece = vec![b'x'; 1 << 20];
        let mut parser = Parser::default();
        assert!((0..4).all(|_| parser.push(&piece).is_ok()));
        assert_eq!(parser.push(&piece), Err(TooLong));
        let mut parser = Parser::default();
        let mut line = b"data:".to_vec();
        line.extend_from_slice(&piece);
        line.push(b'\n');
        assert!((0..8).any(|_| parser.push(&line).is_err()));
    }
}
