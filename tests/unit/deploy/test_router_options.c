/* test_router_options.c - the options of a router: which go together, and what is said of those that
 * do not. */
#include "deploy/router/router_options.h"

#include <string.h>

#include "deploy/options/option_table.h"
#include "tests/harness/test.h"

enum { ARGS_MAX = 16 };

/* Reads the words of a command line, separated by spaces; the sentence of an error is in *err. */
static enum status read_line(const char *line, struct err *err)
{
    char text[512], *argv[ARGS_MAX], *rest = NULL;
    int argc = 0, n_words = 0;
    struct node_options o = { 0 };
    struct config *c = config_create(OPTIONS, "router");
    CHECK(strlen(line) < sizeof text);
    strcpy(text, line);
    for (char *w = strtok_r(text, " ", &rest); w; w = strtok_r(NULL, " ", &rest)) {
        CHECK(argc < ARGS_MAX);
        argv[argc++] = w;
    }
    CHECK_OK(config_load_args(c, argc, argv, NULL, &n_words, err));
    const enum status st = router_options_read(c, &o, err);
    node_options_release(&o);
    config_free(c);
    return st;
}

#define LISTED "--prefiller-hosts 127.0.0.1 --prefiller-ports 9000 "

/* Of the two options only the one that was given is named. */
TEST(a_list_is_of_a_view_of_its_own)
{
    struct err err = { 0 };
    CHECK_OK(read_line(LISTED, &err));
    CHECK_STATUS(read_line(LISTED "--router 127.0.0.1:30000", &err), ERR_CONFIG);
    CHECK(strstr(err.text, "which --router 127.0.0.1:30000 puts elsewhere") &&
          !strstr(err.text, "--scheduler-name"));
    CHECK_STATUS(read_line(LISTED "--scheduler-name splitwise", &err), ERR_CONFIG);
    CHECK(strstr(err.text, "which --scheduler-name splitwise puts elsewhere") &&
          !strstr(err.text, "--router"));
}

/* As an address is written everywhere else. */
TEST(a_port_of_redis_has_an_option_of_its_own)
{
    struct err err = { 0 };
    CHECK_STATUS(read_line("--scheduler-name splitwise --scheduler-host 127.0.0.1:6379", &err),
                 ERR_CONFIG);
    CHECK(strstr(err.text, "--scheduler-host 127.0.0.1 --scheduler-port 6379"));
    CHECK_STATUS(read_line("--scheduler-name splitwise --scheduler-host [::1]:6379", &err),
                 ERR_CONFIG);
    CHECK(strstr(err.text, "--scheduler-host [::1] --scheduler-port 6379"));
    CHECK_OK(read_line("--scheduler-name splitwise --scheduler-host ::1", &err));
    CHECK_OK(read_line("--scheduler-name splitwise --scheduler-host [::1]", &err));
}

TEST_MAIN(CASE(a_port_of_redis_has_an_option_of_its_own), CASE(a_list_is_of_a_view_of_its_own))
