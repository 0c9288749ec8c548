/* bench_ep.c - time of dispatch, combine and collectives, next to a copy of as many bytes.
 *
 *     bench_ep [backend] [ranks] [rows] [hidden] [experts] [used] [bf16|f8_e4m3|f32]
 *     defaults: peer 2 128 7168 256 8 bf16; without GPUs shm 2 128 2048 64 8 f32
 *
 * `ucx` (bench_ep_ucx.h): a layer next to ucx_perftest's ucp_am_bw. `shm` (bench_ep_shm.h): a layer next to memcpy of the rows and results that other backends copy,
 * and a meeting of 2, 8 and 64 ranks next to a bare futex barrier. The rest is about GPUs. One
 * layer (plan, dispatch, combine; experts compute nothing) is captured in a CUDA graph and run
 * many times; backend nccl is called without a graph. Figures are rank 0's: time of a layer, bytes
 * that leave a rank for the others and for itself, and the rate. The limit is cudaMemcpyAsync of
 * the same bytes inside the GPU, which reads and writes the same memory. The least of REPEATS runs
 * counts. Ranks that share a GPU run in time slices, so their times include each other's. On the
 * emulated GPU times mean nothing. LIMIT: between GPUs the link is the limit, which no copy here
 * measures. */
#ifdef BATON_HAVE_UCX
#include "tests/perf/bench_ep_ucx.h"
#else
#include "tests/perf/bench_ep_shm.h"
#endif

static int32_t the_first[RANKS + 1];

#ifdef BATON_HAVE_CUDA_KERNELS
#include "kernels/cuda/device_cuda.h"

#ifdef BATON_EMULATED_GPU
enum { LAYERS = 2 };
#else
enum { LAYERS = 200 };
#endif

struct layer {
    struct ep *e;
    struct world *w;
    struct device *d;
    cudaStream_t stream;
    size_t n_rows;
    const int32_t *experts;
    const float *x;
    struct ep_combine_args combine;
};

static void run_layer(void *arg)
{
    const struct layer *l = arg;
    struct ep_batch b;
    CHECK_OK(ep_plan(l->e, &(struct ep_rows){ .experts = l->experts, .n = l->n_rows }, NULL, NULL));
    CHECK_OK(ep_dispatch(l->e, l->x, (size_t)the_config.hidden, &b, NULL));
    CHECK_OK(ep_combine(l->e, &l->combine, NULL));
}

struct job {
    void (*run)(void *arg);
    void *arg;
    struct layer *layer;
};

/* Microseconds of one run, the least of REPEATS times the mean of LAYERS. */
static double measure(const struct job *j)
{
    const bool captured = strcmp(the_config.backend, "nccl") != 0 &&
                          the_config.mode == EP_LOW_LATENCY;
    cudaGraph_t graph;
    cudaGraphExec_t exec = NULL;
    double best = INFINITY;
    if (captured) {
        CHECK_OK(cudaStreamBeginCapture(j->layer->stream, cudaStreamCaptureModeRelaxed));
        j->run(j->arg);
        CHECK_OK(cudaStreamEndCapture(j->layer->stream, &graph));
        CHECK_OK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK_OK(cudaGraphDestroy(graph));
    }
    for (int r = 0; r <= REPEATS; r++) { /* the first warms up */
        const double begin = now_us();
        for (int i = 0; i < LAYERS; i++) {
            if (captured) CHECK_OK(cudaGraphLaunch(exec, j->layer->stream));
            else j->run(j->arg);
        }
        CHECK_OK(ep_wait(j->layer->e, NULL));
        const double us = (now_us() - begin) / LAYERS;
        if (r > 0 && us < best) best = us;
    }
    if (exec) CHECK_OK(cudaGraphExecDestroy(exec));
    return best;
}

struct copy {
    char *to;
    const char *from;
    size_t bytes;
    cudaStream_t stream;
};

static void run_copy(void *arg)
{
    const struct copy *c = arg;
    CHECK_OK(cudaMemcpyAsync(c->to, c->from, c->bytes, cudaMemcpyDeviceToDevice, c->stream));
}

static void report(const struct layer *l, const char *what, double us, size_t bytes)
{
    struct dev_mem from, to;
    const struct copy copy = { to_device(l->d, NULL, bytes, &to),
                               to_device(l->d, NULL, bytes, &from), bytes, l->stream };
    const double limit_us = measure(&(struct job){ run_copy, (void *)&copy, (struct layer *)l });
    const double gbs = (double)bytes / us * 1e-3, limit = (double)bytes / limit_us * 1e-3;
    if (l->w->rank == 0)
        printf("%-22s %9.1f us  %9.3f MB a rank  %8.1f GB/s   a copy of as much %9.1f us  %8.1f "
               "GB/s   ratio %.2f\n",
               what, us, (double)bytes * 1e-6, gbs, limit_us, limit, gbs / limit);
    fflush(stdout);
    device_mem_free(l->d, &from);
    device_mem_free(l->d, &to);
}

struct sum {
    struct ep *e;
    float *x;
    size_t n;
};

static void run_sum(void *arg)
{
    const struct sum *s = arg;
    CHECK_OK(ep_all_reduce(s->e, s->x, s->n, DTYPE_BF16, NULL));
}

static void sums(struct layer *l)
{
    static const size_t sizes[] = { 8 << 10, 128 << 10, 1 << 20 };
    struct dev_mem m;
    to_device(l->d, NULL, 1 << 20, &m);
    for (size_t i = 0; i < COUNT_OF(sizes) && sizes[i] <= the_config.collective_bytes; i++) {
        char what[40];
        struct sum s = { l->e, m.ptr, sizes[i] / 2 };
        snprintf(what, sizeof what, "all_reduce %zu KiB", sizes[i] >> 10);
        report(l, what, measure(&(struct job){ run_sum, &s, l }), sizes[i] * (size_t)l->w->size);
    }
    device_mem_free(l->d, &m);
}

static void rank_of_bench(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct ep_config c = the_config;
    struct ep *e = NULL;
    struct err err = { 0 };
    c.device = d;
    c.rank = w->rank;
    c.size = w->size;
    c.exchange = world_exchange;
    c.exchange_arg = w;
    if (ep_create(&c, &e, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    const struct shape s = { .c = c };
    const size_t n = (size_t)c.max_rows, used = (size_t)c.n_used, hidden = (size_t)c.hidden;
    struct dev_mem experts, x, weights, y, out;
    int32_t *chosen = MEM_ARRAY(int32_t, n * used);
    for (size_t i = 0; i < n; i++) row_experts(&s, w->rank, i, chosen + i * used);
    struct layer l = {
        .e = e,
        .w = w,
        .d = d,
        .stream = cuda_device_of(d)->stream,
        .n_rows = n,
        .experts = to_device(d, chosen, n * used * sizeof *chosen, &experts),
        .x = to_device(d, NULL, n * hidden * sizeof(float), &x),
    };
    l.combine = (struct ep_combine_args){
        .out = to_device(d, NULL, ep_max_slots(&c) * hidden * sizeof(float), &out),
        .weights = to_device(d, NULL, n * used * sizeof(float), &weights),
        .y = to_device(d, NULL, n * hidden * sizeof(float), &y)
    };
    const struct ep_row_layout f = ep_row_layout_of(&c);
    if (w->rank == 0)
        printf("%s, %d ranks on %d GPUs, %zu rows of %zu, %zu of %d experts, rows as %s, results "
               "as %s\n",
               c.backend, w->size, n_gpus() < w->size ? 1 : w->size, n, hidden, used,
               c.placement.n_logical, dtype_name(c.send), dtype_name(c.back));
    report(&l, "dispatch and combine", measure(&(struct job){ run_layer, &l, &l }),
           n * used * (f.row_bytes + f.back_bytes));
    if (w->size > 1) sums(&l);
    ep_free(e);
    struct dev_mem *all[] = { &experts, &x, &weights, &y, &out };
    for (size_t i = 0; i < COUNT_OF(all); i++) device_mem_free(d, all[i]);
    mem_free(chosen);
    device_close(d);
}

static void bench_gpus(int size) { run_ranks(size, rank_of_bench, 0, "there is no GPU"); }
#else
static void bench_gpus(int size)
{
    (void)size;
    printf("built without kernels for GPUs: only shm can be measured\n");
}
#endif

static int32_t number(int argc, char **argv, int i, int32_t otherwise)
{
    const long v = argc > i ? strtol(argv[i], NULL, 10) : otherwise;
    return v > 0 && v < 1 << 20 ? (int32_t)v : otherwise;
}

int main(int argc, char **argv)
{
#ifdef BATON_HAVE_CUDA_KERNELS
    const char *backend = argc > 1 ? argv[1] : "peer";
#else
    const char *backend = argc > 1 ? argv[1] : "shm";
#endif
    const bool is_ucx = strcmp(backend, "ucx") == 0,
               on_host = is_ucx || strcmp(backend, "shm") == 0;
    const int32_t size = number(argc, argv, 2, 2),
                  n_experts = number(argc, argv, 5, on_host ? 64 : 256);
    const char *send = argc > 7 ? argv[7] : on_host ? "f32" : "bf16";
    CHECK(size <= RANKS);
    for (int r = 0; r <= size; r++) the_first[r] = r * n_experts / size;
    the_config = (struct ep_config){
        .backend = backend,
        .mode = EP_LOW_LATENCY,
        .max_rows = number(argc, argv, 3, 128),
        .hidden = number(argc, argv, 4, on_host ? 2048 : 7168),
        .n_used = number(argc, argv, 6, 8),
        .send = DTYPE_BF16,
        .back = DTYPE_BF16,
        .placement = { .n_logical = n_experts, .n_physical = n_experts, .first = the_first },
        .collective_bytes = 1 << 20,
        .timeout_ms = LINK_MS
    };
    if (strcmp(send, "f8_e4m3") == 0) the_config.send = DTYPE_F8_E4M3;
    if (strcmp(send, "f32") == 0) the_config.send = the_config.back = DTYPE_F32;
#ifdef BATON_HAVE_UCX
    if (is_ucx) {
        bench_ucx(size);
        return 0;
    }
#endif
    if (on_host) bench_shm(size);
    else bench_gpus(size);
    return 0;
}
