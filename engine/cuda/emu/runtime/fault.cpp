// Signals: a kernel that touches what it may not, divides by zero, or does not end.
//
// A handler does no more than to remember the place and to leave the block: it redirects the thread to the scheduler's
// stack. The text is composed afterwards (explain_interruption), where locks and memory may be used. Faults outside of
// kernels go to the handler that was there before.
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "allocation.h"
#include "worker.h"

namespace emu {

constexpr int WATCHDOG_SIGNAL = SIGVTALRM;
constexpr long WATCHDOG_RETRY_NS = 5'000'000;
constexpr std::size_t HANDLER_STACK_BYTES = 64 * 1024;
// Farther than this from an allocation's end, a fault is not called an overrun of it.
constexpr std::uintptr_t NEAR_BYTES = 64 * 1024;

static bool is_code_of_kernels(const Worker* worker, std::uintptr_t address) {
    return address >= worker->library->begin && address < worker->library->end;
}

// ----------------------------------------------------------------------------------------------------------- handlers

static struct sigaction previous_segv, previous_bus, previous_fpe, previous_ill;

static struct sigaction* previous_action(int signal) {
    switch (signal) {
        case SIGSEGV:
            return &previous_segv;
        case SIGBUS:
            return &previous_bus;
        case SIGFPE:
            return &previous_fpe;
        default:
            return &previous_ill;
    }
}

// The thread goes on in emu_switch, on its own stack of the scheduler. Nothing of the fiber is unwound.
static void leave_block(Worker* worker, ucontext_t* context) {
    static thread_local void* unused;
    static thread_local char scratch[512] __attribute__((aligned(16)));
    auto* registers = context->uc_mcontext.gregs;
    registers[REG_RSP] = reinterpret_cast<greg_t>(scratch + sizeof scratch - 8 * sizeof(void*));
    registers[REG_RDI] = reinterpret_cast<greg_t>(&unused);
    registers[REG_RSI] = reinterpret_cast<greg_t>(worker->scheduler_stack);
    registers[REG_RIP] = reinterpret_cast<greg_t>(&emu_switch);
}

// Without stdio's stream, whose buffer is larger than the stack that Rust gives a thread's handlers.
static void report_touch(const void* address, std::size_t bytes) {
    static char text[160];
    int length = snprintf(text, sizeof text,
                          "emulated driver: the host touched device memory at %p, in an allocation of %zu bytes\n",
                          address, bytes);
    if (length > 0 && write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) return;
}

static void pass_on(int signal, siginfo_t* info, void* context) {
    struct sigaction* previous = previous_action(signal);
    if (signal == SIGSEGV) {
        const Allocation* touched = find_allocation(reinterpret_cast<std::uintptr_t>(info->si_addr));
        if (touched && touched->is_on_device()) report_touch(info->si_addr, touched->bytes);
    }
    if (previous->sa_flags & SA_SIGINFO) {
        previous->sa_sigaction(signal, info, context);
    } else if (previous->sa_handler != SIG_DFL && previous->sa_handler != SIG_IGN) {
        previous->sa_handler(signal);
    } else {
        sigaction(signal, previous, nullptr);  // the access happens again, and ends the process
    }
}

static void on_fault(int signal, siginfo_t* info, void* context) {
    Worker* worker = this_worker;
    if (!worker || !worker->is_in_kernel) {
        pass_on(signal, info, context);
        return;
    }
    auto* machine = static_cast<ucontext_t*>(context);
    worker->interruption.signal = signal;
    worker->interruption.address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    worker->interruption.program_counter = reinterpret_cast<void*>(machine->uc_mcontext.gregs[REG_RIP]);
    worker->interruption.stack_pointer = static_cast<std::uintptr_t>(machine->uc_mcontext.gregs[REG_RSP]);
    leave_block(worker, machine);
}

// In the runtime or the C library the thread may hold a lock: it is left when it is back in the kernel's own code, or
// at its next collective. The timer comes again.
static void on_watchdog(int signal, siginfo_t*, void* context) {
    Worker* worker = this_worker;
    if (!worker || !worker->is_in_kernel) return;
    worker->is_out_of_time = true;
    worker->interruption.signal = signal;
    auto* machine = static_cast<ucontext_t*>(context);
    auto counter = static_cast<std::uintptr_t>(machine->uc_mcontext.gregs[REG_RIP]);
    if (!is_code_of_kernels(worker, counter)) return;
    worker->interruption.program_counter = reinterpret_cast<void*>(counter);
    leave_block(worker, machine);
}

// A fault may be the overflow of a fiber's stack, so handlers run on a stack of their own.
static void reserve_handler_stack() {
    static thread_local bool is_reserved = false;
    if (is_reserved) return;
    is_reserved = true;
    stack_t current{};
    if (sigaltstack(nullptr, &current) != 0 || !(current.ss_flags & SS_DISABLE)) return;
    static thread_local struct Owned {
        void* memory = malloc(HANDLER_STACK_BYTES);
        ~Owned() {
            stack_t off{};
            off.ss_flags = SS_DISABLE;
            sigaltstack(&off, nullptr);
            free(memory);
        }
    } owned;
    stack_t stack{};
    stack.ss_sp = owned.memory;
    stack.ss_size = HANDLER_STACK_BYTES;
    sigaltstack(&stack, nullptr);
}

void install_fault_handlers() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action {};
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        action.sa_sigaction = on_fault;
        for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, previous_action(signal));
        action.sa_flags |= SA_RESTART;
        action.sa_sigaction = on_watchdog;
        sigaction(WATCHDOG_SIGNAL, &action, nullptr);
    });
    reserve_handler_stack();
}

// ----------------------------------------------------------------------------------------------------------- watchdog

// Processor time of this thread: a machine that is busy with others, or a stopped process, is no error.
void start_watchdog(Worker* worker, unsigned seconds) {
    if (!seconds) return;
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = WATCHDOG_SIGNAL;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &worker->timer) != 0) return;
    itimerspec when{};
    when.it_value.tv_sec = seconds;
    when.it_interval.tv_nsec = WATCHDOG_RETRY_NS;
    timer_settime(worker->timer, 0, &when, nullptr);
    worker->has_timer = true;
    worker->watchdog_s = seconds;
}

void stop_watchdog(Worker* worker) {
    if (worker->has_timer) timer_delete(worker->timer);
    worker->has_timer = false;
}

// --------------------------------------------------------------------------------------------------------------- texts

std::string source_line(const void* program_counter) {
    Dl_info info;
    if (!dladdr(program_counter, &info) || !info.dli_fname) return "an unknown place";
    auto offset =
        static_cast<std::size_t>(static_cast<const char*>(program_counter) - static_cast<const char*>(info.dli_fbase));
    char command[512];
    snprintf(command, sizeof command, "addr2line -ie '%s' 0x%zx 2>/dev/null", info.dli_fname, offset);
    std::string line;
    if (FILE* pipe = popen(command, "r")) {
        // Innermost first; what is inlined from a header says less than the kernel's own line.
        char text[512];
        while (fgets(text, sizeof text, pipe)) {
            const char* name = strrchr(text, '/');
            line = name ? name + 1 : text;
            line.erase(line.find_first_of(" \n"));
            if (line.find(".cu:") != std::string::npos) break;
        }
        pclose(pipe);
    }
    if (!line.empty() && line[0] != '?') return line;
    snprintf(command, sizeof command, "%s+0x%zx", info.dli_fname, offset);
    return command;
}

// device.cuh's functions give their own line; the kernel's says more.
std::string place_of(const Fiber* fiber) {
    if (!fiber->site) return "an unknown place";
    if (!strstr(fiber->site, ".cuh:") || !fiber->caller) return fiber->site;
    return source_line(static_cast<const char*>(fiber->caller) - 1);
}

// The kernel's line; where the fault is in a function that it called, the line of the call.
static std::string place_of_interruption(const Worker* worker, const Interruption& interruption) {
    auto counter = reinterpret_cast<std::uintptr_t>(interruption.program_counter);
    if (counter && is_code_of_kernels(worker, counter)) return source_line(interruption.program_counter);
    std::uintptr_t slot = interruption.stack_pointer & ~std::uintptr_t{7};
    if (worker->owns_stack(slot)) {
        std::uintptr_t top = reinterpret_cast<std::uintptr_t>(fiber_of_stack(slot & ~(STACK_BYTES - 1)));
        for (; slot < top; slot += 8) {
            std::uintptr_t value = *reinterpret_cast<std::uintptr_t*>(slot);
            if (is_code_of_kernels(worker, value)) return source_line(reinterpret_cast<void*>(value - 1));
        }
    }
    return worker->running ? place_of(worker->running) : "an unknown place";
}

std::string describe_address(const Worker* worker, std::uintptr_t address) {
    char text[200];
    Freed freed = find_freed(address);
    const Allocation* below = allocation_below(address);
    auto dynamic = reinterpret_cast<std::uintptr_t>(worker->dynamic);
    if (freed.is_freed) {
        snprintf(text, sizeof text, "use after free: address 0x%zx was in an allocation of %zu bytes", address,
                 freed.bytes);
    } else if (below && address >= below->end() && address - below->end() < NEAR_BYTES) {
        snprintf(text, sizeof text, "illegal address 0x%zx, %zu bytes past the end of an allocation of %zu bytes",
                 address, address - below->end(), below->bytes);
    } else if (address >= dynamic && address - dynamic < NEAR_BYTES) {
        snprintf(text, sizeof text, "illegal address 0x%zx, past %zu bytes of dynamic shared memory", address,
                 worker->dynamic_bytes);
    } else {
        snprintf(text, sizeof text, "illegal address 0x%zx, in no allocation: memory of the host?", address);
    }
    return text;
}

void explain_interruption(Worker* worker) {
    Interruption interruption = worker->interruption;
    if (!interruption.signal) return;
    worker->interruption = {};
    std::string place = place_of_interruption(worker, interruption);
    if (interruption.signal == WATCHDOG_SIGNAL) {
        note(worker, worker->running, LAUNCH_TIMEOUT,
             "the kernel did not end within " + std::to_string(worker->watchdog_s) +
                 " s of processor time; it stands at " + place);
    } else if (interruption.signal == SIGFPE) {
        note(worker, worker->running, LAUNCH_FAILED, "integer division by zero, " + place);
    } else if (interruption.signal == SIGILL) {
        // What -fsanitize=alignment puts before an access that its type does not allow.
        note(worker, worker->running, MISALIGNED_ADDRESS, "misaligned access, " + place);
    } else if (worker->owns_stack(interruption.address)) {
        note(worker, worker->running, ILLEGAL_ADDRESS,
             "the stack of a thread overflowed (" + std::to_string(STACK_BYTES / 1024) + " KiB), " + place);
    } else {
        note(worker, worker->running, ILLEGAL_ADDRESS, describe_address(worker, interruption.address) + ", " + place);
    }
}

}  // namespace emu
