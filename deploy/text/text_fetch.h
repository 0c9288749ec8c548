/* text_fetch.h - gets a model's text from a node (GET /cluster/v1/text, text_bundle.h) into files
 * of a private temporary folder, for the loaders that read those of a model.
 *
 *     ASKING ─▶ UNPACKING (a worker) ─▶ done
 *
 * Thread: loop. */
#ifndef BATON_DEPLOY_TEXT_TEXT_FETCH_H
#define BATON_DEPLOY_TEXT_TEXT_FETCH_H

#include "deploy/text/text_bundle.h"
#include "shared/net/loop.h"

struct text_fetch;

/* What came. text_fetched_release removes the folder, too. */
struct text_fetched {
    struct buf folder, model_path, chat_template; /* chat_template empty: the model's own */
    char *reasoning_parser, *tool_parser;
    char *names[TEXT_NAMES_MAX];
    size_t n_names;
    uint32_t max_model_len;
    uint64_t model;
    bool dummy;
};

struct text_fetch_options {
    struct loop *loop;
    const char *host; /* of the node's API; copied */
    uint16_t port;
    struct str secret; /* borrowed until done */
    /* Once, and not after text_fetch_cancel. st OK: `got` is the caller's, who releases it. */
    void (*done)(void *arg, enum status st, const struct err *err, struct text_fetched *got);
    void *arg;
};

struct text_fetch *text_fetch_start(const struct text_fetch_options *o);
/* Not from inside done. */
void text_fetch_cancel(struct text_fetch *f);
void text_fetched_release(struct text_fetched *t);

#endif
