// Chooses a step's tokens from their logits: temperature, min_p, top_k, top_p, the draw, and the log probability.
// Launch: src/kernels/choose.rs. Its oracle, rule by rule and tie by tie, is engine/src/sampler.rs.
//
// Bound by memory and latency: a block has a row, and goes over it two times for a greedy choice, three times for a
// draw, and up to nine times more for each cut; after the first time the row is in the L2 cache.
//
// Weights are e^((logit - greatest) / temperature) by the oracle's polynomial, never fused, and are summed as integers:
// 2^-45 is one. Integers have the same sum in any order, so that no order has to be kept, and cuts and draws do not
// depend on the shape of the launch. Up to 2^18 weights of at most 1 stay below 2^64. Weights of 2^-22 or more are
// exact; the oracle's sums are f32 in parts, so that both may differ where a draw falls within 1e-7 of a boundary.
//
// A cut keeps the likeliest tokens; among equal logits the lowest id comes first. Each token has a rank of 64 bits, its
// logit above its id, and a cut is the least rank that stays. It is found digit by digit: a histogram over bins of the
// distance to the greatest logit (real logits spread over many, which keeps atomics apart), then one over each byte of
// the ranks in the bin that holds the cut.
#include "device.cuh"

constexpr u32 MOST_WARPS = 32, BINS = 2048, DIGITS = 256;
constexpr float ONE = 35184372088832.0f;  // 2^45
constexpr float MOST_F32 = 3.402823466e38f;
constexpr u32 NONE = 0xffffffffu;
constexpr u32 SOUND = 0, CHOSEN = 1, NOT_NUMBERS = 2;

// As in choose.rs.
struct Choice {
    double uniform;
    u32 logits_row, first_row, rows, top_k;
    float scale, top_p, min_p;
    u32 pad;
};
struct Outcome {
    u32 token;
    float logprob;
    u32 status, pad;
};

// Shared memory of a block.
struct Scratch {
    u64 histogram[BINS];
    u64 sums[MOST_WARPS];
    float values[MOST_WARPS];
    u32 indices[MOST_WARPS];
    u64 found[2];
};

// e^x for x <= 0 within 2 units in the last place, 0 below -87: `exp` of engine/src/sampler/passes.rs.
__device__ __forceinline__ float exponential(float x) {
    constexpr float ROUND = 12582912.0f;
    if (!(x >= -87.0f)) return 0.0f;
    float rounded = __fadd_rn(__fmul_rn(x, 1.44269504088896340736f), ROUND);
    float whole = __fsub_rn(rounded, ROUND);
    x = __fsub_rn(__fsub_rn(x, __fmul_rn(whole, 0.6933594f)), __fmul_rn(whole, -2.1219444e-4f));
    float y = 1.9875691e-4f;
    y = __fadd_rn(__fmul_rn(y, x), 1.3981999e-3f);
    y = __fadd_rn(__fmul_rn(y, x), 8.333452e-3f);
    y = __fadd_rn(__fmul_rn(y, x), 4.1665796e-2f);
    y = __fadd_rn(__fmul_rn(y, x), 1.6666665e-1f);
    y = __fadd_rn(__fmul_rn(y, x), 5e-1f);
    y = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(y, x), x), x), 1.0f);
    return __fmul_rn(y, __uint_as_float((__float_as_uint(rounded) - __float_as_uint(ROUND) + 127) << 23));
}

// A row of logits and how its weights are made. No logit is NaN.
struct Row {
    const float* logits;
    u32 count;
    float greatest, scale, least;

    // Infinity is no greater than the greatest finite logit.
    __device__ __forceinline__ float logit(u32 id) const { return fminf(logits[id], MOST_F32); }

    __device__ __forceinline__ u64 weight(float logit) const {
        float weight = exponential(__fmul_rn(__fsub_rn(logit, greatest), scale));
        return weight < least ? 0 : static_cast<u64>(weight * ONE);
    }
    // Likelier tokens have greater ranks; impossible ones 0.
    __device__ __forceinline__ u64 rank(float logit, u32 id) const {
        if (logit == NEGATIVE_INFINITY) return 0;
        // Adding zero makes the two zeros equal.
        u32 bits = __float_as_uint(logit + 0.0f);
        bits = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
        return static_cast<u64>(bits) << 32 | (0xffffffffu - id);
    }
    // Likelier tokens have no greater bins.
    __device__ __forceinline__ u32 bin(float logit) const {
        return static_cast<u32>(fminf(__fmul_rn(__fsub_rn(greatest, logit), 32.0f), BINS - 1.0f));
    }
};

// Shows `use` all logits of this thread, by ascending id. A block alone with a row waits for memory, not for bandwidth:
// eight loads are under way at a time.
template <typename Use>
__device__ __forceinline__ void each_logit(const Row& row, Use use) {
    constexpr u32 LOADS = 8;
    for (u32 first = threadIdx.x; first < row.count; first += LOADS * blockDim.x) {
        float logits[LOADS];
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            u32 id = first + i * blockDim.x;
            logits[i] = id < row.count ? row.logits[id] : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            u32 id = first + i * blockDim.x;
            if (id < row.count) use(logits[i], id);
        }
    }
}

__device__ __forceinline__ u64 warp_sum_u64(u64 value) {
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// The sum over the warp's lanes up to this one.
__device__ __forceinline__ u64 warp_prefix(u64 value) {
#pragma unroll
    for (u32 distance = 1; distance < WARP; distance *= 2) {
        u64 before = __shfl_up_sync(ALL_LANES, value, distance);
        if (threadIdx.x % WARP >= distance) value += before;
    }
    return value;
}

// The sum over the block, in all threads.
__device__ __forceinline__ u64 block_sum(Scratch& scratch, u64 value) {
    value = warp_sum_u64(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch.sums[threadIdx.x / WARP] = value;
    __syncthreads();
    u64 sum = 0;
    for (u32 warp = 0; warp < blockDim.x / WARP; warp++) sum += scratch.sums[warp];
    return sum;
}

// Finds the first bin at which the histogram's running sum reaches `target`, which its whole sum does: to found[0],
// with what is missing before that bin to found[1]. By the first warp.
__device__ __forceinline__ void find_bin(Scratch& scratch, u32 bins, u64 target) {
    u32 share = bins / WARP, first = threadIdx.x * share;
    u64 own = 0;
    for (u32 i = 0; i < share; i++) own += scratch.histogram[first + i];
    u64 through = warp_prefix(own), before = through - own;
    if (before < target && target <= through) {
        u32 bin = first;
        while (before + scratch.histogram[bin] < target) before += scratch.histogram[bin++];
        scratch.found[0] = bin;
        scratch.found[1] = target - before;
    }
}

// The histogram of what `measure` gives for the tokens that `place` puts into a bin, and in it the bin of `target`.
// All threads get the bin; `target` becomes what is wanted of that bin.
template <typename Place, typename Measure>
__device__ __forceinline__ u32 histogram(Scratch& scratch, const Row& row, u32 bins, u64& target, Place place,
                                         Measure measure) {
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < bins; bin += blockDim.x) scratch.histogram[bin] = 0;
    __syncthreads();
    for (u32 id = threadIdx.x; id < row.count; id += blockDim.x) {
        float logit = row.logit(id);
        u32 bin = place(logit, id);
        if (bin == NONE) continue;
        u64 value = measure(logit);
        if (value > 0) atomicAdd(&scratch.histogram[bin], value);
    }
    __syncthreads();
    if (threadIdx.x < WARP) find_bin(scratch, bins, target);
    __syncthreads();
    target = scratch.found[1];
    return static_cast<u32>(scratch.found[0]);
}

// The least rank of the shortest run of likeliest tokens whose measures reach `target`, among those of rank `least` or
// more, whose measures do.
template <typename Measure>
__device__ __forceinline__ u64 cut(Scratch& scratch, const Row& row, u64 least, u64 target, Measure measure) {
    auto by_distance = [&](float logit, u32 id) {
        u64 rank = row.rank(logit, id);
        return rank == 0 || rank < least ? NONE : row.bin(logit);
    };
    u32 bin = histogram(scratch, row, BINS, target, by_distance, measure);
    u64 prefix = 0;
    for (u32 shift = 64; shift > 0;) {
        shift -= 8;
        auto by_digit = [&](float logit, u32 id) {
            u64 rank = row.rank(logit, id);
            bool is_other = rank == 0 || rank < least || row.bin(logit) != bin;
            if (is_other || (shift < 56 && rank >> (shift + 8) != prefix)) return NONE;
            return DIGITS - 1 - static_cast<u32>(rank >> shift & 0xff);
        };
        prefix = prefix << 8 | (DIGITS - 1 - histogram(scratch, row, DIGITS, target, by_digit, measure));
    }
    return prefix;
}

// The token at which the running sum of weights, by id, of tokens of rank `least` or more passes `uniform` of it all.
__device__ __forceinline__ u32 draw(Scratch& scratch, const Row& row, u64 least, double uniform) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    // Each warp has a run of ids.
    u32 share = (row.count + blockDim.x - 1) / blockDim.x * WARP;
    auto weight = [&](u32 id) -> u64 {
        if (id >= row.count) return 0;
        float logit = row.logit(id);
        return row.rank(logit, id) < least ? 0 : row.weight(logit);
    };
    u64 own = 0;
    for (u32 i = lane; i < share; i += WARP) own += weight(warp * share + i);
    own = warp_sum_u64(own);
    __syncthreads();
    if (lane == 0) scratch.sums[warp] = own;
    __syncthreads();
    u64 total = 0, before = 0;
    for (u32 i = 0; i < warps; i++) {
        if (i < warp) before += scratch.sums[i];
        total += scratch.sums[i];
    }
    // The greatest logit has weight 1: there is a total.
    u64 point = min(static_cast<u64>(uniform * static_cast<double>(total)), total - 1);
    if (before <= point && point < before + own) {
        for (u32 i = 0; i < share; i += WARP) {
            u64 weighs = weight(warp * share + i + lane), through = before + warp_prefix(weighs);
            if (through > point && through - weighs <= point) scratch.found[0] = warp * share + i + lane;
            before = __shfl_sync(ALL_LANES, through, WARP - 1);
            if (before > point) break;
        }
    }
    __syncthreads();
    return static_cast<u32>(scratch.found[0]);
}

// The first of the greatest logits, and whether one is NaN. Without any that is possible it is token 0.
__device__ __forceinline__ bool find_greatest(Scratch& scratch, Row& row, u32& likeliest) {
    float value = NEGATIVE_INFINITY;
    u32 index = NONE, wrong = 0;
    each_logit(row, [&](float logit, u32 id) {
        if (logit != logit) wrong = 1;
        logit = fminf(logit, MOST_F32);
        if (logit > value) value = logit, index = id;
    });
    warp_argmax(value, index);
    wrong = warp_sum_u32(wrong);
    if (threadIdx.x % WARP == 0) {
        u32 warp = threadIdx.x / WARP;
        scratch.values[warp] = value, scratch.indices[warp] = index, scratch.sums[warp] = wrong;
    }
    __syncthreads();
    u64 all_wrong = 0;
    for (u32 warp = 0; warp < blockDim.x / WARP; warp++) {
        float other = scratch.values[warp];
        u32 other_index = scratch.indices[warp];
        if (other > value || (other == value && other_index < index)) value = other, index = other_index;
        all_wrong += scratch.sums[warp];
    }
    row.greatest = value;
    likeliest = index == NONE ? 0 : index;
    return all_wrong > 0;
}

// The token that a choice that is not greedy comes to.
__device__ __forceinline__ u32 sampled(Scratch& scratch, const Row& row, const Choice& choice) {
    u64 least = 0;
    if (choice.top_k > 0 && choice.top_k < row.count) {
        u64 possible = 0;
        for (u32 id = threadIdx.x; id < row.count; id += blockDim.x)
            if (row.logit(id) > NEGATIVE_INFINITY) possible++;
        possible = block_sum(scratch, possible);
        if (possible > choice.top_k) least = cut(scratch, row, least, choice.top_k, [](float) -> u64 { return 1; });
    }
    if (choice.top_p < 1.0f) {
        auto measure = [&](float logit) { return row.weight(logit); };
        u64 mass = 0;
        for (u32 id = threadIdx.x; id < row.count; id += blockDim.x) {
            float logit = row.logit(id);
            if (row.rank(logit, id) >= least) mass += measure(logit);
        }
        mass = block_sum(scratch, mass);
        double share = static_cast<double>(choice.top_p) * static_cast<double>(mass);
        u64 wanted = static_cast<u64>(share);
        if (static_cast<double>(wanted) < share) wanted++;
        // At least the likeliest token stays.
        if (wanted <= mass) least = cut(scratch, row, least, max(wanted, static_cast<u64>(1)), measure);
    }
    return draw(scratch, row, least, choice.uniform);
}

extern "C" __global__ void __launch_bounds__(1024)
    choose(Outcome* outcomes, const Choice* choices, const float* logits, const u32* unsound, u32 logits_rows,
           u32 vocabulary, u32 rows) {
    __shared__ Scratch scratch;
    follow_launches_before();
    Choice choice = choices[blockIdx.x];
    u64 found = 0;
    for (u32 i = threadIdx.x; i < choice.rows; i += blockDim.x)
        if (choice.first_row + i < rows && unsound[choice.first_row + i] != 0) found = 1;
    bool is_wrong = block_sum(scratch, found) > 0;
    Outcome outcome{0, 0.0f, is_wrong ? NOT_NUMBERS : SOUND, 0};
    if (!is_wrong && choice.logits_row < logits_rows) {
        Row row{logits + static_cast<u64>(choice.logits_row) * vocabulary, vocabulary, 0.0f, 1.0f, 0.0f};
        __syncthreads();
        if (find_greatest(scratch, row, outcome.token)) {
            outcome = Outcome{0, 0.0f, NOT_NUMBERS, 0};
        } else {
            u64 mass = 0;
            bool is_possible = row.greatest > NEGATIVE_INFINITY;
            if (is_possible)
                each_logit(row, [&](float logit, u32) { mass += row.weight(fminf(logit, MOST_F32)); });
            mass = block_sum(scratch, mass);
            if (choice.scale > 0.0f && is_possible) {
                row.scale = choice.scale, row.least = choice.min_p;
                outcome.token = sampled(scratch, row, choice);
            }
            double below = static_cast<double>(row.logit(outcome.token)) - static_cast<double>(row.greatest);
            double logprob = below - log(static_cast<double>(mass) / static_cast<double>(ONE));
            outcome.logprob = is_possible ? fminf(static_cast<float>(logprob), 0.0f) : NEGATIVE_INFINITY;
            outcome.status = CHOSEN;
        }
    }
    if (threadIdx.x == 0) outcomes[blockIdx.x] = outcome;
}
TANDEM_KERNEL(choose)
