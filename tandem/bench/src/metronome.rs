//! The benchmark's time: one monotonic clock for all records, and a wait that ends within some tens of microseconds of
//! its moment. Tokio's timers round to milliseconds, which is what a late sender looks like; so a thread does the
//! waiting.
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// Nothing is waited for longer than this: a century.
const FAR: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Seconds since the run began.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    began: Instant,
}

impl Clock {
    /// A run begins.
    pub fn start() -> Self {
        Self { began: Instant::now() }
    }

    /// Seconds since then.
    pub fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// The moment so many seconds after the beginning; what is before it counts as 0.
    pub fn at(&self, seconds: f64) -> Instant {
        let since = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(FAR).min(FAR);
        self.began + since
    }
}

/// One waiter, with a thread that lives as long.
pub struct Metronome {
    orders: Sender<Order>,
}

/// A moment, and who waits for it.
struct Order {
    moment: Instant,
    tell: oneshot::Sender<()>,
}

impl Metronome {
    /// # Errors
    /// The system gives no thread.
    pub fn new() -> std::io::Result<Self> {
        let (orders, received) = channel();
        thread::Builder::new().name("metronome".to_owned()).spawn(move || wait(&received))?;
        Ok(Self { orders })
    }

    /// Waits until `moment`; at once when that has passed. A wait that is dropped is forgotten with the next one.
    pub async fn wait_until(&mut self, moment: Instant) {
        if moment <= Instant::now() {
            return;
        }
        let (tell, told) = oneshot::channel();
        // The thread ends with `self` and not before it.
        if self.orders.send(Order { moment, tell }).is_ok() {
            let _ = told.await;
        }
    }
}

fn wait(orders: &Receiver<Order>) {
    let mut current: Option<Order> = None;
    loop {
        let next = match &current {
            Some(order) => orders.recv_timeout(order.moment.saturating_duration_since(Instant::now())),
            None => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(order) => current = Some(order),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(Order { tell, .. }) = current.take() {
                    // Nobody waits any more when the wait was dropped.
                    let _ = tell.send(());
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_waits_until_the_moment_and_not_after_it() {
        let clock = Clock::start();
        let mut metronome = Metronome::new().unwrap();
        for at in [0.003, 0.0101, 0.0102, 0.02] {
            metronome.wait_until(clock.at(at)).await;
            assert!(clock.now_s() >= at);
        }
        assert!(clock.now_s() < 2.0);
        metronome.wait_until(clock.at(-1.0)).await;
    }

    #[tokio::test]
    async fn a_dropped_wait_does_not_disturb_the_next() {
        let clock = Clock::start();
        let mut metronome = Metronome::new().unwrap();
        let dropped = tokio::time::timeout(Duration::ZERO, metronome.wait_until(clock.at(1e3))).await;
        assert!(dropped.is_err());
        metronome.wait_until(clock.at(0.03)).await;
        assert!(clock.now_s() >= 0.03);
    }
}
