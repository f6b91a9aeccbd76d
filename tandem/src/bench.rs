//! `tandem bench`: load against a server, and what it says about it.
//!
//! - [`record`]: what a run leaves behind, the one form that the two halves share.
//! - [`stats`]: what a client saw, as numbers; [`sweep`] chooses the rates that find the knee of goodput.
//! - [`report`]: the numbers as text, JSON, CSV and a page.
#![cfg_attr(not(test), expect(dead_code, unused_imports))]

pub mod record;
pub mod report;
pub mod stats;
pub mod sweep;
