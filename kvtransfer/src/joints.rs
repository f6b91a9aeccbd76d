//! Where the receiver's blocks of a hand-off lie side by side. A ticket says it as run lengths, without any address, so
//! that a sender can cut its frames where the receiver's memory has a joint: on a fabric only a frame that is
//! contiguous at both ends moves without a copy. Pure.
use crate::error::{TransferError, TransferErrorKind};

/// More runs than a ticket may have: a seal of so many blocks would be too long.
const MAX_RUNS: usize = 128 << 10;

/// The run lengths of granted blocks, in the order of their indices.
pub(crate) fn of(blocks: &[u32]) -> Vec<u32> {
    blocks.chunk_by(|block, next| block.checked_add(1) == Some(*next)).map(|run| run.len() as u32).collect()
}

/// The receiver's runs, by where they end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joints {
    /// One behind the last index of each run, ascending.
    ends: Vec<u32>,
}

impl Joints {
    /// Reads those of a ticket for `blocks`.
    ///
    /// # Errors
    /// `Io` unless they are runs of that many blocks.
    pub fn parse(lengths: &[u32], blocks: u32) -> Result<Self, TransferError> {
        let mut end = Some(0u32);
        let mut ends = Vec::with_capacity(lengths.len().min(MAX_RUNS));
        for length in lengths.iter().take(MAX_RUNS) {
            end = end.filter(|_| *length > 0).and_then(|end| end.checked_add(*length));
            ends.extend(end);
        }
        if end != Some(blocks) || ends.len() != lengths.len() {
            let message = "the ticket's joints are not those of its blocks";
            return Err(TransferError::new(TransferErrorKind::Io, message));
        }
        Ok(Self { ends })
    }

    /// How many blocks from index `first` on lie in at most `runs` runs. None behind the end.
    pub fn within(&self, first: u32, runs: usize) -> u32 {
        let run = self.ends.partition_point(|end| *end <= first);
        let last = run.saturating_add(runs).min(self.ends.len());
        self.ends[run..last].last().map_or(0, |end| end - first)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runs_are_of_neighbours_in_ascending_order() {
        assert_eq!(of(&[5, 6, 7, 9, 8, 7, 1, u32::MAX, 0]), [3, 1, 1, 1, 1, 1, 1]);
        assert_eq!(of(&[3]), [1]);
        assert!(of(&[]).is_empty());
    }

    #[test]
    fn joints_that_are_not_those_of_the_blocks_are_refused() {
        for (lengths, blocks) in [(vec![], 1), (vec![2], 3), (vec![4], 3), (vec![0, 3], 3), (vec![u32::MAX, 4], 3)] {
            assert!(Joints::parse(&lengths, blocks).is_err(), "{lengths:?}");
        }
        assert!(Joints::parse(&vec![1; MAX_RUNS + 1], MAX_RUNS as u32 + 1).is_err());
        assert!(Joints::parse(&vec![1; MAX_RUNS], MAX_RUNS as u32).is_ok());
    }

    proptest! {
        #[test]
        fn from_each_index_to_a_joint(blocks in prop::collection::vec(0u32..12, 1..40), runs in 1usize..5) {
            let joints = Joints::parse(&of(&blocks), blocks.len() as u32).expect("its own");
            for first in 0..blocks.len() {
                let count = joints.within(first as u32, runs) as usize;
                prop_assert!(of(&blocks[first..first + count]).len() <= runs);
                let whole = first + count == blocks.len();
                prop_assert!(whole || of(&blocks[first..=first + count]).len() > runs, "and not before");
            }
            prop_assert_eq!(joints.within(blocks.len() as u32, runs), 0);
        }
    }
}
