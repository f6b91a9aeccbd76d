// Causal attention of query rows over the paged KV of their sequences: online softmax (Milakov & Gimelshein,
// arXiv:1805.02867; tiled as in FlashAttention, arXiv:2205.14135; paged as in vLLM, arXiv:2309.06180; keys split as in
// Flash-Decoding). Launches: src/kernels/attention.rs.
//
// A work item is a tile: adjacent tokens of one sequence, times the query heads of one KV head, which are its rows.
//
// Order of additions, the same for every row whichever tile and kernel it is in: keys lie in tiles of 64 and partitions
// of 256, counted from position 0. A tile's scores are mma.m16n8k16 over ascending values of the head. A row's weights
// are 2^(scaled score - reference), rounded to bf16; the reference is the greatest visible score of the partition's
// first tile that has one, and moves to a later tile's greatest where that lies more than 8 above (FlashAttention-4's
// rule: what was summed is rarely scaled). The weights' sum and their products with V are mma.m16n8k16 over ascending
// keys (the sum by a column of ones). A partition begins with nothing; partitions are merged in ascending order, with
// references by the same rule. Where a row sees nothing of a tile or partition, its state stays as it is.
//
// attention_16_*: up to 16 rows a tile, for decode; bound by the bandwidth of K and V. Four warps share the rows. Keys
// come 128 at a time: each warp has the scores of 32 of them, and then a quarter of the head's output. While weights
// are computed the next keys are on their way, then the next values; three blocks fit a multiprocessor. Where there are
// few tiles, partitions are spread over blocks and attention_merge_* joins them.
//
// attention_128_*: up to 128 rows, for prompts; bound by the tensor cores. Two warpgroups have 64 rows each and share K
// and V. The products are wgmma on Hopper, and go on beside the softmax: this tile's output is computed while the next
// tile's weights are. A row keeps two states in registers, the partition's and the total: 128 of them a thread where
// heads are of 128, which wgmma leaves room for. (H200, 32 heads of 128, 2,048 tokens from position 6,144: 0.65 ms, 372
// TFLOP/s, where mma.sync in tiles of 64 rows took 1.78 ms.)
//
// Long because both families of kernels share one order of additions: apart they could drift from it.
#include "attention.cuh"

// Copies: D values a row, into panels of ROWS rows, by THREADS threads.
template <u32 D, u32 ROWS, u32 THREADS>
struct Copy {
    // Pieces of 8 values of a row; a thread copies a piece of each STEP-th row where that comes out even.
    static constexpr u32 PIECES = D / 8, STEP = THREADS % PIECES == 0 ? THREADS / PIECES : 0;

    static __device__ __forceinline__ u32 row_of(u32 i) {
        return STEP ? threadIdx.x / PIECES + i * STEP : (threadIdx.x + i * THREADS) / PIECES;
    }
    static __device__ __forceinline__ u32 piece_of(u32 i) {
        return STEP ? threadIdx.x % PIECES : (threadIdx.x + i * THREADS) % PIECES;
    }

    // Queries of a tile, zeros for rows that it has not.
    static __device__ __forceinline__ void queries(bf16* to, const Work& work) {
#pragma unroll
        for (u32 i = 0; i < (ROWS * PIECES + THREADS - 1) / THREADS; i++) {
            u32 row = row_of(i), piece = piece_of(i);
            if (row >= ROWS) break;
            bool is_inside = row < work.rows();
            u64 from = is_inside ? work.head(row, D) + piece * 8 : 0;
            cp_async_16(to + in_panels<ROWS>(row, piece), work.queries + from, is_inside);
        }
    }

    // Where its piece of such a row goes.
    static __device__ __forceinline__ u32 place(u32 to_row, u32 i) {
        // The order of pieces is that of every eighth row.
        if (STEP % 8 == 0 && STEP > 0) return in_panels<ROWS>(to_row + row_of(0), piece_of(0)) + i * STEP * 64;
        return in_panels<ROWS>(to_row + row_of(i), piece_of(i));
    }

    // The 64 keys from `key` on, or their values where `part` is that of values, into rows from `to_row` on; zeros for
    // those that nobody sees.
    static __device__ __forceinline__ void keys(bf16* to, u32 to_row, const bf16* part, const Work& work, u32 key) {
        constexpr u32 COPIES = (TILE_KEYS * PIECES + THREADS - 1) / THREADS;
        const Arena& arena = work.arena;
        const Range& range = work.range;
        u32 shift = static_cast<u32>(__ffs(static_cast<int>(arena.block_tokens)) - 1), slots = arena.block_tokens - 1;
        if (arena.block_tokens >= TILE_KEYS) {
            // All in one block, and those of adjacent threads are adjacent.
            u32 block = work.table[min(max(key, range.begin), range.end - 1) >> shift];
            const bf16* from = part + block * arena.block_values;
            from += ((blockIdx.y << shift) + (key & slots)) * D + threadIdx.x * 8;
#pragma unroll
            for (u32 i = 0; i < COPIES; i++) {
                if (is_past(i)) break;
                bool is_inside = key + row_of(i) - range.begin < range.end - range.begin;
                cp_async_16(to + place(to_row, i), from + i * THREADS * 8, is_inside);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < COPIES; i++) {
                if (is_past(i)) break;
                u32 at = key + row_of(i);
                bool is_inside = at - range.begin < range.end - range.begin;
                u32 block = work.table[(is_inside ? at : range.begin) >> shift];
                const bf16* from = part + block * arena.block_values;
                from += ((blockIdx.y << shift) + (at & slots)) * D + piece_of(i) * 8;
                cp_async_16(to + place(to_row, i), from, is_inside);
            }
        }
    }

    // Whether there are more threads than pieces of 64 rows.
    static __device__ __forceinline__ bool is_past(u32 i) {
        return TILE_KEYS * PIECES % THREADS != 0 && row_of(i) >= TILE_KEYS;
    }
};

// Which of a lane's two rows, lane / 4 and lane / 4 + 8 of a warp's 16, sees which keys.
struct Sight {
    u32 position[2], first[2];

    __device__ __forceinline__ Sight(const Work& work, u32 row) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            position[half] = work.tile.start + (row + threadIdx.x % WARP / 4 + half * 8) / work.group;
            first[half] = first_key(position[half], work.window);
        }
    }
    // Hides scores of keys that a row does not see; `key` is that of the first column.
    template <u32 COLUMNS>
    __device__ __forceinline__ void hide(float (&scores)[COLUMNS][4], u32 key) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++)
#pragma unroll
            for (u32 column = 0; column < COLUMNS; column++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    u32 at = key + column * 8 + threadIdx.x % 4 * 2 + i;
                    float& score = scores[column][half * 2 + i];
                    if (at < first[half] || at > position[half]) score = NEGATIVE_INFINITY;
                }
    }
};

// The greatest scaled score of a lane's row.
template <u32 COLUMNS>
__device__ __forceinline__ float greatest(const float (&scores)[COLUMNS][4], u32 half, float scale) {
    float most[COLUMNS];
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++)
        most[column] = fmaxf(scores[column][half * 2], scores[column][half * 2 + 1]);
#pragma unroll
    for (u32 distance = COLUMNS / 2; distance > 0; distance /= 2)
#pragma unroll
        for (u32 column = 0; column < distance; column++) most[column] = fmaxf(most[column], most[column + distance]);
    // Scaled last: rounding keeps the order.
    return warp_max<4>(most[0]) * scale;
}

// Scores to weights, in place.
template <u32 COLUMNS>
__device__ __forceinline__ void weigh(float (&scores)[COLUMNS][4], u32 half, float most, float scale) {
    // Where there is nothing all scores are -inf.
    float reference = most == NEGATIVE_INFINITY ? 0.0f : most;
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++)
#pragma unroll
        for (u32 i = half * 2; i < half * 2 + 2; i++)
            scores[column][i] = exp2_fast(fmaf(scores[column][i], scale, -reference));
}

// The weights of 16 keys as the left operand of mma.
__device__ __forceinline__ void pack(u32 (&packed)[4], const float (&low)[4], const float (&high)[4]) {
    packed[0] = pack_bf16(low[0], low[1]), packed[1] = pack_bf16(low[2], low[3]);
    packed[2] = pack_bf16(high[0], high[1]), packed[3] = pack_bf16(high[2], high[3]);
}

// A lane's part of the softmax of 16 rows: rows lane / 4 and lane / 4 + 8, as mma has them.
template <u32 TILES>
struct State {
    float outputs[TILES][4], sums[4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) outputs[tile][i] = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; i++) sums[i] = 0.0f;
    }

    __device__ __forceinline__ void scale(const float (&factors)[2]) {
        // A factor of 1 changes nothing.
        if (!__any_sync(ALL_LANES, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            sums[i] *= factors[i / 2];
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) outputs[tile][i] *= factors[i / 2];
        }
    }

    // Adds 16 weights of each row to the sums.
    __device__ __forceinline__ void count(const u32 (&weights)[4]) {
        u32 ones[2] = {ONES, ONES};
        mma_m16n8k16(sums, weights, ones);
    }

    // The partition `part`, whose references are `part_most`, joins this state of `most`.
    __device__ __forceinline__ void join(float (&most)[2], const State& part, const float (&part_most)[2]) {
        Factors factors[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            Running running{most[half], sums[half * 2]};
            factors[half] = merge(running, Running{part_most[half], part.sums[half * 2]});
            most[half] = running.most, sums[half * 2] = running.sum;
        }
        bool moves = __any_sync(ALL_LANES, factors[0].total != 1.0f || factors[1].total != 1.0f);
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (moves) outputs[tile][i] *= factors[i / 2].total;
                outputs[tile][i] = fmaf(part.outputs[tile][i], factors[i / 2].part, outputs[tile][i]);
            }
    }

    // Stores the rows of a warp from `row` on, `columns` of them from `column` on.
    __device__ __forceinline__ void store(const Work& work, u32 row, u32 column, u32 columns, u32 head_dim) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 own = row + threadIdx.x % WARP / 4 + half * 8;
            if (own >= work.rows()) continue;
            bf16* at = work.out + work.head(own, head_dim) + column + threadIdx.x % 4 * 2;
            float inverse = 1.0f / sums[half * 2];
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++)
                if (tile * 8 < columns) {
                    const float (&values)[4] = outputs[tile];
                    u32 packed = pack_bf16(values[half * 2] * inverse, values[half * 2 + 1] * inverse);
                    *reinterpret_cast<u32*>(at + tile * 8) = packed;
                }
        }
    }
};

// Up to 128 rows of heads of D values.
template <u32 D>
struct Prompt {
    static constexpr u32 ROWS = 128, THREADS = 256, PANELS = (D + 63) / 64;
    // Values of shared memory: queries, then two tiles of keys, then two of values.
    static constexpr u32 QUERIES = PANELS * ROWS * 64, STAGE = PANELS * TILE_KEYS * 64;
    using Rows = State<D / 8>;

    bf16* shared;
    const Work& work;
    const Sight sight;
    // Positions of the first and last row of the warp see all keys of a tile from `low` on and up to `high`.
    u32 low, high, row, begin, steps;
    bool is_idle;
    Rows state, total;
    // References of the partition, and of those before.
    float most[2], total_most[2];
    // Weights of the tile whose values come next.
    u32 weights[4][4];

    __device__ __forceinline__ Prompt(bf16* shared, const Work& work, u32 row)
        : shared(shared), work(work), sight(work, row), row(row) {
        low = first_key(work.tile.start + (row + 15) / work.group, work.window);
        high = work.tile.start + row / work.group;
        begin = work.range.begin / TILE_KEYS * TILE_KEYS;
        steps = (work.range.end - begin + TILE_KEYS - 1) / TILE_KEYS;
        is_idle = row / 64 * 64 >= work.rows();
        state.clear();
        total.clear();
        most[0] = most[1] = total_most[0] = total_most[1] = NEGATIVE_INFINITY;
    }

    __device__ __forceinline__ bf16* keys(u32 step) const { return shared + QUERIES + step % 2 * STAGE; }
    __device__ __forceinline__ bf16* values(u32 step) const { return keys(step) + 2 * STAGE; }

    // Copies the keys of a step and the values of the one before.
    __device__ __forceinline__ void load(u32 step) const {
        using Tiles = Copy<D, TILE_KEYS, THREADS>;
        const bf16* part = work.arena.keys;
        if (step < steps) Tiles::keys(keys(step), 0, part, work, begin + step * TILE_KEYS);
        part += work.arena.part_values;
        if (step > 0 && step <= steps) Tiles::keys(values(step - 1), 0, part, work, begin + (step - 1) * TILE_KEYS);
        cp_async_commit();
    }

    __device__ __forceinline__ void score(float (&scores)[8][4], u32 step) const {
        warpgroup_scores<D, ROWS>(scores, shared + row / 64 * 64 * 64, keys(step));
        warpgroup_commit();
    }

    // Scores of a step to weights; `factors` are for what was summed before, where that is of the same partition.
    __device__ __forceinline__ void soften(float (&scores)[8][4], u32 step, float (&factors)[2]) {
        u32 key = begin + step * TILE_KEYS;
        if (key < low || key + TILE_KEYS > high + 1) sight.hide(scores, key);
        if (key % PARTITION == 0) most[0] = most[1] = NEGATIVE_INFINITY;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            factors[half] = raise(most[half], greatest(scores, half, work.scale));
            weigh(scores, half, most[half], work.scale);
        }
    }

    __device__ __forceinline__ void pack_all(const float (&scores)[8][4]) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) pack(weights[k], scores[k * 2], scores[k * 2 + 1]);
    }

    // Adds the values of a step, and finds the weights of the next, if there is one.
    template <bool HAS_NEXT>
    __device__ __forceinline__ void advance(u32 step) {
        cp_async_wait<0>();
        warpgroup_publish();
        // The stages that are loaded now are those that all warps have just left.
        __syncthreads();
        if ((!WARPGROUP_IS_ASYNC || is_idle) && HAS_NEXT) load(step + 2);
        if (is_idle) return;
        float scores[8][4], factors[2], before[2] = {most[0], most[1]};
        warpgroup_fence();
        if (WARPGROUP_IS_ASYNC && HAS_NEXT) score(scores, step + 1);
        warpgroup_values(state.outputs, weights, values(step));
        warpgroup_commit();
        if (WARPGROUP_IS_ASYNC && HAS_NEXT) load(step + 2);
        // Where products are complete at once there are fewer registers.
        if (!WARPGROUP_IS_ASYNC && HAS_NEXT) score(scores, step + 1);
        if (HAS_NEXT) {
            warpgroup_wait<1>(scores);
            soften(scores, step + 1, factors);
        }
        warpgroup_wait<0>(state.outputs);
        // Among the products of the warpgroup these would hold them up: a tenth of the time.
#pragma unroll
        for (u32 k = 0; k < 4; k++) state.count(weights[k]);
        if (!HAS_NEXT || (begin + (step + 1) * TILE_KEYS) % PARTITION == 0) {
            total.join(total_most, state, before);
            state.clear();
        } else {
            state.scale(factors);
        }
        // Not before the products with those of this step are there.
        if (HAS_NEXT) pack_all(scores);
    }

    __device__ __forceinline__ void run() {
        Copy<D, ROWS, THREADS>::queries(shared, work);
        load(0);
        load(1);
        cp_async_wait<1>();
        warpgroup_publish();
        __syncthreads();
        if (!is_idle) {
            float scores[8][4], factors[2];
            warpgroup_fence();
            score(scores, 0);
            warpgroup_wait<0>(scores);
            soften(scores, 0, factors);
            pack_all(scores);
        }
        for (u32 step = 0; step + 1 < steps; step++) advance<true>(step);
        advance<false>(steps - 1);
        if (!is_idle) total.store(work, row, 0, D, D);
    }
};

// Up to 16 rows of heads of D values.
template <u32 D>
struct Decode {
    static constexpr u32 ROWS = 16, WARPS = 4, THREADS = WARPS * WARP, PANELS = (D + 63) / 64;
    // Keys at a time, those of a warp, and a warp's tiles of 8 columns of the output.
    static constexpr u32 KEYS = 128, OWN = KEYS / WARPS, OUTPUTS = (D / 8 + WARPS - 1) / WARPS;
    // Values of shared memory: queries, keys, values.
    static constexpr u32 QUERIES = PANELS * ROWS * 64, STAGE = PANELS * KEYS * 64;
    using Columns = State<OUTPUTS>;

    // What the warps give each other.
    struct Exchange {
        float most[WARPS][ROWS];
        uint4 weights[KEYS / 16][WARP];
    };

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % WARP; }
    static __device__ __forceinline__ u32 warp() { return threadIdx.x / WARP; }

    // Columns of the output that are this warp's: the first one, and how many.
    static __device__ __forceinline__ u32 first_column() { return warp() * OUTPUTS * 8; }
    static __device__ __forceinline__ u32 columns() {
        return first_column() < D ? min(OUTPUTS * 8, D - first_column()) : 0;
    }

    // Copies K or V, whose `part` it is, of the keys from `key` on.
    static __device__ __forceinline__ void load(bf16* to, const bf16* part, const Work& work, u32 key) {
        if (key < work.range.end) {
            Copy<D, KEYS, THREADS>::keys(to, 0, part, work, key);
            Copy<D, KEYS, THREADS>::keys(to, TILE_KEYS, part, work, key + TILE_KEYS);
        }
        cp_async_commit();
    }

    // Scores of the warp's keys.
    static __device__ __forceinline__ void score(float (&scores)[OWN / 8][4], const u32 (&queries)[D / 16][4],
                                                 const bf16* keys) {
#pragma unroll
        for (u32 tile = 0; tile < OWN / 8; tile++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) scores[tile][i] = 0.0f;
#pragma unroll
        for (u32 d = 0; d < D; d += 16)
#pragma unroll
            for (u32 tile = 0; tile < OWN / 8; tile += 2) {
                u32 both[4], row = warp() * OWN + tile * 8 + lane() % 8 + lane() / 16 * 8;
                ldmatrix_x4<false>(both, keys + in_panels<KEYS>(row, d / 8 + lane() / 8 % 2));
                u32 low[2] = {both[0], both[1]}, high[2] = {both[2], both[3]};
                mma_m16n8k16(scores[tile], queries[d / 16], low);
                mma_m16n8k16(scores[tile + 1], queries[d / 16], high);
            }
    }

    // Adds 32 keys from row `row` of `values` on.
    static __device__ __forceinline__ void gather(Columns& state, const Exchange& exchange, const bf16* values,
                                                  u32 row) {
        u32 weights[2][4];
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            uint4 all = exchange.weights[row / 16 + k][lane()];
            weights[k][0] = all.x, weights[k][1] = all.y, weights[k][2] = all.z, weights[k][3] = all.w;
            state.count(weights[k]);
        }
#pragma unroll
        for (u32 tile = 0; tile < OUTPUTS; tile++) {
            if (tile * 8 >= columns()) break;
            u32 both[4];
            ldmatrix_x4<true>(both, values + in_panels<KEYS>(row + lane(), first_column() / 8 + tile));
            u32 low[2] = {both[0], both[1]}, high[2] = {both[2], both[3]};
            mma_m16n8k16(state.outputs[tile], weights[0], low);
            mma_m16n8k16(state.outputs[tile], weights[1], high);
        }
    }

    // The partition in `state` goes to memory.
    static __device__ __forceinline__ void keep(const Partials& partials, const Columns& state,
                                                const float (&most)[2], u32 partition, u32 rows) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 row = lane() / 4 + half * 8;
            if (row >= rows) continue;
            u64 index = partials.index(partition, row);
            if (threadIdx.x % 4 == 0 && warp() == 0)
                partials.running[index] = make_float2(most[half], state.sums[half * 2]);
#pragma unroll
            for (u32 tile = 0; tile < OUTPUTS; tile++)
                if (tile * 8 < columns()) {
                    float* at = partials.outputs + index * D + first_column() + tile * 8 + lane() % 4 * 2;
                    float2 pair = make_float2(state.outputs[tile][half * 2], state.outputs[tile][half * 2 + 1]);
                    *reinterpret_cast<float2*>(at) = pair;
                }
        }
    }

    static __device__ __forceinline__ void run(bf16* shared, Exchange& exchange, const Work& work,
                                               const Partials& partials, bool is_split) {
        bf16 *keys = shared + QUERIES, *values = keys + STAGE;
        const bf16 *key_part = work.arena.keys, *value_part = key_part + work.arena.part_values;
        const Range& range = work.range;
        // Blocks of a tile take turns at its partitions; this one's first.
        u32 partition = range.first_partition() + blockIdx.z;
        if (partition >= range.end_partition()) return;
        u32 key = max(partition * PARTITION, range.begin) / KEYS * KEYS;
        // What all rows see lies from `low` to `high`.
        u32 low = first_key(work.tile.start + work.tile.tokens - 1, work.window), high = work.tile.start;
        Sight sight(work, 0);
        Columns state, total;
        state.clear();
        total.clear();
        float most[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total_most[2] = {most[0], most[0]};
        u32 queries[D / 16][4];
        Copy<D, ROWS, THREADS>::queries(shared, work);
        load(keys, key_part, work, key);
        load(values, value_part, work, key);
        for (bool is_first = true; key < range.end; is_first = false) {
            u32 next = key + KEYS;
            bool is_last = next % PARTITION == 0 || next >= range.end;
            if (is_last) next += next % PARTITION == 0 ? (gridDim.z - 1) * PARTITION : 0;
            cp_async_wait<1>();
            __syncthreads();
            if (is_first) {
#pragma unroll
                for (u32 d = 0; d < D; d += 16)
                    ldmatrix_x4<false>(queries[d / 16], shared + in_panels<ROWS>(lane() % 16, d / 8 + lane() / 16));
            }
            float scores[OWN / 8][4];
            score(scores, queries, keys);
            if (key < low || key + KEYS > high + 1) sight.hide(scores, key + warp() * OWN);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float seen = greatest(scores, half, work.scale);
                if (lane() % 4 == 0) exchange.most[warp()][lane() / 4 + half * 8] = seen;
            }
            __syncthreads();
            load(keys, key_part, work, next);
            // Two tiles of keys, of which two warps each have the scores.
            float factors[2][2];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 row = lane() / 4 + half * 8;
                factors[0][half] = raise(most[half], fmaxf(exchange.most[0][row], exchange.most[1][row]));
                float first = most[half];
                factors[1][half] = raise(most[half], fmaxf(exchange.most[2][row], exchange.most[3][row]));
                weigh(scores, half, warp() < 2 ? first : most[half], work.scale);
            }
#pragma unroll
            for (u32 k = 0; k < OWN / 16; k++) {
                u32 packed[4];
                pack(packed, scores[k * 2], scores[k * 2 + 1]);
                exchange.weights[warp() * 2 + k][lane()] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            }
            cp_async_wait<1>();
            __syncthreads();
#pragma unroll
            for (u32 tile = 0; tile < KEYS / TILE_KEYS; tile++) {
                state.scale(factors[tile]);
                gather(state, exchange, values, tile * TILE_KEYS);
                gather(state, exchange, values, tile * TILE_KEYS + 32);
            }
            if (is_last) {
                if (is_split)
                    keep(partials, state, most, key / PARTITION, work.rows());
                else
                    total.join(total_most, state, most);
                state.clear();
                most[0] = most[1] = NEGATIVE_INFINITY;
            }
            __syncthreads();
            load(values, value_part, work, next);
            key = next;
        }
        if (!is_split) total.store(work, 0, first_column(), columns(), D);
    }
};

// Joins split partitions: a warp has a query row, lane l its values l, l + 32, ...
template <u32 D>
__device__ __forceinline__ void merge_partitions(bf16* out, float* memory, const Tile* tiles, u32 group, u32 window,
                                                 u32 partitions, u32 tile_tokens) {
    // Partitions whose loads are under way together.
    constexpr u32 VALUES = (D + WARP - 1) / WARP, AHEAD = 8;
    Tile tile = tiles[blockIdx.x];
    u32 row = blockIdx.z * Decode<D>::WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= tile.tokens * group) return;
    Partials partials(memory, D, partitions, tile_tokens * group);
    Range range = visible(tile, window);
    Running total{NEGATIVE_INFINITY, 0.0f};
    float values[VALUES];
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) values[i] = 0.0f;
    for (u32 first = range.first_partition(); first < range.end_partition(); first += AHEAD) {
        Running parts[AHEAD];
        float outputs[AHEAD][VALUES];
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ahead++) {
            bool is_inside = first + ahead < range.end_partition();
            u64 index = is_inside ? partials.index(first + ahead, row) : 0;
            float2 running = is_inside ? partials.running[index] : make_float2(NEGATIVE_INFINITY, 0.0f);
            parts[ahead] = Running{running.x, running.y};
#pragma unroll
            for (u32 i = 0; i < VALUES; i++) {
                u32 at = lane + i * WARP;
                outputs[ahead][i] = is_inside && at < D ? partials.outputs[index * D + at] : 0.0f;
            }
        }
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ahead++) {
            // One that a row does not see, or that is not there, changes nothing.
            Factors factors = merge(total, parts[ahead]);
#pragma unroll
            for (u32 i = 0; i < VALUES; i++) values[i] = merged(values[i], outputs[ahead][i], factors);
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

#define ATTENTION_ARGS                                                                                         \
    bf16 *out, const bf16 *queries, const bf16 *keys, u64 block_values, u32 part_values, u32 block_tokens,     \
        const u32 *tables, u32 table_blocks, const Tile *tiles, u32 group, u32 window, float scale,            \
        float *memory, u32 partitions, u32 tile_tokens

// Of the tile AT; where it is none there is nothing to do.
#define FIND_WORK(AT)                                                                                          \
    follow_launches_before();                                                                                  \
    Tile tile = tiles[AT];                                                                                     \
    if (tile.tokens == 0) return;                                                                              \
    Arena arena{keys, block_values, part_values, block_tokens};                                                \
    const u32* table = tables + static_cast<u64>(tile.table) * table_blocks;                                   \
    Work work{out, queries, arena, table, tile, visible(tile, window), group, window, scale};                  \
    DYNAMIC_SHARED(bf16, shared)

#define DECODE(NAME, D)                                                                                        \
    extern "C" __global__ void __launch_bounds__(Decode<D>::THREADS, 3) NAME(ATTENTION_ARGS) {                 \
        __shared__ Decode<D>::Exchange exchange;                                                               \
        FIND_WORK(blockIdx.x);                                                                                 \
        Partials partials(memory, D, partitions, tile_tokens * group);                                         \
        Decode<D>::run(shared, exchange, work, partials, memory != nullptr);                                   \
    }

// The tiles of a chunk's end see most keys, and go first. The warp's number comes by a shuffle so that the compiler can
// see that it is the same for all lanes.
#define PROMPT(NAME, D)                                                                                        \
    extern "C" __global__ void __launch_bounds__(Prompt<D>::THREADS, 1) NAME(ATTENTION_ARGS) {                 \
        FIND_WORK(gridDim.x - 1 - blockIdx.x);                                                                 \
        Prompt<D>(shared, work, __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0) * 16).run();                     \
    }

#define MERGE(NAME, D)                                                                                                \
    extern "C" __global__ void __launch_bounds__(Decode<D>::THREADS)                                                  \
        NAME(bf16* out, float* partials, const Tile* tiles, u32 group, u32 window, u32 partitions, u32 tile_tokens) { \
        follow_launches_before();                                                                                     \
        merge_partitions<D>(out, partials, tiles, group, window, partitions, tile_tokens);                            \
    }

DECODE(attention_16_d16, 16)
TANDEM_KERNEL(attention_16_d16)
PROMPT(attention_128_d16, 16)
TANDEM_KERNEL(attention_128_d16)
MERGE(attention_merge_d16, 16)
TANDEM_KERNEL(attention_merge_d16)
DECODE(attention_16_d32, 32)
TANDEM_KERNEL(attention_16_d32)
PROMPT(attention_128_d32, 32)
TANDEM_KERNEL(attention_128_d32)
MERGE(attention_merge_d32, 32)
TANDEM_KERNEL(attention_merge_d32)
DECODE(attention_16_d64, 64)
TANDEM_KERNEL(attention_16_d64)
PROMPT(attention_128_d64, 64)
TANDEM_KERNEL(attention_128_d64)
MERGE(attention_merge_d64, 64)
TANDEM_KERNEL(attention_merge_d64)
DECODE(attention_16_d96, 96)
TANDEM_KERNEL(attention_16_d96)
PROMPT(attention_128_d96, 96)
TANDEM_KERNEL(attention_128_d96)
MERGE(attention_merge_d96, 96)
TANDEM_KERNEL(attention_merge_d96)
DECODE(attention_16_d128, 128)
TANDEM_KERNEL(attention_16_d128)
PROMPT(attention_128_d128, 128)
TANDEM_KERNEL(attention_128_d128)
MERGE(attention_merge_d128, 128)
TANDEM_KERNEL(attention_merge_d128)
