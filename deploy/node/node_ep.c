/* node_ep.c - what a node's ep objects (kernels/ep/ep.h) have in common, and which backend brings
 * rows to the experts of other ranks: peer between GPUs; between CPUs shm if all are on one host,
 * else ucx, unless --all2all-backend says it. All ranks tell each other where they are and choose
 * alike.
 * Thread: a worker. */
#include <string.h>

#include "deploy/node/node_internal.h"
#include "kernels/host/host_id.h"
#include "shared/base/mem.h"

/* How long a rank waits in an exchange before it gives the group up. Links tell of a lost rank much
 * earlier: this is for a mistake in which all wait. */
enum { STEP_WAIT_MS = 300000, BACKEND_NAME = 16 };

struct ep_config node_ep_config(const struct node *n, struct group *g, uint32_t rank, uint32_t size)
{
    return (struct ep_config){
        .backend = "shm",
        .device = engine_device(n->engine),
        .rank = (int32_t)rank,
        .size = (int32_t)size,
        .send = DTYPE_F32,
        .back = DTYPE_F32,
        .timeout_ms = STEP_WAIT_MS,
        .exchange = group_exchange,
        .exchange_arg = g,
    };
}

/* What ranks tell each other before they choose. */
struct place_of_rank {
    struct host_id host;
    uint64_t domain;
    char backend[BACKEND_NAME]; /* that --all2all-backend names; "": none */
};

static enum status choose(const struct place_of_rank *all, uint32_t size, const char **out,
                          struct err *err)
{
    bool one_host = true;
    for (uint32_t r = 1; r < size; r++) {
        if (strncmp(all[r].backend, all[0].backend, BACKEND_NAME) != 0)
            return err_set(err, ERR_PEER_MISMATCH,
                           "--all2all-backend is not the same on all ranks: '%.15s' and '%.15s'",
                           all[0].backend, all[r].backend);
        one_host = one_host && host_id_same(&all[r].host, &all[0].host) &&
                   all[r].domain == all[0].domain;
    }
    *out = one_host ? "shm" : "ucx";
    return OK;
}

/* Chooses c->backend together with the other ranks, by c->exchange. */
static enum status choose_backend(const struct node *n, struct ep_config *c, struct err *err)
{
    const char *forced = n->o.group.backend;
    struct place_of_rank mine = { .domain = n->o.group.domain };
    c->domain = n->o.group.domain;
    if (c->size == 1) return OK;
    struct place_of_rank *all = MEM_ARRAY(struct place_of_rank, (size_t)c->size);
    if (forced) strncpy(mine.backend, forced, BACKEND_NAME - 1);
    enum status st = host_id_read(&mine.host, err);
    if (st == OK) st = c->exchange(c->exchange_arg, &mine, sizeof mine, all, err);
    if (st == OK) st = choose(all, (uint32_t)c->size, &c->backend, err);
    mem_free(all);
    if (st == OK && forced) c->backend = forced;
    return st;
}

/* On GPUs rows go from one to the other, and what the hosts tell each other through an object of
 * their own. LIMIT: GPUs of one host. */
static enum status create_on_gpu(const struct node *n, struct ep_config *c, struct ep **out,
                                 struct err *err)
{
    struct ep_config words = *c;
    words.device = kernel_host(engine_model(n->engine)->kernels)->device;
    words.collective_bytes = EP_WORDS_BYTES;
    words.placement = (struct ep_placement){ 0 };
    TRY(ep_create(&words, &c->words, err));
    c->backend = "peer";
    const enum status st = ep_create(c, out, err);
    if (st != OK) ep_discard(c->words);
    return st;
}

enum status node_ep_create(const struct node *n, struct ep_config *c, struct ep **out,
                           struct err *err)
{
    TRY(choose_backend(n, c, err));
    return c->device->is_host ? ep_create(c, out, err) : create_on_gpu(n, c, out, err);
}
