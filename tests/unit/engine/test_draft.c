/* test_draft.c - drafts in an engine: how many steps they save, where they end, which blocks they
 * take and what is counted. That tokens are the same whatever happens: test_engine.c. */
#include "shared/engine/draft/draft_config.h"
#include "tests/unit/engine/draft_book.h"

enum { N_OUT = 30, N_PROMPT = 20 };

static struct draft_book the_book;

/* Answers without drafts. The caller frees them. */
static struct answer *plain(const struct engine_request *reqs, uint32_t n)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ 0 });
    struct answer *all = rig_run(&r, reqs, n);
    rig_close(&r);
    return all;
}

static void open_with_book(struct rig *r, enum draft_book_kind kind, uint32_t n_drafts,
                           const struct engine_request *reqs, const struct answer *answers,
                           uint32_t n, struct rig_options o)
{
    draft_book_init(&the_book, kind, n_drafts, reqs, answers, n);
    o.draft = &the_book.config;
    rig_open(r, o);
}

/* ---- steps ---- */

TEST(right_drafts_save_steps)
{
    const struct engine_request q = rig_request(1, N_PROMPT, 5, N_OUT);
    struct answer *want = plain(&q, 1);
    for (uint32_t n = 1; n <= DRAFT_TOKENS_MAX; n++) {
        struct rig r;
        open_with_book(&r, DRAFTS_RIGHT, n, &q, want, 1, (struct rig_options){ 0 });
        struct answer *got = rig_run(&r, &q, 1);
        const uint32_t n_steps = (N_OUT - 1 + n) / (n + 1); /* behind that of the prompt */
        check_same(want, got);
        rig_await_steps(&r, 1 + n_steps);
        CHECK_EQ_INT(got->end.n_accepted, N_OUT - 1 - n_steps);
        CHECK_EQ_INT(got->end.n_drafted, got->end.n_accepted);
        CHECK_EQ_INT(rig_count(&r, "baton_spec_decode_num_draft_tokens_total"), got->end.n_drafted);
        CHECK_EQ_INT(rig_count(&r, "baton_spec_decode_num_accepted_tokens_total"),
                     got->end.n_accepted);
        rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
        rig_close(&r);
        mem_free(got);
    }
    mem_free(want);
}

TEST(wrong_drafts_cost_no_step)
{
    const struct engine_request q = rig_request(1, N_PROMPT, 5, N_OUT);
    struct answer *want = plain(&q, 1);
    struct rig r;
    open_with_book(&r, DRAFTS_WRONG, 4, &q, want, 1, (struct rig_options){ 0 });
    struct answer *got = rig_run(&r, &q, 1);
    check_same(want, got);
    rig_await_steps(&r, N_OUT);
    CHECK_EQ_INT(got->end.n_accepted, 0);
    CHECK(got->end.n_drafted > 4 * (N_OUT - 6));
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    rig_close(&r);
    mem_free(got);
    mem_free(want);
}

/* ---- ends ---- */

/* The answer ends at every place that a stop token, or max_tokens, can have among drafts. */
TEST(an_answer_ends_among_drafts)
{
    enum { N = 12 };
    struct engine_request reqs[2 * N];
    struct answer *whole, *want;
    struct rig r;
    for (uint32_t i = 0; i < 2 * N; i++) reqs[i] = rig_request(1 + i, N_PROMPT + i, 40 + i, N_OUT);
    whole = plain(reqs, 2 * N);
    for (uint32_t i = 0; i < N; i++) {
        reqs[i].sampling.max_tokens = 1 + i;
        reqs[N + i].sampling.n_stop_ids = 1;
        reqs[N + i].sampling.stop_ids[0] = whole[N + i].out[i].id;
        reqs[N + i].sampling.min_tokens = i / 2;
    }
    want = plain(reqs, 2 * N);
    open_with_book(&r, DRAFTS_RIGHT, 5, reqs, whole, 2 * N, (struct rig_options){ 0 });
    struct answer *got = rig_run(&r, reqs, 2 * N);
    for (uint32_t i = 0; i < 2 * N; i++) {
        check_same(&want[i], &got[i]);
        CHECK_EQ_INT(got[i].end.stop_token, want[i].end.stop_token);
        CHECK_EQ_INT(got[i].out[got[i].n_out - 1].ends, want[i].out[want[i].n_out - 1].ends);
    }
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    rig_close(&r);
    mem_free(whole);
    mem_free(want);
    mem_free(got);
}

/* ---- blocks ---- */

/* Two answers that fit into the pool without drafts, to the last block, are preempted by none. */
TEST(nobody_is_preempted_for_a_draft)
{
    enum { PROMPT = RIG_BLOCK_TOKENS, OUT = 3 * RIG_BLOCK_TOKENS };
    for (int kind = 0; kind < DRAFT_BOOK_KINDS; kind++) {
        const struct engine_request reqs[2] = { rig_request(1, PROMPT, 5, OUT),
                                                rig_request(2, PROMPT, 6, OUT) };
        struct answer *want = plain(reqs, 2);
        struct rig r;
        open_with_book(&r, (enum draft_book_kind)kind, 8, reqs, want, 2,
                       (struct rig_options){ .n_blocks = 8, .no_prefix_cache = true });
        struct answer *got = rig_run(&r, reqs, 2);
        for (int i = 0; i < 2; i++) check_same(&want[i], &got[i]);
        CHECK_EQ_INT(rig_count(&r, "baton_engine_preemptions_total"), 0);
        CHECK(kind == DRAFTS_WRONG || got[0].end.n_accepted > OUT / 4);
        rig_await_free_blocks(&r, 8);
        rig_close(&r);
        mem_free(want);
        mem_free(got);
    }
}

/* Wrong drafts, and a request that comes when the first ones are made. */
struct visit {
    struct draft_book book;
    struct engine *engine;
    const struct engine_request *guest; /* NULL: it is there */
};

static uint32_t give_and_submit(void *arg, const int32_t *tokens, uint32_t n_tokens, uint32_t n_max,
                                int32_t *drafts)
{
    struct visit *v = arg;
    if (v->guest) CHECK_OK(engine_submit(v->engine, v->guest));
    v->guest = NULL;
    return draft_book_give(&v->book, tokens, n_tokens, n_max, drafts);
}

/* A prompt that fits into the blocks that are left takes them before drafts do. */
TEST(nobody_waits_for_a_draft)
{
    enum { BLOCKS = 4, OUT = 30 };
    const struct engine_request reqs[2] = { rig_request(1, 10, 5, OUT),
                                            rig_request(2, 3 * RIG_BLOCK_TOKENS - 1, 6, 1) };
    struct answer *want = plain(reqs, 2), got[2] = { { .id = 1 }, { .id = 2 } };
    struct visit v = { .guest = &reqs[1] };
    struct rig r;
    bool started = false;
    draft_book_init(&v.book, DRAFTS_WRONG, 8, reqs, want, 1);
    v.book.config.given = give_and_submit;
    v.book.config.given_arg = &v;
    rig_open(&r, (struct rig_options){
                     .n_blocks = BLOCKS, .no_prefix_cache = true, .draft = &v.book.config });
    v.engine = r.engine;
    CHECK_OK(engine_submit(r.engine, &reqs[0]));
    while (!got[0].done || !got[1].done) {
        const struct rig_event e = rig_next(&r);
        started |= e.ev.id == 2 && e.ev.kind == ENGINE_STARTED;
        answer_add(&got[e.ev.id - 1], &e.ev);
        if (got[0].done) CHECK(started); /* not only behind the answer with drafts */
    }
    for (int i = 0; i < 2; i++) check_same(&want[i], &got[i]);
    CHECK(got[0].end.n_drafted > 0);
    rig_await_free_blocks(&r, BLOCKS);
    rig_close(&r);
    mem_free(want);
}

/* What a request finds in the prefix cache after another one: the blocks of its answer, also those
 * that drafts filled, and none with KV of a draft that was wrong. */
TEST(only_accepted_tokens_are_cached)
{
    for (int kind = 0; kind < DRAFT_BOOK_KINDS; kind++) {
        int32_t tokens[N_PROMPT + N_OUT];
        const struct engine_request q = rig_request(1, N_PROMPT, 5, N_OUT);
        struct answer *want = plain(&q, 1);
        struct rig r;
        open_with_book(&r, (enum draft_book_kind)kind, 7, &q, want, 1, (struct rig_options){ 0 });
        struct answer *got = rig_run(&r, &q, 1);
        check_same(want, got);
        memcpy(tokens, q.tokens, N_PROMPT * sizeof *tokens);
        for (uint32_t i = 0; i < N_OUT; i++) tokens[N_PROMPT + i] = got->out[i].id;
        struct engine_request next = rig_request(2, N_PROMPT + N_OUT, 6, 8);
        next.tokens = tokens;
        struct answer *after = rig_run(&r, &next, 1), *alone = plain(&next, 1);
        CHECK_EQ_INT(after->end.n_cached,
                     (N_PROMPT + N_OUT - 1) / RIG_BLOCK_TOKENS * RIG_BLOCK_TOKENS);
        check_same(alone, after);
        rig_close(&r);
        mem_free(want), mem_free(got), mem_free(after), mem_free(alone);
    }
}

/* ---- limits of a step ---- */

/* Prompts keep getting rows while drafts would take all of them. */
TEST(drafts_leave_rows_for_prompts)
{
    enum { N = 6 };
    struct engine_request reqs[N];
    struct rig r;
    for (uint32_t i = 0; i < N; i++) reqs[i] = rig_request(1 + i, 90, 70 + i, 60);
    struct answer *want = plain(reqs, N);
    open_with_book(&r, DRAFTS_WRONG, 8, reqs, want, N,
                   (struct rig_options){ .max_batched_tokens = 8, .max_seqs = 4 });
    struct answer *got = rig_run(&r, reqs, N);
    for (uint32_t i = 0; i < N; i++) check_same(&want[i], &got[i]);
    /* 540 prompt tokens, in steps of 8 rows of which prompts have 2 at least */
    CHECK(rig_count(&r, "baton_engine_steps_total") < 540 / 2 + N * 60);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

/* Where no draft is right, few are verified. */
TEST(drafting_ends_where_it_does_not_pay)
{
    enum { OUT = 250 };
    const struct engine_request q = rig_request(1, N_PROMPT, 5, OUT);
    struct answer *want = plain(&q, 1);
    struct rig r;
    draft_book_init(&the_book, DRAFTS_WRONG, 8, &q, want, 1);
    the_book.config.verify_all = false;
    rig_open(&r, (struct rig_options){ .draft = &the_book.config });
    struct answer *got = rig_run(&r, &q, 1);
    check_same(want, got);
    CHECK(got->end.n_drafted > 0); /* it was tried */
    /* now and then: 171 of 2,000 where noise says of all steps that rows cost next to nothing */
    CHECK(got->end.n_drafted < OUT);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

/* ---- drafters ---- */

/* An answer of a model that repeats itself, by every drafter that needs nothing but it. */
TEST(every_drafter_gives_the_same)
{
    enum { N = 4, OUT = 200 };
    struct engine_request reqs[N];
    for (uint32_t i = 0; i < N; i++) {
        reqs[i] = rig_request(1 + i, 8, 20 + i, OUT);
        reqs[i].sampling.temperature = i % 2 ? 0.3f : 0;
    }
    struct answer *want = plain(reqs, N);
    for (uint32_t i = 0; drafter_at(i); i++)
        for (uint32_t n = 1; n <= DRAFT_TOKENS_MAX && !drafter_at(i)->chooses; n += 3) {
            const struct draft_config c = {
                .ops = drafter_at(i), .n_tokens = n, .lookup_min = 1, .lookup_max = 4
            };
            struct rig r;
            rig_open(&r, (struct rig_options){ .draft = &c });
            struct answer *got = rig_run(&r, reqs, N);
            for (uint32_t k = 0; k < N; k++) check_same(&want[k], &got[k]);
            CHECK(rig_count(&r, "baton_spec_decode_num_accepted_tokens_total") > 0);
            rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
            rig_close(&r);
            mem_free(got);
        }
    mem_free(want);
}

TEST_MAIN(CASE(right_drafts_save_steps), CASE(wrong_drafts_cost_no_step),
          CASE(an_answer_ends_among_drafts), CASE(nobody_is_preempted_for_a_draft),
          CASE(nobody_waits_for_a_draft), CASE(only_accepted_tokens_are_cached),
          CASE(drafts_leave_rows_for_prompts), CASE(drafting_ends_where_it_does_not_pay),
          CASE(every_drafter_gives_the_same))
