//! Reads lists of token ids from JSON without keeping more of them than a context holds.
use std::fmt::Formatter;

use serde::Deserializer;
use serde::de::{DeserializeSeed, SeqAccess, Visitor};

/// The token ids of one prompt or text. Those beyond a limit are counted and not kept: one body holds millions of them.
#[derive(Debug, PartialEq)]
pub(super) struct Ids {
    pub kept: Vec<u32>,
    pub given: usize,
}

/// Reads [`Ids`] of which at most so many are kept.
#[derive(Clone, Copy)]
pub(super) struct AtMostIds {
    pub most: usize,
}

impl<'de> DeserializeSeed<'de> for AtMostIds {
    type Value = Ids;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Ids, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for AtMostIds {
    type Value = Ids;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str("token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Ids, A::Error> {
        let mut ids = Ids { kept: Vec::new(), given: 0 };
        while let Some(id) = items.next_element()? {
            ids.given += 1;
            if ids.given <= self.most {
                ids.kept.push(id);
            }
        }
        Ok(ids)
    }
}
