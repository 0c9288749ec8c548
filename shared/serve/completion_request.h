/* completion_request.h - one API request in work.
 *
 *     PREPARING ──▶ RUNNING ──▶ WRITING ──▶ ENDED          (an error or a client that leaves: from any state to ENDED)
 *     worker:       loop        worker
 *     parse, template,          the whole answer as text, when it is long
 *     tokens
 *
 * PREPARING: completion_prepare on a worker thread owns the call. RUNNING: its sequences (choice.h)
 * are given to the backend, at most COMPLETION_WINDOW at once; tokens become chunks, or wait for
 * the end. ENDED: answered, or nobody wants the answer; the call is freed when the backend has
 * ended its last sequence and no worker has it. Invariants: 1. Exactly one reply, or begin ... end,
 * unless the receiver left. 2. No reply function is called after ENDED. Thread: loop; during
 * PREPARING and WRITING the worker's, and the loop touches only `canceled`. */
#ifndef BATON_SERVE_COMPLETION_REQUEST_H
#define BATON_SERVE_COMPLETION_REQUEST_H

#include "shared/serve/choice.h"
#include "shared/serve/openai/openai.h"
#include "shared/serve/openai/openai_params.h"

enum { COMPLETION_WINDOW = 128, COMPLETION_RETRY_MS = 100, COMPLETION_RETRY_MAX_MS = 30 * 1000 };

enum completion_stage {
    COMPLETION_PREPARING,
    COMPLETION_RUNNING,
    COMPLETION_WRITING,
    COMPLETION_ENDED
};

struct completion_prompt {
    int32_t *tokens; /* mem_free */
    size_t n_tokens;
    struct buf text;  /* with echo: as the client gave it, or decoded */
    uint32_t n_chars; /* of text */
};

struct completion_request {
    struct serve *serve;
    uint64_t id;
    const struct openai_endpoint *endpoint;
    struct serve_reply reply;
    enum completion_stage stage;
    bool canceled; /* the receiver left */
    bool on_worker;
    bool stream_begun; /* the streamed answer */
    bool trace;
    char name[REQUEST_NAME_MAX + 1], fallback_name[REQUEST_NAME_MAX + 1];
    int64_t created;
    struct buf body; /* copy of the request until it is prepared */
    struct arena arena;
    struct openai_params p;
    cJSON *tools;                      /* of the request, when the model may call them */
    struct buf tool_call_prefix;       /* what of a call the prompt holds already */
    enum reasoning_state reasoning;    /* where the answers begin */
    struct completion_prompt *prompts; /* [n_prompts] in the arena */
    uint32_t n_prompts;
    struct choice *choices; /* [n_choices] in the arena; choice i answers prompt i /
                             * n */
    uint32_t n_choices, n_submitted, n_live, n_done;
    struct loop_timer *retry;
    uint64_t t_progress_ms; /* last time a sequence was taken or ended */
    struct buf head;        /* what every answer or chunk begins with */
    struct buf out;         /* text being written */
    enum status st;         /* of the worker's part */
    struct err err;
};

struct completion_options {
    const struct openai_endpoint *endpoint; /* NULL: unknown path */
    struct str body;                        /* copied */
    const char *name;                       /* x-request-id, or NULL */
    const char *fallback_name;              /* when neither that nor member request_id names it;
                                             * may be NULL */
    bool trace;                             /* as member return_trace */
    struct serve_reply reply;
};

/* As serve_submit. */
uint64_t completion_start(struct serve *s, const struct completion_options *o);
/* As serve_cancel; frees the call when nothing holds it. */
void completion_cancel(struct completion_request *c);

/* From choice.c: a sequence was ended by the backend. */
void completion_on_choice_end(struct completion_request *c, struct choice *ch);
/* The receiver does not take chunks any more. */
void completion_abandon(struct completion_request *c);

#endif
