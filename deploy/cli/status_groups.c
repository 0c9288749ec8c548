/* status_groups.c - see status_groups.h.
 *
 *     group at 127.0.0.1:29550: 3 of 4 ranks, epoch 3, together (after a loss), 51,200 rows/s, ..
 *       rank 2 of 4 is not there, others have its experts
 *       rank 0  10.0.0.1:20001  22 experts, leads, 21000 rows/s, waits 3 %
 *       rank 1  10.0.0.1:20002  22 experts, 20100 rows/s, waits 31 %, mostly for rank 0
 *       rank 2  -               not in the directory
 *
 *     PACED: 10.0.0.1:8000 by h200.json (one H200): its times are not those of its machine
 */
#include "deploy/cli/status_groups.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/address/host_port.h"
#include "shared/base/mem.h"

enum { TIMEOUT_MS = 1500, RANKS_MAX = 4096 };

struct answer {
    struct status_groups *owner;
    char name[HOST_PORT_TEXT_MAX];
    /* By its record, or, of an earlier version, by its answer; key "": it is in no group. */
    char key[HOST_PORT_TEXT_MAX];
    uint32_t rank, size, n_followers;
    cJSON *group; /* owned; NULL: it has none, or did not answer */
    cJSON *pace;  /* owned; NULL: its steps last as long as they take, or it did not answer */
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

static void take_group(struct answer *a, const cJSON *o, const char *key, const char *rank,
                       const char *size)
{
    const double r = number(o, rank), n = number(o, size);
    if (!(n >= 1 && n <= RANKS_MAX && r >= 0 && r < n)) return;
    snprintf(a->key, sizeof a->key, "%s", key);
    a->rank = (uint32_t)r;
    a->size = (uint32_t)n;
}

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct answer *a = arg;
    if (st == OK && http_status == 200) {
        cJSON *doc = cJSON_ParseWithLength(body.p, body.n);
        a->group = cJSON_DetachItemFromObjectCaseSensitive(doc, "group");
        a->pace = cJSON_DetachItemFromObjectCaseSensitive(doc, "pace");
        cJSON_Delete(doc);
        if (a->group && !a->key[0]) take_group(a, a->group, text(a->group, "at"), "rank", "size");
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
        take_group(a, node, text(node, "group"), "group_rank", "group_size");
        a->n_followers = (uint32_t)cJSON_GetArraySize(
            cJSON_GetObjectItemCaseSensitive(node, "followers"));
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
    for (size_t i = 0; i < g->n; i++) {
        cJSON_Delete(g->answers[i].group);
        cJSON_Delete(g->answers[i].pace);
    }
    mem_free(g->answers);
    mem_free(g);
}

/* ---- drawing ---- */

static bool is_same_group(const struct answer *a, const struct answer *b)
{
    return strcmp(a->key, b->key) == 0 && a->size == b->size;
}

static bool is_true(const cJSON *o, const char *name)
{
    return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(o, name)) != 0;
}

/* Who has seen the group's last epoch; NULL: nobody has answered. */
static const cJSON *find_last(const struct status_groups *g, size_t i)
{
    const cJSON *last = NULL;
    for (size_t k = i; k < g->n; k++) {
        const cJSON *group = g->answers[k].group;
        if (group && is_same_group(&g->answers[k], &g->answers[i]) &&
            (!last || number(group, "epoch") > number(last, "epoch")))
            last = group;
    }
    return last;
}

static bool is_together(const struct status_groups *g, size_t i)
{
    for (size_t k = i; k < g->n; k++)
        if (g->answers[k].group && is_same_group(&g->answers[k], &g->answers[i]) &&
            !is_true(g->answers[k].group, "together"))
            return false;
    return true;
}

/* Of all ranks, by the one that was asked. */
static double sum_rows(const cJSON *group)
{
    const cJSON *r;
    double rows = 0;
    cJSON_ArrayForEach (r, cJSON_GetObjectItemCaseSensitive(group, "ranks"))
        rows += number(r, "rows_per_s");
    return rows;
}

static void draw_heading(const struct status_groups *g, size_t i, const cJSON *last,
                         struct buf *out)
{
    const struct answer *a = &g->answers[i];
    buf_printf(out, "\ngroup at %s: ", last ? text(last, "at") : a->key);
    if (!last) {
        buf_printf(out, "%u ranks, none of which answers\n", a->size);
        return;
    }
    const int n = cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(last, "members"));
    const char *reason = text(last, "reason");
    const double rows = sum_rows(last);
    if (n > 0 && (uint32_t)n < a->size) buf_printf(out, "%d of ", n);
    buf_printf(out, "%u ranks, epoch %.0f, %s", a->size, number(last, "epoch"),
               is_together(g, i) ? "together" : "apart");
    if (reason[0] && strcmp(reason, "start") != 0) buf_printf(out, " (after a %s)", reason);
    if (rows > 0)
        buf_printf(out, ", %.0f rows/s by %s, the busiest rank's %.2f times the mean", rows,
                   text(last, "backend"), number(last, "imbalance"));
    buf_add_char(out, '\n');
    if (is_true(last, "together") && text(last, "why")[0])
        buf_printf(out, "  %s\n", text(last, "why"));
}

/* What others say of a rank; NULL: nothing. */
static const cJSON *find_rates(const cJSON *last, uint32_t rank)
{
    const cJSON *r;
    cJSON_ArrayForEach (r, cJSON_GetObjectItemCaseSensitive(last, "ranks"))
        if (number(r, "rank") == rank) return r;
    return NULL;
}

/* One that is gone is waited for no more, though it was within the last second. */
static bool is_member(const cJSON *last, double rank)
{
    const cJSON *r;
    cJSON_ArrayForEach (r, cJSON_GetObjectItemCaseSensitive(last, "members"))
        if (r->valuedouble == rank) return true;
    return false;
}

/* Of a group that computes: ranks that meet once, to begin, have waited too. */
static void draw_rates(const struct answer *a, uint32_t rank, const cJSON *last, struct buf *out)
{
    const cJSON *rates = find_rates(last, rank);
    const cJSON *of = a ? cJSON_GetObjectItemCaseSensitive(a->group, "waits_for") : NULL;
    if (!rates || sum_rows(last) <= 0) return;
    buf_printf(out, ", %.0f rows/s, waits %.0f %%", number(rates, "rows_per_s"),
               100 * number(rates, "waits"));
    if (cJSON_IsNumber(of) && is_member(last, of->valuedouble))
        buf_printf(out, ", mostly for rank %.0f", of->valuedouble);
}

/* a: the node that the rank is, or the first rank of; NULL: nobody in the directory. */
static void draw_rank(const struct answer *a, uint32_t rank, const cJSON *last, struct buf *out)
{
    const bool follows = a && a->rank != rank;
    const cJSON *group = a && !follows ? a->group : NULL;
    const char *why = text(group, "why");
    buf_printf(out, "  rank %-4u %-24s ", rank, a ? a->name : "-");
    if (!a) buf_add_c(out, "not in the directory");
    else if (follows) buf_printf(out, "follows rank %u", a->rank);
    else if (!group) buf_add_c(out, "does not answer");
    else
        buf_printf(out, "%.0f experts%s", number(group, "experts"),
                   is_true(group, "leads") ? ", leads" : "");
    draw_rates(follows ? NULL : a, rank, last, out);
    /* What the others have said too stands below the group's first line. */
    const bool is_told = is_true(group, "together") && strcmp(why, text(last, "why")) == 0;
    if (why[0] && !is_told)
        buf_printf(out, "; %s%s", is_true(group, "together") ? "" : "waits: ", why);
    buf_add_char(out, '\n');
}

/* The group of answer i, each of its ranks, and those that the node which was asked does not
 * know. */
static void draw_group(const struct status_groups *g, size_t i, struct buf *out)
{
    const struct answer *first = &g->answers[i];
    const cJSON *last = find_last(g, i);
    draw_heading(g, i, last, out);
    for (uint32_t rank = 0; rank < first->size; rank++) {
        const struct answer *found = NULL;
        for (size_t k = i; k < g->n && !found; k++) {
            const struct answer *a = &g->answers[k];
            if (is_same_group(a, first) && a->rank <= rank && rank - a->rank <= a->n_followers)
                found = a;
        }
        draw_rank(found, rank, last, out);
    }
}

static void draw_paced(const struct status_groups *g, struct buf *out)
{
    bool is_first = true;
    for (size_t i = 0; i < g->n; i++) {
        const cJSON *pace = g->answers[i].pace;
        if (!pace) continue;
        buf_printf(out, "%sPACED: %s by %s", is_first ? "\n" : "", g->answers[i].name,
                   text(pace, "file"));
        if (text(pace, "about")[0]) buf_printf(out, " (%s)", text(pace, "about"));
        buf_add_c(out, ": its times are not those of its machine\n");
        is_first = false;
    }
}

void status_groups_draw(const struct status_groups *g, struct buf *out)
{
    for (size_t i = 0; g && i < g->n; i++) {
        bool is_new = g->answers[i].key[0] != 0;
        for (size_t k = 0; k < i && is_new; k++)
            is_new = !is_same_group(&g->answers[k], &g->answers[i]);
        if (is_new) draw_group(g, i, out);
    }
    if (g) draw_paced(g, out);
}
