/* resume.c - see resume.h. */
#include "shared/serve/resume.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/serve/auth.h"
#include "shared/serve/completion_request.h"

#define LAST_EVENT_ID "Last-Event-ID"
#define CREATED_MAX   INT64_C(999999999999)

enum { HEX_DIGITS = 16, SHOWN_MAX = 80 /* of a handle, in an error */ };

/* ---- the text of a handle ---- */

static void write_choice(const struct resume_choice *ch, struct buf *out)
{
    if (ch->finished)
        buf_printf(out, "%" PRIu32 "f%" PRIu32 ".%" PRIu32, ch->n_tokens, ch->n_reasoning,
                   ch->n_cached);
    else if (ch->node) buf_printf(out, "%" PRIu32 "@%016" PRIx64, ch->n_tokens, ch->node);
    else buf_printf(out, "%" PRIu32 "@-", ch->n_tokens);
}

void resume_handle_write(const struct resume_handle *h, struct buf *out)
{
    buf_printf(out, "1;%s;%" PRId64 ";%016" PRIx64 ";", h->name, h->created, h->digest);
    for (uint32_t i = 0; i < h->n_choices; i++) {
        if (i) buf_add_char(out, ',');
        write_choice(&h->choices[i], out);
    }
    if (h->model_bits) buf_printf(out, ";m%016" PRIx64, h->model_bits);
    if (h->usage_sent) buf_add_c(out, ";u");
}

/* Digits alone, and no leading zero. */
static bool read_number(struct str s, int64_t max, int64_t *out)
{
    int64_t v = 0;
    if (s.n == 0 || s.n > 12 || (s.n > 1 && s.p[0] == '0')) return false;
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] < '0' || s.p[i] > '9') return false;
        v = v * 10 + (s.p[i] - '0');
    }
    *out = v;
    return v <= max;
}

static bool read_u32(struct str s, uint32_t *out)
{
    int64_t v;
    if (!read_number(s, UINT32_MAX, &v)) return false;
    *out = (uint32_t)v;
    return true;
}

static bool read_hex(struct str s, uint64_t *out)
{
    return s.n == HEX_DIGITS && str_to_hex(s, out) == OK;
}

static bool read_choice(struct str s, struct resume_choice *out)
{
    struct str rest = s, part;
    size_t f = str_find_char(s, 'f'), at = str_find_char(s, '@');
    if (at == SIZE_MAX) { /* TOKENS f REASONING . CACHED */
        if (f == SIZE_MAX) return false;
        out->finished = true;
        rest = str_sub(s, f + 1, SIZE_MAX);
        if (!read_u32(str_sub(s, 0, f), &out->n_tokens) || !str_split(&rest, '.', &part))
            return false;
        return rest.p && read_u32(part, &out->n_reasoning) && read_u32(rest, &out->n_cached);
    }
    if (!read_u32(str_sub(s, 0, at), &out->n_tokens)) return false;
    rest = str_sub(s, at + 1, SIZE_MAX);
    return str_eq_c(rest, "-") || (read_hex(rest, &out->node) && out->node);
}

static bool read_choices(struct str s, struct resume_handle *h)
{
    struct str one;
    while (str_split(&s, ',', &one)) {
        if (h->n_choices == RESUME_CHOICES_MAX) return false;
        if (!read_choice(one, &h->choices[h->n_choices++])) return false;
    }
    return true;
}

/* What follows the choices. */
static bool read_end(struct str rest, struct resume_handle *h)
{
    struct str part;
    bool more = str_split(&rest, ';', &part);
    if (more && part.n && part.p[0] == 'm') {
        if (!read_hex(str_sub(part, 1, SIZE_MAX), &h->model_bits) || !h->model_bits) return false;
        more = str_split(&rest, ';', &part);
    }
    h->usage_sent = more && str_eq_c(part, "u");
    return !more || (h->usage_sent && !rest.p);
}

static bool read_handle(struct str rest, struct resume_handle *h)
{
    struct str version, name, created, digest, choices;
    if (rest.n > RESUME_TEXT_MAX || !str_split(&rest, ';', &version) ||
        !str_split(&rest, ';', &name) || !str_split(&rest, ';', &created) ||
        !str_split(&rest, ';', &digest) || !str_split(&rest, ';', &choices))
        return false;
    if (!read_end(rest, h)) return false;
    if (!str_eq_c(version, "1") || !serve_name_is_good(name)) return false;
    memcpy(h->name, name.p, name.n);
    return read_number(created, CREATED_MAX, &h->created) && read_hex(digest, &h->digest) &&
           read_choices(choices, h);
}

enum status resume_handle_read(struct str text, struct resume_handle *out, struct err *err)
{
    struct resume_handle h = { 0 };
    if (!read_handle(text, &h))
        return err_field(err, ERR_INVALID, LAST_EVENT_ID,
                         LAST_EVENT_ID " is '%.*s'%s, but must be the id of the last event that "
                                       "came of this request: "
                                       "1;NAME;CREATED;DIGEST;TOKENS@NODE,...",
                         (int)(text.n < SHOWN_MAX ? text.n : SHOWN_MAX), text.p,
                         text.n > SHOWN_MAX ? "..." : "");
    *out = h;
    return OK;
}

/* ---- headers ---- */

enum status resume_read_headers(const struct http_exchange *x, struct resume_headers *out,
                                struct err *err)
{
    const struct str last = http_header(x, "last-event-id"),
                     asked = http_header(x, "x-baton-resume"),
                     name = http_header(x, "x-request-id");
    *out = (struct resume_headers){ 0 };
    if (asked.n && !str_eq_c(asked, "1") && !str_eq_c(asked, "0"))
        return err_field(err, ERR_INVALID, "x-baton-resume",
                         "x-baton-resume is '%.*s', but must be 1, for an answer that can be "
                         "resumed, or 0",
                         (int)(asked.n < RESUME_SHOWN_MAX ? asked.n : RESUME_SHOWN_MAX), asked.p);
    out->returns = last.n > 0;
    out->wanted = out->returns || str_eq_c(asked, "1");
    if (!out->wanted) return OK;
    if (name.n && !serve_name_is_good(name))
        snprintf(out->bad_name, sizeof out->bad_name, "%.*s", STR_ARG(name));
    out->has_api_key = auth_hash_key(http_header(x, "authorization"), out->api_key);
    return out->returns ? resume_handle_read(last, &out->handle, err) : OK;
}

/* ---- digests and keys ---- */

static void add_float(struct buf *out, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    buf_add_u32le(out, bits);
}

static void add_sampling(const struct sampling_params *s, struct buf *out)
{
    const float floats[] = {
        s->temperature,       s->top_p, s->min_p, s->presence_penalty, s->frequency_penalty,
        s->repetition_penalty
    };
    for (size_t i = 0; i < COUNT_OF(floats); i++) add_float(out, floats[i]);
    buf_add_u64le(out, s->seed);
    buf_add_u32le(out, (uint32_t)s->top_k);
    buf_add_u32le(out, s->max_tokens);
    buf_add_u32le(out, s->min_tokens);
    buf_add_u32le(out, s->ignore_eos);
    buf_add_u32le(out, (uint32_t)s->n_logprobs);
    buf_add_u32le(out, s->n_stop_ids);
    for (uint32_t i = 0; i < s->n_stop_ids; i++) buf_add_u32le(out, (uint32_t)s->stop_ids[i]);
    buf_add_u32le(out, s->n_bias);
    for (uint32_t i = 0; i < s->n_bias; i++) {
        buf_add_u32le(out, (uint32_t)s->bias[i].id);
        add_float(out, s->bias[i].bias);
    }
}

struct hash128 resume_digest(const struct choice *ch)
{
    const struct completion_request *c = ch->request;
    const struct sampling_params sampling = choice_sampling(ch);
    struct buf b = { 0 };
    buf_printf(&b, "%s %s %u ", c->endpoint->object, c->name, ch->index);
    buf_add_u64le(&b, ch->prompt->hash.lo);
    buf_add_u64le(&b, ch->prompt->hash.hi);
    buf_add_u64le(&b, c->p.cache_salt);
    buf_add_u32le(&b, choice_wants_prompt_logprobs(ch));
    add_sampling(&sampling, &b);
    struct hash128 digest = hash_128(b.data, b.len);
    buf_release(&b);
    return digest;
}

struct hash128 resume_key(const struct choice *ch)
{
    const struct resume_headers *h = ch->request->resume;
    struct buf b = { 0 };
    uint8_t sum[32];
    struct hash128 key;
    buf_add_c(&b, h->has_api_key ? "baton resume, of a client with a key\n" : "baton resume\n");
    buf_add(&b, h->api_key, sizeof h->api_key);
    buf_add_u64le(&b, ch->digest.lo);
    buf_add_u64le(&b, ch->digest.hi);
    sha256(b.data, b.len, sum);
    memcpy(&key, sum, sizeof key);
    buf_release(&b);
    return key;
}

/* Of all choices. */
static uint64_t digest_of(const struct completion_request *c)
{
    struct buf b = { 0 };
    for (uint32_t i = 0; i < c->n_choices; i++) {
        buf_add_u64le(&b, c->choices[i].digest.lo);
        buf_add_u64le(&b, c->choices[i].digest.hi);
    }
    uint64_t digest = hash_64(b.data, b.len, 0);
    buf_release(&b);
    return digest;
}

/* Without events the name is all that a client can come back with. A stream has it in its ids, so
 * there it may be any. */
static enum status check_name(const struct completion_request *c, struct err *err)
{
    if (c->p.stream || c->name_is_given || !c->resume->bad_name[0]) return OK;
    return err_field(err, ERR_INVALID, "x-request-id",
                     "x-request-id is '%s', but an answer that is not streamed is resumed by its "
                     "name, which must be 1 to %d of the characters A-Z a-z 0-9 . _ -",
                     c->resume->bad_name, REQUEST_NAME_MAX);
}

enum status resume_check(struct completion_request *c, struct err *err)
{
    const struct resume_headers *h = c->resume;
    if (!h) return OK;
    c->resume_digest = digest_of(c);
    if (c->p.stream && c->n_choices > RESUME_CHOICES_MAX)
        return err_field(err, ERR_INVALID, "x-baton-resume",
                         "x-baton-resume is 1, but a stream of %u choices cannot be resumed; at "
                         "most %d choices can",
                         c->n_choices, RESUME_CHOICES_MAX);
    if (!h->returns) return check_name(c, err);
    if (!c->p.stream)
        return err_field(err, ERR_INVALID, LAST_EVENT_ID,
                         LAST_EVENT_ID " was sent, but only streams have events: without stream, "
                                       "repeat the request with its x-request-id");
    if (h->handle.n_choices != c->n_choices || h->handle.digest != c->resume_digest)
        return err_field(err, ERR_INVALID, LAST_EVENT_ID,
                         LAST_EVENT_ID " is of another request than this: repeat the path and the "
                                       "body with which the stream began");
    return OK;
}

/* Of the tokens that would have to be computed again. */
static uint64_t model_bits_of(const struct completion_request *c)
{
    uint64_t bits = 0;
    for (uint32_t i = 0; i < c->n_choices; i++) {
        const struct choice *ch = &c->choices[i];
        if (ch->delivered.finished || ch->delivered.n_tokens == 0) continue;
        if (!ch->model_bits || (bits && ch->model_bits != bits)) return 0;
        bits = ch->model_bits;
    }
    return bits;
}

void resume_write(const struct completion_request *c, struct buf *out)
{
    struct resume_handle h = {
        .created = c->created,
        .digest = c->resume_digest,
        .n_choices = c->n_choices,
        .model_bits = model_bits_of(c),
        .usage_sent = c->usage_sent,
    };
    memcpy(h.name, c->name, sizeof h.name);
    for (uint32_t i = 0; i < c->n_choices; i++) h.choices[i] = c->choices[i].delivered;
    resume_handle_write(&h, out);
}
