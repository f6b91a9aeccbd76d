//! The manifest of a hand-off: made from the sender's arena, checked against the receiver's.
use tandem_proto::{HandoffId, v1};

use crate::arena::Arena;
use crate::error::Refusal;
use crate::transport::Expected;

/// A seal over `blocks` of the sender's arena, in hand-off order, answering `ticket`. The caller adds first token,
/// sampler position, traceparent and post time. Hashes all bytes: call it where blocking is allowed, and before or while
/// pushing, never after the blocks were given back.
pub fn seal_for(
    arena: &Arena,
    blocks: &[u32],
    ticket: &v1::Ticket,
    prompt_tokens: u32,
    sequence_hashes: Vec<u64>,
) -> v1::Seal {
    v1::Seal {
        handoff_id: ticket.handoff_id.clone(),
        prefill_incarnation: ticket.prefill_incarnation,
        decode_incarnation: ticket.decode_incarnation,
        prompt_tokens,
        sequence_hashes,
        checksums: blocks.iter().map(|block| arena.checksum(*block)).collect(),
        ..Default::default()
    }
}

/// Everything that must hold before anybody reads the blocks.
pub(crate) fn verify(
    seal: &v1::Seal,
    ticket: &v1::Ticket,
    expected: &Expected,
    arena: &Arena,
    blocks: &[u32],
) -> Result<(), Refusal> {
    if HandoffId::from_wire(&seal.handoff_id).is_err() || seal.handoff_id != ticket.handoff_id {
        return Err(Refusal::Malformed);
    }
    let incarnations = |s: (u64, u64)| s == (ticket.prefill_incarnation, ticket.decode_incarnation);
    if !incarnations((seal.prefill_incarnation, seal.decode_incarnation)) {
        return Err(Refusal::WrongIncarnation);
    }
    if seal.prompt_tokens != expected.prompt_tokens {
        return Err(Refusal::WrongPrompt);
    }
    let n = blocks.len();
    if seal.sequence_hashes.len() != n || seal.checksums.len() != n || expected.sequence_hashes.len() != n {
        return Err(Refusal::WrongPrompt);
    }
    let differs = seal.sequence_hashes.iter().zip(&expected.sequence_hashes).position(|(a, b)| a != b);
    if let Some(index) = differs {
        return Err(Refusal::WrongSequence(index as u32));
    }
    let corrupt = seal.checksums.iter().zip(blocks).position(|(sum, block)| *sum != arena.checksum(*block));
    corrupt.map_or(Ok(()), |index| Err(Refusal::Corrupt(index as u32)))
}
