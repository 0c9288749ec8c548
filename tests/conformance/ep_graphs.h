/* ep_graphs.h - a rank's calls as a CUDA graph, which is replayed with other choices, weights and
 * numbers of rows. Thread: one per rank. */
#ifndef BATON_TESTS_CONFORMANCE_EP_GRAPHS_H
#define BATON_TESTS_CONFORMANCE_EP_GRAPHS_H

#include "kernels/cuda/device_cuda.h"
#include "kernels/ep/ep_backend.h"
#include "tests/conformance/ep_steps.h"

enum { REPLAYS = 4 };

/* Every result is the number of the rank that has the expert, so the graph contains no experts. */
static void check_owners(const struct shape *s, const struct world *w, const struct inputs *in,
                         size_t n, const float *y)
{
    const struct ep_placement *p = &s->c.placement;
    for (size_t i = 0; i < n; i++) {
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
                    struct ep_rows rows, cudaGraphExec_t *exec)
{
    const struct ep_combine_args a = {
        .out = in->d_out.ptr, .weights = in->d_weights.ptr, .y = in->d_y.ptr, .add = s->add
    };
    struct ep_batch b;
    cudaGraph_t graph;
    rows.experts = in->d_experts.ptr;
    rows.n = in->n;
    CHECK_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CHECK_OK(ep_plan(e, &rows, NULL, NULL));
    CHECK_OK(ep_dispatch(e, in->d_x.ptr, in->stride, &b, NULL));
    CHECK_OK(ep_combine(e, &a, NULL));
    CHECK_OK(ep_all_reduce(e, in->d_weights.ptr, 1, DTYPE_F32, NULL));
    CHECK_OK(cudaStreamEndCapture(stream, &graph));
    CHECK_OK(cudaGraphInstantiate(exec, graph, 0));
    CHECK_OK(cudaGraphDestroy(graph));
}

static void make_graph_inputs(const struct shape *s, const struct world *w, struct device *d,
                              const struct ep *e, struct inputs *in)
{
    const size_t n_out = ep_max_slots(&e->config) * (size_t)s->c.hidden;
    float *out = MEM_ARRAY(float, n_out);
    make_inputs(s, w, d, in);
    for (size_t i = 0; i < n_out; i++) out[i] = (float)(w->rank + 1);
    to_device(d, out, n_out * sizeof *out, &in->d_out);
    mem_free(out);
    if (in->n > 0) return;
    device_mem_free(d, &in->d_weights); /* the first one is summed up over ranks */
    to_device(d, NULL, sizeof(float), &in->d_weights);
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
    make_graph_inputs(&s, w, d, e, &in);
    const size_t used = in.n * 3, n_weights = used ? used : 1;
    float own[6 * 3 + 1] = { 0 };
    capture(&s, e, &in, stream, (struct ep_rows){ 0 }, &exec);
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
        check_owners(&s, w, &in, in.n, y);
        mem_free(y);
    }
    CHECK_OK(cudaGraphExecDestroy(exec));
    ep_free(e);
    release_inputs(d, &in);
    device_close(d);
}

/* ---- padding rows ---- */

static const float UNTOUCHED = -7;

/* How many rows of a rank are real at a replay: at first none, then all, then some. */
static size_t real_of(const struct shape *s, int rank, int t)
{
    const size_t n = rows_of(s, rank);
    return t == 0 ? 0 : t == 1 ? n : draw(11, (uint64_t)rank, (uint64_t)t, 0) % (n + 1);
}

static int32_t real_expert(int rank, size_t i, int t)
{
    return (int32_t)((draw(8, (uint64_t)rank, i / 3, (uint64_t)t) + i % 3) % EXPERTS);
}

/* What the counts are after all replays: chosen [EXPERTS], load [EXPERTS + 1]. */
static void count_real(const struct shape *s, const struct world *w, uint64_t *chosen,
                       uint64_t *load)
{
    const struct ep_placement *p = &s->c.placement;
    for (int t = 0; t < REPLAYS; t++)
        for (int r = 0; r < w->size; r++)
            for (size_t i = 0; i < real_of(s, r, t) * 3; i++) {
                const int32_t e = real_expert(r, i, t);
                const bool is_here = e >= p->first[w->rank] && e < p->first[w->rank + 1];
                chosen[e] += r == w->rank;
                load[e] += is_here;
                load[EXPERTS] += is_here && r == w->rank;
            }
}

static void check_counts_are(struct device *d, const struct dev_mem *m, const uint64_t *want,
                             size_t n)
{
    uint64_t *got = from_device(d, m->ptr, n * sizeof *got);
    for (size_t i = 0; i < n; i++) CHECK_EQ_INT(got[i], want[i]);
    mem_free(got);
}

/* Padding rows have chosen experts that there are not. */
static void replay_real(const struct shape *s, const struct world *w, struct device *d,
                        struct inputs *in, const struct dev_mem *n_real, int t)
{
    const size_t n = in->n, real = real_of(s, w->rank, t), hidden = (size_t)s->c.hidden;
    const int32_t word = (int32_t)real;
    for (size_t i = 0; i < n * 3; i++) {
        in->experts[i] = i < real * 3 ? real_expert(w->rank, i, t) : 1000;
        in->weights[i] = draw_float(9, (uint64_t)w->rank, i, (uint64_t)t);
    }
    for (size_t i = 0; i < n * hidden; i++) in->y[i] = UNTOUCHED;
    device_upload(d, in->d_experts.ptr, in->experts, n * 3 * sizeof(int32_t));
    device_upload(d, in->d_weights.ptr, in->weights, n * 3 * sizeof(float));
    device_upload(d, in->d_y.ptr, in->y, n * hidden * sizeof(float));
    device_upload(d, n_real->ptr, &word, sizeof word);
}

static void rank_of_real_rows(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = shape_of("peer", EP_LOW_LATENCY, w->size);
    uint64_t chosen[EXPERTS] = { 0 }, load[EXPERTS + 1] = { 0 };
    struct dev_mem n_real, d_chosen, d_load;
    struct inputs in;
    cudaGraphExec_t exec;
    cudaStream_t stream = cuda_device_of(d)->stream;
    s.c.load = to_device(d, load, sizeof load, &d_load);
    struct ep *e = open_ep(&s, w, d);
    make_graph_inputs(&s, w, d, e, &in);
    const struct ep_rows rows = { .n_real = to_device(d, NULL, sizeof(int32_t), &n_real),
                                  .chosen = to_device(d, chosen, sizeof chosen, &d_chosen) };
    capture(&s, e, &in, stream, rows, &exec);
    for (int t = 0; t < REPLAYS; t++) {
        replay_real(&s, w, d, &in, &n_real, t);
        CHECK_OK(cudaGraphLaunch(exec, stream));
        CHECK_OK(ep_wait(e, NULL));
        CHECK_OK(ep_found(e, NULL));
        float *y = from_device(d, in.d_y.ptr, in.n * (size_t)s.c.hidden * sizeof *y);
        const size_t real = real_of(&s, w->rank, t);
        check_owners(&s, w, &in, real, y);
        for (size_t i = real * (size_t)s.c.hidden; i < in.n * (size_t)s.c.hidden; i++)
            CHECK(memcmp(&y[i], &UNTOUCHED, sizeof *y) == 0);
        mem_free(y);
    }
    count_real(&s, w, chosen, load);
    check_counts_are(d, &d_chosen, chosen, EXPERTS);
    check_counts_are(d, &d_load, load, EXPERTS + 1);
    CHECK_OK(cudaGraphExecDestroy(exec));
    ep_free(e);
    release_inputs(d, &in);
    struct dev_mem *all[] = { &n_real, &d_chosen, &d_load };
    for (size_t i = 0; i < COUNT_OF(all); i++) device_mem_free(d, all[i]);
    device_close(d);
}

#endif
