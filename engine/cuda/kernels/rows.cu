// What happens to single rows of the residual stream: token embedding, RMS norm, and the check for values that are no
// numbers. Launches: src/kernels/rows.rs.
//
// Bound by memory: each reads and writes its rows once, 16 bytes a thread and access, all of a warp's adjacent. A norm
// reads its row a second time, from the L1 cache. One block has a row, and the order of a row's additions follows from
// its width alone.
#include "device.cuh"

// As `Outcome` in src/kernels/choose.rs.
struct Outcome {
    u32 token;
    float logprob;
    u32 status;
    u32 pad;
};

// hidden[row] = table[token]: f32 from bf16. `from` may be null; where it is not u32's greatest, the row's token is the
// one that an earlier step chose.
extern "C" __global__ void __launch_bounds__(256)
    embed(float* hidden, const bf16* table, const u32* tokens, const u32* from, const Outcome* chosen, u32 choices,
          u32 width, u32 vocabulary) {
    follow_launches_before();
    u32 row = blockIdx.x;
    u32 token = tokens[row];
    if (from != nullptr && from[row] != 0xffffffffu) token = from[row] < choices ? chosen[from[row]].token : 0;
    // Never beyond the table, whatever a broken step before left.
    if (token >= vocabulary) token = 0;
    const uint4* source = reinterpret_cast<const uint4*>(table + static_cast<u64>(token) * width);
    float4* target = reinterpret_cast<float4*>(hidden + static_cast<u64>(row) * width);
    for (u32 i = threadIdx.x; i < width / 8; i += blockDim.x) {
        float values[8];
        unpack8(values, source[i]);
        target[2 * i] = make_float4(values[0], values[1], values[2], values[3]);
        target[2 * i + 1] = make_float4(values[4], values[5], values[6], values[7]);
    }
}
TANDEM_KERNEL(embed)

// out[row] = hidden[of[row]] / sqrt(mean of squares + eps) * weight; `of` may be null.
extern "C" __global__ void __launch_bounds__(256) rms_norm(bf16* out, const float* hidden, const float* weight,
                                                           const u32* of, u32 hidden_rows, u32 width, float eps) {
    __shared__ float parts[8];
    follow_launches_before();
    u32 row = of == nullptr ? blockIdx.x : of[blockIdx.x];
    if (row >= hidden_rows) row = hidden_rows - 1;
    const float4* source = reinterpret_cast<const float4*>(hidden + static_cast<u64>(row) * width);
    const float4* weights = reinterpret_cast<const float4*>(weight);
    uint2* target = reinterpret_cast<uint2*>(out + static_cast<u64>(blockIdx.x) * width);
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width / 4; i += blockDim.x) {
        float4 x = source[i];
        squares = fmaf(x.x, x.x, squares), squares = fmaf(x.y, x.y, squares);
        squares = fmaf(x.z, x.z, squares), squares = fmaf(x.w, x.w, squares);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = squares;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (u32 warp = 0; warp < 8; warp++) sum += parts[warp];
    float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
    for (u32 i = threadIdx.x; i < width / 4; i += blockDim.x) {
        float4 x = source[i], w = weights[i];
        target[i] = make_uint2(pack_bf16(x.x * scale * w.x, x.y * scale * w.y),
                               pack_bf16(x.z * scale * w.z, x.w * scale * w.w));
    }
}
TANDEM_KERNEL(rms_norm)

__device__ __forceinline__ bool is_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// unsound[row] = one of the row's values is not finite.
extern "C" __global__ void __launch_bounds__(256) check_rows(u32* unsound, const float* hidden, u32 width) {
    __shared__ u32 parts[8];
    follow_launches_before();
    const float4* source = reinterpret_cast<const float4*>(hidden + static_cast<u64>(blockIdx.x) * width);
    u32 found = 0;
    for (u32 i = threadIdx.x; i < width / 4; i += blockDim.x) {
        float4 x = source[i];
        if (!(is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w))) found = 1;
    }
    found = warp_sum_u32(found);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = found;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 warp = 1; warp < blockDim.x / WARP; warp++) found += parts[warp];
        unsound[blockIdx.x] = found > 0 ? 1 : 0;
    }
}
TANDEM_KERNEL(check_rows)
