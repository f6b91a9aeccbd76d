//! A step's logits. Their memory is kept from step to step: a batch of vocabularies is megabytes, and as many fresh
//! pages in every step cost a tenth of it.

use std::ops::Range;

/// Logits of the items that want them.
#[derive(Debug, Default)]
pub struct Logits {
    /// Rows of `width`.
    values: Vec<f32>,
    width: usize,
    /// Of each item.
    rows: Vec<Range<usize>>,
}

impl Logits {
    /// Makes room for a step: one entry an item, how many rows of logits it wants. Returns all rows, one after another,
    /// `width` long, holding anything.
    pub fn lay_out(&mut self, width: usize, wanted: impl IntoIterator<Item = usize>) -> &mut [f32] {
        let mut rows = 0;
        self.rows.clear();
        self.rows.extend(wanted.into_iter().map(|wants| {
            rows += wants;
            rows - wants..rows
        }));
        self.width = width;
        self.values.resize(rows * width, 0.0);
        &mut self.values
    }

    /// All rows, one after another.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Items of the step.
    pub fn items(&self) -> usize {
        self.rows.len()
    }

    /// The first of an item; `None` if it wanted none, or there is no such item.
    pub fn of(&self, item: usize) -> Option<&[f32]> {
        self.row(item, 0)
    }

    /// The row with that index of an item.
    pub fn row(&self, item: usize, index: usize) -> Option<&[f32]> {
        let row = self.rows.get(item)?.clone().nth(index)?;
        self.values.get(row * self.width..(row + 1) * self.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_belong_to_the_items_that_want_them() {
        let mut logits = Logits::default();
        logits.lay_out(2, [0, 1, 0, 2]).copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!((logits.items(), logits.of(0), logits.of(1)), (4, None, Some(&[1.0, 2.0][..])));
        assert_eq!((logits.of(3), logits.of(4)), (Some(&[3.0, 4.0][..]), None));
        assert_eq!((logits.row(3, 1), logits.row(3, 2)), (Some(&[5.0, 6.0][..]), None));
        assert_eq!(logits.lay_out(3, [1]).len(), 3);
        assert_eq!((logits.items(), logits.of(1)), (1, None));
    }
}
