//! `Debug` of the messages that hold a hand-off's key, or a ticket with one: whatever prints a message prints no
//! secret.
use std::fmt;

use crate::v1::{Deliver, HandoffKey, Reserved};

impl fmt::Debug for HandoffKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandoffKey(..)")
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

#[cfg(test)]
mod tests {
    use prost::Message;

    use crate::v1::{
        DecodeEvent, Deliver, HandoffKey, PrefillCommand, Reserved, Ticket, decode_event, prefill_command,
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
        for printed in [format!("{ticket:?}"), format!("{command:?}"), format!("{event:#?}")] {
            assert!(!tells(&printed), "{printed}");
        }
        assert!(format!("{ticket:?}").contains("blocks: 7"), "the rest is printed");
    }
}
