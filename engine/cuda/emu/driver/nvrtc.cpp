// An emulated libnvrtc.so.13: it compiles nothing. The kernels are there already, compiled for the host by build.rs.
//
// It answers what the real one answers for what the product sends it: a program must name kernels (TANDEM_KERNEL) that
// the emulator has, its includes must be among the headers that came with it, and the target must be one. What is wrong
// is a compilation error with a log. The result is an image of driver/image.h.
#include <cctype>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>

#include "image.h"

#define NVRTC_API extern "C" __attribute__((visibility("default")))

// From the emulated driver.
extern "C" int emu_has_kernel(const char* name);
extern "C" int emu_compile_is_due();

namespace emu {

enum NvrtcResult {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_INVALID_PROGRAM = 4,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
};

struct Program {
    std::string source, name, log, image;
    std::map<std::string, std::string> headers;
    bool is_virtual = false;
};

// Also the compiler that ships with CUDA 13.0 may not know a card that is newer.
static const int ARCHS[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

// ------------------------------------------------------------------------------------------- reading a program's text

// Reads lines as a preprocessor without TANDEM_EMULATE does; other conditions count as true.
class Reader {
  public:
    Reader(Program& program, Image& image) : program(program), image(image) {}

    void read(const std::string& file, const std::string& text) {
        std::vector<bool> is_active{true};
        int number = 0;
        for (std::size_t at = 0; at < text.size();) {
            int begin = number + 1;
            std::string line = next_line(text, at, number);
            line.erase(0, line.find_first_not_of(" \t"));
            if (line.empty() || line.compare(0, 2, "//") == 0) continue;
            if (line[0] == '#') {
                read_directive(file, begin, line, is_active);
            } else if (is_active.back()) {
                read_code(file, begin, line);
            }
        }
    }

    bool has_errors = false;

  private:
    Program& program;
    Image& image;
    std::set<std::string> included;

    // A line and those that a backslash at its end joins to it.
    static std::string next_line(const std::string& text, std::size_t& at, int& number) {
        std::string line;
        for (bool goes_on = true; goes_on && at < text.size();) {
            std::size_t end = text.find('\n', at);
            if (end == std::string::npos) end = text.size();
            line += text.substr(at, end - at);
            at = end + 1;
            number++;
            goes_on = !line.empty() && line.back() == '\\';
            if (goes_on) line.back() = ' ';
        }
        return line;
    }

    void error(const std::string& file, int line, const std::string& what) {
        program.log += file + "(" + std::to_string(line) + "): error: " + what + "\n";
        has_errors = true;
    }

    void read_directive(const std::string& file, int number, const std::string& line, std::vector<bool>& is_active) {
        std::size_t word_at = line.find_first_not_of("# \t");
        if (word_at == std::string::npos) return;
        std::string rest = line.substr(word_at);
        std::string word = rest.substr(0, rest.find_first_of(" \t\"<("));
        bool names_us = rest.find("TANDEM_EMULATE") != std::string::npos;
        if (word == "if" || word == "ifdef" || word == "ifndef") {
            bool is_true = !names_us || word == "ifndef" || rest.find('!') != std::string::npos;
            is_active.push_back(is_active.back() && is_true);
        } else if ((word == "else" || word == "elif") && is_active.size() > 1) {
            bool outer = is_active[is_active.size() - 2];
            is_active.back() = outer && !is_active.back();
        } else if (word == "endif" && is_active.size() > 1) {
            is_active.pop_back();
        } else if (word == "include" && is_active.back()) {
            include(file, number, rest);
        }
    }

    void include(const std::string& file, int number, const std::string& rest) {
        std::size_t begin = rest.find_first_of("\"<"), end = rest.find_last_of("\">");
        if (begin == std::string::npos || end <= begin) return error(file, number, "expected a file name");
        std::string name = rest.substr(begin + 1, end - begin - 1);
        auto found = program.headers.find(name);
        if (found == program.headers.end()) return error(file, number, "could not open source file \"" + name + "\"");
        if (included.insert(name).second) read(name, found->second);
    }

    void read_code(const std::string& file, int number, const std::string& line) {
        constexpr char MARK[] = "TANDEM_KERNEL(";
        for (std::size_t at = line.find(MARK); at != std::string::npos; at = line.find(MARK, at + 1)) {
            std::size_t begin = at + sizeof MARK - 1, end = line.find(')', begin);
            std::string name = line.substr(begin, end == std::string::npos ? end : end - begin);
            if (emu_has_kernel(name.c_str())) {
                image.kernels.push_back(name);
            } else {
                error(file, number, "kernel \"" + name + "\" is not among those compiled for the emulated device");
            }
        }
    }
};

static bool read_options(Program* program, Image* image, int count, const char* const* options) {
    image->arch = 75;
    image->is_virtual = true;
    for (int i = 0; i < count; i++) {
        std::string option = options[i], value;
        std::size_t equals = option.find('=');
        if (equals != std::string::npos) {
            value = option.substr(equals + 1);
            option.erase(equals);
        }
        if (option != "--gpu-architecture" && option != "-arch") continue;
        bool is_known = read_arch(value, image);
        if (is_known) {
            is_known = false;
            for (int arch : ARCHS) is_known = is_known || arch == image->arch;
        }
        if (is_known) continue;
        program->log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
        return false;
    }
    return true;
}

// ----------------------------------------------------------------------------------------------------------------- API

// Threads compile side by side, each its own program: the lock is for the set.
static std::mutex& programs_lock = *new std::mutex;
static std::set<Program*>& programs = *new std::set<Program*>;

static Program* find(void* handle) {
    std::lock_guard<std::mutex> guard(programs_lock);
    auto found = programs.find(static_cast<Program*>(handle));
    return found == programs.end() ? nullptr : *found;
}

NVRTC_API int nvrtcVersion(int* major, int* minor) {
    if (!major || !minor) return NVRTC_ERROR_INVALID_INPUT;
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcGetNumSupportedArchs(int* count) {
    *count = sizeof ARCHS / sizeof *ARCHS;
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcGetSupportedArchs(int* archs) {
    memcpy(archs, ARCHS, sizeof ARCHS);
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcCreateProgram(void** out, const char* source, const char* name, int header_count,
                                 const char* const* headers, const char* const* header_names) {
    if (!out || !source || header_count < 0) return NVRTC_ERROR_INVALID_INPUT;
    auto* program = new Program;
    program->source = source;
    program->name = name ? name : "default_program";
    for (int i = 0; i < header_count; i++) program->headers[header_names[i]] = headers[i];
    std::lock_guard<std::mutex> guard(programs_lock);
    programs.insert(program);
    *out = program;
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcDestroyProgram(void** handle) {
    Program* program = handle ? find(*handle) : nullptr;
    if (!program) return NVRTC_ERROR_INVALID_PROGRAM;
    {
        std::lock_guard<std::mutex> guard(programs_lock);
        programs.erase(program);
    }
    delete program;
    *handle = nullptr;
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcCompileProgram(void* handle, int option_count, const char* const* options) {
    Program* program = find(handle);
    if (!program) return NVRTC_ERROR_INVALID_PROGRAM;
    program->log.clear();
    program->image.clear();
    Image image;
    if (!read_options(program, &image, option_count, options)) return NVRTC_ERROR_INVALID_OPTION;
    Reader reader(*program, image);
    reader.read(program->name, program->source);
    if (image.kernels.empty() && !reader.has_errors) {
        program->log += program->name + "(1): error: no kernel is declared by TANDEM_KERNEL\n";
        reader.has_errors = true;
    }
    if (emu_compile_is_due()) {
        program->log += program->name + "(1): error: planned fault: compilation\n";
        reader.has_errors = true;
    }
    if (reader.has_errors) return NVRTC_ERROR_COMPILATION;
    program->is_virtual = image.is_virtual;
    program->image = write_image(image);
    return NVRTC_SUCCESS;
}

static int give(const std::string& text, char* to) {
    memcpy(to, text.c_str(), text.size() + 1);
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcGetProgramLogSize(void* handle, std::size_t* bytes) {
    Program* program = find(handle);
    if (!program) return NVRTC_ERROR_INVALID_PROGRAM;
    *bytes = program->log.size() + 1;
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcGetProgramLog(void* handle, char* log) {
    Program* program = find(handle);
    return program ? give(program->log, log) : NVRTC_ERROR_INVALID_PROGRAM;
}

// Machine code exists for a real architecture only; its size is then 0 for a virtual one, as with NVRTC.
NVRTC_API int nvrtcGetCUBINSize(void* handle, std::size_t* bytes) {
    Program* program = find(handle);
    if (!program || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    *bytes = program->is_virtual ? 0 : program->image.size() + 1;
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcGetCUBIN(void* handle, char* cubin) {
    Program* program = find(handle);
    if (!program || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    return program->is_virtual ? NVRTC_ERROR_INVALID_PROGRAM : give(program->image, cubin);
}

NVRTC_API int nvrtcGetPTXSize(void* handle, std::size_t* bytes) {
    Program* program = find(handle);
    if (!program || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    *bytes = program->image.size() + 1;
    return NVRTC_SUCCESS;
}

NVRTC_API int nvrtcGetPTX(void* handle, char* ptx) {
    Program* program = find(handle);
    if (!program || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    return give(program->image, ptx);
}

NVRTC_API const char* nvrtcGetErrorString(int result) {
    switch (result) {
        case NVRTC_SUCCESS:
            return "NVRTC_SUCCESS";
        case NVRTC_ERROR_INVALID_INPUT:
            return "NVRTC_ERROR_INVALID_INPUT";
        case NVRTC_ERROR_INVALID_PROGRAM:
            return "NVRTC_ERROR_INVALID_PROGRAM";
        case NVRTC_ERROR_INVALID_OPTION:
            return "NVRTC_ERROR_INVALID_OPTION";
        case NVRTC_ERROR_COMPILATION:
            return "NVRTC_ERROR_COMPILATION";
        default:
            return "NVRTC_ERROR unknown";
    }
}

}  // namespace emu
