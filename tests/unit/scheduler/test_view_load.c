/* test_view_load.c - what an entry node counts as placed: whatever happens between two snapshots,
 * and once there are none, its own placements are all that is left. */
#include "scheduler/view.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

enum { NODES = 4, PLACEMENTS = 24, ROUNDS = 4000, SEED = 11 };

static uint64_t draw(uint64_t *n, uint64_t below)
{
    return (uint64_t)(rng_uniform(SEED, 1, (*n)++) * (double)below);
}

static void on_event(void *arg) { ++*(uint32_t *)arg; }

/* A snapshot: what others have there too, and maybe what is its own not yet. */
static void set_counted(struct view *v, uint64_t *n)
{
    for (size_t i = 0; i < v->n_nodes; i++) {
        struct node_record *node = &v->nodes[i];
        node->placed_tokens = draw(n, 3000);
        node->placed_seqs = (uint32_t)draw(n, 20);
        node->placed_blocks = (uint32_t)draw(n, 300);
        node->n_running = node->n_waiting = 5;
        node->n_blocks_free = 3;
        node->waiting_tokens = 77;
        view_note_unplaced(node);
    }
    v->counts_own = false;
}

static struct placement placement_of(uint64_t *n)
{
    const uint64_t decode = 1 + draw(n, NODES), prefill = draw(n, NODES + 1);
    return (struct placement){ .request = 1,
                               .prefill = prefill == decode ? 0 : prefill,
                               .decode = decode,
                               .tokens = (uint32_t)draw(n, 500),
                               .blocks = (uint32_t)draw(n, 40) };
}

static void step(struct view *v, struct placement *p, uint64_t *n)
{
    if (!p->request) {
        *p = placement_of(n);
        view_add_load(v, p);
        return;
    }
    const struct placement other = placement_of(n);
    switch (draw(n, 4)) {
    case 0:
        view_remove_tokens(v, p);
        p->tokens = 0;
        return;
    case 1:
        view_change_load(v, p, &other);
        *p = other;
        return;
    case 2: view_remove_load(v, p); break;
    default: view_disown_load(v, p); break;
    }
    p->request = 0;
}

static void check_own(const struct view *v, const struct placement *p)
{
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *node = &v->nodes[i];
        uint64_t tokens = 0, seqs = 0, blocks = 0;
        for (size_t k = 0; k < PLACEMENTS; k++) {
            if (!p[k].request) continue;
            if ((p[k].prefill ? p[k].prefill : p[k].decode) == node->node) tokens += p[k].tokens;
            if (p[k].decode != node->node) continue;
            seqs++;
            blocks += p[k].blocks;
        }
        CHECK_EQ_INT(node->placed_tokens, tokens);
        CHECK_EQ_INT(node->placed_seqs, seqs);
        CHECK_EQ_INT(node->placed_blocks, blocks);
    }
}

TEST(what_is_its_own_is_left_without_a_directory)
{
    struct node_record nodes[NODES] = { 0 };
    struct placement p[PLACEMENTS] = { 0 };
    uint32_t n_events = 0;
    uint64_t n = 0;
    struct view v = { .nodes = nodes, .n_nodes = NODES, .events = { .arg = &n_events } };
    v.events.on_snapshot = v.events.on_capacity = on_event;
    for (size_t i = 0; i < NODES; i++) nodes[i] = (struct node_record){ .node = 1 + i };
    for (int round = 0; round < ROUNDS; round++) {
        for (uint64_t k = draw(&n, 8); k > 0; k--) step(&v, &p[draw(&n, PLACEMENTS)], &n);
        if (draw(&n, 2)) {
            const uint32_t before = n_events;
            view_count_own(&v);
            CHECK_EQ_INT(n_events, before + 1); /* those in line are told */
        } else if (!v.counts_own || draw(&n, 2)) {
            set_counted(&v, &n);
        }
        if (v.counts_own) check_own(&v, p);
    }
    for (size_t k = 0; k < PLACEMENTS; k++)
        if (p[k].request) view_remove_load(&v, &p[k]);
    CHECK_EQ_INT(v.n_own, 0);
    mem_free(v.own);
}

/* Of itself a node knows without a directory. */
TEST(its_own_node_reports_and_the_others_do_not)
{
    struct node_record nodes[2] = { { .node = 1, .n_blocks = 50 }, { .node = 2, .n_blocks = 50 } };
    uint32_t n_events = 0;
    uint64_t n = 0;
    struct view v = { .nodes = nodes, .n_nodes = 2, .me = { .node = 2 } };
    v.events.on_capacity = on_event;
    v.events.arg = &n_events;
    set_counted(&v, &n);
    view_count_own(&v);
    CHECK_EQ_INT(nodes[0].n_running + nodes[0].n_waiting, 0);
    CHECK_EQ_INT(nodes[0].n_blocks_free, 50);
    CHECK_EQ_INT(nodes[0].unplaced_tokens, 0);
    CHECK_EQ_INT(nodes[1].n_running + nodes[1].n_waiting, 10);
    CHECK_EQ_INT(nodes[1].n_blocks_free, 3);
    CHECK_EQ_INT(nodes[1].unplaced_tokens, 77);
}

TEST_MAIN(CASE(what_is_its_own_is_left_without_a_directory),
          CASE(its_own_node_reports_and_the_others_do_not))
