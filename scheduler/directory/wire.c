/* wire.c - see wire.h. */
#include "scheduler/directory/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/hash/hash.h"
#include "shared/base/json/json_packed.h"

enum { REFUSAL_VALUES_MAX = 16 };

void directory_prove(struct str secret, const char *method, struct str path, struct str body,
                     char out[DIRECTORY_PROOF_MAX])
{
    struct buf message = { 0 };
    uint8_t mac[32];
    /* Neither a method nor a path contains a blank, so no two requests give the same bytes. */
    buf_printf(&message, "%s %.*s ", method, STR_ARG(path));
    buf_add_str(&message, body);
    hmac_sha256(secret.p, secret.n, message.data, message.len, mac);
    buf_release(&message);
    size_t at = (size_t)snprintf(out, DIRECTORY_PROOF_MAX, "Baton ");
    for (size_t i = 0; i < sizeof mac; i++, at += 2)
        snprintf(out + at, DIRECTORY_PROOF_MAX - at, "%02x", mac[i]);
}

void directory_prove_header(struct str secret, const char *method, struct str path, struct str body,
                            char out[DIRECTORY_PROOF_HEADER_MAX])
{
    char proof[DIRECTORY_PROOF_MAX];
    out[0] = 0;
    if (!secret.n) return;
    directory_prove(secret, method, path, body, proof);
    snprintf(out, DIRECTORY_PROOF_HEADER_MAX, "Authorization: %s\r\n", proof);
}

enum status directory_read_refusal(int http_status, struct str answer, const char *otherwise,
                                   struct err *err)
{
    cJSON *doc = NULL;
    struct err unread;
    const bool is_read = json_parse_bounded(answer, REFUSAL_VALUES_MAX, &doc, &unread) == OK;
    const cJSON *why = is_read ? json_member(doc, "error") : NULL;
    const enum status st = err_set(err, ERR_PEER_REFUSED, "%.300s (status %d)",
                                   cJSON_IsString(why) ? why->valuestring : otherwise, http_status);
    cJSON_Delete(doc);
    return st;
}

void directory_add_id(struct buf *b, const char *name, uint64_t id)
{
    buf_printf(b, "\"%s\":\"" DIRECTORY_ID "\"", name, id);
}

enum status directory_read_id(struct str text, uint64_t *out)
{
    uint64_t v = 0;
    if (text.n != 16) return ERR_FORMAT;
    for (size_t i = 0; i < text.n; i++) {
        char c = text.p[i];
        unsigned digit;
        if (c >= '0' && c <= '9') digit = (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f') digit = (unsigned)(c - 'a') + 10;
        else if (c >= 'A' && c <= 'F') digit = (unsigned)(c - 'A') + 10;
        else return ERR_FORMAT;
        v = v << 4 | digit;
    }
    *out = v;
    return OK;
}

enum status directory_get_id(const cJSON *o, const char *name, uint64_t *out, struct err *err)
{
    const char *text = NULL;
    TRY(json_get_str(o, name, &text, err));
    if (!text) return OK;
    if (directory_read_id(str_of(text), out) != OK)
        return err_field(err, ERR_INVALID, name, "%s must be 16 hexadecimal digits", name);
    return OK;
}

bool directory_topic_is_valid(const char *topic)
{
    size_t n = topic ? strlen(topic) : 0;
    if (n == 0 || n >= NODE_NAME_MAX) return false;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)topic[i];
        if (c <= ' ' || c == 0x7f || c == '{' || c == '}') return false;
    }
    return true;
}

void directory_topics_add(struct directory_topic *t, size_t *n, const char *name,
                          enum node_role role, uint32_t count)
{
    size_t i = 0;
    while (i < *n && strcmp(t[i].name, name) != 0) i++;
    if (i == DIRECTORY_TOPICS_MAX) return;
    if (i == *n) {
        t[i] = (struct directory_topic){ 0 };
        snprintf(t[i].name, sizeof t[i].name, "%s", name);
        ++*n;
    }
    t[i].n_role[role] += count;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct directory_topic *)a)->name,
                  ((const struct directory_topic *)b)->name);
}

/* A topic of mixed nodes lacks nothing. In any other topic both counts are written, so that the
 * reader sees which role is missing. */
static void write_one(const struct directory_topic *t, struct buf *b)
{
    buf_printf(b, "%s (", t->name);
    if (t->n_role[ROLE_PREFILL] || t->n_role[ROLE_DECODE])
        buf_printf(b, "%u prefill, %u decode%s", t->n_role[ROLE_PREFILL], t->n_role[ROLE_DECODE],
                   t->n_role[ROLE_MIXED] ? ", " : "");
    if (t->n_role[ROLE_MIXED]) buf_printf(b, "%u mixed", t->n_role[ROLE_MIXED]);
    buf_add_char(b, ')');
}

void directory_topics_write(struct directory_topic *t, size_t n, char *out, size_t cap)
{
    struct buf b = { 0 };
    qsort(t, n, sizeof *t, by_name);
    out[0] = 0;
    for (size_t i = 0; i < n; i++) {
        size_t before = b.len;
        if (i) buf_add_c(&b, ", ");
        write_one(&t[i], &b);
        if (b.len + sizeof ", ..." <= cap || (i + 1 == n && b.len < cap)) continue;
        b.len = before;
        buf_add_c(&b, i ? ", ..." : "...");
        break;
    }
    if (b.len) snprintf(out, cap, "%.*s", (int)b.len, b.data);
    buf_release(&b);
}
