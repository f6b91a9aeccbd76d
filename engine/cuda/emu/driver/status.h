// CUresult: numbers, names and descriptions of what this driver answers.
#pragma once

// X(name, number, description)
#define EMU_STATUSES(X)                                                                                    \
    X(SUCCESS, 0, "no error")                                                                              \
    X(INVALID_VALUE, 1, "invalid argument")                                                                \
    X(OUT_OF_MEMORY, 2, "out of memory")                                                                   \
    X(NOT_INITIALIZED, 3, "initialization error")                                                          \
    X(NO_DEVICE, 100, "no CUDA-capable device is detected")                                                \
    X(INVALID_DEVICE, 101, "invalid device ordinal")                                                       \
    X(INVALID_IMAGE, 200, "device kernel image is invalid")                                                \
    X(INVALID_CONTEXT, 201, "invalid device context")                                                      \
    X(MAPPING_FAILED, 205, "mapping of buffer object failed")                                              \
    X(NO_BINARY_FOR_GPU, 209, "no kernel image is available for execution on the device")                  \
    X(ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered")                                       \
    X(PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported between these two devices")              \
    X(INVALID_HANDLE, 400, "invalid resource handle")                                                      \
    X(ILLEGAL_STATE, 401, "the operation cannot be performed in the present state")                        \
    X(NOT_FOUND, 500, "named symbol not found")                                                            \
    X(NOT_READY, 600, "device not ready")                                                                  \
    X(ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")                                    \
    X(LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch")                             \
    X(LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated")                                      \
    X(ASSERT, 710, "device-side assert triggered")                                                         \
    X(HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped")  \
    X(HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region")        \
    X(MISALIGNED_ADDRESS, 716, "misaligned address")                                                       \
    X(LAUNCH_FAILED, 719, "unspecified launch failure")                                                    \
    X(NOT_SUPPORTED, 801, "operation not supported")                                                       \
    X(STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing")                 \
    X(STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture")          \
    X(STREAM_CAPTURE_MERGE, 902, "operation would result in a merge of separate capture sequences")        \
    X(STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the same stream as it began")               \
    X(STREAM_CAPTURE_UNJOINED, 904, "capturing stream has unjoined work")                                  \
    X(STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work in another stream")            \
    X(STREAM_CAPTURE_IMPLICIT, 906, "operation would make the legacy stream depend on a capturing stream") \
    X(CAPTURED_EVENT, 907, "operation not permitted on an event last recorded in a capturing stream")      \
    X(STREAM_CAPTURE_WRONG_THREAD, 908, "attempt to terminate a thread-local capture from another thread")

namespace emu {

enum Status : int {
#define X(name, number, description) name = number,
    EMU_STATUSES(X)
#undef X
};

}  // namespace emu
