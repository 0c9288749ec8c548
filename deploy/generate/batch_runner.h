/* batch_runner.h - runs a file of requests: OpenAI batch lines in, batch output lines out.
 *
 *   in:  {"custom_id": "...", "method": "POST",
 *         "url": "/v1/chat/completions" | "/v1/completions", "body": {...}}
 *   out: {"id": "...", "custom_id": "...", "response":
 *         {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}
 *
 * A request that was refused or failed has its status_code and "error" with a code and a message.
 *
 * A file whose first line does not begin with { is plain text: each line is a prompt, and its
 * number the custom_id. A file that is neither (batch_format.h) ends the run. Output lines keep the
 * order of the input. A malformed line gives one with "error" set and does not stop the run. Lines
 * are read on demand and at most `concurrency` requests run at a time; answers that finish early
 * wait for their turn, at most 4 x concurrency lines. So a file of any length needs bounded memory.
 * Life cycle: start, then `done` exactly once. Thread: loop. */
#ifndef BATON_DEPLOY_GENERATE_BATCH_RUNNER_H
#define BATON_DEPLOY_GENERATE_BATCH_RUNNER_H

#include "shared/net/loop.h"
#include "shared/serve/serve.h"

struct batch_runner_options {
    struct loop *loop;
    struct serve *serve;
    const char *input;    /* path, "-" is standard input */
    const char *output;   /* path, written to PATH.partial and renamed; "-" is standard output.
                          * PATH.partial must not have answers of an earlier run. */
    uint32_t concurrency; /* 32 when 0 */
    bool raw;             /* plain prompts are completions, not chats */
    uint32_t max_tokens;  /* of plain prompts */
    double temperature;   /* of plain prompts */
    bool ignore_model;    /* answer lines whatever model they name */
    bool progress;        /* stderr: one line, redrawn on a terminal, else every few seconds */
    /* text: the error, or else the summary (batch_tally.h); valid during the call. */
    void (*done)(void *arg, enum status st, uint64_t n_ok, uint64_t n_failed, const char *text);
    void *arg;
};

struct batch_runner;

/* *out is valid until `done`. */
enum status batch_runner_start(const struct batch_runner_options *o, struct batch_runner **out,
                               struct err *err) MUST_CHECK;
/* Starts no more requests, writes the finished answers in order, then calls `done` with
 * ERR_CANCELED. */
void batch_runner_stop(struct batch_runner *f);

#endif
