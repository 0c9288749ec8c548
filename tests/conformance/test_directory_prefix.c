/* test_directory_prefix.c - every backend of the directory finds the nodes that keep the beginning
 * of a prompt, by the rules of prefix_pick.h: a random run of placements gets the answers of
 * `local` everywhere. Then what only a server elsewhere can do: be of an earlier version, or have
 * rubbish in its table. */
#include <inttypes.h>

#include "scheduler/directory/local.h"
#include "scheduler/prefix/prefix_ladder.h"
#include "scheduler/prefix/prefix_pick.h"
#include "shared/base/rng.h"
#include "tests/conformance/entries_rig.h"

enum { NODES = 8, P1 = 1, P2 = 2, D1 = 11, D2 = 12, PROMPT = 2000, NS = 10000000, STEPS = 400 };

struct answer {
    int n_calls;
    enum status st;
    struct directory_placed placed;
    size_t n;
    struct node_record nodes[3 * NODES];
};

static void on_reserve(void *arg, enum status st, const struct directory_placed *placed)
{
    struct answer *a = arg;
    a->n_calls++;
    a->st = st;
    if (placed) a->placed = *placed;
}

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *s)
{
    struct answer *a = arg;
    a->n_calls++;
    a->st = st;
    if (st != OK) return;
    CHECK(s->n <= COUNT_OF(a->nodes));
    a->n = s->n;
    if (s->n) memcpy(a->nodes, s->nodes, s->n * sizeof *s->nodes);
}

static struct node_record record_of(uint64_t node, enum node_role role)
{
    struct node_record n = {
        .node = node,
        .role = role,
        .host = "127.0.0.1",
        .model = 7,
        .max_seqs = 16,
        .n_blocks = 2000,
        .block_tokens = 64,
        .max_model_len = 32768,
        .prefix_cache = true,
        .prefill_tokens_per_s = 1000000000 / NS,
    };
    snprintf(n.name, sizeof n.name, "node-%u", (unsigned)node);
    snprintf(n.topic, sizeof n.topic, "default");
    return n;
}

/* To the directory server itself where it is in this process: of renewals that follow one another
 * the `http` backend sends the last. */
static void publish_record(struct rig *r, struct directory *d, const struct node_record *n)
{
    if (r->served.local && !directory_is_local(d)) d = r->served.local;
    directory_publish(d, n);
}

static void publish(struct rig *r, struct directory *d, const char *topic, uint64_t node,
                    enum node_role role)
{
    struct node_record n = record_of(node, role);
    snprintf(n.topic, sizeof n.topic, "%s", topic);
    publish_record(r, d, &n);
}

static struct node_record look(struct rig *r, struct directory *d, uint64_t node)
{
    static struct answer a;
    memset(&a, 0, sizeof a);
    CHECK_OK(directory_snapshot(d, on_snapshot, &a));
    WAIT_FOR(r, a.n_calls == 1);
    CHECK_OK(a.st);
    for (size_t i = 0; i < a.n; i++)
        if (a.nodes[i].node == node) return a.nodes[i];
    return (struct node_record){ 0 };
}

static void publish_pairs(struct rig *r, int entry)
{
    publish(r, r->d[entry], "default", P1, ROLE_PREFILL);
    publish(r, r->d[entry], "default", P2, ROLE_PREFILL);
    publish(r, r->d[entry], "default", D1, ROLE_DECODE);
    publish(r, r->d[entry], "default", D2, ROLE_DECODE);
    for (uint64_t n = P1; n; n = n == P1 ? P2 : n == P2 ? D1 : n == D1 ? D2 : 0)
        for (uint64_t end = clock_ms() + WAIT_MS; !look(r, r->d[entry], n).node; run_for(r, 10))
            CHECK(clock_ms() < end);
}

/* A prompt: its ladder of `n_tokens` tokens, of which all but those of other prompts' numbers are
 * alike up to `common`. */
struct prompt {
    struct prefix_ladder ladder;
    uint32_t n_tokens;
};

static void prompt_make(struct prompt *p, uint32_t number, uint32_t common, uint32_t n_tokens,
                        uint64_t salt)
{
    static int32_t tokens[1 << 15];
    CHECK(n_tokens <= COUNT_OF(tokens));
    for (uint32_t i = 0; i < n_tokens; i++)
        tokens[i] = (int32_t)(i < common ? i : i + 100000 * number);
    prefix_ladder_make(&p->ladder, 7, salt, tokens, n_tokens, 64);
    p->n_tokens = n_tokens;
}

/* Nodes of all roles may stand in. */
struct placing {
    struct prefix_use uses[3];
    struct prefix_query q;
    struct placement p;
};

static void placing_init(struct placing *g, uint64_t request, const struct prompt *prompt,
                         uint64_t prefill, uint64_t decode)
{
    *g = (struct placing){
        .q = { .n_tokens = prompt->n_tokens,
               .rungs = prompt->ladder.rungs,
               .n_rungs = prompt->ladder.n,
               .compute = prefill ? prefill : decode,
               .decode = prefill ? decode : 0,
               .uses = g->uses,
               .ns = NS,
               .blocks = 16 },
        .p = { .request = request,
               .prefill = prefill,
               .decode = decode,
               .tokens = prompt->n_tokens,
               .blocks = 16,
               .ttl_ms = 60000,
               .prefix = &g->q },
    };
}

static void use(struct placing *g, enum node_role role, unsigned flags)
{
    const struct node_record like = record_of(1, role);
    g->uses[g->q.n_uses++] = (struct prefix_use){ node_record_kind(&like, role, true),
                                                  (uint8_t)flags };
}

static void placing_pair(struct placing *g, uint64_t request, const struct prompt *prompt,
                         uint64_t prefill, uint64_t decode)
{
    placing_init(g, request, prompt, prefill, decode);
    use(g, ROLE_PREFILL, PREFIX_COMPUTES);
    use(g, ROLE_DECODE, PREFIX_TAKES | PREFIX_DECODE);
}

static void placing_alone(struct placing *g, uint64_t request, const struct prompt *prompt,
                          uint64_t node)
{
    placing_init(g, request, prompt, 0, node);
    use(g, ROLE_MIXED, PREFIX_COMPUTES | PREFIX_ALONE);
    use(g, ROLE_PREFILL, PREFIX_COMPUTES | PREFIX_ALONE);
}

static enum status place(struct rig *r, struct directory *d, const struct placing *g,
                         struct answer *a)
{
    memset(a, 0, sizeof *a);
    const enum status st = directory_reserve(d, &g->p, on_reserve, a);
    if (st != OK) return st;
    WAIT_FOR(r, a->n_calls == 1);
    return a->st;
}

/* Places a prompt with this choice and checks where it went, and what that should keep. */
static void check_placed(struct rig *r, int entry, struct placing *g, uint64_t prefill,
                         uint64_t decode, uint32_t kept)
{
    struct answer a;
    CHECK_OK(place(r, r->d[entry], g, &a));
    CHECK(a.placed.fence > 0 && a.placed.on.expected.known);
    CHECK_EQ_INT(a.placed.on.prefill, prefill);
    CHECK_EQ_INT(a.placed.on.decode, decode);
    CHECK_EQ_INT(a.placed.on.expected.compute.tokens, kept);
    CHECK_EQ_INT(a.placed.on.tokens, g->q.n_tokens - kept);
    directory_computed(r->d[entry], g->p.request);
    run_for(r, 30); /* the first time a script is sent twice, and may be overtaken */
}

/* ---- cases for every backend ---- */

static void case_keepers_are_found_by_every_entry(struct rig *r)
{
    struct prompt first, longer, other, salted;
    struct placing g;
    publish_pairs(r, A);
    prompt_make(&first, 1, 1600, PROMPT, 0);
    prompt_make(&longer, 2, 1600, 3 * PROMPT, 0);
    prompt_make(&other, 3, 0, PROMPT, 0);
    prompt_make(&salted, 1, 1600, PROMPT, 99);
    placing_pair(&g, 100, &first, P2, D2);
    check_placed(r, A, &g, P2, D2, 0);
    run_for(r, 50);
    placing_pair(&g, 101, &longer, P1, D1); /* 1,600 in common: the rung below has 1,536 */
    check_placed(r, B, &g, P2, D2, 1536);
    placing_pair(&g, 102, &other, P1, D1);
    check_placed(r, B, &g, P1, D1, 0);
    placing_pair(&g, 103, &salted, P1, D1);
    check_placed(r, A, &g, P1, D1, 0);
    placing_pair(&g, 104, &first, P1, D1); /* again: all of its rungs */
    check_placed(r, A, &g, P2, D2, 1536);
}

static void case_what_is_kept_is_not_counted(struct rig *r)
{
    struct prompt p;
    struct placing g;
    struct answer a;
    publish_pairs(r, A);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    placing_pair(&g, 100, &p, P1, D1);
    CHECK_OK(place(r, r->d[A], &g, &a));
    CHECK_EQ_INT(look(r, r->d[A], P1).placed_tokens, PROMPT);
    g.p.request = 101;
    CHECK_OK(place(r, r->d[A], &g, &a)); /* the same choice: it is a keeper */
    CHECK_EQ_INT(a.placed.on.tokens, PROMPT - 1536);
    CHECK_EQ_INT(look(r, r->d[A], P1).placed_tokens, 2 * PROMPT - 1536);
    CHECK_EQ_INT(look(r, r->d[A], D1).placed_seqs, 2);
    directory_release(r->d[A], 100);
    directory_release(r->d[A], 101);
    for (uint64_t end = clock_ms() + WAIT_MS; look(r, r->d[A], D1).placed_seqs; run_for(r, 10))
        CHECK(clock_ms() < end);
    CHECK_EQ_INT(look(r, r->d[A], P1).placed_tokens, 0);
}

static void case_tokens_count_until_they_are_computed(struct rig *r)
{
    struct answer a;
    const struct placement p = {
        .request = 7, .prefill = P1, .decode = D1, .tokens = 900, .blocks = 5, .ttl_ms = 60000
    };
    publish_pairs(r, A);
    memset(&a, 0, sizeof a);
    CHECK_OK(directory_reserve(r->d[A], &p, on_reserve, &a));
    WAIT_FOR(r, a.n_calls == 1);
    CHECK(a.st == OK && !a.placed.on.expected.known);
    CHECK(a.placed.on.prefill == P1 && a.placed.on.decode == D1 && a.placed.on.tokens == 900);
    directory_computed(r->d[A], 8); /* unknown: nothing happens */
    directory_computed(r->d[A], 7);
    directory_computed(r->d[A], 7);
    for (uint64_t end = clock_ms() + WAIT_MS; look(r, r->d[A], P1).placed_tokens; run_for(r, 10))
        CHECK(clock_ms() < end);
    CHECK_EQ_INT(look(r, r->d[A], D1).placed_seqs, 1);
    CHECK_EQ_INT(look(r, r->d[A], D1).placed_blocks, 5);
    directory_release(r->d[A], 7);
    for (uint64_t end = clock_ms() + WAIT_MS; look(r, r->d[A], D1).placed_seqs; run_for(r, 10))
        CHECK(clock_ms() < end);
    CHECK_EQ_INT(look(r, r->d[A], P1).placed_tokens, 0);
}

/* What the directory counts decides, not what the entry node believes. */
static void case_a_busy_keeper_gets_a_second_one(struct rig *r)
{
    struct prompt p, big;
    struct placing g;
    struct answer a;
    publish_pairs(r, A);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    prompt_make(&big, 2, 0, 4 * PROMPT, 0);
    placing_pair(&g, 100, &p, P1, D1);
    check_placed(r, A, &g, P1, D1, 0);
    placing_pair(&g, 101, &big, P1, D1);
    CHECK_OK(place(r, r->d[B], &g, &a)); /* is not computed yet */
    placing_pair(&g, 102, &p, P2, D2);
    check_placed(r, A, &g, P2, D1, 0);
    directory_computed(r->d[B], 101);
    run_for(r, 50);
    placing_pair(&g, 103, &p, P1, D2); /* both have it: the choice stays */
    check_placed(r, A, &g, P1, D1, 1536);
    placing_pair(&g, 104, &p, P2, D2);
    check_placed(r, A, &g, P2, D1, 1536);
}

static void case_who_left_or_dropped_it_is_no_keeper(struct rig *r)
{
    struct prompt p;
    struct placing g;
    const struct prefix_drop drop = { P1, UINT32_MAX };
    publish_pairs(r, A);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    placing_pair(&g, 100, &p, P1, D1);
    check_placed(r, A, &g, P1, D1, 0);
    placing_pair(&g, 101, &p, P2, D1);
    check_placed(r, A, &g, P1, D1, 1536);
    placing_pair(&g, 102, &p, P2, D1);
    g.q.drops = &drop;
    g.q.n_drops = 1;
    check_placed(r, A, &g, P2, D1, 0);
    placing_pair(&g, 103, &p, P1, D1);
    check_placed(r, A, &g, P2, D1, 1536);
    directory_leave(r->d[A], P2);
    for (uint64_t end = clock_ms() + WAIT_MS; look(r, r->d[A], P2).node; run_for(r, 10))
        CHECK(clock_ms() < end);
    placing_pair(&g, 104, &p, P1, D1);
    check_placed(r, A, &g, P1, D1, 0);
    placing_pair(&g, 105, &p, P2, D1);
    struct answer a;
    CHECK_STATUS(place(r, r->d[A], &g, &a), ERR_NOT_FOUND);
}

static void case_topics_have_tables_of_their_own(struct rig *r)
{
    struct prompt p;
    struct placing g;
    struct answer a;
    struct directory *other = directory_is_local(r->d[A]) ? r->d[A] : open_entry(r, "other");
    publish_pairs(r, A);
    publish(r, other, "other", 3, ROLE_MIXED);
    publish(r, other, "other", 4, ROLE_MIXED);
    run_for(r, 100);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    placing_pair(&g, 100, &p, P1, D1);
    check_placed(r, A, &g, P1, D1, 0);
    placing_alone(&g, 101, &p, 3);
    CHECK_OK(place(r, other, &g, &a));
    CHECK(a.placed.on.prefill == 0 && a.placed.on.decode == 3);
    CHECK_EQ_INT(a.placed.on.expected.compute.tokens, 0);
    directory_computed(other, 101);
    run_for(r, 30);
    placing_alone(&g, 102, &p, 4);
    CHECK_OK(place(r, other, &g, &a));
    CHECK(a.placed.on.prefill == 0 && a.placed.on.decode == 3);
    CHECK_EQ_INT(a.placed.on.expected.compute.tokens, 1536);
    if (other != r->d[A]) directory_close(other);
}

/* ---- the same answers everywhere ---- */

struct twin {
    struct directory *d[2]; /* of the backend, and a local one */
    struct rig *r;
    uint64_t draw;
};

static uint32_t draw(struct twin *t, uint32_t n)
{
    uint32_t r[4];
    rng_philox(11, 0, t->draw++, r);
    return r[0] % n;
}

/* Nodes 1 to 8 prefill, 11 to 18 decode, 21 to 28 are mixed. */
static uint64_t node_of(struct twin *t, enum node_role role)
{
    return (role == ROLE_PREFILL ? 1 : role == ROLE_DECODE ? 11 : 21) + draw(t, NODES);
}

/* Any choice, and any use of other nodes. */
static void random_placing(struct twin *t, struct placing *g, uint64_t request,
                           const struct prompt *p)
{
    static const enum node_role ROLES[] = { ROLE_PREFILL, ROLE_DECODE, ROLE_MIXED };
    const bool alone = draw(t, 3) == 0;
    const uint64_t prefill = alone ? 0 : node_of(t, ROLE_PREFILL);
    placing_init(g, request, p, prefill, node_of(t, alone ? ROLE_MIXED : ROLE_DECODE));
    for (size_t i = 0; i < COUNT_OF(ROLES); i++)
        if (draw(t, 8)) use(g, ROLES[i], draw(t, PREFIX_FLAGS + 1));
    if (draw(t, 2) && !alone) {
        g->uses[0].flags = PREFIX_COMPUTES;
        g->uses[1].flags = PREFIX_COMPUTES | PREFIX_ALONE | PREFIX_TAKES | PREFIX_DECODE;
    }
    g->q.ns = 1 + draw(t, 4) * draw(t, PREFIX_COST_MAX / 4);
    if (draw(t, 10) == 0) g->q.blocks = 2001; /* no pool is as large */
}

/* Whatever nodes say of themselves: in both the same. */
static struct node_record random_record(struct twin *t, uint64_t node, enum node_role role)
{
    static const uint32_t SPEEDS[] = { 0, 0, 1, 1000, 50000, 1u << 30 };
    struct node_record n = record_of(node, role);
    n.prefill_tokens_per_s = SPEEDS[draw(t, COUNT_OF(SPEEDS))];
    n.n_running = draw(t, 3) ? draw(t, 4) : draw(t, 40);
    n.waiting_tokens = draw(t, 4) ? 0 : draw(t, 3000);
    n.prefix_cache = draw(t, 10) > 0;
    n.draining = draw(t, 20) == 0;
    if (draw(t, 5) == 0) {
        snprintf(n.group.name, sizeof n.group.name, "g:1");
        n.group.size = 2;
        n.group.is_whole = draw(t, 2);
    }
    return n;
}

static bool are_alike(const struct directory_placed *a, const struct directory_placed *b)
{
    const struct prefix_expected *x = &a->on.expected, *y = &b->on.expected;
    return a->on.prefill == b->on.prefill && a->on.decode == b->on.decode &&
           a->on.tokens == b->on.tokens && x->known == y->known &&
           x->compute.tokens == y->compute.tokens && x->decode.tokens == y->decode.tokens &&
           x->compute.at_s == y->compute.at_s && x->decode.at_s == y->decode.at_s &&
           x->keeper == y->keeper && x->keeper_tokens == y->keeper_tokens;
}

static void place_twice(struct rig *r, struct twin *t, const struct placing *g, int step,
                        int counts[2])
{
    struct answer a[2];
    for (int i = 0; i < 2; i++) {
        memset(&a[i], 0, sizeof a[i]);
        CHECK_OK(directory_reserve(t->d[i], &g->p, on_reserve, &a[i]));
    }
    WAIT_FOR(r, a[0].n_calls == 1 && a[1].n_calls == 1);
    if (a[0].st != a[1].st || (a[0].st == OK && !are_alike(&a[0].placed, &a[1].placed)))
        test_fail(__FILE__, __LINE__, "step %d: %s on %u, %u keeping %u; local %s on %u, %u: %u",
                  step, status_name(a[0].st), (unsigned)a[0].placed.on.prefill,
                  (unsigned)a[0].placed.on.decode, a[0].placed.on.expected.compute.tokens,
                  status_name(a[1].st), (unsigned)a[1].placed.on.prefill,
                  (unsigned)a[1].placed.on.decode, a[1].placed.on.expected.compute.tokens);
    counts[0] += a[0].st == OK && a[0].placed.on.expected.compute.tokens > 0;
    counts[1] += a[0].st == OK &&
                 (a[0].placed.on.prefill != g->p.prefill || a[0].placed.on.decode != g->p.decode);
}

static void renew_all(struct twin *t)
{
    for (uint64_t n = 0; n < NODES; n++) {
        const struct node_record records[] = { random_record(t, 1 + n, ROLE_PREFILL),
                                               random_record(t, 11 + n, ROLE_DECODE),
                                               random_record(t, 21 + n, ROLE_MIXED) };
        for (int i = 0; i < 2; i++)
            for (size_t k = 0; k < COUNT_OF(records); k++)
                publish_record(t->r, t->d[i], &records[k]);
    }
}

/* Waits until what was told has arrived: calls may overtake one another. */
static void wait_alike(struct twin *t)
{
    static struct answer a[2];
    for (uint64_t end = clock_ms() + WAIT_MS;; turn(t->r)) {
        uint64_t sums[2] = { 0 };
        memset(a, 0, sizeof a);
        for (int i = 0; i < 2; i++) CHECK_OK(directory_snapshot(t->d[i], on_snapshot, &a[i]));
        WAIT_FOR(t->r, a[0].n_calls == 1 && a[1].n_calls == 1);
        for (int i = 0; i < 2; i++)
            for (size_t k = 0; k < a[i].n; k++)
                sums[i] += 1 + a[i].nodes[k].placed_tokens + 1000000 * a[i].nodes[k].placed_seqs +
                           (uint64_t)a[i].nodes[k].waiting_tokens * 7 * a[i].nodes[k].node;
        if (sums[0] == sums[1]) return;
        CHECK(clock_ms() < end);
    }
}

static void case_a_random_run_has_the_answers_of_local(struct rig *r)
{
    struct directory_options o = { .loop = r->loop, .topic = "default", .lease_ms = 600000 };
    struct twin t = { .d = { r->d[A] }, .r = r };
    struct err err;
    struct placing g;
    struct prompt p;
    int counts[2] = { 0 };
    CHECK_OK(directory_open("local", &o, &t.d[1], &err));
    renew_all(&t);
    wait_alike(&t);
    for (int step = 0; step < STEPS; step++) {
        if (step % 40 == 39) { /* within the lease; some have left */
            renew_all(&t);
            wait_alike(&t);
        }
        const struct prefix_drop drop = { node_of(&t, ROLE_MIXED), UINT32_MAX };
        const uint64_t avoid[] = { node_of(&t, ROLE_PREFILL), node_of(&t, ROLE_DECODE) };
        prompt_make(&p, draw(&t, 12), 64 * draw(&t, 40), 64 + draw(&t, 5000), draw(&t, 2));
        random_placing(&t, &g, 1000 + (uint64_t)step, &p);
        g.q.avoid = avoid;
        g.q.n_avoid = draw(&t, COUNT_OF(avoid) + 1);
        if (draw(&t, 100) == 0) {
            g.q.drops = &drop;
            g.q.n_drops = 1;
        }
        place_twice(r, &t, &g, step, counts);
        const uint64_t old = 1000 + draw(&t, (uint32_t)step + 1);
        for (int i = 0; i < 2; i++) {
            /* At once: waits pass while the test runs, of each backend by itself. */
            directory_computed(t.d[i], g.p.request);
            if (step % 2) directory_release(t.d[i], old);
        }
        wait_alike(&t);
        if (step % 90 == 50) {
            const uint64_t gone = node_of(&t, ROLE_PREFILL);
            for (int i = 0; i < 2; i++) directory_leave(t.d[i], gone);
            wait_alike(&t);
        }
    }
    CHECK(counts[0] > STEPS / 10 && counts[1] > STEPS / 10);
    directory_close(t.d[1]);
}

/* ---- what is in Redis ---- */

static long long redis_number(struct rig *r, const char *command)
{
    redisReply *reply = redis_process_ask(&r->redis, command);
    CHECK(reply && reply->type == REDIS_REPLY_INTEGER);
    const long long v = reply->integer;
    freeReplyObject(reply);
    return v;
}

/* Makes all keepers so many seconds older. */
static void age(struct rig *r, int seconds)
{
    static const char script[] =
        "local t = redis.call('HGETALL', KEYS[1])\n"
        "for i = 1, #t, 2 do\n"
        "  if t[i] ~= 'dropped' then\n"
        "    local out = string.sub(t[i + 1], 1, 4)\n"
        "    for at = 5, #t[i + 1], 13 do\n"
        "      local s = struct.unpack('>I4', t[i + 1], at + 9) - ARGV[1]\n"
        "      out = out .. string.sub(t[i + 1], at, at + 8) .. struct.pack('>I4', s)\n"
        "    end\n"
        "    redis.call('HSET', KEYS[1], t[i], out)\n"
        "  end\n"
        "end\n"
        "return #t\n";
    redisContext *c = redisConnect("127.0.0.1", r->redis.port);
    redisReply *reply = redisCommand(c, "EVAL %s 1 baton:{default}:prefix %d", script, seconds);
    CHECK(reply && reply->type == REDIS_REPLY_INTEGER && reply->integer > 0);
    freeReplyObject(reply);
    redisFree(c);
}

TEST(redis_keepers_age)
{
    struct rig r;
    struct prompt p;
    struct placing g;
    struct answer a;
    rig_open(&r, "redis");
    publish_pairs(&r, A);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    placing_pair(&g, 100, &p, P1, D1);
    check_placed(&r, A, &g, P1, D1, 0);
    CHECK(redis_number(&r, "PTTL baton:{default}:prefix") > 1000LL * PREFIX_TTL_S);
    placing_pair(&g, 101, &p, P2, D1);
    CHECK_OK(place(&r, r.d[A], &g, &a));
    CHECK(a.placed.on.expected.compute.tokens == 1536 && a.placed.on.expected.compute.at_s == 0);
    publish_pairs(&r, A);
    age(&r, PREFIX_YOUNG_S);
    directory_computed(r.d[A], 101);
    placing_pair(&g, 102, &p, P2, D1);
    CHECK_OK(place(&r, r.d[A], &g, &a));
    const uint32_t at_s = a.placed.on.expected.compute.at_s;
    CHECK(at_s > 0);
    directory_computed(r.d[A], 102);
    run_for(&r, 30);
    const struct prefix_drop before = { P1, at_s - 1 }, then = { P1, at_s };
    placing_pair(&g, 103, &p, P2, D1); /* of a time before it: that does not touch it */
    g.q.drops = &before;
    g.q.n_drops = 1;
    check_placed(&r, A, &g, P1, D1, 1536);
    placing_pair(&g, 104, &p, P2, D1);
    g.q.drops = &then;
    g.q.n_drops = 1;
    check_placed(&r, A, &g, P2, D1, 0);
    placing_pair(&g, 105, &p, P1, D1);
    check_placed(&r, A, &g, P2, D1, 1536);
    publish_pairs(&r, A);
    age(&r, PREFIX_TTL_S);
    placing_pair(&g, 106, &p, P1, D1);
    check_placed(&r, A, &g, P1, D1, 0);
    rig_close(&r);
}

/* Whoever can write to the server can write that, too. */
TEST(redis_rubbish_in_the_table_is_replaced)
{
    static const char *const rubbish[] = {
        "", "x", "tag", "tag.", "tag.0", "tag.0123456789", "tag.?123456789abc"
    };
    struct rig r;
    struct prompt p;
    struct placing g;
    rig_open(&r, "redis");
    publish_pairs(&r, A);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    redisContext *c = redisConnect("127.0.0.1", r.redis.port);
    char *text = mem_calloc(1, 1 << 20);
    for (size_t i = 0; i <= COUNT_OF(rubbish); i++) {
        const size_t n = i < COUNT_OF(rubbish) ? strlen(rubbish[i]) : 4 + 13 * 80000;
        memset(text, '0', 1 << 20);
        if (i < COUNT_OF(rubbish)) memcpy(text, rubbish[i], n);
        for (uint32_t k = 0; k < p.ladder.n; k++) {
            const struct prefix_rung *rung = &p.ladder.rungs[k];
            const char slot[] = { (char)(rung->slot >> 8), (char)rung->slot };
            for (int byte = 0; n >= 4 && byte < 4; byte++)
                text[byte] = (char)(rung->tag >> (24 - 8 * byte));
            redisReply *reply = redisCommand(c, "HSET baton:{default}:prefix %b %b", slot,
                                             sizeof slot, text, n < 1 << 20 ? n : 1 << 20);
            CHECK(reply && reply->type == REDIS_REPLY_INTEGER);
            freeReplyObject(reply);
        }
        publish_pairs(&r, A);
        placing_pair(&g, 200 + i, &p, P1, D1);
        check_placed(&r, A, &g, P1, D1, 0);
        placing_pair(&g, 300 + i, &p, P2, D2);
        check_placed(&r, A, &g, P1, D1, 1536);
        directory_release(r.d[A], 200 + i);
        directory_release(r.d[A], 300 + i);
    }
    mem_free(text);
    redisFree(c);
    rig_close(&r);
}

/* So many bytes of 0xff, or nothing at all. */
static void set_bid(struct rig *r, uint64_t node, size_t n, bool is_there)
{
    redisContext *c = redisConnect("127.0.0.1", r->redis.port);
    char *text = mem_calloc(1, n + 1), id[20];
    memset(text, 0xff, n);
    snprintf(id, sizeof id, "%016" PRIx64, node);
    redisReply *reply = is_there ? redisCommand(c, "HSET baton:{default}:bids %s %b", id, text, n)
                                 : redisCommand(c, "HDEL baton:{default}:bids %s", id);
    CHECK(reply && reply->type == REDIS_REPLY_INTEGER);
    freeReplyObject(reply);
    mem_free(text);
    redisFree(c);
}

/* A node of an earlier version says nothing of itself, and whoever can write to the server can say
 * anything: such a node is placed on, but not instead of another. */
TEST(redis_without_a_bid_a_node_is_no_keeper)
{
    static const size_t lengths[] = { 0, 0, 1, 36, 38, 1 << 20 };
    struct rig r;
    struct prompt p;
    struct placing g;
    const struct prefix_drop drop = { P2, UINT32_MAX }; /* it keeps nothing, whatever is placed */
    rig_open(&r, "redis");
    publish_pairs(&r, A);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    placing_pair(&g, 99, &p, P1, D1);
    g.q.drops = &drop;
    g.q.n_drops = 1;
    check_placed(&r, A, &g, P1, D1, 0);
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        set_bid(&r, P1, lengths[i], i > 0);
        placing_pair(&g, 100 + i, &p, P2, D1);
        check_placed(&r, A, &g, P2, D1, 0);
        placing_pair(&g, 200 + i, &p, P1, D1);
        check_placed(&r, A, &g, P1, D1, 0);
        publish_pairs(&r, A);
        run_for(&r, 30);
        placing_pair(&g, 300 + i, &p, P2, D1);
        check_placed(&r, A, &g, P1, D1, 1536);
        for (uint64_t k = 1; k <= 3; k++) directory_release(r.d[A], 100 * k + i);
    }
    set_bid(&r, P1, 37, true); /* its lease ends at no time */
    placing_pair(&g, 400, &p, P2, D1);
    check_placed(&r, A, &g, P2, D1, 0);
    rig_close(&r);
}

/* ---- a server of an earlier version ---- */

struct other_server {
    int n_placements, n_told, n_misled;
    const char *placed; /* NULL: it does not know prefixes */
};

static void on_other_request(void *arg, struct http_exchange *x)
{
    struct other_server *o = arg;
    char text[256];
    if (!str_eq_c(http_path(x), DIRECTORY_PATH "reserve")) {
        http_reply(x, 200, "application/json", NULL, STR("{\"topics\":\"\",\"nodes\":[]}"));
        return;
    }
    o->n_placements++;
    o->n_told += str_find(http_body(x), STR("\"by_prefix\":{")) != SIZE_MAX;
    o->n_misled += str_find(http_body(x), STR("\"prefix\":")) != SIZE_MAX; /* of other members */
    snprintf(text, sizeof text, "{\"status\":\"ok\",\"fence\":\"0000000000000005\"%s%s%s}",
             o->placed ? ",\"placed\":\"" : "", o->placed ? o->placed : "", o->placed ? "\"" : "");
    http_reply(x, 200, "application/json", NULL, str_of(text));
}

TEST(a_server_of_an_earlier_version_leaves_the_choice)
{
    struct rig r;
    struct other_server o = { 0 };
    struct prompt p;
    struct placing g;
    struct answer a;
    struct http_server *http = other_open(&r, on_other_request, &o);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    for (uint64_t i = 0; i < 5; i++) {
        placing_pair(&g, 100 + i, &p, P1, D1);
        CHECK_OK(place(&r, r.d[A], &g, &a));
        CHECK(a.placed.fence == 5 && !a.placed.on.expected.known);
        CHECK(a.placed.on.prefill == P1 && a.placed.on.decode == D1);
        CHECK_EQ_INT(a.placed.on.tokens, PROMPT);
    }
    CHECK_EQ_INT(o.n_placements, 5);
    CHECK_EQ_INT(o.n_told, 1); /* it is told again after ten seconds */
    CHECK_EQ_INT(o.n_misled, 0);
    other_close(&r, http);
}

TEST(malformed_placements_are_no_answer)
{
    static const char *const answers[] = { "", "x", "1 2 3",
                                           "0000000000000001 0000000000000002 3" };
    struct rig r;
    struct other_server o = { 0 };
    struct prompt p;
    struct placing g;
    struct answer a;
    struct http_server *http = other_open(&r, on_other_request, &o);
    prompt_make(&p, 1, PROMPT, PROMPT, 0);
    for (size_t i = 0; i < COUNT_OF(answers); i++) {
        o.placed = answers[i];
        placing_pair(&g, 100 + i, &p, P1, D1);
        const enum status st = place(&r, r.d[A], &g, &a);
        if (st != ERR_UNAVAILABLE)
            test_fail(__FILE__, __LINE__, "%s: %s", answers[i], status_name(st));
        run_for(&r, 150); /* it is asked whether it is up */
    }
    other_close(&r, http);
}

ALL_BACKENDS(keepers_are_found_by_every_entry)
ALL_BACKENDS(what_is_kept_is_not_counted)
ALL_BACKENDS(tokens_count_until_they_are_computed)
ALL_BACKENDS(a_busy_keeper_gets_a_second_one)
ALL_BACKENDS(who_left_or_dropped_it_is_no_keeper)
ALL_BACKENDS(topics_have_tables_of_their_own)
static void run_with_long_leases(const char *backend)
{
    entries_lease_ms = 600000; /* however slow the machine is, no node lapses in one of the two */
    run_case(backend, case_a_random_run_has_the_answers_of_local);
}

TEST(a_random_run_has_the_answers_of_local_http) { run_with_long_leases("http"); }
TEST(a_random_run_has_the_answers_of_local_mounted) { run_with_long_leases("mounted"); }
TEST(a_random_run_has_the_answers_of_local_redis) { run_with_long_leases("redis"); }

TEST_MAIN(ALL_CASES(keepers_are_found_by_every_entry), ALL_CASES(what_is_kept_is_not_counted),
          ALL_CASES(tokens_count_until_they_are_computed),
          ALL_CASES(a_busy_keeper_gets_a_second_one),
          ALL_CASES(who_left_or_dropped_it_is_no_keeper),
          ALL_CASES(topics_have_tables_of_their_own),
          REMOTE_CASES(a_random_run_has_the_answers_of_local), CASE_T(redis_keepers_age, CASE_S),
          CASE_T(redis_rubbish_in_the_table_is_replaced, CASE_S),
          CASE_T(redis_without_a_bid_a_node_is_no_keeper, CASE_S),
          CASE_T(a_server_of_an_earlier_version_leaves_the_choice, CASE_S),
          CASE_T(malformed_placements_are_no_answer, CASE_S))
