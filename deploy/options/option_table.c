/* option_table.c - every option of every command, in one table. An option has FastDeploy's name
 * where there is one; vLLM's names are aliases. An option whose effect is not EFFECT_WORKS has the
 * sentence that is printed when it is given. Thread: any (a constant table). */
#include "deploy/options/option_table.h"

#include <stddef.h>

#define NODE "serve launch generate doctor"
#define NET  "serve launch doctor"

/* The heading under which --help lists an option, and the commands that take it. */
#define IN(group_, commands_) .group = group_, .commands = commands_

#define RANGE(min_, max_) .min = min_, .max = max_

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

const struct option OPTIONS[] = {
    /* ---- Model ---- */
    {
        .name = "model",
        .aliases = "model-path model_name_or_path m",
        .env = "BATON_MODEL",
        .type = OPT_STRING,
        IN("Model", NODE),
        .help = "A Hugging Face folder, a .gguf file, or org/name in a local cache.",
    },
    {
        .name = "served-model-name",
        .aliases = "alias a",
        .env = "BATON_SERVED_MODEL_NAME",
        .type = OPT_LIST,
        IN("Model", NODE),
        .help = "Names under which clients may ask for the model; the first is the one in answers. "
                "Default: the model as given.",
    },
    {
        .name = "chat-template",
        .env = "BATON_CHAT_TEMPLATE",
        .type = OPT_STRING,
        IN("Model", NODE),
        .help = "File with a Jinja chat template to use in place of the model's own.",
    },
    {
        .name = "reasoning-parser",
        .env = "BATON_REASONING_PARSER",
        .type = OPT_STRING,
        .def = "auto",
        IN("Model", NODE),
        .help =
            "How a chat answer's reasoning is told from the answer: auto (by the chat template), "
            "none, think or ernie; names of FastDeploy, vLLM and "
            "SGLang for these are known (qwen3, deepseek_r1, ernie-x1 ...).",
    },
    {
        .name = "tool-call-parser",
        .env = "BATON_TOOL_CALL_PARSER",
        .type = OPT_STRING,
        .def = "auto",
        IN("Model", NODE),
        .help = "How the model writes tool calls: auto (by the chat template), none, hermes, "
                "qwen3_coder, deepseek_v3, deepseek_v31, llama3_json, ernie, "
                "mistral or mistral_v11; names of FastDeploy, vLLM and SGLang for these are known.",
    },
    {
        .name = "quantization",
        .type = OPT_STRING,
        IN("Model", NODE),
        .help = "Quantise a checkpoint while loading: wint8, wint4 (attention, feed-forward blocks "
                "and experts, one scale per output) or block_wise_fp8 "
                "(128 x 128 blocks). In ERNIE with experts wint4 is for the routed experts and the "
                "rest is wint8. Embedding, head, norms, routers and kv_b "
                "of latent attention stay as they are. A GGUF file is quantised already: there the "
                "option has no effect.",
    },
    {
        .name = "activations",
        .env = "BATON_ACTIVATIONS",
        .type = OPT_ENUM,
        .choices = "auto|f32",
        .def = "auto",
        IN("Model", NODE),
        .help =
            "Arithmetic: auto rounds the inputs of quantised matrices to int8, those of bf16 "
            "ones and attention's queries to bf16 where the CPU "
            "multiplies them, and keeps the KV cache in bf16; f32 is exact. Nodes of one cluster "
            "must agree.",
    },
    {
        .name = "weights-cache",
        .env = "BATON_WEIGHTS_CACHE",
        .type = OPT_STRING,
        .def = "off",
        IN("Model", NODE),
        .help =
            "Folder for copies of weights as they are packed (and quantised) for this CPU: a "
            "later start maps the copy, and the nodes of a host "
            "share its memory. A copy is about as large as the weights. off: pack at every start.",
    },
    {
        .name = "load-format",
        .aliases = "load-choices",
        .type = OPT_ENUM,
        .choices = "auto|default|default_v1|safetensors|gguf|dummy",
        .def = "auto",
        IN("Model", NODE),
        .help =
            "Format of the weights; auto (and default, default_v1, as FastDeploy calls it) "
            "recognises it, another one is refused where the files are "
            "not of it. dummy: no weights are read, config.json is enough; they are dummy values "
            "(bf16, then as --quantization says) for measurements of "
            "speed and memory, and answers mean nothing.",
    },

    /* ---- Engine ---- */
    {
        .name = "max-model-len",
        .aliases = "context-length ctx-size c max_model_len",
        .env = "BATON_MAX_MODEL_LEN",
        .type = OPT_INT,
        RANGE(1, 16777216),
        .def = "2048",
        IN("Engine", NODE),
        .help = "Longest prompt plus answer, in tokens.",
    },
    {
        .name = "max-num-seqs",
        .aliases = "max-running-requests",
        .env = "BATON_MAX_NUM_SEQS",
        .type = OPT_INT,
        RANGE(1, 4096),
        .def = "8",
        IN("Engine", NODE),
        .help = "Most sequences in one step.",
    },
    {
        .name = "max-num-batched-tokens",
        .aliases = "chunked-prefill-size",
        .env = "BATON_MAX_NUM_BATCHED_TOKENS",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "512",
        IN("Engine", NODE),
        .help = "Most tokens in one step; longer prompts are computed in chunks.",
    },
    {
        .name = "max-waiting",
        .env = "BATON_MAX_WAITING",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "1024",
        IN("Engine", NODE),
        .help = "Most sequences waiting in a node's engine; more are placed elsewhere or refused "
                "with 429.",
    },
    {
        .name = "block-size",
        .aliases = "page-size",
        .env = "BATON_BLOCK_SIZE",
        .type = OPT_INT,
        RANGE(1, 256),
        .def = "64",
        IN("Engine", NODE),
        .help = "Tokens per KV block. Nodes that exchange KV may differ; equal sizes save a copy.",
    },
    {
        .name = "num-gpu-blocks-override",
        .aliases = "num-kv-blocks",
        .env = "BATON_KV_BLOCKS",
        .type = OPT_INT,
        RANGE(1, 1073741824),
        IN("Engine", NODE),
        .help = "Number of KV blocks; default: what fits in --kv-cache-memory, on a GPU in "
                "--gpu-memory-utilization.",
    },
    {
        .name = "kv-cache-memory",
        .env = "BATON_KV_CACHE_MEMORY",
        .type = OPT_FLOAT,
        RANGE(0.001, 1048576),
        IN("Engine", NODE),
        .help = "GiB for the KV cache; default: a fifth of the memory that is available once the "
                "weights are loaded, but no more than --max-num-seqs contexts "
                "take; on a GPU what --gpu-memory-utilization leaves.",
    },
    {
        .name = "kv-cache-dtype",
        .env = "BATON_KV_CACHE_DTYPE",
        .type = OPT_STRING,
        .def = "auto",
        IN("Engine", NODE),
        .help =
            "What keys and values are held as: auto (bfloat16, float32 with --activations f32), "
            "bfloat16, float16, int8 or fp8 (fp8_e4m3). int8 and fp8 have "
            "a scale per token and head and take about half the memory of bfloat16, so that "
            "twice the tokens fit; answers differ a little. Nodes that "
            "exchange KV should agree. Models with latent attention (MLA) take what auto is, no "
            "other.",
    },
    {
        .name = "enable-prefix-caching",
        .env = "BATON_PREFIX_CACHING",
        .type = OPT_BOOL,
        .def = "true",
        IN("Engine", NODE),
        .help = "Keep KV blocks of finished requests for prompts that begin alike.",
    },
    {
        .name = "device",
        .env = "BATON_DEVICE",
        .type = OPT_ENUM,
        .choices = "cpu|cuda",
        .def = "cpu",
        IN("Engine", NODE),
        .help = "Where the model computes: the CPU, or the first GPU of CUDA_VISIBLE_DEVICES. "
                "cuda is new: docs/gpu.md says what has run on a GPU.",
    },
    {
        .name = "gpu-memory-utilization",
        .aliases = "mem-fraction-static",
        .env = "BATON_GPU_MEMORY_UTILIZATION",
        .type = OPT_FLOAT,
        RANGE(0.01, 1),
        .def = "0.9",
        IN("Engine", NODE),
        .help =
            "With --device cuda: share of the GPU's memory that this node may take. What weights "
            "and steps leave of it, and other processes on the same GPU, "
            "becomes the KV cache. Nodes that share a GPU have 0.45 each, or less; `launch` "
            "gives them that where nothing is said.",
    },
    {
        .name = "enforce-eager",
        .aliases = "disable-cuda-graph",
        .env = "BATON_ENFORCE_EAGER",
        .type = OPT_BOOL,
        .def = "false",
        IN("Engine", NODE),
        .help = "With --device cuda: launch the kernels of every step one by one instead of "
                "recording the usual steps as CUDA graphs at start.",
    },
    {
        .name = "deterministic",
        .env = "BATON_DETERMINISTIC",
        .type = OPT_BOOL,
        .def = "false",
        IN("Engine", NODE),
        .help =
            "With --device cuda: a request gives the same tokens whatever else is computed with "
            "it, at some cost in speed. On the CPU it always does.",
    },
    {
        .name = "cpu-isa",
        .env = "BATON_CPU_ISA",
        .type = OPT_ENUM,
        .choices = "auto|ref|avx2|avx512|avx512-vnni|avx512-bf16|amx",
        .def = "auto",
        IN("Engine", NODE),
        .help = "Kernel backend to use; auto takes the best this CPU has.",
    },
    {
        .name = "compute-threads",
        .aliases = "threads t",
        .env = "BATON_COMPUTE_THREADS OMP_NUM_THREADS",
        .type = OPT_INT,
        RANGE(0, 1024),
        .def = "0",
        IN("Engine", NODE),
        .help = "Threads that compute; 0: one per CPU this process may use.",
    },

    /* ---- HTTP ---- */
    {
        .name = "host",
        .env = "BATON_HOST",
        .type = OPT_STRING,
        .def = "0.0.0.0",
        IN("HTTP", NET),
        .help = "Address the API listens on.",
    },
    {
        .name = "port",
        .env = "BATON_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "8000",
        IN("HTTP", "serve status doctor"),
        .help = "Port of the API; 0 takes any free one.",
    },
    {
        .name = "metrics-port",
        .env = "BATON_METRICS_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("HTTP", "serve doctor"),
        .help = "Extra port for /metrics and health; 0: only the API's own port has them.",
    },
    {
        .name = "api-key",
        .env = "BATON_API_KEY FD_API_KEY VLLM_API_KEY",
        .type = OPT_LIST,
        .group = "HTTP",
        .commands = NET " status",
        .help = "Keys that clients must present as bearer tokens; prefer the environment, command "
                "lines are visible to others.",
    },
    {
        .name = "allow-temperature-above-2",
        .env = "BATON_ALLOW_TEMPERATURE_ABOVE_2",
        .type = OPT_BOOL,
        IN("HTTP", NODE),
        .help = "Take temperatures up to 100; without it those above 2 are refused, as in OpenAI's "
                "API.",
    },
    {
        .name = "max-connections",
        .env = "BATON_MAX_CONNECTIONS",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "10000",
        IN("HTTP", NET),
        .help = "Connections that a port for clients has open at once; more get 503.",
    },
    {
        .name = "max-connections-per-client",
        .env = "BATON_MAX_CONNECTIONS_PER_CLIENT",
        .type = OPT_INT,
        RANGE(0, 1048576),
        .def = "0",
        IN("HTTP", NET),
        .help = "Connections of one client address (of IPv6, one /64 network); more get 429. 0: no "
                "limit. Behind a proxy all clients have its address.",
    },
    {
        .name = "max-requests-per-client",
        .env = "BATON_MAX_REQUESTS_PER_CLIENT",
        .type = OPT_INT,
        RANGE(0, 1048576),
        .def = "0",
        IN("HTTP", NET),
        .help = "Running requests of one client address; more get 429. 0: no limit.",
    },
    {
        .name = "large-body-memory",
        .env = "BATON_LARGE_BODY_MEMORY",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "96",
        IN("HTTP", NET),
        .help = "MiB that request bodies of more than 64 KiB may take together until they are "
                "parsed; more wait, up to 30 s, then get 429. One body alone is always read.",
    },
    {
        .name = "max-concurrency",
        .env = "BATON_MAX_CONCURRENCY",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "2048",
        IN("HTTP", NET),
        .help = "Requests this node follows at once as their entry; more are passed on or get 429.",
    },
    { .name = "pass-requests",
      .env = "BATON_PASS_REQUESTS",
      .type = OPT_BOOL,
      .def = "true",
      IN("HTTP", NET),
      .help = "While this node loads its model or is full, pass completions to the least loaded "
              "node of its topic; false: answer 503 or 429." },
    {
        .name = "shutdown-timeout",
        .aliases = "timeout-graceful-shutdown",
        .env = "BATON_SHUTDOWN_TIMEOUT",
        .type = OPT_INT,
        RANGE(0, 86400),
        .def = "30",
        IN("HTTP", NET),
        .help = "Seconds that running requests get after the first signal.",
    },

    /* ---- Cluster ---- */
    {
        .name = "splitwise-role",
        .aliases = "disaggregation-mode role",
        .env = "BATON_ROLE",
        .type = OPT_ENUM,
        .choices = "mixed|prefill|decode",
        .def = "mixed",
        IN("Cluster", "serve doctor"),
        .help = "Which work the scheduler places on this node. A decode node that sees no prefill "
                "node of its model computes prompts itself.",
    },
    {
        .name = "kv-transfer-config",
        .type = OPT_JSON,
        IN("Cluster", "serve doctor"),
        .help =
            "vLLM's way to give the role: kv_role kv_producer is prefill, kv_consumer is decode, "
            "kv_both is mixed.",
    },
    {
        .name = "innode-prefill-ports",
        .aliases = "inner-prefill-ports",
        .env = "BATON_INNODE_PREFILL_PORTS",
        .type = OPT_LIST,
        IN("Cluster", "serve doctor"),
        .help =
            "Control port (--engine-worker-queue-port) of a prefill node on this host that holds "
            "the cluster view.",
    },
    {
        .name = "engine-worker-queue-port",
        .aliases = "control-port",
        .env = "BATON_CONTROL_PORT",
        .type = OPT_LIST,
        IN("Cluster", NET),
        .help =
            "Control port: other nodes register here when this node is the directory server. Of a "
            "list, the entry of this rank; launch holds the view of all its nodes on the first.",
    },
    {
        .name = "pd-comm-port",
        .aliases = "cluster-port",
        .env = "BATON_CLUSTER_PORT",
        .type = OPT_LIST,
        IN("Cluster", NET),
        .help = "Port for messages between nodes; default: any free one.",
    },
    {
        .name = "cache-queue-port",
        .aliases = "kv-port",
        .env = "BATON_KV_PORT",
        .type = OPT_LIST,
        IN("Cluster", NET),
        .help = "Port for KV over TCP; default: any free one.",
    },
    {
        .name = "cache-transfer-protocol",
        .aliases = "disaggregation-transfer-backend",
        .env = "BATON_CACHE_TRANSFER_PROTOCOL",
        .type = OPT_LIST,
        .def = "ipc,rdma,tcp",
        IN("Cluster", NET),
        .help = "Ways KV may take: ipc (shared memory, same host), rdma, ucx, tcp; the best that "
                "reaches a peer is used. What is not named never is.",
    },
    {
        .name = "rdma-comm-ports",
        .env = "BATON_RDMA_PORTS",
        .type = OPT_LIST,
        IN("Cluster", NET),
        .help = "Port on which rdma connections are set up; default: any free one. Of a list, the "
                "entry of this rank.",
    },
    {
        .name = "kv-checksum",
        .env = "BATON_KV_CHECKSUM",
        .type = OPT_BOOL,
        .def = "true",
        IN("Cluster", NET),
        .help = "Verify a checksum of every KV block before decode uses it.",
    },
    {
        .name = "advertise-host",
        .aliases = "ips",
        .env = "BATON_ADVERTISE_HOST",
        .type = OPT_STRING,
        IN("Cluster", "serve doctor"),
        .help = "Address at which other nodes reach this one; default: the one that faces the "
                "scheduler.",
    },
    {
        .name = "cluster-secret-file",
        .env = "BATON_CLUSTER_SECRET_FILE",
        .type = OPT_STRING,
        .group = "Cluster",
        .commands = NET " bench",
        .help = "File with the secret all nodes share (or BATON_CLUSTER_SECRET). Without one "
                "node-to-node ports stay on loopback; `launch` makes one for its nodes.",
    },
    {
        .name = "router",
        .env = "BATON_DIRECTORY",
        .type = OPT_STRING,
        IN("Cluster", NET),
        .help = "host:port of the directory server (a launcher or a node's "
                "control port).",
    },
    {
        .name = "local-data-parallel-id",
        .aliases = "data-parallel-rank",
        .env = "BATON_RANK",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("Cluster", "serve doctor"),
        .help = "Rank of this process: which entry of the port lists is its own.",
    },

    /* ---- Scheduler ---- */
    {
        .name = "scheduler-name",
        .env = "BATON_SCHEDULER_NAME",
        .type = OPT_ENUM,
        .choices = "local|splitwise|global|dp",
        .def = "local",
        IN("Scheduler", NET),
        .help =
            "Where the cluster view lives: local in this process (dp is the same), splitwise (or "
            "global) in Redis.",
    },
    {
        .name = "scheduler-host",
        .env = "BATON_SCHEDULER_HOST",
        .type = OPT_STRING,
        .def = "127.0.0.1",
        IN("Scheduler", NET),
        .help = "Redis host.",
    },
    {
        .name = "scheduler-port",
        .env = "BATON_SCHEDULER_PORT",
        .type = OPT_INT,
        RANGE(1, 65535),
        .def = "6379",
        IN("Scheduler", NET),
        .help = "Redis port.",
    },
    {
        .name = "scheduler-db",
        .env = "BATON_SCHEDULER_DB",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("Scheduler", NET),
        .help = "Redis database number.",
    },
    {
        .name = "scheduler-password",
        .env = "BATON_REDIS_PASSWORD REDIS_PASSWORD",
        .type = OPT_STRING,
        IN("Scheduler", NET),
        .help = "Redis password; prefer the environment.",
    },
    {
        .name = "scheduler-topic",
        .env = "BATON_TOPIC",
        .type = OPT_STRING,
        .def = "default",
        IN("Scheduler", NET),
        .help = "Nodes of one topic serve each other's requests.",
    },
    {
        .name = "scheduler-ttl",
        .env = "BATON_TTL",
        .type = OPT_INT,
        RANGE(1, 604800),
        .def = "900",
        IN("Scheduler", NET),
        .help = "Seconds after which a request is given up.",
    },
    {
        .name = "scheduler-max-size",
        .env = "BATON_SCHEDULER_MAX_SIZE",
        .type = OPT_INT,
        RANGE(-1, 1048576),
        .def = "-1",
        IN("Scheduler", NET),
        .help = "Like --max-concurrency, FastDeploy's name; -1: not set.",
    },
    {
        .name = "placement-timeout",
        .env = "BATON_PLACEMENT_TIMEOUT",
        .type = OPT_FLOAT,
        RANGE(0, 3600),
        .def = "5",
        IN("Scheduler", NET),
        .help =
            "Seconds a request waits for a node that could serve it to appear before it gets 503.",
    },

    /* ---- launch ---- */
    {
        .name = "prefill",
        .env = "BATON_PREFILL",
        .type = OPT_INT,
        RANGE(0, 256),
        .def = "0",
        IN("Launch", "launch doctor"),
        .help = "Prefill nodes to start.",
    },
    {
        .name = "decode",
        .env = "BATON_DECODE",
        .type = OPT_INT,
        RANGE(0, 256),
        .def = "0",
        IN("Launch", "launch doctor"),
        .help = "Decode nodes to start.",
    },
    {
        .name = "num-servers",
        .aliases = "mixed",
        .env = "BATON_NUM_SERVERS",
        .type = OPT_INT,
        RANGE(0, 256),
        .def = "0",
        IN("Launch", "launch doctor"),
        .help = "Mixed nodes to start.",
    },
    {
        .name = "ports",
        .env = "BATON_PORTS",
        .type = OPT_LIST,
        IN("Launch", "launch doctor"),
        .help =
            "API ports: prefill nodes first, then decode, then mixed. Missing ones are the next "
            "free ports from 8000 on.",
    },
    {
        .name = "metrics-ports",
        .env = "BATON_METRICS_PORTS",
        .type = OPT_LIST,
        IN("Launch", "launch doctor"),
        .help = "Metrics ports in the same order.",
    },
    {
        .name = "restart",
        .env = "BATON_RESTART",
        .type = OPT_BOOL,
        .def = "true",
        IN("Launch", "launch doctor"),
        .help = "Start a node again when its process dies.",
    },
    {
        .name = "args",
        .type = OPT_BOOL,
        IN("Launch", "launch doctor"),
        .help = "FastDeploy's separator before the options of the servers; options may come before "
                "or after it.",
    },

    /* ---- generate ---- */
    {
        .name = "input",
        .aliases = "i",
        .type = OPT_STRING,
        IN("Generate", "generate"),
        .help = "File of OpenAI batch lines; - is standard input.",
    },
    {
        .name = "output",
        .aliases = "o",
        .type = OPT_STRING,
        .def = "-",
        IN("Generate", "generate"),
        .help = "File for the answers; - is standard output.",
    },
    {
        .name = "prompt",
        .aliases = "p",
        .type = OPT_STRING,
        IN("Generate", "generate"),
        .help = "Stream the answer to one prompt.",
    },
    {
        .name = "raw",
        .type = OPT_BOOL,
        IN("Generate", "generate"),
        .help = "Give the prompt to the model as it is, without the chat template.",
    },
    {
        .name = "max-tokens",
        .type = OPT_INT,
        RANGE(1, 16777216),
        .def = "256",
        IN("Generate", "generate"),
        .help = "Longest answer to --prompt and to prompts one per line.",
    },
    {
        .name = "temperature",
        .type = OPT_FLOAT,
        RANGE(0, 2),
        .def = "0",
        IN("Generate", "generate"),
        .help = "Temperature for --prompt and for prompts one per line.",
    },
    {
        .name = "ignore-model",
        .type = OPT_BOOL,
        IN("Generate", "generate"),
        .help = "Answer batch lines that name another model too.",
    },
    {
        .name = "concurrency",
        .type = OPT_INT,
        RANGE(1, 4096),
        .def = "32",
        IN("Generate", "generate"),
        .help = "Batch lines in work at once.",
    },

    /* ---- status, doctor ---- */
    {
        .name = "url",
        .env = "BATON_URL",
        .type = OPT_STRING,
        IN("Status", "status"),
        .help = "A node to ask, http://host:port; default: 127.0.0.1 and --port.",
    },
    {
        .name = "watch",
        .type = OPT_BOOL,
        IN("Status", "status"),
        .help = "Ask again every two seconds, until Ctrl-C.",
    },
    {
        .name = "json",
        .type = OPT_BOOL,
        IN("Status", "status doctor version bench"),
        .help = "Print JSON.",
    },

    /* ---- bench, and doctor with other hosts ---- */
    {
        .name = "peers",
        .type = OPT_LIST,
        IN("Bench", "bench doctor"),
        .help = "host:port of probe servers on other hosts (`baton doctor --listen`): bench "
                "measures from "
                "here to each, doctor every pair of hosts, this one included.",
    },
    {
        .name = "listen",
        .type = OPT_STRING,
        IN("Bench", "bench doctor"),
        .help = "Run the probe server that --peers on another host names: host:port. Without the "
                "cluster "
                "secret it listens on loopback only.",
    },
    {
        .name = "transport",
        .type = OPT_LIST,
        IN("Bench", "bench"),
        .help = "Transports to measure: ipc, tcp, rdma, ucx, mem. Default: all of this binary that "
                "work here.",
    },
    {
        .name = "piece",
        .type = OPT_LIST,
        .def = "4k,64k,1m",
        IN("Bench", "bench"),
        .help = "Bytes of one (layer, block): sizes and ranges. 4k..4m goes by factors of four, "
                "4k..4m*2 by factors of two.",
    },
    {
        .name = "blocks",
        .type = OPT_INT,
        RANGE(0, 262144),
        .def = "0",
        IN("Bench", "bench"),
        .help = "KV blocks of one transfer; 0: as many as make 128 MiB over 8 layers.",
    },
    {
        .name = "rounds",
        .type = OPT_INT,
        RANGE(1, 100),
        .def = "5",
        IN("Bench", "bench"),
        .help = "Rounds of limit and transfer in turn; the best of each is compared.",
    },
    {
        .name = "samples",
        .type = OPT_INT,
        RANGE(0, 100000),
        .def = "1000",
        IN("Bench", "bench"),
        .help = "Transfers of one piece for the latency percentiles; 0: none.",
    },
    {
        .name = "copiers",
        .type = OPT_INT,
        RANGE(1, 16),
        .def = "1",
        IN("Bench", "bench"),
        .help = "Threads that copy for ipc, and for the memcpy it is compared with.",
    },
    {
        .name = "connections",
        .type = OPT_INT,
        RANGE(1, 16),
        .def = "1",
        IN("Bench", "bench"),
        .help = "TCP connections for tcp, and for the iperf3 or plain stream it is compared with.",
    },
    {
        .name = "checksum",
        .type = OPT_ENUM,
        .choices = "on|off|true|false",
        .def = "on",
        IN("Bench", "bench"),
        .help = "Make and verify block checksums, as nodes do.",
    },
    {
        .name = "contiguous",
        .type = OPT_BOOL,
        IN("Bench", "bench"),
        .help = "Blocks in order on both sides, so that pieces join; default: scattered, as after "
                "hours of serving.",
    },

    /* ---- Logging ---- */
    {
        .name = "log-level",
        .env = "BATON_LOG_LEVEL",
        .type = OPT_ENUM,
        .choices = "error|warn|info|debug",
        .def = "info",
        .group = "Logging",
        .help = "Least important lines shown.",
    },
    {
        .name = "log-dir",
        .env = "BATON_LOG_DIR FD_LOG_DIR",
        .type = OPT_STRING,
        IN("Logging", NODE),
        .help = "Also write the log to this folder: baton-PORT.log of a node, baton-launch.log of "
                "the launcher. SIGHUP opens it again.",
    },
    {
        .name = "log-max-mib",
        .env = "BATON_LOG_MAX_MIB",
        .type = OPT_INT,
        RANGE(0, 1048576),
        .def = "100",
        IN("Logging", NODE),
        .help = "Size at which the file in --log-dir is renamed (.1, .2, ...) and a new one begun; "
                "0: never.",
    },
    {
        .name = "log-files",
        .env = "BATON_LOG_FILES",
        .type = OPT_INT,
        RANGE(0, 1000),
        .def = "5",
        IN("Logging", NODE),
        .help = "How many renamed files are kept.",
    },
    {
        .name = "log-requests",
        .env = "BATON_LOG_REQUESTS",
        .type = OPT_BOOL,
        IN("Logging", NET),
        .help = "Log each request's begin (its number and x-request-id) and end, with the time of "
                "each of its stages, at level info; else at level debug.",
    },

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
