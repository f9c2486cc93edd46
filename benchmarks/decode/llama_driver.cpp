// Decodes given token ids one by one with libllama, whatever the model would say, and prints one line of JSON.
//
//     llama_driver MODEL.gguf THREADS PROMPT MAPPED < IDS
//
// IDS: token ids as text; the first PROMPT are the prompt, each further one is fed alone. MAPPED: 1 leaves the weights in the
// mapped file (llama.cpp's way of running a model that memory does not hold), 0 reads them into memory first.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "llama.h"

static double seconds() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// what the kernel fetched from storage for this process
static long storage_bytes() {
    std::ifstream io("/proc/self/io");
    std::string key;
    for (long value; io >> key >> value;) {
        if (key == "read_bytes:") return value;
    }
    return 0;
}

static void only_errors(enum ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

static int fail(const char * what) {
    std::fprintf(stderr, "llama_driver: %s\n", what);
    return 1;
}

int main(int argc, char ** argv) {
    if (argc != 5) return fail("usage: llama_driver MODEL.gguf THREADS PROMPT MAPPED < IDS");
    const int threads = std::atoi(argv[2]), n_prompt = std::atoi(argv[3]);
    std::vector<llama_token> ids;
    for (llama_token id; std::cin >> id;) ids.push_back(id);
    if (n_prompt < 1 || (int) ids.size() <= n_prompt) return fail("more ids than PROMPT are needed");

    llama_log_set(only_errors, nullptr);
    llama_backend_init();
    llama_model_params how = llama_model_default_params();
    how.n_gpu_layers = 0;
    how.load_mode = std::atoi(argv[4]) ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    how.use_extra_bufts = false;  // repacked weights would be a second copy in memory
    llama_model * model = llama_model_load_from_file(argv[1], how);
    if (!model) return fail("the model was not loaded");
    llama_context_params size = llama_context_default_params();
    size.n_ctx = ids.size() + 16;
    size.n_batch = n_prompt;
    size.n_threads = size.n_threads_batch = threads;
    llama_context * context = llama_init_from_model(model, size);
    if (!context) return fail("no context");

    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<double> at{seconds()};
    std::vector<long> bytes{storage_bytes()};
    std::vector<int> best;
    for (size_t next = 0; next < ids.size();) {
        const int fed = next ? 1 : n_prompt;
        if (llama_decode(context, llama_batch_get_one(&ids[next], fed))) return fail("llama_decode failed");
        const float * logits = llama_get_logits_ith(context, -1);
        int top = 0;
        for (int i = 1; i < vocabulary; i++) {
            if (logits[i] > logits[top]) top = i;
        }
        best.push_back(top);
        at.push_back(seconds());
        bytes.push_back(storage_bytes());
        next += fed;
    }
    std::printf("{\"ttft_s\": %.6f, \"ttft_bytes\": %ld, \"itl_s\": [", at[1] - at[0], bytes[1] - bytes[0]);
    for (size_t i = 2; i < at.size(); i++) std::printf("%s%.6f", i > 2 ? ", " : "", at[i] - at[i - 1]);
    std::printf("], \"token_bytes\": [");
    for (size_t i = 2; i < at.size(); i++) std::printf("%s%ld", i > 2 ? ", " : "", bytes[i] - bytes[i - 1]);
    std::printf("], \"best\": [");
    for (size_t i = 0; i < best.size(); i++) std::printf("%s%d", i ? ", " : "", best[i]);
    std::puts("]}");
    llama_free(context);
    llama_model_free(model);
    return 0;
}
