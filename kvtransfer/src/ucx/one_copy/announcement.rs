//! The payload of a `Ready` frame: where the pieces of a range are in the sender's memory, one after the other. For
//! each run 16 bytes: first byte, number of bytes (little endian). Numbers of a stranger: whoever uses them checks
//! that the memory has them.
use tandem_memory::{Run, WORD_BYTES};

use crate::terms::Faults;

const RUN_BYTES: usize = 16;
/// A frame has no more blocks.
const MOST_RUNS: usize = 1024;

/// The payload.
pub(in super::super) fn encode(runs: &[Run]) -> Vec<u8> {
    runs.iter().flat_map(|run| [run.at as u64, run.bytes as u64]).flat_map(u64::to_le_bytes).collect()
}

/// Reads one; `None`: it is none.
pub(in super::super) fn parse(payload: &[u8]) -> Option<Vec<Run>> {
    let (runs, rest) = payload.as_chunks::<RUN_BYTES>();
    if !rest.is_empty() || runs.is_empty() || runs.len() > MOST_RUNS {
        return None;
    }
    let run = |bytes: &[u8; RUN_BYTES]| {
        let (at, length) = bytes.split_first_chunk::<8>()?;
        let number = |bytes: [u8; 8]| usize::try_from(u64::from_le_bytes(bytes)).ok();
        let run = Run { at: number(*at)?, bytes: number(length.try_into().ok()?)? };
        (run.bytes > 0 && run.bytes.is_multiple_of(WORD_BYTES)).then_some(run)
    };
    runs.iter().map(run).collect()
}

/// The runs with the faults applied: no byte of them leaves this process, so a flipped one is a word beside it.
pub(in super::super) fn altered(runs: &[Run], faults: Faults) -> Vec<Run> {
    let mut runs = runs.to_vec();
    if let (true, Some(first)) = (faults.flip_byte, runs.first_mut()) {
        first.at = first.at.checked_sub(WORD_BYTES).unwrap_or(WORD_BYTES);
    }
    if let (true, Some(last)) = (faults.truncate_push, runs.last_mut()) {
        last.bytes -= WORD_BYTES;
        runs.retain(|run| run.bytes > 0);
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_trip(runs in prop::collection::vec((any::<u32>(), 1u32..), 1..40), cut in 1usize..16) {
            let runs: Vec<Run> = runs.into_iter()
                .map(|(at, words)| Run { at: at as usize, bytes: words as usize * WORD_BYTES }).collect();
            let payload = encode(&runs);
            prop_assert_eq!(parse(&payload[..payload.len() - cut]), None);
            prop_assert_eq!(parse(&payload), Some(runs));
        }

        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for run in parse(&bytes).into_iter().flatten() {
                prop_assert!(run.bytes > 0 && run.bytes.is_multiple_of(WORD_BYTES));
            }
        }
    }

    #[test]
    fn nothing_and_too_much_are_refused() {
        let run = Run { at: 8, bytes: 8 };
        assert_eq!(parse(&[]), None);
        assert!(parse(&encode(&[run; MOST_RUNS])).is_some());
        assert_eq!(parse(&encode(&[run; MOST_RUNS + 1])), None);
        assert_eq!(parse(&encode(&[run, Run { at: 8, bytes: 0 }])), None);
        assert_eq!(parse(&encode(&[Run { at: 8, bytes: 12 }])), None);
    }

    #[test]
    fn faults_name_other_words_or_fewer() {
        let runs = [Run { at: 0, bytes: 16 }, Run { at: 64, bytes: 8 }];
        assert_eq!(altered(&runs, Faults::default()), runs);
        let flipped = altered(&runs, Faults { flip_byte: true, ..Faults::default() });
        assert_eq!(flipped, [Run { at: 8, bytes: 16 }, runs[1]]);
        let truncated = altered(&runs, Faults { truncate_push: true, ..Faults::default() });
        assert_eq!(truncated, [runs[0]]);
    }
}
