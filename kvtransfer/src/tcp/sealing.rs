//! What binds each frame to its connection, and encrypts it where that is asked for. Both are AES-256-GCM by a key of
//! the direction, which is made from the hello's key and both nonces (`handshake.rs`). A nonce is the number of the tag
//! in its direction: none is used twice, and a frame that is left out, repeated or from elsewhere fails its tag.
//!
//! A frame's head has a tag of its own, since it is acted upon before its payload is here. Payloads are encrypted with
//! the head as associated data, in records; without encryption, seals and joins have a tag and stay readable, and data
//! has none: its checksums are in the seal. Knows no socket.
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::error::{TransferError, TransferErrorKind};
use crate::handshake::SessionSecret;

/// Behind what it protects.
pub(super) const TAG_BYTES: usize = 16;
/// Of a payload, encrypted at a time: it stays in the core's cache from the arena to the socket, and several fit the
/// buffer that they are read into.
pub(super) const RECORD_BYTES: usize = 64 << 10;
/// Tags of one key; then the next one is made from it. 2^20 records have 2^32 blocks of AES: the chance to tell them
/// from noise stays below 2^-63.
const TAGS_PER_KEY: u64 = 1 << 20;

/// What connections have on the network, beside the proof of who is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Frames are bound to their connection; whoever listens can read them.
    Bound,
    /// Payloads are encrypted, too, by AES-256-GCM. Both ends must want it.
    Encrypted,
}

/// One direction of a connection, at either end.
struct Line {
    secret: SessionSecret,
    key: LessSafeKey,
    /// Tags so far.
    count: u64,
}

impl Line {
    fn new(secret: SessionSecret) -> Self {
        let key = aes(&secret);
        Self { secret, key, count: 0 }
    }

    fn next(&mut self) -> Nonce {
        if self.count > 0 && self.count.is_multiple_of(TAGS_PER_KEY) {
            self.secret = self.secret.next();
            self.key = aes(&self.secret);
        }
        let mut nonce = [0; NONCE_LEN];
        nonce[NONCE_LEN - 8..].copy_from_slice(&self.count.to_be_bytes());
        // 2^64 tags take centuries.
        self.count += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

fn aes(secret: &SessionSecret) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &secret.key()).expect("AES-256 takes every key of 32 bytes"))
}

/// The sending end of a direction.
pub(super) struct Sealer(Line);

impl Sealer {
    pub(super) fn new(secret: SessionSecret) -> Self {
        Self(Line::new(secret))
    }

    /// The tag of bytes that travel as they are.
    pub(super) fn bind(&mut self, clear: &[u8]) -> [u8; TAG_BYTES] {
        self.encrypt(clear, &mut [])
    }

    /// Encrypts in place, for the frame of this head; the tag.
    pub(super) fn encrypt(&mut self, head: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let nonce = self.0.next();
        let sealed = self.0.key.seal_in_place_separate_tag(nonce, Aad::from(head), bytes);
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(sealed.expect("AES-GCM takes everything below 64 GiB").as_ref());
        tag
    }
}

/// The receiving end of a direction.
pub(super) struct Opener(Line);

impl Opener {
    pub(super) fn new(secret: SessionSecret) -> Self {
        Self(Line::new(secret))
    }

    /// Whether bytes are what the peer has bound, as the next that it said.
    ///
    /// # Errors
    /// `Corrupt`.
    pub(super) fn check(&mut self, clear: &[u8], mut tag: [u8; TAG_BYTES]) -> Result<(), TransferError> {
        self.decrypt(clear, &mut tag).map(|_| ())
    }

    /// Decrypts a record and its tag in place.
    ///
    /// # Errors
    /// `Corrupt`: not one byte of it may be used.
    pub(super) fn decrypt<'a>(&mut self, head: &[u8], bytes: &'a mut [u8]) -> Result<&'a [u8], TransferError> {
        let nonce = self.0.next();
        match self.0.key.open_in_place(nonce, Aad::from(head), bytes) {
            Ok(clear) => Ok(clear),
            Err(_) => Err(TransferError::new(TransferErrorKind::Corrupt, "a KV frame is not its peer's")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tandem_proto::v1;

    use super::*;
    use crate::handshake::{Direction, Nonces, Secret};

    fn line() -> (Sealer, Opener) {
        let key = Some(v1::HandoffKey { secret: vec![9; 32] });
        let secret = Secret::of(&v1::Ticket { handoff_id: vec![7; 16], key, ..v1::Ticket::default() }).expect("whole");
        let nonces = Nonces { sender: [1; 16], receiver: [2; 16] };
        let session = || secret.session(nonces, Direction::ToReceiver);
        (Sealer::new(session()), Opener::new(session()))
    }

    #[test]
    fn frames_count_in_their_order_and_once() {
        let (mut sealer, mut opener) = line();
        let tags = [sealer.bind(b"one"), sealer.bind(b"one"), sealer.bind(b"three")];
        assert_ne!(tags[0], tags[1], "no nonce twice");
        assert!(opener.check(b"one", tags[0]).is_ok());
        assert!(opener.check(b"one", tags[0]).is_err(), "again");
        let (_, mut opener) = line();
        assert!(opener.check(b"one", tags[1]).is_err(), "one was left out");
    }

    #[test]
    fn a_key_that_has_done_enough_is_replaced_at_both_ends() {
        let (mut sealer, mut opener) = line();
        (sealer.0.count, opener.0.count) = (TAGS_PER_KEY - 1, TAGS_PER_KEY - 1);
        for _ in 0..3 {
            let tag = sealer.bind(b"frame");
            assert!(opener.check(b"frame", tag).is_ok());
        }
        let (mut old, _) = line();
        old.0.count = TAGS_PER_KEY;
        old.0.secret = old.0.secret.next();
        assert_eq!(sealer.0.count, TAGS_PER_KEY + 2);
        assert_eq!(sealer.0.key.algorithm(), old.0.key.algorithm());
        (old.0.count, sealer.0.count) = (5, 5);
        assert_ne!(old.bind(b"frame"), sealer.bind(b"frame"), "the key is another one");
    }

    proptest! {
        #[test]
        fn a_record_comes_back_and_one_changed_bit_does_not(
            head in prop::array::uniform32(any::<u8>()), bytes in prop::collection::vec(any::<u8>(), 0..600),
            bit in any::<prop::sample::Index>(), of_head in any::<bool>(),
        ) {
            let (mut sealer, mut opener) = line();
            let mut record = bytes.clone();
            let tag = sealer.encrypt(&head, &mut record);
            record.extend(tag);
            prop_assert!(bytes.len() < 16 || record[..bytes.len()] != bytes[..], "it is encrypted");
            let (mut record_changed, mut head_changed) = (record.clone(), head);
            let changed: &mut [u8] = if of_head { &mut head_changed } else { &mut record_changed };
            let bit = bit.index(changed.len() * 8);
            changed[bit / 8] ^= 1 << (bit % 8);
            let (_, mut other) = line();
            prop_assert!(other.decrypt(&head_changed, &mut record_changed).is_err());
            prop_assert_eq!(opener.decrypt(&head, &mut record).ok(), Some(&bytes[..]));
        }
    }
}
