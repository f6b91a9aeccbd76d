//! A stretch of a stream's work, recorded once and then launched as a whole: hundreds of launches for the price of one.
use std::sync::Arc;

use cudarc::driver::sys;

use crate::context::Context;
use crate::driver;
use crate::error::CudaError;
use crate::stream::Stream;

/// Recorded work. What its kernels point to must outlive it: see who captures.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver takes calls about a graph from any thread, one at a time; `launch` borrows it alone.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` queues in `stream`, instead of running it.
    ///
    /// # Errors
    /// Those of `work`, or that it did what cannot be recorded. The stream is as before then.
    pub fn capture(stream: &Stream, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Self, CudaError> {
        // Of this thread only: KV transfers may allocate and copy on others meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is there, and captures nothing yet: this is the only place that does.
        unsafe { driver::cuStreamBeginCapture_v2(stream.handle(), mode) }?;
        let outcome = work();
        let mut graph = Recorded(std::ptr::null_mut());
        // SAFETY: the capture that began above. It must end whatever became of the work. Writes the one pointer.
        let ended = unsafe { driver::cuStreamEndCapture(stream.handle(), &mut graph.0) };
        outcome?;
        ended?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was made above and is whole; writes the one pointer.
        unsafe { driver::cuGraphInstantiateWithFlags(&mut executable, graph.0, 0) }?;
        Ok(Self { context: Arc::clone(stream.context()), executable })
    }

    /// Queues all of it.
    ///
    /// # Errors
    /// Whatever the driver answers.
    pub fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are there; memory is as it was at the capture, see the type.
        unsafe { driver::cuGraphLaunch(self.executable, stream.handle()) }.map_err(CudaError::from)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: instantiated by `capture` and destroyed once; a launch under way ends first.
        let _ = unsafe { driver::cuGraphExecDestroy(self.executable) };
    }
}

/// What was recorded, until it is made executable.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the graph of an ended capture, destroyed once.
            let _ = unsafe { driver::cuGraphDestroy(self.0) };
        }
    }
}
