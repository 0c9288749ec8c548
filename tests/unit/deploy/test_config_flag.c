/* test_config_flag.c - flags that `baton serve` does not have: which option is suggested, and what
 * becomes of the flags of llama.cpp's server, vLLM and SGLang. */
#include <stdio.h>
#include <string.h>

#include "deploy/options/option_table.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { WORDS_MAX = 8 };

static void add_note(void *arg, const char *sentence) { buf_printf(arg, "note: %s", sentence); }

/* Loads a command line of words separated by blanks: its error, or else its notes. */
static void load(const char *command, const char *line, struct buf *said)
{
    char copy[256], *argv[WORDS_MAX];
    int argc = 0, none = 0;
    struct err err = { 0 };
    snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word && argc < WORDS_MAX; word = strtok(NULL, " "))
        argv[argc++] = word;
    struct config *c = config_create(OPTIONS, command);
    buf_clear(said);
    if (config_load_args(c, argc, argv, NULL, &none, &err) != OK) buf_add_c(said, err.text);
    else config_notes(c, add_note, said);
    config_free(c);
}

/* ---- suggestions ---- */

struct suggestion {
    const char *typed, *meant; /* NULL: none */
};

static const struct suggestion SUGGESTIONS[] = {
    /* letters */
    { "--modle", "--model" },
    { "--modelx", "--model" },
    { "--prot", "--port" },
    { "-port", "--port" },
    { "--hots", "--host" },
    { "--api-kye", "--api-key" },
    { "--apikey", "--api-key" },
    { "--served-modle-name", "--served-model-name" },
    { "--max-num-seq", "--max-num-seqs" },
    { "--gpu-memory-utilisation", "--gpu-memory-utilization" },
    { "--splitwise_rol", "--splitwise-role" },
    { "--contxt-length", "--context-length" },
    { "--tensor-paralel-size", "--tensor-parallel-size" },
    { "--tp-sise", "--tp-size" },
    { "--enable-prefix-cache", "--enable-prefix-caching" },
    { "--quantisation", "--quantization" },
    /* words */
    { "--max-seqs", "--max-num-seqs" },
    { "--max-length", NULL }, /* --max-model-len or --max-dec-len */
    { "--model-length", "--max-model-len" },
    { "--gpu-memory", "--gpu-memory-utilization" },
    { "--prefix-caching", "--enable-prefix-caching" },
    { "--tool-parser", "--tool-call-parser" },
    { "--secret", "--cluster-secret-file" },
    { "--password", "--scheduler-password" },
    { "--mem-fraction", "--mem-fraction-static" },
    { "--disable-prefix-caching", "--no-enable-prefix-caching" },
    { "--no-log-requsts", "--no-log-requests" },
    /* what is too far, short or common to tell */
    { "--zzzzzzzzzz", NULL },
    { "--block-batch", NULL },
    { "--cache-size", NULL },
    { "--cache-dir", "--kv-cache-dir" },
    { "--api-key-dir", NULL },
    { "--scheduler", NULL },
    { "--scheduler-hort", NULL },
    { "--max", NULL },
    { "--key", NULL },
    { "--kv", NULL },
    { "-x", NULL },
    { "--xy", NULL },
    { "--rps", NULL },
    { "--no-port", NULL },
    { "--workers-per-node", NULL },
    { "--logits", NULL },
};

TEST(a_suggestion_is_near_or_there_is_none)
{
    struct buf said = { 0 }, want = { 0 };
    for (size_t i = 0; i < COUNT_OF(SUGGESTIONS); i++) {
        const struct suggestion *s = &SUGGESTIONS[i];
        load("serve", s->typed, &said);
        buf_clear(&want);
        buf_printf(&want, "there is no option %s; ", s->typed);
        if (s->meant) buf_printf(&want, "did you mean %s?", s->meant);
        if (!str_starts(buf_str(&said), want.data) ||
            (s->meant ? strlen(want.data) != said.len : strstr(said.data, "did you mean") != NULL))
            test_fail(__FILE__, __LINE__, "%s gives: %s", s->typed, said.data);
    }
    buf_release(&said);
    buf_release(&want);
}

TEST(a_word_of_several_options_is_looked_up_in_the_help)
{
    struct buf said = { 0 };
    load("serve", "--scheduler", &said);
    CHECK_EQ_STR(said.data,
                 "there is no option --scheduler; --help=scheduler shows those about it");
    load("serve", "--kv", &said);
    CHECK_EQ_STR(said.data, "there is no option --kv; --help shows all");
    buf_release(&said);
}

TEST(options_of_other_commands_are_called_as_they_were_typed)
{
    struct buf said = { 0 };
    load("serve", "--peers h:1", &said);
    CHECK_EQ_STR(said.data, "--peers is not an option of \"serve\"; these take it: bench doctor");
    load("serve", "--mixed 1", &said);
    CHECK_EQ_STR(said.data, "--mixed is not an option of \"serve\"; these take it: launch doctor");
    load("launch", "--port 1", &said);
    CHECK_EQ_STR(said.data, "--port is not an option of \"launch\"; did you mean --ports?");
    load("serve", "-p 8000", &said);
    CHECK_EQ_STR(said.data, "there is no option -p of \"serve\" (elsewhere it is --prompt: "
                            "generate); --help shows all");
    buf_release(&said);
}

/* ---- other servers ---- */

struct foreign {
    const char *line;
    const char *want; /* NULL: it works; else part of the note or the refusal: what to do here */
};

static const struct foreign LLAMA_CPP[] = {
    { "-m m.gguf", NULL },
    { "--ctx-size 4096", NULL },
    { "-c 4096", NULL },
    { "-t 8", NULL },
    { "--threads 8", NULL },
    { "--parallel 4", NULL },
    { "-np 4", NULL },
    { "--alias name", NULL },
    { "-a name", NULL },
    { "--host 127.0.0.1 --port 8080", NULL },
    { "--api-key k", NULL },
    { "--chat-template-file t.jinja", NULL },
    { "-ngl 99", "--device cuda" },
    { "--n-gpu-layers all", "--device cuda" },
    { "--gpu-layers 99", "--device cuda" },
    { "-b 2048", "--max-num-batched-tokens" },
    { "--batch-size 2048 -ub 512", "--max-num-batched-tokens" },
    { "--ubatch-size 512", "--max-num-batched-tokens" },
    { "-tb 8", "--compute-threads" },
    { "-fa", "note: -fa: attention" },
    { "-fa on", "note: -fa: attention" },
    { "--flash-attn auto", "attention" },
    { "--mlock", "memory of the node's own" },
    { "--no-mmap", "--weights-cache" },
    { "-cb", "always join" },
    { "--jinja", "always rendered" },
    { "--metrics", "always there" },
    { "--no-webui", "no such page" },
    { "--slots", "baton status" },
    { "--no-warmup", "at every start" },
    { "--numa distribute", "numactl" },
    { "--split-mode none", "CUDA_VISIBLE_DEVICES" },
    { "-ts 3,1", "CUDA_VISIBLE_DEVICES" },
    { "-mg 1", "CUDA_VISIBLE_DEVICES" },
    { "-ncmoe 8", "--device" },
    { "-ot exps=CPU", "--device" },
    { "--cache-reuse 256", "--enable-prefix-caching" },
    { "-v", "--log-level debug" },
    { "-md d.gguf", NULL },
    { "--seed 1", "\"seed\"" },
    { "-s 1", "\"seed\"" },
    { "-n -1", NULL },
    { "-n 128", "max_tokens" },
    { "-ctk q8_0", "--kv-cache-dtype" },
    { "--cache-type-v q8_0", "--kv-cache-dtype" },
    { "-hf org/name", "--model" },
    { "--temp 0.7", "temperature" },
    { "--top-k 40", "body" },
    { "--reasoning-format none", "--reasoning-parser" },
    { "--chat-template-kwargs {}", "chat_template_kwargs" },
    { "--api-key-file keys", "BATON_API_KEY" },
    { "--log-file f", "--log-dir" },
    { "--timeout 600", "--scheduler-ttl" },
    { "--embeddings", "completions only" },
    { "--lora a.gguf", "--model" },
    { "--ssl-key-file k", "proxy" },
};

static const struct foreign VLLM[] = {
    { "--model m", NULL },
    { "--served-model-name a b", NULL },
    { "--max-model-len 8192", NULL },
    { "--max-num-seqs 64", NULL },
    { "--max-num-batched-tokens 8192", NULL },
    { "--gpu-memory-utilization 0.9", NULL },
    { "--kv-cache-dtype fp8", NULL },
    { "--block-size 16", NULL },
    { "--enable-prefix-caching", NULL },
    { "--no-enable-prefix-caching", NULL },
    { "--enforce-eager", NULL },
    { "-q wint8", NULL },
    { "--load-format safetensors", NULL },
    { "--chat-template t.jinja", NULL },
    { "--tool-call-parser hermes", NULL },
    { "--reasoning-parser qwen3", NULL },
    { "--enable-log-requests", NULL },
    { "--dtype auto", NULL },
    { "--dtype bfloat16", NULL },
    { "--dtype float16", "--activations" },
    { "--tensor-parallel-size 2", NULL },
    { "-tp 2", NULL },
    { "-pp 2", "not built yet" },
    { "-dp 2", "baton launch" },
    { "--enable-expert-parallel", "has all experts" },
    { "-dp 2 --enable-expert-parallel", NULL },
    { "-dp 2 --enable-expert-parallel --data-parallel-address ::1", NULL },
    { "-dp 2 --enable-expert-parallel=false", "--enable-expert-parallel" },
    { "-dp 4 -ep -dpl 2 -dpr 2", NULL },
    { "-dpa h -dpp 13345 --headless", NULL },
    { "-dp 4 -ep -dpn 3", NULL },
    { "-dpl 2", "--enable-expert-parallel" },
    { "--data-parallel-external-lb", "--data-parallel-rank" },
    { "--trust-remote-code", "no code of a model" },
    { "--enable-chunked-prefill", "always on" },
    { "--enable-auto-tool-choice", "may call tools" },
    { "--write-policy write_through", "in the background" },
    { "--cpu-offload-gb 10", "--device" },
    { "--disable-log-requests", "--log-requests" },
    { "--disable-log-stats", "/metrics" },
    { "--uvicorn-log-level info", "--log-level" },
    { "--distributed-executor-backend mp", "one process" },
    { "--compilation-config 3", "--enforce-eager" },
    { "--scheduling-policy fcfs", "in which they came" },
    { "--limit-mm-per-prompt image=1", "text only" },
    { "--async-scheduling", "another engine" },
    { "--generation-config auto", NULL },
    { "--generation-config vllm", "generation_config.json" },
    { "--tokenizer-mode auto", NULL },
    { "--tokenizer t", "the model's own" },
    { "--download-dir d", "baton pull --dir" },
    { "--config c.yaml", "command line" },
    { "--enable-lora", "--model" },
    { "--lora-modules a=b", "--model" },
    { "--hf-overrides {}", "config.json" },
    { "--task generate", NULL },
    { "--root-path /v", "proxy" },
    { "--uds s", "--host and --port" },
};

static const struct foreign SGLANG[] = {
    { "--model-path m", NULL },
    { "--context-length 8192", NULL },
    { "--mem-fraction-static 0.8", NULL },
    { "--max-running-requests 64", NULL },
    { "--max-queued-requests 64", NULL },
    { "--chunked-prefill-size 4096", NULL },
    { "--page-size 64", NULL },
    { "--disable-cuda-graph", NULL },
    { "--disaggregation-mode prefill", NULL },
    { "--log-requests", NULL },
    { "--device cpu", NULL },
    { "--tp 2", NULL },
    { "--tp-size 2", NULL },
    { "--dp-size 2", "baton launch" },
    { "--ep 8", "has all experts" },
    { "--ep-size 8", "share the experts" },
    { "--enable-dp-attention", "share the experts" },
    { "--moe-a2a-backend deepep", "share the experts" },
    { "--attention-backend fa3", "--cpu-isa" },
    { "--schedule-policy lpm", "in which they came" },
    { "--schedule-conservativeness 0.3", "as an answer grows" },
    { "--max-prefill-tokens 16384", "--max-num-batched-tokens" },
    { "--cuda-graph-max-bs 64", "--enforce-eager" },
    { "--enable-torch-compile", "kernels are" },
    { "--enable-metrics", "always there" },
    { "--random-seed 1", "\"seed\"" },
    { "--log-level-http warning", "--log-level" },
    { "--skip-server-warmup", "at every start" },
    { "--stream-interval 4", "as they come" },
    { "--speculative-algorithm EAGLE", NULL },
    { "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4", NULL },
    { "--speculative-eagle-topk 1", "one run of tokens" },
    { "--enable-hierarchical-cache", "--swap-space" },
    { "--disaggregation-bootstrap-port 8998", "--router" },
    { "--nnodes 1 --node-rank 0", NULL },
    { "--nnodes 2", "--router" },
    { "--dist-init-addr h:1", "--router" },
    { "--max-total-tokens 65536", "--kv-cache-memory" },
    { "--disable-radix-cache", "--no-enable-prefix-caching" },
    { "--grammar-backend xgrammar", "structured output" },
    { "--disaggregation-ib-device mlx5_0", "KVCACHE_RDMA_NICS" },
    { "--is-embedding", "completions only" },
    { "--lora-paths a", "--model" },
};

static void check_foreign(const struct foreign *rows, size_t n)
{
    struct buf said = { 0 };
    for (size_t i = 0; i < n; i++) {
        load("serve", rows[i].line, &said);
        const char *text = said.data && said.len ? said.data : "";
        if (rows[i].want ? !strstr(text, rows[i].want) || strstr(text, "there is no option")
                         : *text != 0)
            test_fail(__FILE__, __LINE__, "%s says: %s", rows[i].line, text);
    }
    buf_release(&said);
}

TEST(flags_of_llama_cpp) { check_foreign(LLAMA_CPP, COUNT_OF(LLAMA_CPP)); }
TEST(flags_of_vllm) { check_foreign(VLLM, COUNT_OF(VLLM)); }
TEST(flags_of_sglang) { check_foreign(SGLANG, COUNT_OF(SGLANG)); }

/* No flag is two options of one command: the second would never be found. */
TEST(names_of_one_command_differ)
{
    static const char *const commands[] = { "serve",  "launch", "generate",
                                            "doctor", "status", "bench" };
    const struct option *a, *b;
    for (size_t k = 0; k < COUNT_OF(commands); k++)
        for (size_t i = 0; (a = option_at(OPTIONS, i)); i++)
            for (size_t j = i + 1; (b = option_at(OPTIONS, j)); j++) {
                char names_a[512], names_b[512];
                if (a->commands && !strstr(a->commands, commands[k])) continue;
                if (b->commands && !strstr(b->commands, commands[k])) continue;
                snprintf(names_a, sizeof names_a, " %s %s ", a->name, a->aliases ? a->aliases : "");
                snprintf(names_b, sizeof names_b, "%s %s", b->name, b->aliases ? b->aliases : "");
                for (char *name = strtok(names_b, " "); name; name = strtok(NULL, " ")) {
                    char spaced[128];
                    snprintf(spaced, sizeof spaced, " %s ", name);
                    if (strstr(names_a, spaced))
                        test_fail(__FILE__, __LINE__, "%s is --%s and --%s of %s", name, a->name,
                                  b->name, commands[k]);
                }
            }
}

TEST_MAIN(CASE(a_suggestion_is_near_or_there_is_none),
          CASE(a_word_of_several_options_is_looked_up_in_the_help),
          CASE(options_of_other_commands_are_called_as_they_were_typed), CASE(flags_of_llama_cpp),
          CASE(flags_of_vllm), CASE(flags_of_sglang), CASE(names_of_one_command_differ))
