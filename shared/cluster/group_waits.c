/* group_waits.c - whom a rank waits for: in a sentence for /ready, in its log, and, from the rank
 * that leads, to the others, which only know that they wait. Thread: loop. */
#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/cluster/group_internal.h"

enum {
    SAY_MS = 2500, /* ranks that are started together are rarely longer apart */
    NAMED_MAX = 8  /* ranks that a sentence names */
};

/* ---- sentences ---- */

/* What starts the rank; "" where this rank's own parent does, or nothing is known. */
static void describe_start(const struct group *g, uint32_t rank, const char *which, struct buf *out)
{
    const struct group_options *o = &g->o;
    const bool is_own = rank >= o->own_first && rank - o->own_first < o->n_own;
    if (o->rank_option && !is_own)
        buf_printf(out, " (%s %u starts %s)", o->rank_option, rank / o->node_size, which);
}

/* The ranks that are not there, and what starts the first of them; "": all are there. */
static void describe_missing(const struct group *g, bool names_start, struct buf *out)
{
    uint32_t n = 0, first = 0, i = 0;
    for (uint32_t r = 0; r < g->o.size; r++) {
        if (group_lead_has(g, r)) continue;
        if (n++ == 0) first = r;
    }
    if (n == 0) return;
    buf_printf(out, n > 1 ? "ranks %u" : "rank %u", first);
    for (uint32_t r = first + 1; r < g->o.size && i + 1 < NAMED_MAX; r++) {
        if (group_lead_has(g, r)) continue;
        i++;
        buf_printf(out, "%s%u", i + 1 == n ? " and " : ", ", r);
    }
    if (i + 1 < n) buf_printf(out, " and %u more", n - i - 1);
    buf_printf(out, " of %u %s not there", g->o.size, n > 1 ? "are" : "is");
    if (names_start) describe_start(g, first, n > 1 ? "the first" : "it", out);
}

static void describe_waiting(const struct group *g, char *why, size_t n)
{
    struct buf missing = { 0 };
    const char *refusal = group_lead_refusal(g), *more = refusal[0] ? refusal : g->why;
    if (group_leads(g)) describe_missing(g, !more[0], &missing);
    if (missing.len) snprintf(why, n, "%s%s%s", missing.data, more[0] ? "; " : "", more);
    else snprintf(why, n, "%s", g->why[0] ? g->why : "the rank that leads waits for other ranks");
    buf_release(&missing);
}

/* Whom the group goes on without. */
static void describe_together(const struct group *g, char *why, size_t n)
{
    snprintf(why, n, "%s", "");
    for (uint32_t r = 0; r < g->o.size && g->now.n < g->o.size; r++)
        if (group_roster_find(&g->now, r) < 0) {
            const char *refusal = group_lead_refusal(g);
            snprintf(why, n, "rank %u of %u %s, others have its experts%s%s", r, g->o.size,
                     group_lead_has_shut_out(g, r) ? "could not join and will be tried again"
                                                   : "is not there",
                     refusal[0] ? "; " : "", refusal);
            return;
        }
}

static void describe_looking(const struct group *g, char *why, size_t n)
{
    struct buf start = { 0 };
    describe_start(g, 0, "it there", &start);
    snprintf(why, n, "rank 0 of the group is not reached at %s:%u%s", g->o.meet_host,
             g->o.meet_port, start.len ? start.data : "");
    buf_release(&start);
}

enum group_state group_describe(const struct group *g, char *why, size_t n)
{
    if (g->running) {
        describe_together(g, why, n);
        return GROUP_TOGETHER;
    }
    if (g->preparing || g->given) {
        snprintf(why, n, "the ranks are joining");
        return GROUP_PREPARING;
    }
    if (g->leader.node) {
        describe_waiting(g, why, n);
        return GROUP_WAITING;
    }
    describe_looking(g, why, n);
    return GROUP_LOOKING;
}

/* ---- the log, and the other ranks ---- */

static void say(struct group *g, const char *why)
{
    uint32_t n_unlogged;
    if (log_repeats_due(&g->waits, why, clock_ms(), &n_unlogged))
        log_info("rank waits for others", "rank=%u of=%u why=\"%s\" repeats=%u", g->o.rank,
                 g->o.size, why, n_unlogged);
}

/* Each rank that waits is told once what is new. */
static void tell(struct group *g, const char *why)
{
    Baton__GroupLost m = BATON__GROUP_LOST__INIT;
    const uint64_t text = hash_64(why, strlen(why), 0);
    m.why = (char *)why; /* is only read */
    for (uint32_t r = 0; r < g->o.size; r++) {
        struct group_seat *s = &g->lead.seats[r];
        if (!s->at.node || s->at.node == g->o.node || s->running || s->told == text) continue;
        s->told = text;
        group_send(g, s->at.node, FRAME_GROUP_LOST, FROM_LEADER, &m.base);
    }
}

void group_waits_take(struct group *g, const char *why)
{
    if (!g->running && !g->preparing && !g->given && !g->is_refused)
        snprintf(g->why, sizeof g->why, "%s", why);
}

void group_waits_tick(struct group *g)
{
    char why[GROUP_WHY_MAX];
    const enum group_state state = group_describe(g, why, sizeof why);
    if (!g->is_ready || g->drains || (state != GROUP_WAITING && state != GROUP_LOOKING)) {
        g->t_waits_ms = 0;
        return;
    }
    if (!g->t_waits_ms) g->t_waits_ms = clock_ms();
    if (clock_ms() - g->t_waits_ms >= SAY_MS) say(g, why);
    if (group_leads(g) && group_lead_misses(g)) tell(g, why);
}
