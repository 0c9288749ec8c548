/* test_generation_wire.c - a generation to its message and back, and every bound of a message that
 * arrives. */
#include "shared/cluster/generation_wire.h"

#include <math.h>
#include <string.h>

#include "tests/harness/test.h"

static const int32_t TOKENS[] = { 5, 0, 511, 7, 2147483647, 9 };
static const struct logit_bias BIAS[] = { { 3, -100 }, { 511, 2.5f } };

static struct generation_wire sample(void)
{
    return (struct generation_wire){
        .tokens = TOKENS,
        .n_tokens = 6,
        .n_prompt = 4,
        .cache_salt = 0x8000000000000001,
        .prompt_logprobs = true,
        .has_resume_key = true,
        .resume_key = { UINT64_MAX, 5 },
        .sampling = { .temperature = 0.75f,
                      .top_p = 0.5f,
                      .min_p = 0.125f,
                      .presence_penalty = -2,
                      .frequency_penalty = 2,
                      .repetition_penalty = 1.5f,
                      .top_k = -1,
                      .seed = UINT64_MAX,
                      .max_tokens = 300,
                      .min_tokens = 4,
                      .ignore_eos = true,
                      .n_logprobs = -1,
                      .n_stop_ids = 2,
                      .stop_ids = { 1, 2 },
                      .n_bias = 2,
                      .bias = BIAS, },
    };
}

/* Encodes, packs and unpacks: the message as a peer sees it. */
static Baton__Generation *travel(const struct generation_wire *g)
{
    struct arena arena;
    arena_init(&arena);
    Baton__Generation *m = generation_wire_encode(g, &arena);
    size_t n = baton__generation__get_packed_size(m);
    uint8_t *bytes = mem_calloc(1, n);
    CHECK_EQ_INT(baton__generation__pack(m, bytes), n);
    arena_release(&arena);
    Baton__Generation *back = baton__generation__unpack(NULL, n, bytes);
    CHECK(back != NULL);
    mem_free(bytes);
    return back;
}

static void check_sampling(const struct sampling_params *a, const struct sampling_params *b)
{
    CHECK(a->temperature == b->temperature && a->top_p == b->top_p && a->min_p == b->min_p);
    CHECK(a->presence_penalty == b->presence_penalty &&
          a->frequency_penalty == b->frequency_penalty);
    CHECK(a->repetition_penalty == b->repetition_penalty);
    CHECK_EQ_INT(a->top_k, b->top_k);
    CHECK(a->seed == b->seed);
    CHECK_EQ_INT(a->max_tokens, b->max_tokens);
    CHECK_EQ_INT(a->min_tokens, b->min_tokens);
    CHECK_EQ_INT(a->ignore_eos, b->ignore_eos);
    CHECK_EQ_INT(a->n_logprobs, b->n_logprobs);
    CHECK_EQ_INT(a->n_stop_ids, b->n_stop_ids);
    CHECK(memcmp(a->stop_ids, b->stop_ids, sizeof a->stop_ids) == 0);
    CHECK_EQ_INT(a->n_bias, b->n_bias);
    for (uint32_t i = 0; i < a->n_bias; i++)
        CHECK(a->bias[i].id == b->bias[i].id && a->bias[i].bias == b->bias[i].bias);
    CHECK(a->allowed == NULL && b->allowed == NULL);
}

TEST(generation_wire_round_trip)
{
    struct generation_wire g = sample(), back = { 0 };
    struct arena arena;
    struct err err = { 0 };
    arena_init(&arena);
    Baton__Generation *m = travel(&g);
    CHECK_OK(generation_wire_decode(m, &arena, &back, &err));
    baton__generation__free_unpacked(m, NULL); /* the result must not point into the message */
    CHECK_EQ_INT(back.n_tokens, 6);
    CHECK_EQ_INT(back.n_prompt, 4);
    CHECK(memcmp(back.tokens, TOKENS, sizeof TOKENS) == 0);
    CHECK(back.cache_salt == g.cache_salt && back.prompt_logprobs);
    CHECK(back.has_resume_key && hash128_eq(back.resume_key, g.resume_key));
    check_sampling(&g.sampling, &back.sampling);
    arena_release(&arena);
}

typedef void change_fn(Baton__Generation *m);

static void no_tokens(Baton__Generation *m) { m->tokens.len = 0; }
static void half_token(Baton__Generation *m) { m->tokens.len = 10; }
static void negative_token(Baton__Generation *m) { memset(m->tokens.data + 8, 0xff, 4); }
static void no_prompt(Baton__Generation *m) { m->n_prompt = 0; }
static void prompt_beyond(Baton__Generation *m) { m->n_prompt = 7; }
static void hot(Baton__Generation *m) { m->sampling->temperature = -0.5f; }
static void nan_temperature(Baton__Generation *m) { m->sampling->temperature = NAN; }
static void inf_temperature(Baton__Generation *m) { m->sampling->temperature = INFINITY; }
static void top_p(Baton__Generation *m) { m->sampling->top_p = 1.5f; }
static void min_p(Baton__Generation *m) { m->sampling->min_p = NAN; }
static void presence(Baton__Generation *m) { m->sampling->presence_penalty = 1e9f; }
static void frequency(Baton__Generation *m) { m->sampling->frequency_penalty = -INFINITY; }
static void repetition(Baton__Generation *m) { m->sampling->repetition_penalty = 0; }
static void logprobs_low(Baton__Generation *m) { m->sampling->n_logprobs = -2; }
static void logprobs_high(Baton__Generation *m)
{
    m->sampling->n_logprobs = SAMPLER_LOGPROBS_MAX + 1;
}
static void short_key(Baton__Generation *m) { m->resume_key.len = 15; }
static void nan_bias(Baton__Generation *m) { m->sampling->bias[1]->bias = NAN; }

TEST(generation_wire_refuses_values_out_of_range)
{
    static const struct {
        change_fn *change;
        const char *field;
    } rows[] = {
        { no_tokens, "tokens" },
        { half_token, "tokens" },
        { negative_token, "tokens" },
        { no_prompt, "n_prompt" },
        { prompt_beyond, "n_prompt" },
        { hot, "temperature" },
        { nan_temperature, "temperature" },
        { inf_temperature, "temperature" },
        { top_p, "top_p" },
        { min_p, "min_p" },
        { presence, "presence_penalty" },
        { frequency, "frequency_penalty" },
        { repetition, "repetition_penalty" },
        { logprobs_low, "n_logprobs" },
        { logprobs_high, "n_logprobs" },
        { nan_bias, "bias" },
        { short_key, "resume_key" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct generation_wire g = sample(), back = { 0 };
        struct arena arena;
        struct err err = { 0 };
        arena_init(&arena);
        Baton__Generation *m = travel(&g);
        rows[i].change(m);
        CHECK_STATUS(generation_wire_decode(m, &arena, &back, &err), ERR_FORMAT);
        CHECK_EQ_STR(err.field, rows[i].field);
        CHECK(err.text[0] != 0);
        CHECK(back.tokens == NULL);                /* outputs only on success */
        if (m->tokens.len == 0) m->tokens.len = 1; /* so that protobuf-c frees the bytes */
        baton__generation__free_unpacked(m, NULL);
        arena_release(&arena);
    }
}

TEST(generation_wire_refuses_lists_that_are_too_long)
{
    struct logit_bias *bias = MEM_ARRAY(struct logit_bias, SAMPLER_BIAS_MAX + 1);
    for (int i = 0; i <= SAMPLER_BIAS_MAX; i++) bias[i] = (struct logit_bias){ i, 1 };
    struct generation_wire g = sample(), back = { 0 };
    struct arena arena;
    struct err err = { 0 };
    arena_init(&arena);
    g.sampling.bias = bias;
    g.sampling.n_bias = SAMPLER_BIAS_MAX;
    Baton__Generation *m = travel(&g);
    CHECK_OK(generation_wire_decode(m, &arena, &back, &err));
    baton__generation__free_unpacked(m, NULL);
    g.sampling.n_bias++;
    m = travel(&g);
    CHECK_STATUS(generation_wire_decode(m, &arena, &back, &err), ERR_FORMAT);
    CHECK_EQ_STR(err.field, "bias");
    baton__generation__free_unpacked(m, NULL);
    Baton__Generation *full = travel(&(struct generation_wire){
        .tokens = TOKENS, .n_tokens = 1, .n_prompt = 1, .sampling = sample().sampling });
    int32_t *ids = full->sampling->stop_ids, many[SAMPLER_STOP_IDS_MAX + 1] = { 0 };
    full->sampling->stop_ids = many;
    full->sampling->n_stop_ids = SAMPLER_STOP_IDS_MAX;
    CHECK_OK(generation_wire_decode(full, &arena, &back, &err));
    full->sampling->n_stop_ids = SAMPLER_STOP_IDS_MAX + 1;
    CHECK_STATUS(generation_wire_decode(full, &arena, &back, &err), ERR_FORMAT);
    CHECK_EQ_STR(err.field, "stop_ids");
    full->sampling->stop_ids = ids;
    full->sampling->n_stop_ids = 2;
    baton__generation__free_unpacked(full, NULL);
    arena_release(&arena);
    mem_free(bias);
}

TEST(generation_wire_refuses_missing_and_unsupported_parts)
{
    struct arena arena;
    struct generation_wire back = { 0 };
    struct err err = { 0 };
    Baton__Generation empty = BATON__GENERATION__INIT;
    arena_init(&arena);
    CHECK_STATUS(generation_wire_decode(&empty, &arena, &back, &err), ERR_FORMAT);
    empty.tokens.data = (uint8_t *)TOKENS;
    empty.tokens.len = 4;
    empty.n_prompt = 1;
    CHECK_STATUS(generation_wire_decode(&empty, &arena, &back, &err), ERR_FORMAT);
    CHECK_EQ_STR(err.field, "sampling");
    Baton__Sampling s =
        BATON__SAMPLING__INIT; /* all zero, also the repetition penalty, a divisor */
    empty.sampling = &s;
    CHECK_STATUS(generation_wire_decode(&empty, &arena, &back, &err), ERR_FORMAT);
    s.repetition_penalty = 1;
    CHECK_OK(generation_wire_decode(&empty, &arena, &back, &err));
    CHECK(!back.has_resume_key);
    s.allowed.data = (uint8_t *)TOKENS;
    s.allowed.len = 8;
    CHECK_STATUS(generation_wire_decode(&empty, &arena, &back, &err), ERR_UNSUPPORTED);
    arena_release(&arena);
}

TEST_MAIN(CASE(generation_wire_round_trip), CASE(generation_wire_refuses_values_out_of_range),
          CASE(generation_wire_refuses_lists_that_are_too_long),
          CASE(generation_wire_refuses_missing_and_unsupported_parts))
