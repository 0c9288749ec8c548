/* group_rig.h - ranks of a group over real sockets, whose threads exchange a few rounds instead of
 * making an ep object. Functions are static inline: a test uses those that it needs. */
#ifndef BATON_TESTS_UNIT_CLUSTER_GROUP_RIG_H
#define BATON_TESTS_UNIT_CLUSTER_GROUP_RIG_H

#include <pthread.h>
#include <stdatomic.h>

#include "shared/cluster/group.h"
#include "tests/fixtures/free_port.h"
#include "tests/unit/cluster/cluster_rig.h"

enum { RANKS = 5, ROUNDS = 4, LOST_MS = 1200, RETRY_MS = 20, GRACE_MS = 300 };

/* A rank, whose thread exchanges a few rounds instead of making an ep object. Its engine meets the
 * others as soon as it is given one, and gives one up when it is told. */
struct rank {
    struct cluster_rig *rig;
    struct peer_node *node;
    struct group *group;
    uint32_t rank, size;
    pthread_t thread;
    uint64_t preparing; /* the thread's epoch; 0: it does not run */
    uint32_t me, n;     /* of its group */
    uint32_t members[RANKS];
    enum status prepared;
    struct err err;
    bool fails;
    uint32_t fails_from; /* with so many ranks or more; 0: never */
    atomic_bool hangs;   /* the thread waits before its last round */
    uint64_t epoch;      /* together since; 0: not */
    uint32_t n_together; /* ranks of that group */
    uint64_t lost;       /* the last epoch that was lost */
    uint64_t to_report;  /* lost by the engine, reported in the next turn */
    char why[256];
    uint64_t n_bells, bell_epoch, bell_step;
    uint64_t leaving; /* in this epoch */
    struct loop_timer *leaver;
    uint32_t n_losses, n_left;
};

static inline void on_thread_done(void *arg)
{
    struct rank *r = arg;
    const uint64_t epoch = r->preparing;
    pthread_join(r->thread, NULL);
    r->preparing = 0;
    group_prepared(r->group, epoch, r->prepared, r->err.text);
    if (r->prepared != OK) return;
    if (r->lost == epoch) {
        group_report_lost(r->group, epoch, "as its engine says");
        return;
    }
    r->epoch = epoch;
    r->n_together = r->n;
    group_joined(r->group, epoch);
}

/* Every round has another size, and says whose it is. */
static inline enum status exchange_rounds(struct rank *r, struct err *err)
{
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const size_t bytes = 8 + 40 * (size_t)round;
        uint8_t mine[200], all[RANKS * 200];
        memset(mine, (int)(16 * round + r->rank + 1), bytes);
        while (round == ROUNDS - 1 && atomic_load(&r->hangs)) usleep(1000);
        if (r->fails || (r->fails_from && r->n >= r->fails_from))
            return err_set(err, ERR_NOMEM, "rank %u has no memory", r->rank);
        TRY(group_exchange(r->group, mine, bytes, all, err));
        for (uint32_t i = 0; i < r->n; i++)
            for (size_t b = 0; b < bytes; b++)
                CHECK_EQ_INT(all[i * bytes + b], 16 * round + r->members[i] + 1);
    }
    return OK;
}

static inline void *prepare(void *arg)
{
    struct rank *r = arg;
    r->prepared = exchange_rounds(r, &r->err);
    CHECK_OK(loop_post(r->rig->loop, on_thread_done, r));
    return NULL;
}

/* The placement says who is in the group, and who was in the one before. */
static inline void place(void *arg, struct group_roster *next, const struct group_roster *before)
{
    (void)arg;
    for (uint32_t i = 0; i < next->n; i++)
        buf_printf(&next->placement, "%u", next->members[i].rank);
    buf_printf(&next->placement, "<%u", before->n);
}

static inline void on_prepare(void *arg, const struct group_roster *next, uint32_t me)
{
    struct rank *r = arg;
    CHECK(!r->preparing && next->epoch && next->members[me].rank == r->rank);
    r->preparing = next->epoch;
    r->me = me;
    r->n = next->n;
    for (uint32_t i = 0; i < next->n; i++) {
        r->members[i] = next->members[i].rank;
        CHECK_EQ_INT(next->placement.data[i] - '0', r->members[i]);
    }
    CHECK(pthread_create(&r->thread, NULL, prepare, r) == 0);
}

static inline void engine_has_left(void *arg)
{
    struct rank *r = arg;
    loop_timer_free(r->leaver);
    r->leaver = NULL;
    r->epoch = 0;
    group_has_left(r->group, r->leaving);
}

/* Its engine leaves when the others have the next group. */
static inline void on_leave(void *arg, uint64_t epoch)
{
    struct rank *r = arg;
    r->leaving = epoch;
    r->leaver = loop_timer_start(r->rig->loop, 30, 0, engine_has_left, r);
}

static inline void on_left(void *arg) { ((struct rank *)arg)->n_left++; }

/* The engine gave its object up. */
static inline void engine_has_lost(void *arg)
{
    struct rank *r = arg;
    if (r->node) group_report_lost(r->group, r->to_report, "as its engine says");
}

static inline void on_lost_epoch(void *arg, uint64_t epoch, const char *why)
{
    struct rank *r = arg;
    const bool had = r->epoch == epoch;
    r->lost = epoch;
    r->n_losses++;
    snprintf(r->why, sizeof r->why, "%s", why);
    if (!had) return;
    r->epoch = 0;
    r->to_report = epoch;
    CHECK_OK(loop_post(r->rig->loop, engine_has_lost, r));
}

static inline void on_bell(void *arg, uint64_t epoch, uint64_t step)
{
    struct rank *r = arg;
    r->n_bells++;
    r->bell_epoch = epoch;
    r->bell_step = step;
}

static inline bool on_message(void *arg, const struct cluster_message *m)
{
    return group_on_message(((struct rank *)arg)->group, m);
}
static inline void on_lost(void *arg, uint64_t node, const char *why)
{
    group_on_lost(((struct rank *)arg)->group, node, why);
}
static inline void on_met(void *arg, uint32_t kind, uint64_t node)
{
    CHECK_EQ_INT(kind, GROUP_OF_EXPERTS);
    group_on_met(((struct rank *)arg)->group, node);
}

/* id: of the process, another one after each start. port: where ranks meet; 0: its own. */
static inline void open_rank(struct cluster_rig *rig, struct rank *r, uint32_t rank, uint32_t size,
                             uint32_t node_size, uint64_t id, uint16_t port, const char *host)
{
    *r = (struct rank){ .rig = rig, .rank = rank, .size = size };
    r->node = peer_open(rig, id,
                        (struct peer_options){ .lost_ms = LOST_MS,
                                               .port = rank == 0 && port ? port : free_port() });
    r->node->hook = on_message;
    r->node->lost_hook = on_lost;
    r->node->met_hook = on_met;
    r->node->arg = r;
    const struct group_options o = {
        .loop = rig->loop,
        .cluster = r->node->c,
        .metrics = rig->metrics,
        .node = id,
        .rank = rank,
        .size = size,
        .node_size = node_size,
        .host = host ? host : "127.0.0.1",
        .meet_host = "127.0.0.1",
        .meet_port = port ? port : cluster_port(r->node->c),
        .retry_ms = RETRY_MS,
        .grace_ms = GRACE_MS,
        .place = place,
        .on_prepare = on_prepare,
        .on_leave = on_leave,
        .on_left = on_left,
        .on_lost = on_lost_epoch,
        .on_bell = on_bell,
        .arg = r,
    };
    r->group = group_create(&o);
}

/* The process ends. */
static inline void close_rank(struct rank *r)
{
    atomic_store(&r->hangs, false);
    group_stop(r->group);
    if (r->preparing) RIG_WAIT(r->rig, !r->preparing);
    group_free(r->group);
    r->node->hook = NULL;
    r->node->lost_hook = NULL;
    r->node->met_hook = NULL;
    peer_close(r->node);
    r->node = NULL;
}

struct scene {
    struct cluster_rig rig;
    const char *host; /* at which the next rank says it is reached; NULL: the right one */
    struct rank ranks[RANKS];
    uint32_t size, node_size;
    uint16_t port;
};

static inline void open_scene(struct scene *s, uint32_t size)
{
    memset(s, 0, sizeof *s);
    s->size = size;
    s->port = free_port();
    cluster_rig_open(&s->rig);
}

static inline void start(struct scene *s, uint32_t rank, uint64_t id)
{
    open_rank(&s->rig, &s->ranks[rank], rank, s->size, s->node_size, id, s->port, s->host);
}

static inline void start_all(struct scene *s)
{
    for (uint32_t r = 0; r < s->size; r++) start(s, r, 100 + r);
    for (uint32_t r = 0; r < s->size; r++) group_ready(s->ranks[r].group, "tiny, f32");
}

static inline void close_scene(struct scene *s)
{
    for (uint32_t r = 0; r < s->size; r++)
        if (s->ranks[r].node) close_rank(&s->ranks[r]);
    cluster_rig_close(&s->rig);
}

/* Do the ranks that are there step in one group of all of them, of at least this epoch? */
static inline bool together(const struct scene *s, uint64_t epoch)
{
    uint32_t n = 0;
    uint64_t now = 0;
    for (uint32_t r = 0; r < s->size; r++) n += s->ranks[r].node != NULL;
    for (uint32_t r = 0; r < s->size; r++) {
        const struct rank *k = &s->ranks[r];
        if (!k->node) continue;
        if (!now) now = k->epoch;
        if (k->epoch < epoch || k->epoch != now || k->n_together != n) return false;
        const struct group_roster *roster = group_now(k->group);
        CHECK(roster->epoch == now && roster->n == n);
    }
    return now != 0;
}

/* Why do the ranks that are there step in the group of now? */
static inline void check_reason(const struct scene *s, enum group_reason want)
{
    for (uint32_t r = 0; r < s->size; r++)
        if (s->ranks[r].node)
            CHECK_EQ_STR(group_reason_name(group_now(s->ranks[r].group)->reason),
                         group_reason_name(want));
}

/* Groups joined for this reason, by all ranks together. */
static inline uint64_t n_joined(const struct scene *s, enum group_reason reason)
{
    char labels[64];
    snprintf(labels, sizeof labels, "of=\"experts\",reason=\"%s\"", group_reason_name(reason));
    return counter_value(metrics_counter(s->rig.metrics, "baton_group_epochs_total", labels, ""));
}

static inline const char *why_of(struct rank *r)
{
    static char why[GROUP_WHY_MAX];
    (void)group_describe(r->group, why, sizeof why);
    return why;
}

#endif
