/* test_addresses.c - the nodes that a router's options list: the documents' line, vLLM's plain form,
 * and what is wrong with others. */
#include "deploy/router/addresses.h"

#include <stdio.h>
#include <string.h>

#include "deploy/options/option_table.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { WORDS_MAX = 64 };

static struct config *load(const char *line)
{
    char copy[1024], *argv[WORDS_MAX];
    int argc = 0, none = 0;
    struct err err = { 0 };
    snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word && argc < WORDS_MAX; word = strtok(NULL, " "))
        argv[argc++] = word;
    struct config *c = config_create(OPTIONS, "router");
    if (config_load_args(c, argc, argv, NULL, &none, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", line, err.text);
    return c;
}

/* The nodes as text, "prefill 10.0.0.1:9000 decode ..." */
static void check(const char *line, const char *want)
{
    struct addresses a;
    struct err err = { 0 };
    struct buf got = { 0 };
    char at[HOST_PORT_TEXT_MAX];
    struct config *c = load(line);
    if (addresses_read(c, &a, &err) != OK) test_fail(__FILE__, __LINE__, "%s: %s", line, err.text);
    for (size_t i = 0; i < a.n; i++)
        buf_printf(&got, "%s%s %s", i ? " " : "", node_role_name(a.nodes[i].role),
                   host_port_text(a.nodes[i].host, a.nodes[i].port, at));
    CHECK_EQ_STR(got.len ? got.data : "", want);
    buf_release(&got);
    addresses_release(&a);
    config_free(c);
}

static void refuses(const char *line, const char *want)
{
    struct addresses a;
    struct err err = { 0 };
    struct config *c = load(line);
    CHECK_STATUS(addresses_read(c, &a, &err), ERR_CONFIG);
    if (!strstr(err.text, want)) test_fail(__FILE__, __LINE__, "%s says: %s", line, err.text);
    addresses_release(&a);
    config_free(c);
}

TEST(no_option_lists_nothing) { check("--port 8000", ""); }

/* Document 002, with fewer nodes. A shell makes one word of `2\` and the next line's first. */
TEST(hosts_are_repeated_and_ports_go_up)
{
    check("--prefiller-hosts 192.0.0.1 192.0.0.2 --prefiller-hosts-num 2 2 "
          "--prefiller-ports 9000 9000 --prefiller-ports-inc 2 2--decoder-hosts 192.0.0.5 "
          "--decoder-hosts-num 3 --decoder-ports 9000 --decoder-ports-inc 3",
          "prefill 192.0.0.1:9000 prefill 192.0.0.1:9001 prefill 192.0.0.2:9000 "
          "prefill 192.0.0.2:9001 decode 192.0.0.5:9000 decode 192.0.0.5:9001 "
          "decode 192.0.0.5:9002");
}

TEST(a_port_for_each_host)
{
    check("--prefiller-hosts a b --prefiller-ports 1 2 --decoder-hosts c --decoder-ports 3",
          "prefill a:1 prefill b:2 decode c:3");
    check("--decoder-hosts ::1 0.0.0.0 --decoder-ports 8100-8101",
          "decode [::1]:8100 decode 127.0.0.1:8101");
    /* one side alone may count */
    check("--decoder-hosts c --decoder-hosts-num 2 --decoder-ports 7 9", "decode c:7 decode c:9");
    check("--decoder-hosts c d --decoder-ports 7 --decoder-ports-inc 2", "decode c:7 decode d:8");
}

TEST(what_does_not_fit_is_refused)
{
    refuses("--prefiller-hosts a b --prefiller-ports 1", "2 hosts");
    refuses("--prefiller-hosts a", "0 ports");
    refuses("--prefiller-ports 1", "0 hosts");
    refuses("--decoder-hosts-num 2", "0 hosts");
    refuses("--decoder-hosts a b --decoder-hosts-num 2 --decoder-ports 1 2",
            "--decoder-hosts-num has 1 numbers and --decoder-hosts 2 items");
    refuses("--decoder-hosts a --decoder-ports 1 --decoder-ports-inc 1 1",
            "--decoder-ports-inc has 2 numbers and --decoder-ports 1 items");
    refuses("--decoder-hosts a --decoder-hosts-num 0 --decoder-ports 1", "'0' is not a whole");
    refuses("--decoder-hosts a --decoder-hosts-num x --decoder-ports 1", "'x' is not a whole");
    refuses("--decoder-hosts a --decoder-ports 70000", "'70000' is not a whole number from 1 to");
    refuses("--decoder-hosts a --decoder-hosts-num 9 --decoder-ports 65530 --decoder-ports-inc 9",
            "beyond 65535");
    refuses("--decoder-hosts a/b --decoder-ports 1", "is not a host name or an address");
    refuses("--decoder-hosts a b --decoder-hosts-num 1000 1000 --decoder-ports 1",
            "more than 1024 nodes");
}

TEST(an_address_of_a_request)
{
    struct node_at at;
    struct err err = { 0 };
    CHECK_OK(address_parse("10.0.0.1:8000", ROLE_DECODE, &at, &err));
    CHECK_EQ_STR(at.host, "10.0.0.1");
    CHECK_EQ_INT(at.port, 8000);
    CHECK_EQ_INT(at.role, ROLE_DECODE);
    CHECK_OK(address_parse("[::]:1", ROLE_MIXED, &at, &err));
    CHECK_EQ_STR(at.host, "::1");
    static const char *const WRONG[] = { "",        "a",     "a:",    ":1",      "a:0",
                                         "a:70000", "::1:1", "a b:1", "a\r\n:1", "http://a:1" };
    for (size_t i = 0; i < COUNT_OF(WRONG); i++)
        if (address_parse(WRONG[i], ROLE_MIXED, &at, &err) != ERR_INVALID || !err.text[0])
            test_fail(__FILE__, __LINE__, "\"%s\" is taken", WRONG[i]);
}

TEST_MAIN(CASE(no_option_lists_nothing), CASE(hosts_are_repeated_and_ports_go_up),
          CASE(a_port_for_each_host), CASE(what_does_not_fit_is_refused),
          CASE(an_address_of_a_request))
