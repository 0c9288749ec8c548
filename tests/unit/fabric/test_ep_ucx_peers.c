/* test_ep_ucx_peers.c - backend `ucx` of ep.h: ranks that say nonsense, and ranks that cannot tell
 * on which host they are. tests/conformance has its results and its faults. */
#include <sched.h>
#include <sys/mount.h>

#include "kernels/ep/ucx/ep_ucx.h"
#include "tests/conformance/ep_steps.h"

static const char WHY[] = "it needs ucx, and the right to mount";

enum { BAD = 1, LONG_MS = 20000, SOON_MS = 2000 };

/* ---- words of faults ---- */

static uint64_t the_word;
static atomic_int *the_done; /* how many have heard it; in memory of all ranks */

static void rank_that_hears_a_word(struct world *w)
{
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of("ucx", EP_THROUGHPUT, w->size);
    struct err err = { 0 };
    float x = 1;
    s.c.timeout_ms = LONG_MS;
    struct ep *e = open_ep(&s, w, d);
    step(&s, w, d, e);
    if (w->rank == BAD) {
        struct ep_ucx *u = ep_ucx_of(e);
        const struct ep_ucx_head h = {
            .key = u->key, .kind = EP_UCX_FAULT, .rank = BAD, .at = the_word
        };
        for (int r = 0; r < w->size; r++)
            if (r != BAD) CHECK_OK(fabric_send(u->fabric, (uint32_t)r, &h, sizeof h, NULL, 0));
        const long long until = now_ms() + LONG_MS;
        while (atomic_load(the_done) < w->size - 1 && now_ms() < until) {
            (void)fabric_progress(u->fabric);
            usleep(1000);
        }
        _exit(0);
    }
    const long long begin = now_ms();
    CHECK_STATUS(ep_all_reduce(e, &x, 1, DTYPE_F32, &err), ERR_INTERNAL);
    CHECK(now_ms() - begin < SOON_MS);
    CHECK(strstr(err.text, "rank 1 of 3 sent impossible numbers") != NULL);
    atomic_fetch_add(the_done, 1);
    ep_free(e);
    device_close(d);
}

/* A word that says nothing would leave the others waiting, and one about a rank that there is not
 * would name it. */
TEST(a_word_that_says_nothing_is_a_fault_of_its_rank)
{
    static const uint64_t words[] = { 0,
                                      1,
                                      EP_UCX_LEFT << 16,
                                      EP_UCX_LEFT << 16 | 4,
                                      7 << 16 | 1,
                                      (uint64_t)1 << 32 | EP_UCX_LEFT << 16 | 1 };
    the_done = mmap(NULL, sizeof *the_done, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                    0);
    CHECK(the_done != MAP_FAILED);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        the_word = words[i];
        atomic_store(the_done, 0);
        run_ranks(3, rank_that_hears_a_word, 0, WHY);
    }
}

/* ---- a host without a name ---- */

/* Hides the kernel's boot id from this process. */
static void hide_host(void)
{
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("/dev/null", "/proc/sys/kernel/random/boot_id", NULL, MS_BIND, NULL) != 0)
        _exit(NO_GPU);
}

static void rank_of_a_hidden_host(struct world *w)
{
    struct device *d = rank_device("cpu", w);
    const struct shape s = shape_of("ucx", EP_THROUGHPUT, w->size);
    struct ep *e = NULL;
    struct err err = { 0 };
    if (w->rank == BAD) hide_host();
    const struct ep_config c = config_of(&s, w, d);
    const enum status st = ep_create(&c, &e, &err);
    if (st == ERR_NODEV) _exit(NO_GPU);
    if (st != OK) test_fail(__FILE__, __LINE__, "rank %d: %s", w->rank, err.text);
    CHECK_EQ_INT(e->n_near, w->rank == BAD ? 0 : w->size - 2);
    step(&s, w, d, e);
    ep_free(e);
    device_close(d);
}

TEST(a_rank_that_cannot_tell_its_host_is_a_far_one)
{
    the_hosts = 1;
    run_ranks(3, rank_of_a_hidden_host, 0, WHY);
}

TEST_MAIN(CASE_T(a_word_that_says_nothing_is_a_fault_of_its_rank, 120),
          CASE(a_rank_that_cannot_tell_its_host_is_a_far_one))
