//! The nodes of one running request, and what its course tells the table of them. What is booked on them is given back
//! when this is dropped.
use std::sync::Arc;
use std::time::Instant;

use tandem_proto::v1;
use tandem_telemetry::clock;
use tokio::sync::Notify;

use super::Node;
use super::booking::BookingId;
use super::entry::NodeEntry;
use super::table_lock::TableLock;
use crate::select::ways::{Apart, Fallback, PairWay};
use crate::select::{Candidate, Plan, Role};

/// The nodes of one request, with the work booked on them until this is dropped.
#[derive(Debug)]
pub struct Route {
    /// Computes the prompt; `None` in a local plan, where decode does.
    pub prefill: Option<Arc<Node>>,
    /// Generates.
    pub decode: Arc<Node>,
    /// All candidates, the chosen one first.
    pub candidates: Vec<Candidate>,
    /// Pairs that are none, because KV does not get from the one to the other.
    pub apart: Arc<[Apart]>,
    pub(super) prefill_booking: Option<BookingId>,
    pub(super) decode_booking: BookingId,
    pub(super) table: Arc<TableLock>,
    pub(super) freed: Arc<Notify>,
}

impl Route {
    /// The kind of plan.
    pub fn plan(&self) -> Plan {
        if self.prefill.is_some() { Plan::Pair } else { Plan::Local }
    }

    /// Table keys of prefill and decode node.
    pub fn sessions(&self) -> (Option<u64>, u64) {
        (self.prefill.as_ref().map(|prefill| prefill.session), self.decode.session)
    }

    /// Whether nothing but load spoke against these nodes.
    pub fn is_sound(&self) -> bool {
        self.candidates.first().is_some_and(Candidate::is_sound)
    }

    /// The node of `role` did its part.
    pub fn succeeded(&self, role: Role) {
        self.table.with(|table| table.each([self.booking(role)], NodeEntry::succeeded));
    }

    /// The node of `role` failed.
    pub fn failed(&self, role: Role, now: Instant) {
        self.table.with(|table| table.failed(self.booking(role), now));
    }

    /// The first token is here: the prompt is computed. Only the first call counts.
    pub fn computed(&self, now: Instant) {
        self.table.with(|table| table.each(self.bookings(), |entry, number| entry.computed(number, now)));
        self.freed.notify_one();
    }

    /// The prefill node has nothing more to compute for this request: it can take another one.
    pub fn prefilled(&self) {
        self.release(self.prefill_booking);
    }

    /// Decode has let go of the request, which goes on with prefill alone: it can take another one.
    pub fn decode_lost(&self) {
        self.release(Some(self.decode_booking));
    }

    fn release(&self, booking: Option<BookingId>) {
        self.table.with(|table| table.each(booking, |entry, number| entry.bookings.release(number)));
        self.freed.notify_one();
    }

    /// Decode has verified the prefill node's KV.
    pub fn handed_off(&self, kv: &v1::Verified) {
        if let ((Some(prefill), decode), Some(way)) = (self.sessions(), self.way()) {
            self.table.with(|table| table.handed_off((prefill, decode), way.domain, kv));
        }
    }

    /// The prefill node's KV did not get to decode. Where the two have another way, they take that for a time.
    pub fn handoff_failed(&self, why: &str, now: Instant) {
        let ((Some(prefill), decode), Some(way)) = (self.sessions(), self.way()) else { return };
        let fallback = self.table.with(|table| table.handoff_failed((prefill, decode), way.domain, now));
        if let Some(Fallback { from, to, cool_down }) = fallback {
            let (prefill, decode) = (&self.node(Role::Prefill).info.node_id, &self.decode.info.node_id);
            tracing::warn!(prefill, decode, "{from} failed, KV goes by {to} for {cool_down:?}: {why}");
        }
    }

    /// How the KV travels; `None` in a local plan.
    pub fn way(&self) -> Option<&PairWay> {
        self.candidates.first()?.way.as_ref()
    }

    /// The first token is here: so many tokens of the prompt were computed for it.
    pub fn prompt_computed(&self, tokens: u32) {
        let by = &self.node(Role::Prefill).work;
        by.computed(tokens);
        by.generated();
    }

    /// The node of `role`. In a local plan decode has both.
    pub fn node(&self, role: Role) -> &Arc<Node> {
        match (role, &self.prefill) {
            (Role::Prefill, Some(prefill)) => prefill,
            _ => &self.decode,
        }
    }

    fn booking(&self, role: Role) -> BookingId {
        match (role, self.prefill_booking) {
            (Role::Prefill, Some(prefill)) => prefill,
            _ => self.decode_booking,
        }
    }

    fn bookings(&self) -> impl Iterator<Item = BookingId> {
        self.prefill_booking.into_iter().chain([self.decode_booking])
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        let now = clock::now();
        self.table.with(|table| table.each(self.bookings(), |entry, number| entry.end(number, now)));
        self.freed.notify_one();
    }
}
