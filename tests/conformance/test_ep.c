/* test_ep.c - every backend of ep.h, with one process per rank, against the definition, bit for
 * bit. */
#include <errno.h>
#include <signal.h>

#include "kernels/ep/ep_backend.h"
#include "tests/conformance/ep_steps.h"

static struct shape the_shape;
static const char *the_device;

/* Several calls with the same object, with all-reduces between them. */
/* What one rank has sent another has received, and all have waited for those that were late. */
static void check_traffic(const struct world *w, struct ep *e)
{
    const struct ep_traffic mine = e->traffic;
    struct ep_traffic all[RANKS];
    uint64_t sent = 0, received = 0;
    CHECK_OK(ep_all_gather(e, all, &mine, sizeof mine, NULL));
    for (int r = 0; r < w->size; r++) {
        sent += all[r].sent;
        received += all[r].received;
        CHECK((all[r].waited_ns > 1000000) == (w->size > 1));
    }
    CHECK(sent == received && (sent > 0) == (w->size > 1));
}

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
        gather_columns(w, d, e, s.call);
    }
    gathers(w, d, e);
    if (d->is_host) check_traffic(w, e);
    ep_free(e);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}

static const char WHY[] =
    "no GPU, or no library, for this backend of expert parallelism: nothing of it was run";

enum as { PROCESSES, THREADS };

static void calls_as(const char *backend, const char *device, enum ep_mode mode, int size,
                     enum as as)
{
    static const struct {
        enum dtype send, back;
        enum placed placed;
        int32_t hidden, n_used;
    } VARIANTS[] = {
        { DTYPE_F32, DTYPE_F32, ONCE, 200, 3 },
        { DTYPE_BF16, DTYPE_BF16, REDUNDANT, 64, 1 },
        { DTYPE_F8_E4M3, DTYPE_F32, BY_LAYER, 333, 4 },
        { DTYPE_F32, DTYPE_BF16, BY_LAYER, 128, 2 }, /* rows that may be read in place */
    };
    the_device = device;
    for (size_t i = 0; i < COUNT_OF(VARIANTS); i++) {
        the_shape = shape_of(backend, mode, size);
        the_shape.c.send = VARIANTS[i].send;
        the_shape.c.back = VARIANTS[i].back;
        the_shape.c.hidden = VARIANTS[i].hidden;
        the_shape.c.n_used = VARIANTS[i].n_used;
        the_shape.c.placement = placement(size, VARIANTS[i].placed);
        if (as == THREADS) run_ranks_as_threads(size, rank_of_calls);
        else run_ranks(size, rank_of_calls, 0, WHY);
    }
}

static void calls(const char *backend, const char *device, enum ep_mode mode, int size)
{
    calls_as(backend, device, mode, size, PROCESSES);
}

TEST(self_on_the_host) { calls("self", "cpu", EP_THROUGHPUT, 1); }
TEST(self_on_the_host_low_latency) { calls("self", "cpu", EP_LOW_LATENCY, 1); }
TEST(self_on_a_gpu) { calls("self", "cuda", EP_THROUGHPUT, 1); }
TEST(self_on_a_gpu_low_latency) { calls("self", "cuda", EP_LOW_LATENCY, 1); }
/* As many processes take long under a sanitizer, which sees their code in threads. */
static void calls_in_processes(const char *backend, enum ep_mode mode, int size)
{
    if (size > 3 && !test_runs_long())
        SKIP("takes long under a sanitizer; tests/run.sh --all runs it");
    calls(backend, "cpu", mode, size);
}
#define SHM_TEST(name, mode, size)                                                                 \
    TEST(name) { calls_in_processes("shm", mode, size); }                                          \
    TEST(name##_threads) { calls_as("shm", "cpu", mode, size, THREADS); }
SHM_TEST(shm_throughput_1, EP_THROUGHPUT, 1)
SHM_TEST(shm_throughput_2, EP_THROUGHPUT, 2)
SHM_TEST(shm_throughput_3, EP_THROUGHPUT, 3)
SHM_TEST(shm_throughput_4, EP_THROUGHPUT, 4)
SHM_TEST(shm_throughput_8, EP_THROUGHPUT, 8)
SHM_TEST(shm_low_latency_1, EP_LOW_LATENCY, 1)
SHM_TEST(shm_low_latency_2, EP_LOW_LATENCY, 2)
SHM_TEST(shm_low_latency_3, EP_LOW_LATENCY, 3)
SHM_TEST(shm_low_latency_4, EP_LOW_LATENCY, 4)
SHM_TEST(shm_low_latency_8, EP_LOW_LATENCY, 8)
/* On as many hosts, or two, or one, where all are near each other. */
static void calls_of_hosts(int hosts, enum ep_mode mode, int size, enum as as)
{
    the_hosts = hosts;
    if (as == PROCESSES) calls_in_processes("ucx", mode, size);
    else calls_as("ucx", "cpu", mode, size, as);
}
#define UCX_TEST(name, hosts, mode, size)                                                          \
    TEST(name) { calls_of_hosts(hosts, mode, size, PROCESSES); }                                   \
    TEST(name##_threads) { calls_of_hosts(hosts, mode, size, THREADS); }
UCX_TEST(ucx_throughput_1, 0, EP_THROUGHPUT, 1)
UCX_TEST(ucx_throughput_2, 0, EP_THROUGHPUT, 2)
UCX_TEST(ucx_throughput_3, 0, EP_THROUGHPUT, 3)
UCX_TEST(ucx_throughput_4, 0, EP_THROUGHPUT, 4)
UCX_TEST(ucx_throughput_8, 0, EP_THROUGHPUT, 8)
UCX_TEST(ucx_low_latency_1, 0, EP_LOW_LATENCY, 1)
UCX_TEST(ucx_low_latency_2, 0, EP_LOW_LATENCY, 2)
UCX_TEST(ucx_low_latency_3, 0, EP_LOW_LATENCY, 3)
UCX_TEST(ucx_low_latency_4, 0, EP_LOW_LATENCY, 4)
UCX_TEST(ucx_low_latency_8, 0, EP_LOW_LATENCY, 8)
UCX_TEST(ucx_throughput_3_on_2_hosts, 2, EP_THROUGHPUT, 3)
UCX_TEST(ucx_throughput_8_on_2_hosts, 2, EP_THROUGHPUT, 8)
UCX_TEST(ucx_throughput_2_on_1_host, 1, EP_THROUGHPUT, 2)
UCX_TEST(ucx_low_latency_3_on_2_hosts, 2, EP_LOW_LATENCY, 3)
UCX_TEST(ucx_low_latency_8_on_2_hosts, 2, EP_LOW_LATENCY, 8)
UCX_TEST(ucx_low_latency_2_on_1_host, 1, EP_LOW_LATENCY, 2)
TEST(peer_1) { calls("peer", "cuda", EP_LOW_LATENCY, 1); }
TEST(peer_2) { calls("peer", "cuda", EP_LOW_LATENCY, 2); }
TEST(peer_3) { calls("peer", "cuda", EP_LOW_LATENCY, 3); }
TEST(peer_8) { calls("peer", "cuda", EP_LOW_LATENCY, 8); }
TEST(peer_4) { calls("peer", "cuda", EP_LOW_LATENCY, 4); }

/* So many rows that one block does not sort them, and that one waits for all who add up. */
static void rank_of_many_rows(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = shape_of("peer", EP_LOW_LATENCY, w->size);
    s.c.max_rows = 300;
    s.c.hidden = 64;
    s.c.n_used = 4;
    struct ep *e = open_ep(&s, w, d);
    for (s.call = 0; s.call < 2; s.call++) step(&s, w, d, e);
    ep_free(e);
    device_close(d);
}
TEST(peer_many_rows) { run_ranks(2, rank_of_many_rows, 0, WHY); }

/* More bytes than one block shares and takes, and so many columns that a block waits before those
 * that take them; between them a few, of one block, with the same memory. */
static void rank_of_many_bytes(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = { .c = { .backend = "peer",
                              .mode = EP_LOW_LATENCY,
                              .collective_bytes = 65 * 4100 * sizeof(float),
                              .timeout_ms = LINK_MS, }, };
    struct ep *e = open_ep(&s, w, d);
    for (int call = 0; call < 3; call++) {
        sum_of(w, d, e, (uint64_t)call, 9000, call % 2);
        sum_of(w, d, e, (uint64_t)call, 5, false);
        gather_of(w, d, e, 40001);
        gather_columns_of(w, d, e, call, 65, (const size_t[]){ 0, 4100, 4300 });
        gather_columns_of(w, d, e, call, 3, (const size_t[]){ 0, 4100, 4300 });
        gather_columns_of(w, d, e, call, 1, (const size_t[]){ 0, 60, 100 });
    }
    ep_free(e);
    CHECK_OK(device_fault(d, NULL));
    device_close(d);
}
TEST(peer_many_bytes) { run_ranks(2, rank_of_many_bytes, 0, WHY); }

#ifdef BATON_EMULATED_GPU
#include <simt.h>

/* The launches since the last question: those that have run. */
static int launched(struct ep *e)
{
    static size_t before;
    CHECK_OK(ep_wait(e, NULL));
    const size_t now = simt_n_kernels();
    const int n = (int)(now - before);
    before = now;
    return n;
}

/* A launch costs a step microseconds, so their numbers are held; fewer are welcome. */
static void rank_of_launches(struct world *w)
{
    struct device *d = rank_device("cuda", w);
    struct shape s = shape_of("peer", EP_LOW_LATENCY, w->size);
    struct inputs in;
    struct ep_batch b;
    float of_all[2][2], mine[2] = { 1, 2 };
    const size_t first[] = { 0, 1, 2 };
    struct dev_mem m, all;
    struct ep *e = open_ep(&s, w, d);
    make_inputs(&s, w, d, &in);
    float *x = to_device(d, mine, sizeof mine, &m), *y = to_device(d, of_all, sizeof of_all, &all);
    const struct ep_rows rows = { .experts = in.d_experts.ptr, .n = in.n };
    (void)launched(e);
    CHECK_OK(ep_plan(e, &rows, NULL, NULL));
    CHECK(launched(e) <= 1);
    CHECK_OK(ep_dispatch(e, in.d_x.ptr, in.stride, &b, NULL));
    CHECK(launched(e) <= 2);
    const size_t n = b.n_slots * (size_t)s.c.hidden;
    const struct ep_combine_args a = { .out = to_device(d, NULL, n * sizeof(float), &in.d_out),
                                       .weights = in.d_weights.ptr,
                                       .y = in.d_y.ptr };
    CHECK_OK(ep_combine(e, &a, NULL));
    CHECK(launched(e) <= 2);
    CHECK_OK(ep_all_reduce(e, x, 2, DTYPE_F32, NULL));
    CHECK(launched(e) <= 1);
    CHECK_OK(ep_all_gather(e, y, x, sizeof mine, NULL));
    CHECK(launched(e) <= 1);
    CHECK_OK(ep_gather_columns(e, y, 2, x, 1, 2, first, NULL));
    CHECK(launched(e) <= 1);
    device_mem_free(d, &m);
    device_mem_free(d, &all);
    release_inputs(d, &in);
    ep_free(e);
    device_close(d);
}
TEST(peer_calls_take_few_launches) { run_ranks(2, rank_of_launches, 0, WHY); }
#else
TEST(peer_calls_take_few_launches)
{
    SKIP("no emulated GPU in this build: launches were NOT counted");
}
#endif

static const char *the_backend;

/* Ranks that share no experts: tensor parallelism. */
static void rank_of_sums(struct world *w)
{
    struct device *d = rank_device(the_device, w);
    struct shape s = { .c = { .backend = the_backend,
                              .mode = EP_LOW_LATENCY,
                              .collective_bytes = 1500,
                              .timeout_ms = LINK_MS, }, };
    struct ep *e = open_ep(&s, w, d);
    CHECK(ep_places(e).rows == NULL && ep_places(e).results == NULL);
    for (; s.call < 3; s.call++) {
        sums(&s, w, d, e);
        gather_columns(w, d, e, s.call);
    }
    gathers(w, d, e);
    CHECK_OK(ep_wait(e, NULL));
    ep_free(e);
    device_close(d);
}
static void on(const char *backend, const char *device)
{
    the_backend = backend;
    the_device = device;
}
TEST(peer_sums_without_experts)
{
    on("peer", "cuda");
    run_ranks(3, rank_of_sums, 0, WHY);
}
TEST(shm_sums_without_experts)
{
    on("shm", "cpu");
    run_ranks(3, rank_of_sums, 0, WHY);
}
TEST(ucx_sums_without_experts)
{
    on("ucx", "cpu");
    the_hosts = 2;
    run_ranks(3, rank_of_sums, 0, WHY);
}

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

#define REFUSED(change, want, says)                                                                \
    do {                                                                                           \
        c = good;                                                                                  \
        change;                                                                                    \
        refused(c, want, says);                                                                    \
    } while (0)

TEST(impossible_sizes_are_refused_with_a_sentence)
{
    struct ep_config good = shape_of("self", EP_THROUGHPUT, 1).c, c;
    CHECK_OK(device_open("cpu", &good.device, NULL));
    good.size = 1;
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
    REFUSED(c.send = DTYPE_Q4_0, ERR_INVALID, "q4_0");
    REFUSED(c.back = DTYPE_F8_E4M3, ERR_INVALID, "f8_e4m3");
    REFUSED((c.size = 2, c.placement = placement(2, ONCE)), ERR_UNSUPPORTED, "one rank, not 2");
    good.placement = placement(1, ONCE);
    REFUSED((c.backend = "shm", c.max_rows = 1 << 28, c.hidden = 1 << 24), ERR_INVALID,
            "too much to share");
    REFUSED((c.backend = "shm", c.max_rows = 1 << 29, c.hidden = 64), ERR_INVALID,
            "rows of 1 ranks are too many");
    device_close(good.device);
}

TEST(impossible_placements_are_refused_with_a_sentence)
{
    static const int32_t backwards[] = { 0, 8, 4, 12 }, short_of[] = { 0, 11 }, spare[] = { 0, 13 },
                         four[] = { 0, 4 }, maps[] = { 0, 1, 1, 0, 2, 0, 2, 1, 0, 1, 3, 2 };
    struct ep_config good = shape_of("self", EP_THROUGHPUT, 1).c, c;
    CHECK_OK(device_open("cpu", &good.device, NULL));
    good.size = 1;
    good.exchange = world_exchange;
    REFUSED(c.placement.n_physical = 11, ERR_INVALID, "experts are 0 to 11, not 0 to 10");
    REFUSED((c.placement.n_physical = 11, c.placement.first = short_of), ERR_INVALID,
            "12 experts have 11 places");
    REFUSED((c.size = 3, c.placement.first = backwards), ERR_INVALID,
            "rank 1 end before they begin");
    REFUSED((c.placement.n_physical = 13, c.placement.first = spare), ERR_INVALID,
            "nothing says which of 12 experts are in 13 places of 0 maps");
    REFUSED(c.placement.n_maps = 2, ERR_INVALID, "12 places of 2 maps");
    REFUSED(c.placement.n_maps = -1, ERR_INVALID, "-1 maps of experts (at most");
    REFUSED(c.placement.n_maps = EP_MAPS_MAX + 1, ERR_INVALID, "1025 maps of experts (at most");
    good.placement = (struct ep_placement){ 3, 4, four, 2, maps };
    REFUSED((void)0, ERR_INVALID, "expert 2 has no place in map 0");
    REFUSED(c.placement.logical = maps + 4, ERR_INVALID,
            "place 2 of map 1 has expert 3, not one "
            "of 0 to 2");
    REFUSED((c.placement.n_logical = 4, c.placement.logical = maps + 4), ERR_INVALID,
            "expert 3 has no place in map 0");
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
    CHECK_STATUS(ep_plan(e, &(struct ep_rows){ .experts = experts, .n = 7 }, NULL, NULL),
                 ERR_TOO_LONG);
    CHECK_STATUS(ep_plan(e, &(struct ep_rows){ .experts = wrong, .n = 1 }, NULL, NULL),
                 ERR_INVALID);
    CHECK_STATUS(ep_plan(e, &(struct ep_rows){ .map = 1, .experts = experts, .n = 1 }, NULL, NULL),
                 ERR_INVALID);
    CHECK_STATUS(ep_plan(e, &(struct ep_rows){ .map = -1, .experts = experts, .n = 1 }, NULL, NULL),
                 ERR_INVALID);
    CHECK_STATUS(ep_all_reduce(e, x, 513, DTYPE_F32, NULL), ERR_TOO_LONG);
    CHECK_STATUS(ep_all_reduce(e, x, 4, DTYPE_F16, NULL), ERR_UNSUPPORTED);
    CHECK_STATUS(ep_gather_columns(e, x, 300, x, 300, 2, (const size_t[]){ 0, 257 }, NULL),
                 ERR_TOO_LONG);
    CHECK_STATUS(ep_gather_columns(e, x, 300, x, 300, 2, (const size_t[]){ 9, 8 }, NULL),
                 ERR_INVALID);
    CHECK_OK(ep_plan(e, &(struct ep_rows){ .experts = experts, .n = 6 }, NULL, NULL));
    ep_free(e);
    ep_free(NULL);
    device_close(d);
}

/* The error names the rank that asked; on a GPU it is ep_wait's. */
static void rank_of_a_wrong_expert(struct world *w)
{
    struct device *d = rank_device(the_device, w);
    struct shape s = shape_of(the_backend, EP_LOW_LATENCY, w->size);
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
    enum status st = ep_plan(e, &(struct ep_rows){ .experts = in.d_experts.ptr, .n = in.n }, NULL,
                             &err);
    if (st == OK) st = ep_dispatch(e, in.d_x.ptr, in.stride, &b, &err);
    if (st == OK) st = ep_wait(e, &err);
    CHECK_STATUS(st, ERR_INVALID);
    CHECK(strstr(err.text, "rank 0") != NULL);
    CHECK_STATUS(ep_wait(e, NULL), ERR_INVALID);
    CHECK_OK(device_fault(d, NULL));
    ep_free(e);
    release_inputs(d, &in);
    device_close(d);
}
TEST(peer_a_wrong_expert_ends_all_ranks_with_its_name)
{
    on("peer", "cuda");
    run_ranks(2, rank_of_a_wrong_expert, 0, WHY);
}
TEST(shm_a_wrong_expert_ends_all_ranks_with_its_name)
{
    on("shm", "cpu");
    run_ranks(2, rank_of_a_wrong_expert, 0, WHY);
}
TEST(ucx_a_wrong_expert_ends_all_ranks_with_its_name)
{
    on("ucx", "cpu");
    run_ranks(2, rank_of_a_wrong_expert, 0, WHY);
}

static void (*the_change)(struct ep_config *c);
static void add_hidden(struct ep_config *c) { c->hidden++; }
/* The last map has one more copy of another expert. */
static void copy_another(struct ep_config *c)
{
    static int32_t others[MAPS][PLACES];
    memcpy(others, c->placement.logical, sizeof others);
    others[MAPS - 1][PLACES - 1] = 0;
    c->placement.logical = others[0];
}
static void leave_maps_out(struct ep_config *c) { c->placement.n_maps = 1; }

static void rank_with_other_terms(struct world *w)
{
    struct device *d = rank_device(the_device, w);
    struct shape s = shape_of(the_backend, EP_LOW_LATENCY, w->size);
    s.c.placement = placement(w->size, BY_LAYER);
    struct ep_config c = config_of(&s, w, d);
    struct ep *e = NULL;
    struct err err;
    if (w->rank == 1) the_change(&c);
    CHECK_STATUS(ep_create(&c, &e, &err), ERR_PEER_MISMATCH);
    CHECK(e == NULL && strstr(err.text, w->rank == 1 ? "rank 0" : "rank 1") != NULL);
    device_close(d);
}
static void ranks_of_other_terms_do_not_meet(void)
{
    static void (*const changes[])(struct ep_config *) = { add_hidden, copy_another,
                                                           leave_maps_out };
    for (size_t i = 0; i < COUNT_OF(changes); i++) {
        the_change = changes[i];
        run_ranks(3, rank_with_other_terms, 0, WHY);
    }
}
TEST(peer_ranks_of_other_terms_do_not_meet)
{
    on("peer", "cuda");
    ranks_of_other_terms_do_not_meet();
}
TEST(shm_ranks_of_other_terms_do_not_meet)
{
    on("shm", "cpu");
    ranks_of_other_terms_do_not_meet();
}
TEST(ucx_ranks_of_other_terms_do_not_meet)
{
    on("ucx", "cpu");
    ranks_of_other_terms_do_not_meet();
}

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
    enum status st = ep_plan(e, &(struct ep_rows){ .experts = in.d_experts.ptr, .n = in.n }, NULL,
                             &err);
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
#ifdef BATON_EMULATED_GPU
enum { EMULATED = 1 };
#else
enum { EMULATED = 0 };
#endif

/* A deadline that a case waits for. Ranks that share a GPU run in turns of some milliseconds, and
 * the other programs on it have theirs. */
static int short_ms(const struct world *w, const struct device *d)
{
    return d->is_host || EMULATED || device_count("cuda") >= w->size ? SHORT_MS : 2 * SHORT_MS;
}

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
    s.c.timeout_ms = short_ms(w, d);
    struct ep *e = open_ep(&s, w, d);
    step(&s, w, d, e);
    if (w->rank == DEAD) kill(getpid(), SIGKILL);
    make_inputs(&s, w, d, &in);
    const long long before = now_ms();
    enum status st = ep_plan(e, &(struct ep_rows){ .experts = in.d_experts.ptr, .n = in.n }, NULL,
                             &err);
    if (st == OK) st = ep_dispatch(e, in.d_x.ptr, in.stride, &b, &err);
    if (st == OK) st = ep_wait(e, &err);
    CHECK(is_lost(st));
    CHECK(now_ms() - before < 4 * s.c.timeout_ms);
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

/* ---- a rank is aborted ---- */

enum { ABORTED = 1, LATE = 2, ABORT_AFTER_MS = 200, LATE_MS = 1000 };

static void *abort_soon(void *e)
{
    usleep(ABORT_AFTER_MS * 1000);
    ep_abort(e);
    ep_abort(e);
    return NULL;
}

/* ABORTED is aborted while it waits for LATE, and its calls end at once. `shm`, `ucx` and `peer` tell the
 * others, which wait too or come later; through `nccl` they wait until their deadline. */
static void rank_of_an_abort(struct world *w)
{
    struct device *d = rank_device(the_device, w);
    struct shape s = the_shape;
    const bool is_told = strcmp(the_backend, "nccl") != 0;
    struct inputs in;
    struct ep_batch b;
    struct err err = { 0 };
    pthread_t aborter;
    float x = 1;
    s.c.timeout_ms = short_ms(w, d);
    struct ep *e = open_ep(&s, w, d);
    step(&s, w, d, e);
    make_inputs(&s, w, d, &in);
    const long long before = now_ms();
    if (w->rank == ABORTED) CHECK(pthread_create(&aborter, NULL, abort_soon, e) == 0);
    if (w->rank == LATE) usleep(LATE_MS * 1000);
    enum status st = ep_plan(e, &(struct ep_rows){ .experts = in.d_experts.ptr, .n = in.n }, NULL,
                             &err);
    if (st == OK) st = ep_dispatch(e, in.d_x.ptr, in.stride, &b, &err);
    if (st == OK) st = ep_wait(e, &err);
    CHECK_STATUS(st, w->rank == ABORTED ? ERR_CANCELED : ERR_PEER_LOST);
    if (is_told || w->rank == ABORTED) {
        CHECK(now_ms() - before < s.c.timeout_ms / 2);
        CHECK(strstr(err.text, "rank 1 of 3") != NULL && strstr(err.text, "aborted") != NULL);
    }
    if (w->rank == ABORTED) {
        const size_t first[] = { 0, 1, 1, 1 };
        CHECK(pthread_join(aborter, NULL) == 0);
        CHECK_STATUS(ep_wait(e, NULL), ERR_CANCELED);
        CHECK_STATUS(
            ep_plan(e, &(struct ep_rows){ .experts = in.d_experts.ptr, .n = in.n }, NULL, NULL),
            ERR_CANCELED);
        CHECK_STATUS(ep_dispatch(e, in.d_x.ptr, in.stride, &b, NULL), ERR_CANCELED);
        CHECK_STATUS(ep_combine(e, NULL, NULL), ERR_CANCELED);
        CHECK_STATUS(ep_all_reduce(e, &x, 1, DTYPE_F32, NULL), ERR_CANCELED);
        CHECK_STATUS(ep_all_gather(e, &x, &x, 1, NULL), ERR_CANCELED);
        CHECK_STATUS(ep_gather_columns(e, &x, 1, &x, 1, 1, first, NULL), ERR_CANCELED);
    }
    ep_free(e);
    release_inputs(d, &in);
    device_close(d);
}
TEST(shm_an_aborted_rank_ends_the_calls_of_all)
{
    on("shm", "cpu");
    the_shape = shape_of(the_backend, EP_LOW_LATENCY, 3);
    run_ranks(3, rank_of_an_abort, 0, WHY);
    run_ranks_as_threads(3, rank_of_an_abort);
}
TEST(ucx_an_aborted_rank_ends_the_calls_of_all)
{
    on("ucx", "cpu");
    the_hosts = 2;
    the_shape = shape_of(the_backend, EP_LOW_LATENCY, 3);
    run_ranks(3, rank_of_an_abort, 0, WHY);
    run_ranks_as_threads(3, rank_of_an_abort);
}
TEST(peer_an_aborted_rank_ends_the_calls_of_all)
{
    on("peer", "cuda");
    the_shape = shape_of(the_backend, EP_LOW_LATENCY, 3);
    run_ranks(3, rank_of_an_abort, 0, WHY);
}
TEST(nccl_an_aborted_rank_ends_its_calls)
{
    on("nccl", "cuda");
    the_shape = shape_of(the_backend, EP_LOW_LATENCY, 3);
    run_ranks(3, rank_of_an_abort, 0, WHY);
}
TEST(self_an_aborted_rank_ends_its_calls)
{
    struct world w = { .size = 1 };
    struct device *d = rank_device("cpu", &w);
    struct shape s = shape_of("self", EP_THROUGHPUT, 1);
    struct ep *e = open_ep(&s, &w, d);
    const int32_t experts[3] = { 0, 1, 2 };
    CHECK_OK(ep_wait(e, NULL));
    ep_abort(e);
    CHECK_STATUS(ep_wait(e, NULL), ERR_CANCELED);
    CHECK_STATUS(ep_plan(e, &(struct ep_rows){ .experts = experts, .n = 1 }, NULL, NULL),
                 ERR_CANCELED);
    ep_free(e);
    device_close(d);
}

/* ---- more than there is room for ---- */

/* All rows choose experts of rank 0. All ranks refuse alike, and then go on with a batch that
 * fits. */
static void rank_over_its_limit(struct world *w)
{
    struct device *d = rank_device(the_device, w);
    struct shape s = shape_of(the_backend, EP_THROUGHPUT, w->size);
    struct dev_mem m;
    struct err err = { 0 };
    struct ep_counts counts;
    int32_t experts[6 * 3];
    s.c.max_slots = 20;
    for (int i = 0; i < 18; i++) experts[i] = i % 3;
    struct ep *e = open_ep(&s, w, d);
    to_device(d, experts, sizeof experts, &m);
    for (int i = 0; i < 5; i++) {
        CHECK_STATUS(
            ep_plan(e, &(struct ep_rows){ .experts = m.ptr, .n = 6 - (size_t)(i % 2) }, NULL, &err),
            ERR_FULL);
        CHECK(strstr(err.text, i % 2 ? "rank 0 would get 30 rows" : "rank 0 would get 36 rows") !=
              NULL);
    }
    CHECK_OK(ep_plan(e, &(struct ep_rows){ .experts = m.ptr, .n = 3 }, &counts, NULL));
    CHECK_EQ_INT(counts.n_slots, w->rank == 0 ? 18 : 0);
    ep_free(e);
    device_mem_free(d, &m);
    device_close(d);
}
TEST(nccl_more_than_there_is_room_for_is_refused_by_all)
{
    on("nccl", "cuda");
    run_ranks(2, rank_over_its_limit, 0, WHY);
}
TEST(shm_more_than_there_is_room_for_is_refused_by_all)
{
    on("shm", "cpu");
    run_ranks(2, rank_over_its_limit, 0, WHY);
}
TEST(ucx_more_than_there_is_room_for_is_refused_by_all)
{
    on("ucx", "cpu");
    run_ranks(2, rank_over_its_limit, 0, WHY);
}

/* ---- graphs ---- */

#ifdef BATON_HAVE_CUDA_KERNELS
#include "tests/conformance/ep_graphs.h"

TEST(peer_calls_run_again_from_a_graph) { run_ranks(3, rank_of_graphs, 0, WHY); }
TEST(peer_padding_rows_of_a_graph_go_nowhere) { run_ranks(3, rank_of_real_rows, 0, WHY); }
#else
TEST(peer_calls_run_again_from_a_graph) { SKIP("built without kernels for GPUs"); }
TEST(peer_padding_rows_of_a_graph_go_nowhere) { SKIP("built without kernels for GPUs"); }
#endif

TEST_MAIN(
    CASE(self_on_the_host), CASE(self_on_the_host_low_latency), CASE(self_on_a_gpu),
    CASE(self_on_a_gpu_low_latency), CASE(shm_throughput_1), CASE(shm_throughput_1_threads),
    CASE(shm_throughput_2), CASE(shm_throughput_2_threads), CASE(shm_throughput_3),
    CASE(shm_throughput_3_threads), CASE(shm_throughput_4), CASE(shm_throughput_4_threads),
    CASE(shm_throughput_8), CASE(shm_throughput_8_threads), CASE(shm_low_latency_1),
    CASE(shm_low_latency_1_threads), CASE(shm_low_latency_2), CASE(shm_low_latency_2_threads),
    CASE(shm_low_latency_3), CASE(shm_low_latency_3_threads), CASE(shm_low_latency_4),
    CASE(shm_low_latency_4_threads), CASE(shm_low_latency_8), CASE(shm_low_latency_8_threads),
    CASE(ucx_throughput_1), CASE(ucx_throughput_1_threads), CASE(ucx_throughput_2),
    CASE(ucx_throughput_2_threads), CASE(ucx_throughput_3), CASE(ucx_throughput_3_threads),
    CASE(ucx_throughput_4), CASE(ucx_throughput_4_threads), CASE(ucx_throughput_8),
    CASE(ucx_throughput_8_threads), CASE(ucx_low_latency_1), CASE(ucx_low_latency_1_threads),
    CASE(ucx_low_latency_2), CASE(ucx_low_latency_2_threads), CASE(ucx_low_latency_3),
    CASE(ucx_low_latency_3_threads), CASE(ucx_low_latency_4), CASE(ucx_low_latency_4_threads),
    CASE(ucx_low_latency_8), CASE(ucx_low_latency_8_threads), CASE(ucx_throughput_3_on_2_hosts),
    CASE(ucx_throughput_3_on_2_hosts_threads), CASE(ucx_throughput_8_on_2_hosts),
    CASE(ucx_throughput_8_on_2_hosts_threads), CASE(ucx_throughput_2_on_1_host),
    CASE(ucx_throughput_2_on_1_host_threads), CASE(ucx_low_latency_3_on_2_hosts),
    CASE(ucx_low_latency_3_on_2_hosts_threads), CASE(ucx_low_latency_8_on_2_hosts),
    CASE(ucx_low_latency_8_on_2_hosts_threads), CASE(ucx_low_latency_2_on_1_host),
    CASE(ucx_low_latency_2_on_1_host_threads), CASE(ucx_sums_without_experts),
    CASE(ucx_a_wrong_expert_ends_all_ranks_with_its_name),
    CASE(ucx_ranks_of_other_terms_do_not_meet), CASE(ucx_an_aborted_rank_ends_the_calls_of_all),
    CASE(ucx_more_than_there_is_room_for_is_refused_by_all), CASE_T(peer_1, 120),
    CASE_T(peer_2, 120), CASE_T(peer_3, 120), CASE_T(peer_4, 120), CASE_T(peer_8, 180),
    CASE_T(peer_many_rows, 120), CASE_T(peer_many_bytes, 120),
    CASE_T(peer_calls_take_few_launches, 120), CASE_T(peer_sums_without_experts, 120),
    CASE(shm_sums_without_experts), CASE(impossible_sizes_are_refused_with_a_sentence),
    CASE(impossible_placements_are_refused_with_a_sentence), CASE(too_much_at_once_is_refused),
    CASE_T(peer_a_wrong_expert_ends_all_ranks_with_its_name, 120),
    CASE(shm_a_wrong_expert_ends_all_ranks_with_its_name),
    CASE_T(peer_ranks_of_other_terms_do_not_meet, 120), CASE(shm_ranks_of_other_terms_do_not_meet),
    CASE(peer_all_ranks_learn_that_one_has_no_memory),
    CASE(peer_all_ranks_learn_that_one_cannot_map_the_others),
    CASE(peer_a_broken_gpu_is_its_own_fault_and_the_others_deadline),
    CASE(peer_has_no_throughput_mode), CASE_T(peer_a_dead_rank_is_an_error_in_time, 120),
    CASE_T(nccl_throughput_1, 120), CASE_T(nccl_throughput_2, 120), CASE_T(nccl_throughput_4, 120),
    CASE_T(nccl_throughput_8, 180), CASE_T(nccl_low_latency_1, 120),
    CASE_T(nccl_low_latency_3, 120), CASE_T(nccl_a_dead_rank_is_an_error_in_time, 120),
    CASE(shm_an_aborted_rank_ends_the_calls_of_all),
    CASE_T(peer_an_aborted_rank_ends_the_calls_of_all, 120),
    CASE(nccl_an_aborted_rank_ends_its_calls), CASE(self_an_aborted_rank_ends_its_calls),
    CASE(nccl_more_than_there_is_room_for_is_refused_by_all),
    CASE(shm_more_than_there_is_room_for_is_refused_by_all),
    CASE_T(peer_calls_run_again_from_a_graph, 120),
    CASE_T(peer_padding_rows_of_a_graph_go_nowhere, 120))
