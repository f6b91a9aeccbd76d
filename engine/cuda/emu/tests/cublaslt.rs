//! What the emulated cuBLASLt answers to wrong arguments. Its results: `tests/cublaslt.rs` of the crate that uses it.
mod rig;

use std::ffi::c_void;
use std::ptr;

use cudarc::cublaslt::sys::{self, cublasStatus_t as Status};
use cudarc::driver::sys::CUresult;
use rig::{Gpu, passes_in_child};

const BF16: sys::cudaDataType = sys::cudaDataType::CUDA_R_16BF;
const F32: sys::cudaDataType = sys::cudaDataType::CUDA_R_32F;
const WORKSPACE_BYTES: usize = 1 << 20;
const TRANSPOSED: i32 = 1;

/// Rows, columns and results of the product: all square.
const SIZE: u64 = 16;

struct Lt {
    handle: sys::cublasLtHandle_t,
    preference: sys::cublasLtMatmulPreference_t,
}

/// Descriptor, and the layouts of A, B and the result.
#[derive(Clone, Copy)]
struct Product(sys::cublasLtMatmulDesc_t, [sys::cublasLtMatrixLayout_t; 3]);

fn done(status: Status) {
    assert_eq!(status, Status::CUBLAS_STATUS_SUCCESS);
}

/// Addresses of A, B, C and D, and of a workspace.
#[derive(Clone, Copy)]
struct Memory([u64; 4], u64);

impl Lt {
    fn new() -> Self {
        let mut lt = Self { handle: ptr::null_mut(), preference: ptr::null_mut() };
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: places for the results; the attribute is eight bytes.
        unsafe {
            done(sys::cublasLtCreate(&mut lt.handle));
            done(sys::cublasLtMatmulPreferenceCreate(&mut lt.preference));
            let bytes = WORKSPACE_BYTES as u64;
            let value = ptr::from_ref(&bytes).cast();
            done(sys::cublasLtMatmulPreferenceSetAttribute(lt.preference, attribute, value, 8));
            let refused = sys::cublasLtMatmulPreferenceSetAttribute(lt.preference, attribute, value, 4);
            assert_eq!(refused, Status::CUBLAS_STATUS_INVALID_VALUE, "of another size");
        }
        lt
    }

    fn algorithm(&self, product: Product) -> Result<sys::cublasLtMatmulAlgo_t, Status> {
        let Product(descriptor, [a, b, out]) = product;
        let (mut result, mut count) = (std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(), 0);
        // SAFETY: room for the one result that is asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                descriptor,
                a,
                b,
                out,
                out,
                self.preference,
                1,
                result.as_mut_ptr(),
                &mut count,
            )
        };
        // SAFETY: zeros are a result, numbers and a status that is success.
        let result = unsafe { result.assume_init() };
        (status == Status::CUBLAS_STATUS_SUCCESS && count == 1).then_some(result.algo).ok_or(status)
    }

    fn multiply(
        &self,
        product: Product,
        memory: Memory,
        scales: [f32; 2],
        algorithm: &sys::cublasLtMatmulAlgo_t,
        stream: *mut c_void,
    ) -> Status {
        let (Product(descriptor, layouts), Memory(matrices, workspace)) = (product, memory);
        let [a, b, c, d] = matrices.map(|address| address as *mut c_void);
        let [alpha, beta] = scales.each_ref().map(|scale| ptr::from_ref(scale).cast());
        // SAFETY: the emulator checks what it gets.
        unsafe {
            sys::cublasLtMatmul(
                self.handle,
                descriptor,
                alpha,
                a,
                layouts[0],
                b,
                layouts[1],
                beta,
                c,
                layouts[2],
                d,
                layouts[2],
                algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )
        }
    }
}

fn layout(kind: sys::cudaDataType, rows: u64, columns: u64, stride: i64) -> sys::cublasLtMatrixLayout_t {
    let mut layout = ptr::null_mut();
    // SAFETY: a place for the result.
    done(unsafe { sys::cublasLtMatrixLayoutCreate(&mut layout, kind, rows, columns, stride) });
    layout
}

fn descriptor(compute: sys::cublasComputeType_t, transposes: bool) -> sys::cublasLtMatmulDesc_t {
    let mut descriptor = ptr::null_mut();
    let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
    // SAFETY: a place for the result; the attribute is four bytes.
    unsafe {
        done(sys::cublasLtMatmulDescCreate(&mut descriptor, compute, F32));
        if transposes {
            let value = ptr::from_ref(&TRANSPOSED).cast();
            done(sys::cublasLtMatmulDescSetAttribute(descriptor, attribute, value, 4));
        }
    }
    descriptor
}

fn sound() -> Product {
    let f32 = descriptor(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, true);
    let square = |kind| layout(kind, SIZE, SIZE, SIZE as i64);
    Product(f32, [square(BF16), square(BF16), square(F32)])
}

#[test]
fn shapes_and_types_that_are_not_computed_are_refused() {
    let Some(_gpu) = Gpu::open() else { return };
    let (lt, sound) = (Lt::new(), sound());
    assert!(lt.algorithm(sound).is_ok());
    let Product(f32, [a, b, out]) = sound;
    let stride = SIZE as i64;
    use Status::{CUBLAS_STATUS_INVALID_VALUE as INVALID, CUBLAS_STATUS_NOT_SUPPORTED as UNSUPPORTED};
    let half = descriptor(sys::cublasComputeType_t::CUBLAS_COMPUTE_16F, true);
    let plain = descriptor(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, false);
    for (what, wrong, status) in [
        ("f16 accumulators", Product(half, [a, b, out]), UNSUPPORTED),
        ("A as it is", Product(plain, [a, b, out]), UNSUPPORTED),
        ("f32 operands", Product(f32, [layout(F32, SIZE, SIZE, stride), b, out]), UNSUPPORTED),
        ("bf16 results", Product(f32, [a, b, layout(BF16, SIZE, SIZE, stride)]), UNSUPPORTED),
        ("another k", Product(f32, [a, layout(BF16, SIZE * 2, SIZE, stride * 2), out]), INVALID),
        ("too few results", Product(f32, [a, b, layout(F32, SIZE / 2, SIZE, stride)]), INVALID),
        ("rows that overlap", Product(f32, [a, b, layout(F32, SIZE, SIZE, stride / 2)]), INVALID),
        ("no descriptor", Product(ptr::null_mut(), [a, b, out]), INVALID),
        ("no layout", Product(f32, [a, ptr::null_mut(), out]), INVALID),
        ("one object for another", Product(f32, [a, f32.cast(), out]), INVALID),
    ] {
        assert_eq!(lt.algorithm(wrong).err(), Some(status), "{what}");
    }
}

#[test]
fn products_of_wrong_memory_are_refused_or_lose_the_device() {
    let name = "products_of_wrong_memory_are_refused_or_lose_the_device";
    passes_in_child(name, "1", &[], wrong_memory);
}

fn wrong_memory() {
    let Some(gpu) = Gpu::open() else { return };
    let (lt, product) = (Lt::new(), sound());
    let algorithm = lt.algorithm(product).expect("an algorithm");
    let [a, b, out] = [2, 2, 4].map(|size| gpu.alloc((SIZE * SIZE * size) as usize).expect("room"));
    let workspace = gpu.alloc(WORKSPACE_BYTES).expect("room");
    let (sound, stream) = (Memory([a, b, out, out], workspace), gpu.stream.cast());
    let multiply = |memory, scales| lt.multiply(product, memory, scales, &algorithm, stream);
    use Status::{
        CUBLAS_STATUS_EXECUTION_FAILED as FAILED, CUBLAS_STATUS_INVALID_VALUE as INVALID,
        CUBLAS_STATUS_NOT_SUPPORTED as UNSUPPORTED,
    };
    assert_eq!(multiply(Memory([0, b, out, out], workspace), [1.0, 0.0]), INVALID, "no A");
    assert_eq!(multiply(Memory([a, b, out, out], 0), [1.0, 0.0]), INVALID, "no workspace");
    assert_eq!(multiply(Memory([a, b + 2, out, out], workspace), [1.0, 0.0]), INVALID, "not aligned as promised");
    assert_eq!(multiply(Memory([a, b, a, out], workspace), [1.0, 1.0]), UNSUPPORTED, "not in place");
    assert_eq!(multiply(sound, [2.0, 0.0]), UNSUPPORTED, "scaled");
    let made_up = sys::cublasLtMatmulAlgo_t { data: [1; 8] };
    assert_eq!(lt.multiply(product, sound, [1.0, 0.0], &made_up, stream), INVALID, "no algorithm");
    assert_eq!(
        lt.multiply(product, sound, [1.0, 0.0], &algorithm, ptr::without_provenance_mut(64)),
        FAILED,
        "no stream"
    );
    done(multiply(sound, [1.0, 0.0]));
    gpu.synchronize(gpu.stream).expect("ran");
    // Found when it runs, as a kernel's access.
    done(multiply(Memory([a, b, out + 256, out + 256], workspace), [1.0, 1.0]));
    let failure = gpu.synchronize(gpu.stream).expect_err("lost");
    assert_eq!(failure.status, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(failure.message.contains("cublasLtMatmul: out of 1024 bytes"), "{}", failure.message);
    assert_eq!(multiply(sound, [1.0, 0.0]), FAILED);
}
