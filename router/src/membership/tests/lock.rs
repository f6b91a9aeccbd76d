//! What happens under the table's lock: neither is anything logged there, nor are requests woken.
use std::sync::Mutex;
use std::task::{Context, Wake};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Metadata, Subscriber, subscriber};

use super::*;

/// What was logged or woken, and whether the lock was held then.
#[derive(Default)]
struct Seen(Mutex<Vec<(String, bool)>>);

impl Seen {
    fn add(&self, what: String, table: &TableLock) {
        self.0.lock().unwrap().push((what, table.is_held()));
    }
}

struct Log(Arc<Seen>, Arc<TableLock>);

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message::default();
        event.record(&mut message);
        self.0.add(message.0, &self.1);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

/// A request that waits for the death of its node.
struct Request(Arc<Seen>, Arc<TableLock>);

impl Wake for Request {
    fn wake(self: Arc<Self>) {
        self.0.add("woken".to_owned(), &self.1);
    }
}

#[test]
fn nothing_is_logged_and_no_request_is_woken_under_the_lock() {
    let (membership, start) = (membership(), Instant::now());
    let (seen, table) = (Arc::new(Seen::default()), Arc::clone(&membership.table));
    let take = || {
        let taken = std::mem::take(&mut *seen.0.lock().unwrap());
        assert!(taken.iter().all(|(_, held)| !held), "under the lock: {taken:?}");
        taken.into_iter().map(|(what, _)| what).collect::<Vec<_>>()
    };
    let waker = Arc::new(Request(Arc::clone(&seen), Arc::clone(&table))).into();
    let join = |id: &str, role, life: u64| {
        let node = membership.register(register(id, role, life), start).unwrap();
        let mut died = Box::pin({
            let node = Arc::clone(&node);
            async move { node.died().await }
        });
        assert!(died.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        (node.session, died)
    };
    subscriber::with_default(Log(Arc::clone(&seen), table), || {
        let _p = join("p", v1::Role::Prefill, 1);
        let alone = v1::Register { compatibility_digest: 6, ..register("alone", v1::Role::Decode, 9) };
        let alone = membership.register(alone, start).unwrap();
        assert!(take().concat().starts_with("no node of the other role can share a request with it: "));
        membership.leave(alone.session, "it left");
        assert_eq!(take(), ["node gone"]);
        let (d, _died) = join("d", v1::Role::Decode, 1);
        assert_eq!(take(), [""; 0]);
        for _ in 0..16 {
            route(&membership, 10, 10).unwrap().failed(Role::Decode, start);
        }
        assert_eq!(take(), ["node failed requests in a row: it is ranked last for a time"]);
        membership.leave(d, "it left");
        assert_eq!(take(), ["node gone", "woken"]);
        let (d, died) = join("d", v1::Role::Decode, 2);
        drop(died);
        membership.draining(d, start);
        membership.leave(d, "it left");
        assert_eq!(take(), ["node drained"]);
        membership.expire(start);
        let later = start + LEASE * 2;
        let _ = membership.route(&ask(10, 10), &Wish::default(), later);
        let stood_still = "this router stood still: leases of its nodes are longer by that, or over";
        assert_eq!(take(), [stood_still, "node gone", "woken"]);
        let _last = join("p", v1::Role::Prefill, 2);
        take();
        membership.close();
        assert_eq!(take(), ["node gone", "woken"]);
    });
}
