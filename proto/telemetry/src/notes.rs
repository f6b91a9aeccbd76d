//! What was logged of a request, on its way to the request's span. Kept by span id from [`Notes::of`] until it is taken
//! or the handle is dropped, within bounds.
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tandem_proto::TraceContext;

use crate::phase::Value;

/// Of one request; the first ones are kept.
const MOST_NOTES: usize = 32;

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// What it says.
    pub message: String,
    /// "INFO", "WARN", …
    pub level: &'static str,
    /// When.
    pub at: Instant,
    /// What else it says.
    pub fields: Vec<(&'static str, Value)>,
}

/// Those of one span. There are as many as requests run.
#[derive(Debug)]
pub struct Notes {
    span_id: [u8; 8],
}

static KEPT: LazyLock<Mutex<HashMap<[u8; 8], Vec<Note>>>> = LazyLock::new(Mutex::default);

fn kept() -> MutexGuard<'static, HashMap<[u8; 8], Vec<Note>>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Notes {
    /// From now on lines of this span are kept.
    pub fn of(context: TraceContext) -> Self {
        kept().insert(context.span_id, Vec::new());
        Self { span_id: context.span_id }
    }

    /// Those so far.
    pub fn take(&self) -> Vec<Note> {
        kept().get_mut(&self.span_id).map(std::mem::take).unwrap_or_default()
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        kept().remove(&self.span_id);
    }
}

/// Adds a line, where somebody keeps those of its span.
pub(crate) fn add(span_id: [u8; 8], note: impl FnOnce() -> Note) {
    if let Some(notes) = kept().get_mut(&span_id).filter(|notes| notes.len() < MOST_NOTES) {
        notes.push(note());
    }
}
