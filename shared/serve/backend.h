/* backend.h - the interface between the API server and what computes tokens: the scheduler, or a
 * test double.
 *
 * When submit fails, no sink function is called. When it succeeds, on_end is called exactly once,
 * after the last on_token, also after cancel. Each token arrives once and in order, even when nodes
 * were lost meanwhile. Sink functions are never called from inside submit. Thread: loop. */
#ifndef BATON_SERVE_BACKEND_H
#define BATON_SERVE_BACKEND_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/hash/hash.h"
#include "shared/base/sampling.h"

/* What a client that may come back for its answer, or has come back, wants (resume.h). */
struct gen_resume {
    bool wanted;          /* else nothing below counts */
    struct hash128 key;   /* equal for the same sequence of the same request only */
    bool returns;         /* the client comes back and says what it has: */
    uint64_t node;        /* the node that computed it; 0: not known, any may have it */
    uint32_t n_delivered; /* tokens that the client has; they come all the same */
    uint64_t model_bits;  /* of those, as on_node told; 0: not known, or not all the same */
    bool asks_all;        /* it may have come before: any node may have the sequence */
};

enum { GEN_RETRY_MAX = 48 };

/* How a client says by when it wants the last token; it hears of it by that name. */
enum gen_deadline {
    GEN_DEADLINE_HEADER,   /* x-baton-deadline-ms */
    GEN_DEADLINE_GRPC,     /* grpc-timeout */
    GEN_DEADLINE_PARAMETER /* parameter timeout of a call of gRPC */
};

/* What decides when a request's turn is, and whether it gets one (docs/admission.md). */
struct gen_admission {
    uint32_t tenant;      /* index in tenants.h */
    int32_t priority;     /* lower is sooner, among the requests of one tenant */
    uint32_t ttft_ms;     /* it is useless without a first token by then; 0: any time will do */
    uint32_t deadline_ms; /* as its client gave it; 0: none. gen_request has when that is */
    enum gen_deadline deadline_by;
    uint32_t hedge_ms;    /* without a token so long after it was placed, it is tried on other nodes
                           * as well; 0: never */
    bool follows;         /* not the first sequence of its API request; the first has in ... */
    uint64_t all_prompts; /* ... this the tokens of the prompts of all of them */
    bool is_retry;        /* its client's library says that it sends it again */
    char retry[GEN_RETRY_MAX]; /* gen_refusal.retry of an earlier refusal; "": none */
};

/* Why submit fails. */
struct gen_refusal {
    struct err err;
    uint32_t retry_after_s; /* for busy and unavailable; 0: none */
    char
        retry[GEN_RETRY_MAX]; /* sent again with this, a request has a place then; "": it has not */
    bool takes_others; /* it is of this request alone: a limit of its tenant, a time it wants */
};

/* What a tenant may use in a minute, and what is left of it. */
struct gen_limits {
    uint64_t requests, tokens; /* 0: no limit */
    uint64_t requests_left, tokens_left;
    uint32_t requests_reset_s, tokens_reset_s; /* until nothing of it is used */
};

/* One sequence. submit copies everything. */
struct gen_request {
    const char *name; /* x-request-id, for logs and traces */
    const int32_t *tokens;
    uint32_t n_tokens; /* 1 .. max_model_len */
    struct sampling_params sampling;
    uint64_t cache_salt;
    bool prompt_logprobs;
    uint64_t deadline_ms; /* clock_ms; 0: none */
    struct gen_resume resume;
    struct gen_admission admission;
};

/* Which of two attempts at a request that ran at once went on. */
enum gen_hedged { GEN_NOT_HEDGED, GEN_HEDGED_FIRST, GEN_HEDGED_SECOND };

/* Where the cached prompt tokens came from, if not all were in the KV pool of the node that
 * computed it. */
struct gen_cache_use {
    uint32_t n_host, n_disk, n_peer; /* tokens */
    uint64_t load_ns;                /* that the prompt waited for them */
    uint32_t load_us, compute_us;    /* expected of bringing, of computing them; 0: unknown */
};

/* Where the time of a request went. Nanoseconds, each measured within one process. */
struct gen_trace {
    char prefill_node[64], decode_node[64]; /* names; equal when one node did both */
    char transport[16];                     /* "": nothing was transferred */
    uint64_t place_ns;                      /* accepted to placed and credited */
    uint64_t queue_ns;                      /* waiting in the prefill (or only) node's engine */
    uint64_t prefill_ns;
    uint64_t first_token_ns; /* accepted to first token */
    uint64_t decode_ns;      /* first to last token */
    uint64_t total_ns;
    uint64_t kv_bytes, kv_ns, kv_tail_ns;
    /* Part of kv_ns in which bytes were in flight; the other part waits for layers to be computed.
     * 0: not known. */
    uint64_t kv_busy_ns;
    uint64_t
        kv_link_speed; /* bytes per second of the link(s), as the hardware says; 0: not known */
    uint32_t n_cached; /* prompt tokens not computed (caches of the computing node) */
    struct gen_cache_use cache;
    uint32_t n_decode_cached; /* prompt tokens cached on the decode node: not transferred */
    uint32_t n_expected, n_decode_expected; /* what was expected of these two when it was placed */
    char kept_node[64];                     /* should have had more of it; "": none was known */
    uint32_t n_kept;                        /* so many prompt tokens */
    uint32_t n_recomputed;                  /* transferred prompt positions computed again */
    uint32_t n_moves;                       /* attempts after the first */
    /* Speculative decoding, on the node that ended it: times that drafts were verified, these
     * drafts, and those that were right. */
    uint32_t n_verified, n_drafted, n_accepted;
    enum gen_hedged hedged;
};

/* Returns the bytes per second of the KV transfer, to compare with kv_link_speed; 0: none. */
static inline double gen_trace_kv_rate(const struct gen_trace *t)
{
    uint64_t ns = t->kv_busy_ns ? t->kv_busy_ns : t->kv_ns;
    return ns ? (double)t->kv_bytes * 1e9 / (double)ns : 0;
}

struct gen_end {
    enum status status;        /* OK, or why it failed */
    enum finish_reason finish; /* with OK */
    int32_t stop_token;        /* the id that ended it with FINISH_STOP; else -1 */
    uint32_t n_output;         /* tokens delivered */
    uint32_t retry_after_s;    /* as in gen_refusal, likewise retry and takes_others */
    char retry[GEN_RETRY_MAX];
    bool takes_others;
    struct gen_trace trace;
    char text[ERR_TEXT_MAX]; /* of a failure: a sentence for the client */
};

struct gen_sink {
    /* index counts output tokens from 0. */
    void (*on_token)(void *arg, uint32_t index, const struct token_logprobs *t);
    /* position 1 .. n_tokens-1 in order, before the first token; only with prompt_logprobs. */
    void (*on_prompt_logprob)(void *arg, uint32_t position, const struct token_logprobs *t);
    void (*on_end)(void *arg, const struct gen_end *end);
    /* The tokens that follow come from this node, where the sequence may be found again; 0: from
     * one that keeps nothing. model_bits: equal for all nodes that compute the same tokens, but for
     * GPUs that do not repeat them. May be NULL. */
    void (*on_node)(void *arg, uint64_t node, uint64_t model_bits);
    void *arg;
};

struct serve_backend_stats {
    uint32_t n_running, n_waiting; /* requests of this entry node */
    bool ready;                    /* a request would be accepted now */
    char why[ERR_TEXT_MAX];        /* when not ready: which topics and roles exist */
};

struct serve_backend {
    enum status (*submit)(void *self, const struct gen_request *r, const struct gen_sink *sink,
                          uint64_t *id, struct gen_refusal *why);
    /* Stops the work on every node; on_end(ERR_CANCELED) follows. Unknown ids are ignored. */
    void (*cancel)(void *self, uint64_t id);
    void (*stats)(void *self, struct serve_backend_stats *out);
    /* Would submit refuse a request that another node may take: as one too many if n_more were
     * submitted before it, or since this node is shutting down? NULL: never. */
    bool (*is_full)(void *self, uint32_t n_more);
    /* Appends the JSON array of the nodes that this entry node sees, for /cluster and `baton
     * status`. */
    void (*nodes)(void *self, struct buf *out);
    /* What is left of a tenant's limits. NULL: there are none. */
    void (*limits)(void *self, uint32_t tenant, struct gen_limits *out);
    void *self;
};

#endif
