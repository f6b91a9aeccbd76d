//! Spans of other processes, passed on in their names: those that a process told of and did not export itself, because
//! nobody knew at the time that their trace would be kept. One task sends them, a batch at a time.
use std::collections::BTreeMap;
use std::sync::Arc;

use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use tandem_proto::v1;
use tokio::sync::{mpsc, oneshot};

use crate::export::{BATCH_SPANS, Counting, Counts, QUEUE_SPANS, SEND_EVERY, resource};
use crate::otlp::span_data;

/// Handle to the task. Each span in it counts as waiting until it was sent.
#[derive(Debug)]
pub(crate) struct Relay {
    queue: mpsc::Sender<Relayed>,
    counts: Arc<Counts>,
}

enum Relayed {
    Span(Box<v1::Span>),
    /// All before it are sent.
    Flush(oneshot::Sender<()>),
}

impl Relay {
    /// Starts the task on the present runtime.
    pub fn start<E: SpanExporter + 'static>(exporter: Counting<E>) -> Self {
        let (queue, spans) = mpsc::channel(QUEUE_SPANS);
        let counts = exporter.counts.clone();
        tokio::spawn(send(exporter, spans));
        Self { queue, counts }
    }

    /// Queues a span that is counted as waiting.
    pub fn pass_on(&self, span: v1::Span) {
        if self.queue.try_send(Relayed::Span(Box::new(span))).is_err() {
            self.counts.settle(1, false);
        }
    }

    /// Ready when what was passed on before is sent.
    pub async fn flushed(&self) {
        let (done, sent) = oneshot::channel();
        if self.queue.send(Relayed::Flush(done)).await.is_ok() {
            let _ = sent.await;
        }
    }
}

/// What comes together goes together: a call to the collector costs more than its spans.
async fn receive(queue: &mut mpsc::Receiver<Relayed>, batch: &mut Vec<Relayed>) -> usize {
    queue.recv_many(batch, BATCH_SPANS).await;
    let more = async {
        while !batch.is_empty() && batch.len() < BATCH_SPANS && !matches!(batch.last(), Some(Relayed::Flush(_))) {
            match queue.recv().await {
                Some(relayed) => batch.push(relayed),
                None => break,
            }
        }
    };
    let _ = tokio::time::timeout(SEND_EVERY, more).await;
    batch.len()
}

async fn send<E: SpanExporter>(mut exporter: Counting<E>, mut queue: mpsc::Receiver<Relayed>) {
    let mut batch = Vec::with_capacity(BATCH_SPANS);
    while receive(&mut queue, &mut batch).await > 0 {
        let (mut processes, mut flushed) = (BTreeMap::<_, Vec<SpanData>>::new(), Vec::new());
        for relayed in batch.drain(..) {
            match relayed {
                Relayed::Span(mut span) => {
                    let process = (std::mem::take(&mut span.service), std::mem::take(&mut span.instance));
                    match span_data(*span) {
                        Some(data) => processes.entry(process).or_default().push(data),
                        None => exporter.counts.settle(1, false),
                    }
                }
                Relayed::Flush(done) => flushed.push(done),
            }
        }
        for ((service, instance), spans) in processes {
            exporter.set_resource(&resource(&service, &instance).build());
            // Counted and logged there.
            let _ = exporter.export(spans).await;
        }
        for done in flushed {
            let _ = done.send(());
        }
    }
}
