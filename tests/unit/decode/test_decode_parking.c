/* test_decode_parking.c - sequences whose entry node is lost: they go on, are attached to by another
 * entry node with every token and bit, or end with their time; nothing of them stays. */
#include "decode/decode_internal.h"
#include "shared/cluster/answer.h"
#include "tests/unit/decode/worker_rig.h"

enum { ANSWER = 900, ONE_KEY = 77, LONG_WINDOW_MS = 60000 };

struct site {
    struct cluster_rig rig;
    struct worker_node *d;
    struct entry a, b; /* two entry nodes */
};

static void site_open(struct site *s, uint32_t window_ms)
{
    cluster_rig_open(&s->rig);
    s->d = worker_open(&s->rig, 2, (struct worker_options){ .resume_window_ms = window_ms });
    s->d->decode->parking.sent_ms = 300;
    entry_open(&s->a, &s->rig);
    entry_open_as(&s->b, &s->rig, ENTRY_ID + 1);
}

static void site_close(struct site *s)
{
    RIG_WAIT(&s->rig, worker_is_idle(s->d));
    CHECK_EQ_INT(decode_n_parked(s->d->decode), 0);
    CHECK_EQ_INT(s->d->decode->parking.n_bytes, 0);
    CHECK_EQ_INT(s->d->decode->parking.by_key.len, 0);
    CHECK_EQ_INT(s->d->decode->parking.n_ended + s->d->decode->parking.n_behind, 0);
    entry_close(&s->a);
    entry_close(&s->b);
    worker_close(s->d);
    cluster_rig_close(&s->rig);
}

/* A sequence of entry node `e` with a key that has begun to answer. */
static struct gen *begin(struct site *s, struct entry *e, uint64_t request, uint64_t seed)
{
    struct gen *g = entry_add(e, request, 40, seed, ANSWER);
    g->resume_key = ONE_KEY;
    entry_generate(e, g, s->d, FRAME_RUN);
    RIG_WAIT(&s->rig, g->n_out > 4);
    CHECK(!g->finished);
    return g;
}

static void send_attach(struct site *s, struct entry *e, const struct gen *g, uint64_t key,
                        uint32_t want_from)
{
    Baton__Attach m = BATON__ATTACH__INIT;
    struct hash128 bytes = { key, ~key };
    m.resume_key = generation_wire_key_bytes(&bytes);
    m.want_from = want_from;
    peer_meet(e->peer, s->d->peer);
    CHECK_OK(cluster_send_proto(e->peer->c, s->d->peer->id, FRAME_ATTACH, g->request, g->attempt,
                                &m.base));
}

static struct gen *attach(struct site *s, struct entry *e, uint64_t request)
{
    struct gen *g = entry_add(e, request, 40, 0, ANSWER);
    send_attach(s, e, g, ONE_KEY, 0);
    return g;
}

static void lose(struct site *s, struct entry *e)
{
    size_t n = s->d->peer->n_lost;
    entry_die(e);
    RIG_WAIT_MS(&s->rig, s->d->peer->n_lost > n, 3000);
}

/* The answer of a request that nothing happened to. */
static void check_undisturbed(struct site *s, struct gen *got, uint64_t seed)
{
    struct entry c;
    entry_open_as(&c, &s->rig, ENTRY_ID + 50);
    struct gen *want = entry_add(&c, 1, 40, seed, ANSWER);
    entry_generate(&c, want, s->d, FRAME_RUN);
    RIG_WAIT(&s->rig, (want->finished && got->finished) || got->failed);
    if (got->failed) test_fail(__FILE__, __LINE__, "%s", got->text);
    CHECK_EQ_INT(got->n_tokens, ANSWER);
    check_same_answer(got, want);
    entry_close(&c);
}

static double counted(const struct counter *c) { return (double)counter_value(c); }

TEST(decode_parked_sequence_goes_on_for_another_entry_node)
{
    for (uint64_t seed = 6; seed < 8; seed++) { /* greedy and sampled */
        struct site s;
        site_open(&s, LONG_WINDOW_MS);
        begin(&s, &s.a, 1, seed);
        lose(&s, &s.a);
        CHECK_EQ_INT(decode_n_parked(s.d->decode), 1);
        struct gen *g = attach(&s, &s.b, 9);
        check_undisturbed(&s, g, seed);
        CHECK(g->attached);
        CHECK(counted(s.d->decode->parking.m_attached) == 1);
        site_close(&s);
    }
}

TEST(decode_parked_sequence_keeps_its_end)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    begin(&s, &s.a, 1, 7);
    lose(&s, &s.a);
    RIG_WAIT(&s.rig, !worker_computes(s.d) && s.d->decode->parking.n_ended == 1);
    CHECK_EQ_INT(decode_n_parked(s.d->decode), 1);
    check_undisturbed(&s, attach(&s, &s.b, 9), 7);
    site_close(&s);
}

/* It ended just before its entry node was lost, so the client may not have all of it: it is found,
 * once more after another loss, and does not stay when nobody was lost. */
TEST(decode_sequence_that_has_ended_stays_for_a_moment)
{
    struct site s;
    struct entry c;
    site_open(&s, LONG_WINDOW_MS);
    s.d->decode->parking.sent_ms = 60000;
    struct gen *g = begin(&s, &s.a, 1, 7);
    RIG_WAIT(&s.rig, g->finished);
    CHECK_EQ_INT(s.d->decode->parking.n_sent, 1);
    CHECK_EQ_INT(s.d->decode->parking.n_parked, 0);
    lose(&s, &s.a);
    CHECK_EQ_INT(s.d->decode->parking.n_sent, 0);
    CHECK_EQ_INT(s.d->decode->parking.n_parked, 1);
    struct gen *of_b = attach(&s, &s.b, 9);
    RIG_WAIT(&s.rig, of_b->finished);
    check_same_answer(of_b, g);
    CHECK_EQ_INT(s.d->decode->parking.n_sent, 1);
    entry_open_as(&c, &s.rig, ENTRY_ID + 2); /* nobody knows of the loss yet */
    struct gen *of_c = attach(&s, &c, 5);
    RIG_WAIT(&s.rig, of_c->finished);
    check_same_answer(of_c, g);
    CHECK(!of_b->detached);
    s.d->decode->parking.sent_ms = 300;
    RIG_WAIT_MS(&s.rig, worker_is_idle(s.d), 3000);
    CHECK(counted(s.d->decode->parking.m_expired) == 0);
    entry_close(&c);
    site_close(&s);
}

/* They are too many, or there is no room for the tokens of others. */
TEST(decode_sequences_that_have_ended_go_first)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    struct decode_parking *p = &s.d->decode->parking;
    p->sent_ms = 60000;
    p->parked_max = 1;
    for (uint64_t i = 0; i < 2; i++) {
        struct gen *g = entry_add(&s.a, 1 + i, 40, 7, ANSWER);
        g->resume_key = 1 + i;
        entry_generate(&s.a, g, s.d, FRAME_RUN);
        RIG_WAIT(&s.rig, g->finished);
        CHECK_EQ_INT(p->n_sent, 1);
    }
    RIG_WAIT(&s.rig, decode_n_live(s.d->decode) == 1);
    p->records_max = p->n_bytes + 100;
    begin(&s, &s.a, 3, 7);
    CHECK_EQ_INT(p->n_sent, 0);
    CHECK(counted(p->m_refused) == 0);
    lose(&s, &s.a);
    CHECK_EQ_INT(p->n_parked, 1);
    p->window_ms = 100;
    site_close(&s);
}

TEST(decode_parked_sequence_ends_with_its_time)
{
    struct site s;
    site_open(&s, 300);
    begin(&s, &s.a, 1, 7);
    lose(&s, &s.a);
    CHECK_EQ_INT(decode_n_parked(s.d->decode), 1);
    RIG_WAIT_MS(&s.rig, worker_is_idle(s.d), 5000);
    CHECK(counted(s.d->decode->parking.m_expired) == 1);
    struct gen *g = attach(&s, &s.b, 9);
    RIG_WAIT(&s.rig, g->failed);
    CHECK_STATUS(g->status, ERR_NOT_FOUND);
    site_close(&s);
}

TEST(decode_sequence_is_taken_from_a_living_entry_node)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    struct gen *old = begin(&s, &s.a, 1, 7);
    struct gen *g = attach(&s, &s.b, 9);
    RIG_WAIT(&s.rig, old->detached && g->attached);
    entry_cancel(&s.a, old, s.d); /* it is not its sequence any more */
    check_undisturbed(&s, g, 7);
    CHECK(!old->finished);
    site_close(&s);
}

/* Attached, lost again before it had all, and attached by the first entry node's successor. */
TEST(decode_attached_sequence_is_parked_again)
{
    struct site s;
    struct entry c;
    site_open(&s, LONG_WINDOW_MS);
    begin(&s, &s.a, 1, 7);
    lose(&s, &s.a);
    struct gen *g = attach(&s, &s.b, 9);
    RIG_WAIT(&s.rig, g->n_out > 0);
    lose(&s, &s.b);
    CHECK_EQ_INT(decode_n_parked(s.d->decode), 1);
    entry_open_as(&c, &s.rig, ENTRY_ID + 2);
    check_undisturbed(&s, attach(&s, &c, 5), 7);
    RIG_WAIT(&s.rig, worker_is_idle(s.d));
    entry_close(&c);
    site_close(&s);
}

TEST(decode_attached_sequence_is_cancelled_as_any_other)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    begin(&s, &s.a, 1, 7);
    lose(&s, &s.a);
    struct gen *g = attach(&s, &s.b, 9);
    RIG_WAIT(&s.rig, g->attached);
    entry_cancel(&s.b, g, s.d);
    RIG_WAIT_MS(&s.rig, worker_is_idle(s.d), 3000);
    CHECK(!g->finished);
    site_close(&s);
}

TEST(decode_attach_of_what_is_not_there_is_refused)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    begin(&s, &s.a, 1, 7);
    struct gen *other = entry_add(&s.b, 8, 40, 0, ANSWER);
    send_attach(&s, &s.b, other, ONE_KEY + 1, 0);
    RIG_WAIT(&s.rig, other->failed);
    CHECK_STATUS(other->status, ERR_NOT_FOUND);
    struct gen *bad = entry_add(&s.b, 9, 40, 0, ANSWER);
    Baton__Attach m = BATON__ATTACH__INIT;
    m.resume_key = (ProtobufCBinaryData){ 3, (uint8_t *)"key" };
    CHECK_OK(cluster_send_proto(s.b.peer->c, 2, FRAME_ATTACH, bad->request, 1, &m.base));
    RIG_WAIT(&s.rig, bad->failed);
    CHECK_STATUS(bad->status, ERR_FORMAT);
    CHECK(other->blame == BLAME_NOBODY && bad->blame == BLAME_NOBODY);
    entry_cancel(&s.a, LIST_FIRST(&s.a.gens, struct gen, link), s.d);
    site_close(&s);
}

/* A request that was moved here: of its earlier tokens this node knows only the ids. */
TEST(decode_attach_after_a_move_has_ids_before_records)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    struct gen *whole = entry_add(&s.b, 1, 50, 7, ANSWER),
               *rest = entry_add(&s.a, 2, 50, 7, ANSWER);
    entry_generate(&s.b, whole, s.d, FRAME_RUN);
    RIG_WAIT(&s.rig, whole->finished);
    for (int i = 0; i < 8; i++) rest->prompt[rest->n_prompt++] = whole->out[i].id;
    rest->n_given = 8;
    rest->resume_key = ONE_KEY;
    entry_generate(&s.a, rest, s.d, FRAME_RUN);
    RIG_WAIT(&s.rig, rest->n_out > 0);
    lose(&s, &s.a);
    struct gen *late = entry_add(&s.b, 8, 40, 0, ANSWER), *g = entry_add(&s.b, 9, 40, 0, ANSWER);
    send_attach(&s, &s.b, late, ONE_KEY, 7); /* its record is with the first node */
    RIG_WAIT(&s.rig, late->failed);
    CHECK_STATUS(late->status, ERR_NOT_FOUND);
    send_attach(&s, &s.b, g, ONE_KEY, 8);
    RIG_WAIT(&s.rig, g->finished);
    CHECK_EQ_INT(g->n_given, 8);
    CHECK_EQ_INT(g->n_out, ANSWER - 8);
    CHECK_EQ_INT(g->n_tokens, ANSWER - 8);
    for (int i = 0; i < ANSWER; i++)
        CHECK_EQ_INT(i < 8 ? g->given[i] : g->out[i - 8].id, whole->out[i].id);
    site_close(&s);
}

/* Only what runs is parked: reservations are closed as ever. */
TEST(decode_reservations_are_not_parked)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    struct gen *g = entry_add(&s.a, 1, 100, 7, ANSWER);
    g->resume_key = ONE_KEY;
    entry_generate(&s.a, g, s.d, FRAME_RESERVE);
    RIG_WAIT(&s.rig, g->granted);
    lose(&s, &s.a);
    RIG_WAIT_MS(&s.rig, worker_is_idle(s.d), 3000);
    site_close(&s);
}

/* A split sequence runs once its KV is here, and is parked like any other. */
TEST(decode_split_sequence_is_parked)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    struct worker_node *p = worker_open(&s.rig, 1, (struct worker_options){ 0 });
    struct gen *g = entry_add(&s.a, 1, 40, 7, ANSWER);
    g->resume_key = ONE_KEY;
    entry_split(&s.a, g, p, s.d);
    RIG_WAIT(&s.rig, g->n_out > 4);
    lose(&s, &s.a);
    CHECK_EQ_INT(decode_n_parked(s.d->decode), 1);
    struct gen *again = attach(&s, &s.b, 9);
    check_undisturbed(&s, again, 7);
    CHECK_EQ_STR(again->transport, "tcp");
    RIG_WAIT(&s.rig, worker_is_idle(p));
    worker_close(p);
    site_close(&s);
}

TEST(decode_parks_nothing_without_a_key_or_a_window)
{
    for (int i = 0; i < 2; i++) {
        struct site s;
        site_open(&s, i ? 0 : LONG_WINDOW_MS);
        struct gen *g = entry_add(&s.a, 1, 40, 7, ANSWER);
        g->resume_key = i ? ONE_KEY : 0;
        entry_generate(&s.a, g, s.d, FRAME_RUN);
        RIG_WAIT(&s.rig, g->n_out > 4);
        lose(&s, &s.a);
        CHECK_EQ_INT(decode_n_parked(s.d->decode), 0);
        RIG_WAIT_MS(&s.rig, worker_is_idle(s.d), 3000);
        site_close(&s);
    }
}

TEST(decode_parks_a_bounded_number)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    s.d->decode->parking.parked_max = 2;
    for (uint64_t i = 0; i < 4; i++) {
        struct gen *g = entry_add(&s.a, 1 + i, 40, 7, ANSWER);
        g->resume_key = 1 + i;
        entry_generate(&s.a, g, s.d, FRAME_RUN);
    }
    LIST_FOREACH (g, &s.a.gens, struct gen, link) RIG_WAIT(&s.rig, g->n_out > 0);
    lose(&s, &s.a);
    CHECK_EQ_INT(decode_n_parked(s.d->decode), 2);
    CHECK(counted(s.d->decode->parking.m_refused) == 2);
    RIG_WAIT(&s.rig, decode_n_live(s.d->decode) == 2);
    for (uint64_t i = 0; i < 2; i++) {
        struct gen *g = entry_add(&s.b, 1 + i, 40, 0, ANSWER);
        send_attach(&s, &s.b, g, 1 + i, 0);
        RIG_WAIT(&s.rig, g->finished);
    }
    site_close(&s);
}

/* Running sequences go on without being kept; parked ones are closed before their time. */
TEST(decode_keeps_a_bounded_number_of_bytes)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    s.d->decode->parking.records_max = 2000;
    struct gen *g = entry_add(&s.a, 1, 40, 7, ANSWER);
    g->resume_key = ONE_KEY;
    entry_generate(&s.a, g, s.d, FRAME_RUN);
    RIG_WAIT(&s.rig, g->finished);
    CHECK_EQ_INT(g->n_out, ANSWER);
    CHECK(counted(s.d->decode->parking.m_refused) == 1);
    s.d->decode->parking.records_max = DECODE_RECORDS_MAX;
    begin(&s, &s.a, 2, 7);
    lose(&s, &s.a);
    s.d->decode->parking.records_max = 100;
    RIG_WAIT_MS(&s.rig, worker_is_idle(s.d), 3000);
    CHECK(counted(s.d->decode->parking.m_refused) == 2);
    CHECK(counted(s.d->decode->parking.m_expired) == 0);
    site_close(&s);
}

/* The same key again, since its request was moved: what nobody has any more ends at once. */
TEST(decode_later_sequence_of_a_key_replaces_a_parked_one)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    begin(&s, &s.a, 1, 7);
    lose(&s, &s.a);
    begin(&s, &s.b, 2, 7);
    CHECK_EQ_INT(decode_n_parked(s.d->decode), 0);
    RIG_WAIT(&s.rig, decode_n_live(s.d->decode) == 1);
    lose(&s, &s.b);
    CHECK_EQ_INT(decode_n_parked(s.d->decode), 1);
    struct entry c;
    entry_open_as(&c, &s.rig, ENTRY_ID + 2);
    check_undisturbed(&s, attach(&s, &c, 5), 7);
    RIG_WAIT(&s.rig, worker_is_idle(s.d));
    entry_close(&c);
    site_close(&s);
}

/* The node shuts down: what has an entry node is given back; what has none stays for its client, and
 * so does what an entry node has attached to and has not all of yet. */
TEST(decode_hands_back_nothing_that_is_parked_or_behind)
{
    struct site s;
    site_open(&s, LONG_WINDOW_MS);
    struct gen *other = entry_add(&s.a, 2, 40, 7, ANSWER),
               *held = entry_add(&s.b, 3, 40, 7, ANSWER);
    begin(&s, &s.a, 1, 7);
    other->resume_key = ONE_KEY + 1;
    entry_generate(&s.a, other, s.d, FRAME_RUN);
    RIG_WAIT(&s.rig, other->n_out > 0);
    lose(&s, &s.a);
    RIG_WAIT(&s.rig, s.d->decode->parking.n_ended == 2);
    held->resume_key = ONE_KEY + 2;
    entry_generate(&s.b, held, s.d, FRAME_RESERVE);
    RIG_WAIT(&s.rig, held->granted);
    struct gen *g = attach(&s, &s.b, 9), *late = entry_add(&s.b, 10, 40, 0, ANSWER);
    RIG_WAIT(&s.rig, counted(s.d->decode->parking.m_attached) == 1);
    CHECK_EQ_INT(s.d->decode->parking.n_behind, 1);
    decode_hand_back(s.d->decode);
    RIG_WAIT(&s.rig, held->failed && (g->finished || g->failed));
    CHECK_EQ_INT(held->blame, BLAME_HANDED_BACK);
    CHECK_EQ_INT(s.d->decode->parking.n_parked, 1);
    send_attach(&s, &s.b, late, ONE_KEY + 1, 0);
    RIG_WAIT(&s.rig, late->finished || late->failed);
    CHECK(g->finished && g->n_out == ANSWER);
    CHECK(late->finished && late->n_out == ANSWER);
    site_close(&s);
}

/* Freed with a sequence parked, and with one that is behind. */
TEST(decode_free_with_parked_sequences)
{
    for (int i = 0; i < 2; i++) {
        struct site s;
        site_open(&s, LONG_WINDOW_MS);
        begin(&s, &s.a, 1, 7);
        lose(&s, &s.a);
        if (i) {
            struct gen *g = attach(&s, &s.b, 9);
            RIG_WAIT(&s.rig, g->attached);
        }
        entry_close(&s.a);
        entry_close(&s.b);
        worker_close(s.d);
        cluster_rig_close(&s.rig);
    }
}

TEST_MAIN(CASE(decode_parked_sequence_goes_on_for_another_entry_node),
          CASE(decode_parked_sequence_keeps_its_end),
          CASE(decode_sequence_that_has_ended_stays_for_a_moment),
          CASE(decode_sequences_that_have_ended_go_first),
          CASE(decode_parked_sequence_ends_with_its_time),
          CASE(decode_sequence_is_taken_from_a_living_entry_node),
          CASE(decode_attached_sequence_is_parked_again),
          CASE(decode_attached_sequence_is_cancelled_as_any_other),
          CASE(decode_attach_of_what_is_not_there_is_refused),
          CASE(decode_attach_after_a_move_has_ids_before_records),
          CASE(decode_reservations_are_not_parked), CASE(decode_split_sequence_is_parked),
          CASE(decode_parks_nothing_without_a_key_or_a_window), CASE(decode_parks_a_bounded_number),
          CASE(decode_keeps_a_bounded_number_of_bytes),
          CASE(decode_later_sequence_of_a_key_replaces_a_parked_one),
          CASE(decode_hands_back_nothing_that_is_parked_or_behind),
          CASE(decode_free_with_parked_sequences))
