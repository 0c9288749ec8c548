/* test_tier_ranks.c - tiers of a node of three ranks: what becomes of a block that one rank lacks,
 * has changed, gets late or never, and of ranks that fall silent (shared/kv/tier/ranks/). That they
 * are tiers like others is shown by tests/conformance/test_kv_tiers.c. */
#include "shared/base/metrics.h"
#include "shared/base/thread.h"
#include "shared/kv/tier/kv_store.h"
#include "tests/fixtures/tier_rig.h"

enum { HELD_MAX = 256, RANKS_LATE_MS = 150, RANKS_SOON_MS = 2000 };

/* The way from the first rank to one of the others: it can be closed, and what is sent meanwhile
 * comes when it is open again. */
struct way {
    pthread_mutex_t lock;
    struct tier_follower *to;
    bool closed;
    uint32_t n;
    struct tier_command held[HELD_MAX];
    struct hash128 keys[HELD_MAX][SLOTS];
    int32_t blocks[HELD_MAX][SLOTS];
};

struct ranks_rig {
    struct rig r;
    struct way ways[OTHERS_MAX];
    struct kv_tier *host[OTHERS_MAX], *disk[OTHERS_MAX]; /* of the others */
    struct kv_tier_ops refusing[OTHERS_MAX];             /* whose puts find no room */
    bool refuses[OTHERS_MAX];
    bool has_disk;
    char folder[4200]; /* of the first rank's disk, once it has one */
};

static void hold(struct way *w, const struct tier_command *c)
{
    CHECK(w->n < HELD_MAX && (c->kind != TIER_GET || c->n <= SLOTS));
    struct tier_command *h = &w->held[w->n];
    *h = *c;
    if (c->kind == TIER_GET) {
        memcpy(w->keys[w->n], c->keys, c->n * sizeof *c->keys);
        memcpy(w->blocks[w->n], c->blocks, c->n * sizeof *c->blocks);
        h->keys = w->keys[w->n];
        h->blocks = w->blocks[w->n];
    }
    w->n++;
}

static void send_on_ways(void *arg, const struct tier_command *c)
{
    struct ranks_rig *g = arg;
    for (uint32_t i = 0; i < OTHERS_MAX; i++) {
        struct way *w = &g->ways[i];
        pthread_mutex_lock(&w->lock);
        if (w->closed) hold(w, c);
        else CHECK_OK(tier_follow_command(w->to, c));
        pthread_mutex_unlock(&w->lock);
    }
}

static void set_closed(struct way *w, bool closed)
{
    pthread_mutex_lock(&w->lock);
    w->closed = closed;
    for (uint32_t i = 0; i < w->n && !closed; i++)
        CHECK_OK(tier_follow_command(w->to, &w->held[i]));
    if (!closed) w->n = 0;
    pthread_mutex_unlock(&w->lock);
}

static void on_silent_rank(void *arg) { ((struct ranks_rig *)arg)->r.n_silent++; }

static enum status put_refused(struct kv_tier *t, const struct kv_tier_put *p)
{
    (void)t, (void)p;
    return ERR_FULL;
}

struct wrapping {
    struct ranks_rig *g;
    uint32_t i;
};

/* Notes the tiers of other rank i. */
static struct kv_tier *note_tier(void *arg, struct kv_tier *t)
{
    const struct wrapping *w = arg;
    struct ranks_rig *g = w->g;
    if (t->ops->kind == KV_TIER_DISK) g->disk[w->i] = t;
    else g->host[w->i] = t;
    if (!g->refuses[w->i]) return t;
    g->refusing[w->i] = *t->ops;
    g->refusing[w->i].put = put_refused;
    t->ops = &g->refusing[w->i];
    return t;
}

static struct tier_disk_options disk_at(char folder[4200])
{
    if (!folder[0]) snprintf(folder, 4200, "%s/kv", test_tmpdir());
    return (struct tier_disk_options){ .folder = folder,
                                       .bytes = SLOTS * (disk_data_begin(1) + KV_SLOT_ALIGN),
                                       .scan_ms = 50 };
}

static void add_other(struct ranks_rig *g, uint32_t i, uint32_t n_slots)
{
    struct err err = { 0 };
    char folder[4200] = "";
    struct wrapping w = { g, i };
    struct tier_follow_options f = follow_options_of(&g->r, i);
    f.host_bytes = n_slots * KV_SLOT_ALIGN;
    if (g->has_disk) f.disk = disk_at(folder);
    f.wrap = note_tier;
    f.wrap_arg = &w;
    CHECK_OK(tier_follow_create(&f, &g->r.others[i].follower, &err));
    g->ways[i].to = g->r.others[i].follower;
    pthread_mutex_init(&g->ways[i].lock, NULL);
}

/* Host memory of SLOTS blocks on the first rank, and of n_slots on the others. */
static void open_ranks(struct ranks_rig *g, uint32_t n_slots, uint32_t silent_ms)
{
    struct err err = { 0 };
    const struct tier_ranks_options o = { .n_followers = OTHERS_MAX,
                                          .send = send_on_ways,
                                          .on_silent = on_silent_rank,
                                          .arg = g,
                                          .silent_ms = silent_ms };
    rig_open_pool(&g->r, "cpu", DTYPE_BF16, DTYPE_BF16);
    rig_add_ranks(&g->r, OTHERS_MAX, 0);
    tier_ranks_free(g->r.ranks);
    g->r.ranks = tier_ranks_create(&o);
    for (uint32_t i = 0; i < OTHERS_MAX; i++) add_other(g, i, n_slots);
    const struct kv_tier_options t = options_of(&g->r);
    CHECK_OK(kv_tier_host_create(&t, SLOTS * KV_SLOT_ALIGN, &g->r.tier, &err));
    g->r.tier = tier_ranks_wrap(g->r.ranks, g->r.tier, on_wake, &g->r);
}

static void close_ranks(struct ranks_rig *g)
{
    rig_close(&g->r);
    for (uint32_t i = 0; i < OTHERS_MAX; i++) pthread_mutex_destroy(&g->ways[i].lock);
}

static void sleep_ms(uint32_t ms)
{
    const struct timespec pause = { ms / 1000, (long)(ms % 1000) * 1000000 };
    nanosleep(&pause, NULL);
}

static void check_no_report(struct rig *r, uint32_t ms)
{
    struct kv_tier_done d;
    for (const uint64_t end = clock_ms() + ms; clock_ms() < end; sleep_ms(1))
        CHECK(!r->tier->ops->poll(r->tier, &d));
}

/* ---- blocks that are not the same on all ranks ---- */

TEST(what_one_rank_lacks_is_dropped_on_all)
{
    static struct ranks_rig g;
    open_ranks(&g, SLOTS, 0);
    for (uint32_t i = 0; i < 5; i++) put(&g.r, i);
    CHECK_OK(tier_follow_command(
        g.ways[1].to, &(struct tier_command){ .kind = TIER_DROP, .of = block_named(2, 0) }));
    const struct kv_tier_done d = get(&g.r, 0, 4, 5);
    CHECK_STATUS(d.status, ERR_NOT_FOUND);
    CHECK_EQ_INT(d.n_good, 2);
    CHECK(holds(&g.r, 5, 0) && holds(&g.r, 6, 1));
    CHECK(has(&g.r, 0) && has(&g.r, 1) && has(&g.r, 4));
    CHECK(!has(&g.r, 2) && !has(&g.r, 3)); /* it may lack the rest of what was asked for as well */
    put(&g.r, 2);
    put(&g.r, 3);
    CHECK_EQ_INT(get(&g.r, 0, 5, 5).n_good, 5);
    for (uint32_t i = 0; i < 5; i++) CHECK(holds(&g.r, 5 + (int32_t)i, i));
    CHECK_EQ_INT(stats(&g.r).n_errors, 0);
    close_ranks(&g);
}

TEST(bytes_that_changed_on_one_rank_are_noticed)
{
    static struct ranks_rig g;
    struct kv_tier_pin pin;
    const struct hash128 key = block_named(2, 0).key;
    open_ranks(&g, SLOTS, 0);
    for (uint32_t i = 0; i < 4; i++) put(&g.r, i);
    struct kv_tier *other = g.host[1]; /* its thread sleeps */
    CHECK(other->ops->pin(other, &key, &pin));
    other->ops->unpin(other, &pin);
    ((char *)(uintptr_t)pin.bytes)[17] ^= 0x40;
    const struct kv_tier_done d = get(&g.r, 0, 4, 5);
    CHECK_STATUS(d.status, ERR_CHECKSUM);
    CHECK_EQ_INT(d.n_good, 2);
    CHECK(holds(&g.r, 5, 0) && holds(&g.r, 6, 1));
    CHECK(!has(&g.r, 2) && has(&g.r, 3));
    CHECK_EQ_INT(stats(&g.r).n_bad_checksums, 1);
    put(&g.r, 2);
    CHECK_EQ_INT(get(&g.r, 0, 4, 5).n_good, 4);
    close_ranks(&g);
}

TEST(a_put_that_fails_on_one_rank_fails_on_all)
{
    static struct ranks_rig g = { .refuses = { [1] = true } };
    open_ranks(&g, SLOTS, 0);
    for (uint32_t i = 0; i < 3; i++) {
        const struct kv_tier_put p = { .of = block_named(i, 0), .block = 0, .tag = i };
        fill(&g.r, 0, i);
        CHECK_OK(try_put(&g.r, &p));
        set_closed(&g.ways[0], i == 2); /* the last DROP does not come */
        const struct kv_tier_done d = await(&g.r);
        CHECK_STATUS(d.status, ERR_FULL);
        CHECK_EQ_INT(d.tag, i);
        CHECK(!has(&g.r, i));
    }
    for (uint32_t i = 0; i < 3; i++) {
        const struct hash128 key = block_named(i, 0).key;
        CHECK(g.host[0]->ops->has(g.host[0], &key) == (i == 2));
    }
    CHECK_EQ_INT(stats(&g.r).n_errors, 0);
    close_ranks(&g);
}

/* Others with more room forget what the first forgets. */
TEST(evicted_blocks_are_dropped_on_all)
{
    static struct ranks_rig g;
    struct kv_tier_stats s;
    open_ranks(&g, 4 * SLOTS, 0);
    for (uint32_t i = 0; i < 4 * SLOTS; i++) put(&g.r, i);
    CHECK_EQ_INT(stats(&g.r).n_stored, SLOTS);
    for (uint32_t k = 0; k < OTHERS_MAX; k++) {
        g.host[k]->ops->stats(g.host[k], &s); /* the last PUT was answered after the last DROP */
        CHECK_EQ_INT(s.n_stored, SLOTS);
        CHECK_EQ_INT(s.n_evicted, 0);
    }
    close_ranks(&g);
}

/* ---- ranks that answer late ---- */

TEST(a_put_counts_when_all_ranks_have_it)
{
    static struct ranks_rig g;
    open_ranks(&g, SLOTS, 0);
    put(&g.r, 9); /* all ranks have looked */
    set_closed(&g.ways[1], true);
    const struct kv_tier_put p = { .of = block_named(1, 0), .block = 0, .tag = 4 };
    fill(&g.r, 0, 1);
    CHECK_OK(try_put(&g.r, &p));
    check_no_report(&g.r, RANKS_LATE_MS); /* its bytes are still needed */
    CHECK(!has(&g.r, 1));
    CHECK_STATUS(g.r.tier->ops->put(g.r.tier, &p), ERR_CONFLICT);
    set_closed(&g.ways[1], false);
    CHECK_OK(await(&g.r).status);
    CHECK(has(&g.r, 1));
    CHECK_EQ_INT(get(&g.r, 1, 1, 7).n_good, 1);
    CHECK(holds(&g.r, 7, 1));
    close_ranks(&g);
}

TEST(nothing_is_found_before_all_ranks_have_looked)
{
    static struct ranks_rig g;
    open_ranks(&g, SLOTS, 0);
    const struct kv_tier_put p = { .of = block_named(1, 0), .block = 0, .tag = 4 };
    set_closed(&g.ways[0], true);
    check_no_report(&g.r, RANKS_LATE_MS);
    CHECK(stats(&g.r).is_looking);
    CHECK_STATUS(g.r.tier->ops->put(g.r.tier, &p), ERR_BUSY);
    set_closed(&g.ways[0], false);
    put(&g.r, 1);
    CHECK(has(&g.r, 1) && !stats(&g.r).is_looking);
    close_ranks(&g);
}

static void *open_late(void *arg)
{
    sleep_ms(RANKS_LATE_MS);
    set_closed(arg, false);
    return NULL;
}

/* The blocks belong to somebody else once cancel has returned, so a rank that begins its part of
 * the get only then must not write to them. */
TEST(a_cancel_waits_for_a_late_rank)
{
    static struct ranks_rig g;
    struct kv_tier_done d;
    pthread_t thread;
    open_ranks(&g, SLOTS, 0);
    for (uint32_t i = 0; i < SLOTS; i++) put(&g.r, i);
    for (uint64_t round = 0; round < 5; round++) {
        const struct kv_tier_get get_all = get_of(0, SLOTS, 1, 1000 + round);
        set_closed(&g.ways[1], true);
        CHECK_OK(g.r.tier->ops->get(g.r.tier, &get_all));
        CHECK_OK(thread_start(&thread, open_late, &g.ways[1]));
        const uint64_t begin = clock_ms();
        g.r.tier->ops->cancel(g.r.tier, get_all.tag);
        CHECK(clock_ms() - begin >= RANKS_LATE_MS / 2);
        for (int32_t b = 1; b <= SLOTS; b++) fill(&g.r, b, 40); /* somebody else's now */
        sleep_ms(10);
        for (int32_t b = 1; b <= SLOTS; b++) CHECK(holds(&g.r, b, 40));
        CHECK(!g.r.tier->ops->poll(g.r.tier, &d));
        pthread_join(thread, NULL);
    }
    CHECK_EQ_INT(g.r.n_silent, 0);
    CHECK_EQ_INT(get(&g.r, 0, SLOTS, 1).n_good, SLOTS);
    close_ranks(&g);
}

/* ---- ranks that do not answer any more ---- */

static void check_given_up(struct rig *r)
{
    const struct kv_tier_put p = { .of = block_named(20, 0), .block = 0, .tag = 5 };
    const struct kv_tier_get again = get_of(0, 2, 1, 8);
    CHECK(has(r, 0)); /* what a plan found stays for its load, which is refused */
    CHECK_STATUS(r->tier->ops->put(r->tier, &p), ERR_UNAVAILABLE);
    CHECK_STATUS(r->tier->ops->get(r->tier, &again), ERR_UNAVAILABLE);
    CHECK(stats(r).is_off);
}

TEST(a_rank_that_is_silent_is_lost)
{
    static struct ranks_rig g;
    open_ranks(&g, SLOTS, RANKS_SOON_MS);
    for (uint32_t i = 0; i < 4; i++) put(&g.r, i);
    set_closed(&g.ways[0], true);
    const struct kv_tier_get one = get_of(0, 2, 1, 6);
    CHECK_OK(g.r.tier->ops->get(g.r.tier, &one));
    const struct kv_tier_get other = get_of(2, 2, 5, 7);
    CHECK_OK(g.r.tier->ops->get(g.r.tier, &other));
    const struct kv_tier_put p = { .of = block_named(10, 0), .block = 0, .tag = 5 };
    CHECK_OK(try_put(&g.r, &p));
    uint64_t begin = clock_ms();
    g.r.tier->ops->cancel(g.r.tier, one.tag);
    CHECK(clock_ms() - begin >= RANKS_SOON_MS / 2);
    CHECK_EQ_INT(g.r.n_silent, 1);
    begin = clock_ms();
    g.r.tier->ops->cancel(g.r.tier, other.tag);
    CHECK(clock_ms() - begin < RANKS_SOON_MS);
    CHECK_EQ_INT(g.r.n_silent, 1);
    check_given_up(&g.r);
    set_closed(&g.ways[0], false);
    const struct kv_tier_done d = await(&g.r); /* the put, whose block may go at last */
    CHECK(d.kind == KV_TIER_PUT && d.tag == p.tag);
    check_no_report(&g.r, 20); /* what it says of the gets, nobody asks for */
    close_ranks(&g);
}

static void *abort_late(void *arg)
{
    sleep_ms(RANKS_LATE_MS);
    tier_ranks_abort(arg);
    return NULL;
}

TEST(nobody_waits_when_the_node_ends)
{
    static struct ranks_rig g;
    pthread_t thread;
    open_ranks(&g, SLOTS, 60000);
    for (uint32_t i = 0; i < 4; i++) put(&g.r, i);
    set_closed(&g.ways[0], true);
    const struct kv_tier_get one = get_of(0, 2, 1, 6);
    CHECK_OK(g.r.tier->ops->get(g.r.tier, &one));
    CHECK_OK(thread_start(&thread, abort_late, g.r.ranks));
    const uint64_t begin = clock_ms();
    g.r.tier->ops->cancel(g.r.tier, one.tag);
    CHECK(clock_ms() - begin < 30000); /* a rank may be late by a minute */
    pthread_join(thread, NULL);
    CHECK_EQ_INT(g.r.n_silent, 0);
    check_given_up(&g.r);
    close_ranks(&g);
}

/* ---- from host memory to a disk ---- */

/* A second tier of the first rank, on a disk. */
static void open_disk(struct ranks_rig *g, struct rig *disk)
{
    struct err err = { 0 };
    *disk = g->r; /* the same pools */
    const struct kv_tier_options t = options_of(disk);
    const struct tier_disk_options d = disk_at(g->folder);
    CHECK_OK(kv_tier_disk_create(&t, &d, &disk->tier, &err));
    disk->tier = tier_ranks_wrap(g->r.ranks, disk->tier, on_wake, &g->r);
}

/* From the slot of the first rank's host memory. */
static enum status put_slot(struct ranks_rig *g, struct rig *disk, uint32_t i)
{
    struct kv_tier_pin pin;
    const struct hash128 key = block_named(i, 0).key;
    CHECK(g->r.tier->ops->pin(g->r.tier, &key, &pin));
    const struct kv_tier_put p = { .of = block_named(i, 0),
                                   .block = -1,
                                   .slot = pin.bytes,
                                   .checksum = pin.checksum,
                                   .tag = 100 + i };
    CHECK_OK(try_put(disk, &p));
    const struct kv_tier_done d = await(disk);
    g->r.tier->ops->unpin(g->r.tier, &pin);
    CHECK_EQ_INT(d.tag, 100 + i);
    return d.status;
}

TEST(each_rank_takes_its_own_bytes_to_its_disk)
{
    static struct ranks_rig g = { .has_disk = true };
    static struct rig disk;
    open_ranks(&g, SLOTS, 0);
    open_disk(&g, &disk);
    for (uint32_t i = 0; i < 4; i++) put(&g.r, i);
    for (uint32_t i = 0; i < 4; i++) CHECK_OK(put_slot(&g, &disk, i));
    for (uint32_t i = 0; i < 4; i++) await_stored(&disk, i);
    CHECK_EQ_INT(get(&disk, 0, 4, 8).n_good, 4);
    for (uint32_t i = 0; i < 4; i++) CHECK(holds(&g.r, 8 + (int32_t)i, i));
    put(&g.r, 5);
    CHECK_OK(tier_follow_command(
        g.ways[0].to, &(struct tier_command){ .kind = TIER_DROP, .of = block_named(5, 0) }));
    CHECK_STATUS(put_slot(&g, &disk, 5), ERR_NOT_FOUND);
    check_no_report(&disk, 50);
    CHECK(!has(&disk, 5) && has(&g.r, 5));
    put(&disk, 6); /* from the pool */
    CHECK_EQ_INT(get(&disk, 6, 1, 8).n_good, 1);
    CHECK(holds(&g.r, 8, 6));
    disk.tier->ops->free(disk.tier);
    close_ranks(&g);
}

static void await_found(struct rig *disk, uint32_t n)
{
    struct kv_tier_done d;
    for (const uint64_t end = clock_ms() + WAIT_MS; stats(disk).n_stored < n; sleep_ms(1)) {
        CHECK(clock_ms() < end && !disk->tier->ops->poll(disk->tier, &d));
        disk->tier->ops->tick(disk->tier, clock_ms());
    }
}

/* The first rank's disk is found again, and another rank may still look for its part. */
TEST(a_disk_is_found_again_when_all_ranks_have_looked)
{
    static struct ranks_rig g = { .has_disk = true };
    static struct rig disk;
    open_ranks(&g, SLOTS, 0);
    open_disk(&g, &disk);
    for (uint32_t i = 0; i < 3; i++) put(&disk, i);
    disk.tier->ops->free(disk.tier);
    set_closed(&g.ways[1], true);
    open_disk(&g, &disk);
    await_found(&disk, 3);
    CHECK(!has(&disk, 0) && stats(&disk).is_looking);
    set_closed(&g.ways[1], false);
    for (uint32_t i = 0; i < 3; i++) await_stored(&disk, i);
    CHECK(!stats(&disk).is_looking);
    CHECK_EQ_INT(get(&disk, 0, 3, 8).n_good, 3);
    for (uint32_t i = 0; i < 3; i++) CHECK(holds(&g.r, 8 + (int32_t)i, i));
    disk.tier->ops->free(disk.tier);
    close_ranks(&g);
}

/* ---- what makes no sense ---- */

static void not_asked(void *arg, const struct tier_answer *a)
{
    (void)arg, (void)a;
    test_fail(__FILE__, __LINE__, "answered");
}

TEST(commands_that_make_no_sense_are_refused)
{
    struct rig r;
    struct err err = { 0 };
    struct tier_follower *f;
    const struct hash128 keys[2] = { { 0 } };
    const int32_t low[2] = { 0, -1 }, high[2] = { 0, BLOCKS };
    rig_open_pool(&r, "cpu", DTYPE_BF16, DTYPE_BF16);
    struct tier_follow_options o = { .layout = r.layout,
                                     .device = r.device,
                                     .pool = r.pool.ptr,
                                     .slot_dtype = r.slot_dtype,
                                     .host_bytes = SLOTS * KV_SLOT_ALIGN,
                                     .answer = not_asked };
    CHECK_OK(tier_follow_create(&o, &f, &err));
    const struct tier_command bad[] = {
        { .kind = TIER_COMMANDS },
        { .kind = TIER_LOOK, .tier = KV_TIER_KINDS },
        { .kind = TIER_PUT, .block = BLOCKS },
        { .kind = TIER_PUT, .block = -1 },
        { .kind = TIER_GET },
        { .kind = TIER_GET, .n = 2, .keys = keys, .blocks = low },
        { .kind = TIER_GET, .n = 2, .keys = keys, .blocks = high },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++)
        CHECK_STATUS(tier_follow_command(f, &bad[i]), ERR_INVALID);
    CHECK_OK(tier_follow_command(f, &(struct tier_command){ .kind = TIER_CANCEL, .id = 77 }));
    sleep_ms(20);
    tier_follow_free(f);
    device_mem_free(r.device, &r.pool);
    device_close(r.device);
}

/* ---- as the engine's store uses them ---- */

static void no_wake(void *arg) { (void)arg; }

static struct kv_store *open_store(struct rig *r, struct kv_pool *pool, struct metrics *m)
{
    struct kv_store *s;
    struct err err = { 0 };
    const struct kv_store_options o = { .host_bytes = SLOTS * KV_SLOT_ALIGN,
                                        .ranks = r->ranks,
                                        .always = true };
    const struct kv_store_of of = { .layout = r->layout,
                                    .device = r->device,
                                    .memory = r->pool.ptr,
                                    .pool = pool,
                                    .metrics = m,
                                    .wake = no_wake };
    CHECK_OK(kv_store_create(&o, &of, &s, &err));
    return s;
}

/* Offers two blocks of the pool, and waits until a plan finds them. */
static void plan_two(struct kv_store *s, struct kv_pool *pool, struct hash128 keys[2],
                     struct kv_store_plan *plan)
{
    int32_t blocks[2];
    CHECK_OK(kv_pool_alloc(pool, 2, blocks));
    for (uint32_t i = 0; i < 2; i++) {
        const struct tier_block b = block_named(i, 0);
        keys[i] = b.key;
        kv_pool_publish(pool, blocks[i], b.key);
        kv_store_offer(s, &b);
    }
    for (uint64_t end = clock_ms() + WAIT_MS; plan->n < 2 && clock_ms() < end; sleep_ms(1)) {
        kv_store_run(s);
        *plan = (struct kv_store_plan){ 0 };
        kv_store_plan(s, keys, 2, 1, plan);
    }
    CHECK_EQ_INT(plan->n, 2);
    for (uint32_t i = 0; i < 2; i++) kv_pool_unref(pool, blocks[i]);
}

/* The loop may learn of a lost rank between a plan and its load. */
TEST(a_rank_is_lost_between_a_plan_and_its_load)
{
    static struct rig r;
    struct err err = { 0 };
    struct hash128 keys[2];
    struct kv_store_plan plan = { 0 };
    int32_t to[2];
    rig_open_pool(&r, "cpu", DTYPE_BF16, DTYPE_BF16);
    rig_add_ranks(&r, 1, 0);
    struct tier_follow_options f = follow_options_of(&r, 0);
    f.host_bytes = SLOTS * KV_SLOT_ALIGN;
    CHECK_OK(tier_follow_create(&f, &r.others[0].follower, &err));
    struct kv_pool *pool = kv_pool_create(BLOCKS, TOKENS, true);
    struct metrics *m = metrics_create();
    struct kv_store *s = open_store(&r, pool, m);
    plan_two(s, pool, keys, &plan);
    CHECK_OK(kv_pool_alloc(pool, 2, to));
    tier_ranks_abort(r.ranks);
    struct kv_load *l = kv_store_load(s, keys, to, &plan, NULL);
    CHECK_EQ_INT(l->n_good, 0);
    CHECK(kv_store_take_loaded(s) == l);
    kv_load_free(l);
    kv_store_free(s);
    tier_follow_free(r.others[0].follower);
    tier_ranks_free(r.ranks);
    metrics_free(m);
    kv_pool_destroy(pool);
    device_mem_free(r.device, &r.others[0].pool);
    device_mem_free(r.device, &r.pool);
    device_close(r.device);
}

TEST_MAIN(CASE(what_one_rank_lacks_is_dropped_on_all),
          CASE(bytes_that_changed_on_one_rank_are_noticed),
          CASE(a_put_that_fails_on_one_rank_fails_on_all), CASE(evicted_blocks_are_dropped_on_all),
          CASE(a_put_counts_when_all_ranks_have_it),
          CASE(nothing_is_found_before_all_ranks_have_looked), CASE(a_cancel_waits_for_a_late_rank),
          CASE(a_rank_that_is_silent_is_lost), CASE(nobody_waits_when_the_node_ends),
          CASE(each_rank_takes_its_own_bytes_to_its_disk),
          CASE(a_disk_is_found_again_when_all_ranks_have_looked),
          CASE(a_rank_is_lost_between_a_plan_and_its_load),
          CASE(commands_that_make_no_sense_are_refused))
