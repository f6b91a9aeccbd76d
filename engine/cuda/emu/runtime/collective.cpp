// What a warp's lanes compute together, done by the lane that arrives last, for all.
//
// Operands lie on the lanes' own stacks. Fragments of mma and ldmatrix follow the tables of the PTX manual; device.cuh
// repeats them.
#include <cmath>
#include <cstring>

#include "checker.h"
#include "worker.h"

namespace emu {

template <class T>
static T& operand(Worker* worker, unsigned warp, unsigned lane) {
    return *static_cast<T*>(worker->fiber(warp * WARP + lane)->operand);
}

// ------------------------------------------------------------------------------------------------- shuffles and votes

// Lanes that another's mask leaves out, or that have no value, give what a card leaves undefined: here NaN.
static void shuffle(Worker* worker, unsigned warp, int kind, std::uint32_t mask) {
    for (std::uint32_t rest = mask; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        auto& own = operand<ShuffleOperand>(worker, warp, static_cast<unsigned>(lane));
        int begin = lane & ~(own.width - 1), end = begin + own.width, from = lane;
        switch (kind) {
            case COLLECTIVE_SHUFFLE:
                from = begin | (own.argument & (own.width - 1));
                break;
            case COLLECTIVE_SHUFFLE_XOR:
                from = lane ^ own.argument;
                break;
            case COLLECTIVE_SHUFFLE_DOWN:
                from = lane + own.argument;
                break;
            case COLLECTIVE_SHUFFLE_UP:
                from = lane - own.argument < begin ? lane : lane - own.argument;
                break;
        }
        if (from >= end || from < 0) from = lane;
        if (mask >> from & 1) {
            memcpy(own.result, operand<ShuffleOperand>(worker, warp, static_cast<unsigned>(from)).value,
                   sizeof own.result);
        } else {
            memset(own.result, 0xff, sizeof own.result);
        }
    }
}

static void ballot(Worker* worker, unsigned warp, std::uint32_t mask) {
    std::uint32_t votes = 0;
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (mask >> lane & 1 && operand<VoteOperand>(worker, warp, lane).predicate) votes |= 1u << lane;
    }
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (mask >> lane & 1) operand<VoteOperand>(worker, warp, lane).result = votes;
    }
}

// --------------------------------------------------------------------------------------------------------- reductions

struct Candidate {
    float value;
    std::uint32_t index;
};

static Candidate join(Reduction reduction, Candidate own, Candidate other) {
    switch (reduction) {
        case REDUCE_SUM:
            return {own.value + other.value, 0};
        case REDUCE_MAX:
            return {fmaxf(own.value, other.value), 0};
        case REDUCE_SUM_U32:
            return {0.0f, own.index + other.index};
        case REDUCE_ARGMAX:
            break;
    }
    bool is_number = own.value == own.value, other_is_number = other.value == other.value;
    bool is_better = is_number != other_is_number
                         ? other_is_number
                         : other.value > own.value || (!(own.value > other.value) && other.index < own.index);
    return is_better ? other : own;
}

// The butterfly that device.cuh's shuffles make, all lanes at once.
static void reduce(Worker* worker, unsigned warp) {
    Candidate values[WARP], joined[WARP];
    const auto& first = operand<ReduceOperand>(worker, warp, 0);
    Reduction reduction = first.reduction;
    unsigned lanes = first.lanes;
    for (unsigned lane = 0; lane < WARP; lane++) {
        const auto& own = operand<ReduceOperand>(worker, warp, lane);
        values[lane] = {own.value, own.index};
    }
    for (unsigned distance = lanes / 2; distance > 0; distance /= 2) {
        for (unsigned lane = 0; lane < WARP; lane++)
            joined[lane] = join(reduction, values[lane], values[lane ^ distance]);
        memcpy(values, joined, sizeof values);
    }
    for (unsigned lane = 0; lane < WARP; lane++) {
        auto& own = operand<ReduceOperand>(worker, warp, lane);
        own.value = values[lane].value;
        own.index = values[lane].index;
    }
}

// ------------------------------------------------------------------------------------------------------- tensor cores

static float low(std::uint32_t packed) {
    packed <<= 16;
    float value;
    memcpy(&value, &packed, 4);
    return value;
}
static float high(std::uint32_t packed) {
    packed &= 0xffff0000u;
    float value;
    memcpy(&value, &packed, 4);
    return value;
}

// One f32 accumulator for each output, in ascending k. A card adds a few products at a time and truncates; how it
// differs is a matter of tests on a card.
__attribute__((target_clones("arch=x86-64-v3", "default"))) void multiply_set(const float (*a)[16], const float (*b)[8],
                                                                              float (*d)[8]) {
    for (int row = 0; row < 16; row++) {
        float sums[8];
        for (int column = 0; column < 8; column++) sums[column] = d[row][column];
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 8; column++) sums[column] += a[row][k] * b[k][column];
        }
        for (int column = 0; column < 8; column++) d[row][column] = sums[column];
    }
}

static void mma(Worker* worker, unsigned warp) {
    alignas(32) float a[16][16], b[16][8], d[16][8];
    for (unsigned lane = 0; lane < WARP; lane++) {
        const auto& own = operand<MmaOperand>(worker, warp, lane);
        unsigned group = lane / 4, pair = lane % 4 * 2;
        a[group][pair] = low(own.a[0]), a[group][pair + 1] = high(own.a[0]);
        a[group + 8][pair] = low(own.a[1]), a[group + 8][pair + 1] = high(own.a[1]);
        a[group][pair + 8] = low(own.a[2]), a[group][pair + 9] = high(own.a[2]);
        a[group + 8][pair + 8] = low(own.a[3]), a[group + 8][pair + 9] = high(own.a[3]);
        b[pair][group] = low(own.b[0]), b[pair + 1][group] = high(own.b[0]);
        b[pair + 8][group] = low(own.b[1]), b[pair + 9][group] = high(own.b[1]);
        d[group][pair] = own.d[0], d[group][pair + 1] = own.d[1];
        d[group + 8][pair] = own.d[2], d[group + 8][pair + 1] = own.d[3];
    }
    multiply_set(a, b, d);
    for (unsigned lane = 0; lane < WARP; lane++) {
        auto& own = operand<MmaOperand>(worker, warp, lane);
        unsigned group = lane / 4, pair = lane % 4 * 2;
        own.d[0] = d[group][pair], own.d[1] = d[group][pair + 1];
        own.d[2] = d[group + 8][pair], own.d[3] = d[group + 8][pair + 1];
    }
}

static void ldmatrix(Worker* worker, unsigned warp, bool is_transposed) {
    const std::uint16_t* rows[WARP];
    for (unsigned lane = 0; lane < WARP; lane++) {
        const void* row = operand<LdmatrixOperand>(worker, warp, lane).row;
        Fiber* fiber = worker->fiber(warp * WARP + lane);
        if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0 || !worker->is_shared(row, 16))
            stop(worker, fiber, MISALIGNED_ADDRESS,
                 "ldmatrix: the address of a row is not in shared memory, or not aligned to 16 bytes, " +
                     place_of(fiber));
        check_access(worker, fiber, reinterpret_cast<std::uintptr_t>(row), 16, ACCESS_READ, nullptr);
        rows[lane] = static_cast<const std::uint16_t*>(row);
    }
    for (unsigned lane = 0; lane < WARP; lane++) {
        auto& own = operand<LdmatrixOperand>(worker, warp, lane);
        unsigned row = lane / 4, column = lane % 4 * 2;
        for (unsigned matrix = 0; matrix < 4; matrix++) {
            const std::uint16_t* const* at = rows + matrix * 8;
            std::uint32_t first = is_transposed ? at[column][row] : at[row][column];
            std::uint32_t second = is_transposed ? at[column + 1][row] : at[row][column + 1];
            own.result[matrix] = first | second << 16;
        }
    }
}

void execute_collective(Worker* worker, unsigned warp, int kind, std::uint32_t mask) {
    switch (kind) {
        case COLLECTIVE_SYNC:
            synchronize_warp(worker, warp, mask);
            break;
        case COLLECTIVE_BALLOT:
            ballot(worker, warp, mask);
            break;
        case COLLECTIVE_REDUCE:
            reduce(worker, warp);
            break;
        case COLLECTIVE_MMA:
            mma(worker, warp);
            break;
        case COLLECTIVE_LDMATRIX:
            ldmatrix(worker, warp, false);
            break;
        case COLLECTIVE_LDMATRIX_TRANSPOSED:
            ldmatrix(worker, warp, true);
            break;
        default:
            shuffle(worker, warp, kind, mask);
    }
}

}  // namespace emu
