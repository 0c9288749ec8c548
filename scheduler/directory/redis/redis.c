/* redis.c - the `redis` backend: the state is in a Redis server that all nodes of a cluster reach.
 *
 * Each operation is one script call (scripts.h) on the keys of keys.h. Redis executes the calls of
 * one connection in order. Leases end by the topic's time, which the scripts keep. After the server
 * was restarted or flushed, nodes publish again at their next renewal, reservations are gone, and
 * the fence is raised above what this entry node has seen. A call in flight holds a pointer to the
 * directory; close frees the connection, which ends all calls. Thread: loop. */
#include <string.h>

#include "scheduler/directory/backends.h"
#include "scheduler/directory/redis/keys.h"
#include "scheduler/directory/redis/redis_reserve.h"
#include "scheduler/directory/redis/redis_state.h"
#include "scheduler/directory/redis/scripts.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

/* Sums read from the server are limited, so that later sums cannot overflow. */
#define TOKENS_SUM_MAX (UINT64_C(1) << 53)
enum { KEY_MAX = 96, NODE_FIELDS = 5, COUNT_MAX = 1 << 30 };
enum { RECORDS_TEXT_MAX = 6 << 20 }; /* bytes of a snapshot's records together */

static void directory_redis_free(struct directory_redis *d)
{
    directory_remote_release(&d->remote);
    mem_free(d);
}

static void unhold(struct directory_redis *d)
{
    if (--d->n_holds == 0 && d->closed) directory_redis_free(d);
}

/* ---- calls ---- */

static void on_reply(void *arg, enum status st, const redisReply *reply);

struct redis_argv {
    const char *p[6 + 2 * DIRECTORY_RELEASE_MAX];
    size_t n[6 + 2 * DIRECTORY_RELEASE_MAX];
    int count;
};

static void push(struct redis_argv *v, const char *p, size_t n)
{
    v->p[v->count] = p;
    v->n[v->count++] = n;
}

enum status directory_redis_call_binary(struct directory_redis *d, struct directory_redis_call call,
                                        const char *script, const char *topic, const char *key2,
                                        const struct directory_redis_args *args)
{
    struct redis_argv v = { .count = 0 };
    char prefix[KEY_MAX], since[DIRECTORY_REDIS_NUMBER_TEXT];
    const uint64_t now = clock_ms();
    snprintf(prefix, sizeof prefix, DIRECTORY_KEY_PREFIX, topic);
    directory_redis_number_text(since, d->answered_ms ? now - d->answered_ms : 0);
    push(&v, prefix, strlen(prefix));
    if (key2) push(&v, key2, strlen(key2));
    push(&v, d->owner, strlen(d->owner));
    push(&v, d->lease, strlen(d->lease));
    push(&v, since, strlen(since));
    for (int i = 0; i < args->n; i++)
        push(&v, args->args[i], args->lengths ? args->lengths[i] : strlen(args->args[i]));
    struct directory_redis_call *c = mem_try_calloc(1, sizeof *c);
    if (!c) return ERR_NOMEM;
    *c = call;
    c->d = d;
    c->sent_ms = now;
    enum status st = redis_script(d->redis, script, on_reply, c, key2 ? 2 : 1, v.count, v.p, v.n);
    if (st != OK) mem_free(c);
    return st;
}

enum status directory_redis_call_script(struct directory_redis *d, struct directory_redis_call call,
                                        const char *script, const char *topic, const char *key2,
                                        int n_args, const char *const *args)
{
    const struct directory_redis_args all = { n_args, args, NULL };
    return directory_redis_call_binary(d, call, script, topic, key2, &all);
}

static void send_releases(struct directory_redis *d)
{
    struct directory_remote_batch batch;
    char n_released[DIRECTORY_REDIS_NUMBER_TEXT],
        text[2 * DIRECTORY_RELEASE_MAX][DIRECTORY_REDIS_ID_TEXT];
    const char *args[1 + 2 * DIRECTORY_RELEASE_MAX];
    if (!redis_is_up(d->redis) || !directory_remote_take_batch(&d->remote, &batch)) return;
    const size_t n = batch.n_released + batch.n_computed;
    directory_redis_number_text(n_released, batch.n_released);
    args[0] = n_released;
    for (size_t i = 0; i < n; i++) {
        directory_redis_id_text(text[i], i < batch.n_released
                                             ? batch.released[i]
                                             : batch.computed[i - batch.n_released]);
        args[1 + i] = text[i];
    }
    struct directory_redis_call call = { .op = DIRECTORY_OP_RELEASE };
    if (directory_redis_call_script(d, call, DIRECTORY_SCRIPT_RELEASE, d->topic, NULL, (int)n + 1,
                                    args) != OK)
        directory_remote_on_released(&d->remote, false);
}

/* ---- replies ---- */

/* Returns a count, or 0 if it is missing or negative: a count becomes negative if Redis lost the
 * load but kept reservations that were in it. */
static uint64_t count_at(const redisReply *list, size_t i, uint64_t max)
{
    int64_t v = 0;
    if (str_to_i64(directory_redis_text_at(list, i), &v) != OK || v < 0) return 0;
    return (uint64_t)v > max ? max : (uint64_t)v;
}

/* A proven record of another topic, or once more, proves nothing where it was copied to. */
static enum status read_node(const struct directory_redis *d, struct str id, struct str text,
                             char *room, struct node_record *r, struct err *err)
{
    char want[DIRECTORY_REDIS_ID_TEXT];
    TRY(node_record_read(text, room, r, err));
    directory_redis_id_text(want, r->node);
    if (!str_eq_c(id, want) || strcmp(r->topic, d->topic) != 0)
        return err_set(err, ERR_INVALID, "it is the record of node %s of topic %s", want, r->topic);
    return OK;
}

/* The identities are behind the records: one mem_free for all. */
static struct node_record *read_nodes(struct directory_redis *d, const redisReply *list, size_t *n)
{
    struct err err;
    size_t n_listed = list->elements / NODE_FIELDS, n_text = 0;
    if (n_listed > DIRECTORY_NODES_MAX) n_listed = DIRECTORY_NODES_MAX;
    for (size_t i = 0; i < n_listed; i++)
        n_text += directory_redis_text_at(list, i * NODE_FIELDS + 1).n;
    struct node_record *nodes = mem_calloc(1, n_listed * sizeof *nodes + n_text);
    char *room = (char *)(nodes + n_listed);
    *n = 0;
    for (size_t i = 0; i < n_listed; i++) {
        struct node_record *r = &nodes[*n];
        struct str id = directory_redis_text_at(list, i * NODE_FIELDS),
                   text = directory_redis_text_at(list, i * NODE_FIELDS + 1);
        if (read_node(d, id, text, room, r, &err) != OK) {
            directory_remote_refuse_record(&d->remote, id, err.text);
            continue;
        }
        room += text.n;
        r->placed_tokens = count_at(list, i * NODE_FIELDS + 2, TOKENS_SUM_MAX);
        r->placed_seqs = (uint32_t)count_at(list, i * NODE_FIELDS + 3, COUNT_MAX);
        r->placed_blocks = (uint32_t)count_at(list, i * NODE_FIELDS + 4, COUNT_MAX);
        ++*n;
    }
    return nodes;
}

/* The records that the script has left out. */
static void read_refused(struct directory_redis *d, const redisReply *list)
{
    for (size_t i = 0; i + 1 < list->elements; i += 2) {
        char why[96];
        uint64_t bytes = count_at(list, i + 1, INT64_MAX);
        if (bytes > RECORD_TEXT_MAX)
            snprintf(why, sizeof why, "it has %" PRIu64 " bytes; a node record has at most %d",
                     bytes, RECORD_TEXT_MAX);
        else
            snprintf(why, sizeof why, "the records of the topic have more than %d MiB together",
                     RECORDS_TEXT_MAX >> 20);
        directory_remote_refuse_record(&d->remote, directory_redis_text_at(list, i), why);
    }
}

static void read_topics(const redisReply *list, char *out, size_t cap)
{
    struct directory_topic topics[DIRECTORY_TOPICS_MAX];
    size_t n = 0;
    for (size_t i = 0; i + 1 < list->elements; i += 2) {
        char name[NODE_NAME_MAX];
        struct str rest = directory_redis_text_at(list, i + 1), word;
        snprintf(name, sizeof name, "%.*s", STR_ARG(directory_redis_text_at(list, i)));
        if (!directory_topic_is_valid(name)) continue;
        str_split(&rest, ' ', &word); /* the end of its lease, which the script has checked */
        for (enum node_role role = ROLE_MIXED; role <= ROLE_DECODE && str_split(&rest, ' ', &word);
             role++) {
            int64_t v = 0;
            if (str_to_i64(word, &v) != OK || v < 0 || v > DIRECTORY_NODES_MAX) v = 0;
            directory_topics_add(topics, &n, name, role, (uint32_t)v);
        }
    }
    directory_topics_write(topics, n, out, cap);
}

static void deliver_snapshot(const struct directory_redis_call *c, enum status st,
                             const redisReply *reply)
{
    struct directory_snapshot s = { 0 };
    bool is_well_formed = st == OK && reply->type == REDIS_REPLY_ARRAY && reply->elements == 3;
    for (size_t i = 0; is_well_formed && i < reply->elements; i++)
        is_well_formed = reply->element[i]->type == REDIS_REPLY_ARRAY;
    if (!is_well_formed) {
        c->snapshot(c->arg, ERR_UNAVAILABLE, NULL);
        return;
    }
    struct node_record *nodes = read_nodes(c->d, reply->element[0], &s.n);
    s.nodes = nodes;
    read_topics(reply->element[1], s.topics, sizeof s.topics);
    read_refused(c->d, reply->element[2]);
    c->snapshot(c->arg, OK, &s);
    mem_free(nodes);
}

static void deliver(struct directory_redis *d, const struct directory_redis_call *c, enum status st,
                    const redisReply *reply)
{
    struct directory_placed placed = { 0 };
    switch (c->op) {
    case DIRECTORY_OP_PUBLISH:
        if (st == OK && reply->type == REDIS_REPLY_INTEGER && reply->integer == 0)
            log_warn("directory full", "topic=%s limit=%d", d->topic, DIRECTORY_NODES_MAX);
        break;
    case DIRECTORY_OP_LEAVE: break;
    case DIRECTORY_OP_RELEASE: directory_remote_on_released(&d->remote, st == OK); break;
    case DIRECTORY_OP_SNAPSHOT: deliver_snapshot(c, st, reply); break;
    case DIRECTORY_OP_METER: directory_redis_deliver_sums(c, st, reply); break;
    case DIRECTORY_OP_RESERVE:
        st = directory_redis_read_placed(c, st, reply, &placed);
        directory_remote_on_reserved(&d->remote, c->request, c->id, st, placed.fence);
        c->reserve(c->arg, st, st == OK ? &placed : NULL);
        break;
    }
}

/* A sentence for a Redis that cannot be used: its own words, and what to do about them. */
static void report(struct directory_redis *d, enum redis_cause cause, const char *why)
{
    struct err text; /* cut where it is too long */
    const char *advice = directory_redis_advice(cause);
    (void)err_set(&text, ERR_UNAVAILABLE, "Redis at %s %s: %.200s%s%s; check with: %s", d->at,
                  cause == REDIS_CAUSE_PASSWORD ? "refuses the password" : "cannot be used", why,
                  advice[0] ? "; " : "", advice, d->check);
    directory_remote_down(&d->remote, text.text);
}

/* A server that answers with errors (read-only, out of memory) counts as down too. */
static void report_refusal(struct directory_redis *d, const redisReply *reply)
{
    char why[200];
    snprintf(why, sizeof why, "it refuses the directory's scripts%s%.140s", reply ? ": " : "",
             reply && reply->type == REDIS_REPLY_ERROR ? reply->str : "");
    report(d, redis_is_no_permission(reply) ? REDIS_CAUSE_PERMISSION : REDIS_CAUSE_CONNECTION, why);
}

static void on_reply(void *arg, enum status st, const redisReply *reply)
{
    struct directory_redis_call *c = arg;
    struct directory_redis *d = c->d;
    if (!d->closed) { /* closed: the connection is being freed */
        d->n_holds++;
        if (st == OK && c->sent_ms > d->answered_ms) d->answered_ms = c->sent_ms;
        deliver(d, c, st, reply);
        if (!d->closed && st == OK) directory_remote_up(&d->remote);
        /* on_down reports a lost connection. */
        if (!d->closed && st == ERR_IO) report_refusal(d, reply);
        if (!d->closed && st == OK) send_releases(d);
        unhold(d);
    }
    mem_free(c->room);
    mem_free(c);
}

static void on_loaded(void *arg, enum status st, const redisReply *reply)
{
    (void)arg;
    (void)reply;
    /* Not fatal: the lease ends by itself. */
    if (st != OK && st != ERR_CANCELED) log_debug("script not loaded", "st=%s", status_name(st));
}

/* The leave script runs once, when the process is about to end. It is loaded ahead, since there
 * would be no time for a second try if Redis did not know it. */
static void load_leave_script(struct directory_redis *d)
{
    const char *args[] = { "SCRIPT", "LOAD", DIRECTORY_SCRIPT_LEAVE };
    const size_t lengths[] = { strlen(args[0]), strlen(args[1]), strlen(args[2]) };
    if (redis_command(d->redis, on_loaded, NULL, 3, args, lengths) != OK)
        log_debug("script not sent", "topic=%s", d->topic);
}

/* A replica that takes over may never have been told of the latest releases: it would count what
 * has long ended until the ttl is over. So this entry node goes on there under a new name, and what
 * the old one held ends with its lease; what still runs of that is not counted any more. */
static void note_server(struct directory_redis *d)
{
    const struct redis_address *now = redis_where(d->redis);
    if (!now) return;
    if (d->was.port && (d->was.port != now->port || strcmp(d->was.host, now->host) != 0)) {
        directory_remote_choose_owner(&d->remote);
        directory_redis_id_text(d->owner, d->remote.owner);
    }
    d->was = *now;
}

static void on_up(void *arg)
{
    struct directory_redis *d = arg;
    d->n_holds++;
    note_server(d);
    if (!d->closed) load_leave_script(d);
    directory_remote_up(&d->remote);
    if (!d->closed) send_releases(d);
    unhold(d);
}

static void on_down(void *arg, const char *why)
{
    struct directory_redis *d = arg;
    d->n_holds++;
    d->answered_ms = 0;
    report(d, redis_why_down(d->redis), why);
    unhold(d);
}

/* ---- backend ---- */

/* The files of TLS are known to people by their options. */
static enum status name_option(struct err *err, enum status st)
{
    static const char *const files[] = { "ca", "cert", "key" };
    for (size_t i = 0; err && i < COUNT_OF(files); i++)
        if (strcmp(err->field, files[i]) == 0) err_prefix(err, "--scheduler-tls-%s: ", files[i]);
    return st;
}

static enum status directory_redis_open(const struct directory_options *o, struct directory **out,
                                        struct err *err)
{
    struct directory_redis *d = MEM_NEW(struct directory_redis);
    struct redis_options r = {
        .loop = o->loop,
        .server = o->redis,
        .timeout_ms = DIRECTORY_REMOTE_TIMEOUT_MS,
        .on_up = on_up,
        .on_down = on_down,
        .arg = d,
    };
    char flags[DIRECTORY_REDIS_FLAGS_MAX];
    d->base.ops = &directory_redis_ops;
    directory_remote_init(&d->remote, o, "redis");
    snprintf(d->topic, sizeof d->topic, "%s", o->topic);
    directory_redis_id_text(d->owner, d->remote.owner);
    directory_redis_number_text(d->lease, o->lease_ms);
    enum status st = redis_create(&r, &d->redis, err);
    if (st != OK) {
        directory_redis_free(d);
        return name_option(err, st);
    }
    redis_server_text(&o->redis, d->at);
    snprintf(d->check, sizeof d->check, "baton doctor --scheduler-name splitwise %s",
             directory_redis_flags(&o->redis, flags));
    *out = &d->base;
    return OK;
}

static void directory_redis_close(struct directory *base)
{
    struct directory_redis *d = (struct directory_redis *)base;
    d->closed = true;
    d->n_holds++;
    redis_free(d->redis);
    unhold(d);
}

static void directory_redis_publish(struct directory *base, const struct node_record *me)
{
    struct directory_redis *d = (struct directory_redis *)base;
    char node[DIRECTORY_REDIS_ID_TEXT], max_seqs[DIRECTORY_REDIS_NUMBER_TEXT],
        n_blocks[DIRECTORY_REDIS_NUMBER_TEXT], fence[DIRECTORY_REDIS_NUMBER_TEXT],
        limit[DIRECTORY_REDIS_NUMBER_TEXT];
    struct buf record = { 0 }, bid = { 0 };
    if (!redis_is_up(d->redis)) return; /* the next renewal tries again */
    node_record_write(me, &record);
    redis_bid_write(me, &bid);
    directory_redis_id_text(node, me->node);
    directory_redis_number_text(max_seqs, me->max_seqs);
    directory_redis_number_text(n_blocks, me->n_blocks);
    directory_redis_number_text(fence, d->remote.fence);
    directory_redis_number_text(limit, DIRECTORY_NODES_MAX);
    const char *args[] = { node,  record.data, node_role_name(me->role), max_seqs, n_blocks, fence,
                           limit, bid.data };
    size_t lengths[COUNT_OF(args)];
    for (size_t i = 0; i + 1 < COUNT_OF(args); i++) lengths[i] = strlen(args[i]);
    lengths[COUNT_OF(args) - 1] = bid.len;
    const struct directory_redis_args all = { COUNT_OF(args), args, lengths };
    if (directory_redis_call_binary(d, (struct directory_redis_call){ .op = DIRECTORY_OP_PUBLISH },
                                    DIRECTORY_SCRIPT_PUBLISH, me->topic, NULL, &all) != OK)
        log_debug("publish not sent", "node=%s", me->name);
    buf_release(&record);
    buf_release(&bid);
}

static void directory_redis_leave(struct directory *base, uint64_t node)
{
    struct directory_redis *d = (struct directory_redis *)base;
    char text[DIRECTORY_REDIS_ID_TEXT];
    const char *args[] = { text };
    directory_redis_id_text(text, node);
    if (directory_redis_call_script(d, (struct directory_redis_call){ .op = DIRECTORY_OP_LEAVE },
                                    DIRECTORY_SCRIPT_LEAVE, d->topic, NULL, 1, args) != OK)
        log_debug("leave not sent", "node=%s", text);
}

static enum status directory_redis_snapshot(struct directory *base, directory_snapshot_fn *cb,
                                            void *arg)
{
    struct directory_redis *d = (struct directory_redis *)base;
    char topics[DIRECTORY_REDIS_NUMBER_TEXT], nodes[DIRECTORY_REDIS_NUMBER_TEXT],
        record[DIRECTORY_REDIS_NUMBER_TEXT], records[DIRECTORY_REDIS_NUMBER_TEXT];
    const char *args[] = { d->topic, topics, nodes, record, records };
    struct directory_redis_call call = { .op = DIRECTORY_OP_SNAPSHOT, .snapshot = cb, .arg = arg };
    directory_redis_number_text(topics, DIRECTORY_TOPICS_MAX);
    directory_redis_number_text(nodes, DIRECTORY_NODES_MAX);
    directory_redis_number_text(record, RECORD_TEXT_MAX);
    directory_redis_number_text(records, RECORDS_TEXT_MAX);
    return directory_redis_call_script(d, call, DIRECTORY_SCRIPT_SNAPSHOT, d->topic,
                                       DIRECTORY_KEY_TOPICS, COUNT_OF(args), args);
}

static void directory_redis_computed(struct directory *base, uint64_t request)
{
    struct directory_redis *d = (struct directory_redis *)base;
    directory_remote_computed(&d->remote, request);
    send_releases(d);
}

static void directory_redis_release(struct directory *base, uint64_t request)
{
    struct directory_redis *d = (struct directory_redis *)base;
    directory_remote_drop(&d->remote, request);
    send_releases(d);
}

static const char *directory_redis_why_down(const struct directory *base)
{
    return directory_remote_why_down(&((const struct directory_redis *)base)->remote);
}

const struct directory_ops directory_redis_ops = {
    .name = "redis",
    .open = directory_redis_open,
    .close = directory_redis_close,
    .publish = directory_redis_publish,
    .leave = directory_redis_leave,
    .snapshot = directory_redis_snapshot,
    .reserve = directory_redis_reserve,
    .computed = directory_redis_computed,
    .release = directory_redis_release,
    .meter = directory_redis_meter,
    .why_down = directory_redis_why_down,
};
