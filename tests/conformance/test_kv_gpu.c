/* test_kv_gpu.c - pools in GPU memory whose peer has another layout, or an element type with
 * scales: the receiver's bytes equal kvt_convert_piece of the sender's, by CUDA IPC between two
 * processes and by tcp; damaged bytes are detected; impossible pairs are refused with a
 * sentence. */
#include <sys/wait.h>

#include "kernels/kv_rows.h"
#include "kvtransfer/convert.h"
#include "tests/conformance/kvt_fixture.h"

enum { LAYERS = 2, BLOCKS = 40, TOKENS = 5 * 64 + 21, LEFT_ALONE = 0xee };

struct pool_type {
    uint32_t dtype, block_tokens;
};

static struct kv_layout layout_of(struct pool_type f, uint32_t n_heads, uint32_t head_dim)
{
    return (struct kv_layout){
        .model_fingerprint = 3,
        .dtype = f.dtype,
        .block_tokens = f.block_tokens,
        .n_layers = LAYERS,
        .n_kv_heads = n_heads,
        .model_kv_heads = n_heads,
        .head_dim = head_dim,
        .tp_size = 1,
        .n_blocks = BLOCKS * 64 / f.block_tokens,
    };
}

/* The same of a rank that holds some of the model's heads. */
static struct kv_layout rank_of(struct kv_layout l, uint32_t first, uint32_t n)
{
    l.first_head = first;
    l.n_kv_heads = n;
    return l;
}

/* The heads that both have. */
static struct kvt_head_slice common_of(const struct kv_layout *l, const struct kv_layout *peer)
{
    struct kvt_head_slice v;
    uint32_t first, n = kv_layout_common_heads(l, peer, &first);
    CHECK_OK(kvt_head_slice_of(l, first, n, &v));
    return v;
}

/* Fills every KV row of the pool with what kv_row_store writes for random values of `seed`. */
static void fill(const struct kv_layout *l, char *image, unsigned seed)
{
    float x[KV_ROW_MAX];
    srand(seed);
    for (uint32_t i = 0; i < l->n_layers * l->n_blocks; i++) {
        char *piece = image + i * kv_layout_piece_bytes(l);
        for (uint32_t row = 0; row < kv_layout_n_segments(l) * l->block_tokens; row++) {
            for (uint32_t k = 0; k < l->head_dim; k++)
                x[k] = (float)(rand() % 20001 - 10000) * (row % 17 == 3 ? 0x1p-14f : 0x1p-9f);
            kv_row_store((enum dtype)l->dtype, x,
                         piece + (size_t)row * l->head_dim * kv_layout_element_bytes(l),
                         piece + kv_layout_scale_offset(l) + row * kv_layout_scale_bytes(l),
                         l->head_dim);
        }
    }
}

/* The receiver's pool after a transfer of all but n_skip blocks of `image`; all other bytes are
 * LEFT_ALONE. */
static char *expected(const struct kv_layout *from, const char *image, const int32_t *src,
                      const struct kv_layout *to, const int32_t *dst, uint32_t n_skip)
{
    struct kvt_head_slice a = common_of(from, to), b = common_of(to, from);
    char *want = malloc(kv_layout_pool_bytes(to)), *piece = malloc(kv_layout_piece_bytes(to));
    struct kvt_copy *copies = malloc(sizeof *copies * kvt_plan_max_copies(to));
    memset(want, LEFT_ALONE, kv_layout_pool_bytes(to));
    for (uint32_t layer = 0; layer < to->n_layers; layer++)
        for (uint32_t i = n_skip; i < kvt_plan_n_blocks(to, TOKENS); i++) {
            kvt_convert_piece(&a, image, src, &b, TOKENS, layer, i, piece);
            uint32_t n = kvt_plan_copies_from(0, &b, dst, TOKENS,
                                              (struct kvt_block_range){ layer, i, 1 }, copies);
            for (uint32_t k = 0; k < n; k++)
                memcpy(want + copies[k].remote, piece + copies[k].local, copies[k].bytes);
        }
    free(piece);
    free(copies);
    return want;
}

static void check_pool(struct node *n, const char *want, const char *what)
{
    node_pull(n);
    for (size_t i = 0; i < kv_layout_pool_bytes(&n->layout); i++)
        if (n->image[i] != want[i])
            test_fail(__FILE__, __LINE__, "%s: byte %zu is %02x, not %02x", what, i,
                      (uint8_t)n->image[i], (uint8_t)want[i]);
}

static void send_all(struct node *n, uint64_t id, const int32_t *table)
{
    const uint32_t step = n->layout.block_tokens == 1 ? TOKENS : 130;
    for (uint32_t begin = 0; begin < TOKENS; begin += step) {
        const bool together = begin / step % 2 == 0; /* layers that may share a put */
        uint64_t event = device_record_event(n->device);
        for (uint32_t layer = 0; layer < n->layout.n_layers; layer++) {
            if (!together) event = device_record_event(n->device);
            CHECK_OK(kvt_send_ready_after(n->kvt, id, layer, begin,
                                          begin + step < TOKENS ? begin + step : TOKENS, table,
                                          event));
        }
    }
    kvt_send_finish(n->kvt, id);
}

/* Pairs of GPU pools: another block size, upconverted, narrowed, scales on one side and on both;
 * the same layout, with scales; more pieces than a NOTE has checksums. */
static const struct pool_type POOL_TYPES[][2] = {
    { { DTYPE_BF16, 64 }, { DTYPE_BF16, 16 } }, { { DTYPE_BF16, 16 }, { DTYPE_F32, 64 } },
    { { DTYPE_F32, 32 }, { DTYPE_I8, 64 } },    { { DTYPE_F8_E4M3, 16 }, { DTYPE_BF16, 16 } },
    { { DTYPE_I8, 64 }, { DTYPE_I8, 32 } },     { { DTYPE_I8, 16 }, { DTYPE_F8_E4M3, 64 } },
    { { DTYPE_I8, 64 }, { DTYPE_I8, 64 } },     { { DTYPE_F8_E4M3, 16 }, { DTYPE_F8_E4M3, 16 } },
    { { DTYPE_BF16, 1 }, { DTYPE_BF16, 1 } },
};

static void tables(const struct kv_layout *from, const struct kv_layout *to, unsigned seed,
                   int32_t *src, int32_t *dst)
{
    srand(seed);
    random_table(from->n_blocks, kvt_plan_n_blocks(from, TOKENS), src);
    random_table(to->n_blocks, kvt_plan_n_blocks(to, TOKENS), dst);
}

/* ---- by CUDA IPC: two processes ---- */

static struct node *gpu_node(const struct kv_layout *l, const char *transport, bool checksum)
{
    return node_start((struct node_options){
        .layout = *l,
        .protocols = transport,
        .lossy = true,
        .no_checksum = !checksum,
        .device = "cuda",
    });
}

/* Heads of the two ranks. */
struct ranks {
    uint32_t from_first, from_n, to_first, to_n;
};

static const struct ranks ALL_HEADS = { 0, 3, 0, 3 };

static _Noreturn void ipc_sender(int in, int out, bool checksum, struct ranks h)
{
    struct buf b = { 0 };
    struct err err = { 0 };
    for (unsigned i = 0; i < COUNT_OF(POOL_TYPES); i++) {
        struct kv_layout from = rank_of(layout_of(POOL_TYPES[i][0], 3, 40), h.from_first, h.from_n),
                         to = rank_of(layout_of(POOL_TYPES[i][1], 3, 40), h.to_first, h.to_n);
        struct node *n = gpu_node(&from, "ipc", checksum);
        int32_t src[TOKENS], dst[TOKENS];
        uint64_t peer;
        tables(&from, &to, i, src, dst);
        fill(&from, n->image, i);
        node_push(n);
        buf_clear(&b);
        kvt_hello(n->kvt, &b);
        pipe_put(out, &b);
        pipe_take(in, &b);
        if (kvt_connect(n->kvt, buf_str(&b), &peer, &err) != OK)
            test_fail(__FILE__, __LINE__, "%s", err.text);
        node_wait(n, KVT_CONNECTED, peer, 5000);
        pipe_take(in, &b);
        CHECK_OK(kvt_send_open(n->kvt, 1, peer, buf_str(&b), &err));
        send_all(n, 1, src);
        node_wait(n, KVT_SENT, 1, 30000);
        node_stop(n);
    }
    buf_release(&b);
    _exit(0);
}

static void ipc_receive(unsigned i, int in, int out, bool checksum, struct ranks h)
{
    struct kv_layout from = rank_of(layout_of(POOL_TYPES[i][0], 3, 40), h.from_first, h.from_n),
                     to = rank_of(layout_of(POOL_TYPES[i][1], 3, 40), h.to_first, h.to_n);
    const struct kvt_head_slice part = common_of(&to, &from);
    struct node *n = gpu_node(&to, "ipc", checksum);
    struct buf b = { 0 }, answer = { 0 };
    struct err err = { 0 };
    int32_t src[TOKENS], dst[TOKENS];
    char what[80], *image = malloc(kv_layout_pool_bytes(&from));
    uint32_t n_skip = i % 3;
    tables(&from, &to, i, src, dst);
    fill(&from, image, i);
    pool_set(n, LEFT_ALONE);
    pipe_take(in, &b);
    if (kvt_answer(n->kvt, buf_str(&b), &answer, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    pipe_put(out, &answer);
    buf_clear(&b);
    CHECK_OK(kvt_expect_heads(n->kvt, 1, part.first_head, part.n_heads, dst,
                              kvt_plan_n_blocks(&to, TOKENS), n_skip, TOKENS, &b));
    pipe_put(out, &b);
    CHECK_EQ_INT(node_wait(n, KVT_RECEIVED, 1, 30000).bytes,
                 head_slice_total_bytes(&part, TOKENS, n_skip));
    char *want = expected(&from, image, src, &to, dst, n_skip);
    snprintf(what, sizeof what, "%s of %u to %s of %u", kv_dtype_name(from.dtype),
             from.block_tokens, kv_dtype_name(to.dtype), to.block_tokens);
    check_pool(n, want, what);
    free(want);
    free(image);
    buf_release(&b);
    buf_release(&answer);
    node_stop(n);
}

static void by_ipc(bool checksum, struct ranks h)
{
    int down[2], up[2], status;
    CHECK_OK(pipe(down));
    CHECK_OK(pipe(up));
    pid_t child = fork(); /* before this process uses CUDA */
    if (child == 0) {
        char go;
        if (read(down[0], &go, 1) != 1 || go != 'g') _exit(0);
        ipc_sender(down[0], up[1], checksum, h);
    }
    bool has = device_count("cuda") > 0;
    CHECK(write(down[1], has ? "g" : "n", 1) == 1);
    if (!has) SKIP("no GPU: KV of another layout between the GPUs of two processes is NOT tested");
    for (unsigned i = 0; i < COUNT_OF(POOL_TYPES); i++) ipc_receive(i, up[0], down[1], checksum, h);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

TEST(other_layouts_of_gpus_by_ipc) { by_ipc(true, ALL_HEADS); }
TEST(other_layouts_of_gpus_by_ipc_without_checksums) { by_ipc(false, ALL_HEADS); }
/* A head slice that is all of one pool and a part of the other: where values and scales of one are
 * adjacent, those of the other are not. */
TEST(a_rank_with_fewer_heads_sends_by_ipc) { by_ipc(true, (struct ranks){ 1, 2, 0, 3 }); }
TEST(a_rank_with_fewer_heads_receives_by_ipc) { by_ipc(true, (struct ranks){ 0, 3, 0, 2 }); }

/* ---- by tcp: one process ---- */

static void need_gpu(void)
{
    if (device_count("cuda") == 0)
        SKIP("no GPU: KV of another layout from GPU memory is NOT tested");
}

/* Makes one transfer, for which the receiver reports `end`. */
static void by_tcp(struct pool_type f, struct pool_type t, bool checksum, const char *fault,
                   enum kvt_event_kind end, struct metrics *sent)
{
    struct kv_layout from = layout_of(f, 4, 128), to = layout_of(t, 4, 128);
    struct node *a = node_start((struct node_options){
        .layout = from,
        .protocols = "tcp",
        .lossy = true,
        .no_checksum = !checksum,
        .device = "cuda",
        .fault = fault,
        .metrics = sent,
    });
    struct node *b = node_start(
        (struct node_options){ .layout = to, .protocols = "tcp", .device = "cpu" });
    int32_t src[TOKENS], dst[TOKENS];
    struct buf grant = { 0 };
    struct err err = { 0 };
    tables(&from, &to, 5, src, dst);
    fill(&from, a->image, 5);
    node_push(a);
    pool_set(b, LEFT_ALONE);
    uint64_t peer = node_connect(a, b);
    CHECK_OK(kvt_expect(b->kvt, 1, dst, kvt_plan_n_blocks(&to, TOKENS), 1, TOKENS, &grant));
    CHECK_OK(kvt_send_open(a->kvt, 1, peer, buf_str(&grant), &err));
    send_all(a, 1, src);
    struct kvt_event ev = node_wait(b, end, 1, 30000);
    if (end == KVT_RECEIVED) {
        char *want = expected(&from, a->image, src, &to, dst, 1);
        check_pool(b, want, "by tcp");
        free(want);
    } else {
        CHECK_STATUS(ev.status, ERR_CHECKSUM);
        node_wait(b, KVT_FENCED, 1, 5000);
    }
    buf_release(&grant);
    node_stop(a);
    node_stop(b);
}

/* The value of the metric with exactly this name (and labels). */
static double value_of(struct metrics *m, const char *name)
{
    struct buf text = { 0 };
    metrics_write(m, &text);
    buf_add(&text, "", 1);
    char *line = strstr(text.data, name);
    while (line && (line == text.data || line[-1] != '\n')) line = strstr(line + 1, name);
    CHECK(line);
    double v = strtod(strrchr(strtok(line, "\n"), ' '), NULL);
    buf_release(&text);
    return v;
}

TEST(other_layouts_from_a_gpu_by_tcp)
{
    need_gpu();
    for (unsigned i = 0; i < COUNT_OF(POOL_TYPES); i++)
        for (int checksum = 0; checksum < 2; checksum++) {
            if (!test_runs_long() && i % 2 == (unsigned)checksum) continue;
            struct metrics *m = metrics_create();
            struct pool_type from = POOL_TYPES[i][0], to = POOL_TYPES[i][1];
            struct kv_layout l = layout_of(to, 4, 128);
            bool direct = from.dtype == to.dtype && from.block_tokens == to.block_tokens;
            by_tcp(from, to, checksum, NULL, KVT_RECEIVED, m);
            CHECK(value_of(m, "baton_kv_transfer_converted_bytes_total") ==
                  (direct ? 0 : (double)layout_total_bytes(&l, TOKENS, 1)));
            metrics_free(m);
        }
}

TEST(a_flip_on_the_way_from_a_gpu_is_noticed)
{
    need_gpu();
    by_tcp((struct pool_type){ DTYPE_BF16, 64 }, (struct pool_type){ DTYPE_F32, 16 }, true,
           "at=put:3:flip", KVT_RECEIVE_FAILED, NULL);
    by_tcp((struct pool_type){ DTYPE_I8, 64 }, (struct pool_type){ DTYPE_I8, 64 }, true,
           "at=put:2:flip", KVT_RECEIVE_FAILED, NULL);
}

/* ---- refused ---- */

TEST(a_piece_beyond_the_stage_is_refused_with_both_sizes)
{
    need_gpu();
    struct kv_layout from = layout_of((struct pool_type){ DTYPE_BF16, 16 }, 16, 256), to = from;
    to.dtype = DTYPE_F32;
    to.block_tokens = 256;
    from.n_blocks = to.n_blocks = 1;
    struct node *a = node_start(
        (struct node_options){ .layout = from, .protocols = "tcp", .device = "cuda" });
    struct node *b = node_start(
        (struct node_options){ .layout = to, .protocols = "tcp", .device = "cpu" });
    struct buf hello = { 0 }, answer = { 0 };
    struct err err = { 0 };
    uint64_t peer;
    kvt_hello(a->kvt, &hello);
    CHECK_OK(kvt_answer(b->kvt, buf_str(&hello), &answer, &err));
    CHECK_STATUS(kvt_connect(a->kvt, buf_str(&answer), &peer, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "256 tokens, f32") && strstr(err.text, "16 tokens, bf16") &&
          strstr(err.text, "--block-size"));
    buf_release(&hello);
    buf_release(&answer);
    node_stop(a);
    node_stop(b);
}

TEST_MAIN(CASE_T(other_layouts_of_gpus_by_ipc, 60),
          CASE_T(other_layouts_of_gpus_by_ipc_without_checksums, 60),
          CASE_T(a_rank_with_fewer_heads_sends_by_ipc, 60),
          CASE_T(other_layouts_from_a_gpu_by_tcp, 60),
          CASE_T(a_rank_with_fewer_heads_receives_by_ipc, 60),
          CASE_T(other_layouts_from_a_gpu_by_tcp, 60),
          CASE(a_flip_on_the_way_from_a_gpu_is_noticed),
          CASE(a_piece_beyond_the_stage_is_refused_with_both_sizes))
