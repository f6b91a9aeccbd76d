// Capture of streams, and graphs.
//
// A capture records operations and what each comes after: the order in its stream and the events that it waited for.
// Replay runs them in the order of the calls, or, under a random order, in any order that the recorded dependencies
// allow, so that a forgotten event between two branches is found. What may not happen while a stream is captured is
// refused as a driver refuses it, and the capture is lost.
#include <algorithm>
#include <thread>

#include "driver.h"

namespace emu {

enum CaptureMode { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };
static thread_local int thread_mode = MODE_GLOBAL;

struct Node {
    Operation operation;
    std::vector<std::size_t> after;
};
using Nodes = std::vector<Node>;

struct Capture {
    Stream* origin = nullptr;
    int mode = MODE_GLOBAL;
    std::thread::id thread;
    bool is_invalid = false, is_active = true;
    Nodes nodes;
    std::set<Stream*> streams;
};

struct Graph {
    Context* context;
    std::shared_ptr<const Nodes> nodes;
};
static auto& graphs = forever<std::set<Graph*>>();
static auto& executables = forever<std::set<Graph*>>();
static auto& captures = forever<std::vector<CaptureRef>>();  // the active ones

std::size_t live_graphs() { return graphs.size() + executables.size(); }

static Graph* find(const std::set<Graph*>& among, void* handle) {
    auto found = among.find(static_cast<Graph*>(handle));
    return found == among.end() ? nullptr : *found;
}

// ------------------------------------------------------------------------------------------------------------- capture

// cuThreadExchangeStreamCaptureMode's rules.
static bool forbids(const Capture& capture) {
    if (thread_mode == MODE_RELAXED || capture.mode == MODE_RELAXED) return false;
    bool is_own = capture.thread == std::this_thread::get_id();
    return is_own || (thread_mode == MODE_GLOBAL && capture.mode == MODE_GLOBAL);
}

Status refuse_during_capture(const char* what) {
    for (const CaptureRef& capture : captures) {
        if (!forbids(*capture)) continue;
        capture->is_invalid = true;
        return fail(STREAM_CAPTURE_UNSUPPORTED, std::string(what) + " while a stream is being captured");
    }
    return SUCCESS;
}

Status invalidate(Stream* stream, Status status, const std::string& why) {
    if (stream->capture) stream->capture->is_invalid = true;
    return fail(status, why);
}

Status capture_operation(Stream* stream, Operation operation) {
    Capture& capture = *stream->capture;
    if (capture.is_invalid) return fail(STREAM_CAPTURE_INVALIDATED, "the capture was lost by an earlier error");
    if (!operation.run) return SUCCESS;
    capture.nodes.push_back({std::move(operation), stream->captured_last});
    stream->captured_last = {capture.nodes.size() - 1};
    return SUCCESS;
}

Status capture_wait(Stream* stream, const MarkerRef& marker) {
    if (!marker->capture)
        return invalidate(stream, STREAM_CAPTURE_ISOLATION,
                          "a captured stream waits for an event that was recorded outside of the capture");
    if (!marker->capture->is_active) return fail(CAPTURED_EVENT, "the event was recorded in a capture that has ended");
    if (!stream->capture) {
        if (stream == stream->context->legacy_stream)
            return fail(STREAM_CAPTURE_IMPLICIT, "the legacy stream waits for an event of a capture");
        stream->capture = marker->capture;
        stream->capture->streams.insert(stream);
        stream->captured_last = marker->captured_nodes;
        return SUCCESS;
    }
    if (stream->capture != marker->capture) {
        marker->capture->is_invalid = true;
        return invalidate(stream, STREAM_CAPTURE_MERGE, "a wait would join two captures");
    }
    std::set<std::size_t> all(stream->captured_last.begin(), stream->captured_last.end());
    all.insert(marker->captured_nodes.begin(), marker->captured_nodes.end());
    stream->captured_last.assign(all.begin(), all.end());
    return SUCCESS;
}

void capture_record(Stream* stream, const MarkerRef& marker) {
    marker->capture = stream->capture;
    marker->captured_nodes = stream->captured_last;
}

// All work of streams that joined must come before the end of the stream that began.
static bool is_joined(const Capture& capture) {
    std::vector<bool> reached(capture.nodes.size(), false);
    std::vector<std::size_t> open = capture.origin->captured_last;
    while (!open.empty()) {
        std::size_t node = open.back();
        open.pop_back();
        if (reached[node]) continue;
        reached[node] = true;
        const auto& after = capture.nodes[node].after;
        open.insert(open.end(), after.begin(), after.end());
    }
    return std::find(reached.begin(), reached.end(), false) == reached.end();
}

EMU_API int cuStreamBeginCapture_v2(void* handle, int mode) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (mode < MODE_GLOBAL || mode > MODE_RELAXED) return INVALID_VALUE;
    if (stream == stream->context->legacy_stream)
        return fail(STREAM_CAPTURE_UNSUPPORTED, "the legacy stream cannot be captured");
    if (stream->capture) return fail(ILLEGAL_STATE, "the stream is being captured already");
    auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->streams.insert(stream);
    captures.push_back(capture);
    stream->capture = capture;
    stream->captured_last.clear();
    return SUCCESS;
}

static Status verdict(const Capture& capture) {
    if (is_due(Fault::Capture)) return fail(STREAM_CAPTURE_INVALIDATED, "planned fault: capture");
    if (capture.is_invalid) return fail(STREAM_CAPTURE_INVALIDATED, "the capture was lost by an earlier error");
    if (!is_joined(capture))
        return fail(STREAM_CAPTURE_UNJOINED, "work of another stream in the capture is not joined at its end");
    return SUCCESS;
}

EMU_API int cuStreamEndCapture(void* handle, void** out) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    *out = nullptr;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    CaptureRef capture = stream->capture;
    if (!capture) return fail(ILLEGAL_STATE, "the stream is not being captured");
    if (capture->origin != stream) {
        capture->is_invalid = true;
        return fail(STREAM_CAPTURE_UNMATCHED, "the capture began on another stream");
    }
    if (capture->mode != MODE_RELAXED && capture->thread != std::this_thread::get_id())
        return fail(STREAM_CAPTURE_WRONG_THREAD, "the capture began in another thread");
    Status status = verdict(*capture);
    capture->is_active = false;
    captures.erase(std::find(captures.begin(), captures.end(), capture));
    for (Stream* each : capture->streams) {
        each->capture.reset();
        each->captured_last.clear();
    }
    if (status != SUCCESS) return status;
    auto* graph = new Graph{stream->context, std::make_shared<const Nodes>(std::move(capture->nodes))};
    graphs.insert(graph);
    *out = graph;
    return SUCCESS;
}

constexpr int CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2;

EMU_API int cuStreamIsCapturing(void* handle, int* state) {
    ENTER;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    *state = !stream->capture ? CAPTURE_NONE : stream->capture->is_invalid ? CAPTURE_INVALIDATED : CAPTURE_ACTIVE;
    return SUCCESS;
}

EMU_API int cuThreadExchangeStreamCaptureMode(int* mode) {
    ENTER;
    if (*mode < MODE_GLOBAL || *mode > MODE_RELAXED) return INVALID_VALUE;
    std::swap(*mode, thread_mode);
    return SUCCESS;
}

// -------------------------------------------------------------------------------------------------------------- replay

static Status run_nodes(const Nodes& nodes) {
    if (settings.order != Order::Random) {
        for (const Node& node : nodes) REQUIRE(run_work(node.operation));
        return SUCCESS;
    }
    std::vector<bool> is_done(nodes.size(), false);
    for (std::size_t left = nodes.size(); left > 0; left--) {
        std::vector<std::size_t> ready;
        for (std::size_t i = 0; i < nodes.size(); i++) {
            const auto& after = nodes[i].after;
            bool may_run = std::all_of(after.begin(), after.end(), [&](std::size_t node) { return is_done[node]; });
            if (!is_done[i] && may_run) ready.push_back(i);
        }
        std::size_t chosen = ready[random_number() % ready.size()];
        REQUIRE(run_work(nodes[chosen].operation));
        is_done[chosen] = true;
    }
    return SUCCESS;
}

EMU_API int cuGraphInstantiateWithFlags(void** out, void* handle, unsigned long long) {
    ENTER_READY;
    Graph* graph = find(graphs, handle);
    if (!graph) return INVALID_HANDLE;
    if (is_due(Fault::Instantiate)) return fail(OUT_OF_MEMORY, "planned fault: instantiation of a graph");
    auto* executable = new Graph(*graph);
    executables.insert(executable);
    *out = executable;
    return SUCCESS;
}

EMU_API int cuGraphUpload(void* handle, void*) {
    ENTER_READY;
    return find(executables, handle) ? SUCCESS : INVALID_HANDLE;
}

EMU_API int cuGraphLaunch(void* handle, void* stream_handle) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Graph* graph = find(executables, handle);
    Stream* stream = find_stream(stream_handle);
    if (!graph || !stream) return INVALID_HANDLE;
    if (stream->context != graph->context)
        return fail(INVALID_VALUE, "cuGraphLaunch: graph and stream are of different devices");
    if (stream->capture)
        return invalidate(stream, STREAM_CAPTURE_UNSUPPORTED, "cuGraphLaunch in a capture: not emulated");
    if (is_due(Fault::Submit)) return fail(static_cast<Status>(settings.submit_status), "planned fault: launch of a graph refused");
    Operation operation;
    operation.run = [nodes = graph->nodes] { return run_nodes(*nodes); };
    return enqueue(stream, std::move(operation));
}

EMU_API int cuGraphGetNodes(void* handle, void**, std::size_t* count) {
    ENTER;
    Graph* graph = find(graphs, handle);
    if (!graph) return INVALID_HANDLE;
    *count = graph->nodes->size();
    return SUCCESS;
}

static Status destroy(std::set<Graph*>& among, void* handle) {
    Graph* graph = find(among, handle);
    if (!graph) return INVALID_HANDLE;
    among.erase(graph);
    delete graph;
    return SUCCESS;
}

EMU_API int cuGraphExecDestroy(void* handle) {
    ENTER;
    return destroy(executables, handle);
}

EMU_API int cuGraphDestroy(void* handle) {
    ENTER;
    return destroy(graphs, handle);
}

}  // namespace emu
