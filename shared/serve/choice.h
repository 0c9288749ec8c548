/* choice.h - one sequence of a completion request: turns the backend's tokens into the answer.
 *
 * The detokenizer emits whole UTF-8 characters and holds back text that may begin a stop string. A
 * token that may be the end token (a stop id, or a special token that would be shown) is held until
 * the next event tells whether it was, since an end token's text is not part of the answer. A
 * matched stop string, or one tool call too many, ends the choice here: the backend is cancelled,
 * and its end awaited for the trace. Thread: loop. */
#ifndef BATON_SERVE_CHOICE_H
#define BATON_SERVE_CHOICE_H

#include "shared/serve/backend.h"
#include "shared/serve/resume.h"
#include "shared/text/output/detokenizer.h"

struct completion_request;
struct output_parser;
struct completion_prompt;

struct choice {
    struct completion_request *request;
    struct completion_prompt *prompt;
    uint32_t index;  /* in the answer */
    uint32_t sample; /* among the choices of its prompt, 0 .. n-1 */
    uint64_t backend_id;
    bool live;    /* the backend has it */
    bool follows; /* submitted when others of its request had been taken */
    bool again;   /* to be submitted again */
    bool detokenizer_ready;
    struct detokenizer detok;
    size_t n_stops;               /* stop strings, matched only after more than min_tokens tokens */
    int32_t maybe_end_token;      /* its text waits until it is known not to end; -1: none */
    int32_t stop_index;           /* of the matched stop string, -1: none */
    uint32_t n_tokens;            /* received and counted */
    uint32_t n_chars;             /* of all tokens so far: the next token's text_offset */
    bool sent;                    /* a chunk of it was sent */
    struct output_parser *parser; /* NULL: all text is content */
    bool tool_calls_done;         /* ended here: no more tool calls are wanted */
    struct buf text;              /* streamed: of the chunk being made; else, or where the endpoint
                                   * keeps all, all of it */
    struct buf ids;               /* int32: likewise */
    size_t n_text_sent, n_ids_sent; /* bytes of them, where all is kept */
    struct buf logprobs;            /* records (openai_logprobs.c): likewise */
    struct buf prompt_logprobs;     /* records of positions 1 .. */
    struct gen_end end;
    bool may_be_last;               /* nothing may follow the last token */
    uint32_t max_tokens;            /* once it is submitted */
    struct hash128 digest;          /* resume_digest */
    struct resume_choice had;       /* what its client has of it from before; else { 0 } */
    struct resume_choice delivered; /* what it has now, from before or by the events sent here */
    uint64_t model_bits;            /* of its tokens (gen_sink.on_node); 0: not known, or several */
};

void choice_init(struct choice *ch, struct completion_request *c, uint32_t index);
/* Submits the sequence to the backend. */
enum status choice_submit(struct choice *ch, struct gen_refusal *why) MUST_CHECK;
/* Cancels it in the backend; on_end still comes. */
void choice_cancel(struct choice *ch);
void choice_release(struct choice *ch);
/* Returns whether it was ended here, and cancelled in the backend. */
bool choice_ended_locally(const struct choice *ch);
/* Its sampling parameters: those of the request with its own seed, within the context. */
struct sampling_params choice_sampling(const struct choice *ch);
bool choice_wants_prompt_logprobs(const struct choice *ch);
/* Does its client have the event of what came since the last one, from before? */
bool choice_was_delivered(const struct choice *ch, bool finish);
/* Its parts of the usage. One that goes on does not count less than its client knows of. */
uint32_t choice_n_tokens(const struct choice *ch);
uint32_t choice_n_reasoning(const struct choice *ch);
uint32_t choice_n_cached(const struct choice *ch);
/* "stop", "length" or "tool_calls". */
const char *choice_finish_reason(const struct choice *ch);

#endif
