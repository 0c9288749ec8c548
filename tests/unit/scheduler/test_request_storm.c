/* test_request_storm.c - many requests over nodes that fail, refuse, hand back, are late and lose
 * their links at random: each client has each token once and one end, and nothing is left. The test
 * plays the nodes; BATON_TEST_SEED repeats a run. */
#include <stdlib.h>

#include "scheduler/scheduler_internal.h"
#include "tests/unit/scheduler/scheduler_rig.h"

enum { CLIENTS = 60, JOBS_MAX = 4096, ROUNDS = 2 };

/* What one node does of one attempt. */
struct job {
    struct peer_node *node;
    struct attempt a;      /* of a prefill node decode is NULL until PREFILL */
    enum frame_type stage; /* the message that waits for an answer */
    uint32_t n, end, begin;
    bool over, has_ended;
};

struct storm {
    struct world w;
    struct client c[CLIENTS];
    struct job jobs[JOBS_MAX];
    size_t n_jobs, n_submitted;
    uint64_t random;
    uint32_t trouble; /* of 100 answers, so many are none that a client would like */
    uint64_t n_cut;
};

static uint32_t pick(struct storm *s, uint32_t n)
{
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    return (uint32_t)((s->random >> 11) % n);
}

static struct job *find_job(struct storm *s, const struct peer_node *n, uint64_t request,
                            uint32_t number)
{
    for (size_t i = 0; i < s->n_jobs; i++) {
        struct job *j = &s->jobs[i];
        if (j->node == n && j->a.request == request && j->a.number == number && !j->over) return j;
    }
    return NULL;
}

static struct job *new_job(struct storm *s, struct peer_node *n, const struct received_message *h)
{
    struct job *j = NULL;
    for (size_t i = 0; i < s->n_jobs && !j; i++)
        if (s->jobs[i].over) j = &s->jobs[i];
    if (!j) {
        CHECK(s->n_jobs < JOBS_MAX);
        j = &s->jobs[s->n_jobs++];
    }
    *j = (struct job){ .node = n, .stage = h->type };
    j->a.request = h->request;
    j->a.number = h->attempt;
    return j;
}

/* Where the attempt's tokens begin, and where the answer ends. */
static void read_generation(struct job *j, const struct received_message *h)
{
    struct arena arena;
    struct generation_wire g;
    struct err err = { 0 };
    const uint8_t *body = (const uint8_t *)h->body.data;
    const bool runs = h->type == FRAME_RUN;
    Baton__Reserve *reserve = runs ? NULL : baton__reserve__unpack(NULL, h->body.len, body);
    Baton__Run *run = runs ? baton__run__unpack(NULL, h->body.len, body) : NULL;
    CHECK(reserve || run);
    arena_init(&arena);
    CHECK_OK(generation_wire_decode(run ? run->generation : reserve->generation, &arena, &g, &err));
    for (uint32_t i = PROMPT_LEN; i < g.n_tokens; i++)
        CHECK_EQ_INT(g.tokens[i], 1000 + (int)(i - PROMPT_LEN));
    j->begin = j->n = g.n_tokens - PROMPT_LEN;
    j->end = g.sampling.max_tokens;
    arena_release(&arena);
    if (reserve) baton__reserve__free_unpacked(reserve, NULL);
    if (run) baton__run__free_unpacked(run, NULL);
}

static void take_messages(struct storm *s, struct peer_node *n)
{
    for (size_t i = 0; i < n->n_log; i++) {
        struct received_message *h = &n->log[i];
        if (h->taken) continue;
        h->taken = true;
        struct job *j = find_job(s, n, h->request, h->attempt);
        switch (h->type) {
        case FRAME_ASK_CREDIT:
            CHECK(!j);
            new_job(s, n, h);
            break;
        case FRAME_RESERVE:
        case FRAME_RUN:
            CHECK(!j);
            read_generation(new_job(s, n, h), h);
            break;
        case FRAME_PREFILL:
            if (!j) break; /* it has failed meanwhile */
            j->stage = FRAME_PREFILL;
            break;
        case FRAME_CANCEL:
            if (j && pick(s, 4)) j->over = true; /* else what is on its way still comes */
            break;
        default: break;
        }
    }
}

static void fail(struct storm *s, struct job *j)
{
    static const enum status ST[] = { ERR_BUSY,  ERR_FULL,    ERR_INTERNAL,    ERR_PEER_LOST,
                                      ERR_NOMEM, ERR_TIMEOUT, ERR_UNAVAILABLE, ERR_IO };
    static const uint32_t BLAMES[] = { BLAME_UNSAID, BLAME_NOBODY, BLAME_NODE, BLAME_PAIR,
                                       BLAME_HANDED_BACK };
    reply_blame(j->node, &j->a, ST[pick(s, COUNT_OF(ST))], BLAMES[pick(s, COUNT_OF(BLAMES))]);
    j->over = true;
}

static void grant(struct job *j)
{
    Baton__Grant grant = BATON__GRANT__INIT;
    Baton__KvPart part = BATON__KV_PART__INIT, *parts[] = { &part };
    part.kvt_grant = (ProtobufCBinaryData){ 5, (uint8_t *)"grant" };
    grant.n_parts = 1;
    grant.parts = parts;
    CHECK_OK(cluster_send_proto(j->node->c, ENTRY_ID, FRAME_GRANT, j->a.request, j->a.number,
                                &grant.base));
    j->stage = FRAME_TOKENS;
}

static void decode_on(struct storm *s, struct job *j)
{
    uint32_t n = 1 + pick(s, 4), left = j->end - j->n;
    if (n > left) n = left;
    if (j->n < j->end) {
        reply_tokens(j->node, &j->a, j->n, j->n + n, j->n + n == j->end ? FINISH_LENGTH : 0);
        j->n += n;
    } else {
        reply_finished(j->node, &j->a, j->end - j->begin);
        j->over = true;
    }
}

/* A prefill node has computed before the decode node has anything. */
static bool prefill_is_over(struct storm *s, const struct job *d)
{
    for (size_t i = 0; i < s->n_jobs; i++) {
        const struct job *p = &s->jobs[i];
        if (p != d && !p->over && p->a.request == d->a.request && p->a.number == d->a.number &&
            p->stage == FRAME_PREFILL_DONE)
            return true;
    }
    return false;
}

static void step(struct storm *s, struct job *j)
{
    if (j->over || pick(s, 3) == 0) return;
    if (!cluster_is_linked(j->node->c, ENTRY_ID)) {
        j->over = true;
        return;
    }
    if (pick(s, 1000) < s->trouble * 10) {
        fail(s, j);
        return;
    }
    Baton__Credit credit = BATON__CREDIT__INIT;
    switch (j->stage) {
    case FRAME_ASK_CREDIT:
        reply(j->node, &j->a, FRAME_CREDIT, &credit.base);
        j->stage = FRAME_CREDIT;
        break;
    case FRAME_RESERVE: grant(j); break;
    case FRAME_PREFILL: j->stage = FRAME_PREFILL_DONE; break;
    case FRAME_TOKENS:
        if (j->n > j->begin || prefill_is_over(s, j)) decode_on(s, j);
        break;
    case FRAME_RUN: decode_on(s, j); break;
    default: break;
    }
}

static void cut(struct storm *s)
{
    struct peer_node *n = s->w.nodes[pick(s, (uint32_t)s->w.n_nodes)];
    s->n_cut++;
    if (pick(s, 2)) cluster_disconnect(n->c, ENTRY_ID, "the test wanted it");
    else cluster_disconnect(s->w.entry->c, n->id, "the test wanted it");
}

static void submit(struct storm *s)
{
    struct client *c = &s->c[s->n_submitted++];
    struct ask a = { .max_tokens = 1 + pick(s, CLIENT_TOKENS_MAX - 1) };
    if (pick(s, 3) == 0) a.admission.hedge_ms = 5 + pick(s, 20);
    if (pick(s, 8) == 0) a.deadline_ms = clock_ms() + 20 + pick(s, 300);
    const enum status st = client_submit(&s->w, c, a);
    if (st != OK) c->n_ended = 1, c->end.status = st;
    c->cancel_on_token = pick(s, 10) == 0;
}

static size_t n_running(const struct storm *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n_submitted; i++) n += s->c[i].n_ended == 0;
    return n;
}

static void check_client(const struct client *c)
{
    CHECK_EQ_INT(c->n_ended, 1);
    for (uint32_t i = 0; i < c->n_tokens; i++) CHECK_EQ_INT(c->tokens[i], 1000 + (int32_t)i);
}

static void rage(struct storm *s, const char *roles, uint32_t trouble)
{
    s->trouble = trouble;
    s->n_jobs = s->n_submitted = 0;
    s->n_cut = 0;
    world_nodes.resume_ms = pick(s, 2) ? 10000 : 0;
    world_open(&s->w, roles, 400);
    const uint64_t end = clock_ms() + RIG_LONG_MS * 3;
    while (s->n_submitted < CLIENTS || n_running(s)) {
        if (clock_ms() > end)
            test_fail(__FILE__, __LINE__, "%zu requests do not end", n_running(s));
        if (s->n_submitted < CLIENTS && pick(s, 3) == 0) submit(s);
        if (trouble && pick(s, 60) == 0) cut(s);
        if (pick(s, 50) == 0 && s->n_submitted) {
            struct client *c = &s->c[pick(s, (uint32_t)s->n_submitted)];
            if (!c->n_ended) s->w.be.cancel(s->w.be.self, c->id);
        }
        uv_run(loop_uv(s->w.rig.loop), UV_RUN_NOWAIT);
        for (size_t i = 0; i < s->w.n_nodes; i++) take_messages(s, s->w.nodes[i]);
        for (size_t i = 0; i < s->n_jobs; i++) step(s, &s->jobs[i]);
        uv_run(loop_uv(s->w.rig.loop), UV_RUN_ONCE);
    }
    size_t n_ok = 0;
    for (size_t i = 0; i < s->n_submitted; i++) {
        check_client(&s->c[i]);
        n_ok += s->c[i].end.status == OK;
    }
    for (size_t i = 0; i < s->n_submitted; i++)
        if (s->c[i].end.status == OK) CHECK(s->c[i].n_tokens > 0);
    world_check_idle(&s->w);
    CHECK_EQ_INT(s->w.s->entry.hedges.len, 0);
    CHECK_EQ_INT(s->w.s->entry.n_seconds, 0);
    CHECK(list_empty(&s->w.s->entry.orphans));
    printf("%s: %zu of %d served, %llu cuts\n", roles, n_ok, CLIENTS, (unsigned long long)s->n_cut);
    world_close(&s->w);
}

static void storm(const char *roles, uint32_t trouble)
{
    struct storm *s = MEM_NEW(struct storm);
    const char *seed = getenv("BATON_TEST_SEED");
    s->random = seed ? strtoull(seed, NULL, 10) * 0x9e3779b97f4a7c15u | 1 : 88172645463325252u;
    for (int i = 0; i < ROUNDS; i++) rage(s, roles, trouble);
    mem_free(s);
}

TEST(storm_of_pairs) { storm("ppdd", 3); }
TEST(storm_of_mixed_nodes) { storm("mmm", 3); }
TEST(storm_of_all) { storm("pdmm", 8); }
TEST(calm) { storm("ppdd", 0); }

TEST_MAIN(CASE(calm), CASE(storm_of_pairs), CASE(storm_of_mixed_nodes), CASE(storm_of_all))
