/* hedge.c - see hedge.h. */
#include "scheduler/hedge/hedge.h"

#include <string.h>

#include "scheduler/request.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    FIRST,
    SECOND,
    NEITHER,
    LOOK_MS = 100 /* until other nodes are looked for again that have room */
};

struct hedge {
    struct entry *entry;
    struct gen_sink client;
    uint64_t id; /* the first's, which the client knows */
    uint32_t after_ms;
    uint32_t n_prompt_lp; /* positions that the client has */
    uint64_t look_ms;     /* not looked for nodes before */
    bool due, started;    /* the second, ... */
    bool began;           /* ... which has got its nodes, or goes on */
    uint32_t n_pending;   /* its tokens in entry.n_pending_tokens */
    int winner;
    struct hedge_side {
        struct hedge *hedge;
        struct request *r; /* NULL: not started, or ended */
    } sides[2];
};

/* Its tokens are paid for, or never will be. */
static void settle(struct hedge *h)
{
    h->entry->n_pending_tokens -= h->n_pending;
    h->n_pending = 0;
}

static int index_of(const struct request *r) { return r == r->hedge->sides[SECOND].r; }

static struct request *other_of(const struct request *r) { return r->hedge->sides[!index_of(r)].r; }

static bool is_race(const struct hedge *h)
{
    return h->winner == NEITHER && h->sides[FIRST].r && h->sides[SECOND].r;
}

bool hedge_is_second(const struct request *r)
{
    return r->hedge && is_race(r->hedge) && index_of(r) == SECOND;
}

static void log_hedge(const struct hedge *h, const char *event, const struct request *r)
{
    log_line(h->entry->metrics.log_requests ? LOG_INFO : LOG_DEBUG, event,
             "request=%016llx api_request=%s first=%016llx attempt=%s", (unsigned long long)r->id,
             r->name, (unsigned long long)h->id, index_of(r) ? "second" : "first");
}

/* ---- what the requests tell ---- */

static void on_token(void *arg, uint32_t index, const struct token_logprobs *t)
{
    const struct gen_sink *client = &((struct hedge_side *)arg)->hedge->client;
    client->on_token(client->arg, index, t);
}

static void on_prompt_logprob(void *arg, uint32_t position, const struct token_logprobs *t)
{
    struct hedge *h = ((struct hedge_side *)arg)->hedge;
    if (position != h->n_prompt_lp + 1) return;
    h->n_prompt_lp = position;
    if (h->client.on_prompt_logprob) h->client.on_prompt_logprob(h->client.arg, position, t);
}

static void on_node(void *arg, uint64_t node, uint64_t model_bits)
{
    const struct gen_sink *client = &((struct hedge_side *)arg)->hedge->client;
    if (client->on_node) client->on_node(client->arg, node, model_bits);
}

static void tell_end(struct hedge *h, const struct gen_end *end)
{
    map_del(&h->entry->hedges, map_key_u64(&h->id));
    h->client.on_end(h->client.arg, end);
}

/* An end that comes before any token is the client's own doing, that of its time limit, or that of
 * the request, so the other one is not wanted any more. It ends in the next turn: whoever ends
 * requests in a loop may have it next. */
static void on_end(void *arg, const struct gen_end *end)
{
    struct hedge_side *s = arg;
    struct hedge *h = s->hedge;
    const bool hidden = hedge_hides_end(s->r, end->status);
    struct request *other = other_of(s->r);
    if (!hidden && h->due) counter_add(h->entry->metrics.hedges[h->began ? h->winner : NEITHER], 1);
    if (!hidden && h->winner == NEITHER) h->winner = index_of(s->r);
    if (!hidden && other) other->canceled = true;
    if (other) h->entry->n_seconds--;
    if (index_of(s->r) == SECOND) settle(h);
    s->r = NULL;
    if (!hidden) tell_end(h, end);
    if (!other) mem_free(h);
}

static struct gen_sink sink_of(struct hedge_side *s)
{
    return (struct gen_sink){ .on_token = on_token,
                              .on_prompt_logprob = on_prompt_logprob,
                              .on_end = on_end,
                              .on_node = on_node,
                              .arg = s };
}

/* ---- the second ---- */

void hedge_create(struct entry *e, struct request *r)
{
    struct hedge *h = MEM_NEW(struct hedge);
    h->entry = e;
    h->client = r->sink;
    h->id = r->id;
    h->after_ms = r->wanted.hedge_ms;
    h->winner = NEITHER;
    h->sides[FIRST] = (struct hedge_side){ h, r };
    h->sides[SECOND] = (struct hedge_side){ h, NULL };
    r->hedge = h;
    r->sink = sink_of(&h->sides[FIRST]);
    map_put(&e->hedges, map_key_u64(&h->id), h);
}

/* On none of the nodes of `first`, nor on those that failed it before. */
static void avoid_those_of(struct request *r, const struct request *first)
{
    memcpy(r->avoid, first->avoid, sizeof r->avoid);
    memcpy(r->apart, first->apart, sizeof r->apart);
    r->n_avoid = first->n_avoid;
    r->n_apart = first->n_apart;
    r->gave_back = first->gave_back;
    r->gave_kv = first->gave_kv;
    request_avoid(r, first->prefill.node);
    request_avoid(r, first->decode.node);
}

/* The same generation as `first`, which has no token. */
static struct request *create_second(struct entry *e, struct hedge *h, const struct request *first)
{
    const struct gen_request g = { .name = first->name,
                                   .tokens = first->tokens,
                                   .n_tokens = first->n_prompt,
                                   .sampling = first->sampling,
                                   .cache_salt = first->cache_salt,
                                   .prompt_logprobs = first->prompt_logprobs,
                                   .deadline_ms = first->deadline_ms,
                                   .resume = first->resume,
                                   .admission = first->wanted };
    const struct gen_sink sink = sink_of(&h->sides[SECOND]);
    struct request *r = request_create(e, request_fresh_id(e), &g, &sink);
    r->hedge = h;
    r->ends_by_client = first->ends_by_client;
    r->t_accept = first->t_accept;
    r->n_moves = first->n_moves;
    r->model = first->model;
    r->is_counted = true;
    r->trace.hedged = GEN_HEDGED_SECOND;
    avoid_those_of(r, first);
    return r;
}

static void start_second(struct entry *e, struct hedge *h, struct request *first)
{
    struct request *r = create_second(e, h, first);
    struct place_result chosen;
    if (!request_find_beside(e, r, &chosen)) {
        request_free(r);
        return;
    }
    h->started = true;
    h->sides[SECOND].r = r;
    request_enter(e, r);
    e->n_seconds++;
    h->n_pending = r->n_prompt;
    e->n_pending_tokens += h->n_pending;
    log_hedge(h, "hedge begin", r);
    request_reserve(e, r, &chosen, NULL);
}

/* What its tenant pays for is computed. */
void hedge_on_placed(struct entry *e, struct request *r)
{
    if (!hedge_is_second(r)) return;
    struct request *first = other_of(r);
    settle(r->hedge);
    r->hedge->began = true;
    first->trace.hedged = GEN_HEDGED_FIRST;
    admission_charge_again(e, first);
}

/* Is `first` on nodes, and has been for so long? Waiting for some is no node's fault. */
static bool is_due(const struct hedge *h, const struct request *first, uint64_t now)
{
    return first->state != REQUEST_PLACING && first->decode.node &&
           now >= first->t_placed_ms + h->after_ms;
}

bool hedge_advance(struct entry *e, struct request *r)
{
    struct hedge *h = r->hedge;
    const uint64_t now = clock_ms();
    if (!h || h->winner != NEITHER) return false;
    if (r == h->sides[SECOND].r) {
        if (r->state != REQUEST_PLACING) return false;
        if (!r->placing) /* the directory has refused its nodes: they are full after all */
            request_end(e, r, ERR_CANCELED, FINISH_NONE, -1, "no room for a second attempt");
        return true;
    }
    if (h->started || now < h->look_ms || !is_due(h, r, now)) return false;
    h->due = true;
    h->look_ms = now + LOOK_MS;
    if (admission_has_room_again(e, r)) start_second(e, h, r);
    return false;
}

/* ---- which one ---- */

/* What its client's tenant has running is this one from now on. */
static void win(struct entry *e, struct request *r)
{
    struct hedge *h = r->hedge;
    struct request *other = other_of(r);
    h->winner = index_of(r);
    if (!other) return;
    log_hedge(h, "hedge goes on", r);
    if (h->winner == SECOND) {
        h->began = true;
        admission_hand_over(other, r);
    }
    request_end(e, other, ERR_CANCELED, FINISH_NONE, -1, "the other attempt goes on");
}

void hedge_on_token(struct entry *e, struct request *r)
{
    if (r->hedge && r->hedge->winner == NEITHER) win(e, r);
}

bool hedge_on_loss(struct entry *e, struct request *r, enum request_loss loss, const char *why)
{
    if (!r->hedge || !is_race(r->hedge)) return false;
    if (loss == LOSS_REQUEST && r == r->hedge->sides[FIRST].r) return false;
    log_info("hedge loses one", "request=%016llx api_request=%s loss=%s why=\"%s\"",
             (unsigned long long)r->id, r->name, request_loss_name(loss), why);
    win(e, other_of(r));
    return true;
}

bool hedge_hides_end(const struct request *r, enum status st)
{
    const struct hedge *h = r->hedge;
    if (!h) return false;
    if (h->winner != NEITHER) return h->winner != index_of(r);
    return index_of(r) == SECOND && st != OK;
}

bool hedge_cancel(struct entry *e, uint64_t id)
{
    struct hedge *h = map_get(&e->hedges, map_key_u64(&id));
    if (!h) return false;
    for (int i = 0; i < 2; i++)
        if (h->sides[i].r) h->sides[i].r->canceled = true;
    return true;
}
