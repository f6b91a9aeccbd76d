//! How much memory the KV arena gets, as people say it, turned into blocks once the size of a block is known. Pure.
use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail};

/// Units of `--kv-memory`, in bytes.
const UNITS: [(&str, u64); 8] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

/// The size of the KV arena.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvMemory {
    /// `--kv-blocks`.
    Blocks(usize),
    /// `--kv-memory 2GiB`.
    Bytes(u64),
    /// `--kv-memory 25%`: of the memory that the model leaves, from above 0 to 1.
    Share(f64),
}

impl KvMemory {
    /// Blocks of the arena. `left_bytes` is what weights and workspace leave of the memory that this process may use,
    /// where that is known.
    ///
    /// # Errors
    /// Less than one block, more than is left, or a share of what is not known.
    pub fn blocks(self, block_bytes: usize, left_bytes: Option<u64>) -> anyhow::Result<usize> {
        let bytes = match self {
            Self::Blocks(blocks) => return Ok(blocks),
            Self::Bytes(bytes) => bytes,
            Self::Share(share) => {
                let left = left_bytes
                    .with_context(|| format!("--kv-memory {self}: cannot tell how much memory there is; give bytes"))?;
                (left as f64 * share) as u64
            }
        };
        if let Some(left) = left_bytes.filter(|&left| bytes > left) {
            bail!("--kv-memory {self} is more than the {} that the model leaves", Self::Bytes(left));
        }
        let blocks = usize::try_from(bytes / block_bytes.max(1) as u64).unwrap_or(usize::MAX);
        if blocks == 0 {
            bail!("--kv-memory {self} is {bytes} bytes, less than one KV block of {block_bytes} bytes");
        }
        Ok(blocks)
    }
}

impl FromStr for KvMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let how = || format!("{text:?} is not a size with a unit, such as 2GiB or 512MiB, or a share such as 25%");
        let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(how)?;
        let (number, unit) = text.split_at(unit_at);
        let number: f64 = number.parse().map_err(|_| how())?;
        let unit = unit.trim().to_ascii_lowercase();
        if unit == "%" {
            let share = number / 100.0;
            return if share > 0.0 && share <= 1.0 {
                Ok(Self::Share(share))
            } else {
                Err(format!("{text} is not a share between 0 and 100 %"))
            };
        }
        let (_, bytes) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(how)?;
        match (number * *bytes as f64) as u64 {
            0 => Err(format!("{text} is no memory at all")),
            bytes => Ok(Self::Bytes(bytes)),
        }
    }
}

impl fmt::Display for KvMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Blocks(blocks) => write!(f, "{blocks} blocks"),
            Self::Bytes(bytes) if bytes >= 1 << 30 => write!(f, "{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
            Self::Bytes(bytes) if bytes >= 1 << 20 => write!(f, "{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
            Self::Bytes(bytes) => write!(f, "{bytes} bytes"),
            Self::Share(share) => write!(f, "{}%", share * 100.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn sizes_and_shares_become_blocks() {
        let blocks = |text: &str| text.parse::<KvMemory>().unwrap().blocks(368_640, Some(24 * GIB)).unwrap();
        assert_eq!(blocks("2GiB"), 5825);
        assert_eq!([blocks("2gb"), blocks("2000 MB"), blocks("1.5GiB")], [5425, 5425, 4369]);
        assert_eq!([blocks("25%"), blocks("100%")], [17_476, 69_905]);
        assert_eq!(KvMemory::Blocks(7).blocks(1, None).unwrap(), 7);
    }

    #[test]
    fn what_cannot_be_is_said_clearly() {
        for (text, word) in [
            ("2", "unit"),
            ("", "unit"),
            ("GiB", "unit"),
            ("2 potatoes", "unit"),
            ("-2GiB", "unit"),
            ("1.2.3GiB", "unit"),
            ("0GiB", "no memory"),
            ("0%", "between"),
            ("101%", "between"),
        ] {
            let error = text.parse::<KvMemory>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        for (memory, machine, word) in [
            (KvMemory::Bytes(1000), Some(GIB), "1000 bytes, less than one KV block of 368640 bytes"),
            (KvMemory::Bytes(2 * GIB), Some(GIB), "2.0 GiB is more than the 1.0 GiB that the model leaves"),
            (KvMemory::Share(0.5), None, "give bytes"),
        ] {
            let error = memory.blocks(368_640, machine).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
