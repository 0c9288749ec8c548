/* test_role_change.c - what is asked of a node that changes its role, and when it refuses. */
#include "deploy/role/role_change.h"

#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* A prefill node of a cluster in which another one decodes. */
static const struct role_facts USUAL = {
    .name = "10.0.0.1:8000",
    .topic = "chat",
    .role = ROLE_PREFILL,
    .exchanges_kv = true,
    .is_seen = true,
    .shares_view = true,
    .others_decode = true,
};

static void takes(struct role_facts f, enum node_role role, const char *node)
{
    struct err err = { 0 };
    struct role_ask ask = { .role = role };
    strcpy(ask.node, node);
    if (role_check(&f, &ask, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

static void refuses(struct role_facts f, enum node_role role, const char *node, enum status want,
                    const char *says)
{
    struct err err = { 0 };
    struct role_ask ask = { .role = role };
    strcpy(ask.node, node);
    CHECK_STATUS(role_check(&f, &ask, &err), want);
    if (!strstr(err.text, says) || !strstr(err.text, f.name))
        test_fail(__FILE__, __LINE__, "it says: %s", err.text);
}

TEST(role_changes_between_all_roles)
{
    for (enum node_role from = ROLE_MIXED; from <= ROLE_DECODE; from++)
        for (enum node_role to = ROLE_MIXED; to <= ROLE_DECODE; to++) {
            struct role_facts f = USUAL;
            f.role = from;
            takes(f, to, "");
            takes(f, to, f.name);
        }
}

TEST(role_of_a_node_that_cannot_have_it_is_refused)
{
    struct role_facts f = USUAL;
    refuses(f, ROLE_DECODE, "10.0.0.2:8000", ERR_NOT_FOUND, "10.0.0.2:8000 was to become decode");
    f.unsplit = true;
    refuses(f, ROLE_DECODE, "", ERR_CONFLICT, "--scheduler-name splitwise");
    f = USUAL;
    f.exchanges_kv = false;
    refuses(f, ROLE_DECODE, "", ERR_CONFLICT, "--cache-transfer-protocol");
    takes(f, ROLE_MIXED, "");   /* which needs no other node */
    takes(f, ROLE_PREFILL, ""); /* which it is */
    f = USUAL;
    f.is_seen = f.shares_view = false;
    refuses(f, ROLE_DECODE, "", ERR_CONFLICT, "--router");
    takes(f, ROLE_MIXED, "");
}

TEST(role_of_the_last_node_that_decodes_is_kept)
{
    struct role_facts f = USUAL;
    f.role = ROLE_DECODE;
    f.others_decode = false;
    refuses(f, ROLE_PREFILL, "", ERR_CONFLICT, "the last node of topic chat");
    takes(f, ROLE_MIXED, "");
    f.shares_view = false; /* a router lists it, and knows others */
    takes(f, ROLE_PREFILL, "");
}

TEST(role_ask_reads_what_it_writes)
{
    for (enum node_role r = ROLE_MIXED; r <= ROLE_DECODE; r++) {
        struct role_ask ask = { .role = r }, got = { 0 };
        struct buf body = { 0 };
        struct err err = { 0 };
        if (r == ROLE_DECODE) strcpy(ask.node, "[::1]:8000 \"quoted\"");
        role_ask_write(&ask, &body);
        CHECK_OK(role_ask_read(buf_str(&body), &got, &err));
        CHECK_EQ_INT(got.role, r);
        CHECK_EQ_STR(got.node, ask.node);
        buf_release(&body);
    }
}

TEST(role_ask_that_is_none_is_refused_with_a_sentence)
{
    static const struct {
        const char *body, *says;
    } CASES[] = {
        { "", "" },
        { "[]", "JSON object" },
        { "{}", "must be prefill, decode or mixed" },
        { "{\"role\":\"Decode\"}", "role is 'Decode'" },
        { "{\"role\":1}", "role" },
        { "{\"role\":\"decode\",\"role\":\"mixed\"}", "" },
        { "{\"role\":\"decode\",\"node\":\"0123456789012345678901234567890123456789012345678901"
          "234567890123\"}",
          "63 characters" },
    };
    for (size_t i = 0; i < COUNT_OF(CASES); i++) {
        struct role_ask ask;
        struct err err = { 0 };
        CHECK(role_ask_read(str_of(CASES[i].body), &ask, &err) != OK);
        if (!err.text[0] || !strstr(err.text, CASES[i].says))
            test_fail(__FILE__, __LINE__, "%s says: %s", CASES[i].body, err.text);
    }
}

TEST_MAIN(CASE(role_changes_between_all_roles), CASE(role_of_a_node_that_cannot_have_it_is_refused),
          CASE(role_of_the_last_node_that_decodes_is_kept), CASE(role_ask_reads_what_it_writes),
          CASE(role_ask_that_is_none_is_refused_with_a_sentence))
