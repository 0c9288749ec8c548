/* option_table_http.c - options of the API: its ports, keys and limits. Thread: any (a constant
 * table). */
#include "deploy/options/option_entry.h"

const struct option HTTP_OPTIONS[] = {
    {
        .name = "host",
        .env = "BATON_HOST",
        .type = OPT_STRING,
        .def = "0.0.0.0",
        IN("HTTP", ENTRY),
        .help = "Address the API listens on.",
    },
    {
        .name = "port",
        .env = "BATON_PORT SERVICE_HTTP_PORT PUSH_MODE_HTTP_PORT",
        .type = OPT_INT,
        RANGE(-1, 65535),
        .def = "8000",
        .service_def = "9965",
        IN("HTTP", "serve doctor"),
        .help = "Port of the API; 0: any free one. -1: no HTTP, clients have --grpc-port alone.",
    },
    {
        .name = "port",
        .env = "BATON_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "8000",
        IN("HTTP", "status role router"),
        .help = "Port of the API.",
    },
    {
        .name = "metrics-port",
        .env = "BATON_METRICS_PORT METRICS_HTTP_PORT",
        .service_env = "METRICS_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        .service_def = "8722",
        IN("HTTP", "serve doctor"),
        .help = "Extra port for /metrics and health; 0: only the API's own port has them. It also "
                "has PaddleNLP's gauges, inference_server_metrics.",
    },
    {
        .name = "metrics-port",
        .env = "BATON_METRICS_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("HTTP", "router"),
        .help = "Extra port for /metrics and health; 0: only the API's own port has them.",
    },
    {
        .name = "grpc-port",
        .env = "BATON_GRPC_PORT SERVICE_GRPC_PORT",
        .service_env = "GRPC_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        .service_def = "8811",
        IN("HTTP", "serve doctor"),
        .help = "Port of KServe's inference protocol over gRPC (docs/protocol.md); 0: none. The "
                "limits of --max-connections and the options that follow it count here as well, "
                "apart from those of --port.",
    },
    {
        .name = "grpc-port",
        .env = "BATON_GRPC_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("HTTP", "router"),
        .help = "Port of KServe's inference protocol over gRPC, as that of a node; 0: none.",
    },
    {
        .name = "health-port",
        .env = "BATON_HEALTH_PORT HEALTH_HTTP_PORT",
        .service_env = "HTTP_PORT",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        .service_def = "8110",
        IN("HTTP", "serve doctor"),
        .help = "Extra port with PaddleNLP's health paths alone, /v2/health/live and "
                "/v2/health/ready: 200, or 500 with error_code 1 (not ready), 2 (the engine is "
                "down) or 3 (it hangs). 0: none.",
    },
    {
        .name = "check-health-interval",
        .env = "BATON_CHECK_HEALTH_INTERVAL CHECK_HEALTH_INTERVAL",
        .type = OPT_INT,
        RANGE(1, 86400),
        .def = "10",
        IN("HTTP", "serve doctor"),
        .help = "Seconds without progress after which --health-port says that the engine hangs.",
        .works_with = "health-port",
        .note = "it is about --health-port, which is not open",
    },
    {
        .name = "api-key",
        .env = "BATON_API_KEY FD_API_KEY VLLM_API_KEY",
        .secret = true,
        .type = OPT_LIST,
        .group = "HTTP",
        .commands = ENTRY " status role",
        .help = "Keys that clients must present as bearer tokens; prefer the environment, command "
                "lines are visible to others.",
    },
    {
        .name = "api-keys-file",
        .env = "BATON_API_KEYS_FILE",
        .type = OPT_STRING,
        IN("HTTP", ENTRY),
        .help =
            "File of tenants: a line each with name, key (or its hash), and what the tenant may "
            "use (docs/admission.md). Keys of --api-key belong to the tenant \"default\".",
    },
    {
        .name = "allow-temperature-above-2",
        .env = "BATON_ALLOW_TEMPERATURE_ABOVE_2",
        .type = OPT_BOOL,
        IN("HTTP", TEXT),
        .help = "Take temperatures up to 100; without it those above 2 are refused, as in OpenAI's "
                "API.",
    },
    {
        .name = "max-dec-len",
        .env = "BATON_MAX_DEC_LEN MAX_DEC_LEN",
        .type = OPT_INT,
        RANGE(0, 1 << 30),
        .def = "0",
        .service_def = "1024",
        IN("HTTP", TEXT),
        .help = "Most tokens of one answer: a request that asks for more, by max_dec_len, "
                "max_tokens or min_dec_len, gets 400, one that names no number gets at most so "
                "many. 0: what the context has. Give all nodes and the router the same.",
    },
    {
        .name = "disable-streaming",
        .env = "BATON_DISABLE_STREAMING DISABLE_STREAMING",
        .type = OPT_BOOL,
        .def = "false",
        IN("HTTP", TEXT),
        .help = "Send the last item alone of each answer in the native form (docs/native.md), as "
                "return_all_tokens asks for one; it has all tokens. Streams of OpenAI's API stay.",
    },
    {
        .name = "max-connections",
        .env = "BATON_MAX_CONNECTIONS",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "10000",
        IN("HTTP", ENTRY),
        .help = "Connections that a port for clients has open at once; more get 503.",
    },
    {
        .name = "max-connections-per-client",
        .env = "BATON_MAX_CONNECTIONS_PER_CLIENT",
        .type = OPT_INT,
        RANGE(0, 1048576),
        .def = "0",
        IN("HTTP", ENTRY),
        .help = "Connections of one client address (of IPv6, one /64 network); more get 429. 0: no "
                "limit. Behind a proxy all clients have its address.",
    },
    {
        .name = "max-requests-per-client",
        .env = "BATON_MAX_REQUESTS_PER_CLIENT",
        .type = OPT_INT,
        RANGE(0, 1048576),
        .def = "0",
        IN("HTTP", ENTRY),
        .help = "Running requests of one client address; more get 429. 0: no limit.",
    },
    {
        .name = "large-body-memory",
        .env = "BATON_LARGE_BODY_MEMORY",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "96",
        IN("HTTP", ENTRY),
        .help =
            "MiB that request bodies of more than 64 KiB may take together until they are "
            "parsed; more wait, up to 30 s, then get 429. One body alone is always read. Smaller "
            "bodies together may take half of it besides.",
    },
    {
        .name = "answer-memory",
        .env = "BATON_ANSWER_MEMORY",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "256",
        IN("HTTP", ENTRY),
        .help = "MiB of answers that all clients together may leave unread. Then those that read "
                "nothing are cut, and large whole answers get 503. One answer alone is always "
                "sent.",
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
        .name = "drain-timeout",
        .aliases = "shutdown-timeout timeout-graceful-shutdown",
        .env = "BATON_DRAIN_TIMEOUT BATON_SHUTDOWN_TIMEOUT",
        .type = OPT_INT,
        RANGE(0, 86400),
        .def = "30",
        .service_def = "300",
        IN("HTTP", ENTRY),
        .help =
            "Seconds that running requests get after the first SIGTERM or SIGINT. The node takes "
            "requests meanwhile, for other nodes to compute. After half of them other nodes go "
            "on with what this one computes. What is left of its own clients at the end, or at "
            "a second signal, ends with an error. A node that still loads its model ends at "
            "once.",
    },
    { .name = NULL },
};
