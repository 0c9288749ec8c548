/* kv_parts.c - see kv_parts.h. Pure; thread: any. */
#include "shared/kv/kv_parts.h"

#include <inttypes.h>

struct kv_parts_load {
    const struct kv_layout *senders;
    uint32_t n_senders;
    uint64_t spread;
    uint32_t n_heads[KV_RANKS_MAX]; /* that each sends so far */
};

struct kv_layout kv_layout_of_rank(const struct kv_layout *l, uint32_t rank, uint32_t size)
{
    struct kv_layout out = *l;
    out.tp_rank = rank;
    out.tp_size = size;
    if (l->latent) return out;
    out.first_head = rank * l->model_kv_heads / size;
    out.n_kv_heads = l->model_kv_heads > size ? l->model_kv_heads / size : 1;
    return out;
}

uint64_t kv_layout_hash_of_model(const struct kv_layout *l)
{
    const struct kv_layout whole = kv_layout_of_rank(l, 0, 1);
    return kv_layout_hash(&whole);
}

static bool holds(const struct kv_layout *l, uint32_t head)
{
    return head >= l->first_head && head - l->first_head < l->n_kv_heads;
}

/* The sender of a head, or n_senders if none holds it. Of those that send equally many, `spread`
 * turns through the holders. */
static uint32_t choose(const struct kv_parts_load *c, uint32_t head)
{
    uint32_t n = 0, best = c->n_senders, best_turn = 0, i_holder = 0;
    for (uint32_t s = 0; s < c->n_senders; s++) n += holds(&c->senders[s], head);
    for (uint32_t s = 0; s < c->n_senders; s++) {
        if (!holds(&c->senders[s], head)) continue;
        uint32_t turn = (i_holder++ + n - (uint32_t)(c->spread % n)) % n;
        bool less = best == c->n_senders || c->n_heads[s] < c->n_heads[best] ||
                    (c->n_heads[s] == c->n_heads[best] && turn < best_turn);
        if (less) best = s, best_turn = turn;
    }
    return best;
}

static enum status add_head(struct kv_parts *out, uint32_t sender, uint32_t receiver, uint32_t head,
                            struct err *err)
{
    struct kv_part *last = out->n ? &out->part[out->n - 1] : NULL;
    if (last && last->sender == sender && last->receiver == receiver &&
        last->first_head + last->n_heads == head) {
        last->n_heads++;
        return OK;
    }
    if (out->n == KV_PARTS_MAX)
        return err_set(err, ERR_PEER_MISMATCH,
                       "the KV of one prompt would move in more than %d parts", KV_PARTS_MAX);
    out->part[out->n++] = (struct kv_part){ sender, receiver, head, 1 };
    return OK;
}

enum status kv_parts_plan(const struct kv_layout *senders, uint32_t n_senders,
                          const struct kv_layout *receivers, uint32_t n_receivers, uint64_t spread,
                          struct kv_parts *out, struct err *err)
{
    uint32_t more = n_senders > n_receivers ? n_senders : n_receivers;
    if (n_senders == 0 || n_receivers == 0 || more > KV_RANKS_MAX)
        return err_set(err, ERR_INVALID,
                       "KV cannot move between %" PRIu32 " and %" PRIu32
                       " ranks: a node has 1 to %d",
                       n_senders, n_receivers, KV_RANKS_MAX);
    struct kv_parts_load c = { .senders = senders, .n_senders = n_senders, .spread = spread };
    struct kv_parts parts = { 0 };
    for (uint32_t r = 0; r < n_receivers; r++) {
        const struct kv_layout *l = &receivers[r];
        for (uint32_t head = l->first_head; head < l->first_head + l->n_kv_heads; head++) {
            uint32_t s = l->latent ? (uint32_t)(spread % n_senders) : choose(&c, head);
            if (s == n_senders)
                return err_set(err, ERR_PEER_MISMATCH,
                               "no rank of the sender holds KV head %" PRIu32 " of %" PRIu32, head,
                               l->model_kv_heads);
            c.n_heads[s]++;
            TRY(add_head(&parts, s, r, head, err));
        }
    }
    *out = parts;
    return OK;
}
