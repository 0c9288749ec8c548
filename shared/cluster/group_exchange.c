/* group_exchange.c - what the members of a group that is being prepared exchange, so that each can
 * make its ep object: the thread that makes it hands its bytes to the loop, the leader gives those
 * of all to everybody (group_lead.c). `lock` guards what they share.
 * Thread: loop, except group_exchange and group_prepares. */
#include <string.h>
#include <time.h>

#include "shared/cluster/group_internal.h"

/* Links tell of a rank that is lost; others may read experts from a slow disk meanwhile. */
enum { EXCHANGE_MS = 600000 };

void group_round_init(struct group_round *r)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void group_round_release(struct group_round *r)
{
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
}

void group_round_set(struct group *g, uint64_t epoch, uint32_t n_members, bool lives)
{
    struct group_round *r = &g->round;
    pthread_mutex_lock(&r->lock);
    r->epoch = epoch;
    r->n_members = n_members;
    r->lives = lives;
    r->round = 0;
    r->is_sent = r->is_done = false;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void send_blob(void *arg)
{
    struct group *g = arg;
    struct group_round *r = &g->round;
    Baton__GroupBlob m = BATON__GROUP_BLOB__INIT;
    uint8_t bytes[GROUP_BLOB_MAX];
    pthread_mutex_lock(&r->lock);
    const bool due = r->lives && r->is_sent && !r->is_done && !r->stopped;
    m.epoch = r->epoch;
    m.round = r->round;
    m.data = (ProtobufCBinaryData){ r->bytes, bytes };
    memcpy(bytes, r->mine, r->bytes);
    pthread_mutex_unlock(&r->lock);
    if (due) group_send(g, g->leader.node, FRAME_GROUP_BLOB, TO_LEADER, &m.base);
}

void group_round_take(struct group *g, const Baton__GroupBlob *m)
{
    struct group_round *r = &g->round;
    pthread_mutex_lock(&r->lock);
    if (r->lives && m->epoch == r->epoch && m->round == r->round && r->is_sent && !r->is_done &&
        m->data.len == r->bytes * r->n_members) {
        memcpy(r->all, m->data.data, m->data.len);
        r->is_done = true;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
}

static void wait_for_blobs(struct group_round *r)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += EXCHANGE_MS / 1000;
    while (r->lives && !r->stopped && !r->is_done)
        if (pthread_cond_timedwait(&r->changed, &r->lock, &until) != 0) break;
}

enum status group_exchange(void *arg, const void *mine, size_t bytes, void *all, struct err *err)
{
    struct group *g = arg;
    struct group_round *r = &g->round;
    if (bytes > GROUP_BLOB_MAX)
        return err_set(err, ERR_TOO_LONG, "%zu bytes for an exchange of at most %d", bytes,
                       GROUP_BLOB_MAX);
    pthread_mutex_lock(&r->lock);
    r->bytes = bytes;
    r->all = all;
    memcpy(r->mine, mine, bytes);
    r->is_sent = true;
    r->is_done = false;
    pthread_mutex_unlock(&r->lock);
    const enum status posted = loop_post(g->o.loop, send_blob, g);
    pthread_mutex_lock(&r->lock);
    if (posted == OK) wait_for_blobs(r);
    const bool done = r->is_done, lives = r->lives, stopped = r->stopped;
    r->is_sent = false;
    r->round++;
    pthread_mutex_unlock(&r->lock);
    if (done) return OK;
    return err_set(err, ERR_PEER_LOST, "%s",
                   stopped  ? "this rank stops"
                   : !lives ? "the group was given up meanwhile"
                            : "not all ranks came to the exchange in time");
}

bool group_prepares(struct group *g, uint64_t epoch)
{
    struct group_round *r = &g->round;
    pthread_mutex_lock(&r->lock);
    const bool yes = r->lives && !r->stopped && r->epoch == epoch;
    pthread_mutex_unlock(&r->lock);
    return yes;
}

void group_stop(struct group *g)
{
    struct group_round *r = &g->round;
    pthread_mutex_lock(&r->lock);
    r->stopped = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}
