// The driver's state, what every call begins with, and its errors in words.
#include <cstdio>
#include <cstring>

#include "driver.h"

namespace emu {

Driver& driver = forever<Driver>();

Entry::Entry(const char*) : guard(driver.lock) { read_settings(); }

Status Entry::ready_without_context() const {
    if (!driver.is_initialized) return NOT_INITIALIZED;
    const Context* context = current_context();
    return context ? context->sticky : SUCCESS;
}

Status Entry::ready() const {
    REQUIRE(ready_without_context());
    return current_context() ? SUCCESS : INVALID_CONTEXT;
}

Status fail(Status status, const std::string& why) {
    driver.last_status = status;
    driver.last_message = why;
    if (settings.is_verbose) fprintf(stderr, "emulated driver: error %d: %s\n", status, why.c_str());
    return status;
}

Status fail_for_good(Context* context, Status status, const std::string& why) {
    if (context->sticky == SUCCESS) {
        context->sticky = status;
        fail(status, why);
    }
    return context->sticky;
}

// MAP_FAILED is a macro of mmap's.
static const char* name_of(int status) {
    if (status == MAPPING_FAILED) return "CUDA_ERROR_MAP_FAILED";
    switch (status) {
#define X(name, number, description) \
    case number:                     \
        return number == 0 ? "CUDA_SUCCESS" : "CUDA_ERROR_" #name;
        EMU_STATUSES(X)
#undef X
        default:
            return nullptr;
    }
}

static const char* description_of(int status) {
    switch (status) {
#define X(name, number, description) \
    case number:                     \
        return description;
        EMU_STATUSES(X)
#undef X
        default:
            return nullptr;
    }
}

EMU_API int cuGetErrorName(int status, const char** text) {
    ENTER;
    *text = name_of(status);
    return *text ? SUCCESS : INVALID_VALUE;
}

// The driver's own words, and behind them what the emulator found, if this is the error that it found last.
EMU_API int cuGetErrorString(int status, const char** text) {
    ENTER;
    *text = description_of(status);
    if (!*text) return INVALID_VALUE;
    if (status == SUCCESS || status != driver.last_status || driver.last_message.empty()) return SUCCESS;
    // The program may keep the pointer for ever.
    static auto& texts = forever<std::set<std::string>>();
    *text = texts.insert(std::string(*text) + ": " + driver.last_message).first->c_str();
    return SUCCESS;
}

}  // namespace emu
