/* test_kv_layouts.c - peers whose pools differ in tensor-parallel size, block size and element
 * type, against a plain conversion, for random layouts, prompts, skips and chunks: granted blocks
 * hold what the definition says, and no other byte of the pool has changed. Pools are in host and
 * GPU memory. Also checks which pairs of peers are refused. */
#include <math.h>

#include "kernels/float_bits.h"
#include "kvtransfer/plan.h"
#include "tests/conformance/kvt_fixture.h"

enum { LAYERS = 2, HEADS = 4, DIM = 24, TOKENS_MAX = 300, SENDERS_MAX = 4, TP_MAX = 8 };

/* ---- the definition: one value at a time, written to be read ---- */

static uint32_t n_parts(const struct kv_layout *l) { return l->latent ? 1 : 2; }
/* With more ranks than heads a head is on several. */
static uint32_t rank_head(const struct kv_layout *l)
{
    return l->latent ? 0 : l->tp_rank * HEADS / l->tp_size;
}
static void set_rank(struct kv_layout *l, uint32_t rank)
{
    l->tp_rank = rank;
    l->first_head = rank_head(l);
}

static bool is_scaled(uint32_t dtype) { return dtype == DTYPE_I8 || dtype == DTYPE_F8_E4M3; }

/* Values and scale of the KV row of (head of the rank, part, token of the block). */
static uint8_t *row_values(struct node *n, uint32_t layer, int32_t block, uint32_t head,
                           uint32_t kv, uint32_t token)
{
    size_t element = n->layout.dtype == DTYPE_F32 ? 4 : is_scaled(n->layout.dtype) ? 1 : 2;
    return (uint8_t *)piece_of(n, layer, block) +
           ((((size_t)head * n_parts(&n->layout) + kv) * n->layout.block_tokens + token) * DIM) *
               element;
}

static uint8_t *row_scale(struct node *n, uint32_t layer, int32_t block, uint32_t head, uint32_t kv,
                          uint32_t token)
{
    size_t values = (size_t)n->layout.n_kv_heads * n_parts(&n->layout) * n->layout.block_tokens *
                    DIM;
    return (uint8_t *)piece_of(n, layer, block) + values +
           (((size_t)head * n_parts(&n->layout) + kv) * n->layout.block_tokens + token) * 4;
}

static void read_row(uint32_t dtype, const uint8_t *values, const uint8_t *scale, float *x)
{
    float s = 0;
    if (is_scaled(dtype)) memcpy(&s, scale, 4);
    for (int i = 0; i < DIM; i++) {
        uint16_t h;
        if (dtype == DTYPE_F32) {
            memcpy(&x[i], values + 4 * i, 4);
        } else if (is_scaled(dtype)) {
            x[i] = (dtype == DTYPE_I8 ? (float)(int8_t)values[i]
                                      : dtype_f8_e4m3_to_f32(values[i])) *
                   s;
        } else {
            memcpy(&h, values + 2 * i, 2);
            x[i] = dtype == DTYPE_F16 ? float_from_f16(h) : dtype_bf16_to_f32(h);
        }
    }
}

static void write_row(uint32_t dtype, const float *x, uint8_t *values, uint8_t *scale)
{
    float largest = 0;
    for (int i = 0; i < DIM; i++) largest = fmaxf(largest, fabsf(x[i]));
    float s = largest / (dtype == DTYPE_I8 ? 127 : 448);
    if (is_scaled(dtype)) memcpy(scale, &s, 4);
    for (int i = 0; i < DIM; i++) {
        uint16_t h = dtype == DTYPE_F16 ? dtype_f32_to_f16(x[i]) : dtype_f32_to_bf16(x[i]);
        if (dtype == DTYPE_F32) memcpy(values + 4 * i, &x[i], 4);
        else if (dtype == DTYPE_I8) values[i] = (uint8_t)(int8_t)(s > 0 ? nearbyintf(x[i] / s) : 0);
        else if (dtype == DTYPE_F8_E4M3) values[i] = s > 0 ? float_to_f8(x[i] / s) : 0;
        else memcpy(values + 2 * i, &h, 2);
    }
}

static float truth(uint32_t layer, uint32_t head, uint32_t kv, uint32_t token, uint32_t i)
{
    uint32_t h = (((layer * 31 + head) * 2 + kv) * 1009 + token) * 61 + i;
    h *= 2654435761u;
    h ^= h >> 15;
    return ldexpf((float)(int32_t)h, -31 + (int)(h % 9)); /* both signs, several magnitudes */
}

/* ---- one transfer between two layouts ---- */

struct pair {
    struct kv_layout from, to; /* from: of every sender, except for its rank */
    const char *transport, *from_device, *to_device;
    uint32_t n_tokens, n_skip, chunk; /* n_skip: of the receiver's blocks */
    bool no_checksum;
};

struct sending {
    struct node *node;
    uint32_t first_head, n_heads; /* of the receiver's */
    uint64_t peer, id;
    int32_t blocks[TOKENS_MAX / 16 + 1];
};

static void fill_sender(struct sending *s, uint32_t n_tokens)
{
    const struct kv_layout *l = &s->node->layout;
    random_table(l->n_blocks, kvt_plan_n_blocks(l, n_tokens), s->blocks);
    memset(s->node->image, 0x77, kv_layout_pool_bytes(l));
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t head = 0; head < l->n_kv_heads; head++)
            for (uint32_t kv = 0; kv < n_parts(l); kv++)
                for (uint32_t t = 0; t < n_tokens; t++) {
                    float x[DIM];
                    int32_t block = s->blocks[t / l->block_tokens];
                    for (uint32_t i = 0; i < DIM; i++)
                        x[i] = truth(layer, rank_head(l) + head, kv, t, i);
                    write_row(l->dtype, x,
                              row_values(s->node, layer, block, head, kv, t % l->block_tokens),
                              row_scale(s->node, layer, block, head, kv, t % l->block_tokens));
                }
    node_push(s->node);
}

/* Writes into `to`'s image what its pool must hold after `s`: the heads of `s`, row by row through
 * f32. */
static void expect_from(struct sending *s, struct node *to, const int32_t *blocks,
                        const struct pair *p)
{
    const struct kv_layout *a = &s->node->layout, *b = &to->layout;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t h = 0; h < s->n_heads; h++)
            for (uint32_t kv = 0; kv < n_parts(b); kv++)
                for (uint32_t t = p->n_skip * b->block_tokens; t < p->n_tokens; t++) {
                    uint32_t to_head = s->first_head + h,
                             head = rank_head(b) + to_head - rank_head(a);
                    int32_t from = s->blocks[t / a->block_tokens], at = blocks[t / b->block_tokens];
                    uint8_t *values = row_values(s->node, layer, from, head, kv,
                                                 t % a->block_tokens);
                    uint8_t *scale = row_scale(s->node, layer, from, head, kv, t % a->block_tokens);
                    uint8_t *to_values = row_values(to, layer, at, to_head, kv,
                                                    t % b->block_tokens);
                    uint8_t *to_scale = row_scale(to, layer, at, to_head, kv, t % b->block_tokens);
                    float x[DIM];
                    read_row(a->dtype, values, scale, x);
                    if (is_scaled(a->dtype) && a->dtype == b->dtype) { /* copied as is */
                        memcpy(to_values, values, DIM);
                        memcpy(to_scale, scale, 4);
                    } else {
                        write_row(b->dtype, x, to_values, to_scale);
                    }
                }
}

/* Connects a sender and finds the common heads, in the receiver's numbering. */
static void connect_sender(struct sending *s, struct node *to)
{
    uint32_t first;
    s->n_heads = kv_layout_common_heads(&to->layout, &s->node->layout, &first);
    s->first_head = first - to->layout.first_head;
    s->peer = node_connect(s->node, to);
}

static void grant_and_send(struct sending *s, struct node *to, const int32_t *blocks,
                           const struct pair *p)
{
    struct buf grant = { 0 };
    struct err err = { 0 };
    uint32_t n_blocks = kvt_plan_n_blocks(&to->layout, p->n_tokens);
    CHECK_OK(kvt_expect_heads(to->kvt, s->id, s->first_head, s->n_heads, blocks, n_blocks,
                              p->n_skip, p->n_tokens, &grant));
    if (kvt_send_open(s->node->kvt, s->id, s->peer, buf_str(&grant), &err) != OK)
        test_fail(__FILE__, __LINE__, "kvt_send_open: %s", err.text);
    for (uint32_t begin = 0; begin < p->n_tokens; begin += p->chunk)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            CHECK_OK(kvt_send_ready(s->node->kvt, s->id, layer, begin,
                                    begin + p->chunk < p->n_tokens ? begin + p->chunk : p->n_tokens,
                                    s->blocks));
    kvt_send_finish(s->node->kvt, s->id);
    buf_release(&grant);
}

static const char *describe(const struct pair *p, char out[200])
{
    snprintf(out, 200,
             "%s%s: tp %u rank %u, blocks of %u, %s -> tp %u rank %u, blocks of %u, %s; %u tokens, "
             "%u blocks skipped, chunks of %u",
             p->transport, p->to.latent ? ", latent" : "", p->from.tp_size, p->from.tp_rank,
             p->from.block_tokens, kv_dtype_name(p->from.dtype), p->to.tp_size, p->to.tp_rank,
             p->to.block_tokens, kv_dtype_name(p->to.dtype), p->n_tokens, p->n_skip, p->chunk);
    return out;
}

/* All senders that share heads with the receiver send their parts at the same time. */
static void move_between(const struct pair *p)
{
    struct node *to = node_start((struct node_options){
        .layout = p->to,
        .protocols = p->transport,
        .lossy = true,
        .device = p->to_device,
        .no_checksum = p->no_checksum,
    });
    struct sending s[SENDERS_MAX];
    int32_t blocks[TOKENS_MAX / 16 + 1];
    uint32_t n = 0, n_heads = 0, first, sent = 0; /* sent: bit of each head of the model */
    size_t bytes = kv_layout_pool_bytes(&to->layout);
    for (uint32_t rank = 0; rank < p->from.tp_size; rank++) {
        struct kv_layout l = p->from;
        set_rank(&l, rank);
        if (!kv_layout_common_heads(&l, &p->to, &first) || sent & 1u << first) continue;
        s[n] = (struct sending){
            .node = node_start((struct node_options){
                .layout = l, .protocols = p->transport, .device = p->from_device }),
            .id = 100 + rank,
        };
        fill_sender(&s[n], p->n_tokens);
        connect_sender(&s[n], to);
        sent |= ((1u << s[n].n_heads) - 1) << first;
        n_heads += s[n++].n_heads;
    }
    CHECK_EQ_INT(n_heads, p->to.n_kv_heads);
    random_table(to->layout.n_blocks, kvt_plan_n_blocks(&to->layout, p->n_tokens), blocks);
    memset(to->image, 0xee, bytes);
    for (uint32_t i = 0; i < n; i++) expect_from(&s[i], to, blocks, p);
    uint8_t *want = mem_dup(to->image, bytes);
    pool_set(to, 0xee);
    uint64_t moved = 0;
    for (uint32_t i = 0; i < n; i++) grant_and_send(&s[i], to, blocks, p);
    for (uint32_t i = 0; i < n; i++) {
        moved += node_wait(to, KVT_RECEIVED, s[i].id, 10000).bytes;
        node_wait(s[i].node, KVT_SENT, s[i].id, 10000);
    }
    CHECK_EQ_INT(moved, layout_total_bytes(&p->to, p->n_tokens, p->n_skip));
    node_pull(to);
    for (size_t i = 0; i < bytes; i++)
        if (want[i] != ((uint8_t *)to->image)[i]) {
            char text[200];
            test_fail(__FILE__, __LINE__, "byte %zu of %zu is %u, not %u; %s", i, bytes,
                      ((uint8_t *)to->image)[i], want[i], describe(p, text));
        }
    mem_free(want);
    for (uint32_t i = 0; i < n; i++) node_stop(s[i].node);
    node_stop(to);
}

static uint32_t one_of(const uint32_t *values, uint32_t n) { return values[(uint32_t)rand() % n]; }

static struct kv_layout random_layout(void)
{
    const uint32_t tp[] = { 1, 2, 4, TP_MAX }, blocks[] = { 16, 32, 64 },
                   types[] = { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8, DTYPE_F8_E4M3 };
    struct kv_layout l = {
        .model_fingerprint = 9,
        .dtype = one_of(types, COUNT_OF(types)),
        .block_tokens = one_of(blocks, 3),
        .n_layers = LAYERS,
        .head_dim = DIM,
        .tp_size = one_of(tp, 4),
        .n_blocks = 20 + (uint32_t)rand() % 9,
    };
    l.model_kv_heads = HEADS;
    l.n_kv_heads = l.tp_size < HEADS ? HEADS / l.tp_size : 1;
    set_rank(&l, (uint32_t)rand() % l.tp_size);
    return l;
}

/* Turns the layout into one of MLA latents, with as many ranks. */
static void make_latent(struct kv_layout *l)
{
    l->latent = 1;
    l->first_head = 0;
    l->n_kv_heads = l->model_kv_heads = 1;
}

static void random_pairs_on(const char *transport, int rounds, const char *from_device,
                            const char *to_device)
{
    for (int i = 0; i < rounds; i++) {
        srand((unsigned)i + 1);
        struct pair p = {
            .from = random_layout(),
            .to = random_layout(),
            .transport = transport,
            .from_device = from_device,
            .to_device = to_device,
            .n_tokens = 1 + (uint32_t)rand() % TOKENS_MAX,
        };
        if (i % 3 == 2) make_latent(&p.from), make_latent(&p.to);
        p.n_skip = rand() % 3 ? 0 : (uint32_t)rand() % (kvt_plan_n_blocks(&p.to, p.n_tokens) + 1);
        p.chunk = 1 + (uint32_t)rand() % p.n_tokens;
        p.no_checksum = i % 5 == 4;
        move_between(&p);
    }
}

static void random_pairs(const char *transport, int rounds)
{
    random_pairs_on(transport, rounds, NULL, NULL);
}

/* Within one process only tcp reaches pools in GPU memory; ipc: test_kv_gpu.c. */
static void random_pairs_with_a_gpu(const char *from, const char *to)
{
    if (device_count("cuda") == 0)
        SKIP("no GPU: KV of another layout from and to GPU memory is NOT tested");
    random_pairs_on("tcp", 40, from, to);
}

TEST(any_two_layouts_gpu_to_host) { random_pairs_with_a_gpu("cuda", "cpu"); }
TEST(any_two_layouts_host_to_gpu) { random_pairs_with_a_gpu("cpu", "cuda"); }
TEST(any_two_layouts_gpu_to_gpu) { random_pairs_with_a_gpu("cuda", "cuda"); }
TEST(any_two_layouts_mem) { random_pairs("mem", 300); }
TEST(any_two_layouts_ipc) { random_pairs("ipc", 60); }
TEST(any_two_layouts_tcp) { random_pairs("tcp", 60); }

/* ---- refused pairs, each with its sentence ---- */

static struct kv_layout plain(void)
{
    return (struct kv_layout){
        .model_fingerprint = 9,
        .dtype = DTYPE_BF16,
        .block_tokens = 16,
        .n_layers = LAYERS,
        .n_kv_heads = HEADS,
        .model_kv_heads = HEADS,
        .head_dim = DIM,
        .tp_size = 1,
        .n_blocks = 20,
    };
}

/* Both sides refuse: the receiver refuses the hello, and the sender refuses the answer of a
 * receiver that does not check. */
static void check_refused(struct kv_layout from, struct kv_layout to, bool lossy, const char *says)
{
    struct node *a = node_start(
        (struct node_options){ .layout = from, .protocols = "mem", .lossy = lossy });
    struct node *b = node_start((struct node_options){ .layout = to, .protocols = "mem" });
    /* matches a, so that there is an answer to modify */
    struct node *twin = node_start((struct node_options){ .layout = from, .protocols = "mem" });
    struct buf hello = { 0 }, answer = { 0 }, bent = { 0 };
    struct err err = { 0 };
    struct kvt_answer_msg m;
    uint64_t peer;
    kvt_hello(a->kvt, &hello);
    CHECK_STATUS(kvt_answer(b->kvt, buf_str(&hello), &answer, &err), ERR_PEER_MISMATCH);
    if (!strstr(err.text, says))
        test_fail(__FILE__, __LINE__, "'%s' does not say '%s'", err.text, says);
    CHECK_EQ_INT(answer.len, 0);
    CHECK_OK(kvt_answer(twin->kvt, buf_str(&hello), &answer, &err));
    CHECK_OK(kvt_answer_decode(buf_str(&answer), &m, &err));
    m.layout = to;
    kvt_answer_encode(&m, &bent);
    CHECK_STATUS(kvt_connect(a->kvt, buf_str(&bent), &peer, &err), ERR_PEER_MISMATCH);
    if (!strstr(err.text, says))
        test_fail(__FILE__, __LINE__, "'%s' does not say '%s'", err.text, says);
    struct buf *all[] = { &hello, &answer, &bent };
    for (size_t i = 0; i < COUNT_OF(all); i++) buf_release(all[i]);
    node_stop(a);
    node_stop(b);
    node_stop(twin);
}

TEST(another_model_is_refused)
{
    struct kv_layout l = plain();
    l.model_fingerprint = 10;
    check_refused(plain(), l, true, "the models differ");
    l = plain();
    l.n_layers = LAYERS + 1;
    check_refused(plain(), l, true, "n_layers");
    l = plain();
    l.n_kv_heads = l.model_kv_heads = HEADS + 1;
    check_refused(plain(), l, true, "model_kv_heads");
    l = plain();
    l.head_dim = DIM + 8;
    check_refused(plain(), l, true, "head_dim");
    l = plain();
    make_latent(&l);
    check_refused(plain(), l, true, "keys and values of heads");
}

TEST(ranks_without_a_common_head_are_refused)
{
    struct kv_layout a = plain(), b = plain();
    a.tp_size = 2;
    a.n_kv_heads = HEADS / 2;
    b.tp_size = 4;
    b.n_kv_heads = HEADS / 4;
    set_rank(&b, 3);
    check_refused(a, b, true, "no KV head in common");
    b.tp_size = TP_MAX; /* ranks 4 and 5 hold head 2 */
    set_rank(&b, 5);
    check_refused(a, b, true, "rank 5 of 8");
    check_refused(a, b, true, "heads 2 to 2");
}

TEST(narrowing_needs_leave)
{
    const uint32_t types[] = { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8, DTYPE_F8_E4M3 };
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 5; j++) {
            struct kv_layout a = plain(), b = plain();
            a.dtype = types[i];
            b.dtype = types[j];
            if (!kv_dtype_keeps(a.dtype, b.dtype)) {
                check_refused(a, b, false, "BATON_KV_LOSSY=1");
                continue;
            }
            struct node *from = node_start(
                (struct node_options){ .layout = a, .protocols = "mem" });
            struct node *to = node_start((struct node_options){ .layout = b, .protocols = "mem" });
            (void)node_connect(from, to);
            node_stop(from);
            node_stop(to);
        }
}

/* Permission from either side is enough. */
TEST(narrowing_with_leave_of_one_side)
{
    struct kv_layout a = plain(), b = plain();
    a.dtype = DTYPE_F32;
    for (int who = 0; who < 2; who++) {
        struct node *from = node_start(
            (struct node_options){ .layout = a, .protocols = "mem", .lossy = who == 0 });
        struct node *to = node_start(
            (struct node_options){ .layout = b, .protocols = "mem", .lossy = who == 1 });
        (void)node_connect(from, to);
        node_stop(from);
        node_stop(to);
    }
}

TEST(another_release_is_refused)
{
    struct node *n = node_start((struct node_options){ .layout = plain(), .protocols = "mem" });
    struct buf hello = { 0 }, answer = { 0 }, out = { 0 };
    struct err err = { 0 };
    uint64_t peer;
    kvt_hello(n->kvt, &hello);
    CHECK_OK(kvt_answer(n->kvt, buf_str(&hello), &answer, &err));
    /* Version 3 was shorter: its layout had neither first_head nor the heads of the model. */
    hello.data[4] = answer.data[4] = 3;
    CHECK_STATUS(kvt_answer(n->kvt, str_sub(buf_str(&hello), 0, 68), &out, &err),
                 ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "the sender speaks KV transfer version 3, this node version 6"));
    CHECK_STATUS(kvt_connect(n->kvt, str_sub(buf_str(&answer), 0, 84), &peer, &err),
                 ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "the receiver speaks KV transfer version 3, this node version 6"));
    hello.data[4] = answer.data[4] = 77;
    CHECK_STATUS(kvt_answer(n->kvt, buf_str(&hello), &out, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "version 77") && strstr(err.text, "run the same release"));
    CHECK_STATUS(kvt_connect(n->kvt, buf_str(&answer), &peer, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "version 77") && strstr(err.text, "run the same release"));
    struct buf *all[] = { &hello, &answer, &out };
    for (size_t i = 0; i < COUNT_OF(all); i++) buf_release(all[i]);
    node_stop(n);
}

TEST(an_answer_is_for_one_asker)
{
    struct node *asker = node_start((struct node_options){ .layout = plain(), .protocols = "mem" });
    struct node *thief = node_start((struct node_options){ .layout = plain(), .protocols = "mem" });
    struct node *to = node_start((struct node_options){ .layout = plain(), .protocols = "mem" });
    struct buf hello = { 0 }, answer = { 0 };
    struct err err = { 0 };
    uint64_t peer;
    kvt_hello(asker->kvt, &hello);
    CHECK_OK(kvt_answer(to->kvt, buf_str(&hello), &answer, &err));
    CHECK_STATUS(kvt_connect(thief->kvt, buf_str(&answer), &peer, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "made for another node"));
    CHECK_OK(kvt_connect(asker->kvt, buf_str(&answer), &peer, &err));
    node_wait(asker, KVT_CONNECTED, peer, 5000);
    buf_release(&hello);
    buf_release(&answer);
    node_stop(asker);
    node_stop(thief);
    node_stop(to);
}

/* A receiver of smaller tensor-parallel size grants all its heads to a sender that has half of
 * them: the sender refuses. */
TEST(a_sender_refuses_heads_it_does_not_have)
{
    struct kv_layout half = plain();
    half.tp_size = 2;
    half.n_kv_heads = HEADS / 2;
    set_rank(&half, 1);
    struct node *from = node_start((struct node_options){ .layout = half, .protocols = "mem" });
    struct node *to = node_start((struct node_options){ .layout = plain(), .protocols = "mem" });
    struct buf grant = { 0 };
    struct err err = { 0 };
    const int32_t blocks[] = { 3 };
    uint64_t peer = node_connect(from, to);
    CHECK_OK(kvt_expect(to->kvt, 1, blocks, 1, 0, 16, &grant));
    CHECK_STATUS(kvt_send_open(from->kvt, 1, peer, buf_str(&grant), &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "KV heads 0 to 3") && strstr(err.text, "2 to 3"));
    CHECK_STATUS(kvt_expect_heads(to->kvt, 2, 2, 3, blocks, 1, 0, 16, &grant), ERR_INVALID);
    CHECK_STATUS(kvt_expect_heads(to->kvt, 2, 2, 0, blocks, 1, 0, 16, &grant), ERR_INVALID);
    CHECK_STATUS(kvt_expect_heads(to->kvt, 2, UINT32_MAX, 2, blocks, 1, 0, 16, &grant),
                 ERR_INVALID);
    buf_release(&grant);
    node_stop(from);
    node_stop(to);
}

TEST_MAIN(CASE_T(any_two_layouts_mem, 120), CASE_T(any_two_layouts_ipc, 120),
          CASE_T(any_two_layouts_tcp, 120), CASE_T(any_two_layouts_gpu_to_host, 120),
          CASE_T(any_two_layouts_host_to_gpu, 120), CASE_T(any_two_layouts_gpu_to_gpu, 120),
          CASE(another_model_is_refused), CASE(ranks_without_a_common_head_are_refused),
          CASE(narrowing_needs_leave), CASE(narrowing_with_leave_of_one_side),
          CASE(another_release_is_refused), CASE(an_answer_is_for_one_asker),
          CASE(a_sender_refuses_heads_it_does_not_have))
