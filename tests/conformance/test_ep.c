/* test_ep.c - every backend of ep.h, with one process per rank, against the definition, bit for
 * bit. */
#include <errno.h>
#include <signal.h>

#include "kernels/ep/ep_backend.h"
#include "tests/conformance/ep_fixture.h"

/* ---- one rank's part ---- */

static struct ep_config config_of(const struct shape *s, struct world *w, struct device *d)
{
    struct ep_config c = s->c;
    c.device = d;
    c.rank = w->rank;
    c.size = w->size;
    c.exchange = world_exchange;
    c.exchange_arg = w;
    return c;
}

static struct ep *open_ep(const struct shape *s, struct world *w, struct device *d)
{
    const struct ep_config c = config_of(s, w, d);
    struct ep *e = NULL;
    struct err err = { 0 };
#ifndef BATON_EMULATED_GPU
    /* "Duplicate GPU detected" */
    if (strcmp(c.backend, "nccl") == 0 && n_gpus() < w->size) _exit(NO_GPU);
#endif
    const enum status st = ep_create(&c, &e, &err);
    if (st == ERR_UNSUPPORTED || st == ERR_NODEV) {
        printf("    %s\n", err.text);
        fflush(stdout);
        _exit(NO_GPU);
    }
    if (st != OK) test_fail(__FILE__, __LINE__, "rank %d: %s", w->rank, err.text);
    return e;
}

/* The elements of the row that arrived in a slot. */
static void read_row(const struct shape *s, const struct ep_batch *b, const unsigned char *row,
                     float *x)
{
    const float *scales = (const float *)(const void *)(row + b->scales_at);
    for (int k = 0; k < s->c.hidden; k++) {
        if (s->c.send == DTYPE_F32) x[k] = ((const float *)(const void *)row)[k];
        else if (s->c.send == DTYPE_BF16)
            x[k] = dtype_bf16_to_f32(((const uint16_t *)(const void *)row)[k]);
        else x[k] = dtype_f8_e4m3_to_f32(row[k]) * scales[k / EP_SCALE_STEP];
    }
    const size_t size = dtype_block_bytes(s->c.send);
    for (size_t i = (size_t)s->c.hidden * size; i < ((size_t)s->c.hidden + 63) / 64 * 64 * size;
         i++)
        CHECK_EQ_INT(row[i], 0);
}

/* Checks that slots are in the specified order, each with the right row, and writes its expert's
 * result to out. Returns the number of slots. */
static size_t check_batch(const struct shape *s, const struct world *w, const struct ep_batch *b,
                          const unsigned char *x, const int32_t *begin, const int32_t *x_rows,
                          float *out)
{
    const struct ep_placement *p = &s->c.placement;
    const size_t hidden = (size_t)s->c.hidden;
    size_t slot = 0;
    CHECK_EQ_INT(b->n_local, p->first[w->rank + 1] - p->first[w->rank]);
    for (int32_t e = 0; e < b->n_local; e++) {
        CHECK_EQ_INT(begin[e], slot);
        for (int r = 0; r < w->size; r++)
            for (size_t row = 0; row < rows_of(s, r); row++) {
                float sent[HIDDEN_MAX], want[HIDDEN_MAX], got[HIDDEN_MAX];
                int32_t experts[USED_MAX];
                row_experts(s, r, row, experts);
                for (int j = 0; j < s->c.n_used; j++) {
                    if (physical_of(p, r, row, experts[j]) != p->first[w->rank] + e) continue;
                    row_x(s, r, row, sent);
                    row_sent(s, sent, want);
                    read_row(s, b, x + (size_t)x_rows[slot] * b->row_bytes, got);
                    CHECK(memcmp(want, got, hidden * sizeof *want) == 0);
                    expert_of(logical_of(p, p->first[w->rank] + e), got, s->c.hidden,
                              out + slot * hidden);
                    slot++;
                }
            }
    }
    CHECK_EQ_INT(begin[b->n_local], slot);
    return slot;
}

/* Runs the experts on the host. */
static void run_experts(const struct shape *s, const struct world *w, struct device *d,
                        const struct ep_batch *b, struct dev_mem *out)
{
    int32_t *begin = from_device(d, b->begin, ((size_t)b->n_local + 1) * sizeof *begin);
    const size_t n = (size_t)begin[b->n_local];
    int32_t *x_rows = from_device(d, b->x_rows, n * sizeof *x_rows);
    int32_t last = -1;
    CHECK(n <= b->n_slots);
    for (size_t i = 0; i < n; i++) last = x_rows[i] > last ? x_rows[i] : last;
    unsigned char *x = from_device(d, b->x, (size_t)(last + 1) * b->row_bytes);
    float *results = mem_calloc(n ? n : 1, (size_t)s->c.hidden * sizeof *results);
    CHECK_EQ_INT(check_batch(s, w, b, x, begin, x_rows, results), n);
    to_device(d, results, n * (size_t)s->c.hidden * sizeof *results, out);
    mem_free(results);
    mem_free(x);
    mem_free(x_rows);
    mem_free(begin);
}

struct inputs {
    size_t n, stride; /* rows; floats from one to the next */
    float *x, *weights, *y;
    int32_t *experts;
    struct dev_mem d_x, d_experts, d_weights, d_y, d_out;
};

static void make_inputs(const struct shape *s, const struct world *w, struct device *d,
                        struct inputs *in)
{
    const size_t hidden = (size_t)s->c.hidden, used = (size_t)s->c.n_used, n = rows_of(s, w->rank),
                 one = n ? n : 1;
    *in = (struct inputs){ .n = n, .stride = hidden + (size_t)(s->call % 2) * 3 };
    in->x = MEM_ARRAY(float, one * in->stride);
    in->y = MEM_ARRAY(float, one *hidden);
    in->experts = MEM_ARRAY(int32_t, one * used);
    in->weights = MEM_ARRAY(float, one *used);
    for (size_t i = 0; i < n; i++) {
        row_x(s, w->rank, i, in->x + i * in->stride);
        row_experts(s, w->rank, i, in->experts + i * used);
        for (size_t j = 0; j < used; j++)
            in->weights[i * used + j] = row_weight(s, w->rank, i, (int)j);
        for (size_t k = 0; k < hidden; k++)
            in->y[i * hidden + k] = row_before(s, w->rank, i, (int)k);
    }
    to_device(d, in->x, n * in->stride * sizeof(float), &in->d_x);
    to_device(d, in->y, n * hidden * sizeof(float), &in->d_y);
    to_device(d, in->experts, n * used * sizeof(int32_t), &in->d_experts);
    to_device(d, in->weights, n * used * sizeof(float), &in->d_weights);
}

static void release_inputs(struct device *d, struct inputs *in)
{
    device_mem_free(d, &in->d_x);
    device_mem_free(d, &in->d_y);
    device_mem_free(d, &in->d_out);
    device_mem_free(d, &in->d_experts);
    device_mem_free(d, &in->d_weights);
    mem_free(in->x);
    mem_free(in->y);
    mem_free(in->experts);
    mem_free(in->weights);
}

static void check_counts(const struct shape *s, const struct world *w, const struct ep_counts *c)
{
    const struct ep_placement *p = &s->c.placement;
    if (s->c.mode == EP_LOW_LATENCY) {
        CHECK(c->by_expert == NULL);
        return;
    }
    size_t all = 0;
    for (int32_t e = p->first[w->rank]; e < p->first[w->rank + 1]; e++) {
        int32_t n = 0, experts[USED_MAX];
        for (int r = 0; r < w->size; r++)
            for (size_t row = 0; row < rows_of(s, r); row++) {
                row_experts(s, r, row, experts);
                for (int j = 0; j < s->c.n_used; j++) n += physical_of(p, r, row, experts[j]) == e;
            }
        CHECK_EQ_INT(c->by_expert[e - p->first[w->rank]], n);
        all += (size_t)n;
    }
    CHECK_EQ_INT(c->n_slots, all);
}

/* Runs one call from plan to combine and checks its result bit for bit. */
static void step(const struct shape *s, const struct world *w, struct device *d, struct ep *e)
{
    const size_t hidden = (size_t)s->c.hidden;
    struct inputs in;
    struct ep_counts counts;
    struct ep_batch b;
    make_inputs(s, w, d, &in);
    CHECK_OK(ep_plan(e, in.d_experts.ptr, in.n, &counts, NULL));
    check_counts(s, w, &counts);
    CHECK_OK(ep_dispatch(e, in.d_x.ptr, in.stride, &b, NULL));
    CHECK_EQ_INT(b.n_slots, counts.n_slots);
    CHECK_OK(ep_wait(e, NULL));
    run_experts(s, w, d, &b, &in.d_out);
    const struct ep_combine_args a = {
        .out = in.d_out.ptr, .weights = in.d_weights.ptr, .y = in.d_y.ptr, .add = s->add
    };
    CHECK_OK(ep_combine(e, &a, NULL));
    CHECK_OK(ep_wait(e, NULL));
    float *y = from_device(d, in.d_y.ptr, in.n * hidden * sizeof *y), want[HIDDEN_MAX];
    for (size_t i = 0; i < in.n; i++) {
        row_y(s, w->rank, i, want);
        for (size_t k = 0; k < hidden; k++)
            if (memcmp(&want[k], &y[i * hidden + k], sizeof *want) != 0)
                test_fail(__FILE__, __LINE__,
                          "rank %d of %d, call %d, row %zu, element %zu: %a is %a", w->rank,
                          w->size, s->call, i, k, (double)y[i * hidden + k], (double)want[k]);
    }
    mem_free(y);
    release_inputs(d, &in);
}

/* x[i] of each rank is draw_float(6, rank, i, call). */
static void sums(const struct shape *s, const struct world *w, struct device *d, struct ep *e)
{
    static const size_t sizes[] = { 1, 7, 64, 333 };
    for (size_t t = 0; t < COUNT_OF(sizes); t++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            const size_t n = sizes[t], bytes = n * (bf16 ? 2 : 4);
            struct dev_mem m;
            float x[333];
            uint16_t h[333];
            for (size_t i = 0; i < n; i++) {
                x[i] = draw_float(6, (uint64_t)w->rank, i, (uint64_t)s->call + t);
                h[i] = dtype_f32_to_bf16(x[i]);
            }
            to_device(d, bf16 ? (void *)h : (void *)x, bytes, &m);
            CHECK_OK(ep_all_reduce(e, m.ptr, n, bf16 ? DTYPE_BF16 : DTYPE_F32, NULL));
            CHECK_OK(ep_wait(e, NULL));
            void *got = from_device(d, m.ptr, bytes);
            for (size_t i = 0; i < n; i++) {
                float sum = 0;
                for (int r = 0; r < w->size; r++) {
                    float v = draw_float(6, (uint64_t)r, i, (uint64_t)s->call + t);
                    if (bf16) v = dtype_bf16_to_f32(dtype_f32_to_bf16(v));
                    sum = r ? sum + v : v;
                }
                if (bf16) CHECK_EQ_INT(((uint16_t *)got)[i], dtype_f32_to_bf16(sum));
                else CHECK(memcmp(&((float *)got)[i], &sum, sizeof sum) == 0);
            }
            mem_free(got);
            device_mem_free(d, &m);
        }
}

static void gathers(const struct world *w, struct device *d, struct ep *e)
{
    static const size_t sizes[] = { 1, 16, 1029 };
    for (size_t t = 0; t < COUNT_OF(sizes); t++) {
        const size_t n = sizes[t];
        unsigned char mine[1029];
        struct dev_mem from, to;
        for (size_t i = 0; i < n; i++) mine[i] = (unsigned char)draw(7, (uint64_t)w->rank, i, n);
        to_device(d, mine, n, &from);
        to_device(d, NULL, n * (size_t)w->size, &to);
        CHECK_OK(ep_all_gather(e, to.ptr, from.ptr, n, NULL));
        CHECK_OK(ep_wait(e, NULL));
        unsigned char *got = from_device(d, to.ptr, n * (size_t)w->size);
        for (size_t i = 0; i < n * (size_t)w->size; i++)
            CHECK_EQ_INT(got[i], (unsigned char)draw(7, i / n, i % n, n));
        mem_free(got);
        device_mem_free(d, &from);
        device_mem_free(d, &to);
    }
}

/* ---- placements ---- */

enum { COPIES = 3 };
static int32_t first_of[RANKS + 1], copies_of[13], physical_of_copies[12 + COPIES];

/* 12 experts. Uneven: rank 1 has none, the last has what is left. Redundant: the first three have a
 * second copy, at the end. */
static struct ep_placement placement(int size, bool redundant)
{
    const int32_t n = 12 + (redundant ? COPIES : 0);
    for (int r = 0; r <= size; r++) first_of[r] = r == size ? n : r * n / size;
    if (size == 2) first_of[1] = 7;
    if (size > 2) first_of[2] = first_of[1];
    int32_t at = 0;
    for (int32_t e = 0; e < 12; e++) {
        copies_of[e] = at;
        physical_of_copies[at++] = 11 - e; /* not in order */
        if (e < COPIES) physical_of_copies[at++] = 12 + e;
    }
    copies_of[12] = at;
    return (struct ep_placement){
        .n_logical = 12,
        .n_physical = n,
        .first = first_of,
        .copies = redundant ? copies_of : NULL,
        .physical = redundant ? physical_of_copies : NULL,
    };
}

static struct shape shape_of(const char *backend, enum ep_mode mode, int size)
{
    return (struct shape){ .c = { .backend = backend,
                                  .mode = mode,
                                  .max_rows = 6,
                                  .hidden = 200,
                                  .n_used = 3,
                                  .placement = placement(size, false),
                                  .send = DTYPE_F32,
                                  .back = DTYPE_F32,
                                  .collective_bytes = 2048,
                                  .timeout_ms = LINK_MS, }, };
}

static struct shape the_shape;
static const char *the_device;

/* Several calls with the same object, with all-reduces between them. */
static void rank_of_calls(struct world *w)
{
    struct device *d = rank_device(the_device, w);
    struct shape s = the_shape;
    struct ep *e = open_ep(&s, w, d);
    for (s.call = 0; s.call < 4; s.call++) {
        s.add = s.call % 2 == 1;
        if (w->rank == s.call % w->size) usleep(30000); /* one is late */
        step(&s, w, d, e);
        sums(&s, w, d, e);
    }
    gathers(w, d, e);
    ep_free(e);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

static const char WHY[] =
    "no GPU, or no library, for this backend of expert parallelism: nothing of it was run";

static void calls(const char *backend, const char *device, enum ep_mode mode, int size)
{
    static const struct {
        enum dtype send, back;
        bool redundant;
        int32_t hidden, n_used;
    } VARIANTS[] = {
        { DTYPE_F32, DTYPE_F32, false, 200, 3 },
        { DTYPE_BF16, DTYPE_BF16, true, 64, 1 },
        { DTYPE_F8_E4M3, DTYPE_F32, true, 333, 4 },
    };
    the_device = device;
    for (size_t i = 0; i < COUNT_OF(VARIANTS); i++) {
        the_shape = shape_of(backend, mode, size);
        the_shape.c.send = VARIANTS[i].send;
        the_shape.c.back = VARIANTS[i].back;
        the_shape.c.hidden = VARIANTS[i].hidden;
        the_shape.c.n_used = VARIANTS[i].n_used;
        the_shape.c.placement = placement(size, VARIANTS[i].redundant);
        run_ranks(size, rank_of_calls, 0, WHY);
    }
}

TEST(self_on_the_host) { calls("self", "cpu", EP_THROUGHPUT, 1); }
TEST(self_on_the_host_low_latency) { calls("self", "cpu", EP_LOW_LATENCY, 1); }
TEST(self_on_a_gpu) { calls("self", "cuda", EP_THROUGHPUT, 1); }
TEST(self_on_a_gpu_low_latency) { calls("self", "cuda", EP_LOW_LATENCY, 1); }
TEST(peer_1) { calls("peer", "cuda", EP_LOW_LATENCY, 1); }
TEST(peer_2) { calls("peer", "cuda", EP_LOW_LATENCY, 2); }
TEST(peer_3) { calls("peer", "cuda", EP_LOW_LATENCY, 3); }
TEST(peer_8) { calls("peer", "cuda", EP_LOW_LATENCY, 8); }
TEST(peer_4) { calls("peer", "cuda", EP_LOW_LATENCY, 4); }

/* Ranks that share no experts: tensor parallelism. */
static void rank_of_sums(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = { .c = { .backend = "peer",
                              .mode = EP_LOW_LATENCY,
                              .collective_bytes = 1500,
                              .timeout_ms = LINK_MS, }, };
    struct ep *e = open_ep(&s, w, d);
    for (; s.call < 3; s.call++) sums(&s, w, d, e);
    gathers(w, d, e);
    CHECK_OK(ep_wait(e, NULL));
    ep_free(e);
    device_close(d);
}
TEST(peer_sums_without_experts) { run_ranks(3, rank_of_sums, 0, WHY); }

/* Runs through NCCL if every rank has its own GPU, as NCCL requires; in builds with the emulated
 * GPU through a stand-in (ep_nccl_fake.c). */
#define NCCL_TEST(name, mode, size)                                                                \
    TEST(name) { calls("nccl", "cuda", mode, size); }
NCCL_TEST(nccl_throughput_1, EP_THROUGHPUT, 1)
NCCL_TEST(nccl_throughput_2, EP_THROUGHPUT, 2)
NCCL_TEST(nccl_throughput_4, EP_THROUGHPUT, 4)
NCCL_TEST(nccl_throughput_8, EP_THROUGHPUT, 8)
NCCL_TEST(nccl_low_latency_1, EP_LOW_LATENCY, 1)
NCCL_TEST(nccl_low_latency_3, EP_LOW_LATENCY, 3)

/* ---- refusals ---- */

static void refused(struct ep_config c, enum status want, const char *says)
{
    struct ep *e = NULL;
    struct err err = { 0 };
    CHECK_STATUS(ep_create(&c, &e, &err), want);
    CHECK(e == NULL);
    if (!strstr(err.text, says))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text, says);
}

TEST(impossible_sizes_are_refused_with_a_sentence)
{
    static const int32_t backwards[] = { 0, 8, 4, 12 }, short_of[] = { 0, 11 },
                         no_copy[] = { 0, 1, 1 }, places[] = { 0, 7 };
    struct ep_config good = shape_of("self", EP_THROUGHPUT, 1).c, c;
    CHECK_OK(device_open("cpu", &good.device, NULL));
    good.size = 1;
#define REFUSED(change, want, says)                                                                \
    do {                                                                                           \
        c = good;                                                                                  \
        change;                                                                                    \
        refused(c, want, says);                                                                    \
    } while (0)
    REFUSED(c.backend = "abacus", ERR_UNSUPPORTED, "abacus");
    REFUSED(c.backend = "peer", ERR_UNSUPPORTED, "for the CPU");
    REFUSED(c.rank = 1, ERR_INVALID, "rank 1 of 1");
    REFUSED(c.rank = -1, ERR_INVALID, "rank -1");
    REFUSED(c.size = EP_RANKS_MAX + 1, ERR_INVALID, "at most 256");
    REFUSED(c.size = 2, ERR_INVALID, "no way to meet");
    good.exchange = world_exchange;
    REFUSED(c.timeout_ms = 0, ERR_INVALID, "deadline");
    REFUSED(c.max_rows = 0, ERR_INVALID, "rows 0");
    REFUSED(c.hidden = 0, ERR_INVALID, "hidden size 0");
    REFUSED(c.n_used = 13, ERR_INVALID, "13 of 12");
    REFUSED(c.max_rows = 1 << 30, ERR_INVALID, "too many");
    REFUSED(c.placement.n_physical = 11, ERR_INVALID, "0 to 10");
    REFUSED((c.placement.n_physical = 11, c.placement.first = short_of), ERR_INVALID,
            "12 experts have 11 places");
    REFUSED((c.size = 3, c.placement.first = backwards), ERR_INVALID,
            "rank 1 end before they begin");
    REFUSED((c.placement.n_logical = 2, c.n_used = 2, c.placement.copies = no_copy,
             c.placement.physical = places),
            ERR_INVALID, "expert 1 has no place");
    REFUSED(c.send = DTYPE_Q4_0, ERR_INVALID, "q4_0");
    REFUSED(c.back = DTYPE_F8_E4M3, ERR_INVALID, "f8_e4m3");
    REFUSED((c.size = 2, c.placement = placement(2, false)), ERR_UNSUPPORTED, "one rank, not 2");
    device_close(good.device);
}

TEST(too_much_at_once_is_refused)
{
    struct shape s = shape_of("self", EP_THROUGHPUT, 1);
    struct world w = { .size = 1 };
    struct device *d = rank_device("cpu", &w);
    struct ep *e = open_ep(&s, &w, d);
    int32_t experts[7 * 3] = { 0 }, wrong[3] = { 0, 12, 1 };
    float x[600] = { 0 };
    CHECK_STATUS(ep_plan(e, experts, 7, NULL, NULL), ERR_TOO_LONG);
    CHECK_STATUS(ep_plan(e, wrong, 1, NULL, NULL), ERR_INVALID);
    CHECK_STATUS(ep_all_reduce(e, x, 513, DTYPE_F32, NULL), ERR_TOO_LONG);
    CHECK_STATUS(ep_all_reduce(e, x, 4, DTYPE_F16, NULL), ERR_UNSUPPORTED);
    CHECK_OK(ep_plan(e, experts, 6, NULL, NULL));
    ep_free(e);
    ep_free(NULL);
    device_close(d);
}

/* The GPU detects it, and the error names the rank that asked. */
static void rank_of_a_wrong_expert(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = shape_of("peer", EP_LOW_LATENCY, w->size);
    struct ep *e = open_ep(&s, w, d);
    struct inputs in;
    struct ep_batch b;
    struct err err;
    make_inputs(&s, w, d, &in);
    if (w->rank == 0) {
        CHECK(in.n > 0);
        in.experts[1] = 12;
        device_upload(d, in.d_experts.ptr, in.experts, in.n * 3 * sizeof(int32_t));
    }
    CHECK_OK(ep_plan(e, in.d_experts.ptr, in.n, NULL, NULL));
    CHECK_OK(ep_dispatch(e, in.d_x.ptr, in.stride, &b, NULL));
    CHECK_STATUS(ep_wait(e, &err), ERR_INVALID);
    CHECK(strstr(err.text, "rank 0") != NULL);
    CHECK_OK(device_fault(d, NULL));
    ep_free(e);
    release_inputs(d, &in);
    device_close(d);
}
TEST(peer_a_wrong_expert_ends_all_ranks_with_its_name)
{
    run_ranks(2, rank_of_a_wrong_expert, 0, WHY);
}

static void rank_with_other_sizes(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    const struct shape s = shape_of("peer", EP_LOW_LATENCY, w->size);
    struct ep_config c = config_of(&s, w, d);
    struct ep *e = NULL;
    struct err err;
    if (w->rank == 1) c.hidden++;
    CHECK_STATUS(ep_create(&c, &e, &err), ERR_PEER_MISMATCH);
    CHECK(e == NULL && strstr(err.text, w->rank == 1 ? "rank 0" : "rank 1") != NULL);
    device_close(d);
}
TEST(peer_ranks_of_other_sizes_do_not_meet) { run_ranks(3, rank_with_other_sizes, 0, WHY); }

#ifdef BATON_EMULATED_GPU
#include "tests/simt/include/simt.h"

/* One rank cannot allocate memory, or cannot open that of the others. All ranks get an error that
 * names it, and everything is freed. */
static const char *the_failing;
static void rank_of_failures(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    const struct shape s = shape_of("peer", EP_LOW_LATENCY, w->size);
    struct ep_config c = config_of(&s, w, d);
    struct ep *e = NULL;
    struct err err = { 0 };
    const bool is_memory = strcmp(the_failing, "cudaMalloc") == 0;
    if (w->rank == 1)
        simt_fail_next(is_memory ? cudaErrorMemoryAllocation : cudaErrorPeerAccessUnsupported,
                       the_failing, 1);
    const enum status st = ep_create(&c, &e, &err);
    CHECK(e == NULL);
    CHECK_STATUS(st, w->rank != 1 ? ERR_PEER_REFUSED : is_memory ? ERR_NOMEM : ERR_UNSUPPORTED);
    if (w->rank != 1) CHECK(strstr(err.text, "rank 1 failed") != NULL);
    CHECK_EQ_INT(simt_device_bytes(), 0);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}
TEST(peer_all_ranks_learn_that_one_has_no_memory)
{
    the_failing = "cudaMalloc";
    run_ranks(3, rank_of_failures, 0, WHY);
}
TEST(peer_all_ranks_learn_that_one_cannot_map_the_others)
{
    the_failing = "cudaIpcOpenMemHandle";
    run_ranks(3, rank_of_failures, 0, WHY);
}

/* Rank 1's GPU fails: rank 1 gets the fault, and the other one its deadline. */
static void rank_with_a_broken_gpu(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = shape_of("peer", EP_LOW_LATENCY, w->size);
    struct inputs in;
    struct ep_batch b;
    struct err err = { 0 };
    s.c.timeout_ms = 1000;
    struct ep *e = open_ep(&s, w, d);
    make_inputs(&s, w, d, &in);
    if (w->rank == 1) simt_fail_next(cudaErrorIllegalAddress, "kernel", 0);
    enum status st = ep_plan(e, in.d_experts.ptr, in.n, NULL, &err);
    if (st == OK) st = ep_dispatch(e, in.d_x.ptr, in.stride, &b, &err);
    if (st == OK) st = ep_wait(e, &err);
    CHECK_STATUS(st, w->rank == 1 ? ERR_NODEV : ERR_PEER_LOST);
    CHECK(strstr(err.text, w->rank == 1 ? "illegal" : "rank 1 of 2") != NULL);
    ep_free(e);
    _exit(0); /* memory of a failed GPU cannot be freed */
}
TEST(peer_a_broken_gpu_is_its_own_fault_and_the_others_deadline)
{
    run_ranks(2, rank_with_a_broken_gpu, 0, WHY);
}
static void check_freed(void) { CHECK_EQ_INT(simt_device_bytes(), 0); }
#else
TEST(peer_all_ranks_learn_that_one_has_no_memory)
{
    SKIP("failures by order need the emulated GPU");
}
TEST(peer_all_ranks_learn_that_one_cannot_map_the_others)
{
    SKIP("failures by order need the emulated GPU");
}
TEST(peer_a_broken_gpu_is_its_own_fault_and_the_others_deadline)
{
    SKIP("failures by order need the emulated GPU");
}
static void check_freed(void) {}
#endif

static void rank_of_the_wrong_mode(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    const struct shape s = shape_of("peer", EP_THROUGHPUT, 1);
    refused(config_of(&s, w, d), ERR_UNSUPPORTED, "no throughput mode");
    device_close(d);
    check_freed();
}
TEST(peer_has_no_throughput_mode) { run_ranks(1, rank_of_the_wrong_mode, 0, WHY); }

/* ---- a rank dies ---- */

enum { SHORT_MS = 5000, DEAD = 1 };
static const char *the_backend;
#ifdef BATON_EMULATED_GPU
enum { EMULATED = 1 };
#else
enum { EMULATED = 0 };
#endif

/* A driver may unmap the dead rank's memory, and then a rank that writes there gets a device fault
 * (ep_peer.c). */
static bool is_lost(enum status st)
{
    return st == ERR_PEER_LOST || (!EMULATED && st == ERR_NODEV);
}

/* After one good call DEAD is killed, and the next call of the others ends in time. */
static void rank_whose_peer_dies(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = shape_of(the_backend, EP_LOW_LATENCY, w->size);
    struct inputs in;
    struct ep_batch b;
    struct err err = { 0 };
    s.c.timeout_ms = SHORT_MS;
    struct ep *e = open_ep(&s, w, d);
    step(&s, w, d, e);
    if (w->rank == DEAD) kill(getpid(), SIGKILL);
    make_inputs(&s, w, d, &in);
    const long long before = now_ms();
    enum status st = ep_plan(e, in.d_experts.ptr, in.n, NULL, &err);
    if (st == OK) st = ep_dispatch(e, in.d_x.ptr, in.stride, &b, &err);
    if (st == OK) st = ep_wait(e, &err);
    CHECK(is_lost(st));
    CHECK(now_ms() - before < 4 * SHORT_MS);
    CHECK(is_lost(ep_wait(e, NULL))); /* and remains lost */
    float one = 1;
    struct dev_mem m = { .fd = -1 };
    CHECK(is_lost(
        ep_all_reduce(e, device_fault(d, NULL) != OK ? &one : to_device(d, &one, sizeof one, &m), 1,
                      DTYPE_F32, NULL)));
    ep_free(e);
    if (device_fault(d, NULL) != OK) _exit(EMULATED); /* memory of a failed GPU cannot be freed */
    device_mem_free(d, &m);
    release_inputs(d, &in);
    device_close(d);
    check_freed();
}

TEST(peer_a_dead_rank_is_an_error_in_time)
{
    the_backend = "peer";
    run_ranks(3, rank_whose_peer_dies, 1u << DEAD, WHY);
}

TEST(nccl_a_dead_rank_is_an_error_in_time)
{
    the_backend = "nccl";
    run_ranks(3, rank_whose_peer_dies, 1u << DEAD, WHY);
}

/* ---- more than there is room for ---- */

/* All rows choose experts of rank 0. All ranks refuse alike, and then go on with a batch that
 * fits. */
static void rank_over_its_limit(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = shape_of("nccl", EP_THROUGHPUT, w->size);
    struct dev_mem m;
    struct err err = { 0 };
    struct ep_counts counts;
    int32_t experts[6 * 3];
    s.c.max_slots = 20;
    for (int i = 0; i < 18; i++) experts[i] = i % 3;
    struct ep *e = open_ep(&s, w, d);
    to_device(d, experts, sizeof experts, &m);
    CHECK_STATUS(ep_plan(e, m.ptr, 6, NULL, &err), ERR_FULL);
    CHECK(strstr(err.text, "rank 0 would get 36 rows") != NULL);
    CHECK_OK(ep_plan(e, m.ptr, 3, &counts, NULL));
    CHECK_EQ_INT(counts.n_slots, w->rank == 0 ? 18 : 0);
    ep_free(e);
    device_mem_free(d, &m);
    device_close(d);
}
TEST(nccl_more_than_there_is_room_for_is_refused_by_all)
{
    run_ranks(2, rank_over_its_limit, 0, WHY);
}

/* ---- graphs ---- */

#ifdef BATON_HAVE_CUDA_KERNELS
#include "kernels/cuda/device_cuda.h"

enum { REPLAYS = 4 };

/* Every result is the number of the rank that has the expert, so the graph contains no experts. */
static void check_owners(const struct shape *s, const struct world *w, const struct inputs *in,
                         const float *y)
{
    const struct ep_placement *p = &s->c.placement;
    for (size_t i = 0; i < in->n; i++) {
        float sum = 0;
        for (int j = 0; j < s->c.n_used; j++) {
            int owner = 0;
            while (in->experts[i * (size_t)s->c.n_used + (size_t)j] >= p->first[owner + 1]) owner++;
            sum = fmaf(in->weights[i * (size_t)s->c.n_used + (size_t)j], (float)(owner + 1), sum);
        }
        for (size_t k = 0; k < (size_t)s->c.hidden; k++)
            if (memcmp(&sum, &y[i * (size_t)s->c.hidden + k], sizeof sum) != 0)
                test_fail(__FILE__, __LINE__, "rank %d row %zu", w->rank, i);
    }
}

static void capture(const struct shape *s, struct ep *e, struct inputs *in, cudaStream_t stream,
                    cudaGraphExec_t *exec)
{
    const struct ep_combine_args a = {
        .out = in->d_out.ptr, .weights = in->d_weights.ptr, .y = in->d_y.ptr, .add = s->add
    };
    struct ep_batch b;
    cudaGraph_t graph;
    CHECK_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK_OK(ep_plan(e, in->d_experts.ptr, in->n, NULL, NULL));
    CHECK_OK(ep_dispatch(e, in->d_x.ptr, in->stride, &b, NULL));
    CHECK_OK(ep_combine(e, &a, NULL));
    CHECK_OK(ep_all_reduce(e, in->d_weights.ptr, 1, DTYPE_F32, NULL));
    CHECK_OK(cudaStreamEndCapture(stream, &graph));
    CHECK_OK(cudaGraphInstantiate(exec, graph, 0));
    CHECK_OK(cudaGraphDestroy(graph));
}

/* The rows are those of call 0, with other choices and weights at each replay. */
static void rank_of_graphs(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = shape_of("peer", EP_LOW_LATENCY, w->size);
    struct ep *e = open_ep(&s, w, d);
    struct inputs in;
    cudaGraphExec_t exec;
    cudaStream_t stream = cuda_device_of(d)->stream;
    make_inputs(&s, w, d, &in);
    const size_t n_out = ep_max_slots(&e->config) * (size_t)s.c.hidden, used = in.n * 3,
                 n_weights = used ? used : 1;
    float *out = MEM_ARRAY(float, n_out), own[6 * 3 + 1] = { 0 };
    for (size_t i = 0; i < n_out; i++) out[i] = (float)(w->rank + 1);
    to_device(d, out, n_out * sizeof *out, &in.d_out);
    if (used == 0) {
        device_mem_free(d, &in.d_weights);
        to_device(d, NULL, sizeof(float), &in.d_weights);
    }
    capture(&s, e, &in, stream, &exec);
    for (int t = 0; t < REPLAYS; t++) {
        for (size_t i = 0; i < used; i++) {
            in.experts[i] = (int32_t)((draw(8, (uint64_t)w->rank, i / 3, (uint64_t)t) + i % 3) %
                                      12);
            own[i] = in.weights[i] = draw_float(9, (uint64_t)w->rank, i, (uint64_t)t);
        }
        device_upload(d, in.d_experts.ptr, in.experts, used * sizeof(int32_t));
        device_upload(d, in.d_weights.ptr, own, n_weights * sizeof(float));
        CHECK_OK(cudaGraphLaunch(exec, stream));
        CHECK_OK(ep_wait(e, NULL));
        float *y = from_device(d, in.d_y.ptr, in.n * (size_t)s.c.hidden * sizeof *y);
        check_owners(&s, w, &in, y);
        mem_free(y);
    }
    CHECK_OK(cudaGraphExecDestroy(exec));
    ep_free(e);
    mem_free(out);
    release_inputs(d, &in);
    device_close(d);
}
TEST(peer_calls_run_again_from_a_graph) { run_ranks(3, rank_of_graphs, 0, WHY); }
#else
TEST(peer_calls_run_again_from_a_graph) { SKIP("built without kernels for GPUs"); }
#endif

TEST_MAIN(CASE(self_on_the_host), CASE(self_on_the_host_low_latency), CASE(self_on_a_gpu),
          CASE(self_on_a_gpu_low_latency), CASE_T(peer_1, 120), CASE_T(peer_2, 120),
          CASE_T(peer_3, 120), CASE_T(peer_4, 120), CASE_T(peer_8, 180),
          CASE(peer_sums_without_experts), CASE(impossible_sizes_are_refused_with_a_sentence),
          CASE(too_much_at_once_is_refused), CASE(peer_a_wrong_expert_ends_all_ranks_with_its_name),
          CASE(peer_ranks_of_other_sizes_do_not_meet),
          CASE(peer_all_ranks_learn_that_one_has_no_memory),
          CASE(peer_all_ranks_learn_that_one_cannot_map_the_others),
          CASE(peer_a_broken_gpu_is_its_own_fault_and_the_others_deadline),
          CASE(peer_has_no_throughput_mode), CASE(peer_a_dead_rank_is_an_error_in_time),
          CASE_T(nccl_throughput_1, 120), CASE_T(nccl_throughput_2, 120),
          CASE_T(nccl_throughput_4, 120), CASE_T(nccl_throughput_8, 180),
          CASE_T(nccl_low_latency_1, 120), CASE_T(nccl_low_latency_3, 120),
          CASE(nccl_a_dead_rank_is_an_error_in_time),
          CASE(nccl_more_than_there_is_room_for_is_refused_by_all),
          CASE(peer_calls_run_again_from_a_graph))
