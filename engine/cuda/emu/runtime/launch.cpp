// A grid: workers take blocks in the order that the seed gives.
#include "launch.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <thread>

#include "checker.h"
#include "worker.h"

namespace emu {

LaunchOptions launch_options;
LaunchCounts launch_counts;

constexpr std::size_t PAGE = 4096;
constexpr std::size_t SHARED_ALIGNMENT = 128;  // DYNAMIC_SHARED in device.cuh says so

static std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Idle workers. Never destroyed: the driver is called from other libraries' destructors.
static std::mutex& pool_lock = *new std::mutex;
static std::vector<Worker*>& pool = *new std::vector<Worker*>;

static Worker* take_worker() {
    std::lock_guard<std::mutex> guard(pool_lock);
    if (pool.empty()) return new Worker;
    Worker* worker = pool.back();
    pool.pop_back();
    return worker;
}

static void give_worker(Worker* worker) {
    std::lock_guard<std::mutex> guard(pool_lock);
    pool.push_back(worker);
}

// Where this thread's __shared__ variables of the library lie.
static unsigned char* static_shared_of(const KernelLibrary* library) {
    if (!library->shared_bytes) return nullptr;
    if (library->shared_probe) library->shared_probe();
    struct Search {
        const KernelLibrary* library;
        void* found;
    } search{library, nullptr};
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* data) {
            auto* search = static_cast<Search*>(data);
            if (search->library->path != info->dlpi_name) return 0;
            search->found = info->dlpi_tls_data;
            return 1;
        },
        &search);
    return static_cast<unsigned char*>(search.found);
}

static void reserve_dynamic_shared(Worker* worker, std::size_t bytes) {
    if (!worker->dynamic_mapping || bytes > worker->dynamic_capacity) {
        if (worker->dynamic_mapping) munmap(worker->dynamic_mapping, worker->dynamic_capacity + PAGE);
        std::size_t capacity = std::max(PAGE, round_up(bytes, PAGE));
        void* mapping = mmap(nullptr, capacity + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapping == MAP_FAILED) {
            perror("emulated driver: no memory for shared memory");
            abort();
        }
        worker->dynamic_mapping = static_cast<unsigned char*>(mapping);
        worker->dynamic_capacity = capacity;
        mprotect(worker->dynamic_mapping + capacity, PAGE, PROT_NONE);
    }
    worker->dynamic_bytes = bytes;
    worker->dynamic = worker->dynamic_mapping + worker->dynamic_capacity - round_up(bytes, SHARED_ALIGNMENT);
}

static void prepare_worker(Worker* worker, const Launch& launch, std::uint32_t number) {
    const dim3& block = launch.block;
    worker->kernel = launch.kernel;
    worker->arguments = launch.arguments;
    worker->library = launch.library;
    worker->device = launch.device;
    worker->threads = block;
    worker->grid = launch.grid;
    worker->count = block.x * block.y * block.z;
    worker->warps = (worker->count + WARP - 1) / WARP;
    worker->launch_number = number;
    worker->is_random = launch_options.seed != 0;
    worker->random_state = (launch_options.seed * 0x2545f4914f6cdd1dull + number) | 1;
    worker->status = SUCCESS;
    worker->interruption = {};
    worker->is_out_of_time = false;
    worker->last_allocation = nullptr;
    reserve_stacks(worker, worker->count);
    reserve_dynamic_shared(worker, launch.dynamic_bytes);
    worker->static_shared = static_shared_of(launch.library);
    if (launch.library->is_checked)
        worker->shared_shadow.resize((launch.dynamic_bytes + launch.library->shared_bytes) / 2 + 2);
}

// A permutation of the blocks without a table: start + i * step, step prime to the number of blocks.
struct BlockOrder {
    std::uint64_t count, start = 0, step = 1;

    BlockOrder(std::uint64_t count, std::uint64_t seed, std::uint64_t launch) : count(count) {
        if (!seed || count < 2) return;
        std::uint64_t mixed = (seed * 0x9e3779b97f4a7c15ull + launch) * 0xbf58476d1ce4e5b9ull;
        mixed ^= mixed >> 31;
        start = mixed % count;
        step = (mixed / 7 % count) | 1;
        while (std::gcd(step, count) != 1) step += 2;
    }
    std::uint64_t at(std::uint64_t i) const {
        return static_cast<std::uint64_t>((start + static_cast<unsigned __int128>(i) * step) % count);
    }
};

Status run_grid(const Launch& launch, std::string& message) {
    static std::atomic<std::uint32_t> next_number{1};
    std::uint32_t number = next_number.fetch_add(1);
    const dim3& grid = launch.grid;
    std::uint64_t blocks = static_cast<std::uint64_t>(grid.x) * grid.y * grid.z;
    BlockOrder order(blocks, launch_options.seed, number);
    std::atomic<std::uint64_t> next_block{0};
    std::atomic<int> status{SUCCESS};
    std::mutex message_lock;

    auto work = [&] {
        install_fault_handlers();
        Worker* worker = take_worker();
        prepare_worker(worker, launch, number);
        this_worker = worker;
        start_watchdog(worker, launch_options.watchdog_s);
        while (status.load(std::memory_order_relaxed) == SUCCESS) {
            std::uint64_t i = next_block.fetch_add(1, std::memory_order_relaxed);
            if (i >= blocks) break;
            std::uint64_t block = order.at(i);
            worker->block_number = static_cast<std::uint32_t>(block);
            worker->index = {static_cast<unsigned>(block % grid.x), static_cast<unsigned>(block / grid.x % grid.y),
                             static_cast<unsigned>(block / grid.x / grid.y)};
            run_block(worker, launch_options.poison);
            explain_interruption(worker);
            if (worker->status == SUCCESS) continue;
            std::lock_guard<std::mutex> guard(message_lock);
            if (status.load() == SUCCESS) {
                status = worker->status;
                message = worker->message;
            }
        }
        stop_watchdog(worker);
        this_worker = nullptr;
        give_worker(worker);
    };

    // The checker's shadow is not made for several threads.
    unsigned threads = launch.library->is_checked ? 1 : launch_options.threads;
    threads = static_cast<unsigned>(std::min<std::uint64_t>(std::max(threads, 1u), blocks));
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();

    launch_counts.launches++;
    launch_counts.blocks += blocks;
    launch_counts.threads += blocks * launch.block.x * launch.block.y * launch.block.z;
    return static_cast<Status>(status.load());
}

}  // namespace emu
