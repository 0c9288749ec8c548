/* option_table_other_servers.c - frequent flags of llama.cpp's server, vLLM and SGLang that are no
 * option here: each changes no answer, or is refused with the option that does its job. Flags with
 * a meaning here are aliases of options. Thread: any (a constant table). */
#include "deploy/options/option_entry.h"

#define NO_EFFECT(n, a, t, h, why)         ACCEPT(n, a, NULL, t, "Compatibility", h, why)
#define INSTEAD(n, a, t, neutral_, h, why) REFUSE(n, a, NULL, t, neutral_, "Compatibility", h, why)

#define ONE_GPU                                                                                    \
    "a node computes on one device: with --device cuda on the first GPU of CUDA_VISIBLE_DEVICES"
#define STEP_TOKENS "--max-num-batched-tokens is the most tokens of one step"
#define NO_EXPERTS                                                                                 \
    "see --enable-expert-parallel, by which the ranks of --data-parallel-size share the experts"
#define OWN_HOST                                                                                   \
    "give --data-parallel-address for ranks that share experts; other nodes of several hosts "     \
    "find "                                                                                        \
    "each other by --scheduler-host or --router"
#define NO_ADAPTERS   "adapters are not built yet: give a model they are merged into by --model"
#define NO_EMBEDDINGS "there are chat and text completions only"
#define OWN_SAMPLING                                                                               \
    "each request chooses its sampling, by temperature, top_p and so on in its body; defaults "    \
    "are "                                                                                         \
    "those of the model's generation_config.json"

const struct option OTHER_SERVERS_OPTIONS[] = {
    /* ---- without effect on answers ---- */
    NO_EFFECT("n-gpu-layers", "ngl gpu-layers", OPT_STRING, "Layers on the GPU.",
              "layers are not split: with --device cuda all are on the GPU, else none"),
    NO_EFFECT("split-mode", "sm", OPT_STRING, "How layers are split over GPUs.", ONE_GPU),
    NO_EFFECT("tensor-split", "ts", OPT_STRING, "Shares of the GPUs.", ONE_GPU),
    NO_EFFECT("main-gpu", "mg", OPT_INT, "The GPU to use.", ONE_GPU),
    NO_EFFECT("cpu-moe", "cmoe", OPT_BOOL, "Keep experts on the CPU.",
              "weights are whole where --device computes"),
    NO_EFFECT("n-cpu-moe", "ncmoe cpu-offload-gb", OPT_FLOAT, "Weights kept on the CPU.",
              "weights are whole where --device computes"),
    NO_EFFECT("override-tensor", "ot", OPT_STRING, "Where each tensor is.",
              "weights are whole where --device computes"),
    NO_EFFECT("no-kv-offload", "nkvo", OPT_BOOL, "Keep the KV cache on the CPU.",
              "the KV cache is where --device computes"),
    NO_EFFECT("threads-batch", "tb", OPT_INT, "Threads for prompts.",
              "--compute-threads is for prompts and answers"),
    NO_EFFECT("batch-size", "b", OPT_INT, "Tokens given at once.", STEP_TOKENS),
    NO_EFFECT("ubatch-size", "ub max-prefill-tokens", OPT_INT, "Tokens computed at once.",
              STEP_TOKENS),
    NO_EFFECT("flash-attn", "fa", OPT_BOOL, "Attention without a matrix of scores.",
              "attention never makes a matrix of all scores"),
    NO_EFFECT("attention-backend", "sampling-backend", OPT_STRING, "Kernels of a GPU library.",
              "kernels are Baton's own; --cpu-isa chooses those of the CPU"),
    NO_EFFECT("mlock", NULL, OPT_BOOL, "Keep the model in memory.",
              "weights are packed into memory of the node's own"),
    NO_EFFECT("mmap", NULL, OPT_BOOL, "Map the model's file.",
              "weights are packed into memory of the node's own; --weights-cache maps them"),
    NO_EFFECT("numa", NULL, OPT_STRING, "How to use NUMA nodes.",
              "threads and memory go where the system puts them; numactl chooses"),
    NO_EFFECT("cont-batching", "cb", OPT_BOOL, "Let requests join a running batch.",
              "requests always join the running batch"),
    NO_EFFECT("kv-unified", "kvu", OPT_BOOL, "One KV cache for all sequences.",
              "all sequences share one pool of KV blocks"),
    NO_EFFECT("cache-reuse", NULL, OPT_INT, "Reuse chunks of the KV cache.",
              "--enable-prefix-caching reuses the blocks of equal beginnings"),
    NO_EFFECT("enable-hierarchical-cache", NULL, OPT_BOOL, "Keep KV in CPU memory.",
              "--swap-space, with a size in GiB, does"),
    NO_EFFECT("hicache-ratio", NULL, OPT_FLOAT, "CPU memory for KV, by the GPU's.",
              "give --swap-space in GiB"),
    NO_EFFECT("jinja", NULL, OPT_BOOL, "Use the model's Jinja template.",
              "chat templates are always rendered as Jinja"),
    NO_EFFECT("enable-reasoning", NULL, OPT_BOOL, "Tell reasoning from the answer.",
              "--reasoning-parser auto does, by the chat template"),
    NO_EFFECT("metrics", "enable-metrics", OPT_BOOL, "Serve /metrics.", "/metrics is always there"),
    NO_EFFECT("slots", NULL, OPT_BOOL, "Serve /slots.",
              "/metrics and `baton status` say what runs"),
    NO_EFFECT("webui", NULL, OPT_BOOL, "Serve a page for people.", "there is no such page"),
    NO_EFFECT("warmup", "skip-server-warmup", OPT_BOOL, "Run once before serving.",
              "what has to be made before the first request is made at every start"),
    NO_EFFECT("verbose", "v", OPT_BOOL, "Log more.", "--log-level debug logs more"),
    NO_EFFECT("uvicorn-log-level", "log-level-http", OPT_STRING, "Log level of the API.",
              "--log-level is for the whole node"),
    NO_EFFECT("disable-log-stats", NULL, OPT_BOOL, "No figures in the log.",
              "/metrics has the figures"),
    NO_EFFECT("distributed-executor-backend", NULL, OPT_STRING, "How workers are started.",
              "a node is one process"),
    NO_EFFECT("scheduling-policy", "schedule-policy", OPT_STRING, "Which request is next.",
              "requests wait by priority, the member of their bodies, then in the order in which "
              "they came, as with vLLM's --scheduling-policy priority (docs/admission.md)"),
    NO_EFFECT("schedule-conservativeness", NULL, OPT_FLOAT, "How much KV to keep free.",
              "KV blocks are given as an answer grows"),
    NO_EFFECT("async-scheduling", "disable-overlap-schedule enable-mixed-chunk", OPT_BOOL,
              "How steps are planned.", "it tunes another engine"),
    NO_EFFECT("enable-torch-compile", NULL, OPT_BOOL, "Compile the model.",
              "no model is compiled: kernels are"),
    NO_EFFECT("model-impl", NULL, OPT_STRING, "Which code computes the model.",
              "there is one implementation of each model"),
    NO_EFFECT("limit-mm-per-prompt", NULL, OPT_STRING, "Images per prompt.",
              "models take text only"),
    NO_EFFECT("stream-interval", NULL, OPT_INT, "Tokens per event of a stream.",
              "a stream sends tokens as they come"),
    NO_EFFECT("watchdog-timeout", NULL, OPT_FLOAT, "Seconds until a hanging server ends.",
              "a silent node is not chosen any more after 2.4 s"),
    NO_EFFECT("expert-parallel-size", "ep-size", OPT_INT, "Ranks that share the experts.",
              NO_EXPERTS),
    NO_EFFECT("enable-deepep-moe", "enable-dp-attention", OPT_BOOL, "Spread experts and attention.",
              NO_EXPERTS),
    NO_EFFECT("moe-a2a-backend", NULL, OPT_STRING, "How experts exchange rows.", NO_EXPERTS),
    NO_EFFECT("speculative-eagle-topk", NULL, OPT_INT, "Branches of a tree of drafts.",
              "drafts are one run of tokens"),
    NO_EFFECT("disaggregation-bootstrap-port", NULL, OPT_INT, "Where nodes meet.",
              "nodes meet by --scheduler-host or --router"),

    /* ---- refused: the sentence names what does the job ---- */
    INSTEAD("hf-repo", "hf hfr hf-file hff model-url mu download-dir", OPT_STRING, NULL,
            "A model to download.",
            "give it by --model, with --pull to fetch what is not here: org/name, org/name:Q4_K_M, "
            "org/name/FILE.gguf or an address; `baton pull --dir` chooses the folder"),
    INSTEAD("predict", "n n-predict", OPT_INT, "-1", "Longest answer.",
            "a request's max_tokens limits its answer; --max-model-len limits prompt and answer"),
    INSTEAD("cache-type-k", "ctk cache-type-v ctv", OPT_STRING, "f16|bf16", "Type of the KV cache.",
            "give --kv-cache-dtype, which is for keys and values: auto, bfloat16, float16, int8 or "
            "fp8"),
    { .name = "temperature",
      .aliases = "temp",
      .type = OPT_STRING,
      IN("Compatibility", NET),
      .help = "Sampling of all requests.",
      .effect = EFFECT_REFUSED,
      .note = OWN_SAMPLING },
    INSTEAD("top-p", "top-k min-p repeat-penalty presence-penalty frequency-penalty", OPT_STRING,
            NULL, "Sampling of all requests.", OWN_SAMPLING),
    INSTEAD("generation-config", "override-generation-config", OPT_STRING, "auto",
            "Defaults of the sampling.", OWN_SAMPLING),
    INSTEAD("chat-template-kwargs", NULL, OPT_STRING, NULL, "Variables of the chat template.",
            "a request gives its own, as chat_template_kwargs"),
    INSTEAD("reasoning-format", NULL, OPT_STRING, "auto|deepseek", "Form of the reasoning.",
            "give --reasoning-parser: auto, none, think or ernie"),
    INSTEAD("api-key-file", NULL, OPT_STRING, NULL, "File with keys.",
            "give the keys, with commas between them, in BATON_API_KEY, or --api-keys-file, "
            "whose lines have a name before each key"),
    INSTEAD("log-file", NULL, OPT_STRING, NULL, "File for the log.",
            "give a folder for the log by --log-dir"),
    INSTEAD("timeout", "to", OPT_STRING, NULL, "Seconds for a request.",
            "give --scheduler-ttl, the seconds after which a request is given up"),
    INSTEAD("api-prefix", "root-path", OPT_STRING, NULL, "Prefix of all paths.",
            "paths are those of OpenAI's API; a proxy in front can add a prefix"),
    INSTEAD("allowed-origins", NULL, OPT_STRING, NULL, "Pages that may ask.",
            "a proxy in front can add CORS headers, there are none here"),
    INSTEAD("uds", NULL, OPT_STRING, NULL, "A Unix socket.",
            "the API listens on TCP only: give --host and --port"),
    INSTEAD("embedding", "embeddings is-embedding rerank reranking", OPT_BOOL, "false",
            "Serve embeddings.", NO_EMBEDDINGS),
    INSTEAD("runner", "task", OPT_STRING, "auto|generate", "What the model is for.", NO_EMBEDDINGS),
    INSTEAD("enable-lora", NULL, OPT_BOOL, "false", "Adapters.", NO_ADAPTERS),
    INSTEAD("lora-modules", "lora lora-scaled lora-paths", OPT_STRING, NULL, "Adapters.",
            NO_ADAPTERS),
    INSTEAD("json-schema", "j grammar grammar-file", OPT_STRING, NULL, "Form of all answers.",
            "structured output is not built yet"),
    INSTEAD("hf-overrides",
            "json-model-override-args rope-scaling rope-theta rope-freq-base rope-freq-scale "
            "override-kv",
            OPT_STRING, NULL, "Changes of the model's configuration.",
            "the model's own configuration is used: change its config.json, or make another GGUF "
            "file"),
    INSTEAD("tokenizer-mode", NULL, OPT_STRING, "auto|slow", "Which tokenizer to use.",
            "the tokenizer is the model's own"),
    INSTEAD("response-role", NULL, OPT_STRING, "assistant", "Role of answers.",
            "answers have the role assistant"),
    INSTEAD("config", NULL, OPT_STRING, NULL, "File of options.",
            "options come from the command line and BATON_ variables; docs/configuration.md has "
            "both names"),
    INSTEAD("max-total-tokens", NULL, OPT_INT, NULL, "Tokens of the KV cache.",
            "give --kv-cache-memory in GiB, or --num-gpu-blocks-override, the tokens divided by "
            "--block-size"),
    INSTEAD("disable-radix-cache", NULL, OPT_BOOL, "false", "No prefix cache.",
            "give --no-enable-prefix-caching"),
    INSTEAD("allow-auto-truncate", NULL, OPT_BOOL, "false", "Shorten prompts that are too long.",
            "a prompt longer than --max-model-len is refused"),
    INSTEAD("dist-init-addr", "nccl-init-addr", OPT_STRING, NULL, "Where hosts meet.", OWN_HOST),
    INSTEAD("disaggregation-ib-device", NULL, OPT_STRING, NULL, "RDMA devices.",
            "give the devices in KVCACHE_RDMA_NICS"),
    { .name = NULL },
};
