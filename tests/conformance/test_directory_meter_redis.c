/* test_directory_meter_redis.c - what tenants use, counted by Redis: the same sums as in this
 * process, report by report, and what only Redis does: keys are lost, forged, or of the past after
 * a failover. */
#include "shared/base/hash/hash.h"
#include "tests/conformance/meter_rig.h"

#define TOPIC "baton:{default}:"

static long long ask(const struct rig *r, const char *command)
{
    redisReply *reply = redis_process_ask(&r->redis, command);
    CHECK(reply && reply->type != REDIS_REPLY_ERROR);
    const long long v = reply->integer;
    freeReplyObject(reply);
    return v;
}

/* Lets the topic's time pass. */
static void pass(const struct rig *r, uint64_t ms)
{
    char script[400];
    snprintf(script, sizeof script,
             "local w, t = string.match(redis.call('GET', '" TOPIC "clock'), '^(%%d+) (%%d+)$') "
             "return redis.call('SET', '" TOPIC "clock', string.format('%%.0f %%.0f', w, t + %u))",
             (unsigned)ms);
    redisContext *c = redisConnect("127.0.0.1", r->port);
    redisReply *reply = redisCommand(c, "EVAL %s 0", script);
    CHECK(reply && reply->type == REDIS_REPLY_STATUS);
    freeReplyObject(reply);
    redisFree(c);
}

TEST(the_window_slides)
{
    struct rig r;
    struct answer a;
    rig_open(&r, "redis");
    for (int i = 0; i < 30; i++) {
        tell(&r, i % 2 ? A : B, use(1, 1, 10, 0, 0), &a);
        pass(&r, 1900);
    }
    CHECK_EQ_INT(tell(&r, A, use(1, 0, 0, 0, 0), &a).tokens, 300); /* 57 s: all still count */
    pass(&r, METER_WINDOW_MS + METER_SLOT_MS - 57000);
    uint64_t left = tell(&r, A, use(1, 0, 0, 0, 0), &a).tokens;
    CHECK(left <= 290 && left >= 260); /* some time has passed by itself */
    CHECK_EQ_INT(a.sums[0].requests, left / 10);
    pass(&r, 19 * 1900);
    left -= tell(&r, A, use(1, 0, 0, 0, 0), &a).tokens;
    CHECK(left >= 180 && left <= 220);
    pass(&r, 1000000);
    CHECK_EQ_INT(tell(&r, A, use(1, 0, 5, 0, 0), &a).tokens, 5);
    CHECK_EQ_INT(a.sums[0].requests, 0);
    rig_close(&r);
}

TEST(an_idle_tenant_gives_its_place_away)
{
    static struct meter_use all[METER_TENANTS_MAX];
    const struct meter_use mixed[] = { use(1, 1, 10, 1, 1), use(9999, 1, 10, 1, 0) };
    struct rig r;
    struct answer a;
    rig_open(&r, "redis");
    for (uint32_t i = 0; i < METER_TENANTS_MAX; i++) all[i] = use(i + 1, 1, 10, 1, 0);
    CHECK_OK(send_as(&r, A, 1, all, METER_TENANTS_MAX, &a));
    CHECK_STATUS(send_as(&r, B, 1, mixed, 2, &a), ERR_FULL);
    pass(&r, METER_WINDOW_MS + METER_SLOT_MS);
    CHECK_OK(send_as(&r, B, 1, mixed, 2, &a));
    CHECK_EQ_INT(a.sums[0].served, 2);
    CHECK_EQ_INT(a.sums[0].tokens, 10);
    CHECK_EQ_INT(a.sums[1].tokens, 10);
    rig_close(&r);
}

TEST(the_number_of_a_lapsed_entry_is_known_for_a_while)
{
    const struct meter_use u = use(1, 1, 100, 10, 5);
    struct rig r;
    struct answer a;
    rig_open(&r, "redis");
    CHECK_OK(send_as(&r, A, 1, &u, 1, &a));
    pass(&r, METER_LEASE_MS);
    CHECK_EQ_INT(tell(&r, B, use(1, 0, 0, 0, 0), &a).n_running, 0);
    CHECK_EQ_INT(a.n_entries, 1);
    pass(&r, METER_FORGET_MS / 2);
    CHECK_OK(send_as(&r, A, 1, &u, 1, &a));
    CHECK_EQ_INT(a.sums[0].served, 10);
    CHECK_EQ_INT(a.sums[0].n_running, 5);
    CHECK_EQ_INT(ask(&r, "ZCARD " TOPIC "metered"), 2);
    pass(&r, METER_LEASE_MS + METER_FORGET_MS);
    CHECK_OK(send_as(&r, A, 1, &u, 1, &a));
    CHECK_EQ_INT(a.sums[0].served, 20);
    pass(&r, METER_LEASE_MS + METER_FORGET_MS);
    CHECK_OK(send_as(&r, C, 1, NULL, 0, &a));
    CHECK_EQ_INT(ask(&r, "ZCARD " TOPIC "metered"), 1);
    CHECK_EQ_INT(ask(&r, "HLEN " TOPIC "meter"), 3); /* topic, tenants, and the entry */
    rig_close(&r);
}

TEST(keys_are_bounded_in_time_and_length)
{
    static struct meter_use all[METER_TENANTS_MAX];
    static const char *const keys[] = { TOPIC "meter", TOPIC "metered" };
    struct rig r;
    struct answer a;
    rig_open(&r, "redis");
    for (uint32_t i = 0; i < METER_TENANTS_MAX; i++)
        all[i] = (struct meter_use){ UINT64_MAX - i, UINT32_MAX, UINT64_MAX,
                                     UINT64_MAX,     UINT32_MAX, UINT32_MAX };
    for (int i = 0; i < 66; i++, pass(&r, METER_SLOT_MS))
        CHECK_OK(send_as(&r, i % ENTRIES, (uint64_t)i + 1, all, METER_TENANTS_MAX, &a));
    for (uint32_t i = 0; i < METER_TENANTS_MAX; i++)
        CHECK(a.sums[i].tokens <= METER_NUMBER_END && a.sums[i].requests == UINT32_MAX);
    for (size_t i = 0; i < COUNT_OF(keys); i++)
        CHECK(ask(&r, redis_text("PTTL %s", keys[i])) > METER_FORGET_MS);
    CHECK(ask(&r, "HLEN " TOPIC "meter") <= 2 + METER_WINDOW_MS / METER_SLOT_MS + 1 + ENTRIES);
    CHECK(ask(&r, "HSTRLEN " TOPIC "meter tenants") < 128 * METER_TENANTS_MAX);
    CHECK(ask(&r, "HSTRLEN " TOPIC "meter effffffffffffff00") < 128 * METER_TENANTS_MAX);
    CHECK(ask(&r, "MEMORY USAGE " TOPIC "meter SAMPLES 0") < 2 << 20);
    rig_close(&r);
}

static bool are_equal(const struct meter_sum *a, const struct meter_sum *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (a[i].tenant != b[i].tenant || a[i].requests != b[i].requests ||
            a[i].tokens != b[i].tokens || a[i].served != b[i].served ||
            a[i].n_running != b[i].n_running || a[i].n_waiting != b[i].n_waiting)
            return false;
    return true;
}

/* Backend local is the definition. No slot ends in the short time that this takes. */
TEST(sums_are_those_of_the_local_backend)
{
    enum { TENANTS = 12, REPORTS = 400 };
    struct rig local, redis;
    uint64_t numbers[ENTRIES] = { 0 }, state = 7;
    rig_open(&local, "local");
    rig_open(&redis, "redis");
    for (int i = 0; i < REPORTS; i++) {
        struct meter_use uses[TENANTS];
        static struct answer want, got;
        uint32_t n = 0;
        const int entry = (int)(hash_64(&i, sizeof i, 1) % ENTRIES);
        for (uint64_t t = 1; t <= TENANTS; t++) {
            state = hash_64(&state, sizeof state, 3);
            if (state % 3 == 0) continue;
            const uint32_t running = state >> 8 & 1 ? state >> 9 & 3 : 0;
            uses[n++] = use(t, state >> 16 & 3, state >> 20 & 1023, state >> 32 & 4095, running);
            if (state >> 12 & 1) uses[n - 1].n_waiting = state >> 50 & 7;
        }
        const uint64_t number = numbers[entry] += state % 5 ? 1 : 0; /* some come once more */
        if (number == 0) continue;
        CHECK_OK(send_as(&local, entry, number, uses, n, &want));
        CHECK_OK(send_as(&redis, entry, number, uses, n, &got));
        if (got.n_entries != want.n_entries || got.least != want.least ||
            !are_equal(got.sums, want.sums, n))
            test_fail(__FILE__, __LINE__, "report %d has other sums", i);
    }
    rig_close(&local);
    rig_close(&redis);
}

/* Whoever evicts or deletes one of the keys: counters begin lower, and nobody stays counted. */
TEST(lost_keys_begin_anew)
{
    static const char *const lost[] = { "DEL " TOPIC "metered", "DEL " TOPIC "meter",
                                        "DEL " TOPIC "clock", "FLUSHALL" };
    struct rig r;
    struct answer a;
    rig_open(&r, "redis");
    for (size_t i = 0; i < COUNT_OF(lost); i++) {
        tell(&r, A, use(1, 1, 100, 10, 4), &a);
        tell(&r, B, use(1, 1, 100, 10, 2), &a);
        if (strstr(lost[i], "clock")) pass(&r, 3600000); /* then time goes back */
        if (strstr(lost[i], "clock")) tell(&r, B, use(1, 1, 100, 10, 2), &a);
        ask(&r, lost[i]);
        const struct meter_sum s = tell(&r, B, use(1, 1, 7, 1, 2), &a);
        CHECK_EQ_INT(s.tokens, 7);
        CHECK_EQ_INT(s.n_running, 2);
        CHECK_EQ_INT(a.n_entries, 1);
        CHECK_EQ_INT(tell(&r, A, use(1, 0, 0, 0, 4), &a).n_running, 6);
        CHECK_EQ_INT(r.n_down, 0);
    }
    rig_close(&r);
}

/* Whoever can write to Redis must not be able to keep it busy with a field of 32 megabytes,
 * or to have an entry read it. */
TEST(forged_fields_are_not_read)
{
    static const char *const forge[] = {
        "redis.call('HSET', KEYS[1], 'tenants', string.rep('x', 33554432))",
        "redis.call('HSET', KEYS[1], 'topic', string.rep('9', 33554432))",
        "redis.call('HSET', KEYS[1], 'effffffffffffff00', string.rep('9', 33554432))",
        "redis.call('HSET', KEYS[1], 'tenants', '0000000000000001 ' .. string.rep('9', 400) .. ' 1 "
        "1 "
        "99999999999999999999 1 1;')",
        "redis.call('HSET', KEYS[1], 'topic', string.rep('9', 400) .. ' 1 1 1')",
        "redis.call('HSET', KEYS[1], 'topic', '0 ' .. string.rep('9', 400) .. ' 1 1')",
    };
    struct rig r;
    struct answer a;
    rig_open(&r, "redis");
    for (size_t i = 0; i < COUNT_OF(forge); i++) {
        tell(&r, A, use(1, 1, 1, 1, 1), &a);
        redisContext *c = redisConnect("127.0.0.1", r.port);
        redisReply *reply = redisCommand(c, "EVAL %s 1 " TOPIC "meter", forge[i]);
        CHECK(reply && reply->type != REDIS_REPLY_ERROR);
        freeReplyObject(reply);
        redisFree(c);
        const struct meter_use u = use(1, 1, 1, 1, 1);
        const uint64_t t0 = clock_ms(), number = ++r.numbers[A];
        enum status st = OK;
        for (int n = 0; n < 3;
             n++) { /* it counts on at once, or after one report that is refused */
            st = send_as(&r, A, number, &u, 1, &a);
            if (st == OK && a.sums[0].tokens <= METER_NUMBER_END) break;
        }
        if (st != OK) test_fail(__FILE__, __LINE__, "%s: %s", forge[i], status_name(st));
        CHECK(clock_ms() - t0 < 1000);
    }
    rig_close(&r);
}

static void replica_start(struct redis_process *p, uint16_t of)
{
    size_t n = redis_process_words(p);
    p->words[n++] = "--replicaof";
    p->words[n++] = "127.0.0.1";
    p->words[n++] = redis_text("%u", of);
    p->words[n++] = "--repl-diskless-sync-delay";
    p->words[n++] = "0";
    p->words[n] = NULL;
    redis_process_start(p);
    redis_process_wait(p, "INFO replication", "master_link_status:up");
}

/* What came last had not reached the replica that takes over: the sums begin lower, reports go on,
 * and the one that was not answered counts. */
TEST(a_failover_without_its_tail_loses_only_that)
{
    struct rig r;
    struct answer a;
    struct redis_process replica = { 0 };
    const struct meter_use u = use(1, 1, 100, 10, 3);
    rig_open(&r, "redis");
    tell(&r, A, u, &a);
    tell(&r, B, u, &a);
    replica_start(&replica, r.port);
    CHECK_EQ_INT(ask(&r, "WAIT 1 10000"), 1);
    redisReply *alone = redis_process_ask(&replica, "REPLICAOF NO ONE");
    CHECK(alone && alone->type == REDIS_REPLY_STATUS);
    freeReplyObject(alone);
    tell(&r, A, u, &a);
    CHECK_EQ_INT(tell(&r, B, u, &a).tokens, 400);
    const int n_up = r.n_up;
    redis_process_kill(&r.redis);
    CHECK_STATUS(send_as(&r, A, 3, &u, 1, &a), ERR_UNAVAILABLE);
    struct redis_process next = { .port = r.port };
    replica_start(&next, replica.port);
    freeReplyObject(redis_process_ask(&next, "REPLICAOF NO ONE"));
    r.redis = next;
    WAIT_FOR(&r, r.n_up > n_up);
    for (uint64_t end = clock_ms() + WAIT_MS; send_as(&r, A, 3, &u, 1, &a) != OK;) {
        CHECK(clock_ms() < end);
        turn(&r);
    }
    CHECK_EQ_INT(a.sums[0].tokens, 300);
    CHECK_EQ_INT(a.sums[0].served, 30);
    CHECK_EQ_INT(a.sums[0].n_running, 6);
    r.numbers[A] = 3;
    CHECK_EQ_INT(tell(&r, A, u, &a).tokens, 400);
    redis_process_kill(&replica);
    rig_close(&r);
}

TEST_MAIN(CASE_T(the_window_slides, CASE_S), CASE_T(an_idle_tenant_gives_its_place_away, CASE_S),
          CASE_T(the_number_of_a_lapsed_entry_is_known_for_a_while, CASE_S),
          CASE_T(keys_are_bounded_in_time_and_length, CASE_S),
          CASE_T(sums_are_those_of_the_local_backend, CASE_S), CASE_T(lost_keys_begin_anew, CASE_S),
          CASE_T(forged_fields_are_not_read, CASE_S),
          CASE_T(a_failover_without_its_tail_loses_only_that, CASE_S))
