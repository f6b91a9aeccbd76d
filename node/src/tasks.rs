//! Where a node's tasks run: on tokio, and in a simulation under whoever can freeze and kill them with their node.
//! Every task of a node that outlives one poll of its caller is spawned through here.
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;

/// Spawns the tasks of one node. Clones spawn on the same side.
#[derive(Clone, Default)]
pub struct Tasks {
    wrap: Option<Arc<Wrap>>,
}

type Wrap = dyn Fn(BoxFuture<'static, ()>) -> BoxFuture<'static, ()> + Send + Sync;

impl Tasks {
    /// Each task is what `wrap` makes of it.
    pub fn wrapped(wrap: impl Fn(BoxFuture<'static, ()>) -> BoxFuture<'static, ()> + Send + Sync + 'static) -> Self {
        Self { wrap: Some(Arc::new(wrap)) }
    }

    /// Runs `task` to its end; nobody waits for it. Needs a tokio runtime.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        match &self.wrap {
            None => drop(tokio::spawn(task)),
            Some(wrap) => drop(tokio::spawn(wrap(Box::pin(task)))),
        }
    }
}

impl fmt::Debug for Tasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.wrap.is_some() { "Tasks(wrapped)" } else { "Tasks" })
    }
}
