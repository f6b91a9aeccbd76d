// Stacks of fibers and the switch between them.
//
// x86-64 only: the switch saves what the System V ABI lets a callee keep. Control words of the FPU are not saved:
// kernels do not change them.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "worker.h"

namespace emu {

// Pushes the callee's registers, exchanges the stack pointer, pops, and jumps: `ret` would go against the processor's
// return predictor, which belongs to the other stack.
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size emu_switch, . - emu_switch
)");

constexpr unsigned SAVED_REGISTERS = 6;
constexpr std::size_t PAGE = 4096;

// Each stack is aligned to its size, and its lowest page is a guard.
void reserve_stacks(Worker* worker, unsigned count) {
    if (worker->capacity >= count) return;
    if (worker->stacks) munmap(worker->stacks, worker->capacity * STACK_BYTES);
    unsigned capacity = count <= 128 ? 128 : count <= 256 ? 256 : MOST_THREADS;
    std::size_t bytes = (capacity + 1) * STACK_BYTES;
    void* mapping =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (mapping == MAP_FAILED) {
        perror("emulated driver: no memory for stacks of threads");
        abort();
    }
    std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(mapping);
    std::uintptr_t aligned = (begin + STACK_BYTES - 1) & ~(STACK_BYTES - 1);
    if (aligned > begin) munmap(mapping, aligned - begin);
    std::uintptr_t end = aligned + capacity * STACK_BYTES;
    if (begin + bytes > end) munmap(reinterpret_cast<void*>(end), begin + bytes - end);
    worker->stacks = reinterpret_cast<char*>(aligned);
    worker->capacity = capacity;
    // A huge page would touch 2 MiB for each stack that needs 4 KiB.
    madvise(worker->stacks, capacity * STACK_BYTES, MADV_NOHUGEPAGE);
    for (unsigned i = 0; i < capacity; i++) mprotect(worker->stacks + i * STACK_BYTES, PAGE, PROT_NONE);
    worker->copies.resize(capacity);
}

// The fiber's first switch "returns" into `entry`, with the stack as the ABI wants it at a function's first
// instruction.
void prepare_fiber(Worker* worker, unsigned linear, void (*entry)()) {
    Fiber* fiber = worker->fiber(linear);
    void** top = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(fiber) & ~std::uintptr_t{15});
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    fiber->stack_pointer = top - SAVED_REGISTERS;
}

}  // namespace emu
