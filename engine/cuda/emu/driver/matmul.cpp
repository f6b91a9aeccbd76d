// Matrix products of the emulated cuBLASLt: an operation of a stream, like a kernel.
//
// One f32 accumulator for each output takes sets of 16 values of k in ascending order, each as mma.m16n8k16 does: what
// cuBLASLt computes on a card as long as it does not split k.
#include "matmul.h"

#include <cstring>

#include "../runtime/checker.h"
#include "../runtime/worker.h"
#include "driver.h"

namespace emu {

static unsigned long long matmuls = 0;
static long long cublaslt_objects = 0;

unsigned long long matmul_count() { return matmuls; }
std::size_t live_cublaslt_objects() { return static_cast<std::size_t>(cublaslt_objects); }

// ---------------------------------------------------------------------------------------------------------- arithmetic

constexpr std::size_t ROWS = 16, COLUMNS = 8, SET = 16;  // of one mma

static float widen(std::uint16_t half) {
    std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

template <class T>
static T* at(unsigned long long address) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

// Rows [first, first + count) of a matrix as mma's operands: [set][row][k of the set], or [set][k of the set][row].
// Zeros where the matrix ends.
template <std::size_t COUNT, bool IS_TRANSPOSED>
static void pack(const std::uint16_t* matrix, std::uint64_t stride, std::uint64_t rows, std::uint64_t k,
                 std::uint64_t first, std::vector<float>& packed) {
    packed.assign((k + SET - 1) / SET * SET * COUNT, 0.0f);
    for (std::uint64_t row = 0; row < COUNT && first + row < rows; row++) {
        const std::uint16_t* from = matrix + (first + row) * stride;
        for (std::uint64_t i = 0; i < k; i++) {
            std::uint64_t inside = IS_TRANSPOSED ? i % SET * COUNT + row : row * SET + i % SET;
            packed[i / SET * SET * COUNT + inside] = widen(from[i]);
        }
    }
}

static void store(const Matmul& matmul, std::uint64_t row, std::uint64_t column, const float (*sums)[COLUMNS]) {
    for (std::uint64_t i = 0; i < ROWS && row + i < matmul.rows; i++) {
        float* to = at<float>(matmul.out) + (row + i) * matmul.out_stride + column;
        for (std::uint64_t j = 0; j < COLUMNS && column + j < matmul.n; j++)
            to[j] = matmul.adds ? sums[i][j] + to[j] : sums[i][j];
    }
}

static void compute(const Matmul& matmul) {
    const auto* x = at<const std::uint16_t>(matmul.x);
    const auto* weight = at<const std::uint16_t>(matmul.weight);
    std::vector<std::vector<float>> left((matmul.rows + ROWS - 1) / ROWS);
    for (std::size_t tile = 0; tile < left.size(); tile++)
        pack<ROWS, false>(x, matmul.x_stride, matmul.rows, matmul.k, tile * ROWS, left[tile]);
    std::vector<float> right;
    for (std::uint64_t column = 0; column < matmul.n; column += COLUMNS) {
        pack<COLUMNS, true>(weight, matmul.weight_stride, matmul.n, matmul.k, column, right);
        for (std::size_t tile = 0; tile < left.size(); tile++) {
            alignas(32) float sums[ROWS][COLUMNS] = {};
            for (std::uint64_t i = 0; i * SET < matmul.k; i++) {
                multiply_set(reinterpret_cast<const float(*)[SET]>(&left[tile][i * SET * ROWS]),
                             reinterpret_cast<const float(*)[COLUMNS]>(&right[i * SET * COLUMNS]), sums);
            }
            store(matmul, tile * ROWS, column, sums);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- operation

// As a kernel that reads or writes there: an error for good.
static Status reach(Context* context, const char* what, unsigned long long start, std::uint64_t rows,
                    std::uint64_t columns, std::uint64_t stride, std::size_t size) {
    std::uint64_t bytes = ((rows - 1) * stride + columns) * size;
    const Allocation* found = device_range(start, bytes);
    if (found && found->device == context->device) return SUCCESS;
    return fail_for_good(context, ILLEGAL_ADDRESS,
                         std::string("cublasLtMatmul: ") + what + " of " + std::to_string(bytes) +
                             " bytes is not inside one allocation of the device");
}

static Status run(Context* context, const Matmul& matmul) {
    if (is_due(Fault::Launch)) return fail_for_good(context, LAUNCH_FAILED, "planned fault: kernel of cublasLtMatmul");
    const Matmul& m = matmul;
    REQUIRE(reach(context, "x", m.x, m.rows, m.k, m.x_stride, 2));
    REQUIRE(reach(context, "weight", m.weight, m.n, m.k, m.weight_stride, 2));
    REQUIRE(reach(context, "out", m.out, m.rows, m.n, m.out_stride, 4));
    if (m.workspace_bytes) REQUIRE(reach(context, "workspace", m.workspace, 1, m.workspace_bytes, 0, 1));
    // Whatever the library keeps there: nobody may count on it, nor have something of its own in it.
    memset(at<void>(m.workspace), 0xff, m.workspace_bytes);
    compute(m);
    for (std::uint64_t row = 0; row < m.rows; row++) mark_written(m.out + row * m.out_stride * 4, m.n * 4);
    matmuls++;
    return SUCCESS;
}

EMU_API int emu_matmul(const Matmul* matmul, void* handle) {
    ENTER_READY;
    Stream* stream = find_stream(handle);
    if (!stream || stream->context != current_context()) return INVALID_HANDLE;
    if (is_due(Fault::Matmul)) return fail(LAUNCH_OUT_OF_RESOURCES, "planned fault: product of cuBLASLt refused");
    Operation operation;
    operation.run = [context = stream->context, copy = *matmul] { return run(context, copy); };
    return enqueue(stream, std::move(operation));
}

EMU_API int emu_matmul_ready() {
    ENTER_READY;
    return SUCCESS;
}

EMU_API void emu_cublaslt_objects(int change) {
    ENTER;
    cublaslt_objects += change;
}

}  // namespace emu
