//! A write that lets the others go first. An HTTP/2 connection is a task that runs as soon as one of its streams has a
//! frame: of the tokens of sixty streams, that came together, each would be written by itself. One turn later they are
//! one write.
use std::task::{Context, Poll};

/// What stands before the writes of a connection.
#[derive(Default)]
pub(crate) struct Gathering {
    over: bool,
}

impl Gathering {
    /// Ready when the tasks that can run now have run: once before all that is written up to a flush.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.over, true) {
            return Poll::Ready(());
        }
        // A task that wakes itself goes to the end of the line, and stays there whoever else wakes it.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// What comes now is another write.
    pub fn flushed(&mut self) {
        self.over = false;
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[tokio::test]
    async fn who_can_run_runs_before_a_write_and_not_within_one() {
        let said = Arc::new(Mutex::new(Vec::new()));
        let say = |what: &'static str| said.lock().unwrap().push(what);
        let mut gathering = Gathering::default();
        for _ in 0..2 {
            let other = || {
                let said = said.clone();
                tokio::spawn(async move { said.lock().unwrap().push("another task") })
            };
            let first = other();
            poll_fn(|cx| gathering.poll(cx)).await;
            say("a write");
            let second = other();
            poll_fn(|cx| gathering.poll(cx)).await;
            say("its rest");
            gathering.flushed();
            first.await.unwrap();
            second.await.unwrap();
        }
        let expected = ["another task", "a write", "its rest", "another task"];
        assert_eq!(*said.lock().unwrap(), [expected, expected].concat());
    }
}
