// On the bytes of KV blocks: XXH3-64 of pieces (xxhash_spec.md of Cyan4973/xxHash; 64 bits, default secret, no seed)
// and copies between blocks. Launches: src/kernels/blocks.rs.
//
// Bound by memory bandwidth: about eight integer operations for eight bytes. A piece is one chain of steps of 1 KiB,
// so a warp has one, and many short pieces fill the card: 4 stripes of 64 bytes side by side, lane = stripe * 8 + word,
// which are 256 adjacent bytes an access. Within a step of 1 KiB the stripes' sums commute; they join before the
// scramble. Pieces up to 240 bytes are one lane's work: there are none in the blocks of real models.
//
// All addresses and lengths are multiples of 8.
#include "device.cuh"

constexpr u64 PRIME32_1 = 0x9E3779B1ULL, PRIME32_2 = 0x85EBCA77ULL, PRIME32_3 = 0xC2B2AE3DULL;
constexpr u64 PRIME64_1 = 0x9E3779B185EBCA87ULL, PRIME64_2 = 0xC2B2AE3D27D4EB4FULL, PRIME64_3 = 0x165667B19E3779F9ULL;
constexpr u64 PRIME64_4 = 0x85EBCA77C2B2AE63ULL, PRIME64_5 = 0x27D4EB2F165667C5ULL;
constexpr u64 PRIME_MX1 = 0x165667919E3779F9ULL, PRIME_MX2 = 0x9FB21C651E98DF25ULL;

constexpr u32 STRIPE_WORDS = 8;
// Stripes of a step: as many as there are places for their keys in the secret.
constexpr u32 STEP_STRIPES = 16;
constexpr u32 STEP_WORDS = STRIPE_WORDS * STEP_STRIPES;

// The default secret, 192 bytes. Not __constant__, which serves one address at a time: lanes read different words.
__device__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL, 0x78e5c0cc4ee679cbULL,
    0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL, 0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL,
    0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL, 0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL,
    0x647378d9c97e9fc8ULL, 0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
    0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL,
};

// Eight bytes of the secret from byte `at` on.
__device__ __forceinline__ u64 secret(u32 at) {
    u32 word = at / 8, shift = at % 8 * 8;
    return shift == 0 ? SECRET[word] : SECRET[word] >> shift | SECRET[word + 1] << (64 - shift);
}

// The upper and the lower half of a product, xored.
__device__ __forceinline__ u64 fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 avalanche(u64 hash) {
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ hash >> 32;
}

// 16 bytes with 16 of the secret.
__device__ __forceinline__ u64 mix(const u64* words, u32 secret_at) {
    return fold(words[0] ^ secret(secret_at), words[1] ^ secret(secret_at + 8));
}

// Up to 240 bytes.
__device__ __forceinline__ u64 short_hash(const u64* words, u32 bytes) {
    if (bytes == 0) {
        u64 hash = secret(56) ^ secret(64);
        hash ^= hash >> 33;
        hash *= PRIME64_2;
        hash ^= hash >> 29;
        hash *= PRIME64_3;
        return hash ^ hash >> 32;
    }
    if (bytes == 8) {
        u64 keyed = (words[0] << 32 | words[0] >> 32) ^ (secret(8) ^ secret(16));
        keyed ^= (keyed << 49 | keyed >> 15) ^ (keyed << 24 | keyed >> 40);
        keyed *= PRIME_MX2;
        keyed ^= (keyed >> 35) + bytes;
        keyed *= PRIME_MX2;
        return keyed ^ keyed >> 28;
    }
    if (bytes == 16) {
        u64 low = words[0] ^ (secret(24) ^ secret(32)), high = words[1] ^ (secret(40) ^ secret(48));
        u64 swapped = low << 32 | low >> 32;
        swapped = (swapped & 0x0000ffff0000ffffULL) << 16 | (swapped >> 16 & 0x0000ffff0000ffffULL);
        swapped = (swapped & 0x00ff00ff00ff00ffULL) << 8 | (swapped >> 8 & 0x00ff00ff00ff00ffULL);
        return avalanche(bytes + swapped + high + fold(low, high));
    }
    u64 hash = bytes * PRIME64_1;
    u32 count = bytes / 8;
    if (bytes <= 128) {
        // Pairs of 16 bytes from both ends inwards.
#pragma unroll 1
        for (u32 i = (bytes - 1) / 32 + 1; i-- > 0;) {
            hash += mix(words + 2 * i, 32 * i);
            hash += mix(words + count - 2 * (i + 1), 32 * i + 16);
        }
        return avalanche(hash);
    }
#pragma unroll 1
    for (u32 i = 0; i < 8; i++) hash += mix(words + 2 * i, 16 * i);
    hash = avalanche(hash);
#pragma unroll 1
    for (u32 i = 8; i < bytes / 16; i++) hash += mix(words + 2 * i, 16 * (i - 8) + 3);
    return avalanche(hash + mix(words + count - 2, 136 - 17));
}

// What a lane adds for its word of a stripe.
__device__ __forceinline__ u64 accumulate(u64 data, u64 key) {
    u64 keyed = data ^ key;
    return (keyed & 0xffffffffULL) * (keyed >> 32) + __shfl_xor_sync(ALL_LANES, data, 1);
}

// What the accumulators begin with.
__device__ const u64 INITIAL[STRIPE_WORDS] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                              PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

// The sum over the four groups of lanes, in all lanes.
__device__ __forceinline__ u64 join(u64 sum) {
    sum += __shfl_xor_sync(ALL_LANES, sum, 8);
    return sum + __shfl_xor_sync(ALL_LANES, sum, 16);
}

// More than 240 bytes, by all lanes of a warp.
__device__ __forceinline__ u64 long_hash(const u64* words, u64 bytes) {
    u32 lane = threadIdx.x % WARP, word = lane % STRIPE_WORDS, group = lane / STRIPE_WORDS;
    u64 count = bytes / 8;
    // The last stripe is not among those of the steps, and may overlap them.
    u64 steps = (bytes - 1) / (STEP_WORDS * 8), stripes = (bytes - 1 - steps * STEP_WORDS * 8) / (STRIPE_WORDS * 8);
    u64 sum = group == 0 ? INITIAL[word] : 0;
    u64 scramble = secret(128 + 8 * word), keys[STEP_STRIPES / 4];
#pragma unroll
    for (u32 i = 0; i < STEP_STRIPES / 4; i++) keys[i] = SECRET[i * 4 + group + word];
    for (u64 step = 0; step < steps; step++) {
        const u64* data = words + step * STEP_WORDS + word;
        u64 loaded[STEP_STRIPES / 4];
#pragma unroll
        for (u32 i = 0; i < STEP_STRIPES / 4; i++) loaded[i] = data[(i * 4 + group) * STRIPE_WORDS];
#pragma unroll
        for (u32 i = 0; i < STEP_STRIPES / 4; i++) sum += accumulate(loaded[i], keys[i]);
        sum = join(sum);
        sum = (sum ^ sum >> 47 ^ scramble) * PRIME32_1;
        if (group != 0) sum = 0;
    }
#pragma unroll
    for (u32 i = 0; i < STEP_STRIPES / 4; i++) {
        // All lanes take part in the shuffle.
        u32 stripe = i * 4 + group;
        bool is_inside = stripe < stripes;
        u64 data = is_inside ? words[steps * STEP_WORDS + stripe * STRIPE_WORDS + word] : 0;
        u64 added = accumulate(data, keys[i]);
        if (is_inside) sum += added;
    }
    u64 added = accumulate(words[count - STRIPE_WORDS + word], secret(192 - 64 - 7 + 8 * word));
    if (group == 0) sum += added;
    sum = join(sum) ^ secret(11 + 8 * word);
    // Of the four products each stands in two lanes.
    u64 product = fold(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
    product += __shfl_xor_sync(ALL_LANES, product, 2);
    product += __shfl_xor_sync(ALL_LANES, product, 4);
    return avalanche(bytes * PRIME64_1 + product);
}

// Pieces of one length, side by side; `first` is the number of the first one.
struct PieceRow {
    u64 at;
    u64 bytes;
    u64 first;
};

// The row that has a piece: they are in the order of their pieces, the first one has piece 0.
__device__ __forceinline__ PieceRow row_of(const PieceRow* rows, u32 row_count, u32 piece) {
    u32 row = 0, end = row_count;
    while (end - row > 1) {
        u32 middle = (row + end) / 2;
        if (rows[middle].first <= piece) {
            row = middle;
        } else {
            end = middle;
        }
    }
    return rows[row];
}

// digests[i] = XXH3-64 of the i-th of `count` pieces.
extern "C" __global__ void __launch_bounds__(128)
    xxh3_pieces(u64* digests, const u8* memory, const PieceRow* rows, u32 row_count, u32 count) {
    follow_launches_before();
    u32 index = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (index >= count) return;
    PieceRow row = row_of(rows, row_count, index);
    const u64* words = reinterpret_cast<const u64*>(memory + row.at + (index - row.first) * row.bytes);
    bool is_first = threadIdx.x % WARP == 0;
    if (row.bytes > 240) {
        u64 hash = long_hash(words, row.bytes);
        if (is_first) digests[index] = hash;
    } else if (is_first) {
        digests[index] = short_hash(words, static_cast<u32>(row.bytes));
    }
}
TANDEM_KERNEL(xxh3_pieces)

// memory[pair.y] = memory[pair.x], blocks of `words` times 16 bytes; grid (pairs, shares).
extern "C" __global__ void __launch_bounds__(256) copy_blocks(uint4* memory, const uint2* pairs, u64 words) {
    follow_launches_before();
    uint2 pair = pairs[blockIdx.x];
    const uint4* from = memory + pair.x * words;
    uint4* to = memory + pair.y * words;
    for (u64 i = blockIdx.y * blockDim.x + threadIdx.x; i < words; i += gridDim.y * blockDim.x) to[i] = from[i];
}
TANDEM_KERNEL(copy_blocks)
