// Times llama.cpp through its own C API, one row a line of standard input:
//
//   prefill512 f16 on 512      KV type, flash attention, n_ubatch of a 512-token prompt
//   decode8x256 q8_0 on 512    one step of 8 sequences that have 256 tokens each, repeated
//
// and answers with one JSON line. Arguments: MODEL THREADS. The same work as engine/examples/bench_cpu.rs: logits of
// the last position only, no sampling; a sample is one prompt, or at least 2 and up to 16 steps until half a second is
// full.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

namespace {

struct Row {
    std::string name, kv, flash;
    int ubatch = 0;
    int prompt = 0;    // tokens of a prefill row
    int sequences = 0; // of a decode row
    int context = 0;   // tokens of each sequence before the step
};

constexpr int MAX_STEPS = 16;
constexpr double SAMPLE_SECONDS = 0.5;

[[noreturn]] void fail(const std::string & why) {
    std::fprintf(stderr, "llama_rows: %s\n", why.c_str());
    std::exit(1);
}

Row parse(const std::string & line) {
    Row row;
    std::istringstream in(line);
    if (!(in >> row.name >> row.kv >> row.flash >> row.ubatch)) fail("not a row: " + line);
    bool known = std::sscanf(row.name.c_str(), "prefill%d", &row.prompt) == 1 ||
                 std::sscanf(row.name.c_str(), "decode%dx%d", &row.sequences, &row.context) == 2;
    if (!known) fail("not a row: " + line);
    return row;
}

double seconds() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

llama_token token(int i) { return 1000 + i * 7 % 40000; }

llama_context * open_context(llama_model * model, const Row & row, int threads) {
    llama_context_params params = llama_context_default_params();
    int sequences = row.prompt ? 1 : row.sequences;
    int tokens = row.prompt ? row.prompt : row.context + MAX_STEPS + 1;
    params.n_ctx = sequences * ((tokens + 255) / 256 * 256);
    params.n_batch = std::max(row.prompt ? row.prompt : row.context, 512);
    params.n_ubatch = row.ubatch;
    params.n_seq_max = sequences;
    params.n_threads = params.n_threads_batch = threads;
    params.type_k = params.type_v = row.kv == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
    params.flash_attn_type = row.flash == "on" ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.kv_unified = false; // each sequence its own cells: its faster setting for unrelated sequences
    llama_context * context = llama_init_from_model(model, params);
    if (!context) fail("no context for " + row.name + " with " + row.kv);
    return context;
}

// Decodes tokens `start .. start + count` of sequences `0 .. sequences`; logits of each sequence's last one.
void decode(llama_context * context, int start, int count, int sequences) {
    llama_batch batch = llama_batch_init(count * sequences, 0, 1);
    for (int seq = 0; seq < sequences; seq++) {
        for (int i = start; i < start + count; i++) {
            int at = batch.n_tokens++;
            batch.token[at] = token(i + seq);
            batch.pos[at] = i;
            batch.n_seq_id[at] = 1;
            batch.seq_id[at][0] = seq;
            batch.logits[at] = i == start + count - 1;
        }
    }
    if (llama_decode(context, batch) != 0) fail("llama_decode refused the batch");
    llama_synchronize(context);
    if (!llama_get_logits_ith(context, batch.n_tokens - 1)) fail("no logits");
    llama_batch_free(batch);
}

double prefill_ms(llama_context * context, const Row & row) {
    decode(context, 0, 16, 1); // first use: thread pool, pages of weights
    llama_memory_clear(llama_get_memory(context), true);
    double begin = seconds();
    decode(context, 0, row.prompt, 1);
    return (seconds() - begin) * 1e3;
}

double step_ms(llama_context * context, const Row & row) {
    llama_memory_t memory = llama_get_memory(context);
    if (row.context) decode(context, 0, row.context, 1);
    for (int seq = 1; row.context && seq < row.sequences; seq++) llama_memory_seq_cp(memory, 0, seq, -1, -1);
    decode(context, row.context, 1, row.sequences); // first step at this size: its graph is built
    int steps = 0;
    double begin = seconds(), spent = 0;
    while (steps < 2 || (steps < MAX_STEPS && spent < SAMPLE_SECONDS)) {
        decode(context, row.context + 1 + steps % (MAX_STEPS - 1), 1, row.sequences);
        steps++;
        spent = seconds() - begin;
        if (steps % (MAX_STEPS - 1) == 0) llama_memory_seq_rm(memory, -1, row.context + 1, -1);
    }
    return spent * 1e3 / steps;
}

void answer(llama_model * model, const Row & row, int threads) {
    llama_context * context = open_context(model, row, threads);
    double ms = row.prompt ? prefill_ms(context, row) : step_ms(context, row);
    double tokens = row.prompt ? row.prompt : row.sequences;
    std::printf("{\"row\":\"%s\",\"kv\":\"%s\",\"flash\":\"%s\",\"ubatch\":%d,\"tokens_per_s\":%.2f,\"ms\":%.4f}\n",
                row.name.c_str(), row.kv.c_str(), row.flash.c_str(), row.ubatch, tokens / ms * 1e3, ms);
    std::fflush(stdout);
    llama_free(context);
}

void only_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 3) fail("usage: llama_rows MODEL THREADS, rows on standard input");
    llama_log_set(only_errors, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail(std::string("cannot load ") + argv[1]);
    std::printf("{\"system\":\"%s\"}\n", llama_print_system_info());
    std::fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) answer(model, parse(line), std::atoi(argv[2]));
    llama_model_free(model);
    llama_backend_free();
}
