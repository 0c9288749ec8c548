/* test_trouble.c - the one cause and its sentence, and that a pair which cannot exchange KV costs
 * no request anything. */
#include "scheduler/trouble.h"

#include <stdio.h>

#include "scheduler/scheduler_internal.h"
#include "shared/base/log.h"
#include "tests/unit/scheduler/scheduler_rig.h"

enum { ME = 100 };

static struct node_record node_of(uint64_t id, enum node_role role)
{
    struct node_record n = { .node = id, .role = role, .model = 7, .cluster_port = 9000 };
    snprintf(n.name, sizeof n.name, "node-%d", (int)id);
    snprintf(n.host, sizeof n.host, "10.0.0.%d", (int)id);
    snprintf(n.model_name, sizeof n.model_name, "smol");
    snprintf(n.precision, sizeof n.precision, "q4_1");
    return n;
}

/* What trouble_find says of a view with these nodes; the first is this one. */
static struct trouble find(struct node_record *nodes, size_t n, struct trouble_facts f)
{
    struct view v = { .nodes = nodes, .n_nodes = n, .model = 7, .me = nodes[0] };
    struct trouble t = { 0 };
    snprintf(v.topics, sizeof v.topics, "default (1 prefill, 0 decode)");
    f.view = &v;
    if (!f.topic) f.topic = "default";
    trouble_find(&f, &t);
    return t;
}

static const struct trouble_facts JOINED = { .join = "--router 10.0.0.1:9400" };

static void check_says(const struct trouble *t, enum trouble_cause cause, bool blocks,
                       const char *const *words)
{
    CHECK_EQ_STR(trouble_name(t->cause), trouble_name(cause));
    CHECK_EQ_INT(t->blocks, blocks);
    for (; *words; words++)
        if (!strstr(t->text, *words))
            test_fail(__FILE__, __LINE__, "\"%s\" is not in \"%s\"", *words, t->text);
}
#define CHECK_SAYS(t, cause, blocks, ...)                                                          \
    check_says(&(t), cause, blocks, (const char *[]){ __VA_ARGS__, NULL })

TEST(all_is_well)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE) };
    struct trouble t = find(n, 2, JOINED);
    CHECK_SAYS(t, TROUBLE_NONE, false, "");
    CHECK_EQ_STR(t.text, "");
}

/* --scheduler-name global: every node answers whole requests. */
TEST(prefill_nodes_alone_serve_what_is_not_split)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_PREFILL) };
    struct view v = { .nodes = n, .n_nodes = 2, .model = 7, .me = n[0], .unsplit = true };
    struct trouble_facts f = { .view = &v, .topic = "default", .join = JOINED.join };
    struct trouble t = { 0 };
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_NONE, false, "");
    v.unsplit = false;
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_NO_DECODE, true, "no node that can decode");
}

TEST(what_nobody_can_join_names_no_command)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL) };
    struct trouble t = find(n, 1, (struct trouble_facts){ .join = "" });
    CHECK_SAYS(t, TROUBLE_NO_DECODE, true, "default (1 prefill, 0 decode)",
               "the launcher restarts those that it has started");
    CHECK(!strstr(t.text, "baton serve"));
}

TEST(no_decode_node_names_what_is_seen_and_how_to_start_one)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_PREFILL) };
    struct trouble t = find(n, 2, JOINED);
    CHECK_SAYS(t, TROUBLE_NO_DECODE, true, "topic default", "1 prefill, 0 decode",
               "baton serve --splitwise-role decode --router 10.0.0.1:9400");
    struct node_record d[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE) };
    d[1].draining = true;
    t = find(d, 2, JOINED);
    CHECK_SAYS(t, TROUBLE_NO_DECODE, true, "shutting down");
    CHECK(!strstr(t.text, "baton serve"));
}

/* A command that is copied is whole. */
TEST(a_command_that_starts_a_decode_node_is_never_cut)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL) };
    char join[600], *host = join + 17;
    struct trouble_facts f = { .join = join };
    for (size_t len = 1; len < 500; len++) {
        memset(join, 0, sizeof join);
        memcpy(join, "--scheduler-host ", 17);
        memset(host, 'h', len);
        memcpy(host + len, " --scheduler-port 6379", 22);
        struct trouble t = find(n, 1, f);
        CHECK_SAYS(t, TROUBLE_NO_DECODE, true, "--splitwise-role decode");
        const char *command = strstr(t.text, "baton serve --splitwise-role decode ");
        if (len < 200) CHECK(command != NULL);
        if (command) CHECK_EQ_STR(command + 36, join);
        CHECK(t.text[strlen(t.text) - 1] == (command ? '9' : 'e'));
    }
}

TEST(a_directory_that_is_away_comes_first)
{
    struct trouble_facts f = { .join = "x", .directory_down = "Redis at h:1 cannot be used: no" };
    struct node_record p[] = { node_of(1, ROLE_PREFILL) };
    struct trouble t = find(p, 1, f);
    CHECK_SAYS(t, TROUBLE_DIRECTORY, true, "Redis at h:1 cannot be used: no");
    /* A node that can decode serves alone, or with those seen last. */
    struct node_record m[] = { node_of(1, ROLE_MIXED), node_of(2, ROLE_DECODE) };
    t = find(m, 1, f);
    CHECK_SAYS(t, TROUBLE_DIRECTORY, false, "this node serves alone");
    t = find(m, 2, f);
    CHECK_SAYS(t, TROUBLE_DIRECTORY, false, "the nodes seen last serve");
}

TEST(a_launcher_that_is_gone_is_told_and_is_why_its_view_is_away)
{
    struct trouble_facts f = { .join = "x", .launcher_gone = "the launcher is gone" };
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE) };
    struct trouble t = find(n, 2, f);
    CHECK_SAYS(t, TROUBLE_LAUNCHER, false, "the launcher is gone");
    f.directory_down = "Redis at h:1 cannot be used: no"; /* a trouble of its own */
    t = find(n, 2, f);
    CHECK_SAYS(t, TROUBLE_DIRECTORY, false, "Redis at h:1");
    f.launcher_held_view = true;
    t = find(n, 2, f);
    CHECK_SAYS(t, TROUBLE_LAUNCHER, false, "the launcher is gone");
    t = find(n, 1, f);
    CHECK_SAYS(t, TROUBLE_LAUNCHER, true, "the launcher is gone");
}

TEST(a_role_without_a_way_to_others_is_told)
{
    struct trouble_facts alone = { 0 };
    struct node_record d[] = { node_of(1, ROLE_DECODE) }, m[] = { node_of(1, ROLE_MIXED) };
    struct trouble t = find(d, 1, alone);
    CHECK_SAYS(t, TROUBLE_PRIVATE_VIEW, false, "role decode", "--router HOST:PORT",
               "--splitwise-role mixed", "baton doctor");
    t = find(m, 1, alone);
    CHECK_SAYS(t, TROUBLE_NONE, false, "");
}

/* A router that lists a node uses it with others, which it does not see itself. */
TEST(a_listed_node_is_told_of_its_router)
{
    struct trouble_facts listed = { .listed = TROUBLE_LISTED_WITH_OTHERS };
    struct node_record d[] = { node_of(1, ROLE_DECODE) }, p[] = { node_of(1, ROLE_PREFILL) };
    struct trouble t = find(d, 1, listed);
    CHECK_SAYS(t, TROUBLE_NONE, false, "");
    listed.join = JOINED.join; /* a prefill node has a control port */
    t = find(p, 1, listed);
    CHECK_SAYS(t, TROUBLE_NO_DECODE, true, "this prefill node sees no node that decodes",
               "the router that lists it", "send requests there");
    CHECK(!strstr(t.text, "start one") && !strstr(t.text, "--router"));
    listed.listed = TROUBLE_LISTED_ALONE;
    t = find(p, 1, listed);
    CHECK_SAYS(t, TROUBLE_NO_DECODE, true, "neither this prefill node nor the router",
               "--decoder-hosts or POST /instances/add");
    listed.listed = TROUBLE_NOT_LISTED;
    t = find(p, 1, listed);
    CHECK_SAYS(t, TROUBLE_NO_DECODE, true, "--router 10.0.0.1:9400");
}

TEST(another_model_is_named_with_its_node)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE) };
    n[1].model = 8;
    snprintf(n[1].precision, sizeof n[1].precision, "q8_0");
    struct trouble t = find(n, 2, JOINED);
    CHECK_SAYS(t, TROUBLE_OTHER_MODEL, true, "no living node decodes for this model",
               "decode node node-2", "smol (q8_0)", "smol (q4_1)", "--model", "topic default");
    /* With another that serves it is said all the same. */
    struct node_record three[] = { n[0], n[1], node_of(3, ROLE_DECODE) };
    t = find(three, 3, JOINED);
    CHECK_SAYS(t, TROUBLE_OTHER_MODEL, false, "node-2");
    snprintf(n[1].precision, sizeof n[1].precision, "q4_1");
    t = find(n, 2, JOINED);
    CHECK_SAYS(t, TROUBLE_OTHER_MODEL, true, "decode node node-2", "under the same name",
               "both are called smol (q4_1)", "--model");
}

/* Snapshots have their nodes in any order: who differs is told of once, not in turn. */
TEST(of_several_nodes_in_trouble_always_the_same_is_named)
{
    struct node_record n[] = { node_of(1, ROLE_MIXED), node_of(2, ROLE_DECODE),
                               node_of(3, ROLE_DECODE) };
    for (int i = 1; i < 3; i++) n[i].model = 8 + (uint64_t)i;
    struct node_record turned[] = { n[0], n[2], n[1] };
    CHECK_EQ_STR(find(n, 3, JOINED).text, find(turned, 3, JOINED).text);
    n[0].role = turned[0].role = ROLE_PREFILL; /* ... also where nothing is served */
    CHECK_EQ_STR(find(n, 3, JOINED).text, find(turned, 3, JOINED).text);
    struct view_suspect lost[] = { { .node = 2, .why = "x" }, { .node = 3, .why = "x" } };
    struct view v = {
        .nodes = n, .n_nodes = 3, .me = n[0], .suspects = lost, .n_suspects = 2, .model = 7
    };
    struct trouble_facts f = { .view = &v, .topic = "default", .join = JOINED.join };
    for (int i = 1; i < 3; i++) n[i].model = turned[3 - i].model = 7;
    for (int k = 0; k < 2; k++) {
        struct trouble t = { 0 };
        v.nodes = k ? turned : n;
        trouble_find(&f, &t);
        CHECK_SAYS(t, TROUBLE_PEER, true, "decode node node-2");
    }
}

TEST(a_record_that_the_secret_does_not_prove_is_a_peer_in_trouble)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL) };
    struct view v = { .nodes = n, .n_nodes = 1, .model = 7, .me = n[0] };
    struct trouble_facts f = { .view = &v, .topic = "default", .join = JOINED.join };
    struct trouble t = { 0 };
    v.unproven = node_of(2, ROLE_DECODE);
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_PEER, true, "decode node node-2", "only nodes of this host are used");
    v.secret = STR("ours");
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_PEER, true, "decode node node-2", "another cluster secret", "forged");
    n[0].role = ROLE_MIXED;
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_PEER, false, "decode node node-2", "BATON_CLUSTER_SECRET");
}

TEST(kv_that_cannot_be_exchanged_names_the_pair)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE) };
    snprintf(n[0].kv_type, sizeof n[0].kv_type, "f32");
    snprintf(n[1].kv_type, sizeof n[1].kv_type, "bf16");
    struct trouble t = find(n, 2, JOINED);
    CHECK_SAYS(t, TROUBLE_KV, false, "node-1", "node-2", "f32", "bf16", "--kv-cache-dtype");
    snprintf(n[1].kv_type, sizeof n[1].kv_type, "f32");
    snprintf(n[0].kv_by, sizeof n[0].kv_by, "rdma");
    snprintf(n[1].kv_by, sizeof n[1].kv_by, "tcp");
    n[0].kv_host = 5;
    n[1].kv_host = 6;
    t = find(n, 2, JOINED);
    CHECK_SAYS(t, TROUBLE_KV, false, "no transport in common", "ipc,rdma at the sender, ipc,tcp at",
               "different hosts", "--cache-transfer-protocol");
    n[1].kv_host = 5; /* one host: ipc */
    t = find(n, 2, JOINED);
    CHECK_SAYS(t, TROUBLE_NONE, false, "");
}

TEST(a_pair_that_is_apart_no_more_is_no_trouble)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE) };
    struct view v = { .nodes = n, .n_nodes = 2, .model = 7, .me = n[0] };
    const struct view_attempt a = { 5, 1, 2 };
    struct trouble_facts f = { .view = &v, .topic = "default", .join = JOINED.join };
    struct trouble t = { 0 };
    view_note_failure(&v, &a, 0, ERR_PEER_LOST, "a flap");
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_KV, false, "node-1", "node-2", "a flap");
    v.breaker.entries[0].until_ms = 1; /* a request may probe it: that is not over yet */
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_KV, false, "a flap");
    view_note(&v, &a, BREAKER_WORKED);
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_NONE, false, "");
}

/* Hosts with a prefill and a decode node each, which exchange KV by ipc alone. */
TEST(pairs_of_many_hosts_are_found_or_nothing_is_claimed)
{
    static const size_t hosts[] = { 17, 64, 65, 300 };
    for (size_t i = 0; i < COUNT_OF(hosts); i++) {
        size_t n_nodes = 2 * hosts[i];
        struct node_record *n = mem_calloc(n_nodes, sizeof *n);
        for (size_t k = 0; k < n_nodes; k++) {
            n[k] = node_of(1 + k, k % 2 ? ROLE_DECODE : ROLE_PREFILL);
            n[k].kv_host = 1 + k / 2;
        }
        struct trouble t = find(n, n_nodes, JOINED);
        CHECK_SAYS(t, TROUBLE_NONE, false, "");
        n[n_nodes - 1].kv_host = 9999;
        t = find(n, n_nodes, JOINED);
        if (hosts[i] <= 64) CHECK_SAYS(t, TROUBLE_KV, false, n[n_nodes - 2].name, "no transport");
        else CHECK_SAYS(t, TROUBLE_NONE, false, ""); /* not all were compared */
        mem_free(n);
    }
}

TEST(a_cause_is_written_as_json)
{
    struct buf b = { 0 };
    struct trouble t = { 0 };
    trouble_write(&t, 5000, &b);
    CHECK_EQ_STR(b.data, "null");
    buf_clear(&b);
    t = (struct trouble){ .cause = TROUBLE_PEER,
                          .blocks = true,
                          .text = "no \"way\"",
                          .since_ms = 2000,
                          .n_requests = 3 };
    trouble_write(&t, 5000, &b);
    CHECK_EQ_STR(b.data, "{\"cause\":\"peer\",\"blocks\":true,\"since_s\":3,\"requests\":3,"
                         "\"text\":\"no \\\"way\\\"\"}");
    buf_release(&b);
}

/* Redis goes and comes back: each time is a line, and after many the log still ends with what is
 * so. */
TEST(the_last_line_says_how_things_are)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE) };
    struct view v = { .nodes = n, .n_nodes = 2, .model = 7, .me = n[0] };
    struct trouble_facts down = { .view = &v,
                                  .topic = "default",
                                  .join = JOINED.join,
                                  .directory_down = "gone" },
                         up = down;
    struct trouble t = { 0 };
    uint64_t now = 1000000;
    up.directory_down = NULL;
    trouble_update(&t, &up, now);
    CHECK_EQ_INT(t.logged.n_lines, 0);
    for (int i = 0; i < 6; i++) {
        trouble_update(&t, i % 2 ? &up : &down, now += 100);
        CHECK_EQ_INT(t.logged.n_lines, i + 1);
        CHECK_EQ_INT(t.logged.cause, i % 2 ? TROUBLE_NONE : TROUBLE_DIRECTORY);
    }
    trouble_update(&t, &down, now += 100); /* one too many in a minute */
    CHECK_EQ_INT(t.logged.cause, TROUBLE_NONE);
    trouble_update(&t, &down, now += 4000);
    CHECK_EQ_INT(t.logged.cause, TROUBLE_NONE);
    trouble_update(&t, &down, now += 1000); /* it lasts */
    CHECK_EQ_INT(t.logged.cause, TROUBLE_DIRECTORY);
    CHECK_EQ_INT(t.logged.n_lines, 7);
    for (int i = 0; i < 10; i++) trouble_update(&t, i % 2 ? &down : &up, now += 100);
    CHECK_EQ_INT(t.logged.n_lines, 7); /* flapping */
    CHECK_EQ_INT(t.logged.cause, TROUBLE_DIRECTORY);
    trouble_update(&t, &up, now += 60000); /* a minute later the first change is a line again */
    CHECK_EQ_INT(t.logged.cause, TROUBLE_NONE);
    CHECK_EQ_INT(t.logged.n_lines, 1);
}

/* The log of three updates: all well, node 3 suspect, and then `after`. */
static const char *log_of_end(struct view *before, struct view *after, const char *name)
{
    static char text[8192];
    char path[4200];
    struct trouble t = { 0 };
    struct log_file_options o = { .dir = test_tmpdir(), .name = name };
    struct trouble_facts f = { .view = before, .topic = "default", .join = JOINED.join };
    CHECK_OK(log_set_file(&o));
    trouble_update(&t, &f, 1000);
    CHECK_EQ_INT(t.cause, TROUBLE_PEER);
    f.view = after;
    trouble_update(&t, &f, 5000);
    CHECK_EQ_INT(t.cause, TROUBLE_NONE);
    snprintf(path, sizeof path, "%s/%s", o.dir, name);
    FILE *file = fopen(path, "r");
    CHECK(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    CHECK(strstr(text, "degraded cause=peer"));
    return text;
}

TEST(a_node_that_was_forgotten_is_no_trouble_that_is_over)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE),
                               node_of(3, ROLE_DECODE) };
    struct view_suspect lost = { .node = 3, .why = "connect: refused" };
    struct view before = {
        .nodes = n, .n_nodes = 3, .model = 7, .me = n[0], .suspects = &lost, .n_suspects = 1
    };
    struct view after = before;
    after.n_suspects = 0;
    const char *text = log_of_end(&before, &after, "repaired");
    CHECK(strstr(text, "trouble is over cause=peer after_s=4.0"));
    CHECK(!strstr(text, "node removed"));
    after.n_nodes = 2;
    text = log_of_end(&before, &after, "forgotten");
    CHECK(strstr(text, "node removed from the list node=node-3 cause=peer after_s=4.0"));
    CHECK(!strstr(text, "trouble is over"));
    /* Started again, it is another process of that name. */
    struct node_record again[] = { n[0], n[1], node_of(4, ROLE_DECODE) };
    memcpy(again[2].name, n[2].name, sizeof n[2].name);
    after.nodes = again;
    after.n_nodes = 3;
    text = log_of_end(&before, &after, "again");
    CHECK(strstr(text, "trouble is over"));
}

/* A launcher has started it again: the record of the process that was killed is listed yet. */
TEST(a_record_left_behind_by_a_node_that_is_back_is_no_trouble)
{
    struct node_record n[] = { node_of(1, ROLE_PREFILL), node_of(2, ROLE_DECODE),
                               node_of(3, ROLE_DECODE) };
    struct view_suspect lost[] = { { .node = 2, .why = "connect: refused" },
                                   { .node = 3, .why = "connect: refused" } };
    struct view v = {
        .nodes = n, .n_nodes = 3, .model = 7, .me = n[0], .suspects = lost, .n_suspects = 1
    };
    struct trouble_facts f = { .view = &v, .topic = "default", .join = JOINED.join };
    struct trouble t = { 0 };
    trouble_find(&f, &t); /* others serve, but this one is gone */
    CHECK_SAYS(t, TROUBLE_PEER, false, "node-2", "if its process has ended, start it again",
               "leaves the list within seconds", "if it runs, check with: baton doctor --peers");
    memcpy(n[2].name, n[1].name, sizeof n[1].name);
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_NONE, false, "");
    v.n_suspects = 2; /* neither process of that name is reached */
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_PEER, true, "node-2");
}

TEST(a_router_of_another_model_is_told_what_its_nodes_need)
{
    struct node_record n[] = { node_of(1, ROLE_MIXED), node_of(2, ROLE_MIXED) };
    struct view v = { .nodes = n, .n_nodes = 2, .model = 7, .text = 11 };
    struct trouble_facts f = { .view = &v, .topic = "default", .join = JOINED.join };
    struct trouble t = { 0 };
    snprintf(v.me.model_name, sizeof v.me.model_name, "q");
    n[0].text = 11;
    n[1].text = 12;
    n[1].model = 8;
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_OTHER_MODEL, false, "node-2", "vocabulary is not that of q",
               "give each model its own --scheduler-topic and router");
    CHECK(!strstr(t.text, "start the router"));
    v.n_nodes = 1;
    n[0] = n[1];
    trouble_find(&f, &t);
    CHECK_SAYS(t, TROUBLE_OTHER_MODEL, true, "no node has this router's model",
               "start the router with the --model of its nodes, or without one");
}

/* ---- with real links ---- */

static enum trouble_cause cause_of(struct world *w)
{
    struct serve_backend_stats st;
    w->be.stats(w->be.self, &st);
    CHECK_EQ_INT(st.ready, !w->s->entry.trouble.blocks);
    CHECK_EQ_STR(st.why, w->s->entry.trouble.text);
    return w->s->entry.trouble.cause;
}

TEST(a_peer_that_cannot_be_connected_is_found_before_a_request)
{
    struct world w;
    world_open(&w, "d", 300);
    RIG_WAIT(&w.rig, cluster_is_linked(w.entry->c, w.nodes[0]->id));
    CHECK_EQ_INT(cause_of(&w), TROUBLE_NONE);
    /* A node that is listed, and where nobody listens. */
    struct node_record ghost = record_of(&w, 0);
    ghost.node = 77;
    ghost.cluster_port = 1;
    snprintf(ghost.name, sizeof ghost.name, "ghost");
    directory_publish(w.directory, &ghost);
    RIG_WAIT_MS(&w.rig, cause_of(&w) == TROUBLE_PEER, 5000);
    CHECK(strstr(w.s->entry.trouble.text, "ghost") && !w.s->entry.trouble.blocks);
    CHECK(strstr(w.s->entry.trouble.text, "baton doctor --peers 127.0.0.1:1"));
    directory_leave(w.directory, w.nodes[0]->id);
    RIG_WAIT_MS(&w.rig, w.s->entry.trouble.blocks, 5000);
    struct client c; /* the 503 has the same sentence */
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 3 }));
    RIG_WAIT_MS(&w.rig, c.n_ended == 1, 5000);
    CHECK_STATUS(c.end.status, ERR_UNAVAILABLE);
    CHECK(strstr(c.end.text, "decode node ghost cannot be connected"));
    CHECK_EQ_INT(w.s->entry.trouble.n_requests, 1);
    directory_leave(w.directory, 77);
    struct node_record back = record_of(&w, 0);
    directory_publish(w.directory, &back);
    RIG_WAIT_MS(&w.rig, cause_of(&w) == TROUBLE_NONE, 5000);
    world_close(&w);
}

/* GET /cluster shows the nodes and the trouble side by side: both must be of the same moment. */
TEST(the_described_trouble_is_as_new_as_the_nodes_beside_it)
{
    struct world w;
    struct buf json = { 0 };
    world_open(&w, "d", 300);
    RIG_WAIT(&w.rig, cluster_is_linked(w.entry->c, w.nodes[0]->id));
    CHECK_EQ_INT(cause_of(&w), TROUBLE_NONE);
    directory_leave(w.directory, w.nodes[0]->id);
    /* meanwhile the timer looks for no trouble */
    RIG_WAIT_MS(&w.rig, (w.s->entry.t_trouble_ms = clock_ms(), w.s->entry.view.n_nodes == 0), 5000);
    scheduler_describe(w.s, &json);
    CHECK(strstr(json.data, "\"trouble\":{"));
    buf_clear(&json);
    struct node_record back = record_of(&w, 0);
    directory_publish(w.directory, &back);
    RIG_WAIT_MS(&w.rig,
                (w.s->entry.t_trouble_ms = clock_ms(),
                 w.s->entry.view.n_nodes == 1 && cluster_is_linked(w.entry->c, w.nodes[0]->id)),
                5000);
    scheduler_describe(w.s, &json);
    CHECK(strstr(json.data, "\"trouble\":null"));
    buf_release(&json);
    world_close(&w);
}

TEST(a_link_that_broke_is_made_again_at_once_and_the_node_is_ready)
{
    struct world w;
    struct serve_backend_stats st;
    uint64_t avoid[BREAKER_MAX], t_ms;
    world_open(&w, "pd", 1000);
    uint64_t decode = w.nodes[1]->id;
    RIG_WAIT(&w.rig, cluster_is_linked(w.entry->c, decode));
    for (int i = 0; i < 3; i++) {
        cluster_disconnect(w.entry->c, decode, "for a moment");
        RIG_WAIT(&w.rig, w.entry->n_lost == (size_t)i + 1);
        t_ms = clock_ms();
        RIG_WAIT_MS(&w.rig, cluster_is_linked(w.entry->c, decode), 8000);
        rig_turn_ms(&w.rig, 60);
        w.be.stats(w.be.self, &st);
        CHECK(st.ready); /* before its breaker's pause ends */
        CHECK_EQ_STR(st.why, "");
        CHECK_EQ_INT(w.s->entry.view.n_suspects, 0);
    }
    RIG_WAIT_MS(&w.rig, view_excluded_nodes(&w.s->entry.view, avoid) == 0, 3000);
    CHECK(clock_ms() - t_ms < 2000); /* then a request may probe it */
    world_close(&w);
}

/* A directory that answers when the test wants. */
struct late {
    struct directory base;
    directory_snapshot_fn *cb;
    void *arg;
};

static enum status late_snapshot(struct directory *d, directory_snapshot_fn *cb, void *arg)
{
    struct late *l = (struct late *)d;
    l->cb = cb;
    l->arg = arg;
    return OK;
}

static void late_publish(struct directory *d, const struct node_record *me)
{
    (void)d;
    (void)me;
}

static const char *late_why(const struct directory *d)
{
    (void)d;
    return NULL;
}

static void describe_prefill(void *arg, struct node_record *me)
{
    (void)arg;
    *me = node_of(ENTRY_ID, ROLE_PREFILL);
}

TEST(no_trouble_is_looked_for_before_the_directory_has_answered)
{
    static const struct directory_ops ops = {
        .name = "late", .snapshot = late_snapshot, .publish = late_publish, .why_down = late_why
    };
    struct late late = { .base.ops = &ops };
    struct world w;
    struct serve_backend_stats st;
    world_open(&w, "d", 1000);
    struct scheduler_options o = w.s->o;
    o.directory = &late.base;
    o.describe = describe_prefill;
    o.join = "x";
    struct scheduler *s = scheduler_create(&o);
    struct serve_backend be = scheduler_backend(s);
    rig_turn_ms(&w.rig, 1200);
    be.stats(be.self, &st);
    CHECK(!st.ready && strstr(st.why, "has not answered yet"));
    CHECK_EQ_INT(s->entry.trouble.cause, TROUBLE_NONE);
    CHECK_EQ_INT(s->entry.trouble.logged.n_lines, 0);
    late.cb(late.arg, ERR_UNAVAILABLE, NULL);
    be.stats(be.self, &st);
    CHECK(!st.ready);
    CHECK_EQ_INT(s->entry.trouble.cause, TROUBLE_NO_DECODE);
    scheduler_stop(s);
    scheduler_free(s);
    world_close(&w);
}

TEST(a_refused_pair_is_asked_once)
{
    struct world w;
    struct client c;
    world_open(&w, "pd", 1000);
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 3 }));
    struct attempt a = play_split(&w, &c, AT_PREFILL, 0);
    reply_failed(a.prefill, &a, ERR_PEER_MISMATCH);
    /* This request goes on with the decode node alone, and so do the next ones, at once. */
    for (int i = 0; i < 3; i++) {
        struct received_message *h = world_expect(&w, FRAME_RUN, &a.decode);
        a.request = h->request;
        a.number = h->attempt;
        CHECK_EQ_INT(a.number, i == 0 ? 2 : 1);
        play_rest(&w, &c, &a, 3);
        if (i < 2) CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 3 }));
    }
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_ASK_CREDIT), 0);
    CHECK_EQ_INT(cause_of(&w), TROUBLE_KV);
    CHECK(strstr(w.s->entry.trouble.text, "as the test wanted"));
    world_check_idle(&w);
    world_close(&w);
}

/* One flap fails all prompts that wait for the connection. */
TEST(failures_at_one_time_part_a_pair_once_and_kv_that_arrives_clears_them)
{
    enum { CLIENTS = 6 };
    struct world w;
    struct client c[CLIENTS];
    struct attempt a[CLIENTS];
    world_open(&w, "pd", 1000);
    struct view *v = &w.s->entry.view;
    for (int i = 0; i < CLIENTS; i++) {
        CHECK_OK(client_submit(&w, &c[i], (struct ask){ .max_tokens = 3 }));
        a[i] = play_split(&w, &c[i], AT_PREFILL, 0);
    }
    for (int i = 0; i < CLIENTS; i++) reply_failed(a[i].prefill, &a[i], ERR_PEER_REFUSED);
    for (int i = 0; i < CLIENTS; i++) {
        struct received_message *h = world_expect(&w, FRAME_RUN, &a[i].decode);
        a[i].request = h->request;
        a[i].number = h->attempt;
    }
    struct breaker_entry *e = &v->breaker.entries[0];
    CHECK_EQ_INT(v->breaker.n, 1);
    CHECK_EQ_INT(e->n_pauses, 1);
    CHECK(e->until_ms <= clock_ms() + BREAKER_PAUSE_MS);
    for (int i = 0; i < CLIENTS; i++)
        for (int k = 0; k < CLIENTS; k++)
            if (c[k].id == a[i].request) play_rest(&w, &c[k], &a[i], 3);
    for (uint32_t n = 2; n <= 3; n++) { /* later failures double the time */
        e->until_ms = 1;                /* time passes */
        CHECK_OK(client_submit(&w, &c[0], (struct ask){ .max_tokens = 3 }));
        a[0] = play_split(&w, &c[0], AT_PREFILL, 0);
        reply_failed(a[0].prefill, &a[0], ERR_PEER_REFUSED);
        struct received_message *h = world_expect(&w, FRAME_RUN, &a[0].decode);
        a[0].number = h->attempt;
        CHECK_EQ_INT(e->n_pauses, n);
        play_rest(&w, &c[0], &a[0], 3);
    }
    e->until_ms = 1;
    CHECK_OK(client_submit(&w, &c[0], (struct ask){ .max_tokens = 3 }));
    a[0] = play_split(&w, &c[0], AT_DECODE, 1); /* the KV has arrived */
    CHECK_EQ_INT(v->breaker.n, 0);
    play_rest(&w, &c[0], &a[0], 3);
    world_check_idle(&w);
    world_close(&w);
}

TEST_MAIN(CASE(all_is_well), CASE(prefill_nodes_alone_serve_what_is_not_split),
          CASE(what_nobody_can_join_names_no_command),
          CASE(no_decode_node_names_what_is_seen_and_how_to_start_one),
          CASE(a_directory_that_is_away_comes_first),
          CASE(a_launcher_that_is_gone_is_told_and_is_why_its_view_is_away),
          CASE(a_role_without_a_way_to_others_is_told), CASE(a_listed_node_is_told_of_its_router),
          CASE(another_model_is_named_with_its_node),
          CASE(of_several_nodes_in_trouble_always_the_same_is_named),
          CASE(a_record_that_the_secret_does_not_prove_is_a_peer_in_trouble),
          CASE(kv_that_cannot_be_exchanged_names_the_pair),
          CASE(a_pair_that_is_apart_no_more_is_no_trouble),
          CASE(pairs_of_many_hosts_are_found_or_nothing_is_claimed),
          CASE(a_command_that_starts_a_decode_node_is_never_cut),
          CASE(no_trouble_is_looked_for_before_the_directory_has_answered),
          CASE(a_cause_is_written_as_json), CASE(the_last_line_says_how_things_are),
          CASE(a_node_that_was_forgotten_is_no_trouble_that_is_over),
          CASE(a_record_left_behind_by_a_node_that_is_back_is_no_trouble),
          CASE(a_router_of_another_model_is_told_what_its_nodes_need),
          CASE(a_peer_that_cannot_be_connected_is_found_before_a_request),
          CASE(the_described_trouble_is_as_new_as_the_nodes_beside_it),
          CASE(a_link_that_broke_is_made_again_at_once_and_the_node_is_ready),
          CASE(a_refused_pair_is_asked_once),
          CASE(failures_at_one_time_part_a_pair_once_and_kv_that_arrives_clears_them))
