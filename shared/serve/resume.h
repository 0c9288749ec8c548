/* resume.h - what a client needs to go on with an answer after its connection, or its entry node,
 * was lost: the handle.
 *
 * With `x-baton-resume: 1` each event of a stream has an id, the handle of what was delivered so
 * far. The same request with it as Last-Event-ID, at any node of the topic, gets the events that
 * follow. docs/resume.md says what is promised.
 *
 *     handle = "1;" NAME ";" CREATED ";" DIGEST ";" choice { "," choice } [ ";m" MODEL ] [ ";u" ]
 *     choice = TOKENS "@" ( NODE | "-" )              not finished; the node that computes it
 *            | TOKENS "f" REASONING "." CACHED        its last event was sent; parts of usage
 *
 * NAME: the x-request-id. CREATED: the answer's Unix time. DIGEST, NODE, MODEL (gen_sink.on_node):
 * 16 hexadecimal digits. ";u": the usage was sent. There is one text for each handle: numbers have
 * no leading zeros. All characters may stand in an event's id and in a header. Thread: any, but for
 * resume_write. */
#ifndef BATON_SERVE_RESUME_H
#define BATON_SERVE_RESUME_H

#include "shared/base/hash/hash.h"
#include "shared/serve/serve_state.h"

enum {
    /* LIMIT: a stream of more choices cannot be resumed. Every event has the whole handle. */
    RESUME_CHOICES_MAX = 16,
    RESUME_TEXT_MAX = 1024, /* bytes of a handle */
    RESUME_SHOWN_MAX = 40   /* of a header, in an error */
};

struct choice;
struct completion_request;

/* What was delivered of one choice. */
struct resume_choice {
    uint32_t n_tokens; /* tokens whose events were sent, or that had none */
    bool finished;     /* its last event was sent; else, */
    uint64_t node;     /* the node that computes it; 0: not known, or it keeps nothing */
    uint32_t n_reasoning, n_cached; /* finished: its parts of the usage */
};

struct resume_handle {
    char name[REQUEST_NAME_MAX + 1];
    int64_t created;
    uint64_t digest; /* of what the answer depends on (resume_digest) */
    uint32_t n_choices;
    struct resume_choice choices[RESUME_CHOICES_MAX];
    uint64_t
        model_bits; /* of the tokens of all choices that go on; 0: none has any, or they differ */
    bool usage_sent;
};

/* What the headers of a request say. */
struct resume_headers {
    bool wanted;  /* x-baton-resume: 1, or Last-Event-ID */
    bool returns; /* with Last-Event-ID: */
    struct resume_handle handle;
    char bad_name[RESUME_SHOWN_MAX + 1]; /* an x-request-id that can be no name, for a sentence; "":
                                          * there is none */
    bool has_api_key;                    /* the client sent one */
    uint8_t api_key[KEY_HASH_BYTES];
};

void resume_handle_write(const struct resume_handle *h, struct buf *out);
/* ERR_INVALID: the sentence names the header, the text and the form. */
enum status resume_handle_read(struct str text, struct resume_handle *out,
                               struct err *err) MUST_CHECK;
/* ERR_INVALID: x-baton-resume is neither 1 nor 0, or the handle is malformed; err->field is the
 * header. Its name is the request's: an
 * x-request-id beside it may be one that a proxy has made for this connection. */
enum status resume_read_headers(const struct http_exchange *x, struct resume_headers *out,
                                struct err *err) MUST_CHECK;

/* A choice's digest: equal only where the model, given it, gives equal tokens. It has the request's
 * name in it, and the prompt, the sampling parameters and the choice's number. */
struct hash128 resume_digest(const struct choice *ch);
/* What the decode node keeps the choice under: nobody without the client's API key can know it. */
struct hash128 resume_key(const struct choice *ch);
/* Checks the request against its headers once its choices are known. ERR_INVALID: err->field is the
 * header. */
enum status resume_check(struct completion_request *c, struct err *err) MUST_CHECK;
/* Writes the handle of what was delivered so far. Thread: loop. */
void resume_write(const struct completion_request *c, struct buf *out);

#endif
