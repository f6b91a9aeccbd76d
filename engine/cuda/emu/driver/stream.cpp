// Streams: queues of operations, and when they run.
//
// In order `late`, the default, an operation runs when somebody synchronizes or polls, and not before: what a program
// forgot to wait for has then never happened. Under `random` a seed decides after each call which streams go on.
#include <algorithm>
#include <condition_variable>

#include "driver.h"

namespace emu {

static auto& streams = forever<std::vector<Stream*>>();  // in order of creation, so that a seed gives one schedule
static auto& host_function_ended = forever<std::condition_variable_any>();
// A program that never synchronizes must not fill the memory.
constexpr std::size_t LONGEST_QUEUE = 8192;

constexpr std::uintptr_t LEGACY_HANDLE = 1, PER_THREAD_HANDLE = 2;

Stream* find_stream(void* handle) {
    auto value = reinterpret_cast<std::uintptr_t>(handle);
    if (value <= PER_THREAD_HANDLE) {
        Context* context = current_context();
        if (!context) return nullptr;
        return value == PER_THREAD_HANDLE ? context->per_thread_stream : context->legacy_stream;
    }
    auto found = std::find(streams.begin(), streams.end(), handle);
    return found == streams.end() ? nullptr : *found;
}

Stream* new_stream(Context* context, bool is_blocking, int priority) {
    auto* stream = new Stream;
    stream->context = context;
    stream->is_blocking = is_blocking;
    stream->priority = priority;
    streams.push_back(stream);
    return stream;
}

// Without the two that every context has.
std::size_t live_streams() { return streams.size() - 2 * driver.contexts.size(); }

// ------------------------------------------------------------------------------------------------------------ running

static double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

Status run_work(const Operation& operation) {
    if (!operation.run) return SUCCESS;
    if (!operation.is_host_function) return operation.run();
    // The function may wait for another thread that is about to call the driver: a card would not stop that thread.
    driver.lock.unlock();
    Status status = operation.run();
    driver.lock.lock();
    return status;
}

static void run(Stream* stream, const Operation& operation) {
    for (const MarkerRef& marker : operation.waits) settle(marker);
    Context* context = stream->context;
    if (operation.run && context->sticky == SUCCESS) {
        open_device_memory();
        Status status = run_work(operation);
        close_device_memory();
        if (status != SUCCESS && context->sticky == SUCCESS) context->sticky = status;
    }
    if (operation.completes) {
        operation.completes->is_done = true;
        operation.completes->done_at_s = now_s();
    }
}

// While a function of the host runs, here or in what the operation waits for, other threads find the stream busy:
// they must not overtake.
void run_one(Stream* stream) {
    while (stream->is_running) host_function_ended.wait(driver.lock);
    if (stream->queue.empty()) return;
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->is_running = true;
    run(stream, operation);
    stream->is_running = false;
    host_function_ended.notify_all();
}

static bool has_work(const Stream* stream) { return !stream->queue.empty() || stream->is_running; }

void drain(Stream* stream) {
    while (has_work(stream)) run_one(stream);
}

// From the beginning after each: streams come and go while a function of the host runs.
void drain_all(Context* context) {
    auto is_left = [&](Stream* stream) { return (!context || stream->context == context) && has_work(stream); };
    for (;;) {
        auto next = std::find_if(streams.begin(), streams.end(), is_left);
        if (next == streams.end()) return;
        run_one(*next);
    }
}

void settle(const MarkerRef& marker) {
    while (!marker->is_done && has_work(marker->stream)) run_one(marker->stream);
    marker->is_done = true;
}

// ----------------------------------------------------------------------------------------------------------- enqueuing

std::uint64_t random_number() {
    static std::uint64_t state = (launch_options.seed * 0x9e3779b97f4a7c15ull) | 1;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static MarkerRef mark_end(Stream* stream) {
    auto marker = std::make_shared<Marker>();
    marker->stream = stream;
    Operation operation;
    operation.completes = marker;
    stream->queue.push_back(std::move(operation));
    return marker;
}

// The legacy stream waits for all blocking streams of its context, and they for it.
static void wait_as_legacy_streams_do(Stream* stream, Operation& operation) {
    Stream* legacy = stream->context->legacy_stream;
    if (stream == legacy) {
        for (Stream* other : streams) {
            bool concerns = other != stream && other->context == stream->context && other->is_blocking;
            if (concerns && !other->queue.empty() && !other->capture) operation.waits.push_back(mark_end(other));
        }
    } else if (stream->is_blocking && !legacy->queue.empty()) {
        operation.waits.push_back(mark_end(legacy));
    }
}

Status enqueue(Stream* stream, Operation operation) {
    if (stream->capture) return capture_operation(stream, std::move(operation));
    if (stream == stream->context->legacy_stream) {
        for (Stream* other : streams) {
            if (other->capture && other->is_blocking && other->context == stream->context)
                return invalidate(other, STREAM_CAPTURE_IMPLICIT,
                                  "work on the legacy stream while a blocking stream is being captured");
        }
    }
    wait_as_legacy_streams_do(stream, operation);
    stream->queue.push_back(std::move(operation));
    if (settings.order == Order::Eager || stream->queue.size() > LONGEST_QUEUE) {
        drain(stream);
    } else if (settings.order == Order::Random) {
        for (std::uint64_t turns = random_number() % 3; turns > 0; turns--) {
            Stream* chosen = streams[random_number() % streams.size()];
            if (!chosen->is_running) run_one(chosen);
        }
    }
    return SUCCESS;
}

// ----------------------------------------------------------------------------------------------------------------- API

constexpr unsigned NON_BLOCKING = 1;

EMU_API int cuStreamCreateWithPriority(void** out, unsigned flags, int priority) {
    ENTER_READY;
    *out = new_stream(current_context(), !(flags & NON_BLOCKING), priority);
    return SUCCESS;
}

EMU_API int cuStreamCreate(void** out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

EMU_API int cuStreamDestroy_v2(void* handle) {
    ENTER;
    Stream* stream = find_stream(handle);
    if (!stream || stream == stream->context->legacy_stream || stream == stream->context->per_thread_stream)
        return INVALID_HANDLE;
    if (stream->capture) invalidate(stream, STREAM_CAPTURE_INVALIDATED, "a stream is destroyed while it is captured");
    drain(stream);
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    delete stream;
    return SUCCESS;
}

EMU_API int cuStreamSynchronize(void* handle) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture)
        return invalidate(stream, STREAM_CAPTURE_UNSUPPORTED, "cuStreamSynchronize of a captured stream");
    REQUIRE(refuse_during_capture("cuStreamSynchronize"));
    drain(stream);
    return stream->context->sticky;
}

// Each poll lets the stream do one more thing: a program that polls gets on, and sees "not ready" on the way.
EMU_API int cuStreamQuery(void* handle) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return invalidate(stream, STREAM_CAPTURE_UNSUPPORTED, "cuStreamQuery of a captured stream");
    REQUIRE(refuse_during_capture("cuStreamQuery"));
    if (stream->is_running) return NOT_READY;
    if (stream->queue.empty()) return stream->context->sticky;
    run_one(stream);
    if (stream->context->sticky != SUCCESS) return stream->context->sticky;
    return stream->queue.empty() ? SUCCESS : NOT_READY;
}

EMU_API int cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Stream* stream = find_stream(handle);
    Event* event = find_event(event_handle);
    if (!stream || !event) return INVALID_HANDLE;
    if (!event->marker) return SUCCESS;
    if (stream->capture || event->marker->capture) return capture_wait(stream, event->marker);
    Operation operation;
    operation.waits.push_back(event->marker);
    return enqueue(stream, std::move(operation));
}

EMU_API int cuStreamGetPriority(void* handle, int* priority) {
    ENTER;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    *priority = stream->priority;
    return SUCCESS;
}

EMU_API int cuStreamGetFlags(void* handle, unsigned* flags) {
    ENTER;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    *flags = stream->is_blocking ? 0 : NON_BLOCKING;
    return SUCCESS;
}

EMU_API int cuStreamGetCtx(void* handle, void** out) {
    ENTER;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    *out = stream->context;
    return SUCCESS;
}

EMU_API int cuStreamGetId(void* handle, unsigned long long* id) {
    ENTER;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    *id = reinterpret_cast<std::uintptr_t>(stream);
    return SUCCESS;
}

// Queues a function of the host, which what follows it in the stream waits for.
static int enqueue_host(void* handle, std::function<void()> function) {
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    Operation operation;
    operation.is_host_function = true;
    operation.run = [function = std::move(function)] {
        function();
        return SUCCESS;
    };
    return enqueue(stream, std::move(operation));
}

EMU_API int cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    ENTER_READY;
    return enqueue_host(handle, [=] { function(data); });
}

EMU_API int cuStreamAddCallback(void* handle, void (*function)(void*, int, void*), void* data, unsigned) {
    ENTER_READY;
    return enqueue_host(handle, [=] { function(handle, SUCCESS, data); });
}

}  // namespace emu
