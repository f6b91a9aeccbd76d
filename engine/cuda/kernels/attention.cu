// Causal attention of query rows over the paged KV of their sequences: online softmax (Milakov & Gimelshein,
// arXiv:1805.02867; tiled as in FlashAttention, arXiv:2205.14135; paged as in vLLM, arXiv:2309.06180; keys split as in
// Flash-Decoding). Launches: src/kernels/attention.rs.
//
// A work item is a tile: adjacent tokens of one sequence, times the query heads of one KV head, which are its rows.
//
// Order of additions, the same for every row whichever tile and kernel it is in: keys lie in tiles of 64 and partitions
// of 512, counted from position 0. A tile's scores come from mma.m16n8k16 over ascending values of the head; their
// maximum is that of the running softmax so far and of all visible scores of the tile; weights are rounded to bf16, and
// their sum and their products with V are mma.m16n8k16 over ascending keys (the sum by a column of ones). A partition
// begins with nothing; partitions are merged in ascending order. Where a row sees nothing of a tile or partition, its
// state stays as it is.
//
// attention_16_*: up to 16 rows a tile, for decode; bound by the bandwidth of K and V. Four warps share the rows: each
// has 16 of a tile's keys in the scores and a quarter of the head in the output, so that a block streams a tile as fast
// as cp.async brings it. Where there are few tiles, partitions are spread over blocks and attention_merge_* joins them.
//
// attention_64_*: up to 64 rows, for prompts; bound by the tensor cores and the exponential. Each warp has 16 rows, all
// share K and V in shared memory. Rows of shared memory are padded by 16 bytes: ldmatrix has no bank conflicts.
#include "device.cuh"

constexpr u32 TILE_KEYS = 64, PARTITION = 512, WARPS = 4, THREADS = WARPS * WARP;
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

// The running softmax of a row, its output apart.
struct Running {
    float most, sum;
};

// Factors for the outputs of two softmaxes that become one.
struct Factors {
    float total, part;
};

// Adds the partition `part`, which has seen a key, to `total`.
__device__ __forceinline__ Factors merge(Running& total, const Running& part) {
    float most = fmaxf(total.most, part.most);
    Factors factors{exp2f(total.most - most), exp2f(part.most - most)};
    total.sum = fmaf(part.sum, factors.part, __fmul_rn(total.sum, factors.total));
    total.most = most;
    return factors;
}

__device__ __forceinline__ float merged(float total, float part, const Factors& factors) {
    return fmaf(part, factors.part, __fmul_rn(total, factors.total));
}

// Where split partitions leave their softmaxes: outputs, then maxima and sums.
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

// D values a head; IS_TALL: 64 rows, else 16.
template <u32 D, bool IS_TALL>
struct Kernel {
    static constexpr u32 ROWS = IS_TALL ? 64 : 16, STAGES = IS_TALL || D > 96 ? 2 : 3;
    // A row in shared memory, and a stage: K, then V.
    static constexpr u32 STRIDE = D + 8, STAGE = 2 * TILE_KEYS * STRIDE;
    // Tiles of 8 keys of a warp's scores, and of 8 values of its outputs.
    static constexpr u32 SCORES = IS_TALL ? TILE_KEYS / 8 : TILE_KEYS / 8 / WARPS;
    static constexpr u32 OUTPUTS = IS_TALL ? D / 8 : (D / 8 + WARPS - 1) / WARPS;
    // Tall tiles of wide heads have no registers for operands ahead of time.
    static constexpr u32 UNROLL = IS_TALL && D > 64 ? 1 : D / 16, LOADS = IS_TALL && D > 96 ? 1 : 2;

    // A lane's part of 16 rows: rows lane / 4 and lane / 4 + 8, as mma has them.
    struct State {
        float outputs[OUTPUTS][4], sums[4], most[2];

        __device__ __forceinline__ void clear() {
#pragma unroll
            for (u32 tile = 0; tile < OUTPUTS; tile++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) outputs[tile][i] = 0.0f;
#pragma unroll
            for (u32 i = 0; i < 4; i++) sums[i] = 0.0f;
            most[0] = most[1] = NEGATIVE_INFINITY;
        }
    };

    // What the warps of a tile of 16 rows tell each other.
    struct Exchange {
        float most[WARPS][16];
        uint4 weights[WARPS][WARP];
    };

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % WARP; }
    static __device__ __forceinline__ u32 warp() { return threadIdx.x / WARP; }

    // Copies queries to shared memory, zeros for rows that the tile has not.
    static __device__ __forceinline__ void load_queries(bf16* shared, const bf16* queries, const Tile& tile,
                                                        u32 group) {
        u32 heads = gridDim.y * group;
#pragma unroll
        for (u32 i = 0; i < (ROWS * D / 8 + THREADS - 1) / THREADS; i++) {
            u32 piece = threadIdx.x + i * THREADS, row = piece / (D / 8), part = piece % (D / 8) * 8;
            if (row >= ROWS) break;
            bool is_inside = row < tile.tokens * group;
            u64 head = static_cast<u64>(tile.first_row + row / group) * heads + blockIdx.y * group + row % group;
            cp_async_16(shared + row * STRIDE + part, queries + (is_inside ? head * D + part : 0), is_inside);
        }
    }

    // Copies the 64 keys from `key` on, and their values; zeros for those that nobody sees.
    static __device__ __forceinline__ void load_keys(bf16* stage, const Arena& arena, const u32* table, u32 key,
                                                     const Range& range) {
        u32 shift = static_cast<u32>(__ffs(static_cast<int>(arena.block_tokens)) - 1);
#pragma unroll LOADS
        for (u32 i = 0; i < TILE_KEYS * (D / 8) / THREADS; i++) {
            u32 piece = threadIdx.x + i * THREADS, row = piece / (D / 8), part = piece % (D / 8) * 8;
            u32 at = key + row;
            bool is_inside = at >= range.begin && at < range.end;
            u64 from = 0;
            if (is_inside) {
                u32 slot = at & (arena.block_tokens - 1);
                from = table[at >> shift] * arena.block_values;
                from += static_cast<u64>((blockIdx.y << shift) + slot) * D + part;
            }
            cp_async_16(stage + row * STRIDE + part, arena.keys + from, is_inside);
            cp_async_16(stage + (TILE_KEYS + row) * STRIDE + part, arena.keys + arena.part_values + from, is_inside);
        }
    }

    // Scores of 16 rows of queries with this warp's keys; `keys` are the first of them.
    static __device__ __forceinline__ void score(float (&scores)[SCORES][4], const bf16* queries, const bf16* keys) {
#pragma unroll
        for (u32 tile = 0; tile < SCORES; tile++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) scores[tile][i] = 0.0f;
        u32 l = lane();
#pragma unroll UNROLL
        for (u32 d = 0; d < D; d += 16) {
            u32 a[4];
            ldmatrix_x4<false>(a, queries + l % 16 * STRIDE + d + l / 16 * 8);
#pragma unroll
            for (u32 tile = 0; tile < SCORES; tile += 2) {
                u32 b[4];
                ldmatrix_x4<false>(b, keys + (tile * 8 + l % 8 + l / 16 * 8) * STRIDE + d + l / 8 % 2 * 8);
                u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
                mma_m16n8k16(scores[tile], a, low);
                mma_m16n8k16(scores[tile + 1], a, high);
            }
        }
    }

    // Scales scores, hides those of keys that a row does not see, and gives the greatest of each of a lane's two rows.
    // `key` is that of the warp's first column, `row` the warp's first row.
    static __device__ __forceinline__ void hide(float (&scores)[SCORES][4], float (&most)[2], const Tile& tile,
                                                u32 group, u32 window, u32 row, u32 key, float scale) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 position = tile.start + (row + lane() / 4 + half * 8) / group, first = first_key(position, window);
            most[half] = NEGATIVE_INFINITY;
#pragma unroll
            for (u32 column = 0; column < SCORES; column++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 at = key + column * 8 + lane() % 4 * 2 + i;
                    float& score = scores[column][half * 2 + i];
                    score = at >= first && at <= position ? score * scale : NEGATIVE_INFINITY;
                    most[half] = fmaxf(most[half], score);
                }
            most[half] = warp_max<4>(most[half]);
        }
    }

    // Scores to weights under the new maxima `most`; scales the state to them.
    static __device__ __forceinline__ void weigh(float (&scores)[SCORES][4], State& state, const float (&most)[2]) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float now = fmaxf(state.most[half], most[half]);
            bool is_empty = now == NEGATIVE_INFINITY;
            float factor = is_empty ? 1.0f : exp2f(state.most[half] - now);
            state.most[half] = now;
#pragma unroll
            for (u32 column = 0; column < SCORES; column++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    float& score = scores[column][half * 2 + i];
                    score = is_empty ? 0.0f : exp2f(score - now);
                }
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                state.sums[half * 2 + i] *= factor;
#pragma unroll
                for (u32 tile = 0; tile < OUTPUTS; tile++) state.outputs[tile][half * 2 + i] *= factor;
            }
        }
    }

    // The weights of 16 keys as the left operand of mma.
    static __device__ __forceinline__ uint4 pack(const float (&low)[4], const float (&high)[4]) {
        return make_uint4(pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
                          pack_bf16(high[2], high[3]));
    }

    // Adds 32 keys: `weights` of the first and the second 16, `values` their V at this warp's first column.
    static __device__ __forceinline__ void gather(State& state, const uint4 (&weights)[2], const bf16* values,
                                                  u32 columns) {
        u32 a[2][4] = {{weights[0].x, weights[0].y, weights[0].z, weights[0].w},
                       {weights[1].x, weights[1].y, weights[1].z, weights[1].w}};
        u32 ones[2] = {ONES, ONES};
        mma_m16n8k16(state.sums, a[0], ones);
        mma_m16n8k16(state.sums, a[1], ones);
#pragma unroll
        for (u32 tile = 0; tile < OUTPUTS; tile++) {
            if (tile * 8 >= columns) break;
            u32 b[4];
            ldmatrix_x4<true>(b, values + lane() * STRIDE + tile * 8);
            u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            mma_m16n8k16(state.outputs[tile], a[0], low);
            mma_m16n8k16(state.outputs[tile], a[1], high);
        }
    }

    // Columns of the output that are this warp's: the first one, and how many.
    static __device__ __forceinline__ u32 first_column() { return IS_TALL ? 0 : warp() * OUTPUTS * 8; }
    static __device__ __forceinline__ u32 columns() {
        return first_column() < D ? min(OUTPUTS * 8, D - first_column()) : 0;
    }

    // One tile of keys for the 16 rows of a warp of its own.
    static __device__ __forceinline__ void step_tall(State& state, const bf16* queries, const bf16* stage,
                                                     const Tile& tile, u32 group, u32 window, u32 key, float scale) {
        u32 row = warp() * 16, rows = tile.tokens * group;
        if (row >= rows) return;
        u32 last = tile.start + min(row + 15, rows - 1) / group;
        // All hidden: behind the last row's token, or before the first one's window.
        if (key > last || key + TILE_KEYS <= first_key(tile.start + row / group, window)) return;
        float scores[SCORES][4], most[2];
        score(scores, queries + row * STRIDE, stage);
        hide(scores, most, tile, group, window, row, key, scale);
        weigh(scores, state, most);
#pragma unroll
        for (u32 half = 0; half < TILE_KEYS / 32; half++) {
            u32 first = half * 4;
            uint4 weights[2] = {pack(scores[first % SCORES], scores[(first + 1) % SCORES]),
                                pack(scores[(first + 2) % SCORES], scores[(first + 3) % SCORES])};
            gather(state, weights, stage + (TILE_KEYS + half * 32) * STRIDE, D);
        }
    }

    // One tile of keys for 16 rows that four warps share.
    static __device__ __forceinline__ void step_shared(State& state, Exchange& exchange, const bf16* queries,
                                                       const bf16* stage, const Tile& tile, u32 group, u32 window,
                                                       u32 key, float scale) {
        u32 own = warp() * 16, row = lane() / 4;
        float scores[SCORES][4], most[2];
        score(scores, queries, stage + own * STRIDE);
        hide(scores, most, tile, group, window, 0, key + own, scale);
        if (lane() % 4 == 0) exchange.most[warp()][row] = most[0], exchange.most[warp()][row + 8] = most[1];
        __syncthreads();
#pragma unroll
        for (u32 other = 0; other < WARPS; other++) {
            most[0] = fmaxf(most[0], exchange.most[other][row]);
            most[1] = fmaxf(most[1], exchange.most[other][row + 8]);
        }
        weigh(scores, state, most);
        exchange.weights[warp()][lane()] = pack(scores[0], scores[1]);
        __syncthreads();
#pragma unroll
        for (u32 half = 0; half < TILE_KEYS / 32; half++) {
            uint4 weights[2] = {exchange.weights[half * 2][lane()], exchange.weights[half * 2 + 1][lane()]};
            gather(state, weights, stage + (TILE_KEYS + half * 32) * STRIDE + first_column(), columns());
        }
    }

    // The partition in `state` joins `total`.
    static __device__ __forceinline__ void join(State& total, const State& state) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            if (state.most[half] == NEGATIVE_INFINITY) continue;
            Running running{total.most[half], total.sums[half * 2]};
            Factors factors = merge(running, Running{state.most[half], state.sums[half * 2]});
            total.most[half] = running.most, total.sums[half * 2] = running.sum;
#pragma unroll
            for (u32 tile = 0; tile < OUTPUTS; tile++)
#pragma unroll
                for (u32 i = half * 2; i < half * 2 + 2; i++)
                    total.outputs[tile][i] = merged(total.outputs[tile][i], state.outputs[tile][i], factors);
        }
    }

    // The partition in `state` goes to memory.
    static __device__ __forceinline__ void keep(const Partials& partials, const State& state, u32 partition, u32 rows) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 row = lane() / 4 + half * 8;
            if (row >= rows) continue;
            u64 index = partials.index(partition, row);
            if (threadIdx.x % 4 == 0 && warp() == 0)
                partials.running[index] = make_float2(state.most[half], state.sums[half * 2]);
#pragma unroll
            for (u32 tile = 0; tile < OUTPUTS; tile++)
                if (tile * 8 < columns()) {
                    float* at = partials.outputs + index * D + first_column() + tile * 8 + lane() % 4 * 2;
                    float2 pair = make_float2(state.outputs[tile][half * 2], state.outputs[tile][half * 2 + 1]);
                    *reinterpret_cast<float2*>(at) = pair;
                }
        }
    }

    static __device__ __forceinline__ void store(bf16* out, const State& total, const Tile& tile, u32 group) {
        u32 heads = gridDim.y * group, first = IS_TALL ? warp() * 16 : 0;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 row = first + lane() / 4 + half * 8;
            if (row >= tile.tokens * group) continue;
            u64 head = static_cast<u64>(tile.first_row + row / group) * heads + blockIdx.y * group + row % group;
            float inverse = 1.0f / total.sums[half * 2];
#pragma unroll
            for (u32 column = 0; column < OUTPUTS; column++)
                if (column * 8 < columns()) {
                    bf16* at = out + head * D + first_column() + column * 8 + lane() % 4 * 2;
                    const float (&values)[4] = total.outputs[column];
                    *reinterpret_cast<u32*>(at) = pack_bf16(values[half * 2] * inverse, values[half * 2 + 1] * inverse);
                }
        }
    }

    static __device__ __forceinline__ void run(bf16* out, const bf16* queries, const Arena& arena, const u32* tables,
                                               u32 table_blocks, const Tile* tiles, u32 group, u32 window, float scale,
                                               float* memory, u32 partitions, u32 tile_tokens) {
        DYNAMIC_SHARED(bf16, shared);
        __shared__ Exchange exchange;
        Tile tile = tiles[blockIdx.x];
        if (tile.tokens == 0) return;
        const u32* table = tables + static_cast<u64>(tile.table) * table_blocks;
        bf16* stages = shared + ROWS * STRIDE;
        Range range = visible(tile, window);
        bool is_split = !IS_TALL && memory != nullptr;
        Partials partials(memory, D, partitions, tile_tokens * group);
        State state, total;
        total.clear();
        // The copies of the queries are in the first group of those of the keys.
        load_queries(shared, queries, tile, group);
        for (u32 first = range.first_partition() + blockIdx.z; first < range.end_partition(); first += gridDim.z) {
            // One partition, or all of them.
            u32 end = min(is_split ? (first + 1) * PARTITION : range.end, range.end);
            u32 begin = max(first * PARTITION, range.begin) / TILE_KEYS * TILE_KEYS;
            u32 steps = (end - begin + TILE_KEYS - 1) / TILE_KEYS;
            state.clear();
#pragma unroll
            for (u32 stage = 0; stage + 1 < STAGES; stage++) {
                if (stage < steps) load_keys(stages + stage * STAGE, arena, table, begin + stage * TILE_KEYS, range);
                cp_async_commit();
            }
            for (u32 step = 0; step < steps; step++) {
                cp_async_wait<STAGES - 2>();
                // The stage that is loaded now is the one that all warps have just left.
                __syncthreads();
                u32 ahead = step + STAGES - 1, key = begin + step * TILE_KEYS;
                if (ahead < steps)
                    load_keys(stages + ahead % STAGES * STAGE, arena, table, begin + ahead * TILE_KEYS, range);
                cp_async_commit();
                const bf16* stage = stages + step % STAGES * STAGE;
                if (IS_TALL)
                    step_tall(state, shared, stage, tile, group, window, key, scale);
                else
                    step_shared(state, exchange, shared, stage, tile, group, window, key, scale);
                if ((key + TILE_KEYS) % PARTITION == 0 || step + 1 == steps) {
                    if (is_split)
                        keep(partials, state, first, tile.tokens * group);
                    else
                        join(total, state);
                    state.clear();
                }
            }
            if (!is_split) break;
            __syncthreads();
        }
        if (!is_split) store(out, total, tile, group);
    }
};

// Joins split partitions: a warp has a query row, lane l its values l, l + 32, ...
template <u32 D>
__device__ __forceinline__ void merge_partitions(bf16* out, float* memory, const Tile* tiles, u32 group, u32 window,
                                                 u32 partitions, u32 tile_tokens) {
    constexpr u32 VALUES = (D + WARP - 1) / WARP;
    Tile tile = tiles[blockIdx.x];
    u32 row = blockIdx.z * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= tile.tokens * group) return;
    Partials partials(memory, D, partitions, tile_tokens * group);
    Range range = visible(tile, window);
    Running total{NEGATIVE_INFINITY, 0.0f};
    float values[VALUES];
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) values[i] = 0.0f;
    for (u32 partition = range.first_partition(); partition < range.end_partition(); partition++) {
        u64 index = partials.index(partition, row);
        float2 part = partials.running[index];
        if (part.x == NEGATIVE_INFINITY) continue;
        Factors factors = merge(total, Running{part.x, part.y});
#pragma unroll
        for (u32 i = 0; i < VALUES; i++) {
            u32 at = lane + i * WARP;
            if (at < D) values[i] = merged(values[i], partials.outputs[index * D + at], factors);
        }
    }
    float inverse = 1.0f / total.sum;
    u64 head = static_cast<u64>(tile.first_row + row / group) * gridDim.y * group + blockIdx.y * group + row % group;
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) {
        u32 at = lane + i * WARP;
        if (at < D) out[head * D + at] = to_bf16(values[i] * inverse);
    }
}

#define ATTENTION(NAME, D, IS_TALL)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, IS_TALL ? 2 : 4)                                          \
        NAME(bf16* out, const bf16* queries, const bf16* keys, u64 block_values, u32 part_values, u32 block_tokens, \
             const u32* tables, u32 table_blocks, const Tile* tiles, u32 group, u32 window, float scale,            \
             float* partials, u32 partitions, u32 tile_tokens) {                                                    \
        follow_launches_before();                                                                                   \
        Arena arena{keys, block_values, part_values, block_tokens};                                                 \
        Kernel<D, IS_TALL>::run(out, queries, arena, tables, table_blocks, tiles, group, window, scale, partials,   \
                                partitions, tile_tokens);                                                           \
    }

#define MERGE(NAME, D)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        NAME(bf16* out, float* partials, const Tile* tiles, u32 group, u32 window, u32 partitions, u32 tile_tokens) { \
        follow_launches_before();                                                                                     \
        merge_partitions<D>(out, partials, tiles, group, window, partitions, tile_tokens);                            \
    }

ATTENTION(attention_16_d16, 16, false)
TANDEM_KERNEL(attention_16_d16)
ATTENTION(attention_64_d16, 16, true)
TANDEM_KERNEL(attention_64_d16)
MERGE(attention_merge_d16, 16)
TANDEM_KERNEL(attention_merge_d16)
ATTENTION(attention_16_d32, 32, false)
TANDEM_KERNEL(attention_16_d32)
ATTENTION(attention_64_d32, 32, true)
TANDEM_KERNEL(attention_64_d32)
MERGE(attention_merge_d32, 32)
TANDEM_KERNEL(attention_merge_d32)
ATTENTION(attention_16_d64, 64, false)
TANDEM_KERNEL(attention_16_d64)
ATTENTION(attention_64_d64, 64, true)
TANDEM_KERNEL(attention_64_d64)
MERGE(attention_merge_d64, 64)
TANDEM_KERNEL(attention_merge_d64)
ATTENTION(attention_16_d96, 96, false)
TANDEM_KERNEL(attention_16_d96)
ATTENTION(attention_64_d96, 96, true)
TANDEM_KERNEL(attention_64_d96)
MERGE(attention_merge_d96, 96)
TANDEM_KERNEL(attention_merge_d96)
ATTENTION(attention_16_d128, 128, false)
TANDEM_KERNEL(attention_16_d128)
ATTENTION(attention_64_d128, 128, true)
TANDEM_KERNEL(attention_64_d128)
MERGE(attention_merge_d128, 128)
TANDEM_KERNEL(attention_merge_d128)
