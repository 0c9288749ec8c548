/* batch_runner.h - batches of requests from a file: OpenAI batch lines in, batch output lines out.
 *
 * Input line: {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions" |
 * "/v1/completions", "body": {...}} Output line: {"id": "...", "custom_id": "...", "response":
 * {"status_code": 200, "request_id": "...", "body": {...}}, "error": null} in the order of the
 * input; a malformed line gives a line with "error" set and does not stop the rest. Lines are read
 * as they are needed and at most `concurrency` are in work, so a file of any length runs in bounded
 * memory (answers that are ready early are held until their turn, at most 4 x concurrency lines).
 * Thread: loop. Life cycle: start, then `done` exactly once. */
#ifndef BATON_DEPLOY_GENERATE_BATCH_RUNNER_H
#define BATON_DEPLOY_GENERATE_BATCH_RUNNER_H

#include "shared/net/loop.h"
#include "shared/serve/serve.h"

struct batch_runner_options {
    struct loop *loop;
    struct serve *serve;
    const char *input;    /* path, "-" is standard input */
    const char *output;   /* path, "-" is standard output; written to PATH.partial, renamed
                           * when complete */
    uint32_t concurrency; /* 32 when 0 */
    bool progress;        /* a line on stderr, redrawn on a terminal, else every few
                           * seconds */
    void (*done)(void *arg, enum status st, uint64_t n_ok, uint64_t n_failed, const char *text);
    void *arg;
};

struct batch_runner;

/* *out is valid until `done`. */
enum status batch_runner_start(const struct batch_runner_options *o, struct batch_runner **out,
                               struct err *err) MUST_CHECK;
/* Start nothing more, write the answers that are there in their order, then `done` with
 * ERR_CANCELED. */
void batch_runner_stop(struct batch_runner *f);

#endif
