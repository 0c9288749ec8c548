/* compatibility_table.c - the entries of compatibility.h. Documents by number: 000 FastDeploy data
 * parallel service, 001 an older version of it, 002 vLLM-Ascend large-scale expert parallelism, 003
 * ERNIE-4.5-21B-A3B best practice, 004 PaddleNLP static graph. Thread: any (a constant table). */
#include "deploy/options/compatibility.h"

#include <stddef.h>

#include "shared/model/load/foreign_checkpoint.h"

#define COMMAND(n, s, e, why)                                                                      \
    {                                                                                              \
        .kind = COMPAT_COMMAND, .name = n, .seeds = s, .effect = EFFECT_##e, .sentence = why       \
    }
#define FLAG(n, s)                                                                                 \
    {                                                                                              \
        .kind = COMPAT_FLAG, .name = n, .seeds = s                                                 \
    }
#define FLAG_OF(o, n, s, e, why)                                                                   \
    {                                                                                              \
        .kind = COMPAT_FLAG, .name = n, .owner = o, .seeds = s, .effect = EFFECT_##e,              \
        .sentence = why                                                                            \
    }
#define ENV_OPTION(n, s)                                                                           \
    {                                                                                              \
        .kind = COMPAT_ENV, .name = n, .seeds = s                                                  \
    }
#define ENV(n, s, why)                                                                             \
    {                                                                                              \
        .kind = COMPAT_ENV, .name = n, .seeds = s, .effect = EFFECT_ACCEPTED, .sentence = why      \
    }
#define ENV_QUIET(n, s, why)                                                                       \
    {                                                                                              \
        .kind = COMPAT_ENV, .name = n, .seeds = s, .effect = EFFECT_ACCEPTED, .sentence = why,     \
        .quiet = true                                                                              \
    }
#define ENV_WORKS(n, s, why)                                                                       \
    {                                                                                              \
        .kind = COMPAT_ENV, .name = n, .seeds = s, .effect = EFFECT_WORKS, .sentence = why         \
    }
/* A name that other programs have as well: only what start_server starts reads it. */
#define ENV_START(n, s, e, why)                                                                    \
    {                                                                                              \
        .kind = COMPAT_ENV, .name = n, .seeds = s, .effect = EFFECT_##e,                           \
        .sentence = "of start_server alone: " why, .start_only = true                              \
    }
#define VALUE(n, s, e, why)                                                                        \
    {                                                                                              \
        .kind = COMPAT_VALUE, .name = n, .seeds = s, .effect = EFFECT_##e, .sentence = why         \
    }

#define FETCH  "download_model.py"
#define BENCH  "ais_bench"
#define DOCKER "docker"

#define STATIC(also)                                                                               \
    "`baton pull` and --pull fetch the checkpoint that it was made from; a node quantises it "     \
    "while it loads" also
#define STATIC_F8                                                                                  \
    STATIC(" (--quantization block_wise_fp8), and leaves matrices that the checkpoint has in F8")
#define STATIC_MTP "; the layer that drafts tokens is among the checkpoint's files"

#define NO_DOCKER "there is no image: Baton is one program, built by CMake and started as a process"
#define PADDLE    "the `-Paddle` layout is read as it is, from a folder or a local cache"
#define NO_ASCEND "it asks Ascend hardware, which Baton does not use; `baton doctor` checks a host"
#define NO_HCCL   "it configures Huawei's collective library, which Baton does not use"
#define NO_NIC                                                                                     \
    "it names a NIC for a library that Baton does not use; peers are found by address "            \
    "(--advertise-host)"
#define BENCH_OWN "it belongs to the client, which runs as it is"

const struct compat_entry COMPATIBILITY[] = {
    /* ---- commands ---- */
    COMMAND("python -m fastdeploy.entrypoints.openai.api_server", "001 003", WORKS,
            "`baton serve` with the same options"),
    COMMAND("python -m fastdeploy.entrypoints.openai.multi_api_server", "000 001", WORKS,
            "`baton launch` with the same options"),
    COMMAND("python -m fastdeploy.router.launch", "000", WORKS,
            "`baton router` with the same options; POST /register and GET /registered_number are "
            "there, too (docs/router.md)"),
    COMMAND(
        "LLM(...).generate(prompts, sampling_params)", "001", WORKS,
        "`baton generate --input requests.jsonl --output answers.jsonl`, with LLM's arguments as "
        "options and those of SamplingParams as members of each request; it computes in one "
        "process"),
    COMMAND("bash scripts/get_rdma_nics.sh", "001", WORKS,
            "`bash deploy/get_rdma_nics.sh` with the same words and the same output"),
    COMMAND("vllm serve", "002", WORKS,
            "`baton serve` with the same options; each option's entry says what it does"),
    COMMAND(
        "run_dp_template.sh", "002", WORKS,
        "its `vllm serve` becomes `baton serve` and --quantization ascend has to go; nodes meet "
        "by BATON_SCHEDULER_NAME=splitwise and BATON_SCHEDULER_HOST, or by BATON_ROUTER"),
    COMMAND("multiprocessing launcher of run_dp_template.sh", "002", WORKS,
            "`baton launch --num-servers N` (or --prefill N --decode M) starts and supervises the "
            "nodes of a host"),
    COMMAND("python load_balance_proxy_server_example.py", "002", WORKS,
            "`baton router` with the same options; POST /instances/add, /instances/remove and GET "
            "/healthcheck are there, too (docs/router.md)"),
    COMMAND("hccn_tool", "002", REFUSED, NO_ASCEND),
    COMMAND("npu-smi info", "002", REFUSED, NO_ASCEND),
    COMMAND("cat /etc/hccn.conf", "002", REFUSED, NO_ASCEND),
    COMMAND("ifconfig", "002", WORKS,
            "Linux's own; the start page of a node says which address it uses"),
    COMMAND("git clone https://gitee.com/aisbench/benchmark.git", "002", WORKS,
            "AISBench is a client and is installed as its own documents say"),
    COMMAND("pip3 install -e ./", "002", WORKS,
            "AISBench is a client and is installed as its own documents say"),
    COMMAND("ais_bench", "002", WORKS,
            "its vllm-api-stream-chat client speaks the OpenAI API: host_ip and host_port are "
            "those of any node"),
    COMMAND("Nginx", "000", WORKS, "any HTTP proxy may stand before the nodes; none is needed"),
    COMMAND("docker run", "004", REFUSED, NO_DOCKER),
    COMMAND("docker exec", "004", REFUSED, NO_DOCKER),
    COMMAND("docker build", "004", REFUSED, NO_DOCKER),
    COMMAND("git clone https://github.com/PaddlePaddle/PaddleNLP.git", "004", REFUSED, NO_DOCKER),
    COMMAND("nvidia-smi", "004", REFUSED,
            "a tool of the GPU's driver; `baton doctor` checks a host"),
    COMMAND(
        "python download_model.py", "004", WORKS,
        "`baton pull` with the same flags: the checkpoint is fetched, from which nodes make what "
        "the script's archives have (docs/pull.md)"),
    COMMAND("start_server", "004", WORKS,
            "`deploy/start_server`, or `baton start_server`: `baton serve` in the background, with "
            "the document's variables (docs/start_server.md); a model that is named and not here "
            "is fetched as by `baton pull`"),
    COMMAND("stop_server", "004", WORKS,
            "`deploy/stop_server`, or `baton stop_server`: running requests are finished, for at "
            "most 300 s"),
    COMMAND("mpirun start_server", "004", WORKS,
            "the same on each host that MPI starts it on; of several processes of a host the first "
            "starts the service. MPI is not needed"),
    COMMAND("mpirun stop_server", "004", WORKS, "the same on each host"),
    COMMAND("GET /v2/health/live", "004", WORKS,
            "at HEALTH_HTTP_PORT as the document says; at the API's port it is /live"),
    COMMAND("GET /v2/health/ready", "004", WORKS,
            "at HEALTH_HTTP_PORT as the document says; at the API's port it is /ready"),
    COMMAND("openai.Client(base_url=\".../v1/chat/completions\")", "004", WORKS,
            "the paths that such a client asks for are aliases; .../v1 is the usual base_url"),
    COMMAND("requests.post(url, json={\"text\", \"req_id\", \"max_dec_len\"})", "004", WORKS,
            "FastDeploy's native form, told by its members: answers are its items, a line each "
            "(docs/native.md)"),
    COMMAND("requests.post(url, json={\"messages\", \"req_id\", \"max_dec_len\"})", "004", WORKS,
            "the same; a message between two of the user is the assistant's turn where the "
            "model's chat template takes no \"system\" there"),

    /* ---- flags of the servers: their effect is the option's ---- */
    FLAG("--additional-config", "002"),
    FLAG("--args", "000 001"),
    FLAG("--cache-queue-port", "001 003"),
    FLAG("--cache-transfer-protocol", "001"),
    FLAG("--data-parallel-size", "000 001"),
    FLAG("--enable-chunked-prefill", "003"),
    FLAG("--enable-expert-parallel", "000 001 002"),
    FLAG("--enable-prefix-caching", "003"),
    FLAG("--enforce-eager", "002"),
    FLAG("--engine-worker-queue-port", "000 001 003"),
    FLAG("--gpu-memory-utilization", "002 003"),
    FLAG("--host", "000 002"),
    FLAG("--innode-prefill-ports", "003"),
    FLAG("--kv-cache-ratio", "003"),
    FLAG("--kv-transfer-config", "002"),
    FLAG("--max-model-len", "000 001 002 003"),
    FLAG("--max-num-batched-tokens", "002"),
    FLAG("--max-num-seqs", "000 001 002 003"),
    FLAG("--metrics-port", "001 003"),
    FLAG("--metrics-ports", "000 001"),
    FLAG("--model", "000 001 003"),
    FLAG("--num-gpu-blocks-override", "000 001 003"),
    FLAG("--num-servers", "000 001"),
    FLAG("--pd-comm-port", "001"),
    FLAG("--port", "000 001 002 003"),
    FLAG("--ports", "000 001"),
    FLAG("--quantization", "002 003"),
    FLAG("--rdma-comm-ports", "001"),
    FLAG("--router", "000"),
    FLAG("--scheduler-host", "001"),
    FLAG("--scheduler-name", "001"),
    FLAG("--scheduler-port", "001"),
    FLAG("--scheduler-topic", "001"),
    FLAG("--scheduler-ttl", "001"),
    FLAG("--seed", "002"),
    FLAG("--served-model-name", "002"),
    FLAG("--speculative-config", "002 003"),
    FLAG("--splitwise-role", "001 003"),
    FLAG("--swap-space", "003"),
    FLAG("--tensor-parallel-size", "000 001 002 003"),
    FLAG("--trust-remote-code", "002"),
    FLAG("--use-cudagraph", "003"),

    /* ---- frequent flags of llama.cpp's server, vLLM and SGLang, which no document shows ---- */
    FLAG("--alias", ""),
    FLAG("--api-key", ""),
    FLAG("--api-key-file", ""),
    FLAG("--attention-backend", ""),
    FLAG("--batch-size", ""),
    FLAG("--block-size", ""),
    FLAG("--cache-type-k", ""),
    FLAG("--cache-type-v", ""),
    FLAG("--chat-template", ""),
    FLAG("--chat-template-file", ""),
    FLAG("--chunked-prefill-size", ""),
    FLAG("--compilation-config", ""),
    FLAG("--config", ""),
    FLAG("--cont-batching", ""),
    FLAG("--context-length", ""),
    FLAG("--cpu-offload-gb", ""),
    FLAG("--ctx-size", ""),
    FLAG("--data-parallel-address", ""),
    FLAG("--data-parallel-external-lb", ""),
    FLAG("--data-parallel-hybrid-lb", ""),
    FLAG("--data-parallel-rank", ""),
    FLAG("--data-parallel-rpc-port", ""),
    FLAG("--data-parallel-size-local", ""),
    FLAG("--data-parallel-start-rank", ""),
    FLAG("--device", ""),
    FLAG("--disable-cuda-graph", ""),
    FLAG("--disable-log-requests", ""),
    FLAG("--disable-log-stats", ""),
    FLAG("--disable-radix-cache", ""),
    FLAG("--disaggregation-ib-device", ""),
    FLAG("--disaggregation-mode", ""),
    FLAG("--disaggregation-transfer-backend", ""),
    FLAG("--dist-init-addr", ""),
    FLAG("--distributed-executor-backend", ""),
    FLAG("--download-dir", ""),
    FLAG("--dp-size", ""),
    FLAG("--dtype", ""),
    FLAG("--embeddings", ""),
    FLAG("--enable-auto-tool-choice", ""),
    FLAG("--enable-dp-attention", ""),
    FLAG("--enable-hierarchical-cache", ""),
    FLAG("--enable-lora", ""),
    FLAG("--enable-metrics", ""),
    FLAG("--enable-torch-compile", ""),
    FLAG("--ep-size", ""),
    FLAG("--flash-attn", ""),
    FLAG("--generation-config", ""),
    FLAG("--headless", ""),
    FLAG("--hf-repo", ""),
    FLAG("--hicache-ratio", ""),
    FLAG("--hicache-size", ""),
    FLAG("--hicache-storage-backend", ""),
    FLAG("--hicache-write-policy", ""),
    FLAG("--ips", ""),
    FLAG("--jinja", ""),
    FLAG("--kv-cache-dtype", ""),
    FLAG("--kv-offloading-backend", ""),
    FLAG("--kv-offloading-size", ""),
    FLAG("--kvcache-storage-backend", ""),
    FLAG("--load-format", ""),
    FLAG("--log-file", ""),
    FLAG("--lora-modules", ""),
    FLAG("--max-prefill-tokens", ""),
    FLAG("--max-running-requests", ""),
    FLAG("--max-total-tokens", ""),
    FLAG("--mem-fraction-static", ""),
    FLAG("--metrics", ""),
    FLAG("--mlock", ""),
    FLAG("--mmap", ""),
    FLAG("--model-path", ""),
    FLAG("--n-gpu-layers", ""),
    FLAG("--n-predict", ""),
    FLAG("--nnodes", ""),
    FLAG("--node-rank", ""),
    FLAG("--numa", ""),
    FLAG("--page-size", ""),
    FLAG("--parallel", ""),
    FLAG("--pipeline-parallel-size", ""),
    FLAG("--preemption-mode", ""),
    FLAG("--reasoning-format", ""),
    FLAG("--reasoning-parser", ""),
    FLAG("--root-path", ""),
    FLAG("--schedule-conservativeness", ""),
    FLAG("--schedule-policy", ""),
    FLAG("--skip-server-warmup", ""),
    FLAG("--speculative-algorithm", ""),
    FLAG("--split-mode", ""),
    FLAG("--stream-interval", ""),
    FLAG("--temp", ""),
    FLAG("--tensor-split", ""),
    FLAG("--threads", ""),
    FLAG("--threads-batch", ""),
    FLAG("--timeout", ""),
    FLAG("--tokenizer", ""),
    FLAG("--tokenizer-mode", ""),
    FLAG("--tool-call-parser", ""),
    FLAG("--top-k", ""),
    FLAG("--top-p", ""),
    FLAG("--tp-size", ""),
    FLAG("--ubatch-size", ""),
    FLAG("--uvicorn-log-level", ""),
    FLAG("--verbose", ""),
    FLAG("--watchdog-timeout", ""),
    FLAG("--write-policy", ""),

    /* ---- flags of other programs ---- */
    FLAG("--prefiller-hosts", "002"),
    FLAG("--prefiller-hosts-num", "002"),
    FLAG("--prefiller-ports", "002"),
    FLAG("--prefiller-ports-inc", "002"),
    FLAG("--decoder-hosts", "002"),
    FLAG("--decoder-hosts-num", "002"),
    FLAG("--decoder-ports", "002"),
    FLAG("--decoder-ports-inc", "002"),
    FLAG_OF(BENCH, "--models", "002", WORKS, BENCH_OWN),
    FLAG_OF(BENCH, "--datasets", "002", WORKS, BENCH_OWN),
    FLAG_OF(BENCH, "--debug", "002", WORKS, BENCH_OWN),
    FLAG_OF(BENCH, "--mode", "002", WORKS, BENCH_OWN),
    FLAG_OF(FETCH, "--model_name", "004", WORKS,
            "of `baton pull`: names of static models too, org/name/weight_only_int8; there is no "
            "default"),
    FLAG_OF(FETCH, "--dir", "004", WORKS,
            "of `baton pull`: the folder of the files; without it one in the cache, where --model "
            "org/name finds it"),
    FLAG_OF(FETCH, "--nnodes", "004", WORKS,
            "of `baton pull`: said again with what was decided, since every host needs all files"),
    FLAG_OF(FETCH, "--mode", "004", WORKS,
            "of `baton pull`: master and slave fetch the same: ranks cut every matrix while they "
            "load, and take over the experts of ranks that are lost"),
    FLAG_OF(FETCH, "--speculate_model_path", "004", ACCEPTED,
            "of `baton pull`: the layers that draft tokens are among a checkpoint's own files"),
    FLAG_OF(DOCKER, "--gpus", "004", REFUSED, NO_DOCKER),
    FLAG_OF(DOCKER, "--shm-size", "004", REFUSED,
            NO_DOCKER "; shared KV memory takes no room in /dev/shm"),
    FLAG_OF(DOCKER, "--network", "004", REFUSED, NO_DOCKER),
    FLAG_OF(DOCKER, "--privileged", "004", REFUSED, NO_DOCKER),
    FLAG_OF(DOCKER, "--cap-add", "004", REFUSED, NO_DOCKER),
    FLAG_OF(DOCKER, "--name", "004", REFUSED, NO_DOCKER),
    FLAG_OF(DOCKER, "--rm", "004", REFUSED, NO_DOCKER),

    /* ---- environment variables ---- */
    ENV_OPTION("FD_LOG_DIR", "000 001 003"),
    ENV_OPTION("OMP_NUM_THREADS", "002"),
    ENV("FD_ENABLE_MULTI_API_SERVER", "000 001",
        "`baton launch` starts several servers without a switch"),
    ENV_WORKS("CUDA_VISIBLE_DEVICES", "001 003 004",
              "the ranks of a host take the GPUs in this order, with --device cuda, which "
              "start_server gives itself where there is a GPU; without it none is used"),
    ENV_WORKS(
        "KVCACHE_RDMA_NICS", "001",
        "the RDMA devices to use, in this order; without it every active port near the memory"),
    ENV("ENABLE_V1_KVCACHE_SCHEDULER", "003", "KV blocks are always managed for the whole node"),
    ENV("FD_SAMPLING_CLASS", "003",
        "it chooses how to sample on a GPU; the distribution is the one asked for either way"),
    ENV("FD_ATTENTION_BACKEND", "003",
        "it chooses a GPU kernel; --cpu-isa chooses the kernels of this build"),
    ENV("FD_USE_DEEP_GEMM", "003", "it chooses a GPU library for FP8"),
    ENV("FLAGS_max_partition_size", "003",
        "it tunes a GPU attention kernel; attention here goes by KV blocks"),
    ENV("INFERENCE_MSG_QUEUE_ID", "003",
        "there is no System V message queue to tell apart: nodes talk over sockets"),
    ENV("HCCL_IF_IP", "002", NO_HCCL),
    ENV("HCCL_SOCKET_IFNAME", "002", NO_HCCL),
    ENV("HCCL_BUFFSIZE", "002", NO_HCCL),
    ENV("GLOO_SOCKET_IFNAME", "002", NO_NIC),
    ENV("TP_SOCKET_IFNAME", "002", NO_NIC),
    ENV("OMP_PROC_BIND", "002",
        "OpenMP is not used; compute threads go where the system puts them"),
    ENV_OPTION("VLLM_DP_SIZE", "002"),
    ENV_OPTION("VLLM_DP_SIZE_LOCAL", "002"),
    ENV_OPTION("VLLM_DP_RANK", "002"),
    ENV_OPTION("VLLM_DP_RANK_LOCAL", "002"),
    ENV_OPTION("VLLM_DP_MASTER_IP", "002"),
    ENV_OPTION("VLLM_DP_MASTER_PORT", "002"),
    ENV_WORKS("VLLM_USE_MODELSCOPE", "002",
              "true: `baton pull` and --pull fetch org/name from ModelScope; it is looked for in "
              "its cache as well as in Hugging Face's, whatever this says"),
    ENV("VLLM_WORKER_MULTIPROC_METHOD", "002", "a node is one process"),
    ENV("VLLM_ASCEND_EXTERNAL_DP_LB_ENABLED", "002",
        "every node shares requests with the others; a balancer before them is welcome and not "
        "needed"),
    ENV("PYTORCH_NPU_ALLOC_CONF", "002", "it tunes PyTorch, which Baton does not use"),
    ENV("TASK_QUEUE_ENABLE", "002", "it tunes PyTorch on Ascend, which Baton does not use"),
    ENV_QUIET("http_proxy", "002",
              "nodes reach each other directly, and `baton pull` hubs through it; clients may need "
              "it unset"),
    ENV_QUIET("https_proxy", "002",
              "nodes reach each other directly, and `baton pull` hubs through it; clients may need "
              "it unset"),
    ENV("MODEL_PATH", "004", "a variable of the scripts: a download's folder, or what is mounted"),
    ENV_START("MODEL_DIR", "004", WORKS,
              "the folder of the model, or of models of which one is named; without it /models"),
    ENV_START(
        "model_name", "004", WORKS,
        "a model below MODEL_DIR or in a local cache, else it is fetched (`baton pull`); as the "
        "argument of start_server"),
    ENV("tag", "004",
        "it chose the version of static-graph exports, in whose place the checkpoint is read"),
    ENV("quant_type", "003", "a variable of the script; it reaches a node as --quantization"),
    ENV_WORKS("MP_NUM", "004",
              "ranks of all hosts: MP_NUM / MP_NNODE of them are a node of each host "
              "(--tensor-parallel-size), on GPUs as many as CUDA_VISIBLE_DEVICES lists"),
    ENV_WORKS("MP_NNODE", "004",
              "how many hosts POD_IPS lists; with start_server they share a model's experts, and "
              "of one without experts each has all"),
    ENV_WORKS("POD_IPS", "004", "the addresses of all hosts (--ips)"),
    ENV_WORKS("POD_0_IP", "004",
              "the host with rank 0 (--data-parallel-address), and with start_server with the "
              "cluster view, where the others register"),
    ENV_START("HOST_IP", "", WORKS, "which of the hosts in POD_IPS this is"),
    ENV_OPTION("SERVICE_HTTP_PORT", "004"),
    ENV_OPTION("PUSH_MODE_HTTP_PORT", "004"),
    ENV_OPTION("PUSH_MODE_HTTP_WORKERS", "004"),
    ENV_OPTION("HEALTH_HTTP_PORT", "004"),
    ENV_START("HTTP_PORT", "004", WORKS, "as HEALTH_HTTP_PORT"),
    ENV_OPTION("METRICS_HTTP_PORT", "004"),
    ENV_START("METRICS_PORT", "004", WORKS, "as METRICS_HTTP_PORT"),
    ENV_OPTION("SERVICE_GRPC_PORT", "004"),
    ENV_START("GRPC_PORT", "004", WORKS, "as SERVICE_GRPC_PORT"),
    ENV_START("INTER_PROC_PORT", "004", WORKS,
              "the control port (--engine-worker-queue-port); of several hosts that of POD_0_IP, "
              "56666 without it"),
    ENV_START("INTER_QUEUE_PORT", "004", WORKS, "as INTER_PROC_PORT"),
    ENV_START("INFER_QUEUE_PORT", "004", WORKS, "as INTER_PROC_PORT"),
    ENV_OPTION("DISABLE_STREAMING", "004"),
    ENV_START("MAX_SEQ_LEN", "004", WORKS, "--max-model-len; without it 8192"),
    ENV_OPTION("MAX_DEC_LEN", "004"),
    ENV_START("BATCH_SIZE", "004", WORKS, "--max-num-seqs, here up to 4096; without it 50"),
    ENV_START("BLOCK_SIZE", "", WORKS, "--block-size"),
    ENV_WORKS("BLOCK_BS", "004",
              "so many sequences of MAX_SEQ_LEN are the KV cache's blocks "
              "(--num-gpu-blocks-override); without it what fits"),
    ENV_OPTION("BLOCK_RATIO", "004"),
    ENV_OPTION("ENC_DEC_BLOCK_NUM", ""),
    ENV_OPTION("MAX_PREFILL_BATCH", ""),
    ENV_WORKS("MAX_CACHED_TASK_NUM", "004",
              "so many requests wait beside those that run, and more are refused: that and "
              "--max-num-seqs is --max-concurrency; with start_server 128 without it"),
    ENV_OPTION("USE_WARMUP", "004"),
    ENV("USE_HF_TOKENIZER", "004", "the tokenizer is always the one that comes with the model"),
    ENV_WORKS("USE_CACHE_KV_INT8", "004", "1: --kv-cache-dtype int8"),
    ENV_WORKS("USE_CACHE_KV_INT4", "",
              "1 is refused: a KV cache of 4 bits is not built, one of 8 is"),
    ENV_START("OUTPUT_LOG_TO_CONSOLE", "004", WORKS,
              "1: the log's lines are in log/console.log as well (--log-to-console)"),
    ENV_OPTION("CHECK_HEALTH_INTERVAL", ""),
    ENV_START("DTYPE", "", WORKS, "bfloat16; another one is refused, as by --dtype"),
    ENV_WORKS("SPECULATE_METHOD", "",
              "mtp, inference_with_reference (ngram) or draft_model: with "
              "SPECULATE_MAX_DRAFT_TOKEN_NUM, SPECULATE_MAX_NGRAM_SIZE and SPECULATE_MODEL_PATH "
              "what --speculative-config says"),
    /* Further variables of the same systems, which no document shows. */
    ENV("VLLM_*", "", "a setting of vLLM that Baton does not read"),
    ENV("HCCL_*", "", NO_HCCL),
    ENV("FD_*", "", "a setting of FastDeploy that Baton does not read"),
    ENV("FLAGS_*", "", "a setting of Paddle that Baton does not read"),
    ENV("BKCL_*", "", "it configures Baidu's collective library, which Baton does not use"),

    /* ---- values, members and models ---- */
    VALUE("--scheduling-policy priority", "", WORKS,
          "priority, a whole number in a request's body, says which is next among those of one API "
          "key; lower is sooner. It holds whatever the policy, fcfs too"),
    VALUE("--quantization ascend", "002", REFUSED,
          "a format of Ascend NPUs; give a checkpoint in bf16 or a GGUF file"),
    VALUE("--quantization wint4", "003", WORKS,
          "a checkpoint is quantised while it is loaded, by FastDeploy's rules; with a GGUF file, "
          "whose weights are quantised, the option has no effect"),
    VALUE("--quantization wint8", "003", WORKS, "as wint4"),
    VALUE("--quantization block_wise_fp8", "003", WORKS, "as wint4"),
    VALUE("--cache-transfer-protocol rdma", "001", WORKS,
          "KV goes through RDMA queue pairs; with \"rdma,ipc\" shared memory is used inside a "
          "host, whatever the order"),
    VALUE("--additional-config enable_weight_nz_layout", "002", ACCEPTED,
          "it tunes Ascend kernels"),
    VALUE("--additional-config enable_prefill_optimizations", "002", ACCEPTED,
          "it tunes Ascend kernels"),
    VALUE("--kv-transfer-config kv_role", "002", WORKS,
          "kv_producer is --splitwise-role prefill, kv_consumer decode, kv_both mixed"),
    VALUE("--kv-transfer-config kv_connector", "002", ACCEPTED,
          "KV takes what --cache-transfer-protocol names; what LMCacheConnectorV1, "
          "MooncakeStoreConnector and OffloadingConnector keep is kept by --swap-space and "
          "--kv-cache-dir"),
    VALUE("--kv-transfer-config kv_buffer_device", "002", ACCEPTED,
          "KV is where --device computes"),
    VALUE("--kv-transfer-config kv_parallel_size", "002", ACCEPTED,
          "nodes find each other through the cluster view, however many there are"),
    VALUE("--kv-transfer-config kv_port", "002", ACCEPTED,
          "not read: --cache-queue-port fixes the port for KV, any free one otherwise"),
    VALUE("--kv-transfer-config engine_id", "002", ACCEPTED, "nodes name themselves"),
    VALUE("--kv-transfer-config kv_rank", "", ACCEPTED, "nodes name themselves"),
    VALUE("--kv-transfer-config kv_ip", "", ACCEPTED,
          "not read: --advertise-host is the address that peers are told"),
    VALUE("--kv-transfer-config kv_buffer_size", "", ACCEPTED,
          "KV goes from pool to pool, without a buffer of its own"),
    VALUE("--kv-transfer-config kv_connector_module_path", "", ACCEPTED,
          "no Python module is loaded"),
    VALUE("--kv-transfer-config kv_connector_extra_config", "", ACCEPTED,
          "its members tune vLLM's connector; --swap-space, --kv-cache-dir and --kv-cache-disk say "
          "how much KV is kept where"),
    VALUE("--kv-transfer-config kv_load_failure_policy", "", ACCEPTED,
          "what was lost is computed again"),
    VALUE("--kv-transfer-config enable_permute_local_kv", "", ACCEPTED,
          "peers with other layouts are told apart when they connect"),
    VALUE("--speculative-config deepseek_mtp", "002", WORKS,
          "the model's own draft layer drafts; answers are those without it"),
    VALUE("--speculative-config mtp", "003", WORKS,
          "the model's own draft layer drafts; answers are those without it"),
    VALUE("ERNIE-4_5-300B-A47B-FP8-Paddle", "000 001", REFUSED, FOREIGN_FASTDEPLOY),
    VALUE("baidu/ERNIE-4.5-21B-A3B-Paddle", "003", WORKS, PADDLE),
    VALUE("vllm-ascend/DeepSeek-R1-W8A8", "002", REFUSED, FOREIGN_ASCEND),
    VALUE("deepseek-ai/DeepSeek-R1-Distill-Llama-8B/weight_only_int8", "004", WORKS,
          STATIC(" (--quantization wint8)")),
    VALUE("deepseek-ai/DeepSeek-R1/weight_only_int4", "004", WORKS,
          STATIC(" (--quantization wint4), and leaves matrices that the checkpoint has in F8")),
    VALUE("deepseek-ai/DeepSeek-R1/a8w8_fp8_wint4", "004", WORKS,
          STATIC_F8 "; experts too, which take twice the memory of int4"),
    VALUE("deepseek-ai/DeepSeek-R1-2nodes/weight_only_int8", "004", WORKS,
          STATIC(" (--quantization wint8), and leaves matrices that the checkpoint has in F8")),
    VALUE("deepseek-ai/DeepSeek-R1-2nodes/a8w8_fp8", "004", WORKS, STATIC_F8),
    VALUE("deepseek-ai/DeepSeek-R1-MTP/a8w8_fp8_wint4", "004", WORKS,
          STATIC_F8 "; experts too, which take twice the memory of int4" STATIC_MTP),
    VALUE("deepseek-ai/DeepSeek-R1-MTP/weight_only_int4", "004", WORKS,
          STATIC(" (--quantization wint4), and leaves matrices that the checkpoint has in "
                 "F8") STATIC_MTP),
    VALUE("deepseek-ai/DeepSeek-R1-MTP-2nodes/a8w8_fp8", "004", WORKS, STATIC_F8 STATIC_MTP),
    VALUE("deepseek-ai/DeepSeek-R1-MTP-2nodes/weight_only_int8", "004", WORKS,
          STATIC(" (--quantization wint8), and leaves matrices that the checkpoint has in "
                 "F8") STATIC_MTP),
    { .name = NULL },
};
