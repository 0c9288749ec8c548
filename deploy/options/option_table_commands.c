/* option_table_commands.c - options that belong to one command: launch, generate, status, bench.
 * Thread: any (a constant table). */
#include "deploy/options/option_entry.h"

const struct option COMMAND_OPTIONS[] = {
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
            "free ports after the last that is given, or from 8000 on.",
    },
    {
        .name = "metrics-ports",
        .env = "BATON_METRICS_PORTS",
        .type = OPT_LIST,
        IN("Launch", "launch doctor"),
        .help = "Metrics ports in the same order.",
    },
    {
        .name = "grpc-ports",
        .env = "BATON_GRPC_PORTS",
        .type = OPT_LIST,
        IN("Launch", "launch doctor"),
        .help = "Ports of KServe's protocol over gRPC in the same order; a node without one has "
                "none.",
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
        .aliases = "temp",
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
        IN("Status", "status role"),
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
    { .name = NULL },
};
