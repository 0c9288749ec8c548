/* completion_request.h - one API request.
 *
 *     PREPARING ───────▶ RUNNING ──▶ WRITING ──▶ ENDED   (an error, or a client that leaves, leads
 *     worker: parse,     loop        worker: format       from any state to ENDED)
 *     render, tokenise               a long whole answer
 *
 * PREPARING: a large body first waits until fewer than PREPARE_LOW_MAX others are being read.
 * RUNNING: at most COMPLETION_WINDOW sequences (choice.h) are in the backend at once; their tokens
 * become chunks, or are kept for the whole answer. ENDED: the request is freed when the backend has
 * ended its last sequence and no worker has it. Invariants: 1. Exactly one reply, or begin ... end,
 * unless the receiver left. 2. No reply function is called after ENDED. Thread: loop; while a
 * worker has it (`on_worker`), the loop writes only `stage`. */
#ifndef BATON_SERVE_COMPLETION_REQUEST_H
#define BATON_SERVE_COMPLETION_REQUEST_H

#include "shared/base/json/json_packed.h"
#include "shared/base/list.h"
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
    int32_t *tokens; /* mem_free; NULL once nobody needs them any more (drop_tokens) */
    size_t n_tokens;
    struct hash128 hash; /* of the tokens */
    struct buf text;     /* with echo: the client's text, or the decoded ids */
    uint32_t n_chars;    /* of text */
};

struct completion_request {
    struct serve *serve;
    uint64_t id;
    const struct endpoint *endpoint; /* of its path, until a worker has read its body */
    const struct endpoint *speaks;   /* as far as the loop knows: writes its errors */
    bool is_read;                    /* its body is an object: `endpoint` is its own */
    bool generates;                  /* its path does */
    struct serve_reply reply;
    enum completion_stage stage;
    bool on_worker;
    bool is_low;           /* its body is large and read at low priority */
    bool waits_for_worker; /* in serve's low_waiting */
    struct list low_link;
    bool stream_begun; /* the head of a streamed answer was sent */
    bool trace;
    struct gen_admission admission; /* by its key and its headers */
    uint64_t deadline_ms;           /* clock_ms; 0: none */
    char name[REQUEST_NAME_MAX + 1], fallback_name[REQUEST_NAME_MAX + 1];
    bool name_is_given;            /* by the client */
    struct str req_id;             /* of the native form, in the arena; empty: its name */
    bool holds_req_id;             /* in serve's native_ids */
    struct native_request *native; /* in the arena; NULL: OpenAI's. Set by the worker */
    uint64_t t_start_ns;           /* clock_ns; when it came */
    uint64_t t_heard_ms;           /* clock_ms; when the last token came */
    struct loop_timer *silence;    /* ends it when none comes (native.h) */
    int64_t created;
    struct resume_headers *resume; /* in the arena; NULL: the client never comes back */
    uint64_t resume_digest;
    bool usage_sent; /* in a stream: its event was sent, here or before */
    bool is_left;    /* this node ends: another one may go on with what the backend computes */
    struct http_taken_body body; /* until it is parsed */
    struct json_packed packed;   /* token ids of the body, until it is prepared */
    struct arena arena;
    struct openai_params p;
    cJSON *tools;                      /* of the request, when the model may call them */
    struct buf tool_call_prefix;       /* the beginning of a tool call that ends the prompt */
    enum reasoning_state reasoning;    /* in which the answers begin */
    struct completion_prompt *prompts; /* [n_prompts] in the arena */
    uint32_t n_prompts;
    struct choice *choices; /* [n_choices] in the arena; choice i answers prompt i / n */
    uint32_t n_choices, n_submitted, n_live, n_done;
    uint32_t n_admitted; /* choices that the backend has taken */
    uint32_t n_again;    /* choices that must be submitted again */
    struct loop_timer *retry;
    uint64_t retry_due_ms;  /* clock_ms; of retry */
    uint64_t t_progress_ms; /* when a sequence was last submitted or ended */
    struct buf head;        /* the beginning of every answer or chunk */
    struct buf out;         /* text being written */
    size_t n_answer;        /* bytes of the whole answer so far, estimated (openai_size.c) */
    bool counted;           /* in serve.n_answers */
    enum status st;         /* of preparing */
    struct err err;
    bool has_bad_header; /* err has what is wrong with it */
};

struct completion_options {
    const struct endpoint *endpoint;     /* NULL: unknown path */
    const char *path;                    /* for the error, where endpoint is NULL */
    struct http_taken_body body;         /* moved into the request */
    const char *name;                    /* x-request-id, or NULL */
    const char *fallback_name;           /* used without x-request-id and request_id; or NULL */
    bool trace;                          /* as member return_trace */
    const struct err *bad_header;        /* it fails with this, in its own form; NULL: none */
    uint64_t t_start_ns;                 /* clock_ns; when it came; 0: now */
    const struct resume_headers *resume; /* copied; NULL: none */
    struct gen_admission admission;
    uint64_t deadline_ms; /* clock_ms; 0: none */
    struct serve_reply reply;
};

/* As serve_submit. */
uint64_t completion_start(struct serve *s, const struct completion_options *o);
/* As serve_cancel; frees the request when the backend and the workers are done with it. */
void completion_cancel(struct completion_request *c);

/* Is the answer to this request, which streams, lines of JSON? False: of events. */
bool completion_has_lines(const struct serve *s, uint64_t id);
/* Ends it with an error; it may be freed. Not while a worker has it. */
void completion_fail(struct completion_request *c, enum status st, const char *text,
                     const char *param);
/* Ends it with an error, unless it has ended or its answer is being written. */
void completion_shut_down(struct completion_request *c);

/* Writes the headers that every answer has, each with its line's end. */
void completion_add_headers(const struct completion_request *c, struct buf *out);
/* For choice.c: the backend has ended a sequence. */
void completion_on_choice_end(struct completion_request *c, struct choice *ch);
/* For choice.c: adds n bytes to the whole answer; ends the request when it becomes too long. */
void completion_add_bytes(struct completion_request *c, size_t n);
/* For response_stream.c: the receiver does not take chunks any more. */
void completion_abandon(struct completion_request *c);

#endif
