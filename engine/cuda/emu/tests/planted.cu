// Kernels with one planted mistake each, marked `// MISTAKE name`, and beside them the correct ones.
// tests/planted.rs says what must be found, in which line.
#include "device.cuh"

// ------------------------------------------------------------------------------------------------------ correct ones

// A sum over each block's part by way of shared memory.
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

// out[i] = in[i] + add
extern "C" __global__ void right_add(float* out, const float* in, float add, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = in[i] + add;
}
TANDEM_KERNEL(right_add)

// Reverses tiles of 128 through two buffers of cp.async, with the waits and barriers of a pipeline.
extern "C" __global__ void right_pipeline(float* out, const float* in, u32 tiles) {
    __shared__ __align__(16) float buffer[2][128];
    u32 thread = threadIdx.x;
    if (thread < 32) cp_async_16(&buffer[0][thread * 4], in + thread * 4);
    cp_async_commit();
    for (u32 tile = 0; tile < tiles; tile++) {
        u32 next = tile + 1;
        if (thread < 32 && next < tiles) cp_async_16(&buffer[next % 2][thread * 4], in + next * 128 + thread * 4);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        out[tile * 128 + thread] = buffer[tile % 2][127 - thread];
        __syncthreads();
    }
}
TANDEM_KERNEL(right_pipeline)

// C = A * B transposed for one tile of 16 x 8, k = 16: ldmatrix and mma as device.cuh describes them.
extern "C" __global__ void right_product(float* c, const bf16* a, const bf16* b) {
    __shared__ __align__(16) bf16 tile_a[16 * 16];
    __shared__ __align__(16) bf16 tile_b[16 * 16];
    u32 lane = threadIdx.x;
    for (u32 i = lane; i < 16 * 16; i += WARP) {
        tile_a[i] = a[i];
        tile_b[i] = i < 8 * 16 ? b[i] : bf16{0};
    }
    __syncwarp();
    u32 left[4], right[4];
    // The matrices in the order of the fragments: upper left, lower left, upper right, lower right.
    ldmatrix_x4<false>(left, &tile_a[(lane % 8 + lane / 8 % 2 * 8) * 16 + lane / 16 * 8]);
    ldmatrix_x4<false>(right, &tile_b[lane % 8 * 16 + lane / 8 % 2 * 8]);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 fragment[2] = {right[0], right[1]};
    mma_m16n8k16(sums, left, fragment);
    u32 group = lane / 4, pair = lane % 4 * 2;
    c[group * 8 + pair] = sums[0];
    c[group * 8 + pair + 1] = sums[1];
    c[(group + 8) * 8 + pair] = sums[2];
    c[(group + 8) * 8 + pair + 1] = sums[3];
}
TANDEM_KERNEL(right_product)

// Each lane's word through every collective: out[0..32) xor shuffle, [32..64) ballot of odd lanes, [64..96) argmax.
extern "C" __global__ void right_collectives(u32* out) {
    u32 lane = threadIdx.x;
    u64 wide = static_cast<u64>(lane) << 33 | lane;
    out[lane] = static_cast<u32>(__shfl_xor_sync(ALL_LANES, wide, 5) >> 33);
    out[32 + lane] = __ballot_sync(ALL_LANES, lane % 2 == 1);
    float value = lane == 7 || lane == 21 ? 3.0f : lane == 3 ? __uint_as_float(0x7fffffffu) : 1.0f;
    u32 index = lane;
    warp_argmax(value, index);
    out[64 + lane] = index;
    out[96 + lane] = warp_sum_u32<4>(lane);
    out[128 + lane] = __shfl_down_sync(ALL_LANES, lane, 1);
    out[160 + lane] = __shfl_up_sync(ALL_LANES, lane, 2, 8);
    out[192 + lane] = static_cast<u32>(__syncthreads_count(lane < 10));
}
TANDEM_KERNEL(right_collectives)

// A histogram with atomics in shared memory, and one byte a thread: neighbours in one word are no race.
extern "C" __global__ void right_histogram(u32* out, u8* marks, const u32* in, u32 count) {
    DYNAMIC_SHARED(u32, bins);
    if (threadIdx.x < 16) bins[threadIdx.x] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) atomicAdd(&bins[in[i] % 16], 1u);
    marks[threadIdx.x] = static_cast<u8>(threadIdx.x);
    __syncthreads();
    if (threadIdx.x < 16) out[threadIdx.x] = bins[threadIdx.x];
}
TANDEM_KERNEL(right_histogram)

// -------------------------------------------------------------------------------------------- mistakes of one block

extern "C" __global__ void missing_barrier(float* out) {
    __shared__ float values[128];
    values[threadIdx.x] = static_cast<float>(threadIdx.x);
    out[threadIdx.x] = values[127 - threadIdx.x];  // MISTAKE missing_barrier
}
TANDEM_KERNEL(missing_barrier)

// The tile is read by a fast warp's copy for the next one while others still read this one.
extern "C" __global__ void missing_second_barrier(float* out, const float* in, u32 tiles) {
    __shared__ float buffer[128];
    for (u32 tile = 0; tile < tiles; tile++) {
        buffer[threadIdx.x] = in[tile * 128 + threadIdx.x];  // MISTAKE missing_second_barrier
        __syncthreads();
        out[tile * 128 + threadIdx.x] = buffer[127 - threadIdx.x];
    }
}
TANDEM_KERNEL(missing_second_barrier)

extern "C" __global__ void missing_copy_wait(float* out, const float* in) {
    __shared__ __align__(16) float buffer[128];
    if (threadIdx.x < 32) cp_async_16(&buffer[threadIdx.x * 4], in + threadIdx.x * 4);
    cp_async_commit();
    __syncthreads();
    out[threadIdx.x] = buffer[threadIdx.x];  // MISTAKE missing_copy_wait
}
TANDEM_KERNEL(missing_copy_wait)

extern "C" __global__ void missing_syncwarp(float* out) {
    __shared__ float values[32];
    values[threadIdx.x] = static_cast<float>(threadIdx.x);
    out[threadIdx.x] = values[threadIdx.x ^ 1];  // MISTAKE missing_syncwarp
}
TANDEM_KERNEL(missing_syncwarp)

// A shuffle orders no memory.
extern "C" __global__ void shuffle_as_barrier(float* out) {
    __shared__ float values[32];
    values[threadIdx.x] = static_cast<float>(threadIdx.x);
    float zero = __shfl_xor_sync(ALL_LANES, 0.0f, 1);
    out[threadIdx.x] = values[threadIdx.x ^ 1] + zero;  // MISTAKE shuffle_as_barrier
}
TANDEM_KERNEL(shuffle_as_barrier)

extern "C" __global__ void divergent_barrier(float* out) {
    if (threadIdx.x < 64) {
        __syncthreads();  // MISTAKE divergent_barrier
    } else {
        out[threadIdx.x] = 1.0f;
        __syncthreads();
    }
}
TANDEM_KERNEL(divergent_barrier)

extern "C" __global__ void deadlock(float* out) {
    if (threadIdx.x % 2 == 0) {
        __syncthreads();  // MISTAKE deadlock
    } else {
        __syncwarp();
    }
    out[threadIdx.x] = 1.0f;
}
TANDEM_KERNEL(deadlock)

extern "C" __global__ void exited_lane(float* out) {
    if (threadIdx.x >= 16) return;
    out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, 1.0f, 1);  // MISTAKE exited_lane
}
TANDEM_KERNEL(exited_lane)

extern "C" __global__ void endless(float* out) {
    while (reinterpret_cast<volatile float*>(out)[0] != 7.0f) {  // MISTAKE endless
    }
}
TANDEM_KERNEL(endless)

extern "C" __global__ void endless_barriers(float* out, u32 never) {
    for (u32 i = 0; i != never; i += 2) __syncthreads();  // MISTAKE endless_barriers
    out[threadIdx.x] = 1.0f;
}
TANDEM_KERNEL(endless_barriers)

extern "C" __global__ void failed_assertion(float* out, u32 count) {
    assert(blockDim.x <= count);  // MISTAKE failed_assertion
    out[threadIdx.x] = 1.0f;
}
TANDEM_KERNEL(failed_assertion)

extern "C" __global__ void division_by_zero(u32* out, u32 divisor) {
    out[threadIdx.x] = threadIdx.x / divisor;  // MISTAKE division_by_zero
}
TANDEM_KERNEL(division_by_zero)

// ----------------------------------------------------------------------------------------------- mistakes of addresses

extern "C" __global__ void far_outside(float* out) {
    out[threadIdx.x + 4096] = 1.0f;  // MISTAKE far_outside
}
TANDEM_KERNEL(far_outside)

extern "C" __global__ void one_outside(float* out) {
    out[threadIdx.x + 1] = 1.0f;  // MISTAKE one_outside
}
TANDEM_KERNEL(one_outside)

extern "C" __global__ void reads_outside(float* out, const float* in) {
    out[threadIdx.x] = in[threadIdx.x * 2];  // MISTAKE reads_outside
}
TANDEM_KERNEL(reads_outside)

extern "C" __global__ void reads(float* out, const float* in) {
    out[threadIdx.x] = in[threadIdx.x];  // MISTAKE reads
}
TANDEM_KERNEL(reads)

extern "C" __global__ void misaligned(float* out) {
    *reinterpret_cast<float2*>(out + 1 + threadIdx.x * 2) = make_float2(1.0f, 2.0f);  // MISTAKE misaligned
}
TANDEM_KERNEL(misaligned)

extern "C" __global__ void past_dynamic_shared(float* out) {
    DYNAMIC_SHARED(float, values);
    values[threadIdx.x] = 1.0f;  // MISTAKE past_dynamic_shared
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
TANDEM_KERNEL(past_dynamic_shared)

extern "C" __global__ void copy_to_global(float* out, const float* in) {
    cp_async_16(out + threadIdx.x * 4, in + threadIdx.x * 4);  // MISTAKE copy_to_global
    cp_async_commit();
    cp_async_wait<0>();
}
TANDEM_KERNEL(copy_to_global)

// Half of shared memory is never written.
extern "C" __global__ void uninitialised_shared(float* out) {
    __shared__ float values[128];
    if (threadIdx.x < 64) values[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
TANDEM_KERNEL(uninitialised_shared)

// ------------------------------------------------------------------------------------------------ mistakes of a grid

extern "C" __global__ void two_blocks_one_word(float* out) {
    if (threadIdx.x == 0) out[0] = static_cast<float>(blockIdx.x);  // MISTAKE two_blocks_one_word
}
TANDEM_KERNEL(two_blocks_one_word)

extern "C" __global__ void add_without_atomic(float* out) {
    out[0] += 1.0f;  // MISTAKE add_without_atomic
}
TANDEM_KERNEL(add_without_atomic)

// Reads what another block writes.
extern "C" __global__ void reads_other_block(float* out) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 1.0f;
    __syncthreads();
    if (blockIdx.x > 0) out[i] += out[i - blockDim.x];  // MISTAKE reads_other_block
}
TANDEM_KERNEL(reads_other_block)
