// An emulated libcublasLt.so.13: products of bf16 matrices with f32 results, as the product asks for them.
//
// weight * x in column-major words, the left matrix transposed: row-major, x * weight transposed. Other types, scales
// and orders are not supported, and answered so. What is queued is matmul.cpp's, in the driver.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "matmul.h"

#define LT_API extern "C" __attribute__((visibility("default")))

namespace emu {

// cublasStatus_t
enum LtStatus {
    LT_SUCCESS = 0,
    LT_NOT_INITIALIZED = 1,
    LT_INVALID_VALUE = 7,
    LT_EXECUTION_FAILED = 13,
    LT_NOT_SUPPORTED = 15,
};

constexpr int COMPUTE_32F = 68, TYPE_32F = 0, TYPE_16BF = 14;
constexpr int OP_N = 0, OP_T = 1;

struct Handle {};
struct Descriptor {
    int compute, scale;
    int operation_a = OP_N, operation_b = OP_N;
};
// Column-major.
struct Layout {
    int type;
    std::uint64_t rows, columns;
    std::int64_t stride;
};
struct Preference {
    std::uint64_t workspace_bytes = 0;
    std::uint32_t alignment_bytes[4] = {256, 256, 256, 256};  // of A, B, C, D
    std::uint32_t reduction_schemes = 7;
};
// Of what cublasLtMatmulAlgo_t keeps.
struct Algorithm {
    std::uint64_t mark;
    std::uint64_t workspace_bytes;
    std::uint32_t alignment_bytes[4];
    std::uint64_t reserved[4];
};
static_assert(sizeof(Algorithm) == 64, "cublasLtMatmulAlgo_t is 64 bytes");
constexpr std::uint64_t MARK = 0x746c756d74616d65ull;
constexpr std::uint64_t WORKSPACE_BYTES = 4096;

struct HeuristicResult {
    Algorithm algorithm;
    std::size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

// ------------------------------------------------------------------------------------------------------------- objects

static std::mutex& lock = *new std::mutex;

template <class T>
static std::set<void*>& alive() {
    static auto& objects = *new std::set<void*>;
    return objects;
}

template <class T>
static int give(void** out, T* object) {
    if (!out) {
        delete object;
        return LT_INVALID_VALUE;
    }
    std::lock_guard<std::mutex> guard(lock);
    alive<T>().insert(object);
    emu_cublaslt_objects(1);
    *out = object;
    return LT_SUCCESS;
}

// Null for what is no such object.
template <class T>
static T* find(const void* object) {
    std::lock_guard<std::mutex> guard(lock);
    void* key = const_cast<void*>(object);
    return alive<T>().count(key) ? static_cast<T*>(key) : nullptr;
}

template <class T>
static int destroy(void* object) {
    T* found = find<T>(object);
    if (!found) return LT_INVALID_VALUE;
    {
        std::lock_guard<std::mutex> guard(lock);
        alive<T>().erase(object);
        emu_cublaslt_objects(-1);
    }
    delete found;
    return LT_SUCCESS;
}

template <class T>
static int set(T* to, const void* value, std::size_t bytes) {
    if (!value || bytes != sizeof(T)) return LT_INVALID_VALUE;
    memcpy(to, value, bytes);
    return LT_SUCCESS;
}

// EMU_CUBLASLT: a version, or `none`.
LT_API std::size_t cublasLtGetVersion() {
    const char* text = getenv("EMU_CUBLASLT");
    return text && *text ? static_cast<std::size_t>(strtoull(text, nullptr, 10)) : 130002;
}

LT_API int cublasLtCreate(void** out) {
    if (emu_matmul_ready() != 0) return LT_NOT_INITIALIZED;
    return give(out, new Handle);
}
LT_API int cublasLtDestroy(void* handle) { return destroy<Handle>(handle); }

LT_API int cublasLtMatmulDescCreate(void** out, int compute, int scale) {
    return give(out, new Descriptor{compute, scale});
}
LT_API int cublasLtMatmulDescDestroy(void* descriptor) { return destroy<Descriptor>(descriptor); }

LT_API int cublasLtMatmulDescSetAttribute(void* handle, int attribute, const void* value, std::size_t bytes) {
    constexpr int TRANSA = 3, TRANSB = 4;
    auto* descriptor = find<Descriptor>(handle);
    if (!descriptor) return LT_INVALID_VALUE;
    switch (attribute) {
        case TRANSA:
            return set(&descriptor->operation_a, value, bytes);
        case TRANSB:
            return set(&descriptor->operation_b, value, bytes);
        default:
            return LT_NOT_SUPPORTED;
    }
}

LT_API int cublasLtMatrixLayoutCreate(void** out, int type, std::uint64_t rows, std::uint64_t columns,
                                      std::int64_t stride) {
    return give(out, new Layout{type, rows, columns, stride});
}
LT_API int cublasLtMatrixLayoutDestroy(void* layout) { return destroy<Layout>(layout); }

LT_API int cublasLtMatmulPreferenceCreate(void** out) { return give(out, new Preference); }
LT_API int cublasLtMatmulPreferenceDestroy(void* preference) { return destroy<Preference>(preference); }

LT_API int cublasLtMatmulPreferenceSetAttribute(void* handle, int attribute, const void* value, std::size_t bytes) {
    constexpr int MAX_WORKSPACE_BYTES = 1, REDUCTION_SCHEME_MASK = 3, MIN_ALIGNMENT_A_BYTES = 5;
    auto* preference = find<Preference>(handle);
    if (!preference) return LT_INVALID_VALUE;
    int matrix = attribute - MIN_ALIGNMENT_A_BYTES;
    if (matrix >= 0 && matrix < 4) return set(&preference->alignment_bytes[matrix], value, bytes);
    switch (attribute) {
        case MAX_WORKSPACE_BYTES:
            return set(&preference->workspace_bytes, value, bytes);
        case REDUCTION_SCHEME_MASK:
            return set(&preference->reduction_schemes, value, bytes);
        default:
            return LT_NOT_SUPPORTED;
    }
}

// ------------------------------------------------------------------------------------------------------------- product

// The layouts of A, B, C and D.
struct Shape {
    const Layout *a, *b, *c, *d;
};

static int check(const Descriptor* descriptor, const Shape& shape) {
    const auto& [a, b, c, d] = shape;
    if (!descriptor || !a || !b || !c || !d) return LT_INVALID_VALUE;
    if (descriptor->compute != COMPUTE_32F || descriptor->scale != TYPE_32F) return LT_NOT_SUPPORTED;
    if (descriptor->operation_a != OP_T || descriptor->operation_b != OP_N) return LT_NOT_SUPPORTED;
    if (a->type != TYPE_16BF || b->type != TYPE_16BF) return LT_NOT_SUPPORTED;
    if (c->type != TYPE_32F || d->type != TYPE_32F) return LT_NOT_SUPPORTED;
    for (const Layout* layout : {a, b, c, d}) {
        bool is_sound = layout->rows && layout->columns && layout->stride >= static_cast<std::int64_t>(layout->rows);
        if (!is_sound) return LT_INVALID_VALUE;
    }
    bool fits = a->rows == b->rows && d->rows == a->columns && d->columns == b->columns && c->rows == d->rows &&
                c->columns == d->columns && c->stride == d->stride;
    return fits ? LT_SUCCESS : LT_INVALID_VALUE;
}

LT_API int cublasLtMatmulAlgoGetHeuristic(void* handle, void* descriptor, void* a, void* b, void* c, void* d,
                                          void* preference_handle, int asked, HeuristicResult* results, int* count) {
    auto* preference = find<Preference>(preference_handle);
    if (!find<Handle>(handle) || !preference || !results || !count || asked < 1) return LT_INVALID_VALUE;
    Shape shape{find<Layout>(a), find<Layout>(b), find<Layout>(c), find<Layout>(d)};
    *count = 0;
    int status = check(find<Descriptor>(descriptor), shape);
    if (status != LT_SUCCESS) return status;
    if (preference->workspace_bytes < WORKSPACE_BYTES) return LT_NOT_SUPPORTED;
    results[0] = {};
    results[0].algorithm.mark = MARK;
    results[0].algorithm.workspace_bytes = results[0].workspace_bytes = WORKSPACE_BYTES;
    memcpy(results[0].algorithm.alignment_bytes, preference->alignment_bytes, sizeof preference->alignment_bytes);
    results[0].waves = 1.0f;
    *count = 1;
    return LT_SUCCESS;
}

LT_API int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int attribute, void* value,
                                                std::size_t bytes, std::size_t* written) {
    constexpr int SPLITK_NUM = 2;
    if (!algorithm || algorithm->mark != MARK || !value || attribute != SPLITK_NUM) return LT_INVALID_VALUE;
    std::int32_t splits = 1;
    if (bytes != sizeof splits) return LT_INVALID_VALUE;
    memcpy(value, &splits, sizeof splits);
    if (written) *written = sizeof splits;
    return LT_SUCCESS;
}

static bool is_scale(const void* scale, float value) {
    float own;
    memcpy(&own, scale, sizeof own);
    return own == value;
}

// No stricter than the library is: the addresses keep what the preference has promised of them.
static bool is_aligned(const Algorithm* algorithm, const void* const (&matrices)[4]) {
    for (int i = 0; i < 4; i++) {
        if (reinterpret_cast<std::uintptr_t>(matrices[i]) % algorithm->alignment_bytes[i]) return false;
    }
    return true;
}

LT_API int cublasLtMatmul(void* handle, void* descriptor, const void* alpha, const void* a, void* a_layout,
                          const void* b, void* b_layout, const void* beta, const void* c, void* c_layout, void* d,
                          void* d_layout, const Algorithm* algorithm, void* workspace, std::size_t workspace_bytes,
                          void* stream) {
    if (!find<Handle>(handle) || !alpha || !beta || !a || !b || !c || !d || !algorithm) return LT_INVALID_VALUE;
    Shape shape{find<Layout>(a_layout), find<Layout>(b_layout), find<Layout>(c_layout), find<Layout>(d_layout)};
    int status = check(find<Descriptor>(descriptor), shape);
    if (status != LT_SUCCESS) return status;
    if (algorithm->mark != MARK || !workspace || workspace_bytes < algorithm->workspace_bytes) return LT_INVALID_VALUE;
    if (!is_aligned(algorithm, {a, b, c, d})) return LT_INVALID_VALUE;
    bool adds = is_scale(beta, 1.0f);
    if (c != d || !is_scale(alpha, 1.0f) || (!adds && !is_scale(beta, 0.0f))) return LT_NOT_SUPPORTED;
    auto address = [](const void* pointer) { return reinterpret_cast<unsigned long long>(pointer); };
    Matmul matmul;
    matmul.out = address(d), matmul.x = address(b), matmul.weight = address(a), matmul.workspace = address(workspace);
    matmul.rows = shape.d->columns, matmul.n = shape.d->rows, matmul.k = shape.a->rows;
    matmul.out_stride = static_cast<std::uint64_t>(shape.d->stride);
    matmul.x_stride = static_cast<std::uint64_t>(shape.b->stride);
    matmul.weight_stride = static_cast<std::uint64_t>(shape.a->stride);
    matmul.workspace_bytes = algorithm->workspace_bytes;
    matmul.adds = adds;
    return emu_matmul(&matmul, stream) == 0 ? LT_SUCCESS : LT_EXECUTION_FAILED;
}

}  // namespace emu
