/* node_ep.c - what a node's ep objects (kernels/ep/ep.h) have in common, and which backend brings
 * rows to the experts of other ranks: peer between GPUs; between CPUs shm if all are on one host
 * and see each other's processes, else ucx, unless --all2all-backend says it. All ranks tell each
 * other where they are and choose alike. Thread: a worker. */
#include <unistd.h>

#include "deploy/node/node_internal.h"
#include "kernels/host/host_id.h"
#include "shared/base/mem.h"

/* How long a rank waits in an exchange before it gives the group up. Links tell of a lost rank much
 * earlier: this is for a mistake in which all wait. */
enum { STEP_WAIT_MS = 300000 };

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
    int32_t pid, sees_all; /* sees_all: it can open the memory of all others */
};

static bool are_on_one_host(const struct place_of_rank *all, int32_t size)
{
    for (int32_t r = 1; r < size; r++)
        if (!host_id_same(&all[r].host, &all[0].host) || all[r].domain != all[0].domain)
            return false;
    return true;
}

static bool sees_all(const struct place_of_rank *all, int32_t size, const struct host_id *mine)
{
    for (int32_t r = 0; r < size; r++)
        if (!host_sees_process(mine, all[r].pid)) return false;
    return true;
}

/* Can all ranks open each other's memory? They answer alike, as they are told the same. */
static enum status ask_for_shm(struct ep_config *c, struct place_of_rank *mine,
                               struct place_of_rank *all, bool *can, struct err *err)
{
    TRY(c->exchange(c->exchange_arg, mine, sizeof *mine, all, err));
    *can = are_on_one_host(all, c->size);
    if (!*can) return OK;
    mine->sees_all = sees_all(all, c->size, &mine->host);
    TRY(c->exchange(c->exchange_arg, mine, sizeof *mine, all, err));
    for (int32_t r = 0; r < c->size; r++) *can = *can && all[r].sees_all;
    return OK;
}

/* Chooses c->backend together with the other ranks, by c->exchange; one that --all2all-backend
 * names is the same on all, since it is one of their terms (node_group_awaits). */
static enum status choose_backend(const struct node *n, struct ep_config *c, struct err *err)
{
    struct place_of_rank mine = { .domain = n->o.group.domain, .pid = getpid() };
    bool can = false;
    c->domain = n->o.group.domain;
    if (n->o.group.backend) c->backend = n->o.group.backend;
    if (n->o.group.backend || c->size == 1) return OK;
    mine.host = host_id_or_alone();
    struct place_of_rank *all = MEM_ARRAY(struct place_of_rank, (size_t)c->size);
    const enum status st = ask_for_shm(c, &mine, all, &can, err);
    c->backend = can ? "shm" : "ucx";
    mem_free(all);
    return st;
}

/* On GPUs rows go from one to the other, and what the hosts tell each other through an object of
 * their own. LIMIT: GPUs of one host. */
enum status node_ep_create_on_gpu(const struct node *n, struct ep_config *c, size_t words_bytes,
                                  struct ep **out, struct err *err)
{
    struct ep_config words = *c;
    words.device = kernel_host(engine_model(n->engine)->kernels)->device;
    words.collective_bytes = words_bytes;
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
    return c->device->is_host ? ep_create(c, out, err)
                              : node_ep_create_on_gpu(n, c, EP_WORDS_BYTES, out, err);
}
