/* serve.h - the API server of a node: OpenAI-compatible requests, over HTTP or offline.
 *
 * One code path serves both: a request is a path and a JSON body; its answer goes to a `struct
 * serve_reply`, which HTTP (routes.c) and the offline batch runner (deploy/generate) implement.
 * This layer validates, renders the chat template, tokenises, detokenizes, and handles stop
 * strings, logprobs, usage and SSE chunks; the backend computes tokens. Life cycle: create when the
 * tokenizer is loaded, serve_http per exchange, free after the HTTP server has stopped and the
 * backend has ended every request. Thread: loop (rendering and tokenising run on the loop's worker
 * threads). */
#ifndef BATON_SERVE_SERVE_H
#define BATON_SERVE_SERVE_H

#include "shared/base/metrics.h"
#include "shared/net/http/http_server.h"
#include "shared/serve/backend.h"
#include "shared/serve/tenants.h"
#include "shared/text/chat.h"
#include "shared/text/output/reasoning.h"
#include "shared/text/output/tool_parser.h"
#include "shared/text/tokenizer/tokenizer.h"

/* The path of serve_submit for requests in FastDeploy's native form that come by another protocol
 * than HTTP; over HTTP it does not exist. The body is one request object. The answer is always a
 * stream: each chunk is one native item without error_msg and error_code, which clients of that
 * protocol take for an error; there is no "[DONE]". A request that fails before its first item
 * gets one reply, the object of the error, with the status that HTTP would have; one that fails
 * later has that object as its last chunk. */
#define SERVE_NATIVE_PATH "/native"

struct serve;

enum { SERVE_NAMES_MAX = 16 };

/* Request defaults from the model's generation_config.json; NaN or -1: not given. */
struct serve_defaults {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
};

/* A request that another node may answer. */
struct serve_pass {
    struct http_exchange *x;
    const char *path; /* copied, as is the name */
    const char *name; /* its x-request-id, or the one made for it (serve_state.h) */
    /* taken: the exchange has an answer of this status, else none. */
    void (*done)(void *arg, bool taken, int status);
    void *arg;
};

/* Passes requests to another node when the backend is full. */
struct serve_passer {
    /* Returns NULL when no other node could take it; else `done` is called once, not from inside
     * start. */
    void *(*start)(void *self, const struct serve_pass *r);
    /* The client left: done is not called. */
    void (*cancel)(void *self, void *pass);
    void *self;
};

struct serve_options {
    struct loop *loop;
    struct serve_backend backend;
    struct serve_passer passer;        /* { 0 }: none */
    const struct tokenizer *tokenizer; /* borrowed until serve_free */
    const struct chat *chat;           /* NULL: no chat template, chat requests get 400 */
    const struct reasoning_format
        *reasoning;                  /* of the model; NULL: answers are not parsed for it */
    const struct tool_format *tools; /* of the model; NULL: requests with tools get 400 */
    struct metrics *metrics;
    const char *names[SERVE_NAMES_MAX]; /* served model names; answers have the first */
    size_t n_names;
    uint32_t max_model_len;
    uint32_t n_vocab; /* ids are 0 to n_vocab - 1 */
    struct serve_defaults defaults;
    uint32_t max_dec_len;          /* most tokens of one answer; 0: as many as the context has */
    bool any_temperature;          /* up to 100; else up to 2, as in OpenAI's API */
    bool last_item_alone;          /* of the native form: what came before is in it as well */
    const struct tenants *tenants; /* borrowed; NULL: one without a key, to whom all is open */
    uint32_t max_n;                /* most answers per prompt; 128 when 0 */
    uint32_t max_prompts;          /* most prompts in one completions request; 2,048 when 0 */
    size_t max_answer;             /* bytes of a whole answer, estimated; 64 MiB when 0 */
    uint32_t max_logprobs;         /* 20 when 0; not above SAMPLER_LOGPROBS_MAX */
    const char *version;
    /* Appends members to GET /version, and with `cluster` to GET /cluster and /cluster/self, which
     * need a key when keys are set; may be NULL. */
    void (*describe)(void *arg, bool cluster, struct buf *json_members);
    void *describe_arg;
};

enum status serve_create(const struct serve_options *o, struct serve **out,
                         struct err *err) MUST_CHECK;
/* Ends all requests with an error, in their streams or as 503, and refuses later ones the same way;
 * answers that are complete are still sent. For a node that stops with work left. */
void serve_shut_down(struct serve *s);
void serve_free(struct serve *s);

/* Handles one exchange: routes, API keys, methods and content types. */
void serve_http(struct serve *s, struct http_exchange *x);
/* As serve_http, for an operator's port: only /metrics, /health, /live, /ready (and aliases) and
 * /version. */
void serve_http_admin(struct serve *s, struct http_exchange *x);

/* Returns the path of a request that generates, as the table of paths has it, for another node;
 * NULL for any other path. */
const char *serve_generating_path(struct str path);

/* Takes an answer: either reply once, or begin, any number of chunk, end. */
struct serve_reply {
    void (*reply)(void *arg, int status, const char *headers, struct str body);
    void (*begin)(void *arg, const char *headers); /* streamed answer, 200 */
    /* One event's JSON (or "[DONE]"); id: what it is resumed by, n 0: none. Not OK: stop
     * producing. */
    enum status (*chunk)(void *arg, struct str id, struct str json);
    void (*end)(void *arg);
    void *arg;
};

/* One API request that did not come over HTTP. */
struct serve_call {
    const char *path; /* "/v1/chat/completions", "/v1/completions" or SERVE_NATIVE_PATH */
    struct str body;
    /* Instead of body, NULL: that. Moved into the request, with what it counts for. */
    struct http_taken_body *taken;
    const char *request_id; /* its x-request-id; NULL, or not good for one: none */
    uint32_t tenant;        /* index in serve_options.tenants: whose limits count */
    uint32_t deadline_ms;   /* from now; it then ends with 504. 0: none */
    enum gen_deadline deadline_by;
    struct serve_reply reply;
};

/* Runs it; copies everything else. Returns a handle for serve_cancel, valid until reply or end was
 * called; 0: it was answered at once. */
uint64_t serve_submit(struct serve *s, const struct serve_call *call);
/* The receiver is gone: stops the work; no reply function is called afterwards. */
void serve_cancel(struct serve *s, uint64_t id);

/* Writes an error body in OpenAI's format: {"error":{"message","type","param","code"}}. */
void serve_error_json(struct buf *out, enum status st, const char *message, const char *param);
/* Is this, as far as the beginning of its body tells, a request in FastDeploy's native form? */
bool serve_seems_native(struct str path, struct str body);
/* Writes an error body in that form: {"req_id","error_msg","error_code","version","timestamp"}. The
 * req_id is that of `body`, where it can be found without parsing it, else `name`. */
void serve_native_error_json(struct buf *out, enum status st, const char *message, struct str body,
                             const char *name);

#endif
