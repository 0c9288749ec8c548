/* status_groups.c - see status_groups.h.
 *
 *     group at 127.0.0.1:29550: 3 of 4 ranks, epoch 3, together
 *       rank 0  10.0.0.1:20001  22 experts, leads   rank 2 of 4 is not there, others have its ..
 *       rank 2  -               not in the directory
 */
#include "deploy/cli/status_groups.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/address/host_port.h"
#include "shared/base/mem.h"

enum { TIMEOUT_MS = 1500 };

struct answer {
    struct status_groups *owner;
    char name[HOST_PORT_TEXT_MAX];
    cJSON *group; /* owned; NULL: it has none, or did not answer */
};

struct status_groups {
    struct status_groups_options o;
    struct answer *answers; /* [n] */
    size_t n, n_pending;
};

static double number(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsNumber(v) ? v->valuedouble : 0;
}

static const char *text(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsString(v) ? v->valuestring : "";
}

/* ---- asking ---- */

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct answer *a = arg;
    if (st == OK && http_status == 200) {
        cJSON *doc = cJSON_ParseWithLength(body.p, body.n);
        a->group = cJSON_DetachItemFromObjectCaseSensitive(doc, "group");
        cJSON_Delete(doc);
    }
    if (--a->owner->n_pending == 0 && st != ERR_CANCELED) a->owner->o.done(a->owner->o.arg);
}

struct status_groups *status_groups_start(const struct status_groups_options *o)
{
    const cJSON *node;
    struct status_groups *g = MEM_NEW(struct status_groups);
    g->o = *o;
    g->answers = MEM_ARRAY(struct answer, (size_t)cJSON_GetArraySize(o->nodes) + 1);
    cJSON_ArrayForEach (node, o->nodes) {
        struct answer *a = &g->answers[g->n++];
        const double port = number(node, "http_port");
        a->owner = g;
        snprintf(a->name, sizeof a->name, "%s", text(node, "name"));
        if (port < 1 || port > UINT16_MAX) continue;
        g->n_pending += http_client_request(o->client, "GET", text(node, "host"), (uint16_t)port,
                                            "/cluster", o->headers, (struct str){ 0 }, TIMEOUT_MS,
                                            on_answer, a) == OK;
    }
    if (g->n_pending) return g;
    status_groups_free(g);
    return NULL;
}

void status_groups_free(struct status_groups *g)
{
    if (!g) return;
    for (size_t i = 0; i < g->n; i++) cJSON_Delete(g->answers[i].group);
    mem_free(g->answers);
    mem_free(g);
}

/* ---- drawing ---- */

static bool is_same_group(const cJSON *a, const cJSON *b)
{
    return strcmp(text(a, "at"), text(b, "at")) == 0 && number(a, "size") == number(b, "size");
}

static bool is_true(const cJSON *o, const char *name)
{
    return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, name)) != 0;
}

static void draw_rank(const struct answer *a, uint32_t rank, struct buf *out)
{
    const cJSON *group = a ? a->group : NULL;
    const char *why = text(group, "why");
    buf_printf(out, "  rank %-4u %-24s ", rank, a ? a->name : "-");
    if (!a) buf_add_c(out, "not in the directory");
    else
        buf_printf(out, "%.0f experts%s", number(group, "experts"),
                   is_true(group, "leads") ? ", leads" : "");
    if (why[0]) buf_printf(out, "   %s%s", is_true(group, "together") ? "" : "waits: ", why);
    buf_add_char(out, '\n');
}

/* Sizes and epoch are those of the rank that has seen the last one. */
static void draw_heading(const struct status_groups *g, size_t i, struct buf *out)
{
    const cJSON *first = g->answers[i].group, *last = first;
    bool together = true;
    for (size_t k = i; k < g->n; k++) {
        const cJSON *group = g->answers[k].group;
        if (!group || !is_same_group(group, first)) continue;
        if (number(group, "epoch") > number(last, "epoch")) last = group;
        together &= is_true(group, "together");
    }
    const int n = cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(last, "members"));
    buf_printf(out, "\ngroup at %s: ", text(first, "at"));
    if (n > 0 && n < number(last, "size")) buf_printf(out, "%d of ", n);
    buf_printf(out, "%.0f ranks, epoch %.0f, %s\n", number(last, "size"), number(last, "epoch"),
               together ? "together" : "apart");
}

/* The group of answer i, each of its ranks, and those that the node which was asked does not
 * know. */
static void draw_group(const struct status_groups *g, size_t i, struct buf *out)
{
    const cJSON *first = g->answers[i].group;
    const uint32_t size = (uint32_t)number(first, "size");
    draw_heading(g, i, out);
    for (uint32_t rank = 0; rank < size; rank++) {
        const struct answer *found = NULL;
        for (size_t k = i; k < g->n && !found; k++)
            if (g->answers[k].group && is_same_group(g->answers[k].group, first) &&
                number(g->answers[k].group, "rank") == rank)
                found = &g->answers[k];
        draw_rank(found, rank, out);
    }
}

void status_groups_draw(const struct status_groups *g, struct buf *out)
{
    for (size_t i = 0; g && i < g->n; i++) {
        bool is_new = g->answers[i].group != NULL;
        for (size_t k = 0; k < i && is_new; k++)
            is_new = !g->answers[k].group ||
                     !is_same_group(g->answers[k].group, g->answers[i].group);
        if (is_new) draw_group(g, i, out);
    }
}
