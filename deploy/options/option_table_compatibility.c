/* option_table_compatibility.c - options of other systems that change no answer here, or cannot be
 * honoured. Thread: any (a constant table). */
#include "deploy/options/option_entry.h"

#define ACCEPT(n, a, e, t, g, h, why)                                                              \
    {                                                                                              \
        .name = n, .aliases = a, .env = e, .type = t, .group = g, .commands = NODE, .help = h,     \
        .effect = EFFECT_ACCEPTED, .note = why                                                     \
    }
/* An option of `serve` that FastDeploy's offline scripts give too. */
#define ALONE(n, t, d)                                                                             \
    {                                                                                              \
        .name = n, .type = t, .def = d, IN("Compatibility", "generate"),                           \
        .help = "An option of baton serve.", .effect = EFFECT_ACCEPTED,                            \
        .note = "generate computes alone, in this process"                                         \
    }
#define REFUSE(n, a, e, t, neutral_, g, h, why)                                                    \
    {                                                                                              \
        .name = n, .aliases = a, .env = e, .type = t, .neutral = neutral_, .group = g,             \
        .commands = NODE, .help = h, .effect = EFFECT_REFUSED, .note = why                         \
    }

const struct option COMPATIBILITY_OPTIONS[] = {
    /* ---- Parallelism: accepted, one process computes ---- */
    ACCEPT("tensor-parallel-size", "tp tp-size", NULL, OPT_INT, "Parallelism",
           "Devices that share each layer.",
           "tensor parallelism is not built yet: each node computes alone, with the same answers"),
    ACCEPT("data-parallel-size", "dp dp-size", NULL, OPT_INT, "Parallelism",
           "Ranks with a copy of attention each.",
           "serve runs one rank; start more nodes with `baton launch` or more `baton serve`, the "
           "scheduler shares the requests among them"),
    ACCEPT(
        "pipeline-parallel-size", "pp pp-size", NULL, OPT_INT, "Parallelism",
        "Groups of layers on different devices.",
        "pipeline parallelism is not built yet: each node computes alone, with the same answers"),
    ACCEPT("enable-expert-parallel", "ep", NULL, OPT_BOOL, "Parallelism",
           "Spread the experts of MoE layers over ranks.",
           "expert parallelism is not built yet: each node computes all experts, with the same "
           "answers"),
    ACCEPT("enable-eplb", NULL, NULL, OPT_BOOL, "Parallelism", "Balance experts over ranks.",
           "expert balancing needs expert parallelism, which is not built yet"),
    ACCEPT("disable-custom-all-reduce", NULL, NULL, OPT_BOOL, "Parallelism",
           "Use the library's all-reduce.", "there is no all-reduce on one rank"),

    /* ---- Options of other systems without effect on answers ---- */
    ACCEPT("kv-cache-ratio", NULL, NULL, OPT_FLOAT, "Compatibility",
           "Share of KV blocks for prompts.", "prompts and answers share one pool of KV blocks"),
    ACCEPT("swap-space", NULL, NULL, OPT_FLOAT, "Compatibility",
           "GB of CPU memory behind the GPU cache.",
           "KV is not moved between memories: on the CPU the cache is in its memory already, "
           "on a GPU what does not fit is computed again"),
    ACCEPT("enable-chunked-prefill", NULL, NULL, OPT_BOOL, "Compatibility",
           "Compute long prompts in chunks.", "chunked prefill is always on"),
    ACCEPT("max-num-partial-prefills", NULL, NULL, OPT_INT, "Compatibility",
           "Prompts computed in part at once.",
           "as many prompts as fit in a step are computed together"),
    ACCEPT("max-long-partial-prefills", NULL, NULL, OPT_INT, "Compatibility",
           "Long prompts computed in part at once.",
           "long prompts are chunked by --max-num-batched-tokens"),
    ACCEPT("long-prefill-token-threshold", NULL, NULL, OPT_INT, "Compatibility",
           "From how many tokens a prompt is long.",
           "long prompts are chunked by --max-num-batched-tokens"),
    ACCEPT("static-decode-blocks", NULL, NULL, OPT_INT, "Compatibility",
           "Output blocks given at admission.", "KV blocks are given as an answer grows"),
    ACCEPT("use-cudagraph", NULL, NULL, OPT_BOOL, "Compatibility", "Capture steps as CUDA graphs.",
           "with --device cuda they are, unless --enforce-eager is given"),
    ACCEPT("graph-optimization-config", NULL, NULL, OPT_STRING, "Compatibility",
           "How graphs are captured.",
           "with --device cuda graphs of all usual sizes are captured at start, unless "
           "--enforce-eager is given"),
    ACCEPT("use-warmup", NULL, NULL, OPT_INT, "Compatibility", "Run once before serving.",
           "what has to be made before the first request is made at every start"),
    ACCEPT("speculative-config", NULL, NULL, OPT_STRING, "Compatibility", "Draft tokens to verify.",
           "speculative decoding is not built yet: tokens are decoded one by one, with the same "
           "answers"),
    ACCEPT("trust-remote-code", NULL, NULL, OPT_BOOL, "Compatibility",
           "Run code that comes with a model.", "no code of a model is ever run"),
    ACCEPT("additional-config", NULL, NULL, OPT_STRING, "Compatibility", "vLLM-Ascend's tuning.",
           "these settings tune Ascend kernels"),
    ACCEPT("seed", NULL, NULL, OPT_INT, "Compatibility", "Seed of the engine.",
           "a request's own \"seed\" makes it repeatable; requests without one draw one"),
    ALONE("scheduler-name", OPT_STRING, "local"),
    ALONE("scheduler-host", OPT_STRING, "127.0.0.1"),
    ALONE("scheduler-port", OPT_INT, "6379"),
    ALONE("scheduler-db", OPT_INT, "0"),
    ALONE("scheduler-password", OPT_STRING, NULL),
    ALONE("scheduler-topic", OPT_STRING, "default"),
    ALONE("scheduler-ttl", OPT_INT, "900"),
    ALONE("scheduler-max-size", OPT_INT, "-1"),
    ALONE("engine-worker-queue-port", OPT_LIST, NULL),
    ALONE("cache-queue-port", OPT_LIST, NULL),
    ALONE("pd-comm-port", OPT_LIST, NULL),
    ALONE("rdma-comm-ports", OPT_LIST, NULL),
    ACCEPT("scheduler-min-load-score", NULL, NULL, OPT_INT, "Compatibility",
           "From which load work is stolen.",
           "requests are placed on the least loaded nodes, nothing is stolen"),
    ACCEPT("scheduler-load-shards-num", NULL, NULL, OPT_INT, "Compatibility",
           "Shards of the load table.", "the load of a topic is one small hash"),
    ACCEPT("scheduler-sync-period", NULL, NULL, OPT_INT, "Compatibility",
           "Milliseconds between load reports.",
           "load is counted when a request is placed; leases are renewed every 0.7 s"),
    ACCEPT("scheduler-expire-period", NULL, NULL, OPT_INT, "Compatibility",
           "Milliseconds until a silent node is dead.",
           "a silent node is not chosen any more after 2.4 s"),
    ACCEPT("scheduler-release-load-expire-period", NULL, NULL, OPT_INT, "Compatibility",
           "Seconds until lost load is released.",
           "reservations end with their request or its ttl"),
    ACCEPT("scheduler-reader-parallel", NULL, NULL, OPT_INT, "Compatibility",
           "Threads that read results.", "results do not pass through Redis"),
    ACCEPT("scheduler-writer-parallel", NULL, NULL, OPT_INT, "Compatibility",
           "Threads that write results.", "results do not pass through Redis"),
    ACCEPT("scheduler-reader-batch-size", NULL, NULL, OPT_INT, "Compatibility",
           "Results read at once.", "results do not pass through Redis"),
    ACCEPT("scheduler-writer-batch-size", NULL, NULL, OPT_INT, "Compatibility",
           "Results written at once.", "results do not pass through Redis"),
    ACCEPT("controller-port", NULL, NULL, OPT_LIST, "Compatibility",
           "Port of FastDeploy's controller.",
           "there is no controller to reset: the cluster view renews itself"),
    ACCEPT("workers", NULL, NULL, OPT_INT, "Compatibility", "HTTP processes.",
           "one thread serves HTTP"),
    ACCEPT("max-logprobs", NULL, NULL, OPT_INT, "Compatibility", "Most alternatives per token.",
           "up to 20 alternatives per token are given"),
    ACCEPT("enable-logprob", NULL, NULL, OPT_BOOL, "Compatibility", "Allow logprobs.",
           "logprobs are always available"),
    ACCEPT("enable-output-caching", NULL, NULL, OPT_BOOL, "Compatibility",
           "Answers enter the prefix cache.", "answers enter the prefix cache whenever it is on"),
    ACCEPT("enable-auto-tool-choice", NULL, NULL, OPT_BOOL, "Compatibility",
           "Let the model call tools.", "the model may call tools whenever a request has some"),
    ACCEPT("disable-log-requests", NULL, NULL, OPT_BOOL, "Compatibility", "No line per request.",
           "none is written, unless --log-requests asks for it"),

    /* ---- Refused: would change answers, or needs what is not built ---- */
    REFUSE("tokenizer", NULL, NULL, OPT_STRING, NULL, "Compatibility", "Another model's tokenizer.",
           "the tokenizer is the model's own: a different one would change every answer"),
    REFUSE("dtype", NULL, NULL, OPT_STRING, "auto", "Compatibility",
           "Type of weights and activations.",
           "weights keep the type of their file; --activations chooses the arithmetic"),
    REFUSE("guided-decoding-backend", NULL, NULL, OPT_STRING, "off", "Compatibility",
           "Structured output.", "structured output is not built yet"),
    REFUSE("logits-processors", NULL, NULL, OPT_STRING, NULL, "Compatibility",
           "Python code that changes logits.", "no Python runs in a node"),
    REFUSE("revision", NULL, NULL, OPT_STRING, "master", "Compatibility", "Revision to download.",
           "models are read from local files; name the folder of the revision with --model"),
    REFUSE("ssl-keyfile", NULL, NULL, OPT_STRING, NULL, "Compatibility", "TLS key of the API.",
           "TLS is not built yet: put a proxy in front that ends it"),
    REFUSE("ssl-certfile", NULL, NULL, OPT_STRING, NULL, "Compatibility",
           "TLS certificate of the API.",
           "TLS is not built yet: put a proxy in front that ends it"),
    { .name = NULL },
};
