/* bench_prefix.c - what the prefix table finds: the hit rate of replayed traces against placement
 * by load alone, by the hash of the first block (as before there was a table), and with every cache
 * known; what the table takes when a million prompts have gone through it, and how long the keys of
 * a very long prompt take.
 *
 * usage: bench_prefix [--one PREFILL,BLOCKS[,DECODE,BLOCKS]] [--divide N] [--block N] [--busy X]
 *                     [--speed TOKENS_PER_S] [--times X] [--token-ms X] [--most N] TRACE...
 * A trace is a file of prefix_trace.h, "-" standard input. By default each is replayed over 8
 * prefill nodes with 6,000 blocks of 512 tokens and over 32 with 2,000, so fast that the trace
 * without a cache would take 0.9 of their time. --one replays it over these nodes and prints JSON:
 * tests/e2e/test_prefix.py compares processes with it. Exit status 1: a limit is missed. */
#include <time.h>
#include <unistd.h>

#include "scheduler/prefix/prefix_table.h"
#include "tests/fixtures/prefix_replay.h"

#define LIMIT_KNOWN 0.95 /* of the hit rate with every cache known */

static const char *const POLICIES[] = { "load alone", "first block", "prefix table",
                                        "every cache known" };

struct settings {
    struct replay_options o;
    bool one;
    size_t most;
};

/* ---- the replay ---- */

static int compare_policies(const char *path, const struct trace *t, struct replay_options o)
{
    struct replay_result results[REPLAY_POLICIES];
    printf("%s, %zu requests, %u prefill nodes with %u blocks:\n", path, t->n, o.n_prefill,
           o.prefill_blocks);
    for (int p = 0; p < REPLAY_POLICIES; p++) {
        o.policy = (enum replay_policy)p;
        struct replay_result *r = &results[p];
        *r = replay_run(t, &o);
        printf("  %-18s hit rate %.3f  mean TTFT %6.2f s", POLICIES[p], r->hit, r->ttft_s);
        if (p == REPLAY_TABLE)
            printf("  expected %.3f, %.1f %% of %llu missed", r->expected,
                   r->n_expected ? 100.0 * (double)r->n_missed / (double)r->n_expected : 0,
                   (unsigned long long)r->n_expected);
        printf("\n");
    }
    const double ratio = results[REPLAY_TABLE].hit / results[REPLAY_KNOWN].hit;
    printf("  %.3f of every cache known (limit %.2f)%s\n", ratio, LIMIT_KNOWN,
           ratio < LIMIT_KNOWN ? "  MISSED" : "");
    return ratio < LIMIT_KNOWN;
}

static void replay_one(const struct trace *t, struct replay_options o)
{
    o.policy = REPLAY_TABLE;
    const struct replay_result r = replay_run(t, &o);
    printf("{\"hit\":%.4f,\"expected\":%.4f,\"ttft_s\":%.4f,\"n_expected\":%llu,\"n_missed\":%llu,"
           "\"alone\":%llu,\"prefill_per_s\":%.0f}\n",
           r.hit, r.expected, r.ttft_s, (unsigned long long)r.n_expected,
           (unsigned long long)r.n_missed, (unsigned long long)r.n_alone, r.prefill_per_s);
}

/* ---- the table ---- */

static size_t resident_bytes(void)
{
    size_t size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%zu %zu", &size, &resident) != 2) resident = 0;
    if (f) fclose(f);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

static uint32_t n_used(const struct prefix_table *t)
{
    uint32_t n = 0;
    for (size_t i = 0; i < PREFIX_SLOTS; i++) n += t->slots[i].keepers[0][0].node != 0;
    return n;
}

/* Distinct prompts of 12,000 tokens, as long as those of Mooncake's conversation in the mean. */
static int fill_table(void)
{
    enum { PROMPTS = 1000000, N_TOKENS = 12000, BLOCK = 64, SLACK = 256 << 10 };
    struct prefix_table *t = prefix_table_create();
    const size_t before = resident_bytes();
    size_t at_tenth = 0;
    struct prefix_rung rungs[PREFIX_RUNGS_MAX];
    uint32_t n_rungs = 0;
    for (uint32_t n = 0; (n = prefix_ladder_next(n, BLOCK)) * BLOCK <= N_TOKENS;) n_rungs++;
    for (uint32_t i = 1; i <= PROMPTS; i++) {
        const uint64_t nodes[PREFIX_KINDS] = { 1 + i % 8, 11 + i % 8 };
        for (uint32_t k = 0; k < n_rungs; k++) {
            const uint32_t name[2] = { i, k };
            const struct hash128 key = hash_128(name, sizeof name);
            rungs[k] = (struct prefix_rung){ (uint16_t)key.lo, (uint32_t)key.hi, 0 };
        }
        prefix_table_note(t, rungs, n_rungs, nodes, 1 + i / 1000);
        if (i == PROMPTS / 10) at_tenth = resident_bytes() - before;
    }
    const size_t after = resident_bytes() - before;
    printf("%d distinct prompts of %d tokens, %u rungs each, in the table of a local directory:\n"
           "  %u of %d slots used, %zu bytes resident after a tenth, %zu at the end; limit %zu%s\n",
           PROMPTS, N_TOKENS, n_rungs, n_used(t), PREFIX_SLOTS, at_tenth, after, sizeof *t,
           after > sizeof *t + SLACK ? "  MISSED" : "");
    const bool is_missed = after > sizeof *t + SLACK;
    prefix_table_free(t);
    return is_missed;
}

/* What the loop does for a prompt: at most half a millisecond of the one that it may. */
static int time_ladder(void)
{
    enum { N = PREFIX_LADDER_TOKENS_MAX, ROUNDS = 20, BLOCK = 64, LIMIT_US = 1000 };
    int32_t *tokens = mem_calloc(N, sizeof *tokens);
    struct prefix_ladder l;
    double best = 1e9;
    for (uint32_t i = 0; i < N; i++) tokens[i] = (int32_t)(i * 2654435761u >> 12);
    for (int i = 0; i < ROUNDS; i++) {
        struct timespec a, b;
        tokens[0] = i;
        clock_gettime(CLOCK_MONOTONIC, &a);
        prefix_ladder_make(&l, 7, 0, tokens, N, BLOCK);
        clock_gettime(CLOCK_MONOTONIC, &b);
        const double us = (double)(b.tv_sec - a.tv_sec) * 1e6 +
                          (double)(b.tv_nsec - a.tv_nsec) / 1e3;
        if (us < best) best = us;
    }
    printf("the keys of a prompt of %d tokens in blocks of %d: %.0f us (limit %d)%s\n", N, BLOCK,
           best, LIMIT_US, best > LIMIT_US ? "  MISSED" : "");
    mem_free(tokens);
    return best > LIMIT_US;
}

/* ---- options ---- */

static bool read_option(struct settings *s, const char *name, const char *value)
{
    struct replay_options *o = &s->o;
    if (strcmp(name, "--one") == 0) {
        s->one = true;
        return sscanf(value, "%u,%u,%u,%u", &o->n_prefill, &o->prefill_blocks, &o->n_decode,
                      &o->decode_blocks) >= 2;
    }
    if (strcmp(name, "--divide") == 0) o->divide = (uint32_t)atoi(value);
    else if (strcmp(name, "--block") == 0) o->block_tokens = (uint32_t)atoi(value);
    else if (strcmp(name, "--busy") == 0) o->busy = atof(value);
    else if (strcmp(name, "--speed") == 0) o->prefill_per_s = atof(value);
    else if (strcmp(name, "--times") == 0) o->times = atof(value);
    else if (strcmp(name, "--token-ms") == 0) o->token_s = atof(value) * 1e-3;
    else if (strcmp(name, "--most") == 0) s->most = (size_t)atoll(value);
    else return false;
    return o->divide > 0 && o->block_tokens > 0 && o->times > 0;
}

static int replay_file(const char *path, const struct settings *s)
{
    struct replay_options o = s->o;
    struct trace t;
    if (!trace_read(path, s->most, &t)) {
        fprintf(stderr, "bench_prefix: %s is not a trace\n", path);
        return 2;
    }
    int rc = 0;
    if (s->one) {
        replay_one(&t, o);
    } else {
        o.n_prefill = 8;
        o.prefill_blocks = 6000;
        rc |= compare_policies(path, &t, o);
        o.n_prefill = 32;
        o.prefill_blocks = 2000;
        rc |= compare_policies(path, &t, o);
    }
    trace_release(&t);
    return rc;
}

int main(int argc, char **argv)
{
    struct settings s = { .most = SIZE_MAX,
                          .o = { .n_decode = 1,
                                 .divide = 1,
                                 .block_tokens = 64,
                                 .busy = 0.9,
                                 .times = 1,
                                 .token_s = 0.03,
                                 .seed = 1 } };
    int rc = 0, i = 1;
    for (; i + 1 < argc && strncmp(argv[i], "--", 2) == 0; i += 2)
        if (!read_option(&s, argv[i], argv[i + 1])) {
            fprintf(stderr, "bench_prefix: %s %s is no option; see the head of the file\n", argv[i],
                    argv[i + 1]);
            return 2;
        }
    if (!s.one) rc |= time_ladder();
    if (!s.one) rc |= fill_table(); /* first: what is freed may stay resident */
    for (; i < argc; i++) rc |= replay_file(argv[i], &s);
    return rc;
}
