//! What nodes compute on. Nodes of one machine may run on the same cores, or lend each other theirs while they have
//! nothing to do: then a prompt on a prefill node slows the streams of the decode node beside it, and these slow the
//! prompt. Pure. Sets of cores that overlap in part count as apart, and limits of processor time (a container's quota)
//! are not seen.
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

    /// By how much longer this node takes while the other one computes as well, as a share of the time that it takes
    /// alone: 0 where they have cores enough. The system is taken to share the cores out evenly. Nodes that lend each
    /// other cores report their own ones, and times of steps that had the others' as well: `p` cores of `p + d` are
    /// left, so that a step takes `d / p` longer.
    pub fn contention(&self, other: &Self) -> f64 {
        if self.id == 0 || self.id != other.id {
            return 0.0;
        }
        let busy = f64::from(self.threads) + f64::from(other.threads);
        (busy / f64::from(self.cores) - 1.0).clamp(0.0, MOST)
    }

    /// By how much work of this node delays the other one that computes as well, as a share of the time that the work
    /// takes alone. It runs longer by [`Processor::contention`], and meanwhile the other one is slower by its own.
    pub fn delays(&self, other: &Self) -> f64 {
        let slower = other.contention(self);
        (1.0 + self.contention(other)) * slower / (1.0 + slower)
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
        assert_eq!(of(7, 2, 2).contention(&of(7, 2, 2)), 1.0);
        assert_eq!(of(7, 4, 4).contention(&of(7, 4, 2)), 0.5);
        assert_eq!(of(7, 4, 2).contention(&of(7, 4, 2)), 0.0);
        assert_eq!(of(7, 64, 2).contention(&of(7, 64, 2)), 0.0);
        assert_eq!(of(7, 2, 2).contention(&of(8, 2, 2)), 0.0);
        // Lent cores: 4 of 16 are left, or 12.
        assert_eq!(of(7, 4, 4).contention(&of(7, 12, 12)), 3.0);
        assert!((of(7, 12, 12).contention(&of(7, 4, 4)) - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(of(7, 1, u32::MAX).contention(&of(7, 1, u32::MAX)), MOST);
    }

    #[test]
    fn what_one_takes_the_other_has_not() {
        for (one, other, delays) in [((2, 2), (2, 2), 1.0), ((4, 4), (4, 2), 0.5), ((4, 4), (12, 12), 1.0)] {
            let (one, other) = (of(7, one.0, one.1), of(7, other.0, other.1));
            assert!((one.delays(&other) - delays).abs() < 1e-9 && (other.delays(&one) - delays).abs() < 1e-9);
        }
        assert_eq!(of(7, 4, 2).delays(&of(7, 4, 2)), 0.0);
        assert_eq!(of(7, 2, 2).delays(&of(8, 2, 2)), 0.0);
    }

    #[test]
    fn who_says_nothing_shares_nothing() {
        assert_eq!(Processor::reported(None).contention(&Processor::reported(None)), 0.0);
        assert_eq!(of(0, 2, 2).contention(&of(0, 2, 2)), 0.0);
        assert_eq!(of(7, 0, 2).contention(&of(7, 0, 2)), 0.0);
    }
}
