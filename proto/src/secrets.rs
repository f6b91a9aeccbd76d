//! `Debug` of the messages that hold a hand-off's key, a ticket with one, a life's secret, or a cache salt: whatever
//! prints a message prints no secret.
use std::fmt;

use crate::v1::{Deliver, HandoffKey, LifeSecret, RequestSpec, Reserved};

impl fmt::Debug for HandoffKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandoffKey(..)")
    }
}

impl fmt::Debug for LifeSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LifeSecret(..)")
    }
}

impl fmt::Debug for Deliver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Deliver { ticket: .. }")
    }
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ticket: _, blocks, held_blocks } = self;
        write!(f, "Reserved {{ ticket: .., blocks: {blocks}, held_blocks: {held_blocks} }}")
    }
}

/// Its prompt is long, and not for logs either.
impl fmt::Debug for RequestSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request_id, prompt, output_tokens, max_tokens, .. } = self;
        let (id, prompt) = (request_id, prompt.len());
        write!(f, "RequestSpec({id:?}: {prompt} tokens, {output_tokens} of them output, {max_tokens} more)")
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use crate::v1::{
        DecodeEvent, Deliver, HandoffKey, LifeSecret, PrefillCommand, Register, RequestSpec, Reserved, Ticket,
        decode_event, prefill_command,
    };

    /// As numbers and as text, as `Debug` may print bytes.
    fn tells(printed: &str) -> bool {
        printed.contains("205") || printed.contains("\\xcd") || printed.contains("cdcd")
    }

    #[test]
    fn no_message_prints_a_key() {
        let key = HandoffKey { secret: vec![0xcd; 32] };
        assert!(tells(&format!("{:?}", key.secret)), "what is looked for");
        let ticket = Ticket { key: Some(key), blocks: 7, ..Ticket::default() };
        let bytes = ticket.encode_to_vec();
        let deliver = Deliver { ticket: bytes.clone() };
        let command = PrefillCommand { command: Some(prefill_command::Command::Deliver(deliver)) };
        let reserved = Reserved { ticket: bytes, blocks: 7, held_blocks: 0 };
        let event = DecodeEvent { event: Some(decode_event::Event::Reserved(reserved)) };
        let spec = RequestSpec { cache_salt: vec![0xcd; 16], ..RequestSpec::default() };
        let start = PrefillCommand { command: Some(prefill_command::Command::Start(spec)) };
        let ended = vec![LifeSecret { secret: vec![0xcd; 32] }];
        let register = format!("{:?}", Register { ended, ..Register::default() });
        let [ticket_text, command, start] = [format!("{ticket:?}"), format!("{command:?}"), format!("{start:?}")];
        for printed in [ticket_text, command, format!("{event:#?}"), start, register] {
            assert!(!tells(&printed), "{printed}");
        }
        assert!(format!("{ticket:?}").contains("blocks: 7"), "the rest is printed");
    }
}
