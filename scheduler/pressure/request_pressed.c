/* request_pressed.c - see request_pressed.h. */
#include "scheduler/pressure/request_pressed.h"

#include "scheduler/pressure/pressure.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"

/* The prompt and what was delivered would be computed by the prefill node, or by the one that does
 * all of it. A request without a token stays: what it has waited in lines would count against it
 * (request_is_full_for_too_long). */
static void ask_elsewhere(const struct entry *e, const struct request *r, struct pressure *p)
{
    struct place_result there;
    p->has_room = request_n_out(r) > 0 && request_find_room(e, r, &there);
    if (!p->has_room) return;
    const struct node_record *n = there.prefill ? there.prefill : there.decode;
    p->there_tokens = r->n_tokens +
                      (n->placed_tokens > n->waiting_tokens ? n->placed_tokens : n->waiting_tokens);
    p->there_tokens_per_s = n->prefill_tokens_per_s;
}

static uint64_t at_most_a_day(uint64_t us)
{
    const uint64_t day = UINT64_C(86400) * 1000000;
    return us < day ? us : day;
}

static enum pressure_action choose(const struct entry *e, const struct request *r, uint64_t here_us)
{
    struct pressure p = { .here_us = here_us, .n_handed_back = r->n_pressed };
    ask_elsewhere(e, r, &p);
    const enum pressure_action action = pressure_choose(&p);
    log_debug("request preempted",
              "request=%016llx api_request=%s node=%s tokens=%u action=%s here_ms=%.1f room=%d "
              "there_tokens=%llu there_tokens_per_s=%llu",
              (unsigned long long)r->id, r->name, r->decode.name, r->n_tokens,
              pressure_action_name(action), (double)p.here_us * 1e-3, (int)p.has_room,
              (unsigned long long)p.there_tokens, (unsigned long long)p.there_tokens_per_s);
    return action;
}

static void hand_back(struct entry *e, struct request *r)
{
    r->n_pressed++;
    request_on_loss(e, r, LOSS_HANDED_BACK, ERR_BUSY, r->decode.node,
                    "an older sequence has taken the request's KV blocks, and it goes on sooner "
                    "elsewhere");
}

void request_on_preempted(struct entry *e, struct request *r, const struct cluster_message *m)
{
    if (r->state != REQUEST_DECODE && r->state != REQUEST_RUN) return;
    Baton__Preempted *told = baton__preempted__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    if (!told) {
        log_warn("malformed message", "type=preempted peer=%s", m->from_name);
        return;
    }
    const uint64_t here_us = at_most_a_day(told->wait_us) + at_most_a_day(told->compute_us);
    baton__preempted__free_unpacked(told, NULL);
    const enum pressure_action action = choose(e, r, here_us);
    counter_add(e->metrics.preemptions[action], 1);
    if (action == PRESSURE_HAND_BACK) hand_back(e, r);
    else r->pressed_until_ns = clock_ns() + here_us * 1000;
}

void request_pressed_look_again(struct entry *e)
{
    const uint64_t now = clock_ns();
    LIST_FOREACH (r, &e->live, struct request, link) {
        if (r->pressed_until_ns <= now) continue;
        if (choose(e, r, (r->pressed_until_ns - now) / 1000) != PRESSURE_HAND_BACK) continue;
        counter_add(e->metrics.preemptions[PRESSURE_HAND_BACK], 1);
        hand_back(e, r);
        return;
    }
}
