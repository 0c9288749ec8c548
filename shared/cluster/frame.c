/* frame.c - see frame.h. */
#include "shared/cluster/frame.h"

#include <string.h>

static uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t get_u64(const uint8_t *p) { return get_u32(p) | (uint64_t)get_u32(p + 4) << 32; }

static void put_u32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (8 * i));
}

static void put_u64(uint8_t *p, uint64_t v)
{
    put_u32(p, (uint32_t)v);
    put_u32(p + 4, (uint32_t)(v >> 32));
}

static float get_f32(const uint8_t *p)
{
    uint32_t bits = get_u32(p);
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static const char *const NAMES[FRAME_TYPE_END] = {
    [FRAME_LINK_HELLO] = "link_hello",
    [FRAME_LINK_PROOF] = "link_proof",
    [FRAME_LINK_READY] = "link_ready",
    [FRAME_PING] = "ping",
    [FRAME_ASK_CREDIT] = "ask_credit",
    [FRAME_CREDIT] = "credit",
    [FRAME_RESERVE] = "reserve",
    [FRAME_GRANT] = "grant",
    [FRAME_PREFILL] = "prefill",
    [FRAME_PREFILL_DONE] = "prefill_done",
    [FRAME_PREFILL_REPORT] = "prefill_report",
    [FRAME_PROMPT_LOGPROBS] = "prompt_logprobs",
    [FRAME_RUN] = "run",
    [FRAME_TOKENS] = "tokens",
    [FRAME_FINISHED] = "finished",
    [FRAME_FAILED] = "failed",
    [FRAME_CANCEL] = "cancel",
    [FRAME_KVT_HELLO] = "kvt_hello",
    [FRAME_KVT_ANSWER] = "kvt_answer",
    [FRAME_PROBE] = "probe",
    [FRAME_PROBE_REPLY] = "probe_reply",
    [FRAME_GROUP_HELLO] = "group_hello",
    [FRAME_GROUP_REFUSED] = "group_refused",
    [FRAME_GROUP_LEAD] = "group_lead",
    [FRAME_GROUP_PROPOSE] = "group_propose",
    [FRAME_GROUP_BLOB] = "group_blob",
    [FRAME_GROUP_LOST] = "group_lost",
    [FRAME_GROUP_BELL] = "group_bell",
    [FRAME_GROUP_LOAD] = "group_load",
    [FRAME_KV_EXPECT] = "kv_expect",
    [FRAME_KV_GRANTS] = "kv_grants",
    [FRAME_KV_SEND] = "kv_send",
    [FRAME_KV_OPENED] = "kv_opened",
    [FRAME_KV_FINISH] = "kv_finish",
    [FRAME_KV_CANCEL] = "kv_cancel",
    [FRAME_KV_EVENT] = "kv_event",
    [FRAME_ATTACH] = "attach",
    [FRAME_ATTACHED] = "attached",
    [FRAME_DETACHED] = "detached",
    [FRAME_PREEMPTED] = "preempted",
    [FRAME_FETCH] = "fetch",
    [FRAME_FETCH_REFUSED] = "fetch_refused",
    [FRAME_KV_TIER] = "kv_tier",
    [FRAME_KV_TIER_DONE] = "kv_tier_done",
};

const char *frame_type_name(unsigned type)
{
    return type < FRAME_TYPE_END && NAMES[type] ? NAMES[type] : "unknown";
}

void frame_header_encode(const struct frame_header *h, uint8_t out[FRAME_HEADER_BYTES])
{
    put_u32(out, FRAME_MAGIC);
    out[4] = FRAME_VERSION & 0xff;
    out[5] = FRAME_VERSION >> 8;
    out[6] = (uint8_t)(h->type & 0xff);
    out[7] = (uint8_t)(h->type >> 8);
    put_u32(out + 8, h->length);
    put_u32(out + 12, h->attempt);
    put_u64(out + 16, h->request);
    put_u64(out + 24, h->incarnation);
}

enum status frame_header_decode(const uint8_t in[FRAME_HEADER_BYTES], struct frame_header *h,
                                struct err *err)
{
    unsigned version = in[4] | (unsigned)in[5] << 8, type = in[6] | (unsigned)in[7] << 8;
    if (get_u32(in) != FRAME_MAGIC)
        return err_set(err, ERR_FORMAT, "the peer does not speak Baton's node protocol");
    if (version != FRAME_VERSION)
        return err_set(err, ERR_PEER_MISMATCH,
                       "the peer speaks node protocol version %u, this node speaks %d", version,
                       FRAME_VERSION);
    if (type >= FRAME_TYPE_END || !NAMES[type])
        return err_set(err, ERR_FORMAT, "unknown message type %u", type);
    if (get_u32(in + 8) > FRAME_BODY_MAX)
        return err_set(err, ERR_TOO_LONG, "a %s message of %u bytes is over the limit of %d",
                       NAMES[type], get_u32(in + 8), FRAME_BODY_MAX);
    *h = (struct frame_header){ (uint16_t)type, get_u32(in + 8), get_u32(in + 12), get_u64(in + 16),
                                get_u64(in + 24) };
    return OK;
}

void token_record_add(struct buf *out, uint64_t request, uint32_t attempt, uint32_t index,
                      const struct token_logprobs *t)
{
    uint32_t bytes = TOKEN_RECORD_BYTES + 8 * t->n_top;
    uint8_t *p = (uint8_t *)buf_reserve(out, bytes);
    put_u32(p, bytes);
    put_u32(p + 4, index);
    put_u32(p + 8, (uint32_t)t->id);
    put_u32(p + 12, (uint32_t)t->rank);
    put_u32(p + 16, bits_of(t->logprob));
    put_u32(p + 20, t->n_top);
    put_u32(p + 24, attempt);
    put_u32(p + 28, t->ends);
    put_u64(p + 32, request);
    for (uint32_t i = 0; i < t->n_top; i++) {
        put_u32(p + TOKEN_RECORD_BYTES + 8 * i, (uint32_t)t->top[i].id);
        put_u32(p + TOKEN_RECORD_BYTES + 8 * i + 4, bits_of(t->top[i].logprob));
    }
    out->len += bytes;
    out->data[out->len] = 0;
}

enum status token_record_next(struct str *rest, uint64_t *request, uint32_t *attempt,
                              uint32_t *index, struct token_logprobs *t)
{
    const uint8_t *p = (const uint8_t *)rest->p;
    if (rest->n == 0) return ERR_NOT_FOUND;
    if (rest->n < TOKEN_RECORD_BYTES) return ERR_FORMAT;
    uint32_t bytes = get_u32(p), n_top = get_u32(p + 20);
    if (n_top > SAMPLER_LOGPROBS_MAX || bytes != TOKEN_RECORD_BYTES + 8 * n_top || bytes > rest->n)
        return ERR_FORMAT;
    if (get_u32(p + 28) > FINISH_LENGTH) return ERR_FORMAT;
    bool negative = get_u32(p + 8) > INT32_MAX; /* ids are used as table indices */
    for (uint32_t i = 0; i < n_top; i++)
        negative |= get_u32(p + TOKEN_RECORD_BYTES + 8 * i) > INT32_MAX;
    if (negative) return ERR_FORMAT;
    *t = (struct token_logprobs){
        .id = (int32_t)get_u32(p + 8),
        .rank = (int32_t)get_u32(p + 12),
        .logprob = get_f32(p + 16),
        .n_top = n_top,
    };
    t->ends = (enum finish_reason)get_u32(p + 28);
    for (uint32_t i = 0; i < n_top; i++) {
        t->top[i].id = (int32_t)get_u32(p + TOKEN_RECORD_BYTES + 8 * i);
        t->top[i].logprob = get_f32(p + TOKEN_RECORD_BYTES + 8 * i + 4);
    }
    *index = get_u32(p + 4);
    *attempt = get_u32(p + 24);
    *request = get_u64(p + 32);
    rest->p += bytes;
    rest->n -= bytes;
    return OK;
}
