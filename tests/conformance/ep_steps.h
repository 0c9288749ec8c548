/* ep_steps.h - what a rank of a test does with an object of ep.h: calls from plan to combine, sums
 * and gathers, each checked bit for bit, and the shapes that tests use. Thread: one per rank. */
#ifndef BATON_TESTS_CONFORMANCE_EP_STEPS_H
#define BATON_TESTS_CONFORMANCE_EP_STEPS_H

#include "tests/conformance/ep_fixture.h"

/* ---- one rank's part ---- */

/* Of backend `ucx`: how many hosts the ranks are taken to run on, in turn; 0: each on its own. */
static int the_hosts;

/* Ranks of the same host as `rank`. */
static inline int near_of(int rank, int size)
{
    int n = 0;
    for (int r = 0; r < size && the_hosts; r++) n += r != rank && r % the_hosts == rank % the_hosts;
    return n;
}

static inline struct ep_config config_of(const struct shape *s, struct world *w, struct device *d)
{
    struct ep_config c = s->c;
    c.device = d;
    c.rank = w->rank;
    c.size = w->size;
    c.domain = (uint64_t)(the_hosts ? w->rank % the_hosts : w->rank);
    c.exchange = world_exchange;
    c.exchange_arg = w;
    return c;
}

static inline struct ep *open_ep(const struct shape *s, struct world *w, struct device *d)
{
    const struct ep_config c = config_of(s, w, d);
    struct ep *e = NULL;
    struct err err = { 0 };
#ifndef BATON_EMULATED_GPU
    /* "Duplicate GPU detected" */
    if (strcmp(c.backend, "nccl") == 0 && n_gpus() < w->size) _exit(NO_GPU);
#endif
    const enum status st = ep_create(&c, &e, &err);
    const bool may_lack = !d->is_host || strcmp(c.backend, "ucx") == 0; /* GPU or library */
    if (may_lack && (st == ERR_UNSUPPORTED || st == ERR_NODEV)) {
        printf("    %s\n", err.text);
        fflush(stdout);
        _exit(NO_GPU);
    }
    if (st != OK) test_fail(__FILE__, __LINE__, "rank %d: %s", w->rank, err.text);
    if (strcmp(c.backend, "ucx") == 0 && c.placement.n_logical)
        CHECK_EQ_INT(e->n_near, near_of(w->rank, w->size));
    return e;
}

/* The elements of the row that arrived in a slot. */
static inline void read_row(const struct shape *s, const struct ep_batch *b,
                            const unsigned char *row, float *x)
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
static inline size_t check_batch(const struct shape *s, const struct world *w,
                                 const struct ep_batch *b, const unsigned char *x,
                                 const int32_t *begin, const int32_t *x_rows, float *out)
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
                    if (physical_of(s, r, row, experts[j]) != p->first[w->rank] + e) continue;
                    row_x(s, r, row, sent);
                    row_sent(s, sent, want);
                    read_row(s, b, x + (size_t)x_rows[slot] * b->row_bytes, got);
                    CHECK(memcmp(want, got, hidden * sizeof *want) == 0);
                    expert_of(logical_of(s, p->first[w->rank] + e), got, s->c.hidden,
                              out + slot * hidden);
                    slot++;
                }
            }
    }
    CHECK_EQ_INT(begin[b->n_local], slot);
    return slot;
}

/* Runs the experts on the host; returns where the results are: at `place`, or in `out` if that is
 * NULL. */
static inline float *run_experts(const struct shape *s, const struct world *w, struct device *d,
                                 const struct ep_batch *b, float *place, struct dev_mem *out)
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
    const size_t bytes = n * (size_t)s->c.hidden * sizeof *results;
    if (place) memcpy(place, results, bytes);
    else place = to_device(d, results, bytes, out);
    mem_free(results);
    mem_free(x);
    mem_free(x_rows);
    mem_free(begin);
    return place;
}

struct inputs {
    size_t n, stride; /* rows; floats from one to the next */
    float *x, *weights, *y;
    int32_t *experts;
    struct dev_mem d_x, d_experts, d_weights, d_y, d_out;
};

static inline void make_inputs(const struct shape *s, const struct world *w, struct device *d,
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

static inline void release_inputs(struct device *d, struct inputs *in)
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

static inline void check_counts(const struct shape *s, const struct world *w,
                                const struct ep_counts *c)
{
    const struct ep_placement *p = &s->c.placement;
    if (s->c.mode == EP_LOW_LATENCY) {
        CHECK(c->by_expert == NULL && c->n_own == 0);
        return;
    }
    size_t all = 0, own = 0;
    for (int32_t e = p->first[w->rank]; e < p->first[w->rank + 1]; e++) {
        int32_t n = 0, experts[USED_MAX];
        for (int r = 0; r < w->size; r++)
            for (size_t row = 0; row < rows_of(s, r); row++) {
                row_experts(s, r, row, experts);
                for (int j = 0; j < s->c.n_used; j++) {
                    const bool here = physical_of(s, r, row, experts[j]) == e;
                    n += here;
                    own += here && r == w->rank;
                }
            }
        CHECK_EQ_INT(c->by_expert[e - p->first[w->rank]], n);
        all += (size_t)n;
    }
    CHECK_EQ_INT(c->n_slots, all);
    CHECK_EQ_INT(c->n_own, own);
}

/* In half of the calls x is in its place, and rows travel while this rank does something else. */
static inline void dispatch(const struct shape *s, struct ep *e, const struct inputs *in,
                            struct ep_batch *b)
{
    float *place = ep_places(e).rows;
    const float *x = in->d_x.ptr;
    if (place && in->stride == (size_t)s->c.hidden) {
        memcpy(place, in->x, in->n * in->stride * sizeof *in->x);
        x = place;
    }
    if (s->call % 2 == 0) {
        CHECK_OK(ep_dispatch(e, x, in->stride, b, NULL));
        return;
    }
    CHECK_OK(ep_dispatch_begin(e, x, in->stride, NULL));
    usleep(s->call * 300);
    CHECK_OK(ep_dispatch_end(e, b, NULL));
}

/* In two of three calls in halves, between which this rank computes what results are added to. */
static inline void combine(const struct shape *s, struct device *d, struct ep *e,
                           const struct inputs *in, const struct ep_combine_args *a)
{
    const size_t bytes = in->n * (size_t)s->c.hidden * sizeof *in->y;
    if (s->call % 3 == 0) {
        CHECK_OK(ep_combine(e, a, NULL));
        return;
    }
    float *other = MEM_ARRAY(float, bytes / sizeof *in->y + 1);
    if (bytes) device_upload(d, a->y, other, bytes);
    struct ep_combine_args once = *a;
    CHECK_OK(ep_combine_begin(e, &once, NULL));
    memset(&once, 0, sizeof once);
    if (bytes) device_upload(d, a->y, in->y, bytes);
    CHECK_OK(ep_combine_end(e, NULL));
    mem_free(other);
}

/* Runs one call from plan to combine and checks its result bit for bit. In half of the calls
 * results are in their place. */
static inline void step(const struct shape *s, const struct world *w, struct device *d,
                        struct ep *e)
{
    const size_t hidden = (size_t)s->c.hidden;
    struct inputs in;
    struct ep_counts counts;
    struct ep_batch b;
    make_inputs(s, w, d, &in);
    CHECK_OK(ep_plan(e,
                     &(struct ep_rows){ .map = map_of(s), .experts = in.d_experts.ptr, .n = in.n },
                     &counts, NULL));
    check_counts(s, w, &counts);
    dispatch(s, e, &in, &b);
    CHECK_EQ_INT(b.n_slots, counts.n_slots);
    CHECK_OK(ep_wait(e, NULL));
    float *out = run_experts(s, w, d, &b, s->call < 2 ? ep_places(e).results : NULL, &in.d_out);
    const struct ep_combine_args a = {
        .out = out, .weights = in.d_weights.ptr, .y = in.d_y.ptr, .add = s->add
    };
    combine(s, d, e, &in, &a);
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
static inline void sum_of(const struct world *w, struct device *d, struct ep *e, uint64_t call,
                          size_t n, bool bf16)
{
    const size_t bytes = n * (bf16 ? 2 : 4);
    struct dev_mem m;
    float *x = MEM_ARRAY(float, n);
    uint16_t *h = MEM_ARRAY(uint16_t, n);
    for (size_t i = 0; i < n; i++) {
        x[i] = draw_float(6, (uint64_t)w->rank, i, call);
        h[i] = dtype_f32_to_bf16(x[i]);
    }
    to_device(d, bf16 ? (void *)h : (void *)x, bytes, &m);
    CHECK_OK(ep_all_reduce(e, m.ptr, n, bf16 ? DTYPE_BF16 : DTYPE_F32, NULL));
    CHECK_OK(ep_wait(e, NULL));
    void *got = from_device(d, m.ptr, bytes);
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int r = 0; r < w->size; r++) {
            float v = draw_float(6, (uint64_t)r, i, call);
            if (bf16) v = dtype_bf16_to_f32(dtype_f32_to_bf16(v));
            sum = r ? sum + v : v;
        }
        if (bf16) CHECK_EQ_INT(((uint16_t *)got)[i], dtype_f32_to_bf16(sum));
        else CHECK(memcmp(&((float *)got)[i], &sum, sizeof sum) == 0);
    }
    mem_free(x), mem_free(h), mem_free(got);
    device_mem_free(d, &m);
}

static inline void sums(const struct shape *s, const struct world *w, struct device *d,
                        struct ep *e)
{
    static const size_t sizes[] = { 1, 7, 64, 333 };
    for (size_t t = 0; t < COUNT_OF(sizes); t++)
        for (int bf16 = 0; bf16 < 2; bf16++) sum_of(w, d, e, (uint64_t)s->call + t, sizes[t], bf16);
}

static inline void gather_of(const struct world *w, struct device *d, struct ep *e, size_t n)
{
    unsigned char *mine = MEM_ARRAY(unsigned char, n);
    struct dev_mem from, to;
    for (size_t i = 0; i < n; i++) mine[i] = (unsigned char)draw(7, (uint64_t)w->rank, i, n);
    to_device(d, mine, n, &from);
    to_device(d, NULL, n * (size_t)w->size, &to);
    CHECK_OK(ep_all_gather(e, to.ptr, from.ptr, n, NULL));
    CHECK_OK(ep_wait(e, NULL));
    unsigned char *got = from_device(d, to.ptr, n * (size_t)w->size);
    for (size_t i = 0; i < n * (size_t)w->size; i++)
        CHECK_EQ_INT(got[i], (unsigned char)draw(7, i / n, i % n, n));
    mem_free(mine), mem_free(got);
    device_mem_free(d, &from);
    device_mem_free(d, &to);
}

static inline void gathers(const struct world *w, struct device *d, struct ep *e)
{
    static const size_t sizes[] = { 1, 16, 1029 };
    for (size_t t = 0; t < COUNT_OF(sizes); t++) gather_of(w, d, e, sizes[t]);
}

/* y [n_rows, columns] of all ranks, of which rank r has first[r] to first[r + 1]. In every second
 * call `mine` lies in y. */
static inline void gather_columns_of(const struct world *w, struct device *d, struct ep *e,
                                     int call, size_t n_rows, const size_t *first)
{
    enum { SPARE = 3 };
    const size_t n = first[w->size], stride = n + SPARE, own = first[w->rank + 1] - first[w->rank];
    const bool inside = call % 2 == 1;
    float *y = MEM_ARRAY(float, n_rows *stride), *mine = MEM_ARRAY(float, n_rows *(own + 2));
    struct dev_mem d_y, d_mine;
    for (size_t i = 0; i < n_rows; i++)
        for (size_t k = 0; k < own; k++) {
            const float v = draw_float(10, i, first[w->rank] + k, (uint64_t)call);
            mine[i * (own + 2) + k] = v;
            if (inside) y[i * stride + first[w->rank] + k] = v;
        }
    to_device(d, y, n_rows * stride * sizeof *y, &d_y);
    to_device(d, mine, n_rows * (own + 2) * sizeof *y, &d_mine);
    const float *from = inside ? (float *)d_y.ptr + first[w->rank] : d_mine.ptr;
    CHECK_OK(ep_gather_columns(e, d_y.ptr, stride, from, inside ? stride : own + 2, n_rows, first,
                               NULL));
    CHECK_OK(ep_wait(e, NULL));
    float *got = from_device(d, d_y.ptr, n_rows * stride * sizeof *y);
    for (size_t i = 0; i < n_rows * stride; i++) {
        const float want = i % stride < n ? draw_float(10, i / stride, i % stride, (uint64_t)call)
                                          : 0;
        CHECK(memcmp(&got[i], &want, sizeof want) == 0);
    }
    mem_free(got), mem_free(y), mem_free(mine);
    device_mem_free(d, &d_y);
    device_mem_free(d, &d_mine);
}

/* Rank r has 7 r + 1 columns, every third none. */
static inline void gather_columns(const struct world *w, struct device *d, struct ep *e, int call)
{
    size_t first[RANKS + 1] = { 0 };
    for (int r = 0; r < w->size; r++)
        first[r + 1] = first[r] + (r % 3 == 1 ? 0 : 7 * (size_t)(r % 8) + 1);
    gather_columns_of(w, d, e, call, 5, first);
}

/* ---- placements ---- */

enum placed {
    ONCE,      /* physical e is e */
    REDUNDANT, /* one map; the first three experts have a second copy */
    BY_LAYER   /* MAPS maps, with redundant copies of other experts in each */
};
enum { EXPERTS = 12, COPIES = 3, PLACES = EXPERTS + COPIES, MAPS = 3 };
static int32_t first_of[RANKS + 1], logical_of_places[MAPS][PLACES];

static inline void make_maps(void)
{
    static const int32_t copied[MAPS][COPIES] = { { 0, 1, 2 }, { 5, 5, 5 }, { 11, 4, 11 } };
    for (int32_t x = 0; x < EXPERTS; x++) { /* not in order */
        logical_of_places[0][x] = EXPERTS - 1 - x;
        logical_of_places[1][x] = (7 * x + 3) % EXPERTS;
        logical_of_places[2][x] = 5 * x % EXPERTS;
    }
    for (int m = 0; m < MAPS; m++)
        memcpy(&logical_of_places[m][EXPERTS], copied[m], sizeof copied[m]);
}

/* Uneven: rank 1 has no experts, the last has what is left. */
static inline struct ep_placement placement(int size, enum placed placed)
{
    const int32_t n = placed == ONCE ? EXPERTS : PLACES;
    for (int r = 0; r <= size; r++) first_of[r] = r == size ? n : r * n / size;
    if (size == 2) first_of[1] = 7;
    if (size > 2) first_of[2] = first_of[1];
    make_maps();
    return (struct ep_placement){
        .n_logical = EXPERTS,
        .n_physical = n,
        .first = first_of,
        .n_maps = placed == BY_LAYER ? MAPS : placed == REDUNDANT,
        .logical = placed == ONCE ? NULL : logical_of_places[0],
    };
}

static inline struct shape shape_of(const char *backend, enum ep_mode mode, int size)
{
    return (struct shape){ .c = { .backend = backend,
                                  .mode = mode,
                                  .max_rows = 6,
                                  .hidden = 200,
                                  .n_used = 3,
                                  .placement = placement(size, ONCE),
                                  .send = DTYPE_F32,
                                  .back = DTYPE_F32,
                                  .collective_bytes = 2048,
                                  .timeout_ms = LINK_MS, }, };
}

#endif
