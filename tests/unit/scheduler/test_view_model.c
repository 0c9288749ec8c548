/* test_view_model.c - which nodes a router that has a text of its own uses, and what it says of the
 * others and of listed nodes that do not answer. */
#include <stdio.h>
#include <string.h>

#include "scheduler/trouble.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { TEXT = 7, OTHER_TEXT = 8 };

static struct node_record node(uint64_t id, enum node_role role, uint64_t model, uint64_t text)
{
    struct node_record n = { .node = id, .role = role, .model = model, .text = text };
    snprintf(n.name, sizeof n.name, "n%llu", (unsigned long long)id);
    snprintf(n.model_name, sizeof n.model_name, "model-%llu", (unsigned long long)model);
    snprintf(n.kv_type, sizeof n.kv_type, "bf16");
    return n;
}

static uint64_t chosen(uint64_t text, uint64_t now, struct node_record *nodes, size_t n)
{
    struct view v = { .text = text, .model = now, .nodes = nodes, .n_nodes = n };
    view_choose_model(&v);
    return v.model;
}

TEST(the_model_of_the_nodes_with_its_text)
{
    struct node_record nodes[] = {
        node(1, ROLE_PREFILL, 10, TEXT),
        node(2, ROLE_DECODE, 40, OTHER_TEXT),
        node(3, ROLE_DECODE, 30, TEXT),
        node(4, ROLE_DECODE, 20, TEXT),
    };
    CHECK_EQ_INT(chosen(0, 5, nodes, 4), 5);             /* not a router with a text */
    CHECK_EQ_INT(chosen(TEXT, 0, nodes, 0), 0);          /* nobody to choose from */
    CHECK_EQ_INT(chosen(TEXT, 0, nodes, 4), 20);         /* the lowest of those that decode */
    CHECK_EQ_INT(chosen(TEXT, 30, nodes, 4), 30);        /* stays while some node has it */
    CHECK_EQ_INT(chosen(TEXT, 99, nodes, 4), 20);        /* gone: another one */
    CHECK_EQ_INT(chosen(TEXT, 0, nodes, 1), 10);         /* a prefill node, where none decodes */
    CHECK_EQ_INT(chosen(TEXT, 40, nodes, 4), 20);        /* never one of another text */
    CHECK_EQ_INT(chosen(TEXT, 0, nodes + 1, 1), TEXT);   /* none: no node's model */
    struct node_record old = node(5, ROLE_MIXED, 50, 0); /* does not say */
    CHECK_EQ_INT(chosen(TEXT, 0, &old, 1), 50);
}

/* Who comes back with tokens gets the same ones again, or is told that they would differ. */
TEST(tokens_are_computed_again_by_equal_nodes)
{
    struct node_record nodes[] = { node(1, ROLE_PREFILL, 20, TEXT), node(2, ROLE_DECODE, 20, TEXT),
                                   node(3, ROLE_DECODE, 30, TEXT) };
    struct view v = { .text = TEXT, .model = 20, .nodes = nodes };
    const uint64_t bits = view_model_bits(&nodes[1]);
    for (size_t i = 0; i < COUNT_OF(nodes); i++) nodes[i].deterministic = true;
    CHECK_EQ_INT(view_again(&v, bits), VIEW_AGAIN_UNSEEN);
    v.n_nodes = 1; /* it decodes nothing */
    CHECK_EQ_INT(view_again(&v, bits), VIEW_AGAIN_UNSEEN);
    v.n_nodes = 3;
    CHECK_EQ_INT(view_again(&v, bits), VIEW_AGAIN_EQUAL);
    CHECK_EQ_INT(view_again(&v, view_model_bits(&nodes[2])), VIEW_AGAIN_OTHER);
    CHECK_EQ_INT(view_again(&v, 0), VIEW_AGAIN_OTHER);
    nodes[2].deterministic = false; /* it is not used */
    CHECK_EQ_INT(view_again(&v, bits), VIEW_AGAIN_EQUAL);
    nodes[0].deterministic = false;
    CHECK_EQ_INT(view_again(&v, bits), VIEW_AGAIN_DIFFERS);
    nodes[0].kv_type[0] = 0;
    CHECK_EQ_INT(view_again(&v, bits), VIEW_AGAIN_OTHER);
    CHECK(view_model_of_bits(&v, bits) == 20);
    nodes[1].text = OTHER_TEXT;
    CHECK(view_model_of_bits(&v, bits) == bits);
    v.n_nodes = 0;
    CHECK(view_model_of_bits(&v, bits) == bits && view_model_of_bits(&v, 0) != 0);
}

/* Nothing breaks, but answers are not resumed as they could be. */
TEST(nodes_that_differ_are_named)
{
    char text[ERR_TEXT_MAX];
    struct node_record nodes[] = { node(3, ROLE_DECODE, 20, TEXT), node(1, ROLE_PREFILL, 20, TEXT),
                                   node(2, ROLE_DECODE, 30, TEXT) };
    struct view v = { .text = TEXT, .model = 20, .nodes = nodes };
    CHECK(!view_find_difference(&v, text)); /* there are no nodes */
    v.n_nodes = COUNT_OF(nodes);
    for (size_t i = 0; i < COUNT_OF(nodes); i++) nodes[i].max_model_len = 2048;
    nodes[2].max_model_len = 512; /* of another model */
    CHECK(!view_find_difference(&v, text));
    snprintf(nodes[1].kv_type, sizeof nodes[1].kv_type, "int8");
    CHECK(view_find_difference(&v, text));
    CHECK(strstr(text, "node n1 has --kv-cache-dtype int8 and node n3 bf16"));
    nodes[0].max_model_len = 512;
    CHECK(view_find_difference(&v, text));
    CHECK(strstr(text, "node n1 has --max-model-len 2048 and node n3 512"));
    nodes[0].draining = true; /* it goes anyway */
    CHECK(!view_find_difference(&v, text));
}

TEST(text_is_shared_where_it_is_known)
{
    const struct node_record mine = node(1, ROLE_MIXED, 20, TEXT),
                             other = node(2, ROLE_MIXED, 20, OTHER_TEXT),
                             old = node(3, ROLE_MIXED, 20, 0);
    const struct view router = { .text = TEXT }, engine = { .me = mine }, unknown = { 0 };
    CHECK(view_shares_text(&router, &mine) && !view_shares_text(&router, &other));
    CHECK(view_shares_text(&engine, &mine) && !view_shares_text(&engine, &other));
    CHECK(view_shares_text(&router, &old) && view_shares_text(&unknown, &other));
}

static const char *find(struct node_record *nodes, size_t n, const char *missing, struct trouble *t)
{
    struct view v = { .text = TEXT, .nodes = nodes, .n_nodes = n, .known = true };
    const struct trouble_facts f = {
        .view = &v, .topic = "default", .join = "--router h:1", .missing = missing
    };
    snprintf(v.me.model_name, sizeof v.me.model_name, "mine");
    view_choose_model(&v);
    trouble_find(&f, t);
    return t->text;
}

TEST(nodes_of_another_model_are_named)
{
    struct trouble t = { 0 };
    struct node_record nodes[] = { node(2, ROLE_MIXED, 40, OTHER_TEXT),
                                   node(3, ROLE_MIXED, 30, TEXT), node(4, ROLE_MIXED, 20, TEXT) };
    CHECK(strstr(find(nodes, 1, NULL, &t),
                 "no node has this router's model: mixed node n2 of topic default has the model "
                 "model-40, whose vocabulary is not that of mine"));
    CHECK(t.blocks && t.cause == TROUBLE_OTHER_MODEL);
    CHECK(strstr(find(nodes, 2, NULL, &t), "mixed node n2 of topic default has the model"));
    CHECK(!t.blocks && t.cause == TROUBLE_OTHER_MODEL);
    CHECK(strstr(find(nodes + 1, 2, NULL, &t),
                 "mixed node n3 of topic default has another model than the nodes that this router "
                 "uses: model-30"));
    CHECK(!t.blocks);
    (void)find(nodes + 2, 1, NULL, &t);
    CHECK(t.cause == TROUBLE_NONE && !t.text[0]);
}

TEST(listed_nodes_that_do_not_answer_are_told_of)
{
    struct trouble t = { 0 };
    struct node_record nodes[] = { node(4, ROLE_MIXED, 20, TEXT), node(5, ROLE_PREFILL, 20, TEXT) };
    CHECK_EQ_STR(find(nodes, 0, "the listed node x is away", &t), "the listed node x is away");
    CHECK(t.blocks && t.cause == TROUBLE_PEER);
    CHECK_EQ_STR(find(nodes + 1, 1, "the listed node x is away", &t), "the listed node x is away");
    CHECK(t.blocks);
    CHECK_EQ_STR(find(nodes, 1, "the listed node x is away", &t), "the listed node x is away");
    CHECK(!t.blocks && t.cause == TROUBLE_PEER);
}

TEST_MAIN(CASE(the_model_of_the_nodes_with_its_text),
          CASE(tokens_are_computed_again_by_equal_nodes), CASE(nodes_that_differ_are_named),
          CASE(text_is_shared_where_it_is_known), CASE(nodes_of_another_model_are_named),
          CASE(listed_nodes_that_do_not_answer_are_told_of))
