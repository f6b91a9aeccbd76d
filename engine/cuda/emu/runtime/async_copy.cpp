// cp.async: copies land at the wait, as late as a card may let them, so that a missing wait is a wrong number each
// time.
//
// With a seed about half of them land at once, which a card may do as well: late copies alone would hide that a buffer
// is overwritten while others still read it.
#include <cstring>

#include "checker.h"
#include "worker.h"

namespace emu {

static void land(const AsyncCopy& copy, unsigned bytes) {
    memcpy(copy.destination, copy.source, copy.valid_bytes);
    memset(copy.destination + copy.valid_bytes, 0, bytes - copy.valid_bytes);
}

constexpr unsigned COPY_BYTES = 16;

extern "C" {

__attribute__((visibility("default"))) void emu_cp_async(void* to_shared, const void* from_global, unsigned valid_bytes,
                                                         const char* site) {
    Fiber* fiber = self();
    Worker* worker = Worker::of(fiber);
    fiber->site = site;
    fiber->caller = __builtin_return_address(0);
    std::uintptr_t destination = reinterpret_cast<std::uintptr_t>(to_shared);
    std::uintptr_t source = reinterpret_cast<std::uintptr_t>(from_global);
    if (destination % COPY_BYTES != 0 || (valid_bytes && source % COPY_BYTES != 0))
        stop(worker, fiber, MISALIGNED_ADDRESS, "cp.async: an address is not aligned to 16 bytes, " + place_of(fiber));
    if (!worker->is_shared(to_shared, COPY_BYTES))
        stop(worker, fiber, ILLEGAL_ADDRESS, "cp.async: the destination is not in shared memory, " + place_of(fiber));
    // The destination is the copy's from here to the wait.
    check_access(worker, fiber, destination, COPY_BYTES, ACCESS_COPY_BEGINS, nullptr);
    if (valid_bytes) check_access(worker, fiber, source, valid_bytes, ACCESS_READ, nullptr);
    AsyncCopy copy{static_cast<unsigned char*>(to_shared),
                   static_cast<const unsigned char*>(from_global),
                   valid_bytes,
                   fiber->copy_group,
                   site,
                   fiber->caller,
                   worker->is_random && worker->random() & 1};
    if (copy.has_landed) land(copy, COPY_BYTES);
    worker->copies[fiber->linear].push_back(copy);
}

__attribute__((visibility("default"))) void emu_cp_async_commit() { self()->copy_group++; }

__attribute__((visibility("default"))) void emu_cp_async_wait(int pending) {
    Fiber* fiber = self();
    Worker* worker = Worker::of(fiber);
    std::vector<AsyncCopy>& copies = worker->copies[fiber->linear];
    std::int32_t first_pending = fiber->copy_group - pending;
    std::size_t kept = 0;
    for (const AsyncCopy& copy : copies) {
        if (copy.group >= first_pending) {
            copies[kept++] = copy;
            continue;
        }
        fiber->site = copy.site;
        fiber->caller = copy.caller;
        check_access(worker, fiber, reinterpret_cast<std::uintptr_t>(copy.destination), COPY_BYTES, ACCESS_COPY_ENDS,
                     nullptr);
        if (!copy.has_landed) land(copy, COPY_BYTES);
    }
    copies.resize(kept);
}

}  // extern "C"

}  // namespace emu
