// What the kernels of attention.cu compute with: tiles of queries, partitions of keys and how they become one, and
// where those of a split go.
#pragma once
#include "device.cuh"

constexpr u32 TILE_KEYS = 64, PARTITION = 256;
// How far a score may lie above its row's reference.
constexpr float SLACK = 8.0f;
// Two bf16 ones.
constexpr u32 ONES = 0x3f803f80u;

// As `Tile` in attention.rs.
struct Tile {
    u32 first_row, tokens, table, start;
};

// K and V of a layer: see `Arena` in qkv.rs.
struct Arena {
    const bf16* keys;
    u64 block_values;
    u32 part_values, block_tokens;
};

// Keys that somebody in a tile sees.
struct Range {
    u32 begin, end;
    __device__ __forceinline__ u32 first_partition() const { return begin / PARTITION; }
    __device__ __forceinline__ u32 end_partition() const { return (end + PARTITION - 1) / PARTITION; }
};

// The first key that the token at `position` sees; no window is 0.
__device__ __forceinline__ u32 first_key(u32 position, u32 window) {
    return window == 0 || position < window ? 0 : position + 1 - window;
}

__device__ __forceinline__ Range visible(const Tile& tile, u32 window) {
    return Range{first_key(tile.start, window), tile.start + tile.tokens};
}

// Moves a row's reference `most` where `seen`, the greatest of more scores, lies far above it (-inf: there are none).
// Gives the factor for what was summed before.
__device__ __forceinline__ float raise(float& most, float seen) {
    bool moves = seen > most + SLACK;
    // Nothing was summed before the first.
    float factor = moves && most != NEGATIVE_INFINITY ? exp2_fast(most - seen) : 1.0f;
    most = moves ? seen : most;
    return factor;
}

// The softmax of a row so far, its output apart: the reference of its weights, and their sum.
struct Running {
    float most, sum;
};

// Factors for the outputs of two softmaxes that become one.
struct Factors {
    float total, part;
};

// Adds the partition `part` to `total`.
__device__ __forceinline__ Factors merge(Running& total, const Running& part) {
    Factors factors;
    factors.total = raise(total.most, part.most);
    factors.part = part.most == NEGATIVE_INFINITY ? 0.0f : exp2_fast(part.most - total.most);
    total.sum = fmaf(part.sum, factors.part, __fmul_rn(total.sum, factors.total));
    return factors;
}

__device__ __forceinline__ float merged(float total, float part, const Factors& factors) {
    return fmaf(part, factors.part, __fmul_rn(total, factors.total));
}

// Where split partitions leave their softmaxes: outputs, then references and sums.
struct Partials {
    float* outputs;
    float2* running;
    u32 partitions, rows;

    __device__ __forceinline__ Partials(float* memory, u32 head_dim, u32 partitions, u32 rows)
        : outputs(memory), partitions(partitions), rows(rows) {
        u64 all = static_cast<u64>(gridDim.x) * gridDim.y * partitions * rows;
        running = reinterpret_cast<float2*>(memory + all * head_dim);
    }
    // Of the query row `row` of this block's tile and KV head.
    __device__ __forceinline__ u64 index(u32 partition, u32 row) const {
        return ((static_cast<u64>(blockIdx.x) * gridDim.y + blockIdx.y) * partitions + partition) * rows + row;
    }
};

// What every thread of a block knows of its work.
struct Work {
    bf16* out;
    const bf16* queries;
    Arena arena;
    const u32* table;
    Tile tile;
    Range range;
    u32 group, window;
    // Of scores, to those of base 2.
    float scale;

    __device__ __forceinline__ u32 rows() const { return tile.tokens * group; }
    // Where the values of a row's head begin, in queries and out.
    __device__ __forceinline__ u64 head(u32 row, u32 head_dim) const {
        u64 token = tile.first_row + row / group;
        return (token * gridDim.y * group + blockIdx.y * group + row % group) * head_dim;
    }
};
