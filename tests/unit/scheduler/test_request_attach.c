/* test_request_attach.c - requests of clients that come back: a node goes on with the answer that it
 * has kept, or the answer is computed again, or cannot be. The test plays the nodes; links and
 * directory are real. */
#include "tests/unit/scheduler/scheduler_rig.h"

#include "scheduler/request_attach.h"
#include "scheduler/scheduler_internal.h"

static const struct hash128 KEY = { 7, 8 };

static void world_open_keeping(struct world *w, const char *roles)
{
    world_nodes.resume_ms = 10000;
    world_open(w, roles, 1000);
    RIG_WAIT(&w->rig, w->s->entry.view.n_nodes == w->n_nodes);
}

/* A client that has `n` tokens of `node`. */
static struct ask back(uint64_t node, uint32_t n)
{
    const struct node_record usual = { .model = 7 };
    return (struct ask){ .max_tokens = 10,
                         .resume = { .wanted = true,
                                     .key = KEY,
                                     .returns = true,
                                     .node = node,
                                     .n_delivered = n,
                                     .model_bits = view_model_bits(&usual) } };
}

static const struct ask ASKS_ALL = {
    .max_tokens = 10, .resume = { .wanted = true, .key = { 7, 8 }, .asks_all = true }
};

/* The next node that is asked for the answer. */
static struct attempt expect_attach(struct world *w, uint32_t want_from)
{
    struct attempt a = { 0 };
    struct received_message *h = world_expect(w, FRAME_ATTACH, &a.decode);
    Baton__Attach *m = baton__attach__unpack(NULL, h->body.len, (const uint8_t *)h->body.data);
    struct hash128 key;
    CHECK(m && generation_wire_read_key(m->resume_key, &key) && hash128_eq(key, KEY));
    CHECK_EQ_INT(m->want_from, want_from);
    baton__attach__free_unpacked(m, NULL);
    a.request = h->request;
    a.number = h->attempt;
    return a;
}

static void reply_attached(const struct attempt *a, uint32_t first, size_t n_given)
{
    Baton__Attached m = BATON__ATTACHED__INIT;
    int32_t given[16];
    for (size_t i = 0; i < n_given; i++) given[i] = 1000 + (int32_t)i;
    m.first = first;
    m.given = (ProtobufCBinaryData){ n_given * sizeof *given, (uint8_t *)given };
    reply(a->decode, a, FRAME_ATTACHED, &m.base);
}

static unsigned resumes(const struct world *w, char kind)
{
    const struct scheduler_metrics *m = &w->s->entry.metrics;
    return (unsigned)counter_value(kind == 'a'   ? m->resumes_attached
                                   : kind == 'c' ? m->resumes_computed
                                                 : m->resumes_refused);
}

TEST(attach_goes_on_with_the_kept_answer)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pd");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    reply_attached(&a, 0, 0);
    reply_tokens(a.decode, &a, 0, 10, FINISH_LENGTH);
    reply_finished(a.decode, &a, 10);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    CHECK_EQ_INT(c.n_tokens, 10); /* also those that the client has: they are needed for the text */
    CHECK_EQ_INT(c.node, w.nodes[1]->id);
    CHECK_EQ_STR(c.end.trace.decode_node, "decode-1");
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_ASK_CREDIT), 0);
    CHECK(resumes(&w, 'a') == 1 && resumes(&w, 'c') == 0);
    world_check_idle(&w);
    world_close(&w);
}

/* The node has ids alone of what an earlier attempt delivered. */
TEST(attach_takes_ids_of_earlier_attempts)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "d");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[0]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    reply_attached(&a, 3, 3);
    reply_tokens(a.decode, &a, 3, 10, FINISH_LENGTH);
    reply_finished(a.decode, &a, 7);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    CHECK_EQ_INT(c.n_tokens, 10);
    for (int i = 0; i < 10; i++) CHECK_EQ_INT(c.tokens[i], 1000 + i);
    world_close(&w);
}

static void check_computed_after(struct world *w, struct client *c, unsigned n_attached,
                                 unsigned n_computed)
{
    struct attempt a = play_split(w, c, AT_DECODE, 1);
    play_rest(w, c, &a, 10);
    CHECK_EQ_INT(resumes(w, 'a'), n_attached);
    CHECK_EQ_INT(resumes(w, 'c'), n_computed);
    CHECK_EQ_INT(resumes(w, 'r'), 0);
    CHECK_EQ_INT(c->end.trace.n_moves, 0);
    world_check_idle(w);
}

static void check_computed(struct world *w, struct client *c, unsigned n_computed)
{
    check_computed_after(w, c, 0, n_computed);
}

TEST(attach_refused_is_computed_again)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pd");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    reply_failed(a.decode, &a, ERR_NOT_FOUND);
    check_computed(&w, &c, 1);
    CHECK_EQ_INT(cells(&w, "attach", "decode_node", "compute"), 1);
    world_close(&w);
}

TEST(attach_to_a_node_that_is_gone_is_computed_again)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pdd");
    uint64_t gone = w.nodes[2]->id;
    world_kill(&w, w.nodes[2]);
    RIG_WAIT(&w.rig, view_why_unreachable(&w.s->entry.view, gone));
    CHECK_OK(client_submit(&w, &c, back(gone, 4)));
    check_computed(&w, &c, 1);
    CHECK_OK(client_submit(&w, &c, back(987654, 4))); /* never was in the view */
    check_computed(&w, &c, 2);
    world_close(&w);
}

TEST(attach_lost_while_asked_is_computed_again)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pdd");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[2]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    world_kill(&w, a.decode);
    check_computed(&w, &c, 1);
    world_close(&w);
}

/* A node that is stopped: the client waits for half a second, not for its links to notice. */
TEST(attach_without_an_answer_is_computed_again)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pd");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    uint64_t t0 = clock_ms();
    struct received_message *h = NULL;
    RIG_WAIT_MS(&w.rig, (h = received_take(a.decode, FRAME_CANCEL)), 5000);
    CHECK(clock_ms() - t0 >= ATTACH_MS - 100);
    CHECK_EQ_INT(h->attempt, a.number);
    check_computed(&w, &c, 1);
    CHECK_EQ_INT(cells(&w, "attach", "stuck", "compute"), 1);
    world_close(&w);
}

TEST(attach_that_answers_nonsense_is_computed_again)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pd");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    reply_attached(&a, 3, 2);
    check_computed(&w, &c, 1);
    CHECK_EQ_INT(received_count(w.nodes[1], FRAME_CANCEL), 1);
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    a = expect_attach(&w, UINT32_MAX);
    CHECK_OK(cluster_send(a.decode->c, ENTRY_ID, FRAME_ATTACHED, a.request, a.number,
                          STR("\xff\xff\xff")));
    check_computed(&w, &c, 2);
    world_close(&w);
}

/* The prompt's logprobs went to the first entry node. */
TEST(attach_is_not_tried_for_logprobs_of_the_prompt)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "d");
    struct ask ask = back(w.nodes[0]->id, 0);
    ask.prompt_logprobs = true;
    ask.max_tokens = 0;
    CHECK_OK(client_submit(&w, &c, ask));
    struct attempt a = { 0 };
    struct received_message *h = world_expect(&w, FRAME_RUN, &a.decode);
    a.request = h->request;
    a.number = h->attempt;
    reply_finished(a.decode, &a, 0);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_ATTACH), 0);
    world_close(&w);
}

TEST(attach_asks_all_and_takes_the_first)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pddd");
    CHECK_OK(client_submit(&w, &c, ASKS_ALL));
    struct attempt a[3];
    for (int i = 0; i < 3; i++) a[i] = expect_attach(&w, UINT32_MAX);
    reply_failed(a[0].decode, &a[0], ERR_NOT_FOUND);
    rig_turn_ms(&w.rig, 10);
    reply_attached(&a[1], 0, 0);
    reply_attached(&a[2], 0, 0); /* too late */
    reply_tokens(a[1].decode, &a[1], 0, 10, FINISH_LENGTH);
    reply_finished(a[1].decode, &a[1], 10);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    RIG_WAIT(&w.rig, received_count(a[2].decode, FRAME_CANCEL) == 1);
    CHECK_EQ_INT(received_count(a[0].decode, FRAME_CANCEL), 0);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_ATTACH), 0); /* it decodes nothing */
    CHECK_EQ_INT(resumes(&w, 'a'), 1);
    world_close(&w);
}

/* Its client has no token of it yet, so it does not know the node. */
TEST(attach_asks_all_for_a_choice_without_a_node)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pdd");
    CHECK_OK(client_submit(&w, &c, back(0, 0)));
    struct attempt a[2];
    for (int i = 0; i < 2; i++) a[i] = expect_attach(&w, UINT32_MAX);
    reply_attached(&a[1], 0, 0);
    reply_tokens(a[1].decode, &a[1], 0, 10, FINISH_LENGTH);
    reply_finished(a[1].decode, &a[1], 10);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_OK(c.end.status);
    RIG_WAIT(&w.rig, received_count(a[0].decode, FRAME_CANCEL) == 1);
    CHECK_OK(client_submit(&w, &c, back(0, 0)));
    for (int i = 0; i < 2; i++) {
        struct attempt b = expect_attach(&w, UINT32_MAX);
        reply_failed(b.decode, &b, ERR_NOT_FOUND);
    }
    check_computed_after(&w, &c, 1, 1);
    world_close(&w);
}

/* A request that comes for the first time: nobody has it, and it is no resume. */
TEST(attach_asks_all_in_vain)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pdd");
    CHECK_OK(client_submit(&w, &c, ASKS_ALL));
    for (int i = 0; i < 2; i++) {
        struct attempt a = expect_attach(&w, UINT32_MAX);
        reply_failed(a.decode, &a, ERR_NOT_FOUND);
    }
    check_computed(&w, &c, 0);
    world_close(&w);
}

TEST(attach_is_cancelled_at_every_node)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "dd");
    CHECK_OK(client_submit(&w, &c, ASKS_ALL));
    for (int i = 0; i < 2; i++) expect_attach(&w, UINT32_MAX);
    w.be.cancel(w.be.self, c.id);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_STATUS(c.end.status, ERR_CANCELED);
    for (int i = 0; i < 2; i++) RIG_WAIT(&w.rig, received_count(w.nodes[i], FRAME_CANCEL) == 1);
    world_close(&w);
}

/* A request that is attached to the second of two nodes, and has 5 of its 10 tokens. */
static struct attempt attach_to_second(struct world *w, struct client *c)
{
    world_open_keeping(w, "dd");
    CHECK_OK(client_submit(w, c, back(w->nodes[1]->id, 2)));
    struct attempt a = expect_attach(w, UINT32_MAX);
    reply_attached(&a, 0, 0);
    reply_tokens(a.decode, &a, 0, 5, FINISH_NONE);
    RIG_WAIT(&w->rig, c->n_tokens == 5);
    return a;
}

static void check_goes_on_at_first(struct world *w, struct client *c, uint32_t n_moves)
{
    struct attempt b = { 0 };
    struct received_message *h = world_expect(w, FRAME_RUN, &b.decode);
    check_generation(h, 5);
    b.request = h->request;
    b.number = h->attempt;
    play_rest(w, c, &b, 10);
    CHECK_EQ_INT(c->end.trace.n_moves, n_moves);
    CHECK_EQ_INT(c->node, w->nodes[0]->id);
    world_check_idle(w);
    world_close(w);
}

/* What was attached is a request like any other. */
TEST(attached_request_moves_when_its_node_is_lost)
{
    struct world w;
    struct client c;
    struct attempt a = attach_to_second(&w, &c);
    world_kill(&w, a.decode);
    check_goes_on_at_first(&w, &c, 1);
}

TEST(attached_request_goes_on_when_its_node_hands_it_back)
{
    struct world w;
    struct client c;
    struct attempt a = attach_to_second(&w, &c);
    reply_blame(a.decode, &a, ERR_BUSY, BLAME_HANDED_BACK);
    check_goes_on_at_first(&w, &c, 0);
}

/* Its client came back elsewhere: it ends here, and is not tried again. */
TEST(detached_request_ends)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pd");
    CHECK_OK(client_submit(&w, &c, (struct ask){ .max_tokens = 10, .resume = { .wanted = true } }));
    struct attempt a = play_split(&w, &c, AT_DECODE, 3);
    Baton__Detached m = BATON__DETACHED__INIT;
    reply(a.decode, &a, FRAME_DETACHED, &m.base);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_STATUS(c.end.status, ERR_CONFLICT);
    rig_turn_ms(&w.rig, 100);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_ASK_CREDIT), 0);
    world_check_idle(&w);
    world_close(&w);
}

static void check_refused(struct world *w, struct client *c, const char *says)
{
    RIG_WAIT(&w->rig, c->n_ended == 1);
    CHECK_STATUS(c->end.status, ERR_CONFLICT);
    if (!strstr(c->end.text, says)) test_fail(__FILE__, __LINE__, "%s: %s", says, c->end.text);
}

TEST(attach_is_refused_where_bits_differ)
{
    struct world w;
    struct client c;
    world_nodes.not_deterministic = true;
    world_open_keeping(&w, "pd");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    reply_failed(a.decode, &a, ERR_NOT_FOUND);
    check_refused(&w, &c, "--deterministic");
    CHECK_EQ_INT(resumes(&w, 'r'), 1);
    CHECK_EQ_INT(resumes(&w, 'c'), 0);
    world_check_idle(&w);
    /* Attached before the tokens that the client has came again, and lost. */
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    a = expect_attach(&w, UINT32_MAX);
    reply_attached(&a, 0, 0);
    reply_tokens(a.decode, &a, 0, 2, FINISH_NONE);
    reply_failed(a.decode, &a, ERR_IO);
    check_refused(&w, &c, "--deterministic");
    /* The client has nothing of it yet: any answer will do. */
    CHECK_OK(client_submit(&w, &c, back(987654, 0)));
    a = play_split(&w, &c, AT_DECODE, 1);
    play_rest(&w, &c, &a, 10);
    world_close(&w);
}

static void refuse_after_attach(struct world *w, struct client *c, struct ask ask, const char *says)
{
    CHECK_OK(client_submit(w, c, ask));
    struct attempt a = expect_attach(w, UINT32_MAX);
    reply_failed(a.decode, &a, ERR_NOT_FOUND);
    check_refused(w, c, says);
}

/* The rest of one model's answer is not computed by another, nor with another KV type. */
TEST(attach_is_refused_where_the_model_is_another)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "d");
    struct ask ask = back(w.nodes[0]->id, 4);
    ask.resume.model_bits = 0xabcdef;
    refuse_after_attach(&w, &c, ask, "Last-Event-ID names the model m0000000000abcdef");
    ask.resume.model_bits = 0; /* its choices are not of one model */
    refuse_after_attach(&w, &c, ask, "Last-Event-ID names no one model");
    CHECK_EQ_INT(resumes(&w, 'r'), 2);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_RUN), 0);
    world_close(&w);
    world_nodes.kv_type = "bf16";
    world_open_keeping(&w, "d");
    refuse_after_attach(&w, &c, back(w.nodes[0]->id, 4), "another model or KV type");
    /* What was kept goes on, whatever it is. */
    CHECK_OK(client_submit(&w, &c, back(w.nodes[0]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    reply_attached(&a, 0, 0);
    play_rest(&w, &c, &a, 10);
    const struct node_record r = record_of(&w, 0);
    CHECK(c.model_bits == view_model_bits(&r));
    world_close(&w);
}

/* There it is the only way to the rest of the answer: a node that is slow is waited for. */
TEST(attach_waits_where_bits_differ)
{
    struct world w;
    struct client c;
    world_nodes.not_deterministic = true;
    world_open_keeping(&w, "pd");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    rig_turn_ms(&w.rig, 2 * ATTACH_MS);
    CHECK_EQ_INT(c.n_ended + received_count(w.nodes[1], FRAME_CANCEL), 0);
    reply_attached(&a, 0, 0);
    play_rest(&w, &c, &a, 10);
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    a = expect_attach(&w, UINT32_MAX);
    world_kill(&w, a.decode);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_STATUS(c.end.status, ERR_CONFLICT);
    world_close(&w);
}

static void check_comes(struct world *w, struct client *c)
{
    struct attempt a = expect_attach(w, UINT32_MAX);
    reply_attached(&a, 0, 0);
    play_rest(w, c, &a, 10);
    CHECK_EQ_INT(resumes(w, 'a'), 1);
    CHECK_EQ_INT(resumes(w, 'c') + resumes(w, 'r'), 0);
    world_close(w);
}

/* A router that was started again: its nodes register one after the other. */
TEST(attach_waits_for_a_node_that_is_not_seen_yet)
{
    struct world w;
    struct client c;
    world_nodes.not_deterministic = true;
    world_open_keeping(&w, "p");
    CHECK_OK(client_submit(&w, &c, back(2, 4))); /* the second that is opened */
    rig_turn_ms(&w.rig, 2 * ATTACH_MS);
    CHECK_EQ_INT(c.n_ended, 0);
    CHECK_EQ_INT(w.nodes[world_add(&w, ROLE_DECODE)]->id, 2);
    check_comes(&w, &c);
}

/* Of an empty view nothing is known, least of all that its nodes repeat bits. */
TEST(attach_waits_while_no_node_is_seen)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "");
    RIG_WAIT(&w.rig, w.s->entry.view.known);
    CHECK_OK(client_submit(&w, &c, back(1, 4)));
    rig_turn_ms(&w.rig, 2 * ATTACH_MS);
    CHECK_EQ_INT(c.n_ended + resumes(&w, 'c') + resumes(&w, 'r'), 0);
    world_add(&w, ROLE_MIXED);
    check_comes(&w, &c);
}

/* Its link was cut for a moment; the node is there. */
TEST(attach_waits_for_a_node_without_a_link)
{
    struct world w;
    struct client c;
    world_nodes.not_deterministic = true;
    world_open_keeping(&w, "pd");
    const uint64_t node = w.nodes[1]->id;
    RIG_WAIT(&w.rig, cluster_is_linked(w.entry->c, node));
    view_suspect(&w.s->entry.view, node, "its link was lost");
    w.s->entry.view.suspects[0].dial_ms = clock_ms() + 60000;
    cluster_disconnect(w.entry->c, node, "the test cuts it");
    RIG_WAIT(&w.rig, !cluster_is_linked(w.entry->c, node));
    w.s->entry.view.suspects[0].dial_ms = clock_ms() + 60000;
    CHECK_OK(client_submit(&w, &c, back(node, 4)));
    rig_turn_ms(&w.rig, 2 * ATTACH_MS);
    CHECK_EQ_INT(c.n_ended + received_count(w.nodes[1], FRAME_ATTACH), 0);
    w.s->entry.view.suspects[0].dial_ms = 0;
    check_comes(&w, &c);
}

/* What was asked for may have been given to it by now: it stays for its client. */
TEST(attach_of_a_node_that_leaves_is_not_cancelled)
{
    struct world w;
    struct client c;
    world_open_keeping(&w, "pd");
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    expect_attach(&w, UINT32_MAX);
    scheduler_stop(w.s);
    CHECK_STATUS(c.end.status, ERR_CANCELED);
    rig_turn_ms(&w.rig, 50);
    CHECK_EQ_INT(received_count(w.nodes[1], FRAME_CANCEL), 0);
    world_close(&w);
}

/* ---- admission ---- */

static void world_open_limited(struct world *w, struct tenants *tenants, const char *keys)
{
    tenants_init(tenants);
    CHECK_OK(tenants_parse(tenants, str_of(keys), "keys", NULL));
    world_entry.tenants = tenants;
    world_open_keeping(w, "d");
    struct node_record r = record_of(w, 0);
    r.max_seqs = 1;
    directory_publish(w->directory, &r);
    RIG_WAIT(&w->rig, w->s->entry.view.nodes[0].max_seqs == 1);
}

static struct ask of_tenant(struct ask a)
{
    a.admission.tenant = 1;
    return a;
}

static struct admit_numbers numbers_of(const struct world *w)
{
    struct admit_numbers n;
    admit_numbers(w->s->entry.admission.admit, 1, clock_ms(), &n);
    return n;
}

/* A client may send any handle: only what a node has kept was admitted before. */
TEST(attach_refused_is_limited_like_a_new_request)
{
    struct world w;
    struct tenants tenants;
    struct client first, c;
    world_open_limited(&w, &tenants, "a k requests_per_minute=1\n");
    CHECK_OK(client_submit(&w, &first, of_tenant((struct ask){ .max_tokens = 3 })));
    struct attempt run = expect_run(&w), a;
    play_rest(&w, &first, &run, 3);
    CHECK_OK(client_submit(&w, &c, of_tenant(back(w.nodes[0]->id, 4))));
    a = expect_attach(&w, UINT32_MAX);
    reply_attached(&a, 0, 0);
    play_rest(&w, &c, &a, 10);
    CHECK_EQ_INT(numbers_of(&w).n_prompt_tokens, PROMPT_LEN); /* of the first alone */
    CHECK_EQ_INT(numbers_of(&w).n_output_tokens, 3 + 10 - 4);
    CHECK_OK(client_submit(&w, &c, of_tenant(back(w.nodes[0]->id, 4))));
    a = expect_attach(&w, UINT32_MAX);
    reply_failed(a.decode, &a, ERR_NOT_FOUND);
    RIG_WAIT(&w.rig, c.n_ended == 1);
    CHECK_STATUS(c.end.status, ERR_FULL);
    CHECK(c.end.retry_after_s >= 1 && c.end.retry[0]);
    CHECK(strstr(c.end.text, "requests_per_minute is 1"));
    rig_turn_ms(&w.rig, 60);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_RUN), 0);
    CHECK_EQ_INT(resumes(&w, 'c'), 0);
    CHECK_EQ_INT(numbers_of(&w).n_waiting + numbers_of(&w).n_running, 0);
    world_check_idle(&w);
    world_close(&w);
    tenants_release(&tenants);
}

TEST(attach_refused_waits_in_line_and_pays)
{
    struct world w;
    struct tenants tenants;
    struct client first, earlier, c;
    world_open_limited(&w, &tenants, "a k concurrent=3\n");
    CHECK_OK(client_submit(&w, &first, of_tenant((struct ask){ .max_tokens = 3 })));
    struct attempt run = expect_run(&w), a;
    CHECK_OK(client_submit(&w, &earlier, of_tenant((struct ask){ .max_tokens = 3 })));
    CHECK_OK(client_submit(&w, &c, of_tenant(back(w.nodes[0]->id, 4))));
    a = expect_attach(&w, UINT32_MAX);
    CHECK_EQ_INT(numbers_of(&w).n_waiting, 2);
    reply_failed(a.decode, &a, ERR_NOT_FOUND);
    RIG_WAIT(&w.rig, resumes(&w, 'c') == 1);
    CHECK_EQ_INT(numbers_of(&w).n_waiting, 2); /* it is no third beside itself */
    rig_turn_ms(&w.rig, 60);
    CHECK_EQ_INT(received_count(w.nodes[0], FRAME_RUN), 0);
    play_rest(&w, &first, &run, 3);
    run = expect_run(&w);
    CHECK_EQ_INT(run.request, earlier.id);
    play_rest(&w, &earlier, &run, 3);
    run = expect_run(&w);
    CHECK_EQ_INT(run.request, c.id);
    play_rest(&w, &c, &run, 10);
    CHECK_EQ_INT(numbers_of(&w).n_prompt_tokens, 3 * PROMPT_LEN);
    CHECK_EQ_INT(numbers_of(&w).n_output_tokens, 3 + 3 + 10); /* also what its client has */
    world_check_idle(&w);
    world_close(&w);
    tenants_release(&tenants);
}

/* While nodes are asked, a new request with a name counts as one that waits. */
TEST(attach_that_asks_all_counts_at_once)
{
    struct world w;
    struct tenants tenants;
    struct client c, c2;
    world_open_limited(&w, &tenants, "a k concurrent=1\n");
    CHECK_OK(client_submit(&w, &c, of_tenant(ASKS_ALL)));
    CHECK_STATUS(client_submit(&w, &c2, of_tenant(ASKS_ALL)), ERR_FULL);
    struct attempt a = expect_attach(&w, UINT32_MAX);
    reply_failed(a.decode, &a, ERR_NOT_FOUND);
    a = expect_run(&w);
    play_rest(&w, &c, &a, 10);
    CHECK_OK(client_submit(&w, &c2, of_tenant(ASKS_ALL)));
    w.be.cancel(w.be.self, c2.id);
    RIG_WAIT(&w.rig, c2.n_ended == 1);
    CHECK_EQ_INT(numbers_of(&w).n_waiting, 0);
    world_close(&w);
    tenants_release(&tenants);
}

/* Nodes that keep nothing are neither asked nor named to clients. */
TEST(attach_leaves_nodes_that_keep_nothing_alone)
{
    struct world w;
    struct client c;
    world_nodes.resume_ms = 0;
    world_open(&w, "pd", 1000);
    RIG_WAIT(&w.rig, w.s->entry.view.n_nodes == 2);
    CHECK_OK(client_submit(&w, &c, back(w.nodes[1]->id, 4)));
    check_computed(&w, &c, 1);
    CHECK_EQ_INT(c.node, 0);
    CHECK_OK(client_submit(&w, &c, ASKS_ALL));
    check_computed(&w, &c, 1);
    CHECK_EQ_INT(received_count(w.nodes[1], FRAME_ATTACH), 0);
    world_close(&w);
}

/* Whoever names answers that nobody keeps takes no more of the entry node than his limit. */
TEST(those_who_look_for_answers_are_as_many_as_may_run)
{
    struct world w;
    struct client c[3];
    struct tenants tenants;
    tenants_init(&tenants);
    CHECK_OK(tenants_parse(&tenants, STR("a k concurrent=1\nb l\n"), "keys", NULL));
    world_entry.tenants = &tenants;
    world_open_keeping(&w, "pd");
    struct ask of_a = back(w.nodes[1]->id, 4), of_b = of_a;
    of_a.admission.tenant = 1;
    of_b.admission.tenant = 2;
    CHECK_OK(client_submit(&w, &c[0], of_a));
    CHECK_STATUS(client_submit(&w, &c[1], of_a), ERR_FULL);
    CHECK(c[1].why.retry_after_s == 1 && strstr(c[1].why.err.text, "tenant a is reached"));
    CHECK_OK(client_submit(&w, &c[2], of_b));
    for (int i = 0; i < 2; i++) {
        struct attempt a = expect_attach(&w, UINT32_MAX);
        reply_attached(&a, 0, 0);
        play_rest(&w, a.request == c[0].id ? &c[0] : &c[2], &a, 10);
    }
    CHECK_OK(client_submit(&w, &c[1], of_a));
    struct attempt a = expect_attach(&w, UINT32_MAX);
    reply_attached(&a, 0, 0);
    play_rest(&w, &c[1], &a, 10);
    world_check_idle(&w);
    world_close(&w);
    tenants_release(&tenants);
}

TEST_MAIN(
    CASE(attach_goes_on_with_the_kept_answer), CASE(attach_takes_ids_of_earlier_attempts),
    CASE(attach_refused_is_computed_again), CASE(attach_to_a_node_that_is_gone_is_computed_again),
    CASE(attach_lost_while_asked_is_computed_again),
    CASE(attach_without_an_answer_is_computed_again),
    CASE(attach_that_answers_nonsense_is_computed_again),
    CASE(attach_is_not_tried_for_logprobs_of_the_prompt), CASE(attach_asks_all_and_takes_the_first),
    CASE(attach_asks_all_for_a_choice_without_a_node), CASE(attach_asks_all_in_vain),
    CASE(attach_is_cancelled_at_every_node), CASE(attached_request_moves_when_its_node_is_lost),
    CASE(attached_request_goes_on_when_its_node_hands_it_back), CASE(detached_request_ends),
    CASE(attach_is_refused_where_bits_differ), CASE(attach_is_refused_where_the_model_is_another),
    CASE(attach_waits_where_bits_differ), CASE(attach_waits_for_a_node_that_is_not_seen_yet),
    CASE(attach_waits_while_no_node_is_seen), CASE(attach_waits_for_a_node_without_a_link),
    CASE(attach_of_a_node_that_leaves_is_not_cancelled),
    CASE(attach_refused_is_limited_like_a_new_request), CASE(attach_refused_waits_in_line_and_pays),
    CASE(attach_that_asks_all_counts_at_once), CASE(attach_leaves_nodes_that_keep_nothing_alone),
    CASE(those_who_look_for_answers_are_as_many_as_may_run))
