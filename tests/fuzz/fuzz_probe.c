/* fuzz_probe.c - hostile bytes for a measurement server and its client; the first byte chooses.
 *
 *   0   a request: an accepted one is within its ranges, and accepted again after encoding
 *   1   a reply: likewise, and printable
 *   2   steps of a client that knows the secret, in a session without a network: only steps that
 *       neither wait nor start anything */
#include <string.h>

#include "deploy/probe/session.h"
#include "shared/base/assert.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_ranges(const struct probe_request *r)
{
    ASSERT(r->step >= PROBE_WHO && r->step < PROBE_STEP_END);
    ASSERT(memchr(r->transport, 0, sizeof r->transport) &&
           memchr(r->address, 0, sizeof r->address));
    ASSERT(r->copiers <= PROBE_THREADS_MAX && r->connections <= PROBE_THREADS_MAX);
    if (r->step == PROBE_OPEN)
        ASSERT((uint64_t)r->piece_bytes * r->n_layers * r->n_blocks <= PROBE_POOL_MAX);
    if (r->step == PROBE_EXPECT || r->step == PROBE_SEND || r->step == PROBE_TAKE)
        ASSERT(r->n_transfers >= 1 && r->n_transfers <= PROBE_TRANSFERS_MAX);
    if (r->step == PROBE_TOOL_RUN) ASSERT(r->tool >= PROBE_IPERF3 && r->tool < PROBE_TOOL_END);
}

static void fuzz_request(struct str in)
{
    struct probe_request r, again;
    struct err err = { 0 };
    struct buf b = { 0 };
    if (probe_request_decode(in, &r, &err) != OK) {
        ASSERT(err.text[0] && !r.data.data);
        return;
    }
    check_ranges(&r);
    probe_request_encode(&r, &b);
    ASSERT(probe_request_decode(buf_str(&b), &again, &err) == OK);
    ASSERT(again.step == r.step && again.n_bytes == r.n_bytes && again.data.len == r.data.len);
    buf_release(&b);
    probe_request_release(&r);
    probe_request_release(&again);
}

static void fuzz_reply(struct str in)
{
    struct probe_reply *r = MEM_NEW(struct probe_reply);
    struct err err = { 0 };
    if (probe_reply_decode(in, r, &err) == OK) {
        ASSERT(r->n_ns <= PROBE_TRANSFERS_MAX && r->status <= 0 && r->status >= ERR_INTERNAL);
        for (const char *p = r->text; *p; p++) ASSERT(*p >= ' ' && *p <= '~');
    } else {
        ASSERT(err.text[0] != 0);
    }
    probe_reply_release(r);
    mem_free(r);
}

static bool is_quick(const struct probe_request *r)
{
    switch (r->step) {
    case PROBE_OPEN:
        return (uint64_t)r->piece_bytes * r->n_layers * r->n_blocks <= 1 << 16 &&
               strcmp(r->transport, "mem") == 0;
    case PROBE_WHO:
    case PROBE_ANSWER:
    case PROBE_CLOSE:
    case PROBE_LISTEN: return true;
    case PROBE_EXPECT: return r->n_transfers <= 4;
    case PROBE_CONNECT: return r->data.len < 64; /* a longer one would wait for an answer */
    case PROBE_SEND: return true;                /* never connected */
    default: return false;
    }
}

/* Each step: one byte of length, its bytes. */
static void fuzz_steps(struct str in)
{
    struct kvt_tuning tuning = { 0 };
    struct probe_session s;
    probe_session_init(&s, &tuning, true, "127.0.0.1");
    for (int i = 0; i < 8 && in.n > 1; i++) {
        struct str body = str_sub(in, 1, (unsigned char)in.p[0]);
        struct probe_request r;
        struct err err = { 0 };
        in = str_sub(in, 1 + body.n, in.n);
        if (probe_request_decode(body, &r, &err) != OK) continue;
        struct probe_reply *reply = MEM_NEW(struct probe_reply);
        if (is_quick(&r)) probe_session_do(&s, &r, reply);
        ASSERT((reply->status == OK) == (reply->text[0] == 0));
        probe_reply_release(reply);
        mem_free(reply);
        probe_request_release(&r);
    }
    probe_session_release(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const targets[])(struct str) = { fuzz_request, fuzz_reply, fuzz_steps };
    if (size < 1) return 0;
    log_set_level(LOG_ERROR);
    targets[data[0] % 3]((struct str){ (const char *)data + 1, size - 1 });
    return 0;
}
