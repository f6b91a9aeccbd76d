// What the emulated cuBLASLt (cublaslt.cpp, a library of its own) asks of the driver.
#pragma once
#include <cstdint>

namespace emu {

// out[rows][n] = x[rows][k] * weight[n][k] transposed, plus what `out` holds if `adds`. Row-major, f32 and bf16; from a
// row to the next it is `*_stride` elements.
struct Matmul {
    unsigned long long out = 0, x = 0, weight = 0, workspace = 0;
    std::uint64_t rows = 0, n = 0, k = 0;
    std::uint64_t out_stride = 0, x_stride = 0, weight_stride = 0;
    std::uint64_t workspace_bytes = 0;  // the product may write them
    bool adds = false;
};

}  // namespace emu

// Queues it in the stream, or records it in the stream's capture. A status of the driver's.
extern "C" int emu_matmul(const emu::Matmul* matmul, void* stream);
// Whether products could be queued: a status of the driver's.
extern "C" int emu_matmul_ready();
// Counts handles and descriptors of cuBLASLt that are alive.
extern "C" void emu_cublaslt_objects(int change);
