// Who runs next within a block, what a barrier is, and how a block begins and ends.
//
// In order: the lowest lane of the current warp that may run, then the next warp. That is the fastest order (a warp
// meets in its collectives at once) and a weak test: a missing barrier often goes unseen. With a seed each switch
// takes any warp and any lane.
#include <atomic>
#include <cstdio>
#include <cstring>

#include "checker.h"
#include "worker.h"

namespace emu {

thread_local Worker* this_worker = nullptr;
static std::atomic<std::uint32_t> next_block_serial{1};

static unsigned lowest(std::uint32_t bits) { return static_cast<unsigned>(__builtin_ctz(bits)); }

static unsigned any_of(Worker* worker, std::uint32_t bits) {
    for (auto skip = worker->random() % static_cast<unsigned>(__builtin_popcount(bits)); skip > 0; skip--)
        bits &= bits - 1;
    return lowest(bits);
}

static Fiber* next_to_run(Worker* worker) {
    if (!worker->runnable_warps) return nullptr;
    if (worker->is_random) {
        unsigned warp = any_of(worker, worker->runnable_warps);
        return worker->fiber(warp * WARP + any_of(worker, worker->runnable[warp]));
    }
    unsigned warp = worker->current_warp;
    if (!(worker->runnable_warps >> warp & 1)) {
        std::uint32_t later = worker->runnable_warps & ~((2u << warp) - 1);
        warp = lowest(later ? later : worker->runnable_warps);
        worker->current_warp = warp;
    }
    return worker->fiber(warp * WARP + lowest(worker->runnable[warp]));
}

static void sleep(Worker* worker, Fiber* fiber) {
    worker->runnable[fiber->warp] &= ~(1u << fiber->lane);
    if (!worker->runnable[fiber->warp]) worker->runnable_warps &= ~(1u << fiber->warp);
}

void wake(Worker* worker, unsigned warp, std::uint32_t lanes) {
    worker->runnable[warp] |= lanes;
    if (worker->runnable[warp]) worker->runnable_warps |= 1u << warp;
}

// ------------------------------------------------------------------------------------------------------------- errors

void note(Worker* worker, Fiber* fiber, Status status, const std::string& what) {
    if (worker->status != SUCCESS) return;
    worker->status = status;
    char place[256];
    const uint3& block = worker->index;
    int length =
        snprintf(place, sizeof place, "kernel %s, block (%u,%u,%u)", worker->kernel->name, block.x, block.y, block.z);
    if (fiber && length > 0 && static_cast<std::size_t>(length) < sizeof place) {
        const uint3& thread = fiber->thread;
        snprintf(place + length, sizeof place - length, ", thread (%u,%u,%u)", thread.x, thread.y, thread.z);
    }
    worker->message = std::string(place) + ": " + what;
}

void abandon(Worker* worker) {
    void* unused;
    emu_switch(&unused, worker->scheduler_stack);
    __builtin_unreachable();
}

void stop(Worker* worker, Fiber* fiber, Status status, const std::string& what) {
    note(worker, fiber, status, what);
    abandon(worker);
}

// "32 threads at the barrier norm.cu:40, 1 in the collective norm.cu:52": where a block that cannot go on stands.
static std::string standing(Worker* worker) {
    struct Place {
        const Fiber* first;
        unsigned threads;
    };
    std::vector<Place> places;
    for (unsigned i = 0; i < worker->count; i++) {
        Fiber* fiber = worker->fiber(i);
        if (fiber->is_done || !fiber->site) continue;
        bool known = false;
        for (Place& place : places) {
            bool is_same =
                place.first->is_at_barrier == fiber->is_at_barrier && !strcmp(place.first->site, fiber->site);
            if (is_same) place.threads++, known = true;
        }
        if (!known) places.push_back({fiber, 1});
    }
    std::string text;
    for (const Place& place : places) {
        text += text.empty() ? "" : ", ";
        text += std::to_string(place.threads) +
                (place.first->is_at_barrier ? " at the barrier " : " in the collective ") + place_of(place.first);
    }
    unsigned gone = worker->count - worker->alive;
    return text + (gone ? ", " + std::to_string(gone) + " have exited" : "");
}

// ------------------------------------------------------------------------------------------------- waiting, barriers

void park(Worker* worker, Fiber* fiber) {
    sleep(worker, fiber);
    if (worker->is_out_of_time) abandon(worker);
    Fiber* next = next_to_run(worker);
    if (!next) stop(worker, fiber, LAUNCH_FAILED, "deadlock: no thread of the block can go on: " + standing(worker));
    worker->running = next;
    emu_switch(&fiber->stack_pointer, next->stack_pointer);
}

static void release_barrier(Worker* worker) {
    worker->at_barrier = 0;
    worker->barrier_result = worker->barrier_sum;
    worker->barrier_sum = 0;
    for (unsigned i = 0; i < worker->count; i++) {
        Fiber* fiber = worker->fiber(i);
        if (fiber->is_done) continue;
        fiber->barrier_epoch++;
        fiber->is_at_barrier = false;
    }
    for (unsigned warp = 0; warp < worker->warps; warp++)
        wake(worker, warp, worker->existing[warp] & ~worker->exited[warp]);
}

extern "C" {

__attribute__((visibility("default"))) void emu_barrier(int predicate, const char* site) {
    Fiber* fiber = self();
    Worker* worker = Worker::of(fiber);
    if (worker->is_out_of_time) abandon(worker);
    fiber->site = site;
    fiber->caller = __builtin_return_address(0);
    fiber->is_at_barrier = true;
    if (worker->at_barrier == 0) {
        worker->barrier_site = site;
    } else if (worker->barrier_site != site && strcmp(worker->barrier_site, site) != 0) {
        stop(worker, fiber, LAUNCH_FAILED,
             std::string("divergent barrier: threads of one block meet at different barriers, ") + site + " and " +
                 worker->barrier_site);
    }
    worker->barrier_sum += predicate;
    if (++worker->at_barrier == worker->alive) {
        release_barrier(worker);
    } else {
        park(worker, fiber);
    }
}

__attribute__((visibility("default"))) int emu_barrier_result() { return Worker::of(self())->barrier_result; }

__attribute__((visibility("default"))) void emu_trap(const char* what, const char* site) {
    Fiber* fiber = self();
    stop(Worker::of(fiber), fiber, ASSERT, std::string(what) + " at " + site);
}

__attribute__((visibility("default"))) void emu_collective(int kind, unsigned mask, void* operand, const char* site) {
    Fiber* fiber = self();
    Worker* worker = Worker::of(fiber);
    unsigned warp = fiber->warp;
    std::uint32_t lane = 1u << fiber->lane;
    fiber->kind = kind;
    fiber->mask = mask;
    fiber->site = site;
    fiber->caller = __builtin_return_address(0);
    fiber->operand = operand;
    if (worker->is_out_of_time) abandon(worker);
    if (!(mask & lane) || (mask & ~worker->existing[warp]) || (mask & worker->exited[warp]))
        stop(worker, fiber, LAUNCH_FAILED,
             "a warp's collective names a lane that is absent or has exited, or not the caller: " + place_of(fiber));
    worker->gathered[warp] |= lane;
    if ((worker->gathered[warp] & mask) != mask) {
        park(worker, fiber);
        return;
    }
    for (std::uint32_t rest = mask; rest; rest &= rest - 1) {
        Fiber* other = worker->fiber(warp * WARP + lowest(rest));
        if (other->kind != kind || other->mask != mask || (other->site != site && strcmp(other->site, site) != 0))
            stop(worker, fiber, LAUNCH_FAILED,
                 "lanes of one warp meet in different collectives: " + place_of(fiber) + " and " + place_of(other));
    }
    execute_collective(worker, warp, kind, mask);
    worker->gathered[warp] &= ~mask;
    wake(worker, warp, mask);
}

}  // extern "C"

// ------------------------------------------------------------------------------------------------- a block's life

static void exit_thread(Worker* worker, Fiber* fiber) {
    fiber->is_done = true;
    worker->alive--;
    worker->exited[fiber->warp] |= 1u << fiber->lane;
    sleep(worker, fiber);
    if (!worker->alive) abandon(worker);
    // A barrier waits for the threads that are left.
    if (worker->at_barrier == worker->alive) release_barrier(worker);
    Fiber* next = next_to_run(worker);
    if (!next)
        stop(worker, nullptr, LAUNCH_FAILED,
             "deadlock: the rest of the block waits for threads that have exited: " + standing(worker));
    worker->running = next;
    void* unused;
    emu_switch(&unused, next->stack_pointer);
}

static void thread_main() {
    Fiber* fiber = self();
    Worker* worker = Worker::of(fiber);
    worker->kernel->call(worker->arguments);
    exit_thread(worker, fiber);
    __builtin_trap();
}

static void prepare_threads(Worker* worker) {
    const dim3& shape = worker->threads;
    for (unsigned i = 0; i < worker->count; i++) {
        Fiber* fiber = worker->fiber(i);
        *fiber = Fiber{};
        fiber->thread = {i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
        fiber->linear = i;
        fiber->lane = i % WARP;
        fiber->warp = i / WARP;
        fiber->block = worker;
        worker->copies[i].clear();
        prepare_fiber(worker, i, thread_main);
    }
}

void run_block(Worker* worker, bool poison) {
    worker->alive = worker->count;
    worker->at_barrier = 0;
    worker->barrier_sum = 0;
    worker->runnable_warps = 0;
    worker->current_warp = 0;
    worker->block_serial = next_block_serial.fetch_add(1);
    for (unsigned warp = 0; warp < worker->warps; warp++) {
        unsigned lanes = worker->count - warp * WARP;
        worker->existing[warp] = lanes >= WARP ? ~0u : (1u << lanes) - 1;
        worker->exited[warp] = worker->gathered[warp] = worker->runnable[warp] = 0;
        wake(worker, warp, worker->existing[warp]);
    }
    if (poison) {
        if (worker->dynamic_bytes) memset(worker->dynamic, 0xff, worker->dynamic_bytes);
        if (worker->static_shared) memset(worker->static_shared, 0xff, worker->library->shared_bytes);
    }
    prepare_threads(worker);
    Fiber* first = next_to_run(worker);
    worker->running = first;
    worker->is_in_kernel = true;
    emu_switch(&worker->scheduler_stack, first->stack_pointer);
    worker->is_in_kernel = false;
}

}  // namespace emu
