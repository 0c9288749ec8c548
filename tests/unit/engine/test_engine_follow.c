/* test_engine_follow.c - nodes of several ranks: every request has the tokens and the bits of one
 * engine that has the whole model. Ranks are engines of one process, each with its thread; what
 * they exchange goes through shared memory. */
#include <stdatomic.h>
#include <stdlib.h>

#include "shared/base/clock.h"
#include "shared/engine/engine_state.h"
#include "shared/engine/step_plan.h"
#include "tests/fixtures/rank_meeting.h"
#include "tests/unit/engine/draft_book.h"
#include "tests/unit/engine/engine_rig.h"

enum { RANKS_MAX = 4, N_REQUESTS = TEST_IS_SANITIZED ? 7 : 14, N_OUT = 20, KV_EVENTS_MAX = 4096 };

/* ---- ranks ---- */

struct world;

/* A layer that a rank announced. */
struct kv_event {
    uint64_t id;
    uint32_t layer, begin, end;
    int32_t last_block;
};

struct rank {
    struct rig rig; /* first: the callbacks' arg */
    struct world *world;
    uint32_t rank;
    struct rank_seat seat, node_seat;
    struct model_share share;
    struct ep *made, *made_node; /* by make_objects */
    pthread_t thread;
    atomic_int n_joined, n_lost, n_node_bells, n_faults;
    struct err fault;
    struct kv_event kv[KV_EVENTS_MAX];
    uint32_t n_kv;
};

/* Nodes of tp ranks; with a group all of them share the model's experts. */
struct world {
    uint32_t size, tp;
    bool grouped;
    uint64_t epoch;
    struct rank_meeting meeting, node_meetings[RANKS_MAX];
    struct rank ranks[RANKS_MAX];
};

static void on_group(void *arg, const struct engine_group_event *ev)
{
    struct rank *r = arg;
    if (ev->kind == ENGINE_GROUP_JOINED) atomic_fetch_add(&r->n_joined, 1);
    if (ev->kind == ENGINE_GROUP_LOST) atomic_fetch_add(&r->n_lost, 1);
    if (ev->kind != ENGINE_GROUP_BELL) return;
    for (uint32_t i = 0; i < r->world->size; i++)
        if (i != r->rank) engine_bell(r->world->ranks[i].rig.engine, ev->epoch, ev->step);
}

static void on_node_bell(void *arg, uint64_t step)
{
    struct rank *r = arg;
    const uint32_t tp = r->world->tp, first = r->rank / tp * tp;
    atomic_fetch_add(&r->n_node_bells, 1);
    for (uint32_t i = first; i < first + tp; i++)
        if (i != r->rank) engine_node_bell(r->world->ranks[i].rig.engine, step);
}

static void on_fault(void *arg, const struct err *err)
{
    struct rank *r = arg;
    r->fault = *err;
    CHECK_EQ_INT(atomic_fetch_add(&r->n_faults, 1), 0);
}

static void on_kv_ready(void *arg, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                        const int32_t *blocks, uint64_t event)
{
    struct rank *r = arg;
    CHECK(event == 0 && begin < end && r->n_kv < KV_EVENTS_MAX);
    r->kv[r->n_kv++] = (struct kv_event){ id, layer, begin, end,
                                          blocks[(end - 1) / RIG_BLOCK_TOKENS] };
}

/* The object of the node's ranks, which meet by their own seats. */
static struct ep *node_object(struct rank *r)
{
    struct ep *e;
    struct ep_config c = {
        .backend = "shm",
        .device = r->rig.kernels->device,
        .rank = (int32_t)r->node_seat.rank,
        .size = (int32_t)r->world->tp,
        .timeout_ms = RANK_WAIT_MS,
        .exchange = rank_exchange,
        .exchange_arg = &r->node_seat,
    };
    engine_node_needs(r->rig.engine, &c);
    CHECK_OK(ep_create(&c, &e, NULL));
    return e;
}

static void *make_node_object(void *arg)
{
    struct rank *r = arg;
    r->made_node = node_object(r);
    return NULL;
}

static void *make_group_object(void *arg)
{
    struct rank *r = arg;
    r->made = rank_experts(&r->seat, r->rig.model, 0);
    return NULL;
}

/* Runs f for every rank at the same time. */
static void on_all(struct world *w, void *(*f)(void *))
{
    for (uint32_t i = 0; i < w->size; i++)
        CHECK(pthread_create(&w->ranks[i].thread, NULL, f, &w->ranks[i]) == 0);
    for (uint32_t i = 0; i < w->size; i++) CHECK(pthread_join(w->ranks[i].thread, NULL) == 0);
}

/* Gives every rank a group of the next epoch, in an order that changes. */
static void join_all(struct world *w)
{
    w->epoch++;
    on_all(w, make_group_object);
    for (uint32_t i = 0; i < w->size; i++) {
        struct rank *r = &w->ranks[(i + w->epoch) % w->size];
        CHECK_OK(engine_join_group(r->rig.engine, r->made, NULL, w->epoch));
        if (w->epoch % 3 == 0) usleep(500);
    }
}

static void open_rank(struct world *w, uint32_t i, struct rig_options o, uint32_t n_experts)
{
    struct rank *r = &w->ranks[i];
    r->world = w;
    r->rank = i;
    r->seat = (struct rank_seat){ &w->meeting, i };
    r->node_seat = (struct rank_seat){ &w->node_meetings[i / w->tp], i % w->tp };
    r->share = w->grouped ? rank_share(i, w->size, w->tp, n_experts)
                          : (struct model_share){ .tp_rank = i % w->tp,
                                                  .tp_size = w->tp,
                                                  .n_experts = SHARE_ALL_EXPERTS };
    o.share = &r->share;
    o.on_group = w->grouped ? on_group : NULL;
    o.on_node_bell = on_node_bell;
    rig_open(&r->rig, o);
}

/* n_experts 0: ranks have all experts that there are. */
static struct world *open_world(uint32_t size, uint32_t tp, struct rig_options o,
                                uint32_t n_experts)
{
    struct world *w = MEM_NEW(struct world);
    w->size = size;
    w->tp = tp;
    w->grouped = n_experts > 0;
    rank_meeting_init(&w->meeting, size);
    for (uint32_t i = 0; i < size / tp; i++) rank_meeting_init(&w->node_meetings[i], tp);
    for (uint32_t i = 0; i < size; i++) open_rank(w, i, o, n_experts);
    if (tp > 1) {
        on_all(w, make_node_object);
        for (uint32_t i = 0; i < size; i++)
            CHECK_OK(engine_set_node(w->ranks[i].rig.engine, w->ranks[i].made_node));
    }
    if (w->grouped) join_all(w);
    return w;
}

static void stop_all(struct world *w)
{
    for (uint32_t i = 0; i < w->size; i++) engine_stop(w->ranks[i].rig.engine);
}

/* Threads first: an engine may ring another until it has stopped. */
static void close_world(struct world *w)
{
    stop_all(w);
    for (uint32_t i = 0; i < w->size; i++) rig_close(&w->ranks[i].rig);
    for (uint32_t i = 0; i < w->size / w->tp; i++) rank_meeting_release(&w->node_meetings[i]);
    rank_meeting_release(&w->meeting);
    mem_free(w);
}

static struct rig *leader(struct world *w, uint32_t node) { return &w->ranks[node * w->tp].rig; }

static void await(atomic_int *n, int want)
{
    for (int ms = 0; atomic_load(n) < want; ms++) {
        if (ms == RIG_WAIT_MS) test_fail(__FILE__, __LINE__, "%d of %d", atomic_load(n), want);
        usleep(1000);
    }
}

static bool has_work(const struct rig *r)
{
    struct engine_stats st;
    engine_get_stats(r->engine, &st);
    return st.has_work;
}

/* All at one moment: a rank that is looked at later may wake one that slept before. */
static void await_sleep(struct world *w)
{
    for (uint32_t asleep = 0, ms = 0; asleep < 2 * w->size; ms++) {
        for (asleep = 0; asleep < 2 * w->size; asleep++)
            if (has_work(&w->ranks[asleep % w->size].rig)) break;
        CHECK(ms < RIG_WAIT_MS);
        usleep(1000);
    }
}

/* ---- requests ---- */

/* Of several lengths, some with one beginning; odd ones are sampled, with penalties; some want
 * their prompt's log-probabilities. */
static void make_requests(struct engine_request *reqs, uint32_t n_out)
{
    static const uint32_t lengths[] = { 33, 1, 100, 16, 2, 150, 48, 17, 31, 64, 15, 90, 160, 77 };
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        reqs[i] = rig_request(1 + i, lengths[i], i % 4 == 2 ? 500 : 500 + i, n_out);
        reqs[i].want_prompt_logprobs = i % 5 == 0;
        reqs[i].sampling.seed = 9000 + i;
        if (i % 2 == 0) continue;
        reqs[i].sampling.temperature = 0.9f;
        reqs[i].sampling.top_p = 0.95f;
        reqs[i].sampling.repetition_penalty = 1.1f;
        reqs[i].sampling.presence_penalty = 0.3f;
    }
}

static void check_scores(const struct answer *a, const struct answer *b)
{
    check_same(a, b);
    CHECK_EQ_INT(a->n_scored, b->n_scored);
    CHECK(memcmp(a->scored_id, b->scored_id, sizeof a->scored_id) == 0);
    CHECK(memcmp(a->scored, b->scored, sizeof a->scored) == 0);
}

static struct rig_options options(const char *model)
{
    return (struct rig_options){ .model = model, .max_batched_tokens = 48, .max_seqs = 8 };
}

static struct answer *answers_alone(struct rig_options o, const struct engine_request *reqs,
                                    uint32_t *n_experts)
{
    struct rig r;
    o.share = NULL;
    rig_open(&r, o);
    struct answer *want = rig_run(&r, reqs, N_REQUESTS);
    *n_experts = r.model->config.moe.n_experts;
    rig_close(&r);
    return want;
}

static uint32_t node_of(const struct world *w, uint32_t i) { return w->size > w->tp && i % 3 == 2; }

static void submit_all(struct world *w, const struct engine_request *reqs, struct answer *got)
{
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        got[i].id = reqs[i].id;
        CHECK_OK(engine_submit(leader(w, node_of(w, i))->engine, &reqs[i]));
    }
}

static void gather_of(struct world *w, uint32_t node, struct answer *got)
{
    uint32_t n = 0;
    struct answer *mine = MEM_ARRAY(struct answer, N_REQUESTS);
    for (uint32_t i = 0; i < N_REQUESTS; i++)
        if (node_of(w, i) == node) mine[n++] = got[i];
    rig_gather(leader(w, node), mine, n);
    for (uint32_t i = N_REQUESTS; i-- > 0;)
        if (node_of(w, i) == node) got[i] = mine[--n];
    mem_free(mine);
}

static void check_answers(struct world *w, struct answer *got, const struct answer *want)
{
    for (uint32_t n = 0; n < w->size / w->tp; n++) gather_of(w, n, got);
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        CHECK_OK(got[i].end.status);
        check_scores(&got[i], &want[i]);
    }
}

/* ---- answers of nodes ---- */

/* The requests twice: the second time their beginnings are in the prefix cache. */
static void check_with(uint32_t size, uint32_t tp, struct rig_options o, bool grouped,
                       enum draft_source drafts)
{
    struct engine_request reqs[N_REQUESTS];
    struct draft_book book;
    uint32_t n_experts;
    make_requests(reqs, N_OUT);
    struct answer *want = answers_alone(o, reqs, &n_experts);
    draft_book_init(&book, DRAFTS_MIXED, 4, reqs, want, N_REQUESTS);
    draft_source_set(&o, drafts, &book);
    struct world *w = open_world(size, tp, o, grouped ? n_experts : 0);
    for (int round = 0; round < 2; round++) {
        struct answer *got = MEM_ARRAY(struct answer, N_REQUESTS);
        submit_all(w, reqs, got);
        check_answers(w, got, want);
        mem_free(got);
        await_sleep(w);
    }
    if (o.n_blocks) CHECK(rig_count(leader(w, 0), "baton_engine_preemptions_total") > 0);
    if (!o.no_prefix_cache)
        CHECK(rig_count(leader(w, 0), "baton_prefix_cache_hit_tokens_total") > 0);
    if (drafts == DRAFTS_OF_BOOK)
        CHECK(rig_count(leader(w, 0), "baton_spec_decode_num_accepted_tokens_total") > 0);
    if (drafts) CHECK(rig_count(leader(w, 0), "baton_spec_decode_num_draft_tokens_total") > 0);
    for (uint32_t i = 0; i < size; i++) CHECK_EQ_INT(atomic_load(&w->ranks[i].n_lost), 0);
    close_world(w);
    mem_free(want);
}

static void check_node(uint32_t size, uint32_t tp, struct rig_options o, bool grouped)
{
    check_with(size, tp, o, grouped, NO_DRAFTS);
}

TEST(two_and_four_ranks_of_llama_answer_as_one)
{
    struct rig_options o = options("llama");
    for (uint32_t tp = 1; tp <= 4; tp *= 2) check_node(tp, tp, o, false);
    o.activations = ACTIVATIONS_FAST;
    o.max_batched_tokens = 256; /* plans of two messages */
    check_node(2, 2, o, false);
}

TEST(two_and_four_ranks_of_qwen3_moe_answer_as_one)
{
    struct rig_options o = options("qwen3_moe");
    for (uint32_t tp = 2; tp <= 4; tp *= 2)
        for (int grouped = 0; grouped < 2; grouped++) check_node(tp, tp, o, grouped);
}

TEST(two_and_four_ranks_of_deepseek_v3_answer_as_one)
{
    struct rig_options o = options("deepseek_v3");
    o.activations = ACTIVATIONS_FAST;
    for (uint32_t tp = 2; tp <= 4; tp *= 2) check_node(tp, tp, o, tp == 4);
}

TEST(ranks_that_preempt_answer_as_one)
{
    struct rig_options o = options("llama");
    o.n_blocks = 14;
    check_node(2, 2, o, false);
}

/* A model of 9 heads. */
TEST(three_ranks_of_smollm2_answer_as_one)
{
    struct rig_options o = options(NULL);
    o.path = getenv("BATON_TEST_GGUF");
    if (!o.path || !*o.path) SKIP("BATON_TEST_GGUF names no model");
    o.activations = ACTIVATIONS_FAST;
    check_node(3, 3, o, false);
}

TEST(two_nodes_of_two_ranks_share_experts)
{
    struct rig_options o = options("qwen3_moe");
    check_node(4, 2, o, true);
    o = options("deepseek_v3");
    o.n_blocks = 14;
    check_node(4, 2, o, true);
}

/* Those that follow compute rows of drafts as their leader plans them. */
TEST(ranks_with_drafts_answer_as_one)
{
    struct rig_options o = options("llama");
    check_with(2, 2, o, false, DRAFTS_OF_BOOK);
    o.n_blocks = 14;
    o.max_batched_tokens = 256;
    check_with(4, 4, o, false, DRAFTS_OF_BOOK);
    o = options("deepseek_v3");
    o.activations = ACTIVATIONS_FAST;
    check_with(4, 2, o, true, DRAFTS_OF_BOOK);
}

/* Passes of the layer are planned like steps; those of a group of nodes are made together. */
TEST(ranks_with_a_draft_layer_answer_as_one)
{
    struct rig_options o = options("deepseek_v3");
    check_with(2, 2, o, false, DRAFTS_OF_LAYER);
    check_with(4, 2, o, true, DRAFTS_OF_LAYER);
    o = options("ernie_moe");
    o.activations = ACTIVATIONS_FAST;
    check_with(2, 2, o, true, DRAFTS_OF_LAYER);
    o.n_blocks = 14;
    o.max_batched_tokens = 256;
    check_with(4, 2, o, true, DRAFTS_OF_LAYER);
}

/* ---- life of a node ---- */

struct scene {
    struct world *w;
    struct engine_request reqs[N_REQUESTS];
    struct answer *want, *got;
};

static struct scene *open_scene_with(struct rig_options o, uint32_t size, uint32_t tp, bool grouped,
                                     uint32_t n_out)
{
    struct scene *s = MEM_NEW(struct scene);
    struct rig_options plain = o;
    uint32_t n_experts;
    draft_source_set(&plain, NO_DRAFTS, NULL);
    make_requests(s->reqs, n_out);
    s->want = answers_alone(plain, s->reqs, &n_experts);
    s->got = MEM_ARRAY(struct answer, N_REQUESTS);
    o.on_fault = on_fault;
    s->w = open_world(size, tp, o, grouped ? n_experts : 0);
    return s;
}

static struct scene *open_long_scene(const char *model, uint32_t size, uint32_t tp, bool grouped,
                                     uint32_t n_out)
{
    return open_scene_with(options(model), size, tp, grouped, n_out);
}

static struct scene *open_scene(const char *model, uint32_t size, uint32_t tp, bool grouped)
{
    return open_long_scene(model, size, tp, grouped, N_OUT);
}

static void close_scene(struct scene *s)
{
    close_world(s->w);
    mem_free(s->want);
    mem_free(s->got);
    mem_free(s);
}

static void ask_one(struct scene *s, uint32_t node, uint32_t i, uint64_t id)
{
    struct engine_request r = s->reqs[i];
    r.id = id;
    struct answer *a = rig_run(leader(s->w, node), &r, 1);
    check_scores(a, &s->want[i]);
    mem_free(a);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A node without work uses no CPU, and its leader wakes it, once. */
static void check_sleep(const char *model, uint32_t size, bool grouped)
{
    struct scene *s = open_scene(model, size, 2, grouped);
    struct rank *first = &s->w->ranks[0];
    for (uint32_t round = 0; round < 5; round++) {
        await_sleep(s->w);
        const int bells = atomic_load(&first->n_node_bells);
        ask_one(s, 0, round, 100 + round);
        CHECK_EQ_INT(atomic_load(&first->n_node_bells), bells + 1);
    }
    await_sleep(s->w);
    const double before = cpu_seconds();
    usleep(500000);
    CHECK(cpu_seconds() - before < 0.25);
    close_scene(s);
}

TEST(a_node_without_rows_sleeps_until_it_has_some)
{
    check_sleep("llama", 2, false);
    check_sleep("qwen3_moe", 2, true);
    check_sleep("qwen3_moe", 4, true);
}

/* Followers announce what the leader announces, in its order: cached blocks at once, then layer by
 * layer. */
static void check_announced(struct rig_options o, uint32_t tp, uint32_t n_layers)
{
    o.on_kv_ready = on_kv_ready;
    struct world *w = open_world(tp, tp, o, 0);
    struct engine_request reqs[] = { rig_request(1, 100, 7, 1), rig_request(2, 130, 7, 1),
                                     rig_request(3, 40, 8, 4) };
    for (int i = 0; i < 2; i++) reqs[i].prefill_only = true;
    for (int i = 0; i < 3; i++) {
        mem_free(rig_run(leader(w, 0), &reqs[i], 1));
        if (reqs[i].prefill_only) CHECK_OK(engine_release(leader(w, 0)->engine, reqs[i].id));
    }
    await_sleep(w);
    stop_all(w);
    const struct rank *r = w->ranks;
    CHECK_EQ_INT(r[0].n_kv, n_layers * (3 /* chunks of 48 */ + 1 /* cached: 96 */ + 1));
    for (uint32_t i = 1; i < tp; i++) {
        CHECK_EQ_INT(r[i].n_kv, r[0].n_kv);
        CHECK(memcmp(r[i].kv, r[0].kv, r[0].n_kv * sizeof *r->kv) == 0);
    }
    close_world(w);
}

TEST(followers_announce_the_layers_of_prompts)
{
    struct rig_options o = options("llama");
    check_announced(o, 4, 3);
    o = options("deepseek_v3");
    draft_source_set(&o, DRAFTS_OF_LAYER, NULL);
    check_announced(o, 2, 3 + 1);
}

/* A follower has the KV that its share of the model makes: that of the whole, head by head. */
TEST(a_rank_holds_the_kv_of_its_heads)
{
    struct rig_options o = options("llama_bias"); /* two KV heads */
    struct rig whole;
    struct engine_request q = rig_request(1, 70, 3, 1);
    q.prefill_only = true;
    rig_open(&whole, o);
    struct world *w = open_world(2, 2, o, 0);
    mem_free(rig_run(&whole, &q, 1));
    mem_free(rig_run(leader(w, 0), &q, 1));
    await_sleep(w);
    stop_all(w);
    const struct kv_layout *l = engine_kv_layout(whole.engine);
    const size_t head = kv_layout_block_bytes(l) / l->n_layers / 2;
    for (uint32_t layer = 0; layer < l->n_layers; layer++)
        for (uint32_t r = 0; r < 2; r++) {
            const struct kv_layout *own = engine_kv_layout(w->ranks[r].rig.engine);
            const char *all = engine_kv_memory(whole.engine)->ptr,
                       *mine = engine_kv_memory(w->ranks[r].rig.engine)->ptr;
            for (uint32_t b = 0; b < 70 / RIG_BLOCK_TOKENS; b++)
                CHECK(memcmp(all + kv_layout_offset(l, layer, b) + r * head,
                             mine + kv_layout_offset(own, layer, b), head) == 0);
        }
    close_world(w);
    rig_close(&whole);
}

/* ---- groups of nodes ---- */

TEST(groups_of_nodes_follow_each_other_between_steps)
{
    struct scene *s = open_scene("qwen3_moe", 4, 2, true);
    submit_all(s->w, s->reqs, s->got);
    for (int i = 0; i < 10; i++) {
        join_all(s->w);
        for (uint32_t r = 0; r < 4; r++) await(&s->w->ranks[r].n_joined, i + 2);
    }
    check_answers(s->w, s->got, s->want);
    await_sleep(s->w);
    join_all(s->w); /* though nobody has rows */
    for (uint32_t r = 0; r < 4; r++) await(&s->w->ranks[r].n_joined, 12);
    for (uint32_t r = 0; r < 4; r++) CHECK_EQ_INT(atomic_load(&s->w->ranks[r].n_lost), 0);
    close_scene(s);
}

/* Given up in the middle of steps, by leaders and followers at other moments each time; whoever is
 * not told finds out. The next group goes on where the steps ended. */
static void check_lost_group(struct rig_options o)
{
    struct scene *s = open_scene_with(o, 4, 2, true, 100);
    submit_all(s->w, s->reqs, s->got);
    for (int round = 1; round <= 16; round++) {
        usleep(200 * (useconds_t)round);
        engine_abort_group(s->w->ranks[round / 2 % 4].rig.engine, s->w->epoch);
        if (round % 2)
            for (uint32_t r = 0; r < 4; r++)
                engine_abort_group(s->w->ranks[r].rig.engine, s->w->epoch);
        for (uint32_t r = 0; r < 4; r++) await(&s->w->ranks[r].n_lost, round);
        join_all(s->w);
    }
    check_answers(s->w, s->got, s->want);
    for (uint32_t n = 0; n < 2; n++) rig_await_free_blocks(leader(s->w, n), RIG_BLOCKS_MAX);
    for (uint32_t r = 0; r < 4; r++) CHECK_EQ_INT(atomic_load(&s->w->ranks[r].n_faults), 0);
    close_scene(s);
}

TEST(a_lost_group_of_nodes_is_replaced_without_a_trace)
{
    struct rig_options o = options("qwen3_moe");
    check_lost_group(o);
    o = options("ernie_moe");
    draft_source_set(&o, DRAFTS_OF_LAYER, NULL);
    check_lost_group(o);
}

/* ---- faults ---- */

/* Waits for the fault of rank r, which comes long before an exchange gives up (RANK_WAIT_MS). */
static void await_fault(struct rank *r, const char *says)
{
    await(&r->n_faults, 1);
    if (!strstr(r->fault.text, says)) test_fail(__FILE__, __LINE__, "%s", r->fault.text);
}

/* A follower ends in the middle of steps. */
static void check_loss(uint32_t size, bool grouped, uint32_t who, uint32_t node,
                       enum draft_source drafts)
{
    struct rig_options o = options(drafts ? "deepseek_v3" : grouped ? "qwen3_moe" : "llama");
    draft_source_set(&o, drafts, NULL);
    struct scene *s = open_scene_with(o, size, 2, grouped, 100);
    submit_all(s->w, s->reqs, s->got);
    while (mailbox_len(leader(s->w, node)->events) < 5) usleep(100); /* it is busy */
    engine_stop(s->w->ranks[who].rig.engine);
    for (uint32_t r = 2 * node; r < 2 * node + 2; r++)
        if (r != who) await_fault(&s->w->ranks[r], "rank");
    CHECK_EQ_INT(atomic_load(&s->w->ranks[who].n_faults), 0);
    for (uint32_t r = 0; r < size && grouped; r++)
        if (r / 2 != node) await(&s->w->ranks[r].n_lost, 1);
    close_scene(s);
}

TEST(a_node_is_lost_with_one_of_its_ranks)
{
    check_loss(2, false, 1, 0, NO_DRAFTS);
    check_loss(2, false, 0, 0, NO_DRAFTS);
    check_loss(4, true, 1, 0, NO_DRAFTS);
    check_loss(4, true, 3, 1, NO_DRAFTS);
    check_loss(4, true, 2, 1, NO_DRAFTS);
    check_loss(2, false, 1, 0, DRAFTS_OF_LAYER);
    check_loss(4, true, 3, 1, DRAFTS_OF_LAYER);
}

/* Whoever watches the ranks says it to those that sleep. */
TEST(a_sleeping_node_is_lost_when_it_is_told)
{
    struct scene *s = open_scene("llama", 2, 2, false);
    ask_one(s, 0, 0, 100);
    await_sleep(s->w);
    engine_stop(s->w->ranks[1].rig.engine);
    engine_abort_node(s->w->ranks[0].rig.engine);
    await_fault(&s->w->ranks[0], "another rank of this node was lost");
    close_scene(s);
}

static void check_refused(struct rig_options first, struct rig_options second, const char *says)
{
    struct world *w = MEM_NEW(struct world);
    first.on_fault = second.on_fault = on_fault;
    w->size = w->tp = 2;
    rank_meeting_init(&w->meeting, 2);
    rank_meeting_init(&w->node_meetings[0], 2);
    open_rank(w, 0, first, 0);
    open_rank(w, 1, second, 0);
    on_all(w, make_node_object);
    for (uint32_t i = 0; i < 2; i++)
        CHECK_OK(engine_set_node(w->ranks[i].rig.engine, w->ranks[i].made_node));
    const struct engine_request q = rig_request(1, 20, 1, 4);
    CHECK_OK(engine_submit(leader(w, 0)->engine, &q));
    await_fault(&w->ranks[1], says);
    await_fault(&w->ranks[0], "rank 1 of 2");
    CHECK_STATUS(w->ranks[1].fault.code, ERR_PEER_MISMATCH);
    close_world(w);
}

/* A rank with another pool would write to other blocks than the leader means, and one without the
 * draft layer would have nothing to make its passes with. */
TEST(a_rank_with_other_limits_is_refused)
{
    struct rig_options o = options("llama"), other = o;
    other.n_blocks = RIG_BLOCKS_MAX + 2;
    check_refused(o, other, "KV blocks: 128 on the node's first rank, 130 on this one");
    o = other = options("deepseek_v3");
    draft_source_set(&o, DRAFTS_OF_LAYER, NULL);
    check_refused(o, other, "rows of a pass of the draft layer: 48 on the node's first rank, 0 on");
    check_refused(other, o, "rows of a pass of the draft layer: 0 on the node's first rank, 48 on");
}

/* ---- plans that no leader writes ---- */

enum { N_VOCAB = 100, PLAN_WORDS = 256 };

/* Rows 4 .. 9 of a prompt, which are announced, and one of another sequence; blocks of 4. */
static struct step_plan good_plan(uint64_t *words)
{
    struct step_plan_head *h = (struct step_plan_head *)words;
    *h = (struct step_plan_head){
        .limits = { .max_rows = 16,
                    .max_seqs = 4,
                    .max_logits = 4,
                    .max_len = 64,
                    .block_tokens = 4,
                    .n_blocks = 32 },
        .is_step = 1,
        .n_announced = 1,
        .n_seqs = 2,
        .n_rows = 7,
        .n_logits = 1,
        .n_blocks = 5,
    };
    const struct step_plan p = step_plan_at(words);
    p.announced[0] = (struct step_plan_announced){ .id = 9, .begin = 4, .end = 10 };
    p.seqs[0] = (struct step_plan_seq){ .pos_begin = 4, .n_q = 6 };
    p.seqs[1] = (struct step_plan_seq){ .pos_begin = 7, .n_q = 1, .table = 3, .is_decode = 1 };
    for (int i = 0; i < 7; i++) p.ids[i] = N_VOCAB - 1 - i;
    for (int i = 0; i < 5; i++) p.blocks[i] = 31 - i;
    p.logit_rows[0] = 6;
    return p;
}

/* The same as a pass of the draft layer, whose hidden states are rows 2 .. 7 and 15 of the last. */
static struct step_plan good_pass(uint64_t *words)
{
    struct step_plan_head h;
    struct step_plan p = good_plan(words);
    h = *p.head;
    h.is_step = 0;
    h.is_pass = STEP_PLAN_FIRST_PASS;
    h.n_hidden = 2;
    uint64_t old[PLAN_WORDS];
    memcpy(old, words, sizeof old);
    const struct step_plan from = step_plan_at(old);
    *p.head = h;
    p = step_plan_at(words);
    memcpy(p.ids, from.ids, (h.n_rows + h.n_logits + h.n_blocks) * sizeof *p.ids);
    p.hidden[0] = (struct step_plan_hidden){ .first = 2, .n = 6 };
    p.hidden[1] = (struct step_plan_hidden){ .first = 15, .n = 1 };
    return p;
}

/* Whoever ran them would read beside tables, tell of layers that there are not, or abort. */
TEST(plans_of_what_there_is_not_are_refused)
{
    uint64_t words[PLAN_WORDS];
    struct step_plan p = good_plan(words);
    CHECK_OK(step_plan_check(&p, N_VOCAB, NULL));
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        p = good_plan(words);                                                                      \
        change;                                                                                    \
        CHECK_STATUS(step_plan_check(&p, N_VOCAB, NULL), ERR_INTERNAL);                            \
    } while (0)
    REFUSED(p.ids[0] = N_VOCAB);
    REFUSED(p.ids[6] = -1);
    REFUSED(p.logit_rows[0] = 7);
    REFUSED(p.logit_rows[0] = -1);
    REFUSED(p.announced[0].begin = 11);
    REFUSED(p.announced[0].told = 5);
    REFUSED(p.announced[0].end = 21);
    REFUSED(p.announced[0].table = 3);
    REFUSED(p.seqs[0].n_q = 5);
    REFUSED(p.seqs[0].n_q = UINT32_MAX);
    REFUSED(p.seqs[1].pos_begin = UINT32_MAX);
    REFUSED(p.seqs[1].table = 4);
    REFUSED(p.blocks[4] = 32);
    REFUSED(p.blocks[0] = -1);
#undef REFUSED
}

TEST(passes_of_what_there_is_not_are_refused)
{
    uint64_t words[PLAN_WORDS];
    struct step_plan p = good_pass(words);
    CHECK_OK(step_plan_check(&p, N_VOCAB, NULL));
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        p = good_pass(words);                                                                      \
        change;                                                                                    \
        CHECK_STATUS(step_plan_check(&p, N_VOCAB, NULL), ERR_INTERNAL);                            \
    } while (0)
    REFUSED(p.hidden[0].n = 5); /* fewer than rows */
    REFUSED(p.hidden[0].n = 7);
    REFUSED(p.hidden[0].n = UINT32_MAX);
    REFUSED(p.hidden[0].first = UINT32_MAX);
    REFUSED(p.hidden[1].first = 16);              /* behind the rows of any step */
    REFUSED(p.head->is_pass = STEP_PLAN_NO_PASS); /* a step has none */
    REFUSED(p.ids[0] = N_VOCAB);
    REFUSED(p.blocks[0] = -1);
#undef REFUSED
}

/* The follower waits by itself, and is not held up by the leader's next plan. */
TEST(ranks_of_a_paced_node_wait_alike)
{
    const struct pace_curve c = { .fixed_us = 20000 };
    struct rig_options o = options("llama");
    const struct engine_request q = rig_request(1, 40, 7, N_OUT);
    o.pace = &c;
    struct world *w = open_world(2, 2, o, 0);
    const uint64_t begin = clock_ns();
    struct answer *a = rig_run(leader(w, 0), &q, 1);
    CHECK(clock_ns() - begin >= N_OUT * UINT64_C(20000000) - 2000000);
    CHECK_OK(a->end.status);
    await_sleep(w);
    for (uint32_t i = 0; i < 2; i++) CHECK_EQ_INT(w->ranks[i].rig.engine->n_paced, N_OUT);
    close_world(w);
    mem_free(a);
}

TEST_MAIN(CASE(plans_of_what_there_is_not_are_refused),
          CASE(passes_of_what_there_is_not_are_refused),
          CASE_T(two_and_four_ranks_of_llama_answer_as_one, 120),
          CASE_T(two_and_four_ranks_of_qwen3_moe_answer_as_one, 120),
          CASE_T(two_and_four_ranks_of_deepseek_v3_answer_as_one, 120),
          CASE_T(ranks_that_preempt_answer_as_one, 120),
          CASE_T(three_ranks_of_smollm2_answer_as_one, 240),
          CASE_T(two_nodes_of_two_ranks_share_experts, 120),
          CASE_T(ranks_with_drafts_answer_as_one, 120),
          CASE_T(ranks_with_a_draft_layer_answer_as_one, 240),
          CASE_T(a_node_without_rows_sleeps_until_it_has_some, 60),
          CASE_T(followers_announce_the_layers_of_prompts, 60),
          CASE_T(a_rank_holds_the_kv_of_its_heads, 60),
          CASE_T(groups_of_nodes_follow_each_other_between_steps, 60),
          CASE_T(a_lost_group_of_nodes_is_replaced_without_a_trace, 60),
          CASE_T(a_node_is_lost_with_one_of_its_ranks, 60),
          CASE_T(a_sleeping_node_is_lost_when_it_is_told, 60),
          CASE_T(ranks_of_a_paced_node_wait_alike, 60),
          CASE_T(a_rank_with_other_limits_is_refused, 60))
