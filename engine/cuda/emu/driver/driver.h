// Inside the driver: its state, and what its files offer each other.
//
// One lock guards all of it (Entry). Operations on streams run in the thread that synchronizes, under the lock;
// functions of the host (cuLaunchHostFunc) run without it. Handles that the program holds are addresses of the structs
// below, looked up in a set before use. Nothing here is ever destroyed: UCX and others call the driver from destructors
// that run after ours would.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../runtime/allocation.h"
#include "../runtime/launch.h"
#include "settings.h"
#include "status.h"

#define EMU_API extern "C" __attribute__((visibility("default")))

namespace emu {

using DevicePointer = unsigned long long;

template <class T>
T& forever() {
    return *new T();
}

// ------------------------------------------------------------------------------------------------- devices, contexts

struct Stream;
struct Capture;
using CaptureRef = std::shared_ptr<Capture>;

// Every device has one context, its primary one.
struct Context {
    int device = 0;  // as the program counts
    unsigned references = 0, flags = 0;
    std::size_t used_bytes = 0;
    Status sticky = SUCCESS;  // a kernel has gone wrong: every later call fails
    Stream *legacy_stream = nullptr, *per_thread_stream = nullptr;
};

struct Driver {
    std::mutex lock;
    bool is_initialized = false;
    std::vector<Context*> contexts;
    std::string last_message;  // of the last error, for cuGetErrorString
    Status last_status = SUCCESS;
};
extern Driver& driver;

Context* current_context();
bool is_context(const void* handle);
unsigned long long flush_count();

// ---------------------------------------------------------------------------------------------------------- each call

// Holds the lock for the time of a call, and reads the settings at the first.
class Entry {
  public:
    explicit Entry(const char* name);
    // What stands in the way of any call: no cuInit, no context, a sticky error.
    Status ready() const;
    Status ready_without_context() const;

  private:
    std::lock_guard<std::mutex> guard;
};

#define ENTER Entry entry(__func__)
#define REQUIRE(condition) \
    if (Status required = (condition); required != SUCCESS) return required
#define ENTER_READY \
    ENTER;          \
    REQUIRE(entry.ready())

// Remembers why, and gives the status back.
Status fail(Status status, const std::string& why);
// The same for an error of a kernel or a copy while it ran: the context is lost.
Status fail_for_good(Context* context, Status status, const std::string& why);

// ------------------------------------------------------------------------------------------------------------- memory

const Allocation* device_range(DevicePointer start, std::size_t bytes);  // null unless inside one allocation
bool is_pinned(const void* start, std::size_t bytes);
// Strict mode: device memory can be touched only while an operation runs.
void open_device_memory();
void close_device_memory();
void set_strict(bool is_strict);
std::size_t live_allocations();
Status add_ipc_mapping(DevicePointer* out, int file, std::uint64_t offset, std::size_t mapping_bytes,
                       std::size_t begin_in_mapping, std::size_t bytes);
Status remove_ipc_mapping(DevicePointer start);
int device_memory_file();

// ------------------------------------------------------------------------------------------------------------ streams

// What an event's record, or an operation that others wait for, comes to.
struct Marker {
    bool is_done = false;
    double done_at_s = 0;
    Stream* stream = nullptr;
    // Recorded in a capture: the nodes that come before it.
    CaptureRef capture;
    std::vector<std::size_t> captured_nodes;
};
using MarkerRef = std::shared_ptr<Marker>;

struct Operation {
    std::function<Status()> run;  // may be empty: an operation that only waits or marks
    std::vector<MarkerRef> waits;
    MarkerRef completes;
    bool is_host_function = false;
};

struct Stream {
    Context* context = nullptr;
    bool is_blocking = false;  // synchronizes with the legacy stream
    int priority = 0;
    std::deque<Operation> queue;
    bool is_running = false;  // one of its operations
    // While it is captured.
    CaptureRef capture;
    std::vector<std::size_t> captured_last;  // nodes that the next one comes after
};

struct Event {
    Context* context = nullptr;
    unsigned flags = 0;
    MarkerRef marker;
};

Stream* find_stream(void* handle);  // null: no such stream
Event* find_event(void* handle);
Stream* new_stream(Context* context, bool is_blocking, int priority);
// Into the stream's queue, or into the capture.
Status enqueue(Stream* stream, Operation operation);
void drain(Stream* stream);
void drain_all(Context* context = nullptr);
void settle(const MarkerRef& marker);
void run_one(Stream* stream);
// The work itself, without what it waits for.
Status run_work(const Operation& operation);
std::uint64_t random_number();
std::size_t live_streams();
std::size_t live_events();

// ------------------------------------------------------------------------------------------------------------- graphs

// SUCCESS, or what a call that synchronizes or allocates must answer while a stream is being captured.
Status refuse_during_capture(const char* what);
// The same for an operation that a captured stream cannot take.
Status invalidate(Stream* stream, Status status, const std::string& why);
Status capture_operation(Stream* stream, Operation operation);
Status capture_wait(Stream* stream, const MarkerRef& marker);
void capture_record(Stream* stream, const MarkerRef& marker);
std::size_t live_graphs();

// ------------------------------------------------------------------------------------------------------------ modules

// The most dynamic shared memory that a kernel of this device may opt in to.
int most_dynamic_shared();
std::size_t live_modules();

// ------------------------------------------------------------------------------------------------- cuBLASLt's products

unsigned long long matmul_count();
// Handles and descriptors.
std::size_t live_cublaslt_objects();

}  // namespace emu
