/* test_share_forward.c - steps of a model that is cut between ranks, which are threads here: every
 * rank has the logits of one rank that has the whole, bit for bit. */
#include <pthread.h>

#include "tests/fixtures/checkpoint_write.h"
#include "tests/fixtures/model_rig.h"

enum {
    RANKS_MAX = 4,
    N_IDS = TEST_IS_SANITIZED ? 12 : 40,
    N_ANSWER = TEST_IS_SANITIZED ? 2 : 5,
    N_OTHER = 7
};

/* ---- ranks ---- */

/* Ranks that meet before and after each gather, and read each other's columns between. */
struct node {
    pthread_barrier_t meeting;
    struct {
        const float *mine;
        size_t stride;
    } columns[RANKS_MAX];
    uint32_t size;
    size_t n_gathers, fail_at; /* of rank 0; from 1, 0: none fails. Every rank fails alike */
};

struct rank {
    struct node *node;
    uint32_t rank;
    size_t n_gathers;
    struct model_options o;
    const char *isa;
    enum activations activations;
    float *logits;
    pthread_t thread;
};

static enum status gather(void *arg, float *y, size_t y_stride, const float *mine,
                          size_t mine_stride, size_t n_rows, const size_t *first, struct err *err)
{
    struct rank *r = arg;
    struct node *n = r->node;
    CHECK(n->size > 1); /* a whole model is not gathered */
    if (++r->n_gathers == n->fail_at) return err_set(err, ERR_PEER_LOST, "rank 1 was lost");
    n->columns[r->rank].mine = mine;
    n->columns[r->rank].stride = mine_stride;
    pthread_barrier_wait(&n->meeting);
    for (uint32_t other = 0; other < n->size; other++) {
        const size_t width = first[other + 1] - first[other];
        for (size_t i = 0; i < n_rows && y + first[other] != mine; i++)
            memcpy(y + i * y_stride + first[other],
                   n->columns[other].mine + i * n->columns[other].stride, width * sizeof *y);
    }
    pthread_barrier_wait(&n->meeting);
    return OK;
}

/* ---- steps ---- */

/* Logits of a prompt in two chunks, the second beside another sequence, and of tokens after it. */
static float *answer(struct rig *r)
{
    int32_t ids[N_IDS + N_ANSWER];
    const size_t v = r->n_vocab, half = N_IDS / 2;
    float *out = MEM_ARRAY(float, (N_IDS + N_OTHER + N_ANSWER) * v);
    for (int32_t i = 0; i < N_IDS + N_ANSWER; i++) ids[i] = (7 + 31 * i) % (int32_t)v;
    feed_all(r, &(struct feed){ .table = 1, .ids = ids, .n = (int32_t)half }, 1, out);
    const struct feed both[] = {
        { .table = 1, .ids = ids + half, .n = N_IDS - (int32_t)half, .pos = (int32_t)half },
        { .table = 2, .ids = ids + 3, .n = N_OTHER },
    };
    feed_all(r, both, 2, out + half * v);
    for (int32_t i = 0; i < N_ANSWER; i++)
        feed_all(
            r,
            &(struct feed){
                .table = 1, .ids = ids + N_IDS + i, .n = 1, .pos = N_IDS + i, .generated = true },
            1, out + (size_t)(N_IDS + N_OTHER + i) * v);
    return out;
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    struct rig rig;
    struct model_share share = { .tp_rank = r->rank,
                                 .tp_size = r->node->size,
                                 .n_experts = SHARE_ALL_EXPERTS };
    const struct model_gather g = { .arg = r, .columns = gather };
    r->o.share = &share;
    r->o.gather = &g;
    rig_open_with(&rig, r->o, r->isa, r->activations);
    r->logits = answer(&rig);
    CHECK_OK(rig.m->gather_fault.code);
    rig_close(&rig);
    return NULL;
}

/* Runs the ranks of a node; paths[r]: the checkpoint of rank r. */
static void run_node(struct rank *ranks, struct node *node, uint32_t size, struct model_options o,
                     const char *const *paths, const char *isa, enum activations activations)
{
    *node = (struct node){ .size = size };
    CHECK_OK(pthread_barrier_init(&node->meeting, NULL, size));
    for (uint32_t r = 0; r < size; r++) {
        ranks[r] = (struct rank){
            .node = node, .rank = r, .o = o, .isa = isa, .activations = activations
        };
        ranks[r].o.path = paths[r];
        CHECK_OK(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]));
    }
    for (uint32_t r = 0; r < size; r++) pthread_join(ranks[r].thread, NULL);
    pthread_barrier_destroy(&node->meeting);
}

static void check_node(const float *want, size_t n, uint32_t size, struct model_options o,
                       const char *const *paths, const char *isa, enum activations activations)
{
    struct node node;
    struct rank ranks[RANKS_MAX];
    run_node(ranks, &node, size, o, paths, isa, activations);
    for (uint32_t r = 0; r < size; r++) {
        if (memcmp(ranks[r].logits, want, n * sizeof *want) != 0)
            test_fail(__FILE__, __LINE__,
                      "%s on %s, activations %d, quantize %d: logits of rank %u of %u differ",
                      paths[r], isa, (int)activations, (int)o.quantize, r, size);
        mem_free(ranks[r].logits);
    }
}

static void check_sizes(const char *path, struct model_options o, const char *isa,
                        enum activations activations)
{
    struct rig whole;
    o.path = path;
    rig_open_with(&whole, o, isa, activations);
    float *want = answer(&whole);
    for (uint32_t size = 1; size <= RANKS_MAX; size++) {
        const struct model_share s = { .tp_size = size };
        const char *const paths[RANKS_MAX] = { path, path, path, path };
        if (model_share_check(&s, &whole.m->config, NULL) == OK)
            check_node(want, (N_IDS + N_OTHER + N_ANSWER) * (size_t)whole.n_vocab, size, o, paths,
                       isa, activations);
    }
    mem_free(want);
    rig_close(&whole);
}

/* ---- tests ---- */

static void check_golden_on_all(const char *name)
{
    struct path p = golden(name, "model");
    for (size_t b = 0; KERNEL_BACKENDS[b]; b++) {
        if (!is_cpu_backend(KERNEL_BACKENDS[b]) || !KERNEL_BACKENDS[b]->available()) continue;
        for (int fast = 0; fast < 2; fast++)
            check_sizes(p.text, (struct model_options){ 0 }, KERNEL_BACKENDS[b]->name,
                        fast ? ACTIVATIONS_FAST : ACTIVATIONS_F32);
    }
}

TEST(ranks_of_llama_have_the_logits_of_one) { check_golden_on_all("llama"); }
TEST(ranks_of_a_model_with_biases_have_the_logits_of_one) { check_golden_on_all("llama_bias"); }
TEST(ranks_of_qwen3_have_the_logits_of_one) { check_golden_on_all("qwen3"); }
TEST(ranks_of_ernie_moe_have_the_logits_of_one) { check_golden_on_all("ernie_moe"); }
TEST(ranks_of_deepseek_v3_have_the_logits_of_one) { check_golden_on_all("deepseek_v3"); }
TEST(ranks_of_deepseek_v2_have_the_logits_of_one) { check_golden_on_all("deepseek_v2_lite"); }

TEST(ranks_that_quantise_have_the_logits_of_one)
{
    static const char *const NAMES[] = { "llama_bias", "ernie_moe_untied", "deepseek_v3" };
    static const enum quantize HOW[] = { QUANTIZE_WINT8, QUANTIZE_WINT4 };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++)
        for (size_t q = 0; q < COUNT_OF(HOW); q++)
            check_sizes(golden(NAMES[i], "model").text,
                        (struct model_options){ .quantize = HOW[q] }, "auto", ACTIVATIONS_FAST);
}

TEST(ranks_with_dummy_weights_have_the_logits_of_one)
{
    static const char *const NAMES[] = { "qwen3", "ernie_moe", "deepseek_v3" };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++)
        check_sizes(golden(NAMES[i], "model").text, (struct model_options){ .dummy = true }, "auto",
                    ACTIVATIONS_F32);
}

/* ---- what a rank does not read ---- */

/* The outputs of the tensor that a rank reads; false: all. */
static bool cut_of(const struct checkpoint_tensor *t, const struct model_config *c,
                   const struct model_share *s, struct share_part *out)
{
    static const char *const BY_UNITS[] = { "o_proj", "mlp.gate_proj", "mlp.up_proj",
                                            "mlp.down_proj", "lm_head" },
                             *const BY_HEADS[] = { "q_proj", "q_b_proj", "kv_b_proj" },
                             *const BY_KV_HEADS[] = { "k_proj", "v_proj" };
    for (size_t i = 0; i < COUNT_OF(BY_UNITS); i++)
        if (strstr(t->name, BY_UNITS[i])) {
            *out = share_units(s, t->shape[0], SHARE_UNIT);
            return true;
        }
    for (size_t i = 0; i < COUNT_OF(BY_HEADS); i++)
        if (strstr(t->name, BY_HEADS[i])) {
            *out = share_times(share_heads(s, c->n_heads), t->shape[0] / c->n_heads);
            return true;
        }
    for (size_t i = 0; i < COUNT_OF(BY_KV_HEADS); i++)
        if (strstr(t->name, BY_KV_HEADS[i])) {
            *out = share_times(share_kv_heads(s, c->n_kv_heads), t->shape[0] / c->n_kv_heads);
            return true;
        }
    return false;
}

/* Writes the checkpoint of a rank, with NaN wherever it has no business; returns how many. */
static size_t write_poisoned(const char *name, const char *path, const struct model_config *c,
                             const struct model_share *s)
{
    struct checkpoint *from = checkpoint_read(golden(name, "model").text);
    struct buf config = { 0 };
    struct err err;
    size_t n_poisoned = 0;
    CHECK_OK(file_read(golden(name, "model/config.json").text, 1 << 20, &config, &err));
    for (size_t i = 0; i < from->n; i++) {
        struct checkpoint_tensor *t = &from->t[i];
        struct share_part p;
        if (!cut_of(t, c, s, &p)) continue;
        const size_t row_bytes = t->bytes / t->shape[0];
        for (size_t row = 0; row < t->shape[0]; row++)
            if (row < p.first || row >= p.first + p.n) {
                memset(t->data + row * row_bytes, 0xff, row_bytes);
                n_poisoned++;
            }
    }
    checkpoint_write_folder(from, path, buf_str(&config));
    checkpoint_release(from);
    buf_release(&config);
    return n_poisoned;
}

TEST(data_of_other_ranks_is_not_used)
{
    static const char *const NAMES[] = { "llama_bias", "qwen3", "deepseek_v3", "ernie_moe_untied" };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        struct rig whole;
        const char *paths[2];
        struct path p[2];
        rig_open(&whole, golden(NAMES[i], "model").text, "ref");
        float *want = answer(&whole);
        for (uint32_t r = 0; r < 2; r++) {
            const struct model_share s = { .tp_rank = r, .tp_size = 2 };
            snprintf(p[r].text, sizeof p[r].text, "%s/%s", test_tmpdir(), NAMES[i]);
            paths[r] = p[r].text;
            CHECK(write_poisoned(NAMES[i], paths[r], &whole.m->config, &s) > 100);
        }
        check_node(want, (N_IDS + N_OTHER + N_ANSWER) * (size_t)whole.n_vocab, 2,
                   (struct model_options){ 0 }, paths, "ref", ACTIVATIONS_F32);
        mem_free(want);
        rig_close(&whole);
    }
}

/* ---- a rank that is lost ---- */

static void count_layer(void *arg, uint32_t layer)
{
    int *n = arg;
    CHECK_EQ_INT(layer, *n);
    ++*n;
}

/* One token at position 0; returns how many layers were announced. */
static int step_of(struct rig *r)
{
    static const int32_t ID = 5, POS = 0, ROW = 0;
    const struct attn_seq seq = { .n_q = 1, .block_table = r->tables[0] };
    int n_layers = 0;
    const struct model_batch b = {
        .n_rows = 1,
        .ids = &ID,
        .pos = &POS,
        .seqs = &seq,
        .n_seqs = 1,
        .logit_rows = &ROW,
        .n_logits = 1,
        .logits = r->logits,
        .kv = r->kv,
        .n_blocks = r->n_blocks,
        .block_tokens = BLOCK,
        .on_layer = count_layer,
        .on_layer_arg = &n_layers,
    };
    (void)model_submit(r->m, &b);
    return n_layers;
}

/* Gathers are not tried again in the step, its layers are not announced, and the next step starts
 * anew. */
TEST(a_gather_that_fails_ends_the_step)
{
    struct node node = { .size = 2 };
    struct rank rank = { .node = &node };
    const struct model_share share = { .tp_size = 2 };
    const struct model_gather g = { .arg = &rank, .columns = gather };
    struct rig r;
    CHECK_OK(pthread_barrier_init(&node.meeting, NULL, 1)); /* rank 1 is never there */
    node.columns[1].mine = MEM_ARRAY(float, 4096);
    rig_open_with(&r,
                  (struct model_options){
                      .path = golden("llama", "model").text, .share = &share, .gather = &g },
                  "ref", ACTIVATIONS_F32);
    node.fail_at = 2; /* after attention's heads: its product, in the first layer */
    CHECK_EQ_INT(step_of(&r), 1);
    CHECK_EQ_INT(rank.n_gathers, 2);
    CHECK_STATUS(r.m->gather_fault.code, ERR_PEER_LOST);
    CHECK_EQ_STR(r.m->gather_fault.text, "rank 1 was lost");
    node.fail_at = 0;
    CHECK_EQ_INT(step_of(&r), r.m->config.n_layers);
    CHECK_OK(r.m->gather_fault.code);
    CHECK_EQ_INT(rank.n_gathers, 2 + 4 * r.m->config.n_layers + 1);
    mem_free((void *)node.columns[1].mine);
    pthread_barrier_destroy(&node.meeting);
    rig_close(&r);
}

TEST_MAIN(CASE_T(ranks_of_llama_have_the_logits_of_one, 240),
          CASE_T(ranks_of_a_model_with_biases_have_the_logits_of_one, 240),
          CASE_T(ranks_of_qwen3_have_the_logits_of_one, 240),
          CASE_T(ranks_of_ernie_moe_have_the_logits_of_one, 240),
          CASE_T(ranks_of_deepseek_v3_have_the_logits_of_one, 240),
          CASE_T(ranks_of_deepseek_v2_have_the_logits_of_one, 240),
          CASE_T(ranks_that_quantise_have_the_logits_of_one, 120),
          CASE_T(ranks_with_dummy_weights_have_the_logits_of_one, 120),
          CASE_T(data_of_other_ranks_is_not_used, 120), CASE(a_gather_that_fails_ends_the_step))
