//! Large products by cuBLASLt, where its library is on the machine: opened at first use, as the driver is, and done
//! without where it is absent. [`Lt`] owns the library's handle, its workspace and the products that it has prepared.
//!
//! # Bits
//! Algorithms that split `k`, and add the parts in whatever order, are neither asked for nor taken. What is left gives
//! an output one f32 accumulator, which takes sets of 16 values of `k` in ascending order, whatever the tiles: the
//! order of `kernels/products.cu`, so that both give the same bits. NVIDIA does not promise that, and for a single row
//! the library has kernels of another order (cuBLASLt 13 on an H200): callers ask for many rows, and compare first.
//! `tests/cublaslt.rs` prints for which numbers of rows the bits are others.
//!
//! # In the library's words
//! It counts in columns: row-major `out[rows][n]` is its `n × rows`, the transposed `weight[n][k]` its left operand,
//! `x[rows][k]` its right one.
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys;

use crate::buffer::Buffer;
use crate::context::Context;
use crate::driver::{self, Failure, HeuristicResult, Status};
use crate::error::CudaError;
use crate::kernels::launch::{Arg, Checks, Mem, Refused};
use crate::stream::Stream;

/// What algorithms may use beside their operands; NVIDIA's advice for Hopper is 32 MiB.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;
/// The oldest that is used: 12.0.0.
const OLDEST_VERSION: usize = 120_000;
/// Addresses, and the bytes from a row to the next, are multiples of it: what kernels load and store at a time.
const ALIGNMENT_BYTES: usize = 16;
/// Products that are kept prepared. When there are so many, all of them go: rows of prompts seldom repeat.
const MOST_PREPARED: usize = 4096;
/// Algorithms to choose among; the library's first is its best.
const MOST_RESULTS: usize = 8;

const BF16: sys::cudaDataType = sys::cudaDataType::CUDA_R_16BF;
/// `CUBLAS_OP_T`, which the bindings of this library leave out.
const TRANSPOSED: i32 = 1;
const F32: sys::cudaDataType = sys::cudaDataType::CUDA_R_32F;

/// The library's version: "13.0.2".
///
/// # Errors
/// [`CudaError::Unavailable`] when it is not there, or too old: in a sentence.
pub fn cublaslt_version() -> Result<String, CudaError> {
    // SAFETY: opens a shared library by its system name and runs its initializers, which the CUDA toolkit's may be
    // trusted with: it is what this program was told to use.
    if !unsafe { sys::is_culib_present() } {
        let why = "no cuBLASLt: libcublasLt.so.13 (or .12) is not on this machine";
        return Err(CudaError::Unavailable(why.into()));
    }
    // SAFETY: the library is there; the function takes nothing.
    let version = unsafe { driver::cublas_lt_version() }.unwrap_or(0);
    let text = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    match version < OLDEST_VERSION {
        true => Err(CudaError::Unavailable("cuBLASLt is older than 12, the oldest that is used".into())),
        false => Ok(text),
    }
}

/// Sizes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows of `x` and of the result.
    pub rows: usize,
    /// Rows of `weight`: columns of the result. A multiple of 4.
    pub n: usize,
    /// Columns of `x` and `weight` that are multiplied. A multiple of 8.
    pub k: usize,
    /// Elements from a row of `x` to the next: `k` or more. A multiple of 8.
    pub x_stride: usize,
    /// The same of `weight`.
    pub weight_stride: usize,
}

/// What becomes of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Stored: f32 `[rows][n]`.
    Store(Mem),
    /// Added, one f32 addition for each: f32 `[rows][n]`.
    Add(Mem),
}

/// What a product computes with. Each begins at a multiple of 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// What becomes of results.
    pub output: Output,
    /// bf16 `[rows][k]`.
    pub x: Mem,
    /// bf16 `[n][k]`.
    pub weight: Mem,
}

/// cuBLASLt on a device, for one stream at a time: products share a workspace.
#[derive(Debug)]
pub struct Lt {
    context: Arc<Context>,
    prepared: Mutex<HashMap<Shape, Option<Arc<Prepared>>>>,
    handle: Owned<sys::cublasLtHandle_t>,
    workspace: Buffer,
}

/// A product of one shape, with the algorithm that computes it.
#[derive(Debug)]
pub struct Prepared {
    shape: Shape,
    product: Owned<sys::cublasLtMatmulDesc_t>,
    layouts: Layouts,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Lt {
    /// Opens the library and allocates a workspace. `None`, and a line in the log of why, where there is no library
    /// that can be used.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] for the workspace, [`CudaError::Lost`].
    pub fn open(context: &Arc<Context>) -> Result<Option<Self>, CudaError> {
        context.bind()?;
        let opened = cublaslt_version().and_then(|version| Ok((version, new_handle()?)));
        let (version, handle) = match opened {
            Ok(opened) => opened,
            Err(why) => {
                tracing::info!(%why, "large products are computed by kernels of Tandem's own");
                return Ok(None);
            }
        };
        let workspace = Buffer::new(context, "cuBLASLt's workspace", WORKSPACE_BYTES)?;
        tracing::debug!(version, "large products are computed by cuBLASLt");
        Ok(Some(Self { context: Arc::clone(context), prepared: Mutex::default(), handle, workspace }))
    }

    /// The product of this shape, prepared now or before. `None` where the library has no algorithm for it that adds
    /// in ascending `k`. Some microseconds of the host's time for a shape that is new, none of the device's.
    ///
    /// # Errors
    /// [`CudaError::CublasLt`].
    pub fn prepare(&self, shape: Shape) -> Result<Option<Arc<Prepared>>, CudaError> {
        let mut kept = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.get(&shape) {
            return Ok(known.clone());
        }
        self.context.bind()?;
        let prepared = Prepared::new(&self.handle, shape).map_err(refused)?.map(Arc::new);
        if kept.len() >= MOST_PREPARED {
            kept.clear();
        }
        kept.insert(shape, prepared.clone());
        Ok(prepared)
    }

    /// Queues a product, or records it where the stream is captured. The library loads an algorithm's kernel at its
    /// first use: capture what has run before.
    ///
    /// # Errors
    /// [`CudaError::Kernels`] for memory that is too small or not aligned, [`CudaError::CublasLt`] for a refusal,
    /// [`CudaError::Lost`] where it was refused because the context is lost.
    ///
    /// # Safety
    /// The memory is the device's, and stays until the stream has come past the product (or the graph that records it
    /// is dropped). No other stream runs a product of `self`, or touches the memory, meanwhile.
    pub unsafe fn run(&self, stream: &Stream, product: &Prepared, operands: &Operands) -> Result<(), CudaError> {
        let refused = |refused: Refused| CudaError::Kernels(refused.to_string());
        let [out, x, weight] = operands.check(&product.shape).map_err(refused)?;
        let alpha = 1.0f32;
        let beta = if matches!(operands.output, Output::Add(_)) { 1.0f32 } else { 0.0 };
        let Layouts { x: x_layout, weight: weight_layout, out: out_layout } = &product.layouts;
        // SAFETY: handle and descriptors are alive, the scales are the host's f32, as the descriptor's default says,
        // and read before the call returns; the arrays are as long as the layouts say, and the rest is the caller's
        // promise. The workspace is as large as the algorithm was allowed, and lives as long as `self`.
        unsafe {
            driver::cublasLtMatmul(
                self.handle.object,
                product.product.object,
                ptr::from_ref(&alpha).cast(),
                weight,
                weight_layout.object,
                x,
                x_layout.object,
                ptr::from_ref(&beta).cast(),
                out,
                out_layout.object,
                out,
                out_layout.object,
                &product.algorithm,
                pointer(self.workspace.mem().address),
                self.workspace.bytes(),
                stream.handle(),
            )
        }
        .map_err(|failure| self::lost(stream).unwrap_or_else(|| self::refused(failure)))
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // The handle, which goes next, frees what it has on the device.
        let _ = self.context.bind();
    }
}

impl Prepared {
    /// `None` where the library has no algorithm that adds in ascending `k`.
    fn new(handle: &Owned<sys::cublasLtHandle_t>, shape: Shape) -> Result<Option<Self>, Failure> {
        if !shape.is_aligned() {
            return Ok(None);
        }
        let (product, layouts, preference) = (new_product()?, Layouts::new(&shape)?, new_preference()?);
        let Layouts { x, weight, out } = &layouts;
        let none = HeuristicResult {
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace_bytes: 0,
            state: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let (mut results, mut count): ([_; MOST_RESULTS], c_int) = ([none; MOST_RESULTS], 0);
        // SAFETY: all are alive; writes as many results as there is room for, and their number.
        let asked = unsafe {
            driver::cublasLtMatmulAlgoGetHeuristic(
                handle.object,
                product.object,
                weight.object,
                x.object,
                out.object,
                out.object,
                preference.object,
                MOST_RESULTS as c_int,
                results.as_mut_ptr(),
                &mut count,
            )
        };
        match asked {
            Err(failure) if failure.is(Status::CUBLAS_NOT_SUPPORTED) => return Ok(None),
            other => other?,
        }
        for result in results.iter().take(usize::try_from(count).unwrap_or(0)) {
            if Status(result.state) == Status::SUCCESS && splits(&result.algorithm)? == 1 {
                return Ok(Some(Self { shape, product, layouts, algorithm: result.algorithm }));
            }
        }
        Ok(None)
    }
}

/// In how many parts an algorithm cuts `k`.
fn splits(algorithm: &sys::cublasLtMatmulAlgo_t) -> Result<i32, Failure> {
    let attribute = sys::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_SPLITK_NUM;
    let (mut splits, mut written) = (0i32, 0);
    // SAFETY: an algorithm that the library made; writes the two numbers.
    unsafe {
        driver::cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            ptr::from_mut(&mut splits).cast(),
            size_of::<i32>(),
            &mut written,
        )
    }?;
    Ok(splits)
}

impl Shape {
    /// Whether each row begins where kernels can load and store 16 bytes, and there is something to compute.
    fn is_aligned(&self) -> bool {
        let &Self { rows, n, k, x_stride, weight_stride } = self;
        let columns = [k, x_stride, weight_stride];
        let even = columns.iter().all(|columns| (columns * size_of::<u16>()).is_multiple_of(ALIGNMENT_BYTES));
        let holds = rows > 0 && n > 0 && k > 0 && x_stride >= k && weight_stride >= k;
        holds && even && (n * size_of::<f32>()).is_multiple_of(ALIGNMENT_BYTES)
    }
}

impl Operands {
    /// Where the output, `x` and `weight` are.
    fn check(&self, shape: &Shape) -> Result<[*mut c_void; 3], Refused> {
        let &Shape { rows, n, k, x_stride, weight_stride } = shape;
        let check = Checks("cublasLtMatmul");
        let (Output::Store(out) | Output::Add(out)) = self.output;
        // Of the last row its `k` columns alone.
        let area = |what, rows: usize, stride| check.area(what, &[rows - 1, stride]).map(|before| before + k);
        let arrays = [
            check.wide("out", out, check.area("out", &[rows, n])?, size_of::<f32>())?,
            check.wide("x", self.x, area("x", rows, x_stride)?, size_of::<u16>())?,
            check.wide("weight", self.weight, area("weight", n, weight_stride)?, size_of::<u16>())?,
        ];
        Ok(arrays.map(|array: Arg| pointer(array.word())))
    }
}

fn pointer(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(address as usize)
}

/// How the matrices lie in memory.
#[derive(Debug)]
struct Layouts {
    x: Owned<sys::cublasLtMatrixLayout_t>,
    weight: Owned<sys::cublasLtMatrixLayout_t>,
    out: Owned<sys::cublasLtMatrixLayout_t>,
}

impl Layouts {
    fn new(shape: &Shape) -> Result<Self, Failure> {
        let &Shape { rows, n, k, x_stride, weight_stride } = shape;
        let layout = |kind, columns: usize, rows: usize, stride: usize| {
            let mut object = ptr::null_mut();
            // SAFETY: writes the one pointer.
            unsafe {
                driver::cublasLtMatrixLayoutCreate(&mut object, kind, columns as u64, rows as u64, stride as i64)
            }?;
            Ok::<_, Failure>(Owned { object, destroy: driver::cublasLtMatrixLayoutDestroy })
        };
        Ok(Self {
            x: layout(BF16, k, rows, x_stride)?,
            weight: layout(BF16, k, n, weight_stride)?,
            out: layout(F32, n, rows, n)?,
        })
    }
}

fn new_handle() -> Result<Owned<sys::cublasLtHandle_t>, CudaError> {
    let mut object = ptr::null_mut();
    // SAFETY: the context is bound; writes the one pointer.
    unsafe { driver::cublasLtCreate(&mut object) }.map_err(refused)?;
    Ok(Owned { object, destroy: driver::cublasLtDestroy })
}

/// f32 accumulators; the left operand transposed.
fn new_product() -> Result<Owned<sys::cublasLtMatmulDesc_t>, Failure> {
    use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
    let mut object = ptr::null_mut();
    // SAFETY: writes the one pointer.
    unsafe { driver::cublasLtMatmulDescCreate(&mut object, sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, F32) }?;
    let product = Owned { object, destroy: driver::cublasLtMatmulDescDestroy };
    let (value, bytes) = (ptr::from_ref(&TRANSPOSED).cast(), size_of_val(&TRANSPOSED));
    // SAFETY: reads the operation, an integer of four bytes.
    unsafe { driver::cublasLtMatmulDescSetAttribute(product.object, CUBLASLT_MATMUL_DESC_TRANSA, value, bytes) }?;
    Ok(product)
}

/// What an algorithm may need, and that it must not split `k`.
fn new_preference() -> Result<Owned<sys::cublasLtMatmulPreference_t>, Failure> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let mut object = ptr::null_mut();
    // SAFETY: writes the one pointer.
    unsafe { driver::cublasLtMatmulPreferenceCreate(&mut object) }?;
    let preference = Owned { object, destroy: driver::cublasLtMatmulPreferenceDestroy };
    let set = |attribute, value: *const c_void, bytes| {
        // SAFETY: reads so many bytes of the value, which is of the type that the attribute has.
        unsafe { driver::cublasLtMatmulPreferenceSetAttribute(preference.object, attribute, value, bytes) }
    };
    let workspace = WORKSPACE_BYTES as u64;
    let bytes = ptr::from_ref(&workspace).cast();
    set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes, size_of_val(&workspace))?;
    let words = [
        (
            Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32,
        ),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, ALIGNMENT_BYTES as u32),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, ALIGNMENT_BYTES as u32),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, ALIGNMENT_BYTES as u32),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, ALIGNMENT_BYTES as u32),
    ];
    for (attribute, value) in words {
        set(attribute, ptr::from_ref(&value).cast(), size_of_val(&value))?;
    }
    Ok(preference)
}

/// An object of the library's.
#[derive(Debug)]
struct Owned<T: Copy> {
    object: T,
    destroy: unsafe fn(T) -> Result<(), Failure>,
}

// SAFETY: the library's objects are memory of the host's, which its functions only read after their making (a handle
// they guard themselves); nothing in them is a thread's.
unsafe impl<T: Copy> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T: Copy> Sync for Owned<T> {}

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: made by the library's function beside `destroy`, and destroyed once.
        let _ = unsafe { (self.destroy)(self.object) };
    }
}

/// The error that a failed call means.
fn refused(Failure { call, status }: Failure) -> CudaError {
    let Some(Status(number)) = status else {
        return CudaError::Unavailable(format!("this cuBLASLt has no {call}"));
    };
    let name = match number {
        1 => "NOT_INITIALIZED",
        3 => "ALLOC_FAILED",
        7 => "INVALID_VALUE",
        8 => "ARCH_MISMATCH",
        11 => "MAPPING_ERROR",
        13 => "EXECUTION_FAILED",
        14 => "INTERNAL_ERROR",
        15 => "NOT_SUPPORTED",
        16 => "LICENSE_ERROR",
        _ => return CudaError::CublasLt { call, status: format!("status {number}") },
    };
    CudaError::CublasLt { call, status: format!("CUBLAS_STATUS_{name}") }
}

/// Whether a call was refused because the context is lost: the library's statuses do not say it.
fn lost(stream: &Stream) -> Option<CudaError> {
    // SAFETY: the stream is there. One that is captured refuses the question, and its capture is lost anyway.
    let answer = unsafe { driver::cuStreamQuery(stream.handle()) };
    answer.err().map(CudaError::from).filter(CudaError::is_lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_the_library_s_names() {
        let named = |number| refused(Failure { call: "cublasLtMatmul", status: Some(Status(number)) }).to_string();
        assert_eq!(named(13), "cublasLtMatmul failed with CUBLAS_STATUS_EXECUTION_FAILED of cuBLASLt");
        assert_eq!(named(4242), "cublasLtMatmul failed with status 4242 of cuBLASLt");
        let absent = refused(Failure { call: "cublasLtMatmul", status: None });
        assert_eq!(absent, CudaError::Unavailable("this cuBLASLt has no cublasLtMatmul".into()));
    }

    #[test]
    fn rows_that_are_not_aligned_are_left_to_other_kernels() {
        let shape = Shape { rows: 3, n: 8, k: 32, x_stride: 40, weight_stride: 32 };
        assert!(shape.is_aligned());
        for wrong in [
            Shape { rows: 0, ..shape },
            Shape { n: 6, ..shape },
            Shape { k: 28, ..shape },
            Shape { x_stride: 44, ..shape },
            Shape { x_stride: 24, ..shape },
            Shape { weight_stride: 24, ..shape },
        ] {
            assert!(!wrong.is_aligned(), "{wrong:?}");
        }
    }
}
