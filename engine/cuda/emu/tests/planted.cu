// Kernels that are wrong, one mistake each, and beside them correct ones: tests/planted.rs says what must be found.
#include "device.cuh"

// Correct: a sum over the block by way of shared memory.
extern "C" __global__ void right_block_sum(float* out, const float* in, u32 count) {
    __shared__ float partial[32];
    float sum = 0.0f;
    for (u32 i = blockIdx.x * count + threadIdx.x; i < (blockIdx.x + 1) * count; i += blockDim.x) sum += in[i];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = sum;
    __syncthreads();
    float total = 0.0f;
    for (u32 warp = 0; warp < blockDim.x / WARP; warp++) total += partial[warp];
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}
TANDEM_KERNEL(right_block_sum)
