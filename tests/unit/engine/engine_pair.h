/* engine_pair.h - two engines of one process: one computes prompts, the other goes on with the KV
 * that it is given. What a transport does is done at once, in the callback of the first.
 *
 * Thread: the test's; KV is copied on the thread of the first engine. */
#ifndef BATON_TESTS_UNIT_ENGINE_ENGINE_PAIR_H
#define BATON_TESTS_UNIT_ENGINE_ENGINE_PAIR_H

#include "tests/unit/engine/engine_rig.h"

enum { PAIR_REQUESTS_MAX = 32, PAIR_LAYERS_MAX = 8 };

struct pair {
    struct rig prefill, decode;
    int32_t blocks[PAIR_REQUESTS_MAX][RIG_BLOCKS_MAX]; /* reserved in decode, by request id */
    uint32_t n_cached[PAIR_REQUESTS_MAX];
    uint32_t end[PAIR_REQUESTS_MAX][PAIR_LAYERS_MAX]; /* per layer: announced so far */
    size_t bytes;
};

static struct pair *the_pair; /* of the running case; each case is a process of its own */

/* Copies the layer to the reserved blocks, if that engine has it. */
static inline void pair_copy_kv(void *arg, uint64_t id, uint32_t layer, uint32_t begin,
                                uint32_t end, const int32_t *blocks, uint64_t event)
{
    struct pair *p = the_pair;
    const struct kv_layout *from = engine_kv_layout(p->prefill.engine),
                           *to = engine_kv_layout(p->decode.engine);
    char *src = engine_kv_memory(p->prefill.engine)->ptr,
         *dst = engine_kv_memory(p->decode.engine)->ptr;
    (void)arg;
    CHECK_EQ_INT(event, 0); /* the CPU has computed the layer */
    CHECK_EQ_INT(begin, p->end[id][layer]);
    p->end[id][layer] = end;
    if (layer >= to->n_layers) return;
    for (uint32_t b = begin / RIG_BLOCK_TOKENS; b * RIG_BLOCK_TOKENS < end; b++) {
        if (b < p->n_cached[id] / RIG_BLOCK_TOKENS) continue;
        memcpy(dst + kv_layout_offset(to, layer, (uint32_t)p->blocks[id][b]),
               src + kv_layout_offset(from, layer, (uint32_t)blocks[b]), kv_layout_piece_bytes(to));
        p->bytes += kv_layout_piece_bytes(to);
    }
}

static inline void pair_open(struct pair *p, struct rig_options prefill, struct rig_options decode)
{
    memset(p, 0, sizeof *p);
    the_pair = p;
    prefill.on_kv_ready = pair_copy_kv;
    rig_open(&p->prefill, prefill);
    rig_open(&p->decode, decode);
}

static inline void pair_close(struct pair *p)
{
    rig_close(&p->prefill);
    rig_close(&p->decode);
}

/* Reserves, prefills and activates. The caller gathers the answers of decode. */
static inline void pair_start(struct pair *p, struct engine_request q)
{
    CHECK_OK(engine_reserve(p->decode.engine, &q));
    struct rig_event e;
    while ((e = rig_next(&p->decode)).ev.kind != ENGINE_RESERVED || e.ev.id != q.id) continue;
    CHECK_OK(e.ev.status);
    CHECK_EQ_INT(e.ev.n_blocks, (q.n_tokens + RIG_BLOCK_TOKENS - 1) / RIG_BLOCK_TOKENS);
    memcpy(p->blocks[q.id], e.blocks, e.ev.n_blocks * sizeof *e.blocks);
    p->n_cached[q.id] = e.ev.n_cached;
    memset(p->end[q.id], 0, sizeof p->end[q.id]);
    q.prefill_only = true;
    struct answer *a = rig_run(&p->prefill, &q, 1);
    CHECK_EQ_INT(a->end.finish, FINISH_PREFILLED);
    CHECK_EQ_INT(a->n_out, 1);
    for (uint32_t layer = 0; layer < engine_kv_layout(p->prefill.engine)->n_layers; layer++)
        CHECK_EQ_INT(p->end[q.id][layer], q.n_tokens);
    CHECK_OK(engine_release(p->prefill.engine, q.id));
    CHECK_OK(engine_activate(p->decode.engine, q.id, &a->out[0],
                             p->prefill.n_hidden ? p->prefill.hidden : NULL, p->prefill.n_hidden));
    mem_free(a);
}

#endif
