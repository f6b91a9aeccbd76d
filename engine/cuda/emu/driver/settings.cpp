// Settings and planned faults, and the two functions by which tests read and change them: emu_set and emu_get.
//
// Keys of emu_set: seed, threads, order (0 late, 1 eager, 2 random), poison, strict, memory_bytes, watchdog_s,
// "fail_" + the name of a fault (fails the n-th from now on; 0: none).
// Keys of emu_get: the same, and counts since the start: launches, blocks, threads_run, and "seen_" + the name of a
// fault (how many there have been, so that a test can let each of them fail); and what is alive: used_bytes,
// allocations, streams, events, graphs, modules, cublaslt_objects; flushes (of what network cards wrote), matmuls (of
// cuBLASLt).
#include "settings.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../runtime/checker.h"
#include "driver.h"

namespace emu {

Settings& settings = forever<Settings>();

struct FaultPlan {
    const char* name;
    long long seen = 0, countdown = 0;
};
static FaultPlan plans[static_cast<int>(Fault::Count)] = {
    {"init"},    {"alloc"},       {"host_alloc"}, {"submit"},  {"launch"},   {"copy"},
    {"capture"}, {"instantiate"}, {"module"},     {"compile"}, {"ipc_open"},
    {"matmul"},
};

bool is_due(Fault fault) {
    FaultPlan& plan = plans[static_cast<int>(fault)];
    plan.seen++;
    return plan.countdown > 0 && --plan.countdown == 0;
}

static FaultPlan* find_plan(const std::string& name) {
    for (FaultPlan& plan : plans) {
        if (name == plan.name) return &plan;
    }
    return nullptr;
}

// A mistake in a test's environment must not look like a test that passed.
[[noreturn]] static void refuse_setting(const char* variable, const char* value) {
    fprintf(stderr, "emulated driver: %s=%s is not understood\n", variable, value);
    abort();
}

static long long number(const char* variable, long long fallback) {
    const char* text = getenv(variable);
    if (!text || !*text) return fallback;
    char* end;
    long long value = strtoll(text, &end, 10);
    if (*end || value < 0) refuse_setting(variable, text);
    return value;
}

static Order order_setting() {
    const char* text = getenv("EMU_ORDER");
    if (!text || !*text || !strcmp(text, "late")) return Order::Late;
    if (!strcmp(text, "eager")) return Order::Eager;
    if (!strcmp(text, "random")) return Order::Random;
    refuse_setting("EMU_ORDER", text);
}

static void read_faults() {
    const char* text = getenv("EMU_FAIL");
    if (!text) return;
    std::string rest = text;
    while (!rest.empty()) {
        std::size_t comma = rest.find(',');
        std::string item = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        std::size_t colon = item.find(':');
        FaultPlan* plan = find_plan(item.substr(0, colon));
        if (!plan || colon == std::string::npos) refuse_setting("EMU_FAIL", text);
        plan->countdown = atoll(item.c_str() + colon + 1);
        if (plan->countdown <= 0) refuse_setting("EMU_FAIL", text);
    }
}

void read_settings() {
    static bool is_read = false;
    if (is_read) return;
    is_read = true;
    settings.devices = static_cast<int>(number("EMU_DEVICES", settings.devices));
    settings.memory_bytes = static_cast<std::size_t>(number("EMU_MEMORY_MB", 4096)) << 20;
    settings.arch = static_cast<int>(number("EMU_ARCH", settings.arch));
    settings.driver_version = static_cast<int>(number("EMU_DRIVER_VERSION", settings.driver_version));
    settings.order = order_setting();
    settings.is_strict = number("EMU_STRICT_HOST", 0) != 0;
    settings.is_checked = number("EMU_CHECK", 0) != 0;
    settings.poison_bytes = static_cast<std::size_t>(number("EMU_POISON_MB", 256)) << 20;
    settings.is_verbose = number("EMU_LOG", 0) != 0;
    if (const char* visible = getenv("CUDA_VISIBLE_DEVICES")) {
        settings.visible_devices = visible;
        settings.has_visible_devices = true;
    }
    if (const char* planted = getenv("EMU_PLANTED")) settings.planted = planted;
    launch_options.seed = static_cast<std::uint64_t>(number("EMU_SEED", 0));
    launch_options.threads = static_cast<unsigned>(number("EMU_THREADS", 1));
    launch_options.watchdog_s = static_cast<unsigned>(number("EMU_WATCHDOG_S", launch_options.watchdog_s));
    launch_options.poison = settings.poison_bytes != 0;
    is_checking = settings.is_checked;
    is_checking_initialisation = settings.is_checked && number("EMU_UNINITIALISED", 0) != 0;
    read_faults();
}

// ------------------------------------------------------------------------------------------------- the tests'
// functions

static bool set(const std::string& key, long long value) {
    if (key.rfind("fail_", 0) == 0) {
        FaultPlan* plan = find_plan(key.substr(5));
        if (plan) plan->countdown = value;
        return plan != nullptr;
    }
    if (key == "seed") {
        launch_options.seed = static_cast<std::uint64_t>(value);
    } else if (key == "threads") {
        launch_options.threads = static_cast<unsigned>(value);
    } else if (key == "watchdog_s") {
        launch_options.watchdog_s = static_cast<unsigned>(value);
    } else if (key == "poison") {
        launch_options.poison = value != 0;
        settings.poison_bytes = value ? 256ull << 20 : 0;
    } else if (key == "order" && value >= 0 && value <= 2) {
        settings.order = static_cast<Order>(value);
    } else if (key == "strict") {
        set_strict(value != 0);
    } else if (key == "submit_status") {
        settings.submit_status = static_cast<int>(value);
    } else if (key == "memory_bytes") {
        settings.memory_bytes = static_cast<std::size_t>(value);
    } else {
        return false;
    }
    return true;
}

static long long get(const std::string& key) {
    if (key.rfind("seen_", 0) == 0) {
        FaultPlan* plan = find_plan(key.substr(5));
        return plan ? plan->seen : -1;
    }
    if (key.rfind("fail_", 0) == 0) {
        FaultPlan* plan = find_plan(key.substr(5));
        return plan ? plan->countdown : -1;
    }
    std::size_t used = 0;
    for (const Context* context : driver.contexts) used += context->used_bytes;
    struct Value {
        const char* name;
        unsigned long long value;
    } values[] = {
        {"seed", launch_options.seed},
        {"threads", launch_options.threads},
        {"watchdog_s", launch_options.watchdog_s},
        {"poison", launch_options.poison},
        {"order", static_cast<unsigned long long>(settings.order)},
        {"strict", settings.is_strict},
        {"checked", settings.is_checked},
        {"memory_bytes", settings.memory_bytes},
        {"launches", launch_counts.launches},
        {"blocks", launch_counts.blocks},
        {"threads_run", launch_counts.threads},
        {"used_bytes", used},
        {"allocations", live_allocations()},
        {"streams", live_streams()},
        {"events", live_events()},
        {"graphs", live_graphs()},
        {"modules", live_modules()},
        {"flushes", flush_count()},
        {"matmuls", matmul_count()},
        {"cublaslt_objects", live_cublaslt_objects()},
    };
    for (const Value& value : values) {
        if (key == value.name) return static_cast<long long>(value.value);
    }
    return -1;
}

// 0, or -1 for a key that is not there.
EMU_API int emu_set(const char* key, long long value) {
    ENTER;
    return set(key, value) ? 0 : -1;
}

// -1 for a key that is not there.
EMU_API long long emu_get(const char* key) {
    ENTER;
    return get(key);
}

// The text of the last error, valid until this thread asks again.
EMU_API const char* emu_message() {
    ENTER;
    static thread_local std::string text;
    text = driver.last_message;
    return text.c_str();
}

// For the emulated NVRTC: 1 if this compilation is to fail.
EMU_API int emu_compile_is_due() {
    ENTER;
    return is_due(Fault::Compile);
}

}  // namespace emu
