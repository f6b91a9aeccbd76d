// Events: what was on a stream at the time of the record.
#include <algorithm>

#include "driver.h"

namespace emu {

static auto& events = forever<std::set<Event*>>();
constexpr unsigned DISABLE_TIMING = 2;

Event* find_event(void* handle) {
    auto found = events.find(static_cast<Event*>(handle));
    return found == events.end() ? nullptr : *found;
}

std::size_t live_events() { return events.size(); }

EMU_API int cuEventCreate(void** out, unsigned flags) {
    ENTER_READY;
    auto* event = new Event;
    event->context = current_context();
    event->flags = flags;
    events.insert(event);
    *out = event;
    return SUCCESS;
}

EMU_API int cuEventDestroy_v2(void* handle) {
    ENTER;
    Event* event = find_event(handle);
    if (!event) return INVALID_HANDLE;
    events.erase(event);
    delete event;
    return SUCCESS;
}

EMU_API int cuEventRecord(void* handle, void* stream_handle) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Event* event = find_event(handle);
    Stream* stream = find_stream(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    if (event->context != stream->context)
        return fail(INVALID_HANDLE, "cuEventRecord: event and stream are of different devices");
    auto marker = std::make_shared<Marker>();
    marker->stream = stream;
    event->marker = marker;
    if (stream->capture) {
        capture_record(stream, marker);
        return SUCCESS;
    }
    Operation operation;
    operation.completes = marker;
    return enqueue(stream, std::move(operation));
}

EMU_API int cuEventRecordWithFlags(void* handle, void* stream_handle, unsigned flags) {
    if (flags) return NOT_SUPPORTED;
    return cuEventRecord(handle, stream_handle);
}

// As with streams, a poll lets one more thing happen.
EMU_API int cuEventQuery(void* handle) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Event* event = find_event(handle);
    if (!event) return INVALID_HANDLE;
    MarkerRef marker = event->marker;
    if (!marker) return SUCCESS;
    if (marker->capture) return fail(CAPTURED_EVENT, "cuEventQuery of an event recorded in a capture");
    REQUIRE(refuse_during_capture("cuEventQuery"));
    if (!marker->is_done && marker->stream->is_running) return NOT_READY;
    if (!marker->is_done) run_one(marker->stream);
    if (event->context->sticky != SUCCESS) return event->context->sticky;
    return marker->is_done ? SUCCESS : NOT_READY;
}

EMU_API int cuEventSynchronize(void* handle) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Event* event = find_event(handle);
    if (!event) return INVALID_HANDLE;
    MarkerRef marker = event->marker;
    if (marker && marker->capture) return fail(CAPTURED_EVENT, "cuEventSynchronize of an event recorded in a capture");
    REQUIRE(refuse_during_capture("cuEventSynchronize"));
    if (marker) settle(marker);
    return event->context->sticky;
}

EMU_API int cuEventElapsedTime_v2(float* milliseconds, void* first, void* last) {
    ENTER;
    REQUIRE(entry.ready_without_context());
    Event *begin = find_event(first), *end = find_event(last);
    if (!begin || !end || !begin->marker || !end->marker) return INVALID_HANDLE;
    if ((begin->flags | end->flags) & DISABLE_TIMING)
        return fail(INVALID_HANDLE, "cuEventElapsedTime of an event that was made without timing");
    if (!begin->marker->is_done || !end->marker->is_done) return NOT_READY;
    *milliseconds = static_cast<float>((end->marker->done_at_s - begin->marker->done_at_s) * 1e3);
    return SUCCESS;
}

EMU_API int cuEventElapsedTime(float* milliseconds, void* first, void* last) {
    return cuEventElapsedTime_v2(milliseconds, first, last);
}

}  // namespace emu
