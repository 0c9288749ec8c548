/* lane_cpu.c - a lane of the processor: everything is over when its call returns. Thread: one per lane, any. */
#include "kernels/lane.h"

#include <string.h>

#include "kernels/cpu/device_cpu.h"
#include "shared/base/hash.h"
#include "shared/base/mem.h"

static void close_lane(struct lane *l) { mem_free(l); }

static enum status after(struct lane *l, uint64_t mark)
{
    (void)l, (void)mark; /* a mark of the processor is behind us */
    return OK;
}

static enum status copy(struct lane *l, const struct lane_runs *c)
{
    (void)l;
    for (uint32_t i = 0; i < c->n; i++) memcpy((char *)c->to + i * c->to_stride, (const char *)c->from + i * c->from_stride, c->bytes);
    return OK;
}

static enum status gather(struct lane *l, const struct lane_pair *pairs, uint32_t n)
{
    (void)l;
    for (uint32_t i = 0; i < n; i++)
        if (pairs[i].bytes > 0) memcpy(pairs[i].to, pairs[i].from, pairs[i].bytes);
    return OK;
}

static uint64_t sum_of(const struct lane_piece *p)
{
    if (p->n_runs == 1) return hash_64(p->at, p->run_bytes, 0);
    char *all = mem_calloc(p->n_runs, p->run_bytes);
    for (uint32_t i = 0; i < p->n_runs; i++) memcpy(all + (size_t)i * p->run_bytes, (const char *)p->at + i * p->stride, p->run_bytes);
    uint64_t sum = hash_64(all, (size_t)p->run_bytes * p->n_runs, 0);
    mem_free(all);
    return sum;
}

static enum status sums(struct lane *l, const struct lane_piece *pieces, uint32_t n, uint64_t *out)
{
    (void)l;
    for (uint32_t i = 0; i < n; i++) out[i] = sum_of(&pieces[i]);
    return OK;
}

static enum status tell(struct lane *l, void (*fn)(void *arg), void *arg)
{
    (void)l;
    fn(arg);
    return OK;
}

static enum status wait(struct lane *l)
{
    (void)l;
    return OK;
}

static const struct lane_ops LANE_CPU = { .close = close_lane, .after = after, .copy = copy, .gather = gather, .sums = sums, .tell = tell, .wait = wait };

enum status lane_cpu_open(struct device *d, struct lane **out, struct err *err)
{
    (void)d;
    struct lane *l = mem_try_calloc(1, sizeof *l);
    if (!l) return err_set(err, ERR_NOMEM, "no memory for a lane");
    l->ops = &LANE_CPU;
    *out = l;
    return OK;
}
