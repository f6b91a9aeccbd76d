// Between the product of Q, K and V and attention: bias, norms of heads (Qwen3), rotary embedding (RoFormer,
// arXiv:2104.09864), queries to bf16, K and V to their places in the paged arena. Launch: src/kernels/qkv.rs.
//
// Bound by memory: each value is read once and written once. A warp has a head of a row; lane l has the pairs of
// neighbours l, l + 32, ... so that a warp's accesses are adjacent. The arena is [block][layer][K, V][kv_head][token]
// [head_dim]: what a warp writes is one run of head_dim values.
#include "device.cuh"

// Pairs of a lane at most: heads of up to 256 values.
constexpr u32 MOST_PAIRS = 4;

extern "C" __global__ void __launch_bounds__(128)
    qkv_to_cache(const float* qkv, bf16* queries, bf16* arena, u64 block_values, u32 part_values, u32 block_tokens,
                 const float* bias, const float* head_norm, float eps, const float2* rotations, const u32* positions,
                 const uint2* places, u32 heads, u32 kv_heads, u32 head_dim) {
    follow_launches_before();
    u32 row = blockIdx.x, lane = threadIdx.x % WARP;
    u32 head = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP;
    u32 all_heads = heads + 2 * kv_heads, pairs = head_dim / 2;
    if (head >= all_heads) return;
    u64 from = (static_cast<u64>(row) * all_heads + head) * pairs;
    const float2* source = reinterpret_cast<const float2*>(qkv) + from;
    const float2* biases = reinterpret_cast<const float2*>(bias) + static_cast<u64>(head) * pairs;
    float2 x[MOST_PAIRS];
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < MOST_PAIRS; i++) {
        u32 pair = lane + i * WARP;
        x[i] = pair < pairs ? source[pair] : make_float2(0.0f, 0.0f);
        if (bias != nullptr && pair < pairs) x[i].x += biases[pair].x, x[i].y += biases[pair].y;
        squares = fmaf(x[i].x, x[i].x, squares), squares = fmaf(x[i].y, x[i].y, squares);
    }
    bool is_value = head >= heads + kv_heads;
    if (head_norm != nullptr && !is_value) {
        const float2* weights = reinterpret_cast<const float2*>(head_norm) + static_cast<u64>(head) * pairs;
        float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
#pragma unroll
        for (u32 i = 0; i < MOST_PAIRS; i++) {
            u32 pair = lane + i * WARP;
            if (pair < pairs) x[i].x *= scale * weights[pair].x, x[i].y *= scale * weights[pair].y;
        }
    }
    u32* target = reinterpret_cast<u32*>(queries) + (static_cast<u64>(row) * heads + head) * pairs;
    if (head >= heads) {
        u32 kv_head = (head - heads) % kv_heads;
        uint2 place = places[row];
        u64 at = place.x * block_values + (is_value ? part_values : 0);
        at += (static_cast<u64>(kv_head) * block_tokens + place.y) * head_dim;
        target = reinterpret_cast<u32*>(arena) + at / 2;
    }
    const float2* turns = rotations + static_cast<u64>(positions[row]) * pairs;
#pragma unroll
    for (u32 i = 0; i < MOST_PAIRS; i++) {
        u32 pair = lane + i * WARP;
        if (pair >= pairs) continue;
        float2 turned = x[i];
        if (!is_value) {
            float2 turn = turns[pair];
            turned.x = fmaf(x[i].x, turn.x, -__fmul_rn(x[i].y, turn.y));
            turned.y = fmaf(x[i].x, turn.y, __fmul_rn(x[i].y, turn.x));
        }
        target[pair] = pack_bf16(turned.x, turned.y);
    }
}
TANDEM_KERNEL(qkv_to_cache)
