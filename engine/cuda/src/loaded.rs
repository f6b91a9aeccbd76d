//! All kernels, compiled and loaded for one device, by name.
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use crate::compile::{self, Folders};
use crate::context::Context;
use crate::error::CudaError;
use crate::kernels::launch::{Launch, Refused};
use crate::kernels::{Kernel, SOURCES};
use crate::module::{Function, Module};
use crate::stream::Stream;

/// The kernels of [`crate::kernels`] in a context.
#[derive(Debug)]
pub struct Kernels {
    functions: HashMap<&'static str, Function>,
}

impl Kernels {
    /// Compiles and loads them; see [`compile::module`].
    ///
    /// # Errors
    /// As there.
    pub fn load(context: &Arc<Context>, folders: &Folders) -> Result<Arc<Self>, CudaError> {
        let mut functions = HashMap::new();
        for (source, module) in SOURCES.iter().zip(modules(context, folders)) {
            let module = module?;
            for &Kernel { name, shared_bytes } in source.kernels {
                let function = module.function(name)?;
                function.allow_shared(shared_bytes)?;
                functions.insert(name, function);
            }
        }
        Ok(Arc::new(Self { functions }))
    }

    /// Queues a launch, if it has anything to do.
    ///
    /// # Errors
    /// [`CudaError::Kernels`] for one that was refused, or names no kernel; whatever the driver answers.
    ///
    /// # Safety
    /// As [`Function::launch`].
    pub unsafe fn launch(&self, stream: &Stream, launch: Result<Launch, Refused>) -> Result<(), CudaError> {
        let launch = launch.map_err(|refused| CudaError::Kernels(refused.to_string()))?;
        if launch.is_empty() {
            return Ok(());
        }
        let function = self.functions.get(launch.kernel);
        let function = function.ok_or_else(|| CudaError::Kernels(format!("there is no kernel {}", launch.kernel)))?;
        // SAFETY: the caller's promise.
        unsafe { function.launch(stream, &launch) }
    }
}

/// Of all sources: each takes seconds to compile, on a thread of its own.
fn modules(context: &Arc<Context>, folders: &Folders) -> Vec<Result<Arc<Module>, CudaError>> {
    thread::scope(|scope| {
        let compile = |source| move || context.bind().and_then(|()| compile::module(context, source, folders));
        let threads: Vec<_> = SOURCES.iter().map(|source| scope.spawn(compile(source))).collect();
        let panicked = |_| Err(CudaError::Kernels("compiling kernels panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    })
}
