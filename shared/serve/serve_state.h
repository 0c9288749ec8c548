/* serve_state.h - struct serve, for shared/serve and its tests. Thread: loop; worker threads read
 * only what does not change after serve_create (tokenizer, template, names, limits). */
#ifndef BATON_SERVE_SERVE_STATE_H
#define BATON_SERVE_SERVE_STATE_H

#include "shared/base/list.h"
#include "shared/base/map.h"
#include "shared/serve/serve.h"

enum {
    REQUEST_NAME_MAX = 128, /* characters of an x-request-id */
    PARSER_TOKENS_MAX = 4 + TOOL_MARKERS_MAX
};

struct serve {
    struct serve_options o; /* pointers are copies, except those that serve.h calls borrowed */
    char *names[SERVE_NAMES_MAX];
    struct tenants open; /* without o.tenants */
    const struct tenants *tenants;
    uint32_t max_n, max_prompts, max_logprobs;
    size_t max_answer;
    /* Special tokens that parsers must see: tags of reasoning, then tags of tool calls. */
    int32_t parser_tokens[PARSER_TOKENS_MAX];
    uint32_t n_reasoning_parser_tokens, n_parser_tokens;
    struct map requests;   /* id → struct completion_request */
    struct map native_ids; /* req_id → the struct completion_request that has it (native.h) */
    uint64_t last_id;
    uint32_t n_preparing;     /* requests that will generate, not yet in the backend */
    uint32_t n_preparing_low; /* of all requests, those with large bodies on workers */
    struct list low_waiting;  /* n_low_waiting requests with large bodies that wait */
    uint32_t n_low_waiting;
    uint32_t n_refs;                     /* requests and HTTP exchanges that point here */
    bool closed;                         /* serve_free was called; the last reference frees */
    struct route_metrics *route_metrics; /* routes.c */
    struct gauge *m_in_flight;
    struct counter *m_gone;
    uint32_t n_exchanges;
    size_t n_answers; /* bytes of all whole answers in the making: sum of n_answer */
    int64_t created;  /* Unix time, for the model list */
};

void serve_ref(struct serve *s);
void serve_unref(struct serve *s);

/* Returns whether this node serves model `name`; always true for "default" (FastDeploy's
 * clients). */
bool serve_has_model(const struct serve *s, const char *name);
/* Makes a random request name: 24 hexadecimal digits. */
void serve_make_name(char out[REQUEST_NAME_MAX + 1]);
/* Takes the exchange's x-request-id when it is good, else the name that the node which passed the
 * request made, else a random one. */
void serve_choose_name(const struct http_exchange *x, char out[REQUEST_NAME_MAX + 1]);
/* Returns whether a request name may be echoed in a header: [A-Za-z0-9._-]{1,128}. */
bool serve_name_is_good(struct str name);

#endif
