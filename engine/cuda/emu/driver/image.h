// What stands for a module's machine code between the emulated NVRTC and the emulated driver: text, ended by a zero.
//   "//emulated-cuda-image sm_90\n" (or compute_90), then one line for each kernel.
#pragma once
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace emu {

constexpr char IMAGE_HEAD[] = "//emulated-cuda-image ";

struct Image {
    int arch = 0;             // compute capability * 10
    bool is_virtual = false;  // PTX
    std::vector<std::string> kernels;
};

inline std::string write_image(const Image& image) {
    std::string text =
        IMAGE_HEAD + std::string(image.is_virtual ? "compute_" : "sm_") + std::to_string(image.arch) + "\n";
    for (const std::string& kernel : image.kernels) text += kernel + "\n";
    return text;
}

// "sm_90", "sm_90a", "compute_80".
inline bool read_arch(const std::string& text, Image* image) {
    std::size_t at = text.find('_');
    std::string kind = text.substr(0, at);
    if (at == std::string::npos || (kind != "sm" && kind != "compute")) return false;
    image->is_virtual = kind == "compute";
    char* end;
    image->arch = static_cast<int>(strtol(text.c_str() + at + 1, &end, 10));
    return image->arch >= 50 && image->arch < 200 && (!*end || !strcmp(end, "a") || !strcmp(end, "f"));
}

// Looks at no byte behind the first that differs: an image may be anything, of any length.
inline bool read_image(const char* bytes, Image* image) {
    if (!bytes || strncmp(bytes, IMAGE_HEAD, sizeof IMAGE_HEAD - 1) != 0) return false;
    std::string rest = bytes + sizeof IMAGE_HEAD - 1;
    std::size_t line_end = rest.find('\n');
    if (line_end == std::string::npos || !read_arch(rest.substr(0, line_end), image)) return false;
    for (std::size_t at = line_end + 1; at < rest.size();) {
        std::size_t next = rest.find('\n', at);
        if (next == std::string::npos) return false;
        image->kernels.push_back(rest.substr(at, next - at));
        at = next + 1;
    }
    return true;
}

}  // namespace emu
