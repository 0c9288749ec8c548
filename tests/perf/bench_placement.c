/* bench_placement.c - what a placement costs Redis: the script of before there was a prefix table,
 * and that of now, without a query and with one for every prompt of a trace, in turns; and what the
 * table takes there when a million prompts have gone through it.
 *
 * usage: bench_placement [--prompts N] TRACE
 * Starts a redis-server of its own. Eight requests per node are not over while it measures. Times
 * are Redis' own (INFO commandstats), of the scripts that place alone: what is placed is released
 * by another command. Exit status 1: a limit is missed. */
#include <hiredis/hiredis.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "scheduler/directory/redis/redis_reserve.h"
#include "scheduler/directory/redis/scripts.h"
#include "scheduler/directory/wire.h"
#include "scheduler/place/place.h"
#include "scheduler/prefix/prefix_ladder.h"
#include "shared/base/address/port_claim.h"
#include "shared/base/hash/hash.h"
#include "shared/base/rng.h"
#include "tests/fixtures/prefix_trace.h"

enum { ROUNDS = 45, PER_ROUND = 100, BLOCK = 64, TOPIC_MAX = 64, WORDS_MAX = 60 };
#define LIMIT_RATIO 1.5

/* What the script of a placement did after its shared functions before there was a table. */
static const char BEFORE[] =
    "local id, p, d, tokens, blocks, ttl = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], "
    "tonumber(ARGV[9])\n"
    "hear()\n"
    "sweep()\n"
    "drop(id)\n"
    "local limits = redis.call('HMGET', P .. 'node:' .. d, 'max_seqs', 'n_blocks')\n"
    "if not limits[1] or redis.call('EXISTS', P .. 'node:' .. p) == 0 then return 'gone' end\n"
    "local load = redis.call('HMGET', P .. 'load:' .. d, 'seqs', 'blocks')\n"
    "local seqs, placed = tonumber(load[1] or '0'), tonumber(load[2] or '0')\n"
    "if seqs >= tonumber(limits[1]) or placed + blocks > tonumber(limits[2]) then return 'busy' "
    "end\n"
    "raise(ARGV[10])\n"
    "local fence = redis.call('INCR', P .. 'fence')\n"
    "redis.call('HSET', P .. 'res', id, table.concat({ p, d, tokens, blocks, ARGV[1] }, ' '))\n"
    "redis.call('ZADD', P .. 'res_end', now + ttl, id)\n"
    "redis.call('SADD', P .. 'owned:' .. ARGV[1], id)\n"
    "keep(P .. 'res', ttl)\n"
    "keep(P .. 'res_end', ttl)\n"
    "keep(P .. 'owned:' .. ARGV[1], ttl)\n"
    "keep(count(d, 0, 1, blocks), ttl)\n"
    "keep(count(p, tokens, 0, 0), ttl)\n"
    "return string.format('%.0f', fence)\n";

enum kind { KIND_BEFORE, KIND_WITHOUT, KIND_WITH, KINDS };
static const char *const KIND_NAMES[] = { "before", "without a query", "with a query" };

struct bench {
    redisContext *redis;
    pid_t pid;
    char prefix[TOPIC_MAX];
    char before[48], now[48], tell[48]; /* SHA1 */
    const struct trace *trace;
    int32_t *tokens;
    uint32_t n_prefill, n_decode;
    uint64_t draw, n_placed, n_kept, bytes;
};

static void fail(const char *what)
{
    fprintf(stderr, "bench_placement: %s\n", what);
    exit(2);
}

static uint32_t draw(struct bench *b, uint32_t n)
{
    uint32_t r[4];
    rng_philox(3, 0, b->draw++, r);
    return r[0] % n;
}

/* ---- Redis ---- */

static redisReply *ask(struct bench *b, int argc, const char **argv)
{
    redisReply *r = redisCommandArgv(b->redis, argc, argv, NULL);
    if (!r || r->type == REDIS_REPLY_ERROR) fail(r ? r->str : "Redis does not answer");
    return r;
}

static void load_script(struct bench *b, const char *text, char sha[48])
{
    const char *argv[] = { "SCRIPT", "LOAD", text };
    redisReply *r = ask(b, 3, argv);
    snprintf(sha, 48, "%s", r->str);
    freeReplyObject(r);
}

/* The shared functions of all scripts, and the earlier body. */
static void load_before(struct bench *b)
{
    const char *end = strstr(DIRECTORY_SCRIPT_LEAVE, "redis.call('ZREM', P .. 'alive', ARGV[4])");
    struct buf text = { 0 };
    if (!end) fail("the scripts have no shared functions");
    buf_add(&text, DIRECTORY_SCRIPT_LEAVE, (size_t)(end - DIRECTORY_SCRIPT_LEAVE));
    buf_add_c(&text, BEFORE);
    load_script(b, text.data, b->before);
    buf_release(&text);
}

static void start_redis(struct bench *b)
{
    char port[8];
    uint16_t at = (uint16_t)(21000 + getpid() % 5000);
    while (!port_is_free(at)) at++;
    snprintf(port, sizeof port, "%u", at);
    b->pid = fork();
    if (b->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (!freopen("/dev/null", "w", stdout)) _exit(126);
        execlp("redis-server", "redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "",
               "--appendonly", "no", NULL);
        _exit(127);
    }
    for (int i = 0; i < 100; i++, usleep(50000)) {
        b->redis = redisConnect("127.0.0.1", at);
        if (b->redis && !b->redis->err) break;
        if (b->redis) redisFree(b->redis);
        b->redis = NULL;
    }
    if (!b->redis) fail("redis-server did not come up; is it installed?");
    load_before(b);
    load_script(b, DIRECTORY_SCRIPT_RESERVE, b->now);
    load_script(b, DIRECTORY_SCRIPT_RELEASE, b->tell);
}

static void reset_stats(struct bench *b)
{
    const char *argv[] = { "CONFIG", "RESETSTAT" };
    freeReplyObject(ask(b, 2, argv));
}

static double evalsha_us(struct bench *b)
{
    const char *argv[] = { "INFO", "commandstats" };
    redisReply *r = ask(b, 2, argv);
    const char *at = strstr(r->str, "cmdstat_evalsha:calls=");
    unsigned long long calls = 0, us = 0;
    if (!at || sscanf(at, "cmdstat_evalsha:calls=%llu,usec=%llu", &calls, &us) != 2)
        fail("INFO commandstats has no evalsha");
    freeReplyObject(r);
    return calls ? (double)us / (double)calls : 0;
}

/* ---- nodes and placements ---- */

/* Random numbers, as nodes have them. */
static uint64_t prefill_id(uint32_t i) { return hash_64(&i, sizeof i, ROLE_PREFILL); }
static uint64_t decode_id(uint32_t i) { return hash_64(&i, sizeof i, ROLE_DECODE); }

/* With up to 64 sequences where it decodes. */
static struct node_record node_of(struct bench *b, uint64_t node, enum node_role role)
{
    return (struct node_record){ .node = node,
                                 .role = role,
                                 .model = 7,
                                 .max_seqs = 1000000,
                                 .n_blocks = 1000000000,
                                 .block_tokens = BLOCK,
                                 .max_model_len = 1 << 20,
                                 .prefix_cache = true,
                                 .n_running = role == ROLE_DECODE ? draw(b, 64) : 0,
                                 .prefill_tokens_per_s = 50000 };
}

static void publish(struct bench *b, uint64_t node, enum node_role role)
{
    const struct node_record n = node_of(b, node, role);
    struct buf bid = { 0 };
    char id[20];
    snprintf(id, sizeof id, DIRECTORY_ID, node);
    const char *argv[] = { "EVAL",
                           DIRECTORY_SCRIPT_PUBLISH,
                           "1",
                           b->prefix,
                           "00000000000000aa",
                           "600000",
                           "0",
                           id,
                           "{}",
                           node_role_name(role),
                           "1000000",
                           "1000000000",
                           "0",
                           "4096",
                           NULL };
    size_t lengths[COUNT_OF(argv)];
    redis_bid_write(&n, &bid);
    argv[COUNT_OF(argv) - 1] = bid.data;
    for (size_t i = 0; i + 1 < COUNT_OF(argv); i++) lengths[i] = strlen(argv[i]);
    lengths[COUNT_OF(argv) - 1] = bid.len;
    redisReply *r = redisCommandArgv(b->redis, COUNT_OF(argv), argv, lengths);
    if (!r || r->type != REDIS_REPLY_INTEGER) fail(r ? r->str : "Redis does not answer");
    freeReplyObject(r);
    buf_release(&bid);
}

static void open_topic(struct bench *b, const char *topic, uint32_t n_prefill, uint32_t n_decode)
{
    snprintf(b->prefix, sizeof b->prefix, "baton:{%s}:", topic);
    b->n_prefill = n_prefill;
    b->n_decode = n_decode;
    for (uint32_t i = 0; i < n_prefill; i++) publish(b, prefill_id(i), ROLE_PREFILL);
    for (uint32_t i = 0; i < n_decode; i++) publish(b, decode_id(i), ROLE_DECODE);
}

/* A placement whose choice is these two. */
static struct prefix_query query_of(struct bench *b, uint32_t n_tokens, uint64_t prefill,
                                    uint64_t decode, struct place_uses *u)
{
    const struct node_record nodes[2] = { node_of(b, prefill, ROLE_PREFILL),
                                          node_of(b, decode, ROLE_DECODE) };
    const struct place_request r = { .n_tokens = n_tokens, .n_total = n_tokens + 1, .model = 7 };
    const struct place_result chosen = { .prefill = &nodes[0], .decode = &nodes[1] };
    place_uses(nodes, 2, &r, &chosen, u);
    return (struct prefix_query){ .n_tokens = n_tokens,
                                  .compute = prefill,
                                  .decode = decode,
                                  .uses = u->uses,
                                  .n_uses = u->n_uses,
                                  .ns = u->ns,
                                  .blocks = u->blocks };
}

static void make_tokens(struct bench *b, const struct trace_request *q)
{
    for (uint32_t i = 0; i < q->n_input; i++)
        b->tokens[i] =
            (int32_t)((q->ids[i / TRACE_BLOCK] * 2654435761u + (i % TRACE_BLOCK) * 40503u) &
                      0x7fffffff);
}

static void release(struct bench *b, const char *id)
{
    const char *argv[] = {
        "EVAL", DIRECTORY_SCRIPT_RELEASE, "1", b->prefix, "00000000000000aa", "600000", "1000", "1",
        id
    };
    freeReplyObject(ask(b, COUNT_OF(argv), argv));
}

/* The word after so many blanks. */
static uint64_t word_at(const char *text, int i)
{
    for (; i > 0 && text; i--) text = strchr(text, ' ') ? strchr(text, ' ') + 1 : NULL;
    return text ? strtoull(text, NULL, 10) : 0;
}

struct words {
    const char *p[WORDS_MAX];
    size_t n[WORDS_MAX];
    int count;
};

static void push(struct words *w, const char *p, size_t n)
{
    w->p[w->count] = p;
    w->n[w->count++] = n;
}

/* EVALSHA of a placement. The ids and `query` are borrowed. */
static void write_words(struct words *w, const struct bench *b, const char *sha, const char *ids[3],
                        const char *tokens, const struct redis_query *query)
{
    const char *const head[] = { "EVALSHA", sha,    "1",      b->prefix, "00000000000000aa",
                                 "600000",  "1000", ids[0],   ids[1],    ids[2],
                                 tokens,    "64",   "900000", "0" };
    w->count = 0;
    for (size_t i = 0; i < COUNT_OF(head); i++) push(w, head[i], strlen(head[i]));
    for (size_t i = 0; query && i < REDIS_QUERY_LISTS; i++)
        push(w, query->lists[i].p, query->lists[i].n);
    for (uint32_t i = 0; query && i < query->n_slots; i++) push(w, query->slots[i], 2);
}

/* Places it as `id`. */
static void place_as(struct bench *b, enum kind kind, const struct trace_request *q, char id[20])
{
    char prefill[20], decode[20], tokens[16];
    const char *ids[3] = { id, prefill, decode };
    struct prefix_ladder l;
    struct prefix_rung rungs[PREFIX_RUNGS_MAX];
    struct place_uses uses;
    struct redis_query text;
    struct words w;
    make_tokens(b, q);
    prefix_ladder_make(&l, 7, 0, b->tokens, q->n_input, BLOCK);
    struct prefix_query query = query_of(b, q->n_input, prefill_id(draw(b, b->n_prefill)),
                                         decode_id(draw(b, b->n_decode)), &uses);
    query.rungs = rungs;
    query.n_rungs = prefix_ladder_ask(&l, q->n_input, rungs);
    snprintf(id, 20, DIRECTORY_ID, ++b->n_placed);
    snprintf(prefill, sizeof prefill, DIRECTORY_ID, query.compute);
    snprintf(decode, sizeof decode, DIRECTORY_ID, query.decode);
    snprintf(tokens, sizeof tokens, "%u", q->n_input);
    redis_query_write(kind == KIND_WITH ? &query : NULL, &text);
    write_words(&w, b, kind == KIND_BEFORE ? b->before : b->now, ids, tokens,
                kind == KIND_BEFORE ? NULL : &text);
    redisReply *r = redisCommandArgv(b->redis, w.count, w.p, w.n);
    if (!r || r->type != REDIS_REPLY_STRING || r->str[0] < '0' || r->str[0] > '9')
        fail(r ? r->str : "Redis does not answer");
    b->bytes += text.bytes.len;
    b->n_kept += kind == KIND_WITH && word_at(r->str, 4) > 0;
    freeReplyObject(r);
    buf_release(&text.bytes);
}

static void place(struct bench *b, enum kind kind, const struct trace_request *q)
{
    char id[20];
    place_as(b, kind, q, id);
    release(b, id);
}

/* ---- the measurements ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double v[ROUNDS])
{
    qsort(v, ROUNDS, sizeof *v, by_value);
    return v[ROUNDS / 2];
}

/* The table as it would be, and some requests on each node that are not over. */
static void warm_up(struct bench *b)
{
    char id[20];
    for (size_t i = 0; i < b->trace->n && i < 4000; i++)
        place(b, KIND_WITH, &b->trace->requests[i]);
    for (uint32_t i = 0; i < 8 * (b->n_prefill + b->n_decode); i++)
        place_as(b, KIND_WITH, &b->trace->requests[i % b->trace->n], id);
}

static int measure(struct bench *b, const char *topic, uint32_t n_prefill, uint32_t n_decode)
{
    double us[KINDS][ROUNDS], ratios[ROUNDS];
    open_topic(b, topic, n_prefill, n_decode);
    warm_up(b);
    b->n_kept = b->bytes = 0;
    for (int round = 0; round < ROUNDS; round++)
        for (int k = 0; k < KINDS; k++) {
            const enum kind kind = (enum kind)((k + round) % KINDS);
            reset_stats(b);
            for (int i = 0; i < PER_ROUND; i++)
                place(b, kind,
                      &b->trace->requests[(4000 + (size_t)round * PER_ROUND + (size_t)i) %
                                          b->trace->n]);
            us[kind][round] = evalsha_us(b);
        }
    /* Within a round, so that a disturbance of the machine meets all. */
    for (int round = 0; round < ROUNDS; round++)
        ratios[round] = us[KIND_WITH][round] / us[KIND_BEFORE][round];
    const double ratio = median(ratios);
    printf("%u prefill and %u decode nodes:", n_prefill, n_decode);
    for (int k = 0; k < KINDS; k++) printf("  %s %.1f us", KIND_NAMES[k], median(us[k]));
    printf("  ratio %.2f (limit %.1f)%s\n    a query has %.0f bytes; %.0f %% of the prompts were "
           "kept somewhere\n",
           ratio, LIMIT_RATIO, ratio > LIMIT_RATIO ? "  MISSED" : "",
           (double)b->bytes / (ROUNDS * PER_ROUND),
           100.0 * (double)b->n_kept / (ROUNDS * PER_ROUND));
    return ratio > LIMIT_RATIO;
}

/* That prompts are computed, and that requests are over, each in a call of its own; entry nodes
 * that are busy tell up to 256 of both in one. */
static void measure_telling(struct bench *b)
{
    static char ids[PER_ROUND][20];
    double us[2];
    open_topic(b, "small", 4, 4);
    for (int i = 0; i < PER_ROUND; i++) place_as(b, KIND_WITH, &b->trace->requests[i], ids[i]);
    for (int over = 0; over < 2; over++) {
        reset_stats(b);
        for (int i = 0; i < PER_ROUND; i++) {
            const char *argv[] = {
                "EVALSHA", b->tell,          "1",   b->prefix, "00000000000000aa", "600000",
                "1000",    over ? "1" : "0", ids[i]
            };
            freeReplyObject(ask(b, COUNT_OF(argv), argv));
        }
        us[over] = evalsha_us(b);
    }
    printf("to tell that a prompt is computed %.1f us, that a request is over %.1f us\n", us[0],
           us[1]);
}

static long long number(struct bench *b, const char *a, const char *c, const char *key)
{
    const char *argv[] = { a, c, key };
    redisReply *r = ask(b, key ? 3 : 2, argv);
    const long long v = r->type == REDIS_REPLY_INTEGER ? r->integer : -1;
    freeReplyObject(r);
    return v;
}

static void report_table(struct bench *b, const char *key, uint32_t n)
{
    printf("  after %u prompts: %lld fields, %lld bytes (MEMORY USAGE)\n", n,
           number(b, "HLEN", key, NULL), number(b, "MEMORY", "USAGE", key));
}

/* Distinct prompts of 12,000 tokens. */
static void send_distinct(struct bench *b, uint32_t number)
{
    enum { N_TOKENS = 12000 };
    char id[20], p[20], d[20];
    const char *ids[3] = { id, p, d };
    struct prefix_rung rungs[PREFIX_RUNGS_MAX];
    struct place_uses uses;
    struct prefix_query q = query_of(b, N_TOKENS, prefill_id(number % 8), decode_id(number / 8 % 8),
                                     &uses);
    struct redis_query text;
    struct words w;
    q.rungs = rungs;
    for (uint32_t n = 0; (n = prefix_ladder_next(n, BLOCK)) * BLOCK <= N_TOKENS;) {
        const uint32_t name[2] = { number, n };
        const struct hash128 h = hash_128(name, sizeof name);
        if (4 * n * BLOCK >= N_TOKENS)
            rungs[q.n_rungs++] = (struct prefix_rung){ (uint16_t)h.lo, (uint32_t)h.hi, n * BLOCK };
    }
    snprintf(id, sizeof id, DIRECTORY_ID, (uint64_t)(number % 64));
    snprintf(p, sizeof p, DIRECTORY_ID, q.compute);
    snprintf(d, sizeof d, DIRECTORY_ID, q.decode);
    redis_query_write(&q, &text);
    write_words(&w, b, b->now, ids, "12000", &text);
    redisAppendCommandArgv(b->redis, w.count, w.p, w.n);
    buf_release(&text.bytes);
}

/* Many are sent at a time. */
static int fill_table(struct bench *b, uint32_t n_prompts)
{
    enum { AT_ONCE = 200 };
    char key[TOPIC_MAX + 8];
    open_topic(b, "million", 8, 8);
    snprintf(key, sizeof key, "%sprefix", b->prefix);
    printf("distinct prompts of 12000 tokens in Redis; the limit is %d slots:\n", PREFIX_SLOTS);
    for (uint32_t i = 1; i <= n_prompts; i++) {
        send_distinct(b, i);
        for (uint32_t k = 0; i % AT_ONCE == 0 && k < AT_ONCE; k++) {
            void *r = NULL;
            if (redisGetReply(b->redis, &r) != REDIS_OK ||
                ((redisReply *)r)->type != REDIS_REPLY_STRING)
                fail("a placement failed");
            freeReplyObject(r);
        }
        if (i % (n_prompts / 4) == 0) report_table(b, key, i);
    }
    const long long n = number(b, "HLEN", key, NULL);
    const bool is_bounded = n <= PREFIX_SLOTS + 1; /* and `dropped` */
    printf("  %s\n", is_bounded ? "bounded" : "MISSED");
    return !is_bounded;
}

int main(int argc, char **argv)
{
    struct bench b = { 0 };
    struct trace t;
    uint32_t n_prompts = 1000000;
    int i = 1, rc = 0;
    if (argc > 3 && strcmp(argv[1], "--prompts") == 0) {
        n_prompts = (uint32_t)atoi(argv[2]) / 800 * 800;
        i = 3;
    }
    if (i + 1 != argc || !trace_read(argv[i], SIZE_MAX, &t))
        fail("it needs a trace; see the head of the file");
    b.trace = &t;
    b.tokens = mem_calloc(1 << 20, sizeof *b.tokens);
    start_redis(&b);
    rc |= measure(&b, "small", 4, 4);
    rc |= measure(&b, "large", 50, 50);
    rc |= measure(&b, "largest", 200, 200);
    measure_telling(&b);
    if (n_prompts) rc |= fill_table(&b, n_prompts);
    redisFree(b.redis);
    kill(b.pid, SIGKILL);
    waitpid(b.pid, NULL, 0);
    mem_free(b.tokens);
    trace_release(&t);
    return rc;
}
