//! How the two ends of a hand-off prove that they are meant. The ticket carries a key that was drawn for it, and the
//! control plane brings it to the sender. The sender opens the hand-off by a proof over the key, and the receiver
//! answers by another one; whoever has no key of a hand-off has nothing of it, whatever it knows of ids and addresses.
//!
//! A proof is HMAC-SHA256 over: the role it is said in, the hand-off, both incarnations, the receiver's address, what
//! the sender says of itself, and the nonces known by then. A hello knows the sender's nonce alone; the key stands for
//! the receiver's, since it is as new as the ticket. An old hello therefore opens nothing: its hand-off is over, or
//! bound to whoever said it first.
//!
//! What a hello and a welcome carry (the header in front is that of `wire.rs`):
//! ```text
//! hello    0..16  hand-off id     welcome   0..16  the receiver's nonce
//!         16..32  nonce                    16..48  proof
//!         32..64  proof
//!         64..    what the sender says of itself: the backend's; behind a welcome, what the receiver says
//! ```
//! Pure: no socket, no clock, and nonces come from the caller. Who may open what: `registry.rs`.
use std::fmt;

use ring::{hkdf, hmac};
use tandem_proto::{HandoffId, Incarnation, v1};

use crate::error::{TransferError, TransferErrorKind};

/// Of a key, and of a proof.
pub const KEY_BYTES: usize = 32;
/// In front of what a sender says of itself.
pub const HELLO_HEAD_BYTES: usize = 64;
/// In front of what a receiver says of itself.
pub const WELCOME_HEAD_BYTES: usize = 48;

/// Drawn by each end for each opening.
pub type Nonce = [u8; 16];
/// That its speaker knows the key.
pub type Proof = [u8; KEY_BYTES];

/// Both ends' nonces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonces {
    /// The hello's.
    pub sender: Nonce,
    /// The welcome's.
    pub receiver: Nonce,
}

/// What both ends of a hand-off know, and nobody else. Equal at both, since both take it from the ticket.
pub struct Secret {
    key: [u8; KEY_BYTES],
    handoff: HandoffId,
    prefill: Incarnation,
    decode: Incarnation,
    receiver: Vec<u8>,
}

/// Which of two directions a key protects: each has one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From whoever said hello.
    ToReceiver,
    /// From whoever welcomed.
    ToSender,
}

/// What opens a hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello<'a> {
    /// Which one.
    pub handoff: HandoffId,
    /// Of the sender.
    pub nonce: Nonce,
    /// Of the sender, over `about`.
    pub proof: Proof,
    /// What the sender says of itself: its build, its address.
    pub about: &'a [u8],
}

/// How a receiver takes what it is sent: its welcome says so, and proves that too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The backend moves the bytes.
    Sent,
    /// They are announced, and the receiver copies them out of the sender's memory.
    Copied,
}

impl Way {
    /// Of the proof.
    fn role(self) -> &'static str {
        match self {
            Self::Sent => "welcome",
            Self::Copied => "welcome, will copy",
        }
    }
}

/// The receiver's answer to a hello that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome<'a> {
    /// Of the receiver.
    pub nonce: Nonce,
    /// Of the receiver, over what both say of themselves.
    pub proof: Proof,
    /// What the receiver says of itself.
    pub about: &'a [u8],
}

impl Secret {
    /// Of a ticket, whoever reads it.
    ///
    /// # Errors
    /// `Incompatible` without a whole key, `Io` for a ticket that cannot be one.
    pub fn of(ticket: &v1::Ticket) -> Result<Self, TransferError> {
        let key = ticket.key.as_ref().and_then(|key| key.secret.as_slice().try_into().ok());
        let no_key = "the ticket carries no key of 32 bytes: run one version of Tandem on all nodes";
        let key = key.ok_or_else(|| TransferError::new(TransferErrorKind::Incompatible, no_key))?;
        let handoff = HandoffId::from_wire(&ticket.handoff_id)
            .map_err(|error| TransferError::new(TransferErrorKind::Io, error.message))?;
        let (prefill, decode) = (Incarnation(ticket.prefill_incarnation), Incarnation(ticket.decode_incarnation));
        Ok(Self { key, handoff, prefill, decode, receiver: ticket.address.clone() })
    }

    /// The payload of a hello by a sender that is `about`.
    pub fn hello(&self, nonce: Nonce, about: &[u8]) -> Vec<u8> {
        let proof = self.prove("hello", &[about], &[&nonce]);
        [&self.handoff.0[..], &nonce, &proof, about].concat()
    }

    /// Whether a hello was made with this secret. Takes the same time wherever it differs.
    pub fn made(&self, hello: &Hello<'_>) -> bool {
        self.is_proof(&hello.proof, "hello", &[hello.about], &[&hello.nonce])
    }

    /// The payload of a receiver's answer, which is `about` and takes KV this way, to a hello that said `sender`.
    pub fn welcome(&self, way: Way, nonces: Nonces, sender: &[u8], about: &[u8]) -> Vec<u8> {
        let proof = self.prove(way.role(), &[sender, about], &[&nonces.sender, &nonces.receiver]);
        [&nonces.receiver[..], &proof, about].concat()
    }

    /// Whether a welcome answers the hello that said `sender`, with this nonce, and the receiver chose this way.
    pub fn welcomed(&self, way: Way, welcome: &Welcome<'_>, nonce: Nonce, sender: &[u8]) -> bool {
        self.is_proof(&welcome.proof, way.role(), &[sender, welcome.about], &[&nonce, &welcome.nonce])
    }

    /// That this hand-off, too, is the sender's, on a connection that another one opened with these nonces.
    pub fn join(&self, nonces: Nonces) -> Proof {
        self.prove("join", &[], &[&nonces.sender, &nonces.receiver])
    }

    /// Whether a join was made with this secret for this connection.
    pub fn joins(&self, proof: &Proof, nonces: Nonces) -> bool {
        self.is_proof(proof, "join", &[], &[&nonces.sender, &nonces.receiver])
    }

    /// What protects one direction of a connection that was opened with these nonces.
    pub fn session(&self, nonces: Nonces, direction: Direction) -> SessionSecret {
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, &[nonces.sender, nonces.receiver].concat());
        let label: &[u8] = match direction {
            Direction::ToReceiver => b"tandem kv to receiver",
            Direction::ToSender => b"tandem kv to sender",
        };
        SessionSecret(expand(&salt.extract(&self.key), label))
    }

    fn prove(&self, role: &str, about: &[&[u8]], nonces: &[&Nonce]) -> Proof {
        hmac_sha256(&self.key, &[&self.transcript(role, about, nonces)])
    }

    fn is_proof(&self, proof: &Proof, role: &str, about: &[&[u8]], nonces: &[&Nonce]) -> bool {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.key);
        hmac::verify(&key, &self.transcript(role, about, nonces), proof).is_ok()
    }

    /// Each part that may be longer or shorter says its length, so that no two transcripts are the same bytes.
    fn transcript(&self, role: &str, about: &[&[u8]], nonces: &[&Nonce]) -> Vec<u8> {
        let mut bytes = b"tandem kv ".to_vec();
        for part in [role.as_bytes(), &self.receiver].iter().chain(about) {
            bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part);
        }
        bytes.extend_from_slice(&self.handoff.0);
        bytes.extend_from_slice(&self.prefill.0.to_le_bytes());
        bytes.extend_from_slice(&self.decode.0.to_le_bytes());
        nonces.iter().for_each(|nonce| bytes.extend_from_slice(*nonce));
        bytes
    }
}

/// No part of the key.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret of {:?}", self.handoff)
    }
}

/// Of one direction of one connection. Keys are made from it, and the next one, when those have done enough.
pub struct SessionSecret([u8; KEY_BYTES]);

impl SessionSecret {
    /// A key for AES-256-GCM.
    pub fn key(&self) -> [u8; KEY_BYTES] {
        expand(&self.prk(), b"tandem kv key")
    }

    /// Made from this one; it does not lead back.
    pub fn next(&self) -> Self {
        Self(expand(&self.prk(), b"tandem kv next"))
    }

    fn prk(&self) -> hkdf::Prk {
        hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &self.0)
    }
}

/// HMAC-SHA256 of the parts, one after the other.
pub(crate) fn hmac_sha256(key: &[u8; KEY_BYTES], parts: &[&[u8]]) -> [u8; KEY_BYTES] {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    parts.iter().for_each(|part| context.update(part));
    let mut tag = [0; KEY_BYTES];
    tag.copy_from_slice(context.sign().as_ref());
    tag
}

fn expand(prk: &hkdf::Prk, label: &[u8]) -> [u8; KEY_BYTES] {
    let mut bytes = [0; KEY_BYTES];
    let filled = prk.expand(&[label], hkdf::HKDF_SHA256).and_then(|okm| okm.fill(&mut bytes));
    // RFC 5869 gives up to 255 digests.
    assert!(filled.is_ok(), "one digest");
    bytes
}

impl<'a> Hello<'a> {
    /// Reads a payload; whether it was made with the hand-off's secret is to be seen ([`Secret::made`]).
    pub fn parse(payload: &'a [u8]) -> Option<Self> {
        let (handoff, rest) = payload.split_first_chunk()?;
        let (nonce, rest) = rest.split_first_chunk()?;
        let (proof, about) = rest.split_first_chunk()?;
        Some(Self { handoff: HandoffId(*handoff), nonce: *nonce, proof: *proof, about })
    }
}

impl<'a> Welcome<'a> {
    /// Reads a payload, as [`Hello::parse`].
    pub fn parse(payload: &'a [u8]) -> Option<Self> {
        let (nonce, rest) = payload.split_first_chunk()?;
        let (proof, about) = rest.split_first_chunk()?;
        Some(Self { nonce: *nonce, proof: *proof, about })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONCES: Nonces = Nonces { sender: [1; 16], receiver: [2; 16] };

    fn ticket() -> v1::Ticket {
        v1::Ticket {
            handoff_id: vec![7; 16],
            prefill_incarnation: 3,
            decode_incarnation: 4,
            address: b"host:1".to_vec(),
            key: Some(v1::HandoffKey { secret: vec![9; 32] }),
            ..v1::Ticket::default()
        }
    }

    fn secret(change: impl Fn(&mut v1::Ticket)) -> Secret {
        let mut ticket = ticket();
        change(&mut ticket);
        Secret::of(&ticket).expect("a whole ticket")
    }

    /// RFC 4231, test cases 1 and 2; HMAC pads keys with zeros, as the tests do.
    #[test]
    fn it_is_hmac_sha256() {
        let hex = |bytes: [u8; 32]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut first = [0; 32];
        first[..20].fill(0x0b);
        let expected = "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7";
        assert_eq!(hex(hmac_sha256(&first, &[b"Hi ", b"There"])), expected);
        let mut second = [0; 32];
        second[..4].copy_from_slice(b"Jefe");
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        assert_eq!(hex(hmac_sha256(&second, &[b"what do ya want ", b"for nothing?"])), expected);
    }

    #[test]
    fn a_proof_is_of_one_role_one_handoff_and_its_two_ends() {
        let sender = secret(|_| ());
        let payload = sender.hello(NONCES.sender, b"me");
        let hello = Hello::parse(&payload).expect("whole");
        let others: [fn(&mut v1::Ticket); 5] = [
            |ticket| ticket.key = Some(v1::HandoffKey { secret: vec![8; 32] }),
            |ticket| ticket.handoff_id = vec![6; 16],
            |ticket| ticket.prefill_incarnation = 4,
            |ticket| ticket.decode_incarnation = 3,
            |ticket| ticket.address = b"host:2".to_vec(),
        ];
        assert!(secret(|_| ()).made(&hello));
        assert!(others.into_iter().all(|change| !secret(change).made(&hello)));
        assert!(!sender.made(&Hello { nonce: NONCES.receiver, ..hello }), "a replay with another nonce");
        assert!(!sender.made(&Hello { about: b"you", ..hello }));
        let payload = sender.welcome(Way::Sent, NONCES, b"me", b"you");
        let welcome = Welcome::parse(&payload).expect("whole");
        assert!(sender.welcomed(Way::Sent, &welcome, NONCES.sender, b"me"));
        assert!(!sender.welcomed(Way::Copied, &welcome, NONCES.sender, b"me"), "another header in front");
        assert!(!sender.welcomed(Way::Sent, &welcome, NONCES.receiver, b"me"));
        assert!(!sender.welcomed(Way::Sent, &welcome, NONCES.sender, b""));
        assert!(!sender.welcomed(Way::Sent, &Welcome { about: b"he", ..welcome }, NONCES.sender, b"me"));
        assert!(
            !sender.welcomed(Way::Sent, &Welcome { about: b"eyou", ..welcome }, NONCES.sender, b"m"),
            "another cut"
        );
        assert!(others.into_iter().all(|change| !secret(change).welcomed(Way::Sent, &welcome, NONCES.sender, b"me")));
        // The hello's own proof, given back.
        let reflected = Welcome { nonce: hello.nonce, proof: hello.proof, about: &[] };
        assert!(!sender.welcomed(Way::Sent, &reflected, NONCES.sender, b"me"));
        let join = sender.join(NONCES);
        assert!(sender.joins(&join, NONCES) && !secret(others[0]).joins(&join, NONCES));
        assert!(!sender.joins(&join, Nonces { receiver: [3; 16], ..NONCES }), "another connection");
    }

    #[test]
    fn each_direction_each_connection_and_each_key_is_its_own() {
        let secret = secret(|_| ());
        let first = secret.session(NONCES, Direction::ToReceiver);
        let other = Nonces { sender: [3; 16], ..NONCES };
        let keys = [
            first.key(),
            secret.session(NONCES, Direction::ToSender).key(),
            secret.session(other, Direction::ToReceiver).key(),
            first.next().key(),
            first.next().next().key(),
        ];
        assert!((0..keys.len()).all(|i| keys[..i].iter().all(|key| *key != keys[i])));
        assert_eq!(first.key(), secret.session(NONCES, Direction::ToReceiver).key());
    }

    #[test]
    fn a_ticket_without_a_whole_key_has_no_secret() {
        for key in [None, Some(v1::HandoffKey { secret: vec![1; 31] }), Some(v1::HandoffKey { secret: vec![1; 33] })] {
            let error = Secret::of(&v1::Ticket { key, ..ticket() }).expect_err("no key");
            assert_eq!(error.kind, TransferErrorKind::Incompatible);
        }
        assert_eq!(format!("{:?}", secret(|_| ())), format!("Secret of HandoffId({})", "07".repeat(16)));
    }

    proptest! {
        #[test]
        fn one_changed_bit_is_none_of_ours(about in prop::collection::vec(any::<u8>(), 0..300), bit in any::<prop::sample::Index>()) {
            let secret = secret(|_| ());
            let mut hello = secret.hello(NONCES.sender, &about);
            let mut welcome = secret.welcome(Way::Copied, NONCES, &about, &about);
            let (h, w) = (bit.index(hello.len() * 8), bit.index(welcome.len() * 8));
            hello[h / 8] ^= 1 << (h % 8);
            welcome[w / 8] ^= 1 << (w % 8);
            let hello = Hello::parse(&hello).expect("as long as before");
            prop_assert!(hello.handoff != HandoffId([7; 16]) || !secret.made(&hello));
            let welcome = Welcome::parse(&welcome).expect("as long as before");
            prop_assert!(!secret.welcomed(Way::Copied, &welcome, NONCES.sender, &about));
        }

        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(Hello::parse(&bytes).is_some(), bytes.len() >= HELLO_HEAD_BYTES);
            prop_assert_eq!(Welcome::parse(&bytes).is_some(), bytes.len() >= WELCOME_HEAD_BYTES);
        }
    }
}
