/* test_kv_tiers.c - what every tier behind the KV pool must do (shared/kv/tier/kv_tier.h), with a
 * pool in host memory and one on a GPU. Those of a node of several ranks are tiers like others. */
#include "kernels/kv_rows.h"
#include "tests/fixtures/tier_rig.h"

/* What a tier is called, and how one with room for SLOTS blocks is made. */
struct kind {
    const char *name;
    enum status (*create)(struct rig *r, struct err *err);
};

static enum status create_mem(struct rig *r, struct err *err)
{
    const struct kv_tier_options o = options_of(r);
    return kv_tier_mem_create(&o, SLOTS, &r->tier, err);
}

static enum status create_host(struct rig *r, struct err *err)
{
    const struct kv_tier_options o = options_of(r);
    return kv_tier_host_create(&o, SLOTS * KV_SLOT_ALIGN, &r->tier, err);
}

/* Segments of one slot, in a folder of its own. */
static struct tier_disk_options disk_options(const struct disk_io_ops *io, char folder[4200])
{
    static int n;
    snprintf(folder, 4200, "%s/%d", test_tmpdir(), n++);
    return (struct tier_disk_options){
        .folder = folder,
        .bytes = SLOTS * (disk_data_begin(1) + KV_SLOT_ALIGN),
        .scan_ms = 50,
        .io = io,
    };
}

static enum status create_disk(struct rig *r, const struct disk_io_ops *io, struct err *err)
{
    char folder[4200];
    const struct kv_tier_options o = options_of(r);
    const struct tier_disk_options d = disk_options(io, folder);
    return kv_tier_disk_create(&o, &d, &r->tier, err);
}

static enum status create_disk_uring(struct rig *r, struct err *err)
{
    struct disk_io *io;
    if (disk_io_uring_ops.create(1, &io, err) != OK) return ERR_UNSUPPORTED;
    CHECK(io->ops->free(io, 0));
    return create_disk(r, &disk_io_uring_ops, err);
}

static enum status create_disk_threads(struct rig *r, struct err *err)
{
    return create_disk(r, &disk_io_threads_ops, err);
}

/* Three ranks; the others look at their tiers like the first. */
static enum status create_ranks(struct rig *r, bool on_disk, struct err *err)
{
    char folder[4200];
    rig_add_ranks(r, OTHERS_MAX, 0);
    for (uint32_t i = 0; i < r->n_others; i++) {
        struct tier_follow_options f = follow_options_of(r, i);
        if (on_disk) f.disk = disk_options(&disk_io_threads_ops, folder);
        else f.host_bytes = SLOTS * KV_SLOT_ALIGN;
        CHECK_OK(tier_follow_create(&f, &r->others[i].follower, err));
    }
    CHECK_OK(on_disk ? create_disk(r, &disk_io_threads_ops, err) : create_host(r, err));
    r->tier = tier_ranks_wrap(r->ranks, r->tier, on_wake, r);
    return OK;
}

static enum status create_host_ranks(struct rig *r, struct err *err)
{
    return create_ranks(r, false, err);
}

static enum status create_disk_ranks(struct rig *r, struct err *err)
{
    return create_ranks(r, true, err);
}

static const struct kind KINDS[] = { { "mem", create_mem },
                                     { "host", create_host },
                                     { "disk, uring", create_disk_uring },
                                     { "disk, threads", create_disk_threads },
                                     { "host, 3 ranks", create_host_ranks },
                                     { "disk, 3 ranks", create_disk_ranks } };

static void rig_open_as(struct rig *r, const struct kind *kind, const char *device,
                        enum dtype pool_dtype, enum dtype slot_dtype)
{
    struct err err = { 0 };
    rig_open_pool(r, device, pool_dtype, slot_dtype);
    const enum status st = kind->create(r, &err);
    if (st == ERR_UNSUPPORTED) {
        printf("%s was NOT tested: %s\n", kind->name, err.text);
        CHECK_OK(create_mem(r, &err));
    } else if (st != OK) {
        test_fail(__FILE__, __LINE__, "%s", err.text);
    }
}

static void rig_open(struct rig *r, const struct kind *kind, const char *device)
{
    rig_open_as(r, kind, device, DTYPE_BF16, DTYPE_BF16);
}

/* Runs a case on every tier, behind every kind of pool that this build has. */
static void each(void (*run)(struct rig *r, const struct kind *kind, const char *device))
{
    for (size_t i = 0; i < COUNT_OF(KINDS); i++)
        for (int on_gpu = 0; on_gpu <= (device_count("cuda") > 0); on_gpu++) {
            struct rig r;
            run(&r, &KINDS[i], on_gpu ? "cuda" : "cpu");
        }
}

/* ---- cases ---- */

static void comes_back(struct rig *r, const struct kind *kind, const char *device)
{
    rig_open(r, kind, device);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK(!has(r, i));
        put(r, i);
        CHECK(has(r, i));
    }
    fill(r, 1, 99);
    fill(r, 2 + SLOTS, 98);
    const struct kv_tier_done d = get(r, 0, SLOTS, 2);
    CHECK_OK(d.status);
    CHECK_EQ_INT(d.n_good, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) CHECK(holds(r, 2 + (int32_t)i, i));
    CHECK(holds(r, 1, 99) && holds(r, 2 + SLOTS, 98)); /* and nothing else is written */
    CHECK_EQ_INT(stats(r).n_puts, SLOTS);
    CHECK_EQ_INT(stats(r).n_gets, SLOTS);
    CHECK_EQ_INT(stats(r).n_stored, SLOTS);
    rig_close(r);
}

TEST(what_was_put_comes_back) { each(comes_back); }

static void finds(struct rig *r, const struct kind *kind, const char *device)
{
    rig_open(r, kind, device);
    struct hash128 keys[4];
    for (uint32_t i = 0; i < 4; i++) keys[i] = block_named(i, 0).key;
    CHECK_EQ_INT(kv_tier_find(r->tier, keys, 4), 0);
    put(r, 0);
    put(r, 1);
    put(r, 3);
    CHECK_EQ_INT(kv_tier_find(r->tier, keys, 4), 2);
    CHECK_EQ_INT(kv_tier_find(r->tier, keys, 1), 1);
    const struct kv_tier_put again = { .of = block_named(1, 0), .block = 0, .tag = 1 };
    CHECK_STATUS(try_put(r, &again), ERR_CONFLICT);
    struct kv_tier_get g = get_of(1, 2, 4, 77);
    CHECK_STATUS(r->tier->ops->get(r->tier, &g), ERR_NOT_FOUND);
    r->tier->ops->drop(r->tier, &keys[1]);
    CHECK(!has(r, 1) && has(r, 0));
    r->tier->ops->drop(r->tier, &keys[1]);
    put(r, 1);
    CHECK(has(r, 1));
    rig_close(r);
}

TEST(lead_blocks_are_found) { each(finds); }

static void forgets(struct rig *r, const struct kind *kind, const char *device)
{
    uint32_t n_kept = 0;
    rig_open(r, kind, device);
    for (uint32_t i = 0; i < 5 * SLOTS; i++) put(r, i);
    CHECK_EQ_INT(stats(r).n_slots, SLOTS);
    CHECK_EQ_INT(stats(r).n_stored, SLOTS);
    CHECK_EQ_INT(stats(r).n_evicted, 4 * SLOTS);
    for (uint32_t i = 0; i < 5 * SLOTS; i++) {
        if (!has(r, i)) continue;
        n_kept++;
        CHECK_EQ_INT(get(r, i, 1, 3).n_good, 1);
        CHECK(holds(r, 3, i));
    }
    CHECK_EQ_INT(n_kept, SLOTS);
    CHECK(has(r, 5 * SLOTS - 1));
    rig_close(r);
}

TEST(a_full_tier_forgets_old_blocks) { each(forgets); }

/* Finds the bytes of a block by a pin, which is what a test may do with const. */
static char *bytes_of(struct rig *r, uint32_t i)
{
    const struct hash128 key = block_named(i, 0).key;
    struct kv_tier_pin pin;
    CHECK(r->tier->ops->pin(r->tier, &key, &pin));
    r->tier->ops->unpin(r->tier, &pin);
    return (char *)(uintptr_t)pin.bytes;
}

static void notices(struct rig *r, const struct kind *kind, const char *device)
{
    rig_open(r, kind, device);
    if (!(r->tier->ops->caps & KV_TIER_PINS)) {
        rig_close(r); /* the disk's own test changes its files */
        return;
    }
    for (uint32_t i = 0; i < 4; i++) put(r, i);
    const size_t used = kv_layout_block_bytes(&r->layout);
    for (size_t at = 0; at < used; at += used / 5) {
        bytes_of(r, 2)[at] ^= 0x40;
        fill(r, 7, 55);
        const struct kv_tier_done d = get(r, 0, 4, 5);
        CHECK_STATUS(d.status, ERR_CHECKSUM);
        CHECK_EQ_INT(d.n_good, 2);
        /* other ranks have brought theirs */
        CHECK(holds(r, 5, 0) && holds(r, 6, 1) && holds_in(r, r->pool.ptr, 7, 55));
        CHECK(!has(r, 2) && has(r, 3));
        put(r, 2);
    }
    CHECK(stats(r).n_bad_checksums >= 5);
    CHECK_EQ_INT(get(r, 0, 4, 5).n_good, 4);
    rig_close(r);
}

TEST(changed_bytes_are_noticed_and_dropped) { each(notices); }

/* By layers: the count says which pieces are there, all of them in the end, or the blocks are not
 * good. */
static struct kv_tier_done get_layers(struct rig *r, uint32_t first, uint32_t n, int32_t to)
{
    _Atomic uint32_t n_layers = 0;
    struct kv_tier_get g = get_of(first, n, to, ++r->next_tag);
    g.n_layers = &n_layers;
    CHECK_OK(r->tier->ops->get(r->tier, &g));
    const struct kv_tier_done d = await(r);
    CHECK_EQ_INT(d.tag, g.tag);
    CHECK(d.n_good == n ? n_layers == LAYERS : d.n_good == 0 && n_layers < LAYERS);
    return d;
}

static void comes_by_layers(struct rig *r, const struct kind *kind, const char *device)
{
    rig_open(r, kind, device);
    if (!(r->tier->ops->caps & KV_TIER_LAYERS)) {
        rig_close(r);
        return;
    }
    for (uint32_t i = 0; i < SLOTS; i++) put(r, i);
    fill(r, 1, 99);
    fill(r, 2 + SLOTS, 98);
    CHECK_EQ_INT(get_layers(r, 0, SLOTS, 2).n_good, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) CHECK(holds(r, 2 + (int32_t)i, i));
    CHECK(holds(r, 1, 99) && holds(r, 2 + SLOTS, 98));
    for (size_t at = 0; at < LAYERS; at++) {
        bytes_of(r, 2)[at * piece(r)] ^= 0x40;
        const struct kv_tier_done d = get_layers(r, 0, 4, 5);
        CHECK_STATUS(d.status, ERR_CHECKSUM);
        CHECK_EQ_INT(d.n_good, 0);
        CHECK(!has(r, 2) && has(r, 3));
        put(r, 2);
    }
    CHECK_EQ_INT(get_layers(r, 0, 4, 5).n_good, 4);
    rig_close(r);
}

TEST(blocks_come_layer_by_layer) { each(comes_by_layers); }

static void stops(struct rig *r, const struct kind *kind, const char *device)
{
    struct kv_tier_done d;
    rig_open(r, kind, device);
    for (uint32_t i = 0; i < SLOTS; i++) put(r, i);
    for (uint64_t round = 0; round < 50; round++) {
        _Atomic uint32_t n_layers = 0;
        struct kv_tier_get g = get_of(0, SLOTS, 1, 1000 + round);
        if (round % 2 && (r->tier->ops->caps & KV_TIER_LAYERS)) g.n_layers = &n_layers;
        CHECK_OK(r->tier->ops->get(r->tier, &g));
        r->tier->ops->cancel(r->tier, g.tag);
        for (int32_t b = 1; b <= SLOTS; b++) fill(r, b, 40); /* somebody else's now */
        const struct timespec pause = { 0, 100000 };
        nanosleep(&pause, NULL);
        for (int32_t b = 1; b <= SLOTS; b++) CHECK(holds(r, b, 40));
        CHECK(!r->tier->ops->poll(r->tier, &d));
    }
    r->tier->ops->cancel(r->tier, 424242); /* unknown */
    CHECK_EQ_INT(get(r, 0, SLOTS, 1).n_good, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) CHECK(holds(r, 1 + (int32_t)i, i));
    rig_close(r);
}

TEST(a_cancelled_get_writes_nothing_any_more) { each(stops); }

static void ends(struct rig *r, const struct kind *kind, const char *device)
{
    for (int i = 0; i < 5; i++) {
        rig_open(r, kind, device);
        for (uint32_t k = 0; k < SLOTS; k++) put(r, k);
        for (uint64_t k = 0; k < 5; k++) {
            const struct kv_tier_get g = get_of(0, SLOTS, 1, 100 + k);
            const enum status st = r->tier->ops->get(r->tier, &g);
            CHECK(st == OK || st == ERR_BUSY);
        }
        const struct kv_tier_put p = { .of = block_named(50, 0), .block = 20, .tag = 50 };
        const enum status st = r->tier->ops->put(r->tier, &p);
        CHECK(st == OK || st == ERR_FULL || st == ERR_BUSY);
        rig_close(r);
    }
}

TEST(it_ends_with_puts_and_gets_that_run) { each(ends); }

static void stays(struct rig *r, const struct kind *kind, const char *device)
{
    struct kv_tier_pin pin;
    rig_open(r, kind, device);
    put(r, 0);
    const struct hash128 key = block_named(0, 0).key;
    if (!(r->tier->ops->caps & KV_TIER_PINS)) {
        rig_close(r);
        return;
    }
    CHECK(r->tier->ops->pin(r->tier, &key, &pin));
    const uint64_t sum = pin.checksum;
    struct kv_layout slot;
    CHECK_OK(kv_slot_layout(&r->layout, r->slot_dtype, &slot, NULL));
    for (uint32_t i = 1; i < 3 * SLOTS; i++) put(r, i);
    CHECK(has(r, 0));
    CHECK_EQ_INT(kv_slot_checksum(&slot, pin.bytes), sum);
    r->tier->ops->drop(r->tier, &key);
    for (uint32_t i = 1; i < 3 * SLOTS; i++) put(r, 100 + i);
    CHECK(!has(r, 0));
    CHECK_EQ_INT(kv_slot_checksum(&slot, pin.bytes), sum); /* dropped, and still as it was */
    r->tier->ops->unpin(r->tier, &pin);
    for (uint32_t i = 1; i < 3 * SLOTS; i++) put(r, 200 + i);
    CHECK_EQ_INT(stats(r).n_stored, SLOTS);
    rig_close(r);
}

TEST(a_pinned_slot_stays) { each(stays); }

/* The bytes come from another tier's slot. */
static void takes_slots(struct rig *r, const struct kind *kind, const char *device)
{
    struct rig other;
    struct kv_tier_pin pin;
    rig_open(r, kind, device);
    if (r->ranks) { /* the slot is another rank's as well: test_tier_ranks.c */
        rig_close(r);
        return;
    }
    rig_open(&other, &KINDS[0], device);
    put(&other, 3);
    const struct hash128 key = block_named(3, 0).key;
    CHECK(other.tier->ops->pin(other.tier, &key, &pin));
    const struct kv_tier_put p = {
        .of = block_named(3, 0), .block = -1, .slot = pin.bytes, .checksum = pin.checksum, .tag = 9
    };
    CHECK_OK(try_put(r, &p));
    CHECK_OK(await(r).status);
    await_stored(r, 3);
    other.tier->ops->unpin(other.tier, &pin);
    CHECK_EQ_INT(get(r, 3, 1, 6).n_good, 1);
    CHECK(holds(r, 6, 3));
    rig_close(&other);
    rig_close(r);
}

TEST(bytes_of_another_tier_are_taken) { each(takes_slots); }

/* Each value comes back as the formulas of kv_rows.h round it. */
static void rounds(struct rig *r, const struct kind *kind, const char *device)
{
    char is[LAYERS * 4096], should[LAYERS * 4096];
    rig_open_as(r, kind, device, DTYPE_BF16, DTYPE_I8);
    put(r, 1);
    CHECK_EQ_INT(get(r, 1, 1, 4).n_good, 1);
    read_block(r, 4, is);
    contents(r, 1, should);
    const size_t row = DIM * 2;
    for (size_t at = 0; at < kv_layout_block_bytes(&r->layout); at += row) {
        float x[DIM], scale;
        int8_t q[DIM];
        kv_row_load(DTYPE_BF16, should + at, NULL, x, DIM);
        kv_row_store(DTYPE_I8, x, q, &scale, DIM);
        kv_row_load(DTYPE_I8, q, &scale, x, DIM);
        kv_row_store(DTYPE_BF16, x, should + at, NULL, DIM);
    }
    CHECK(memcmp(is, should, kv_layout_block_bytes(&r->layout)) == 0);
    CHECK(!holds(r, 4, 1)); /* they do differ */
    rig_close(r);
}

TEST(values_are_rounded_where_asked) { each(rounds); }

/* Random use against a model: whatever a tier says it has comes back right. */
static void random_use(struct rig *r, const struct kind *kind, const char *device)
{
    enum { N = 30, STEPS = 600 };
    rig_open(r, kind, device);
    const uint32_t steps = test_runs_long() && strcmp(device, "cpu") == 0 ? STEPS : STEPS / 6;
    for (uint32_t k = 0; k < steps; k++) {
        const double u = rng_uniform(1, 2, k);
        const uint32_t i = (uint32_t)(rng_uniform(1, 3, k) * N);
        const struct tier_block b = block_named(i, i % 10);
        if (u < 0.5 && !has(r, i)) {
            fill(r, 0, i);
            (void)put_at(r, 0, i, i % 10); /* none: all that it has is what comes before i */
        } else if (u < 0.9 && has(r, i)) {
            uint32_t n = 1;
            while (n < 4 && has(r, i + n)) n++;
            const int32_t to = 1 + (int32_t)(rng_uniform(1, 4, k) * (BLOCKS - 5));
            CHECK_EQ_INT(get(r, i, n, to).n_good, n);
            for (uint32_t a = 0; a < n; a++) CHECK(holds(r, to + (int32_t)a, i + a));
        } else if (u < 0.95) {
            r->tier->ops->drop(r->tier, &b.key);
            CHECK(!has(r, i));
        } else {
            r->tier->ops->touch(r->tier, &b.key, clock_ns());
        }
    }
    CHECK_EQ_INT(stats(r).n_bad_checksums, 0);
    CHECK_EQ_INT(stats(r).n_errors, 0);
    rig_close(r);
}

TEST(random_use_comes_back_right) { each(random_use); }

TEST_MAIN(CASE(what_was_put_comes_back), CASE(lead_blocks_are_found),
          CASE(a_full_tier_forgets_old_blocks), CASE(changed_bytes_are_noticed_and_dropped),
          CASE(blocks_come_layer_by_layer), CASE(a_cancelled_get_writes_nothing_any_more),
          CASE(it_ends_with_puts_and_gets_that_run), CASE(a_pinned_slot_stays),
          CASE(bytes_of_another_tier_are_taken), CASE(values_are_rounded_where_asked),
          CASE(random_use_comes_back_right))
