/* option_table_engine.c - options of the engine: lengths, batches, the KV cache, and what computes.
 * Thread: any (a constant table). */
#include "deploy/options/option_entry.h"

const struct option ENGINE_OPTIONS[] = {
    {
        .name = "max-model-len",
        .aliases = "context-length ctx-size c max_model_len",
        .env = "BATON_MAX_MODEL_LEN",
        .service_env = "MAX_SEQ_LEN",
        .type = OPT_INT,
        RANGE(1, 16777216),
        .def = "2048",
        .service_def = "8192",
        IN("Engine", TEXT),
        .help = "Longest prompt plus answer, in tokens.",
    },
    {
        .name = "max-num-seqs",
        .aliases = "max-running-requests parallel np",
        .env = "BATON_MAX_NUM_SEQS",
        .service_env = "BATCH_SIZE",
        .type = OPT_INT,
        RANGE(1, 4096),
        .def = "8",
        .service_def = "50",
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
        .aliases = "max-queued-requests",
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
        .service_env = "BLOCK_SIZE",
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
        .env = "BATON_KV_CACHE_DTYPE USE_CACHE_KV_INT8 USE_CACHE_KV_INT4",
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
        .name = "swap-space",
        .aliases = "hicache-size kv-offloading-size",
        .env = "BATON_SWAP_SPACE",
        .type = OPT_FLOAT,
        RANGE(0, 1048576),
        .def = "0",
        IN("Engine", NODE),
        .help = "GiB of host memory behind the KV cache, for each rank: blocks that it evicts stay "
                "there and come back when that is sooner than computing them "
                "(docs/kv-cache.md). At most what the host has free is taken.",
    },
    {
        .name = "kv-cache-dir",
        .env = "BATON_KV_CACHE_DIR",
        .type = OPT_STRING,
        IN("Engine", NODE),
        .help = "Folder on a local disk that keeps KV blocks, also over a restart. The nodes of a "
                "host that serve the same model may share it; each rank of a node "
                "(--tensor-parallel-size) has a folder of its own in it.",
    },
    {
        .name = "kv-cache-disk",
        .env = "BATON_KV_CACHE_DISK",
        .type = OPT_FLOAT,
        RANGE(0.001, 1048576),
        .def = "16",
        IN("Engine", NODE),
        .help = "GiB that the files of --kv-cache-dir may take, whoever writes them. The ranks of "
                "a node share them out.",
    },
    {
        .name = "kv-cache-tier-dtype",
        .env = "BATON_KV_CACHE_TIER_DTYPE",
        .type = OPT_STRING,
        .def = "auto",
        IN("Engine", NODE),
        .help = "What KV is held as in --swap-space and --kv-cache-dir: auto (as in the KV cache, "
                "so that answers do not depend on what was cached), int8 or fp8 (half the room of "
                "bfloat16; answers that use such blocks differ a little), bfloat16, float16.",
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
    {
        .name = "speculative-config",
        .env = "BATON_SPECULATIVE_CONFIG SPECULATE_METHOD",
        .type = OPT_JSON,
        IN("Engine", NODE),
        .help = "Speculative decoding, in the JSON of vLLM and FastDeploy: \"method\" (ngram, "
                "suffix, mtp or draft), \"num_speculative_tokens\" (1 to 8), \"model\", "
                "\"prompt_lookup_min\", \"prompt_lookup_max\" (docs/speculation.md). Answers are "
                "the same, only sooner.",
    },
    {
        .name = "speculative-algorithm",
        .type = OPT_STRING,
        IN("Engine", NODE),
        .help = "SGLang's names of methods of --speculative-config: NGRAM, NEXTN or EAGLE (mtp), "
                "STANDALONE (draft).",
    },
    {
        .name = "speculative-draft-model-path",
        .aliases = "model-draft md",
        .type = OPT_STRING,
        IN("Engine", NODE),
        .help = "A small model that drafts, as --speculative-config's method draft with \"model\".",
    },
    {
        .name = "speculative-num-steps",
        .aliases = "speculative-num-draft-tokens draft draft-max draft-n",
        .type = OPT_INT,
        RANGE(1, 1024),
        IN("Engine", NODE),
        .help = "Drafts of a sequence in a step, up to 8, with --speculative-algorithm or "
                "--speculative-draft-model-path; --speculative-config has num_speculative_tokens.",
    },
    {
        .name = "pace",
        .env = "BATON_PACE",
        .type = OPT_STRING,
        IN("Engine", "serve launch"),
        .help = "File with the measured times of another machine's steps: each step is computed "
                "and then waits until it has lasted as long. For tests and simulations "
                "(docs/pace.md); the node says so wherever it tells a time.",
    },
    { .name = NULL },
};
