//! What a step uploads: one block of pinned memory, one copy. Where its arrays lie follows from how many of each there
//! are, so that a step of few rows uploads little, and so that the steps of one bucket all have the same places.
use crate::kernels::attention::Tile;
use crate::kernels::choose::Choice;
use crate::pinned::Pinned;
use crate::plan::Span;

/// Arrays begin at multiples of it.
const ALIGN: usize = 16;

/// The numbers of a step, and where its inputs lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Rows that are computed.
    pub rows: usize,
    /// Tiles of decode rows, one row each.
    pub decode_tiles: usize,
    /// Tiles of prompts.
    pub prompt_tiles: usize,
    pub choices: usize,
    /// Rows whose logits are wanted: those in `logits_of`; `None` for all rows.
    pub gathered: Option<usize>,
    pub at: Places,
    /// Of all of it.
    pub bytes: usize,
}

/// The arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    /// [`Choice`].
    pub choices: Span,
    /// [`Tile`].
    pub decode_tiles: Span,
    /// [`Tile`].
    pub prompt_tiles: Span,
    /// u32 of each row.
    pub tokens: Span,
    /// u32 of each row: which outcome of the step before is its token, see `kernels::rows::Last`.
    pub from: Span,
    /// u32 of each row.
    pub positions: Span,
    /// u32, u32 of each row: block, and token in it.
    pub places: Span,
    /// u32: rows whose logits are wanted.
    pub logits_of: Span,
}

impl Frame {
    /// Of a step with single launches.
    pub fn new(rows: usize, decode_tiles: usize, prompt_tiles: usize, choices: usize, gathered: Option<usize>) -> Self {
        let mut end = 0usize;
        let mut span = |count: usize, size: usize| {
            let at = end.next_multiple_of(ALIGN);
            end = at + count * size;
            Span { at, bytes: count * size }
        };
        let at = Places {
            choices: span(choices, size_of::<Choice>()),
            decode_tiles: span(decode_tiles, size_of::<Tile>()),
            prompt_tiles: span(prompt_tiles, size_of::<Tile>()),
            tokens: span(rows, 4),
            from: span(rows, 4),
            positions: span(rows, 4),
            places: span(rows, 8),
            logits_of: span(gathered.unwrap_or(0), 4),
        };
        Self { rows, decode_tiles, prompt_tiles, choices, gathered, at, bytes: end }
    }

    /// Of `bucket` decode rows, each of which chooses.
    pub fn bucket(bucket: usize) -> Self {
        Self::new(bucket, bucket, 0, bucket, None)
    }

    /// Bytes of the largest frame of up to so many rows.
    pub fn most_bytes(rows: usize) -> usize {
        Self::new(rows, rows, rows, rows, Some(rows)).bytes
    }
}

/// A step's inputs on the host.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    pub choices: Vec<Choice>,
    pub decode_tiles: Vec<Tile>,
    pub prompt_tiles: Vec<Tile>,
    pub tokens: Vec<u32>,
    pub from: Vec<u32>,
    pub positions: Vec<u32>,
    pub places: Vec<u32>,
    pub logits_of: Vec<u32>,
}

impl Inputs {
    pub fn clear(&mut self) {
        let Self { choices, decode_tiles, prompt_tiles, tokens, from, positions, places, logits_of } = self;
        choices.clear();
        decode_tiles.clear();
        prompt_tiles.clear();
        tokens.clear();
        from.clear();
        positions.clear();
        places.clear();
        logits_of.clear();
    }

    /// The frame that they fill.
    pub fn frame(&self) -> Frame {
        let gathered = Some(self.logits_of.len());
        Frame::new(self.tokens.len(), self.decode_tiles.len(), self.prompt_tiles.len(), self.choices.len(), gathered)
    }

    /// Writes them where `frame` says.
    ///
    /// # Safety
    /// No copy from or to `to` is under way.
    ///
    /// # Panics
    /// If the frame is another one's.
    pub unsafe fn write(&self, frame: &Frame, to: &mut Pinned) {
        let Places { choices, decode_tiles, prompt_tiles, tokens, from, positions, places, logits_of } = frame.at;
        // SAFETY: the caller's promise; the same of those below.
        unsafe { to.slice_mut(choices.at, frame.choices) }.copy_from_slice(&self.choices);
        // SAFETY: as above.
        unsafe { to.slice_mut(decode_tiles.at, frame.decode_tiles) }.copy_from_slice(&self.decode_tiles);
        // SAFETY: as above.
        unsafe { to.slice_mut(prompt_tiles.at, frame.prompt_tiles) }.copy_from_slice(&self.prompt_tiles);
        let words = [(tokens, &self.tokens), (from, &self.from), (positions, &self.positions), (places, &self.places)];
        let gathered = frame.gathered.map(|_| (logits_of, &self.logits_of));
        for (span, words) in words.into_iter().chain(gathered) {
            // SAFETY: as above.
            unsafe { to.slice_mut(span.at, span.bytes / 4) }.copy_from_slice(words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_follow_each_other_and_fit_the_largest_frame() {
        for (rows, decode, prompt, choices, gathered) in
            [(1, 1, 0, 1, None), (7, 3, 2, 4, Some(3)), (64, 0, 9, 1, Some(0))]
        {
            let frame = Frame::new(rows, decode, prompt, choices, gathered);
            let at = frame.at;
            let spans = [
                at.choices,
                at.decode_tiles,
                at.prompt_tiles,
                at.tokens,
                at.from,
                at.positions,
                at.places,
                at.logits_of,
            ];
            for pair in spans.windows(2) {
                assert!(pair[0].at + pair[0].bytes <= pair[1].at && pair[1].at.is_multiple_of(ALIGN));
            }
            assert_eq!(at.logits_of.at + at.logits_of.bytes, frame.bytes);
            assert!(frame.bytes <= Frame::most_bytes(rows));
        }
    }
}
