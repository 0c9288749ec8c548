/* test_simt_overlap.cc - launches that overlap the one before them, on tests/simt: what is allowed
 * before griddepcontrol.wait, and the mistakes that are found. */
#include "tests/simt/include/cuda_runtime.h"
#include "tests/unit/simt/simt_case.h"

enum { N = 64, BLOCKS = 3 };

enum mistake {
    NONE,
    READS,
    WRITES,
    COPIES,
    NEVER_WAITS,
    ONE_WARP_READS, /* while the other has waited */
    USES_A_GUESS
};

/* The first kernel; y is on the page of what nobody writes. */
__global__ void first(int *y, int v)
{
    simt_grid_dependency_sync();
    y[blockIdx.x * N + threadIdx.x] = v + (int)threadIdx.x;
}

/* out = weights + y */
__global__ void second(int *out, const int *weights, const int *y, mistake m)
{
    const int i = (int)(blockIdx.x * N + threadIdx.x);
    int *shared = (int *)simt_dynamic_shared();
    int v = weights[i];
    simt_prefetch((const char *)y, 64);
    if (m == READS && threadIdx.x == 5) v += y[i] - (5 + 100);
    if (m == WRITES) out[i] = 0;
    if (m == USES_A_GUESS) v += __ldcg(y + i) - (int)threadIdx.x - 100;
    if (m == COPIES) {
        simt_cp_async(shared + threadIdx.x, y + i, 4, 4);
        simt_cp_async_commit();
        simt_cp_async_wait(0);
    }
    if (m == ONE_WARP_READS) {
        if (threadIdx.x >= 32) simt_grid_dependency_sync();
        if (threadIdx.x == 0) shared[0] = y[i];
        __syncthreads();
    }
    if (m == NEVER_WAITS) return;
    simt_grid_dependency_sync();
    out[i] = v + y[i];
}

struct arrays {
    int *y, *weights, *out;
};

static struct arrays make(void)
{
    int w[BLOCKS * N];
    for (int i = 0; i < BLOCKS * N; i++) w[i] = 1000 * i;
    int *all = on_device<int>(3 * BLOCKS * N); /* of one page */
    struct arrays a = { all, all + BLOCKS * N, all + 2 * BLOCKS * N };
    GOOD(cudaMemcpy(a.weights, w, sizeof w, cudaMemcpyHostToDevice));
    GOOD(cudaMemset(a.y, 0, sizeof w));
    return a;
}

static void launch_both(cudaStream_t s, const struct arrays &a, mistake m, int v)
{
    GOOD(simt_launch_overlapping(s, first, dim3(BLOCKS), dim3(N), 0, a.y, v));
    GOOD(simt_launch_overlapping(s, second, dim3(BLOCKS), dim3(N), N * sizeof(int), a.out,
                                 a.weights, a.y, m));
}

static void check_out(const struct arrays &a, int v)
{
    int out[BLOCKS * N];
    to_host(out, a.out, BLOCKS * N);
    for (int i = 0; i < BLOCKS * N; i++) CHECK_EQ_INT(out[i], 1000 * i + v + i % N);
}

static void run(mistake m)
{
    simt_set_overlap("on");
    const struct arrays a = make();
    launch_both(nullptr, a, m, 100);
    GOOD(cudaDeviceSynchronize());
    if (m != NEVER_WAITS) check_out(a, 100);
    launch_both(nullptr, a, m, 100); /* y does not change: nothing can be seen */
    GOOD(cudaDeviceSynchronize());
}

TEST(simt_overlaps_a_kernel_that_waits)
{
    run(NONE);
    CHECK_EQ_INT(simt_n_early(), 0);
}

static void must_be_found(void (*f)(void), const char *said)
{
    if (!FAULTS_ARE_TOLD) SKIP("the sanitizers have signal handlers of their own");
    must_die(f, said);
}

TEST(simt_ends_a_kernel_that_reads_too_early)
{
    must_be_found([] { run(READS); }, "second reads what that kernel writes");
}
TEST(simt_names_the_kernel_that_is_not_waited_for)
{
    must_be_found([] { run(READS); }, "before it has waited for first");
}
TEST(simt_ends_a_kernel_that_writes_too_early)
{
    must_be_found([] { run(WRITES); }, "second writes memory");
}
TEST(simt_ends_a_kernel_that_copies_too_early)
{
    must_be_found([] { run(COPIES); }, "second reads what that kernel writes");
}
TEST(simt_ends_a_kernel_that_never_waits)
{
    must_be_found([] { run(NEVER_WAITS); }, "second ends");
}
TEST(simt_ends_a_warp_that_reads_while_another_has_waited)
{
    must_be_found([] { run(ONE_WARP_READS); }, "second reads what that kernel writes");
}

/* Some launches see the new value, some the old one. */
TEST(simt_gives_old_and_new_guesses)
{
    if (!FAULTS_ARE_TOLD) SKIP("the sanitizers have signal handlers of their own");
    simt_set_overlap("on");
    const struct arrays a = make();
    int n_new = 0, out[BLOCKS * N];
    for (int i = 0; i < 4; i++) {
        GOOD(cudaMemset(a.y, 0, sizeof out));
        launch_both(nullptr, a, USES_A_GUESS, 100);
        to_host(out, a.out, BLOCKS * N);
        CHECK(out[5] == 5105 || out[5] == 5000);
        n_new += out[5] == 5105;
    }
    CHECK(n_new > 0 && n_new < 4);
}

/* What does not follow a kernel directly in its stream does not overlap it. */
TEST(simt_overlaps_only_neighbours_in_a_stream)
{
    simt_set_overlap("on");
    const struct arrays a = make();
    cudaStream_t s;
    cudaEvent_t e;
    GOOD(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    GOOD(cudaEventCreate(&e));
    GOOD(simt_launch_overlapping(s, first, dim3(BLOCKS), dim3(N), 0, a.y, 1));
    GOOD(cudaMemsetAsync(a.out, 0, 4, s));
    GOOD(simt_launch_overlapping(s, second, dim3(BLOCKS), dim3(N), 256, a.out, a.weights, a.y,
                                 READS));
    GOOD(cudaStreamSynchronize(s));
    GOOD(simt_launch_overlapping(nullptr, first, dim3(BLOCKS), dim3(N), 0, a.y, 2));
    GOOD(cudaEventRecord(e, nullptr));
    GOOD(cudaStreamWaitEvent(s, e, 0));
    GOOD(simt_launch_overlapping(s, second, dim3(BLOCKS), dim3(N), 256, a.out, a.weights, a.y,
                                 READS));
    GOOD(simt_launch(s, first, dim3(BLOCKS), dim3(N), 0, a.y, 3));
    GOOD(simt_launch(s, second, dim3(BLOCKS), dim3(N), 256, a.out, a.weights, a.y, READS));
    GOOD(cudaStreamSynchronize(s));
    CHECK_EQ_INT(simt_n_early(), 0);
}

static void run_graph(void)
{
    simt_set_overlap("on");
    const struct arrays a = make();
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    GOOD(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    GOOD(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    launch_both(s, a, READS, 100);
    GOOD(cudaStreamEndCapture(s, &graph));
    GOOD(cudaGraphInstantiate(&exec, graph, 0));
    GOOD(cudaGraphLaunch(exec, s));
    GOOD(cudaStreamSynchronize(s));
}
TEST(simt_ends_a_kernel_of_a_graph_that_reads_too_early)
{
    must_be_found(run_graph, "second reads what that kernel writes");
}

TEST(simt_counts_what_is_too_early)
{
    if (!FAULTS_ARE_TOLD) SKIP("the sanitizers have signal handlers of their own");
    const struct arrays a = make();
    simt_set_overlap("count");
    launch_both(nullptr, a, READS, 100);
    GOOD(cudaDeviceSynchronize());
    CHECK_EQ_INT(simt_n_early(), BLOCKS);
    simt_set_overlap("off");
    launch_both(nullptr, a, READS, 200);
    GOOD(cudaDeviceSynchronize());
    CHECK_EQ_INT(simt_n_early(), BLOCKS);
}

TEST_MAIN(CASE(simt_overlaps_a_kernel_that_waits), CASE(simt_ends_a_kernel_that_reads_too_early),
          CASE(simt_names_the_kernel_that_is_not_waited_for),
          CASE(simt_ends_a_kernel_that_writes_too_early),
          CASE(simt_ends_a_kernel_that_copies_too_early), CASE(simt_ends_a_kernel_that_never_waits),
          CASE(simt_ends_a_warp_that_reads_while_another_has_waited),
          CASE(simt_gives_old_and_new_guesses), CASE(simt_overlaps_only_neighbours_in_a_stream),
          CASE(simt_ends_a_kernel_of_a_graph_that_reads_too_early),
          CASE(simt_counts_what_is_too_early))
