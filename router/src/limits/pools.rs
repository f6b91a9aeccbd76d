//! Pools by prompt length: classes of requests, each with a share of the slots and of the service, so that long
//! documents cannot take everything from short chats. Pure; read from `--pools`.
use std::str::FromStr;

/// Pools at most.
pub const MAX_POOLS: usize = 8;
/// A share at most.
const MAX_SHARE: u32 = 1000;

/// One class of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// For people.
    pub name: String,
    /// Tokens of the shortest and of the longest prompt in it.
    pub from: u32,
    /// See `from`.
    pub to: u32,
    /// Its part of the slots and of the service, against the other pools' shares.
    pub share: u32,
}

/// Pools that together hold every prompt once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pools(Vec<Pool>);

/// What is wrong with a list of pools.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WrongPools(String);

impl Default for Pools {
    /// One for all.
    fn default() -> Self {
        Self(vec![Pool { name: "all".to_owned(), from: 0, to: u32::MAX, share: 1 }])
    }
}

impl Pools {
    /// By prompt length.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Pool> {
        self.0.iter()
    }

    /// The number of the pool for a prompt.
    pub fn of(&self, prompt_tokens: u32) -> usize {
        self.0.iter().position(|pool| prompt_tokens <= pool.to).unwrap_or(0)
    }

    /// Slots of each pool: its share of `slots`, at least one.
    pub fn slots(&self, slots: usize) -> Vec<usize> {
        let all: usize = self.0.iter().map(|pool| pool.share as usize).sum();
        self.0.iter().map(|pool| (slots * pool.share as usize).div_ceil(all.max(1)).max(1)).collect()
    }
}

impl FromStr for Pools {
    type Err = WrongPools;

    /// `name=from-to[:share],…`; the last one may leave `to` out.
    fn from_str(text: &str) -> Result<Self, WrongPools> {
        let mut pools = text.split(',').map(pool).collect::<Result<Vec<Pool>, _>>()?;
        pools.sort_by_key(|pool| pool.from);
        if pools.len() > MAX_POOLS {
            return Err(WrongPools(format!("{} pools; {MAX_POOLS} are possible", pools.len())));
        }
        let mut next = Some(0);
        for pool in &pools {
            if next != Some(pool.from) {
                let next = next.map_or("nothing".to_owned(), |next| next.to_string());
                let why = format!(
                    "pool {:?} begins at {}, but {next} is next: every length is in one pool",
                    pool.name, pool.from
                );
                return Err(WrongPools(why));
            }
            next = pool.to.checked_add(1);
        }
        match next {
            None => Ok(Self(pools)),
            Some(next) => {
                Err(WrongPools(format!("no pool for prompts of {next} tokens and more: end with `name={next}-`")))
            }
        }
    }
}

fn pool(text: &str) -> Result<Pool, WrongPools> {
    let wrong = || WrongPools(format!("{text:?} is not `name=from-to` or `name=from-to:share`"));
    let (name, rest) = text.trim().split_once('=').ok_or_else(wrong)?;
    let (range, share) = rest.split_once(':').unwrap_or((rest, "1"));
    let (from, to) = range.split_once('-').ok_or_else(wrong)?;
    let from: u32 = from.parse().map_err(|_| wrong())?;
    let to = if to.is_empty() { u32::MAX } else { to.parse().map_err(|_| wrong())? };
    let share: u32 = share.parse().map_err(|_| wrong())?;
    if name.is_empty() || from > to || share == 0 || share > MAX_SHARE {
        return Err(WrongPools(format!(
            "{text:?}: it needs a name, a range that is not empty, a share of 1 to {MAX_SHARE}"
        )));
    }
    Ok(Pool { name: name.to_owned(), from, to, share })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_find_their_pool_and_shares_their_slots() {
        let pools: Pools = "document=2049-:1,interactive=0-2048:3".parse().unwrap();
        assert_eq!([0, 2048, 2049, u32::MAX].map(|tokens| pools.of(tokens)), [0, 0, 1, 1]);
        assert_eq!(pools.slots(8), [6, 2]);
        assert_eq!(pools.slots(1), [1, 1]);
        assert_eq!(Pools::default().slots(8), [8]);
    }

    #[test]
    fn what_does_not_cover_every_length_once_is_refused() {
        for wrong in [
            "",
            "a",
            "a=0",
            "a=1-",
            "a=0-9",
            "a=0-9,b=9-",
            "a=0-9,b=11-",
            "a=0-,b=5-",
            "=0-",
            "a=0-:0",
            "a=5-1",
            "a=x-",
        ] {
            let error = wrong.parse::<Pools>().expect_err(wrong);
            assert!(!error.to_string().is_empty());
        }
        assert!((0..9).map(|n| format!("p{n}={n}-{n}")).collect::<Vec<_>>().join(",").parse::<Pools>().is_err());
    }
}
