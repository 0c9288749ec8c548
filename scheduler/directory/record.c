/* record.c - writes a node's record as a JSON object and reads it with every bound checked.
 *
 *     { "identity": "{\"node\":...}", "proof": "<hex>", "draining": false, "n_running": 3, ... }
 *
 * The identity is all that does not change while the node runs, as the text of a JSON object. It is
 * passed on byte by byte, so its proof covers the members that only a newer version knows, too. Ids
 * (node, model) are 16 hex digits; quantities are numbers, at most 2^53 so that every JSON reader
 * keeps them exactly. Unknown members are ignored and absent ones are 0; node, topic and role are
 * required. Thread: any (pure
 * functions). */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler/directory/wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"

#define QUANTITY_MAX (INT64_C(1) << 53)

enum {
    /* More than any node has; the sum over DIRECTORY_NODES_MAX nodes cannot overflow. */
    SEQS_MAX = 1 << 20,
    TOKENS_MAX = 1 << 30,
    RANKS_MAX = 1 << 16
};

static unsigned long long quantity(uint64_t v)
{
    return v > QUANTITY_MAX ? (unsigned long long)QUANTITY_MAX : v;
}

static void add_text(struct buf *out, const char *name, const char *text)
{
    buf_printf(out, ",\"%s\":", name);
    json_add_string(out, str_of(text));
}

/* The members of what does not change while the node runs. */
static void write_identity(const struct node_record *r, struct buf *out)
{
    directory_add_id(out, "node", r->node);
    add_text(out, "name", r->name);
    add_text(out, "topic", r->topic);
    add_text(out, "role", node_role_name(r->role));
    add_text(out, "host", r->host);
    buf_printf(out, ",\"cluster_port\":%u,\"http_port\":%u,", r->cluster_port, r->http_port);
    directory_add_id(out, "model", r->model);
    buf_add_char(out, ',');
    directory_add_id(out, "text", r->text);
    add_text(out, "model_name", r->model_name);
    add_text(out, "precision", r->precision);
    add_text(out, "kv_type", r->kv_type);
    buf_printf(out, ",\"kv_lossy\":%s", r->kv_lossy ? "true" : "false");
    add_text(out, "kv_by", r->kv_by);
    buf_add_char(out, ',');
    directory_add_id(out, "kv_host", r->kv_host);
    buf_add_c(out, ",\"followers\":[");
    for (uint32_t i = 0; i < r->n_followers; i++)
        buf_printf(out, "%s\"" DIRECTORY_ID " %u %s\"", i ? "," : "", r->followers[i].process,
                   r->followers[i].port, r->followers[i].host);
    buf_add_char(out, ']');
    if (r->group.name[0]) {
        add_text(out, "group", r->group.name);
        buf_printf(out, ",\"group_rank\":%u,\"group_size\":%u", r->group.rank, r->group.size);
    }
    buf_add_c(out, ",\"served\":[");
    for (uint32_t i = 0; i < r->n_served; i++)
        buf_printf(out, "%s\"" DIRECTORY_ID "\"", i ? "," : "", r->served[i]);
    buf_printf(out,
               "],\"max_seqs\":%u,\"n_blocks\":%u,\"block_tokens\":%u,\"max_model_len\":%u,"
               "\"max_requests\":%u,\"resume_ms\":%u,\"deterministic\":%s,\"prefix_cache\":%s",
               r->max_seqs, r->n_blocks, r->block_tokens, r->max_model_len, r->max_requests,
               r->resume_ms, r->deterministic ? "true" : "false",
               r->prefix_cache ? "true" : "false");
}

/* What may have changed since the last renewal. */
static void write_load(const struct node_record *r, struct buf *out)
{
    buf_printf(out,
               "\"draining\":%s,\"n_running\":%u,\"n_waiting\":%u,\"n_blocks_free\":%u,"
               "\"waiting_tokens\":%llu,\"progress\":%llu,\"has_work\":%s,\"n_requests\":%u,"
               "\"prefill_tokens_per_s\":%u,\"step_us\":%u",
               r->draining ? "true" : "false", r->n_running, r->n_waiting, r->n_blocks_free,
               quantity(r->waiting_tokens), quantity(r->progress), r->has_work ? "true" : "false",
               r->n_requests, r->prefill_tokens_per_s, r->step_us);
    if (r->group.name[0])
        buf_printf(out, ",\"group_epoch\":%llu,\"group_whole\":%s", quantity(r->group.epoch),
                   r->group.is_whole ? "true" : "false");
    buf_printf(out, ",\"placed_tokens\":%llu,\"placed_seqs\":%u,\"placed_blocks\":%u",
               quantity(r->placed_tokens), r->placed_seqs, r->placed_blocks);
}

void node_record_add_identity(const struct node_record *r, struct buf *out)
{
    if (r->identity.n) {
        buf_add_str(out, r->identity);
        return;
    }
    buf_add_char(out, '{');
    write_identity(r, out);
    buf_add_char(out, '}');
}

void node_record_set_served(struct node_record *r, const char *const *names, size_t n)
{
    r->n_served = 0;
    for (size_t i = 0; i < n && i < RECORD_SERVED_MAX; i++)
        r->served[r->n_served++] = hash_64(names[i], strlen(names[i]), 0);
}

bool node_record_serves(const struct node_record *r, struct str name)
{
    uint64_t hash = hash_64(name.p, name.n, 0);
    for (uint32_t i = 0; i < r->n_served; i++)
        if (r->served[i] == hash) return true;
    return false;
}

void node_record_write(const struct node_record *r, struct buf *out)
{
    struct buf identity = { 0 };
    node_record_add_identity(r, &identity);
    buf_add_c(out, "{\"identity\":");
    json_add_string(out, buf_str(&identity));
    if (r->proof[0]) add_text(out, "proof", r->proof);
    buf_add_char(out, ',');
    write_load(r, out);
    buf_add_char(out, '}');
    buf_release(&identity);
}

void node_record_show(const struct node_record *r, struct buf *out)
{
    buf_add_char(out, '{');
    write_identity(r, out);
    buf_add_char(out, ',');
    write_load(r, out);
    buf_add_char(out, '}');
}

static void make_proof(const struct node_record *r, struct str secret, char out[RECORD_PROOF_MAX])
{
    struct buf message = { 0 };
    uint8_t mac[32];
    buf_add_c(&message, "baton record identity\n");
    node_record_add_identity(r, &message);
    hmac_sha256(secret.p, secret.n, message.data, message.len, mac);
    for (size_t i = 0; i < RECORD_PROOF_MAX / 2; i++) snprintf(out + 2 * i, 3, "%02x", mac[i]);
    buf_release(&message);
}

void node_record_prove(struct node_record *r, struct str secret)
{
    r->identity = (struct str){ 0 };
    r->proof[0] = 0;
    if (secret.n) make_proof(r, secret, r->proof);
}

static bool is_of_this_host(const char *host, const char *own_host)
{
    return host_is_loopback(host) || (own_host[0] && strcmp(host, own_host) == 0);
}

bool node_record_is_proven(const struct node_record *r, struct str secret, const char *own_host)
{
    char want[RECORD_PROOF_MAX];
    if (!secret.n) {
        bool here = is_of_this_host(r->host, own_host);
        for (uint32_t i = 0; i < r->n_followers; i++)
            here &= is_of_this_host(r->followers[i].host, own_host);
        return here;
    }
    make_proof(r, secret, want);
    return equal_constant_time(want, r->proof, RECORD_PROOF_MAX);
}

/* Control characters of ASCII and, as UTF-8, of Latin-1, which terminals obey too, and those that
 * turn the direction of writing. */
static bool has_control(const char *text, size_t n)
{
    const unsigned char *c = (const unsigned char *)text;
    for (size_t i = 0; i < n; i++) {
        if (c[i] < ' ' || c[i] == 0x7f) return true;
        if (c[i] == 0xC2 && c[i + 1] >= 0x80 && c[i + 1] <= 0x9F) return true;
        if (c[i] == 0xE2 && c[i + 1] == 0x80 && c[i + 2] >= 0xAA && c[i + 2] <= 0xAE) return true;
        if (c[i] == 0xE2 && c[i + 1] == 0x81 && c[i + 2] >= 0xA6 && c[i + 2] <= 0xA9) return true;
    }
    return false;
}

static enum status get_text(const cJSON *o, const char *name, char *out, size_t cap,
                            struct err *err)
{
    const char *text = NULL;
    TRY(json_get_str(o, name, &text, err));
    if (!text) return OK;
    size_t n = strlen(text);
    if (n >= cap)
        return err_field(err, ERR_INVALID, name, "%s has %zu bytes; the limit is %zu", name, n,
                         cap - 1);
    if (has_control(text, n))
        return err_field(err, ERR_INVALID, name, "%s contains a control character", name);
    memcpy(out, text, n + 1);
    return OK;
}

/* An address is also part of commands that people copy from the log. */
static bool is_host(const char *text)
{
    for (const char *c = text; *c; c++)
        if (!isalnum((unsigned char)*c) && !strchr(".:-_%", *c)) return false;
    return true;
}

static enum status get_host(const cJSON *o, char *out, size_t cap, struct err *err)
{
    TRY(get_text(o, "host", out, cap, err));
    if (!is_host(out))
        return err_field(err, ERR_INVALID, "host", "host is not a name or an address");
    return OK;
}

/* "<id> <port> <host>" */
static bool read_rank(const char *text, struct node_rank *out)
{
    enum { ID_DIGITS = 16 };
    struct str all = str_of(text);
    char *end;
    if (all.n <= ID_DIGITS + 1 || text[ID_DIGITS] != ' ' ||
        !isdigit((unsigned char)text[ID_DIGITS + 1]))
        return false;
    if (directory_read_id(str_sub(all, 0, ID_DIGITS), &out->process) != OK || !out->process)
        return false;
    unsigned long port = strtoul(text + ID_DIGITS + 1, &end, 10);
    if (*end != ' ' || port == 0 || port > UINT16_MAX) return false;
    size_t n = strlen(end + 1);
    if (n == 0 || n >= sizeof out->host || !is_host(end + 1)) return false;
    memcpy(out->host, end + 1, n + 1);
    out->port = (uint16_t)port;
    return true;
}

static enum status get_followers(const cJSON *o, struct node_record *r, struct err *err)
{
    const cJSON *list = json_member(o, "followers"), *one;
    if (!list) return OK;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > RECORD_FOLLOWERS_MAX)
        return err_field(err, ERR_INVALID, "followers",
                         "followers must be an array of at most %d ranks", RECORD_FOLLOWERS_MAX);
    cJSON_ArrayForEach (one, list) {
        if (!cJSON_IsString(one) || !read_rank(one->valuestring, &r->followers[r->n_followers]))
            return err_field(err, ERR_INVALID, "followers",
                             "every rank in followers must be \"ID PORT HOST\"");
        r->n_followers++;
    }
    return OK;
}

/* Without a name there is no group, whatever the numbers. */
static enum status get_group(const cJSON *o, struct node_group *g, struct err *err)
{
    int64_t rank = 0, size = 0;
    TRY(get_text(o, "group", g->name, sizeof g->name, err));
    TRY(json_get_i64(o, "group_rank", 0, RANKS_MAX, &rank, err));
    TRY(json_get_i64(o, "group_size", 0, RANKS_MAX, &size, err));
    if (g->name[0] && rank >= size)
        return err_field(err, ERR_INVALID, "group_rank",
                         "group_rank must be below group_size, which is %d", (int)size);
    g->rank = (uint32_t)rank;
    g->size = (uint32_t)size;
    return OK;
}

static enum status get_role(const cJSON *o, enum node_role *out, struct err *err)
{
    const char *text = NULL;
    TRY(json_get_str(o, "role", &text, err));
    if (text && node_role_from_name(text, out)) return OK;
    return err_field(err, ERR_INVALID, "role", "role must be mixed, prefill or decode");
}

static enum status get_served(const cJSON *o, struct node_record *r, struct err *err)
{
    const cJSON *list = json_member(o, "served"), *one;
    if (!list) return OK;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > RECORD_SERVED_MAX)
        return err_field(err, ERR_INVALID, "served", "served must be an array of at most %d ids",
                         RECORD_SERVED_MAX);
    cJSON_ArrayForEach (one, list) {
        if (!cJSON_IsString(one) ||
            directory_read_id(str_of(one->valuestring), &r->served[r->n_served]) != OK)
            return err_field(err, ERR_INVALID, "served",
                             "every id in served must be 16 hexadecimal digits");
        r->n_served++;
    }
    return OK;
}

static enum status get_names(const cJSON *o, struct node_record *r, struct err *err)
{
    TRY(directory_get_id(o, "node", &r->node, err));
    TRY(directory_get_id(o, "model", &r->model, err));
    TRY(directory_get_id(o, "text", &r->text, err));
    TRY(get_text(o, "name", r->name, sizeof r->name, err));
    TRY(get_text(o, "topic", r->topic, sizeof r->topic, err));
    TRY(get_host(o, r->host, sizeof r->host, err));
    TRY(get_text(o, "model_name", r->model_name, sizeof r->model_name, err));
    TRY(get_text(o, "precision", r->precision, sizeof r->precision, err));
    TRY(get_text(o, "kv_type", r->kv_type, sizeof r->kv_type, err));
    TRY(get_text(o, "kv_by", r->kv_by, sizeof r->kv_by, err));
    TRY(directory_get_id(o, "kv_host", &r->kv_host, err));
    TRY(get_served(o, r, err));
    TRY(get_followers(o, r, err));
    TRY(get_group(o, &r->group, err));
    TRY(get_role(o, &r->role, err));
    if (r->node == 0)
        return err_field(err, ERR_INVALID, "node",
                         "a node record needs node, 16 hexadecimal digits that are not all 0");
    if (!directory_topic_is_valid(r->topic))
        return err_field(err, ERR_INVALID, "topic",
                         "topic must be 1 to %d printable characters without blanks and braces",
                         NODE_NAME_MAX - 1);
    return OK;
}

struct number {
    const char *name;
    int64_t max;
    uint16_t *u16;
    uint32_t *u32;
    uint64_t *u64;
};

static enum status get_numbers(const cJSON *o, const struct number *fields, size_t n,
                               struct err *err)
{
    for (size_t i = 0; i < n; i++) {
        int64_t v = 0;
        TRY(json_get_i64(o, fields[i].name, 0, fields[i].max, &v, err));
        if (fields[i].u16) *fields[i].u16 = (uint16_t)v;
        if (fields[i].u32) *fields[i].u32 = (uint32_t)v;
        if (fields[i].u64) *fields[i].u64 = (uint64_t)v;
    }
    return OK;
}

static enum status get_identity(const cJSON *o, struct node_record *r, struct err *err)
{
    const struct number fields[] = {
        { "cluster_port", UINT16_MAX, .u16 = &r->cluster_port },
        { "http_port", UINT16_MAX, .u16 = &r->http_port },
        { "max_seqs", SEQS_MAX, .u32 = &r->max_seqs },
        { "n_blocks", TOKENS_MAX, .u32 = &r->n_blocks },
        { "block_tokens", TOKENS_MAX, .u32 = &r->block_tokens },
        { "max_model_len", TOKENS_MAX, .u32 = &r->max_model_len },
        { "max_requests", TOKENS_MAX, .u32 = &r->max_requests },
        { "resume_ms", TOKENS_MAX, .u32 = &r->resume_ms },
    };
    if (!cJSON_IsObject(o))
        return err_field(err, ERR_INVALID, "identity",
                         "identity must be the text of a JSON object");
    TRY(get_names(o, r, err));
    TRY(get_numbers(o, fields, COUNT_OF(fields), err));
    TRY(json_get_bool(o, "deterministic", &r->deterministic, err));
    TRY(json_get_bool(o, "prefix_cache", &r->prefix_cache, err));
    return json_get_bool(o, "kv_lossy", &r->kv_lossy, err);
}

static enum status get_load(const cJSON *o, struct node_record *r, struct err *err)
{
    const struct number fields[] = {
        { "n_running", TOKENS_MAX, .u32 = &r->n_running },
        { "n_waiting", TOKENS_MAX, .u32 = &r->n_waiting },
        { "n_blocks_free", TOKENS_MAX, .u32 = &r->n_blocks_free },
        { "n_requests", TOKENS_MAX, .u32 = &r->n_requests },
        { "prefill_tokens_per_s", TOKENS_MAX, .u32 = &r->prefill_tokens_per_s },
        { "step_us", TOKENS_MAX, .u32 = &r->step_us },
        { "waiting_tokens", QUANTITY_MAX, .u64 = &r->waiting_tokens },
        { "progress", QUANTITY_MAX, .u64 = &r->progress },
        { "group_epoch", QUANTITY_MAX, .u64 = &r->group.epoch },
        { "placed_tokens", QUANTITY_MAX, .u64 = &r->placed_tokens },
        { "placed_seqs", TOKENS_MAX, .u32 = &r->placed_seqs },
        { "placed_blocks", TOKENS_MAX, .u32 = &r->placed_blocks },
    };
    TRY(get_numbers(o, fields, COUNT_OF(fields), err));
    TRY(json_get_bool(o, "draining", &r->draining, err));
    TRY(json_get_bool(o, "group_whole", &r->group.is_whole, err));
    return json_get_bool(o, "has_work", &r->has_work, err);
}

/* Records had all members side by side once, and a proof of those that the reader knew. */
static enum status no_identity(const cJSON *o, struct err *err)
{
    if (json_member(o, "node"))
        return err_field(err, ERR_INVALID, "identity",
                         "it has the form of an earlier version, whose proof leaves members out; "
                         "give all nodes of the cluster the same version");
    return err_field(err, ERR_INVALID, "identity",
                     "a node record needs identity, the text of a JSON object");
}

enum status node_record_from_json(const cJSON *o, struct node_record *out, struct err *err)
{
    struct node_record r = { 0 };
    const char *identity = NULL;
    cJSON *doc = NULL;
    if (!cJSON_IsObject(o)) return err_set(err, ERR_FORMAT, "a node record is a JSON object");
    TRY(json_get_str(o, "identity", &identity, err));
    if (!identity) return no_identity(o, err);
    r.identity = str_of(identity);
    if (r.identity.n > RECORD_TEXT_MAX)
        return err_set(err, ERR_TOO_LONG,
                       "its identity has %zu bytes; a node record has at most %d", r.identity.n,
                       RECORD_TEXT_MAX);
    TRY(get_text(o, "proof", r.proof, sizeof r.proof, err));
    TRY(get_load(o, &r, err));
    TRY(json_parse(r.identity, false, &doc, err));
    enum status st = get_identity(doc, &r, err);
    cJSON_Delete(doc);
    if (st == OK) *out = r;
    return st;
}

enum status node_record_read(struct str json, char *room, struct node_record *out, struct err *err)
{
    cJSON *doc = NULL;
    if (json.n > RECORD_TEXT_MAX)
        return err_set(err, ERR_TOO_LONG, "it has %zu bytes; a node record has at most %d", json.n,
                       RECORD_TEXT_MAX);
    TRY(json_parse(json, false, &doc, err));
    enum status st = node_record_from_json(doc, out, err);
    if (st == OK) { /* no JSON string is longer than its text */
        memcpy(room, out->identity.p, out->identity.n);
        out->identity.p = room;
    }
    cJSON_Delete(doc);
    return st;
}
