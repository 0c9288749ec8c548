/* bench_ep_ucx.h - the part of bench_ep about backend `ucx`: a layer (plan, dispatch, combine;
 * experts compute nothing) next to ucx_perftest's ucp_am_bw with messages as long as the backend's,
 * over the same transport and in turn with it. Of ucp_am_bw with and without rendezvous the faster
 * counts.
 *
 * The rate of a layer is the bytes that all ranks sent to each other, by the time. ucp_am_bw sends
 * one way, with a CPU for each side; two ranks send both ways at once with as many CPUs. Best of
 * REPEATS each. Thread: one per rank. */
#ifndef BATON_TESTS_PERF_BENCH_EP_UCX_H
#define BATON_TESTS_PERF_BENCH_EP_UCX_H

#include "shared/fabric/ucx.h"
#include "tests/perf/bench_ep_shm.h"

enum { UCX_LAYERS = 30, UCX_MEETINGS = 200, UCX_PORT = 13391 };

/* MB/s of ucp_am_bw with messages of n bytes and further variables of UCX; 0: there is no
 * ucx_perftest. */
static inline double am_bandwidth(size_t n, const char *variables)
{
    char command[512], line[512];
    double rate = 0, last = 0;
    snprintf(command, sizeof command,
             "which ucx_perftest >/dev/null || exit 0; export %s; (timeout 60 ucx_perftest -p %d "
             ">/dev/null 2>&1 &) ; sleep 0.5; timeout 60 ucx_perftest -p %d -t ucp_am_bw -s %zu -n "
             "%zu -f 127.0.0.1 2>/dev/null",
             variables, UCX_PORT, UCX_PORT, n, ((size_t)2 << 30) / n);
    FILE *f = popen(command, "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f))
        if (sscanf(line, " %*d %*f %*f %*f %lf", &last) == 1) rate = last;
    pclose(f);
    return rate;
}

/* Bytes that a rank sends to others in one layer. */
static inline size_t layer_bytes(const int32_t *experts, size_t n, int rank)
{
    const size_t used = (size_t)the_config.n_used,
                 row = ep_row_layout_of(&the_config).scales_at
                           ? (size_t)the_config.hidden
                           : (size_t)the_config.hidden * dtype_block_bytes(the_config.send),
                 back = (size_t)the_config.hidden * dtype_block_bytes(the_config.back);
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        bool goes[RANKS] = { false };
        for (size_t j = 0; j < used; j++) {
            size_t to = 0;
            while (experts[i * used + j] >= the_config.placement.first[to + 1]) to++;
            if ((int)to == rank) continue;
            bytes += back + (goes[to] ? 0 : row); /* the result comes back from there */
            goes[to] = true;
        }
    }
    return bytes;
}

static inline void ucx_rank_of_layers(struct world *w)
{
    struct device *d;
    struct ep *e = open_shm(w, &d, the_config);
    const struct shape s = { .c = the_config };
    const size_t n = (size_t)the_config.max_rows, used = (size_t)the_config.n_used,
                 hidden = (size_t)the_config.hidden;
    const struct ep_places p = ep_places(e);
    int32_t *experts = MEM_ARRAY(int32_t, n * used);
    float *x = p.rows ? p.rows : MEM_ARRAY(float, n *hidden), *y = MEM_ARRAY(float, n *hidden),
          *weights = MEM_ARRAY(float, n *used),
          *out = MEM_ARRAY(float, ep_max_slots(&e->config) * hidden);
    for (size_t i = 0; i < n; i++) row_experts(&s, w->rank, i, experts + i * used);
    for (size_t i = 0; i < n * hidden; i++) x[i] = 1;
    for (size_t i = 0; i < ep_max_slots(&e->config) * hidden; i++) out[i] = 1;
    const struct shm_job j = { .e = e,
                               .size = w->size,
                               .rank = w->rank,
                               .n_rows = n,
                               .experts = experts,
                               .x = x,
                               .combine = { .out = out, .weights = weights, .y = y } };
    uint64_t mine = layer_bytes(experts, n, w->rank), all[RANKS], bytes = 0;
    CHECK_OK(ep_all_gather(e, all, &mine, sizeof mine, NULL));
    for (int r = 0; r < w->size; r++) bytes += all[r];
    double us = INFINITY;
    for (int r = 0; r <= REPEATS; r++) { /* the first warms up */
        const double a = shm_time(&j, shm_layer, UCX_LAYERS);
        if (r > 0) us = fmin(us, a);
    }
    if (w->rank == 0) the_barrier->rate = (double)bytes / us;
    if (w->rank == 0) the_barrier->us = us;
    ep_free(e);
    if (!p.rows) mem_free(x);
    mem_free(experts);
    mem_free(y);
    mem_free(weights);
    mem_free(out);
    device_close(d);
}

static inline void ucx_rank_of_meetings(struct world *w)
{
    struct device *d;
    struct ep *e = open_shm(w, &d,
                            (struct ep_config){ .backend = "ucx",
                                                .mode = EP_LOW_LATENCY,
                                                .collective_bytes = 64,
                                                .timeout_ms = LINK_MS });
    const struct shm_job j = { .e = e, .size = w->size, .rank = w->rank };
    const double us = shm_time(&j, shm_meeting, UCX_MEETINGS);
    if (w->rank == 0) printf("meeting of %d ranks %*s %9.1f us\n", w->size, 13, "", us);
    fflush(stdout);
    ep_free(e);
    device_close(d);
}

static inline void bench_ucx(int size)
{
    static const int sizes[] = { 2, 4, 8 };
    double rate = 0, limit = 0;
    setenv("UCX_TLS", "tcp", 0);
    the_barrier = mmap(NULL, sizeof *the_barrier, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(the_barrier != MAP_FAILED);
    printf(
        "ucx, %d ranks, %d rows of %d, %d of %d experts, rows as %s, results as %s, UCX_TLS=%s\n",
        size, the_config.max_rows, the_config.hidden, the_config.n_used,
        the_config.placement.n_logical, dtype_name(the_config.send), dtype_name(the_config.back),
        getenv("UCX_TLS"));
    fflush(stdout);
    for (int i = 0; i < 3; i++) {
        limit = fmax(limit, am_bandwidth(FABRIC_PIECE_MAX, "UCX_RNDV_THRESH=auto"));
        limit = fmax(limit, am_bandwidth(FABRIC_PIECE_MAX, "UCX_RNDV_THRESH=inf"));
        run_ranks(size, ucx_rank_of_layers, 0, "this build has no UCX");
        rate = fmax(rate, the_barrier->rate);
    }
    printf(
        "dispatch and combine %12.1f us %9.0f MB/s   ucp_am_bw of %d KiB %9.0f MB/s   ratio %.2f "
        "(goal: at least 0.8)\n",
        the_barrier->us, rate, FABRIC_PIECE_MAX >> 10, limit, limit > 0 ? rate / limit : 0);
    fflush(stdout);
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        run_ranks(sizes[i], ucx_rank_of_meetings, 0, "this build has no UCX");
}

#endif
