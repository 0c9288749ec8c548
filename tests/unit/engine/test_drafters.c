/* test_drafters.c - what drafters propose, and how many of it is verified: without an engine. */
#include <math.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "shared/engine/draft/draft_config.h"
#include "shared/engine/draft/draft_control.h"
#include "shared/engine/draft/token_index.h"
#include "tests/harness/test.h"

enum { N_TOKENS = 600, CANARY = -77 };

/* Tokens below n_kinds, of which runs come up again. */
static void make_text(uint64_t seed, uint32_t n_kinds, int32_t *tokens, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const bool again = i > 40 && rng_uniform(seed, 2, i / 12) < 0.6;
        const uint32_t from = (uint32_t)(rng_uniform(seed, 3, i / 12) * 20) + 1;
        tokens[i] = again ? tokens[i - from] : (int32_t)(rng_uniform(seed, 1, i) * n_kinds);
    }
}

/* ---- the index ---- */

static void check_lists(const struct token_index *x, const int32_t *tokens, uint32_t end)
{
    uint32_t pos = token_index_find(x, tokens, end);
    for (uint32_t p = end - 1; p >= x->n; p--) {
        if (token_index_agree(tokens, end, p, x->n) < x->n) continue;
        while (pos > p) pos = token_index_before(x, pos); /* of other tokens */
        CHECK_EQ_INT(pos, p);
        pos = token_index_before(x, pos);
    }
    for (; pos > 0; pos = token_index_before(x, pos))
        CHECK(token_index_agree(tokens, end, pos, x->n) < x->n);
}

TEST(the_index_finds_every_earlier_place)
{
    int32_t tokens[N_TOKENS];
    for (uint32_t n = 1; n <= 4; n++) {
        struct token_index x;
        make_text(n, 12, tokens, N_TOKENS);
        CHECK_OK(token_index_init(&x, n, N_TOKENS));
        for (uint32_t end = n; end <= N_TOKENS; end += 1 + end % 7) {
            CHECK(token_index_add(&x, tokens, end));
            check_lists(&x, tokens, end);
        }
        token_index_release(&x);
    }
}

TEST(a_long_prompt_is_indexed_in_several_calls)
{
    enum { LONG = 2 * TOKEN_INDEX_ADD_MAX + 100 };
    int32_t *tokens = MEM_ARRAY(int32_t, LONG);
    struct token_index x;
    for (uint32_t i = 0; i < LONG; i++) tokens[i] = (int32_t)(i % 1000);
    CHECK_OK(token_index_init(&x, 2, LONG));
    CHECK(!token_index_add(&x, tokens, LONG));
    CHECK(!token_index_add(&x, tokens, LONG));
    CHECK(token_index_add(&x, tokens, LONG));
    CHECK_EQ_INT(token_index_find(&x, tokens, LONG), LONG - 1000);
    token_index_release(&x);
    mem_free(tokens);
}

TEST(an_index_without_memory_is_an_error)
{
    for (long nth = 1; nth <= 2; nth++) {
        struct token_index x;
        mem_fail_nth(nth);
        CHECK_STATUS(token_index_init(&x, 2, 1000), ERR_NOMEM);
        mem_fail_nth(0);
    }
}

/* ---- what all drafters promise ---- */

static uint32_t give_nothing(void *arg, const int32_t *tokens, uint32_t n_tokens, uint32_t n_max,
                             int32_t *drafts)
{
    (void)arg, (void)tokens, (void)n_tokens, (void)n_max, (void)drafts;
    return 0;
}

static struct draft_config config_of(const struct drafter_ops *ops, uint32_t least, uint32_t most)
{
    return (struct draft_config){
        .ops = ops,
        .n_tokens = DRAFT_TOKENS_MAX,
        .lookup_min = least,
        .lookup_max = most,
        .given = give_nothing,
    };
}

/* Drafts up to n_max tokens behind the first n_tokens, by a sequence that has seen those before. */
static uint32_t drafts_of(const struct drafter_ops *ops, struct drafter *d, struct draft_seq *s,
                          const int32_t *tokens, uint32_t n_tokens, uint32_t n_max, int32_t *drafts)
{
    struct draft_request r = {
        .seq = s, .tokens = tokens, .n_tokens = n_tokens, .n_max = n_max, .drafts = drafts
    };
    for (uint32_t i = 0; i <= DRAFT_TOKENS_MAX; i++) drafts[i] = CANARY;
    ops->propose(d, &r, 1);
    CHECK(r.n <= n_max && r.level < DRAFT_LEVELS);
    for (uint32_t i = n_max; i <= DRAFT_TOKENS_MAX; i++) CHECK_EQ_INT(drafts[i], CANARY);
    return r.n;
}

static void check_conforms(const struct drafter_ops *ops, uint32_t least, uint32_t most)
{
    int32_t tokens[N_TOKENS], drafts[DRAFT_TOKENS_MAX + 1], again[DRAFT_TOKENS_MAX + 1];
    const struct draft_config c = config_of(ops, least, most);
    struct drafter *d;
    CHECK_OK(ops->create(&c, NULL, &d, NULL));
    make_text(least, 9, tokens, N_TOKENS);
    struct draft_seq *grows = ops->begin(d, N_TOKENS);
    CHECK(grows != NULL);
    for (uint32_t end = 1; end < N_TOKENS; end += 1 + end % 3) {
        const uint32_t n_max = 1 + end % DRAFT_TOKENS_MAX;
        const uint32_t n = drafts_of(ops, d, grows, tokens, end, n_max, drafts);
        for (uint32_t i = 0; i < n; i++) CHECK(drafts[i] >= 0 && drafts[i] < 9);
        struct draft_seq *fresh = ops->begin(d, N_TOKENS); /* a moved sequence */
        CHECK_EQ_INT(drafts_of(ops, d, fresh, tokens, end, n_max, again), n);
        CHECK(memcmp(drafts, again, n * sizeof *drafts) == 0);
        ops->end(d, fresh);
    }
    ops->end(d, grows);
    mem_fail_nth(1);
    struct draft_seq *none = ops->begin(d, N_TOKENS);
    mem_fail_nth(0);
    CHECK(none == NULL);
    ops->free(d);
}

TEST(every_drafter_conforms)
{
    check_conforms(&drafter_given_ops, 1, 1);
    for (uint32_t i = 0; drafter_at(i); i++) {
        if (drafter_at(i)->chooses) continue; /* it needs an engine: test_draft_mtp, _model */
        check_conforms(drafter_at(i), 1, 4);
        check_conforms(drafter_at(i), 2, DRAFT_LOOKUP_MAX);
        check_conforms(drafter_at(i), 12, 12);
    }
}

/* ---- what they propose ---- */

/* Drafts behind the text, each letter a token. */
static void check_drafts(const struct drafter_ops *ops, uint32_t least, uint32_t most,
                         const char *text, uint32_t n_max, const char *want)
{
    int32_t tokens[N_TOKENS], drafts[DRAFT_TOKENS_MAX + 1];
    char got[DRAFT_TOKENS_MAX + 1] = "";
    const uint32_t n_tokens = (uint32_t)strlen(text);
    const struct draft_config c = config_of(ops, least, most);
    struct drafter *d;
    for (uint32_t i = 0; i < n_tokens; i++) tokens[i] = text[i];
    CHECK_OK(ops->create(&c, NULL, &d, NULL));
    struct draft_seq *s = ops->begin(d, N_TOKENS);
    const uint32_t n = drafts_of(ops, d, s, tokens, n_tokens, n_max, drafts);
    for (uint32_t i = 0; i < n; i++) got[i] = (char)drafts[i];
    CHECK_EQ_STR(got, want);
    ops->end(d, s);
    ops->free(d);
}

TEST(ngram_takes_the_longest_match_and_then_the_latest)
{
    const struct drafter_ops *o = &drafter_ngram_ops;
    check_drafts(o, 2, 8, "the cat sat. the c", 4, "at s");
    check_drafts(o, 2, 8, "abcX bcY abc", 1, "X");    /* three agree, before two that are later */
    check_drafts(o, 2, 2, "abcX bcY abc", 1, "Y");    /* two is all that counts */
    check_drafts(o, 2, 8, "abX abY ab", 1, "Y");      /* of equal ones the latest */
    check_drafts(o, 2, 8, "abababab", 8, "abababab"); /* beyond the end it repeats itself */
    check_drafts(o, 3, 8, "abX ab", 4, "");           /* two are too few */
    check_drafts(o, 2, 8, "ab", 4, "");
    check_drafts(o, 2, 8, "a", 4, "");
}

TEST(ngram_goes_on_behind_an_edit)
{
    const struct drafter_ops *o = &drafter_ngram_ops;
    check_drafts(o, 2, 8, "abcdXefgh abcdY", 4, "efgh");
    check_drafts(o, 2, 8, "bcdXefgh bcdY", 4, "");          /* three before it are too few */
    check_drafts(o, 2, 8, "abcdXefgh abcdYe", 3, "");       /* one token behind it is too few */
    check_drafts(o, 2, 8, "abcdXef dYgh abcdY", 2, "ef");   /* two agree behind it, four before */
    check_drafts(o, 2, 8, "abcdXef bcdYgh abcdY", 2, "gh"); /* four: it came up before */
    check_drafts(o, 2, 8, "abcdX", 2, "");
    check_drafts(o, 2, 8, "aaaaaaaab", 2, "bb"); /* the text behind it is the end */
}

TEST(suffix_takes_what_most_often_followed)
{
    const struct drafter_ops *o = &drafter_suffix_ops;
    check_drafts(o, 2, 8, "abX abX abY ab", 1, "X"); /* ngram takes the latest */
    check_drafts(o, 2, 8, "the cat sat. the c", 4, "at s");
    check_drafts(o, 2, 8, "abababab", 8, "abababab");
    check_drafts(o, 2, 8, "a", 4, "");
    /* after "ab" the text went on in six ways: none has a fifth of the votes */
    check_drafts(o, 2, 8, "ab1 ab2 ab3 ab4 ab5 ab6 xab", 4, "");
    check_drafts(o, 12, 16, "longmatch-abX+longmatch-ab", 1, "X");
    check_drafts(o, 13, 16, "longmatch-abX+longmatch-ab", 1, ""); /* twelve are too few */
    /* one match of twelve against six of two */
    check_drafts(o, 2, 8, "longmatch-abX+ab2 ab2 ab2 ab2 longmatch-ab", 1, "X");
}

/* ---- how many are verified ---- */

static void learn(struct draft_control *c, double fixed, double per_row)
{
    for (uint32_t i = 0; i < 200; i++) {
        const uint32_t rows = 1 + i % 12;
        draft_control_count_step(c, rows, fixed + per_row * rows);
    }
}

TEST(the_line_of_a_step_is_learned)
{
    struct draft_control c = { 0 };
    CHECK(draft_control_step_seconds(&c, 3) == 0);
    learn(&c, 0.010, 0.001);
    CHECK_NEAR(draft_control_step_seconds(&c, 1), 0.011, 1e-4);
    CHECK_NEAR(draft_control_step_seconds(&c, 9), 0.019, 2e-4);
    draft_control_count_step(&c, 4, 10.0); /* a pause of the machine */
    CHECK(draft_control_step_seconds(&c, 4) < 0.016);
    draft_control_count_step(&c, 0, 1.0); /* no rows, no step */
    learn(&c, 0.030, 0.010);              /* the context grew */
    CHECK_NEAR(draft_control_step_seconds(&c, 9), 0.120, 0.01);
}

/* Tokens per second of a choice. */
static double rate_of(const struct draft_choice *choices, uint32_t n, double fixed, double per_row)
{
    double tokens = n, rows = n;
    for (uint32_t i = 0; i < n; i++) {
        double chance = 1;
        for (uint32_t k = 0; k < choices[i].n; k++) tokens += chance *= (double)choices[i].chance;
        rows += choices[i].n;
    }
    return tokens / (fixed + per_row * rows);
}

TEST(the_choice_is_the_best_one)
{
    static const double rows_cost[] = { 0.0005, 0.002, 0.01, 0.05 };
    for (uint32_t k = 0; k < 4; k++)
        for (uint32_t seed = 0; seed < 40; seed++) {
            struct draft_control c = { 0 };
            struct draft_choice got[3], best[3], at[3];
            double best_rate = 0;
            learn(&c, 0.010, rows_cost[k]);
            for (uint32_t i = 0; i < 3; i++)
                got[i] = (struct draft_choice){ .chance = (float)rng_uniform(seed, 9, i),
                                                .n_max = 4 };
            memcpy(at, got, sizeof at);
            for (uint32_t all = 0; all < 125; all++) {
                at[0].n = all % 5, at[1].n = all / 5 % 5, at[2].n = all / 25;
                const double rate = rate_of(at, 3, 0.010, rows_cost[k]);
                if (rate > best_rate) memcpy(best, at, sizeof at);
                if (rate > best_rate) best_rate = rate;
            }
            draft_control_choose(&c, got, 3, 3);
            CHECK(rate_of(got, 3, 0.010, rows_cost[k]) > 0.98 * best_rate);
        }
}

TEST(drafts_end_where_rows_are_dear_or_chances_small)
{
    struct draft_control c = { 0 };
    struct draft_choice x = { .chance = 0.95f, .n_max = 8 };
    learn(&c, 0.0001, 0.010); /* a row costs what a step costs */
    draft_control_choose(&c, &x, 1, 1);
    CHECK_EQ_INT(x.n, 0);
    learn(&c, 0.010, 0.0001); /* rows cost next to nothing */
    draft_control_choose(&c, &x, 1, 1);
    CHECK_EQ_INT(x.n, 8);
    x.chance = 0.001f;
    draft_control_choose(&c, &x, 1, 1);
    CHECK_EQ_INT(x.n, 0);
}

TEST(chances_follow_what_was_accepted)
{
    struct draft_control c = { 0 };
    struct draft_rate good = { 0 }, bad = { 0 };
    const float first = draft_control_chance(&c, &good, 1);
    for (int i = 0; i < 20; i++) {
        draft_control_count(&c, &good, 1, 4, 4);
        draft_control_count(&c, &bad, 1, 4, 0);
    }
    CHECK(draft_control_chance(&c, &good, 1) > 0.9f);
    CHECK(draft_control_chance(&c, &bad, 1) < 0.2f);
    CHECK(draft_control_chance(&c, &bad, 2) > first); /* levels do not share */
    const struct draft_rate fresh = { 0 };
    const float next = draft_control_chance(&c, &fresh, 1); /* begins with that of all */
    CHECK(next > 0.6f && next < 0.9f);
    for (int i = 0; i < 20; i++) draft_control_count(&c, &bad, 1, 4, 4); /* it has changed */
    CHECK(draft_control_chance(&c, &bad, 1) > 0.9f);
}

/* With every kind of step, trying takes at most a hundredth of its time. */
TEST(tries_are_rare)
{
    static const double rows_cost[] = { 0.0001, 0.003, 0.01, 1 };
    for (uint32_t k = 0; k < 4; k++)
        for (uint32_t n_seqs = 1; n_seqs <= 64; n_seqs *= 4) {
            struct draft_control c = { 0 };
            struct draft_rate r = { 0 };
            uint32_t n_tries = 0;
            learn(&c, 0.010, rows_cost[k]);
            for (int i = 0; i < 10000; i++) n_tries += draft_control_tries(&c, &r, n_seqs);
            const double step = draft_control_step_seconds(&c, n_seqs),
                         row = draft_control_step_seconds(&c, n_seqs + 1) - step;
            CHECK(n_tries > 0);
            CHECK(n_seqs * n_tries * row <= 0.0101 * 10000 * step);
        }
}

TEST_MAIN(CASE(the_index_finds_every_earlier_place),
          CASE(a_long_prompt_is_indexed_in_several_calls),
          CASE(an_index_without_memory_is_an_error), CASE(every_drafter_conforms),
          CASE(ngram_takes_the_longest_match_and_then_the_latest),
          CASE(ngram_goes_on_behind_an_edit), CASE(suffix_takes_what_most_often_followed),
          CASE(the_line_of_a_step_is_learned), CASE(the_choice_is_the_best_one),
          CASE(drafts_end_where_rows_are_dear_or_chances_small),
          CASE(chances_follow_what_was_accepted), CASE(tries_are_rare))
