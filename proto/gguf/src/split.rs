//! Models in several files, as `gguf-split` of llama.cpp cuts them: `NAME-00001-of-00003.gguf` has all keys, the others
//! their number and tensors. The first one's name is what users give.
use crate::{GgufError, Header};

/// Parts of a model at most: what the names' five digits hold is more than anybody has.
const MAX_PARTS: u64 = 1000;

/// Which part of a model a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// From 0.
    pub number: u64,
    /// Of all parts.
    pub count: u64,
    /// In all parts together.
    pub tensors: u64,
}

impl Header {
    /// Which part this is; `None` for a model in one file.
    ///
    /// # Errors
    /// `Damaged` for numbers that no part has.
    pub fn split(&self) -> Result<Option<Split>, GgufError> {
        let number = |key: &str| self.value(key).map(|value| value.unsigned());
        match (number("split.no"), number("split.count"), number("split.tensors.count")) {
            (_, None | Some(Some(0 | 1)), _) => Ok(None),
            (Some(Some(number)), Some(Some(count)), Some(Some(tensors))) if number < count && count <= MAX_PARTS => {
                Ok(Some(Split { number, count, tensors }))
            }
            other => Err(GgufError::Damaged(format!("split.no, split.count and split.tensors.count are {other:?}"))),
        }
    }
}

impl Split {
    /// Names of the parts after the first one, whose name is given.
    ///
    /// # Errors
    /// `Damaged` when this is not the first part, or not called so.
    pub fn names_of_the_others(&self, first: &str) -> Result<Vec<String>, GgufError> {
        let Self { number, count, .. } = *self;
        let base = base(first, number, count);
        match (base, number) {
            (Some(base), 0) => Ok((1..count).map(|number| name(base, number, count)).collect()),
            (Some(base), _) => Err(GgufError::Damaged(format!(
                "is part {} of {count} of a model: give the first one, {}",
                number + 1,
                name(base, 0, count)
            ))),
            (None, _) => Err(GgufError::Damaged(format!(
                "is part {} of {count} of a model; the parts are found by their names, and this one should end in {}",
                number + 1,
                name("", number, count)
            ))),
        }
    }

    /// Whether `header` is the part `number` of the model that this is the first part of.
    ///
    /// # Errors
    /// `Damaged` with the reason, when it is not.
    pub fn check_part(&self, first: &Header, number: u64, header: &Header) -> Result<(), GgufError> {
        let foreign = |why: String| GgufError::Damaged(format!("is not part {} of {}: {why}", number + 1, self.count));
        let Some(other) = header.split()? else { return Err(foreign("it is a model of its own".into())) };
        if other != (Split { number, ..*self }) {
            let Split { number, count, tensors } = other;
            return Err(foreign(format!("it is part {} of {count} of a model of {tensors} tensors", number + 1)));
        }
        for key in ["general.architecture", "general.name"] {
            if let (Some(ours), Some(theirs)) = (first.value(key), header.value(key))
                && ours != theirs
            {
                return Err(foreign(format!("{key} is {theirs:?}, and {ours:?} in the first part")));
            }
        }
        Ok(())
    }

    /// Whether all parts together have what the first one says.
    ///
    /// # Errors
    /// `Damaged` with both numbers.
    pub fn check_tensors(&self, found: usize) -> Result<(), GgufError> {
        if found as u64 == self.tensors {
            return Ok(());
        }
        Err(GgufError::Damaged(format!("the {} parts have {found} tensors, not {}", self.count, self.tensors)))
    }
}

/// A file's name without its ending and without the number of its part: what the model is called.
pub fn model_name(stem: &str) -> &str {
    let numbered = |stem: &str| -> Option<usize> {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (base, number) = rest.rsplit_once('-')?;
        let five_digits = |part: &str| part.len() == 5 && part.bytes().all(|byte| byte.is_ascii_digit());
        (five_digits(count) && five_digits(number) && !base.is_empty()).then_some(base.len())
    };
    numbered(stem).map_or(stem, |base| &stem[..base])
}

fn base(name_of_part: &str, number: u64, count: u64) -> Option<&str> {
    name_of_part.strip_suffix(&name("", number, count))
}

fn name(base: &str, number: u64, count: u64) -> String {
    format!("{base}-{:05}-of-{count:05}.gguf", number + 1)
}
