/* test_tier_disk.c - the disk tier's files: found again after an end of any kind, shared by several
 * processes, changed by somebody, full, broken. Whatever they hold, what comes back is right. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shared/kv/tier/disk/tier_disk_internal.h"
#include "tests/fixtures/tier_rig.h"

enum { PAUSE_US = 200, SEGMENT_SLOTS = 3 };

static const char *folder(void)
{
    static char path[4200];
    if (!path[0]) snprintf(path, sizeof path, "%s/kv", test_tmpdir());
    return path;
}

/* Room for n segments of one slot, or, with `large`, of SEGMENT_SLOTS. */
static uint64_t room(uint64_t n, bool large)
{
    if (!large) return n * (disk_data_begin(1) + KV_SLOT_ALIGN);
    return 16 * (disk_data_begin(SEGMENT_SLOTS) + SEGMENT_SLOTS * KV_SLOT_ALIGN);
}

static enum status open_tier(struct rig *r, uint64_t bytes, const struct disk_io_ops *io,
                             struct err *err)
{
    const struct kv_tier_options o = options_of(r);
    const struct tier_disk_options d = {
        .folder = folder(), .bytes = bytes, .scan_ms = 20, .off_ms = 200, .io = io
    };
    return kv_tier_disk_create(&o, &d, &r->tier, err);
}

static void rig_open(struct rig *r, uint64_t bytes)
{
    struct err err = { 0 };
    rig_open_pool(r, "cpu", DTYPE_BF16, DTYPE_BF16);
    if (open_tier(r, bytes, NULL, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

/* Turns until `cond` holds. */
static bool turn(struct rig *r)
{
    struct kv_tier_done d;
    r->tier->ops->tick(r->tier, clock_ms());
    while (r->tier->ops->poll(r->tier, &d)) {}
    usleep(PAUSE_US);
    return true;
}
#define AWAIT(r, cond)                                                                             \
    do {                                                                                           \
        const uint64_t end_ = clock_ms() + WAIT_MS;                                                \
        bool came_ = false;                                                                        \
        while (!(came_ = (cond)) && clock_ms() < end_) turn(r);                                    \
        if (!came_) test_fail(__FILE__, __LINE__, "%s did not come true", #cond);                  \
    } while (0)

static uint32_t n_right(struct rig *r, uint32_t n)
{
    uint32_t n_good = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!has(r, i)) continue;
        fill(r, 3, 1000);
        const struct kv_tier_done d = get(r, i, 1, 3);
        if (d.n_good == 1) CHECK(holds(r, 3, i));
        else CHECK(holds(r, 3, 1000));
        n_good += d.n_good;
    }
    return n_good;
}

/* Calls fn(path) for each file of the folder whose name begins so; returns how many. */
static int each_file(const char *prefix, void (*fn)(const char *path))
{
    int n = 0;
    char path[8500];
    DIR *dir = opendir(folder());
    if (!dir) return 0;
    for (const struct dirent *e; (e = readdir(dir));) {
        if (strncmp(e->d_name, prefix, strlen(prefix)) != 0) continue;
        snprintf(path, sizeof path, "%s/%s", folder(), e->d_name);
        if (fn) fn(path);
        n++;
    }
    closedir(dir);
    return n;
}

/* ---- again after an end ---- */

TEST(a_restarted_node_finds_its_blocks)
{
    struct rig r;
    rig_open(&r, room(16, true));
    for (uint32_t i = 0; i < 20; i++) put(&r, i);
    rig_close(&r);
    CHECK_EQ_INT(each_file("node-", NULL), 0);
    rig_open(&r, room(16, true));
    AWAIT(&r, stats(&r).n_stored == 20);
    CHECK_EQ_INT(n_right(&r, 20), 20);
    CHECK_EQ_INT(stats(&r).n_slots, 0); /* nothing was written yet, so nothing was taken over */
    rig_close(&r);
}

/* What does not fit any more is evicted; segments of the process before are used again. */
TEST(segments_of_a_dead_process_are_taken_over)
{
    struct rig r;
    rig_open(&r, room(8, false));
    for (uint32_t i = 0; i < 8; i++) put(&r, i);
    rig_close(&r);
    rig_open(&r, room(8, false));
    AWAIT(&r, stats(&r).n_stored == 8);
    for (uint32_t i = 100; i < 104; i++) put(&r, i);
    CHECK_EQ_INT(each_file("segment-", NULL), 8);
    for (uint32_t i = 100; i < 104; i++) CHECK(has(&r, i));
    CHECK(n_right(&r, 8) >= 3); /* those that were not evicted for them */
    rig_close(&r);
}

/* A process that writes is killed at any time: blocks of it are right, or not there. */
static void write_until_killed(int round)
{
    struct rig r;
    rig_open(&r, room(16, true));
    for (uint32_t k = 0;; k++) {
        const uint32_t i = (uint32_t)round * 7 + k % 60;
        const struct kv_tier_put p = { .of = block_named(i, 0), .block = 0, .tag = 1 };
        r.tier->ops->drop(r.tier, &p.of.key); /* it may be listed again: then it is not written */
        fill(&r, 0, i);
        if (try_put(&r, &p) == OK) (void)await(&r);
    }
}

TEST(a_killed_writer_leaves_blocks_that_are_right)
{
    enum { ROUNDS = 12, FEWER = 4, N = 400 };
    const int rounds = test_runs_long() ? ROUNDS : FEWER;
    uint32_t n_found = 0;
    (void)folder(); /* both processes have the same one */
    for (int round = 0; round < rounds; round++) {
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) write_until_killed(round);
        usleep((useconds_t)(20000 + 40000 * rng_uniform(3, 1, (uint64_t)round)));
        CHECK_EQ_INT(kill(pid, SIGKILL), 0);
        CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
        struct rig r;
        rig_open(&r, room(16, true));
        for (int i = 0; i < 100; i++) turn(&r);
        const uint32_t stored = stats(&r).n_stored, right = n_right(&r, N);
        n_found += right;
        CHECK_EQ_INT(right, stored);
        rig_close(&r);
    }
    CHECK(n_found > 10);
}

/* ---- changed files ---- */

static uint64_t the_seed;

/* Changes a few bytes anywhere in the file. */
static void flip(const char *path)
{
    struct stat st;
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && fstat(fd, &st) == 0);
    for (int i = 0; i < 3; i++) {
        uint8_t byte;
        const off_t at = (off_t)(rng_uniform(the_seed, 1, the_seed) * (double)st.st_size);
        the_seed++;
        CHECK_EQ_INT(pread(fd, &byte, 1, at), 1);
        byte ^= (uint8_t)(1 + the_seed % 255);
        CHECK_EQ_INT(pwrite(fd, &byte, 1, at), 1);
    }
    close(fd);
}

static void cut(const char *path)
{
    struct stat st;
    CHECK_EQ_INT(stat(path, &st), 0);
    CHECK_EQ_INT(truncate(path, (off_t)(rng_uniform(the_seed, 2, the_seed) * (double)st.st_size)),
                 0);
    the_seed++;
}

TEST(flipped_bytes_are_never_an_answer)
{
    const int rounds = test_runs_long() ? 30 : 5;
    for (int round = 0; round < rounds; round++) {
        struct rig r;
        rig_open(&r, room(16, true));
        for (uint32_t i = 0; i < 12; i++) put(&r, (uint32_t)round * 100 + i);
        rig_close(&r);
        the_seed = (uint64_t)round * 1000 + 1;
        CHECK(each_file("segment-", round % 5 == 4 ? cut : flip) > 0);
        rig_open(&r, room(16, true));
        for (int i = 0; i < 50; i++) turn(&r);
        (void)n_right(&r, (uint32_t)rounds * 100); /* checks each that comes */
        const uint32_t more = 5000 + (uint32_t)round * 10;
        for (uint32_t i = more; i < more + 4; i++) put(&r, i); /* and it goes on */
        CHECK_EQ_INT(get(&r, more, 4, 6).n_good, 4);
        rig_close(&r);
    }
}

/* While it is in use, under its feet. */
TEST(bytes_that_change_while_it_runs_are_noticed)
{
    struct rig r;
    rig_open(&r, room(16, true));
    for (uint32_t i = 0; i < 12; i++) put(&r, i);
    the_seed = 77;
    for (int k = 0; k < 40; k++) each_file("segment-", flip);
    (void)n_right(&r, 12);
    CHECK(stats(&r).n_bad_checksums > 0);
    for (uint32_t i = 0; i < 12; i++)
        if (!has(&r, i)) put(&r, i);
    rig_close(&r);
}

static void remove_file(const char *path) { CHECK_EQ_INT(unlink(path), 0); }

TEST(segments_that_somebody_removes_are_left)
{
    struct rig r;
    rig_open(&r, room(16, true));
    for (uint32_t i = 0; i < 12; i++) put(&r, i);
    CHECK(each_file("segment-", remove_file) > 1);
    AWAIT(&r, stats(&r).n_stored == 0);
    for (uint32_t i = 0; i < 12; i++) put(&r, i);
    CHECK(each_file("segment-", NULL) > 1);
    CHECK_EQ_INT(n_right(&r, 12), 12);
    rig_close(&r);
}

TEST(files_of_another_model_are_left_alone_until_room_is_needed)
{
    struct rig r, other;
    struct err err = { 0 };
    rig_open(&r, room(8, false));
    for (uint32_t i = 0; i < 8; i++) put(&r, i);
    rig_close(&r);
    rig_open_pool(&other, "cpu", DTYPE_BF16, DTYPE_BF16);
    other.layout.model_fingerprint = 8;
    CHECK_OK(open_tier(&other, room(8, false), NULL, &err));
    for (int i = 0; i < 50; i++) turn(&other);
    CHECK_EQ_INT(stats(&other).n_stored, 0);
    CHECK_EQ_INT(each_file("segment-", NULL), 8);
    put(&other, 1); /* the room is full: one of the other model's goes */
    CHECK_EQ_INT(each_file("segment-", NULL), 8);
    rig_close(&other);
    rig_open(&r, room(8, false));
    AWAIT(&r, stats(&r).n_stored == 7);
    CHECK_EQ_INT(n_right(&r, 8), 7);
    rig_close(&r);
}

TEST(less_room_than_before_is_kept_to)
{
    struct rig r;
    rig_open(&r, room(8, false));
    for (uint32_t i = 0; i < 8; i++) put(&r, i);
    rig_close(&r);
    rig_open(&r, room(3, false));
    put(&r, 50);
    CHECK(each_file("segment-", NULL) <= 3);
    rig_close(&r);
}

/* ---- several processes ---- */

TEST(what_another_process_stores_is_found)
{
    struct rig a, b;
    rig_open(&a, room(16, true));
    rig_open(&b, room(16, true));
    for (uint32_t i = 0; i < 10; i++) put(&a, i);
    AWAIT(&b, stats(&b).n_stored == 10);
    CHECK_EQ_INT(n_right(&b, 10), 10);
    const struct kv_tier_put again = { .of = block_named(4, 0), .block = 0, .tag = 1 };
    CHECK_STATUS(b.tier->ops->put(b.tier, &again), ERR_CONFLICT); /* it is stored once */
    rig_close(&a);
    for (int i = 0; i < 50; i++) turn(&b);
    CHECK_EQ_INT(n_right(&b, 10), 10);
    rig_close(&b);
}

/* A segment that another process writes to is listed again and again; what that takes does not
 * grow. */
TEST(segments_that_change_all_the_time_take_no_more_room)
{
    struct rig a, b;
    rig_open(&a, room(16, true));
    rig_open(&b, room(16, true));
    for (uint32_t i = 0; i < 30; i++) {
        put(&a, i);
        AWAIT(&b, has(&b, i));
    }
    const struct disk_slots *s = &((struct kv_tier_disk *)b.tier)->others;
    CHECK_EQ_INT(s->n_segments, 10);
    CHECK_EQ_INT(tier_index_add_slots(s->index, 0),
                 10 * SEGMENT_SLOTS + s->n_holes * SEGMENT_SLOTS);
    CHECK(s->n_holes <= 1);
    CHECK_EQ_INT(n_right(&b, 30), 30);
    rig_close(&a);
    rig_close(&b);
}

/* A process that is stopped while it has the folder's lock: others cannot make segments, and go
 * on. */
TEST(a_lock_that_is_held_holds_nobody)
{
    struct rig r, late;
    struct err err = { 0 };
    char path[4300];
    rig_open(&r, room(16, true));
    snprintf(path, sizeof path, "%s/lock", folder());
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && flock(fd, LOCK_EX) == 0);
    const struct kv_tier_put p = { .of = block_named(1, 0), .block = 0, .tag = 1 };
    fill(&r, 0, 1);
    AWAIT(&r, r.tier->ops->put(r.tier, &p) == ERR_FULL);
    CHECK(stats(&r).n_errors > 0);
    rig_open_pool(&late, "cpu", DTYPE_BF16, DTYPE_BF16);
    CHECK_STATUS(open_tier(&late, room(16, true), NULL, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "locked") != NULL);
    device_mem_free(late.device, &late.pool);
    device_close(late.device);
    rig_close(&r);
    close(fd);
}

/* However much room there is: each segment takes two file descriptors. */
TEST(segments_are_few)
{
    const uint64_t gib = UINT64_C(1) << 30, slot = 1 << 20;
    for (uint64_t room = gib / 8; room <= 4096 * gib; room *= 2) {
        const struct disk_superblock s = { .slot_bytes = slot,
                                           .n_slots = disk_segment_slots(room, slot) };
        const uint64_t n = room / disk_file_bytes(&s);
        if (n < 16 || n > 66) test_fail(__FILE__, __LINE__, "%u segments", (unsigned)n);
    }
    CHECK_EQ_INT(disk_segment_slots(5000, slot), 1);
    CHECK_EQ_INT(disk_segment_slots(UINT64_MAX, KV_SLOT_ALIGN), DISK_SLOTS_MAX);
}

/* One evicts and writes while the other reads the same slots: it gets what it asked for, or is told
 * that it is gone. */
TEST(readers_and_a_writer_of_the_same_slots)
{
    enum { N = 40 };
    struct rig r;
    uint32_t n_good = 0;
    rig_open(&r, room(16, true));
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct rig w;
        rig_open(&w, room(8, false)); /* little room: it evicts all the time */
        for (uint32_t k = 0;; k++)
            if (!has(&w, k % N)) put(&w, k % N);
    }
    /* A writer that is not scheduled has stored nothing yet: the first good read is waited for. */
    const uint64_t end = clock_ms() + (test_runs_long() ? 3000 : 800);
    while (clock_ms() < end || (n_good == 0 && clock_ms() < end + 20000)) {
        turn(&r);
        n_good += n_right(&r, N);
    }
    CHECK_EQ_INT(kill(pid, SIGKILL), 0);
    CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
    CHECK(n_good > 0);
    rig_close(&r);
}

/* One that comes late gets its share of the room from one that has all. */
TEST(room_is_shared)
{
    struct rig a, b;
    rig_open(&a, room(8, false));
    for (uint32_t i = 0; i < 8; i++) put(&a, i);
    CHECK_EQ_INT(stats(&a).n_slots, 8);
    rig_open(&b, room(8, false));
    AWAIT(&a, (turn(&b), stats(&a).n_slots <= 4));
    for (uint32_t i = 20; i < 24; i++) {
        const struct kv_tier_put p = { .of = block_named(i, 0), .block = 0, .tag = i };
        enum status st;
        fill(&b, 0, i);
        AWAIT(&b, (turn(&a), st = b.tier->ops->put(b.tier, &p)) == OK);
        AWAIT(&b, has(&b, i));
    }
    CHECK_EQ_INT(each_file("segment-", NULL), 8);
    CHECK(n_right(&b, 8) >= 4);
    rig_close(&a);
    rig_close(&b);
}

/* ---- broken and full ---- */

/* An I/O that fails or hangs when the test says so, around the one by threads. */
static _Atomic int the_error;  /* of every operation; 0: none */
static _Atomic bool they_hang; /* operations are not over */

struct bad_io {
    struct disk_io base;
    struct disk_io *inner;
};

static const struct disk_io_ops bad_io_ops;

static enum status bad_create(uint32_t depth, struct disk_io **out, struct err *err)
{
    struct bad_io *b = MEM_NEW(struct bad_io);
    b->base.ops = &bad_io_ops;
    *out = &b->base;
    return disk_io_threads_ops.create(depth, &b->inner, err);
}

static bool bad_free(struct disk_io *io, uint32_t ms)
{
    struct bad_io *b = (struct bad_io *)io;
    const bool is_freed = b->inner->ops->free(b->inner, ms);
    mem_free(b);
    return is_freed;
}

static void bad_submit(struct disk_io *io, struct disk_io_op *op)
{
    struct bad_io *b = (struct bad_io *)io;
    b->inner->ops->submit(b->inner, op);
    io->n_running = b->inner->n_running;
}

static struct disk_io_op *bad_wait(struct disk_io *io, uint32_t ms)
{
    struct bad_io *b = (struct bad_io *)io;
    if (atomic_load(&they_hang)) {
        usleep(ms * 1000);
        return NULL;
    }
    struct disk_io_op *op = b->inner->ops->wait(b->inner, ms);
    io->n_running = b->inner->n_running;
    if (op && atomic_load(&the_error)) op->error = atomic_load(&the_error);
    return op;
}

static const struct disk_io_ops bad_io_ops = {
    .name = "bad",
    .create = bad_create,
    .free = bad_free,
    .submit = bad_submit,
    .wait = bad_wait,
};

static void rig_open_bad(struct rig *r)
{
    struct err err = { 0 };
    rig_open_pool(r, "cpu", DTYPE_BF16, DTYPE_BF16);
    CHECK_OK(open_tier(r, room(16, true), &bad_io_ops, &err));
}

TEST(an_error_switches_it_off_for_a_while)
{
    struct rig r;
    const struct kv_tier_put p = { .of = block_named(9, 0), .block = 0, .tag = 1 };
    rig_open_bad(&r);
    for (uint32_t i = 0; i < 6; i++) put(&r, i);
    atomic_store(&the_error, 5 /* EIO */);
    CHECK_STATUS(get(&r, 0, 6, 1).status, ERR_IO);
    CHECK(stats(&r).is_off && stats(&r).n_errors == 1);
    CHECK(!has(&r, 0));
    CHECK_STATUS(r.tier->ops->put(r.tier, &p), ERR_UNAVAILABLE);
    struct kv_tier_get g = get_of(0, 2, 1, 99);
    CHECK_STATUS(r.tier->ops->get(r.tier, &g), ERR_UNAVAILABLE);
    atomic_store(&the_error, 0);
    AWAIT(&r, !stats(&r).is_off);
    CHECK_EQ_INT(get(&r, 0, 6, 1).n_good, 6);
    atomic_store(&the_error, 28 /* ENOSPC */);
    CHECK_OK(try_put(&r, &p));
    AWAIT(&r, stats(&r).is_off);
    CHECK(!has(&r, 9));
    atomic_store(&the_error, 0);
    AWAIT(&r, !stats(&r).is_off);
    put(&r, 9);
    rig_close(&r);
}

/* A disk that does not come back: gets can be cancelled, and the tier ends. */
TEST(a_hung_disk_holds_nobody)
{
    struct rig r;
    rig_open_bad(&r);
    for (uint32_t i = 0; i < 6; i++) put(&r, i);
    atomic_store(&they_hang, true);
    const struct kv_tier_get g = get_of(0, 6, 1, 99);
    CHECK_OK(r.tier->ops->get(r.tier, &g));
    usleep(20000);
    const uint64_t begin = clock_ms();
    r.tier->ops->cancel(r.tier, 99);
    CHECK(clock_ms() - begin < 20000); /* though the disk hangs for ever */
    for (int32_t b = 1; b <= 6; b++) fill(&r, b, 500);
    rig_close(&r); /* leaves behind what the disk may still use, */
    _exit(0);      /* which is no leak */
}

/* The disk does not end a write, and so many slots wait to be emptied that nothing else may wait
 * for it: what cannot be written is not stored. */
TEST(a_hung_disk_with_much_to_do_takes_no_more)
{
    enum { N = 40 };
    static char bytes[LAYERS * 4096];
    struct rig r;
    struct kv_tier_done d;
    rig_open_bad(&r);
    for (uint32_t i = 0; i < N; i++) put(&r, i);
    atomic_store(&they_hang, true);
    struct kv_tier_put p = { .of = block_named(100, 0), .block = -1, .slot = bytes, .tag = 1 };
    CHECK_OK(r.tier->ops->put(r.tier, &p));
    for (uint32_t i = 0; i < N; i++) {
        const struct hash128 key = block_named(i, 0).key;
        r.tier->ops->drop(r.tier, &key);
    }
    p.of = block_named(101, 0);
    CHECK_STATUS(r.tier->ops->put(r.tier, &p), ERR_BUSY);
    p = (struct kv_tier_put){ .of = block_named(102, 0), .block = 0, .tag = 2 };
    CHECK_OK(r.tier->ops->put(r.tier, &p));
    AWAIT(&r, !((struct kv_tier_disk *)r.tier)->put_stages.is_used[0]);
    CHECK(!has(&r, 102));
    atomic_store(&they_hang, false);
    while (r.tier->ops->poll(r.tier, &d)) {}
    rig_close(&r);
}

/* A limit on the size of files stands for a full disk: segments cannot be made. */
TEST(a_full_disk_leaves_what_there_is)
{
    struct rig r;
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    rig_open(&r, room(16, true));
    for (uint32_t i = 0; i < 3; i++) put(&r, i);
    CHECK_EQ_INT(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const struct rlimit none = { 1024, limit.rlim_max };
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &none), 0);
    const struct kv_tier_put p = { .of = block_named(50, 0), .block = 0, .tag = 1 };
    fill(&r, 0, 50);
    for (int i = 0; i < 200; i++) {
        const enum status st = r.tier->ops->put(r.tier, &p);
        CHECK(st == ERR_BUSY || st == ERR_CONFLICT || st == ERR_FULL || st == ERR_UNAVAILABLE ||
              st == OK);
        turn(&r);
    }
    CHECK(stats(&r).n_errors > 0);
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    AWAIT(&r, !stats(&r).is_off);
    CHECK(n_right(&r, 3) >= 2); /* one may have been given up for number 50 */
    rig_close(&r);
}

/* ---- refusals ---- */

static void refuses(const char *path, uint64_t bytes, const char *field, const char *sentence)
{
    struct rig r;
    struct err err = { 0 };
    rig_open_pool(&r, "cpu", DTYPE_BF16, DTYPE_BF16);
    const struct kv_tier_options o = options_of(&r);
    const struct tier_disk_options d = { .folder = path, .bytes = bytes };
    CHECK_STATUS(kv_tier_disk_create(&o, &d, &r.tier, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.field, field);
    if (!strstr(err.text, sentence)) test_fail(__FILE__, __LINE__, "%s", err.text);
    device_mem_free(r.device, &r.pool);
    device_close(r.device);
}

TEST(folders_that_cannot_be_used_are_refused)
{
    char path[4300];
    snprintf(path, sizeof path, "%s/file", test_tmpdir());
    close(open(path, O_CREAT | O_WRONLY, 0600));
    refuses(path, 1 << 20, "kv-cache-dir", "Not a directory");
    refuses("/proc/kv", 1 << 20, "kv-cache-dir", "/proc/kv");
    refuses(folder(), 5000, "kv-cache-disk", "hold no KV block");
}

/* `part` of what disk_folder_check says of a path below `at`; NULL: it may be used. */
static void check_says(const char *at, const char *below, const char *part)
{
    struct err err = { 0 };
    char path[4300];
    snprintf(path, sizeof path, "%s%s", at, below);
    CHECK_STATUS(disk_folder_check(path, &err), (part ? ERR_CONFIG : OK));
    if (part && (strcmp(err.field, "kv-cache-dir") != 0 || !strstr(err.text, part)))
        test_fail(__FILE__, __LINE__, "%s: %s", err.field, err.text);
}

TEST(a_folder_is_checked_and_not_made)
{
    char path[4300], longest[4200];
    const char *at = test_tmpdir(); /* another one with each call */
    struct err err;
    struct stat st;
    snprintf(path, sizeof path, "%s/file", at);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    check_says(at, "", NULL);
    check_says(at, "/", NULL);
    check_says(at, "/new/of/many/", NULL);
    snprintf(path, sizeof path, "%s/new", at);
    CHECK(stat(path, &st) != 0);
    check_says(at, "/file", "cannot be used: Not a directory");
    check_says(at, "/file/below", "cannot be made: Not a directory");
    memset(longest, 'a', sizeof longest - 1);
    longest[0] = '/';
    longest[sizeof longest - 1] = 0;
    check_says(at, longest, "File name too long");
    CHECK_STATUS(disk_folder_check("", &err), ERR_CONFIG);
    CHECK_OK(disk_folder_check("relative/path", &err));
    CHECK_OK(disk_folder_check("relative", &err));
}

TEST(nobody_else_reads_the_folder)
{
    struct rig r;
    struct stat st;
    rig_open(&r, room(16, true));
    put(&r, 1);
    CHECK_EQ_INT(stat(folder(), &st), 0);
    CHECK_EQ_INT(st.st_mode & 0077, 0);
    rig_close(&r);
}

TEST_MAIN(CASE(a_restarted_node_finds_its_blocks), CASE(segments_of_a_dead_process_are_taken_over),
          CASE(a_killed_writer_leaves_blocks_that_are_right),
          CASE(flipped_bytes_are_never_an_answer),
          CASE(bytes_that_change_while_it_runs_are_noticed),
          CASE(segments_that_somebody_removes_are_left),
          CASE(files_of_another_model_are_left_alone_until_room_is_needed),
          CASE(less_room_than_before_is_kept_to), CASE(what_another_process_stores_is_found),
          CASE(segments_that_change_all_the_time_take_no_more_room),
          CASE(a_lock_that_is_held_holds_nobody), CASE(segments_are_few),
          CASE(readers_and_a_writer_of_the_same_slots), CASE(room_is_shared),
          CASE(an_error_switches_it_off_for_a_while), CASE(a_hung_disk_holds_nobody),
          CASE(a_hung_disk_with_much_to_do_takes_no_more), CASE(a_full_disk_leaves_what_there_is),
          CASE(folders_that_cannot_be_used_are_refused), CASE(a_folder_is_checked_and_not_made),
          CASE(nobody_else_reads_the_folder))
