/* option_table_cluster.c - options that say how nodes find each other and exchange KV. Thread: any
 * (a constant table). */
#include "deploy/options/option_entry.h"

const struct option CLUSTER_OPTIONS[] = {
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
        .service_env = "INTER_PROC_PORT INTER_QUEUE_PORT INFER_QUEUE_PORT",
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
        IN("Cluster", ENTRY),
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
        .env = "BATON_ADVERTISE_HOST",
        .type = OPT_STRING,
        IN("Cluster", "serve doctor router"),
        .help = "Address at which other nodes reach this one; default: the one that faces the "
                "scheduler, or where that is on this host, rank 0 (--data-parallel-address).",
    },
    {
        .name = "cluster-secret-file",
        .env = "BATON_CLUSTER_SECRET_FILE",
        .type = OPT_STRING,
        .group = "Cluster",
        .commands = ENTRY " bench role",
        .help = "File with the secret all nodes share (or BATON_CLUSTER_SECRET). Without one "
                "node-to-node ports stay on loopback; `launch` makes one for its nodes where it "
                "holds their cluster view (not in Redis, nor with --router).",
    },
    {
        .name = "router",
        .env = "BATON_ROUTER BATON_DIRECTORY",
        .type = OPT_STRING,
        IN("Cluster", ENTRY),
        .help = "host:port of the directory server: a router, a launcher or a node's control port.",
    },
    {
        .name = "local-data-parallel-id",
        .env = "BATON_RANK VLLM_DP_RANK_LOCAL",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("Cluster", "serve doctor"),
        .help = "Number of this node on its host: which entry of the port lists is its own (of "
                "--rdma-comm-ports each process of a node has one); default: "
                "--data-parallel-rank.",
    },

    /* ---- Parallelism ---- */
    {
        .name = "data-parallel-size",
        .aliases = "dp dp-size",
        .env = "BATON_DATA_PARALLEL_SIZE VLLM_DP_SIZE",
        .type = OPT_INT,
        RANGE(1, 65536),
        .def = "1",
        IN("Parallelism", NET),
        .help = "Ranks with attention and KV cache of their own, on all hosts. With "
                "--enable-expert-parallel serve starts them behind its port, launch with a port "
                "each.",
        .note = "without --enable-expert-parallel serve runs one rank; start more nodes with "
                "`baton launch` or more `baton serve`, the scheduler shares the requests among "
                "them",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "tensor-parallel-size",
        .aliases = "tp tp-size",
        .env = "BATON_TENSOR_PARALLEL_SIZE MP_NUM",
        .type = OPT_INT,
        RANGE(1, 16),
        .def = "1",
        IN("Parallelism", NET),
        .help = "Processes that share the attention of a node, each with a part of its heads: "
                "serve starts them behind its port, launch for each of its nodes. On GPUs up to "
                "8, of one host.",
    },
    {
        .name = "tensor-parallel-rank",
        .env = "BATON_TENSOR_PARALLEL_RANK",
        .type = OPT_INT,
        RANGE(0, 15),
        .def = "0",
        IN("Parallelism", "serve doctor"),
        .help = "Start only this process of a node, by its number: somebody else starts the "
                "others.",
        .works_with = "tensor-parallel-size",
        .note = "a node of one process (--tensor-parallel-size) has no others",
    },
    {
        .name = "tensor-parallel-address",
        .env = "BATON_TENSOR_PARALLEL_ADDRESS",
        .type = OPT_STRING,
        .def = "127.0.0.1",
        IN("Parallelism", "serve doctor"),
        .help = "Where the first process of a node listens for the others, which are on its host.",
        .works_with = "tensor-parallel-rank",
        .note = "it is for a process that is named by --tensor-parallel-rank",
    },
    {
        .name = "tensor-parallel-port",
        .env = "BATON_TENSOR_PARALLEL_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("Parallelism", "serve doctor"),
        .help = "The port there: the --pd-comm-port of the first process.",
        .works_with = "tensor-parallel-rank",
        .note = "it is for a process that is named by --tensor-parallel-rank",
    },
    {
        .name = "enable-expert-parallel",
        .aliases = "ep",
        .env = "BATON_ENABLE_EXPERT_PARALLEL",
        .type = OPT_BOOL,
        .def = "false",
        IN("Parallelism", NET),
        .help = "Share the experts of MoE layers among the ranks of --data-parallel-size; without "
                "it among the processes of a node (--tensor-parallel-size).",
        .note = "with one rank (--data-parallel-size) it has all experts",
        .works_with = "data-parallel-size",
    },
    {
        .name = "data-parallel-rank",
        .aliases = "dpn",
        .env = "BATON_DATA_PARALLEL_RANK VLLM_DP_RANK",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("Parallelism", "serve doctor"),
        .help = "Start only this rank, by its number, with a port of its own: somebody else starts "
                "the others.",
    },
    {
        .name = "data-parallel-size-local",
        .aliases = "dpl",
        .env = "BATON_DATA_PARALLEL_SIZE_LOCAL VLLM_DP_SIZE_LOCAL",
        .type = OPT_INT,
        RANGE(1, 65536),
        IN("Parallelism", NET),
        .help = "How many of the ranks this host has; they share its CPUs and the memory for "
                "KV. Default: all from --data-parallel-start-rank on.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "data-parallel-start-rank",
        .aliases = "dpr",
        .env = "BATON_DATA_PARALLEL_START_RANK",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("Parallelism", NET),
        .help = "The first rank of this host.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "headless",
        .type = OPT_BOOL,
        .def = "false",
        IN("Parallelism", "serve doctor"),
        .help = "Start this host's ranks without a port of the API: requests come from the host of "
                "rank 0.",
    },
    {
        .name = "data-parallel-address",
        .aliases = "dpa",
        .env = "BATON_DATA_PARALLEL_ADDRESS VLLM_DP_MASTER_IP POD_0_IP",
        .type = OPT_STRING,
        IN("Parallelism", NET),
        .help = "Where rank 0 listens for the other ranks: an address of its host. Default: the "
                "first of --ips, or 127.0.0.1.",
    },
    {
        .name = "data-parallel-rpc-port",
        .aliases = "dpp",
        .env = "BATON_DATA_PARALLEL_RPC_PORT VLLM_DP_MASTER_PORT",
        .type = OPT_INT,
        RANGE(1, 65534),
        .def = "29550",
        IN("Parallelism", NET),
        .help = "The port there: rank 0's --pd-comm-port. Where several hosts have no other "
                "directory, the next one is the control port of the first. Without an address any "
                "free one is taken.",
    },
    {
        .name = "ips",
        .env = "POD_IPS",
        .type = OPT_LIST,
        IN("Parallelism", NET),
        .help = "The addresses of all hosts, that of rank 0 first: each starts an equal part of "
                "the ranks. One address is --advertise-host.",
    },
    {
        .name = "nnodes",
        .env = "MP_NNODE",
        .type = OPT_INT,
        RANGE(1, 256),
        .def = "1",
        IN("Parallelism", NET),
        .help = "How many hosts have the ranks; as many as --ips lists.",
        .note = "it is about ranks that share experts (--enable-expert-parallel); other nodes of "
                "several hosts find each other by --scheduler-host or --router",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "num-redundant-experts",
        .aliases = "ep-num-redundant-experts",
        .env = "BATON_NUM_REDUNDANT_EXPERTS",
        .type = OPT_INT,
        RANGE(0, 1024),
        .def = "0",
        IN("Parallelism", NET),
        .help = "Copies of experts beyond one of each, spread over the ranks: they share the load "
                "of the busiest, and the loss of a rank reads fewer experts.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "enable-eplb",
        .env = "BATON_ENABLE_EPLB",
        .type = OPT_BOOL,
        .def = "false",
        IN("Parallelism", NET),
        .help = "Place experts anew, while requests run, when the rows of the ranks are uneven.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "eplb-config",
        .type = OPT_JSON,
        IN("Parallelism", NET),
        .help = "vLLM's JSON for --enable-eplb: step_interval (steps between two looks at the "
                "load, 3000), num_redundant_experts (as --num-redundant-experts), "
                "log_balancedness; window_size is the same as step_interval here.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "all2all-backend",
        .env = "BATON_ALL2ALL_BACKEND VLLM_ALL2ALL_BACKEND",
        .type = OPT_ENUM,
        .choices = "auto|shm|ucx|naive|allgather_reducescatter|pplx|deepep_high_throughput|"
                   "deepep_low_latency|flashinfer_all2allv",
        .def = "auto",
        IN("Parallelism", NET),
        .help =
            "How rows reach the experts of other ranks: shm, which needs all ranks on one host, "
            "or ucx. auto, and every other name of vLLM's: shm on one host, else ucx.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "ep-row-type",
        .env = "BATON_EP_ROW_TYPE",
        .type = OPT_ENUM,
        .choices = "f32|bf16|fp8",
        .def = "f32",
        IN("Parallelism", NET),
        .help = "As what rows travel to the experts of other ranks, alike on all. bf16 halves the "
                "bytes, fp8 (a scale per 128 elements) quarters those on the way there; answers "
                "then are the same for every number of ranks above one, and differ a little from "
                "those of one.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "memory-domain",
        .env = "BATON_MEMORY_DOMAIN",
        .type = OPT_STRING,
        IN("Parallelism", NET),
        .help = "Ranks read each other's rows where they are only inside one domain of one host. "
                "With different names here they send them as between hosts. A list is divided "
                "among all ranks: with a,b the first half is a.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },
    {
        .name = "node-rank",
        .type = OPT_INT,
        RANGE(0, 255),
        .def = "0",
        IN("Parallelism", NET),
        .help = "Which of the hosts this is, from 0. Default: the one whose address --ips has.",
        .note = "it is about ranks that share experts (--enable-expert-parallel)",
        .works_with = "enable-expert-parallel",
    },

    /* ---- Scheduler ---- */
    {
        .name = "scheduler-name",
        .env = "BATON_SCHEDULER_NAME",
        .type = OPT_ENUM,
        .choices = "local|splitwise|global|dp",
        .def = "local",
        IN("Scheduler", ENTRY),
        .help =
            "Where the cluster view lives: local in this process (dp is the same), splitwise and "
            "global in Redis. With global a node never splits a request: each goes whole to the "
            "node of the topic with the least to do, whatever its role.",
    },
    {
        .name = "scheduler-host",
        .env = "BATON_SCHEDULER_HOST",
        .type = OPT_STRING,
        .def = "127.0.0.1",
        IN("Scheduler", ENTRY),
        .help = "Redis host.",
    },
    {
        .name = "scheduler-port",
        .env = "BATON_SCHEDULER_PORT",
        .type = OPT_INT,
        RANGE(1, 65535),
        .def = "6379",
        IN("Scheduler", ENTRY),
        .help = "Redis port.",
    },
    {
        .name = "scheduler-db",
        .env = "BATON_SCHEDULER_DB",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("Scheduler", ENTRY),
        .help = "Redis database number.",
    },
    {
        .name = "scheduler-password",
        .env = "BATON_REDIS_PASSWORD REDIS_PASSWORD",
        .secret = true,
        .type = OPT_STRING,
        IN("Scheduler", ENTRY),
        .help = "Redis password; prefer the environment.",
    },
    {
        .name = "scheduler-username",
        .env = "BATON_REDIS_USERNAME",
        .type = OPT_STRING,
        IN("Scheduler", ENTRY),
        .help = "Redis user (ACL), with its --scheduler-password; default: Redis' default user.",
    },
    {
        .name = "scheduler-sentinels",
        .env = "BATON_SCHEDULER_SENTINELS",
        .type = OPT_LIST,
        IN("Scheduler", ENTRY),
        .help = "host:port of Redis' sentinels, up to 16: they name the master, in place of "
                "--scheduler-host, and after a failover the new one.",
    },
    {
        .name = "scheduler-master",
        .env = "BATON_SCHEDULER_MASTER",
        .type = OPT_STRING,
        .def = "mymaster",
        IN("Scheduler", ENTRY),
        .help = "The name under which the sentinels know the master.",
        .works_with = "scheduler-sentinels",
        .note = "sentinels know a master by its name, and --scheduler-sentinels gives none",
    },
    {
        .name = "scheduler-sentinel-password",
        .env = "BATON_SENTINEL_PASSWORD",
        .secret = true,
        .type = OPT_STRING,
        IN("Scheduler", ENTRY),
        .help = "The sentinels' own password, where they want one; Redis' is not sent to them.",
        .works_with = "scheduler-sentinels",
        .note = "it is for sentinels, and --scheduler-sentinels gives none",
    },
    {
        .name = "scheduler-sentinel-username",
        .env = "BATON_SENTINEL_USERNAME",
        .type = OPT_STRING,
        IN("Scheduler", ENTRY),
        .help = "The sentinels' user (ACL), with its --scheduler-sentinel-password.",
        .works_with = "scheduler-sentinels",
        .note = "it is for sentinels, and --scheduler-sentinels gives none",
    },
    {
        .name = "scheduler-tls",
        .env = "BATON_SCHEDULER_TLS",
        .type = OPT_BOOL,
        .def = "false",
        IN("Scheduler", ENTRY),
        .help = "Speak TLS (1.2 or newer) with Redis and its sentinels. Their certificates must be "
                "for the names or addresses under which they are called.",
    },
    {
        .name = "scheduler-tls-ca",
        .env = "BATON_SCHEDULER_TLS_CA",
        .type = OPT_STRING,
        IN("Scheduler", ENTRY),
        .help = "File (PEM) with the CAs that their certificates come from; default: those that "
                "this host trusts.",
        .works_with = "scheduler-tls",
        .note = "it is about TLS, which --scheduler-tls switches on",
    },
    {
        .name = "scheduler-tls-cert",
        .env = "BATON_SCHEDULER_TLS_CERT",
        .type = OPT_STRING,
        IN("Scheduler", ENTRY),
        .help = "File (PEM) with this node's own certificate, where Redis asks for one "
                "(tls-auth-clients).",
        .works_with = "scheduler-tls",
        .note = "it is about TLS, which --scheduler-tls switches on",
    },
    {
        .name = "scheduler-tls-key",
        .env = "BATON_SCHEDULER_TLS_KEY",
        .type = OPT_STRING,
        IN("Scheduler", ENTRY),
        .help = "File (PEM) with the key of --scheduler-tls-cert, without a pass phrase.",
        .works_with = "scheduler-tls",
        .note = "it is about TLS, which --scheduler-tls switches on",
    },
    {
        .name = "scheduler-topic",
        .env = "BATON_TOPIC",
        .type = OPT_STRING,
        .def = "default",
        IN("Scheduler", ENTRY),
        .help = "Nodes of one topic serve each other's requests.",
    },
    {
        .name = "scheduler-ttl",
        .aliases = "request-timeout-secs",
        .env = "BATON_TTL",
        .type = OPT_INT,
        RANGE(1, 604800),
        .def = "900",
        IN("Scheduler", ENTRY),
        .help = "Seconds after which a request is given up.",
    },
    {
        .name = "resume-window",
        .env = "BATON_RESUME_WINDOW",
        .type = OPT_FLOAT,
        RANGE(0, 3600),
        .def = "10",
        IN("Scheduler", NET),
        .help = "Seconds for which a decode node goes on with an answer whose entry node was lost, "
                "if its request asked for that (x-baton-resume); 0: never. docs/resume.md.",
    },
    {
        .name = "scheduler-max-size",
        .env = "BATON_SCHEDULER_MAX_SIZE",
        .type = OPT_INT,
        RANGE(-1, 1048576),
        .def = "-1",
        IN("Scheduler", ENTRY),
        .help = "Like --max-concurrency, FastDeploy's name; -1: not set.",
    },
    {
        .name = "placement-timeout",
        .env = "BATON_PLACEMENT_TIMEOUT",
        .type = OPT_FLOAT,
        RANGE(0, 3600),
        .def = "5",
        IN("Scheduler", ENTRY),
        .help =
            "Seconds a request waits for a node that could serve it to appear before it gets 503. "
            "When there are such nodes and all are full, --max-queue-time holds.",
    },
    {
        .name = "max-queue-time",
        .env = "BATON_MAX_QUEUE_TIME",
        .type = OPT_FLOAT,
        RANGE(0, 86400),
        .def = "30",
        .service_def = "300",
        IN("Scheduler", ENTRY),
        .help = "Seconds a request waits in line while every node that could serve it is full; one "
                "that is expected to wait longer, or has, gets 429 with Retry-After "
                "(docs/admission.md). 0: it is refused when all are full. One whose client has "
                "tokens already, and which lost its node, waits until --scheduler-ttl.",
    },
    { .name = NULL },
};
