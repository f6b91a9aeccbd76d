//! What nodes compute on. Nodes of one machine may run on the same cores: then a prompt on a prefill node slows the
//! streams of the decode node beside it, and these slow the prompt. Pure. Sets of cores that overlap in part count as
//! apart, and limits of processor time (a container's quota) are not seen.
use tandem_proto::v1;

/// Nothing takes longer by more than so many times because of a neighbour; beyond that somebody has miscounted.
const MOST: f64 = 3.0;

/// The cores that a node may use, and how many it keeps busy while it computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Processor {
    /// Nodes with the same number share it; 0: not known, or nobody else's.
    id: u64,
    cores: u32,
    threads: u32,
}

impl Processor {
    /// As a node says at its registration.
    pub fn reported(processor: Option<&v1::Processor>) -> Self {
        match processor {
            Some(&v1::Processor { id, cores: cores @ 1.., threads }) => Self { id, cores, threads },
            _ => Self::default(),
        }
    }

    /// By how much longer two nodes take while both compute, as a share of the time that they take alone: 0 where they
    /// have cores enough. The system is taken to share the cores out evenly.
    pub fn crowding(&self, other: &Self) -> f64 {
        if self.id == 0 || self.id != other.id {
            return 0.0;
        }
        let busy = f64::from(self.threads) + f64::from(other.threads);
        (busy / f64::from(self.cores) - 1.0).clamp(0.0, MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(id: u64, cores: u32, threads: u32) -> Processor {
        Processor::reported(Some(&v1::Processor { id, cores, threads }))
    }

    #[test]
    fn crowded_is_who_has_fewer_cores_than_threads() {
        assert_eq!(of(7, 2, 2).crowding(&of(7, 2, 2)), 1.0);
        assert_eq!(of(7, 4, 4).crowding(&of(7, 4, 2)), 0.5);
        assert_eq!(of(7, 4, 2).crowding(&of(7, 4, 2)), 0.0);
        assert_eq!(of(7, 64, 2).crowding(&of(7, 64, 2)), 0.0);
        assert_eq!(of(7, 2, 2).crowding(&of(8, 2, 2)), 0.0);
        assert_eq!(of(7, 1, u32::MAX).crowding(&of(7, 1, u32::MAX)), MOST);
    }

    #[test]
    fn who_says_nothing_shares_nothing() {
        assert_eq!(Processor::reported(None).crowding(&Processor::reported(None)), 0.0);
        assert_eq!(of(0, 2, 2).crowding(&of(0, 2, 2)), 0.0);
        assert_eq!(of(7, 0, 2).crowding(&of(7, 0, 2)), 0.0);
    }
}
