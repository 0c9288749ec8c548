/* backend.h - what the HTTP face needs from whoever computes: one ops table. Rows: the scheduler, a
 * test double.
 *
 * submit either fails (and no sink function is ever called) or succeeds, and then on_end is called
 * exactly once, after every on_token, also after cancel. Tokens arrive in order, each once,
 * whatever happened to the nodes behind. Thread: loop. Sink functions are called on the loop, never
 * from inside submit. */
#ifndef BATON_SERVE_BACKEND_H
#define BATON_SERVE_BACKEND_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/sampling.h"

/* One sequence. Everything is copied by submit. */
struct gen_request {
    const char *name; /* x-request-id, for logs and traces */
    const int32_t *tokens;
    uint32_t n_tokens; /* 1 .. max_model_len */
    struct sampling_params sampling;
    uint64_t cache_salt;
    bool prompt_logprobs;
    uint64_t deadline_ms; /* clock_ms; 0: none */
};

/* Where the time of a request went. Nanoseconds, each measured within one process. */
struct gen_trace {
    char prefill_node[64], decode_node[64]; /* names; equal when one node did both */
    char transport[16];                     /* "" when nothing was transferred */
    uint64_t place_ns;                      /* accepted to placed and credited */
    uint64_t queue_ns;                      /* waiting in the prefill (or only) node's engine */
    uint64_t prefill_ns;
    uint64_t first_token_ns; /* accepted to first token */
    uint64_t decode_ns;      /* first to last token */
    uint64_t total_ns;
    uint64_t kv_bytes, kv_ns, kv_tail_ns;
    uint64_t kv_busy_ns;    /* of kv_ns, while bytes were under way; kv_ns also has the waiting for
                             * compute, layer by layer. 0: not known */
    uint64_t kv_link_speed; /* bytes per second of the link(s) that carried it, as their hardware
                             * says; 0: not known */
    uint32_t n_cached;      /* prompt tokens not computed (prefix cache of the computing node) */
    uint32_t n_decode_cached; /* prompt tokens the decode node had already: not transferred */
    uint32_t n_recomputed;    /* transferred prompt positions computed again */
    uint32_t n_moves;         /* attempts after the first */
};

/* Bytes per second of the KV transfer, to be held against kv_link_speed; 0: nothing was moved. */
static inline double gen_trace_kv_rate(const struct gen_trace *t)
{
    uint64_t ns = t->kv_busy_ns ? t->kv_busy_ns : t->kv_ns;
    return ns ? (double)t->kv_bytes * 1e9 / (double)ns : 0;
}

struct gen_end {
    enum status status;        /* OK, or why it failed */
    enum finish_reason finish; /* with OK */
    int32_t stop_token;        /* FINISH_STOP by an id: which; -1 otherwise */
    uint32_t n_output;         /* tokens delivered */
    uint32_t retry_after_s;    /* for busy and unavailable; 0: say nothing */
    struct gen_trace trace;
    char text[ERR_TEXT_MAX]; /* sentence of a failure */
};

struct gen_sink {
    /* index counts output tokens from 0. */
    void (*on_token)(void *arg, uint32_t index, const struct token_logprobs *t);
    /* position 1 .. n_tokens-1 in order, before the first token; only when asked for. */
    void (*on_prompt_logprob)(void *arg, uint32_t position, const struct token_logprobs *t);
    void (*on_end)(void *arg, const struct gen_end *end);
    void *arg;
};

struct serve_backend_stats {
    uint32_t n_running, n_waiting; /* requests of this entry */
    bool ready;                    /* a request would be taken now */
    char why[ERR_TEXT_MAX];        /* when not: which topics and roles exist, what is
                                    * missing */
};

struct serve_backend {
    enum status (*submit)(void *self, const struct gen_request *r, const struct gen_sink *sink,
                          uint64_t *id, struct err *err);
    /* Stop the work on every node; on_end(ERR_CANCELED) follows. Unknown ids are ignored. */
    void (*cancel)(void *self, uint64_t id);
    void (*stats)(void *self, struct serve_backend_stats *out);
    /* JSON of the nodes this entry sees, appended (for /cluster and `baton status`). */
    void (*nodes)(void *self, struct buf *out);
    void *self;
};

#endif
