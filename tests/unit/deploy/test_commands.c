/* test_commands.c - what commands say of words they do not take, and of answers that are none. */
#include "deploy/cli/commands.h"

#include <string.h>

#include "deploy/options/option_table.h"
#include "tests/harness/test.h"

static void check_word(const char *command, const char *word, const char *want)
{
    char *argv[] = { (char *)word };
    int n_words = 0;
    struct err err = { 0 };
    struct config *c = config_create(OPTIONS, command);
    CHECK_STATUS(config_load_args(c, 1, argv, NULL, &n_words, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.text, want);
    config_free(c);
}

TEST(a_word_that_is_an_address_names_its_option)
{
    check_word("status", "127.0.0.1:30000",
               "unexpected word \"127.0.0.1:30000\"; did you mean --url 127.0.0.1:30000?");
    check_word("status", "30000", "unexpected word \"30000\"; did you mean --port 30000?");
    check_word("router", "30000", "unexpected word \"30000\"; did you mean --port 30000?");
    check_word("router", "127.0.0.1:30000", "unexpected word \"127.0.0.1:30000\"");
    check_word("router", "start", "unexpected word \"start\"");
}

static void check_refusal(int status, const char *answer, const char *want)
{
    struct err err = { 0 };
    command_explain_refusal("10.0.0.1:8000", status, str_of(answer), &err);
    CHECK(err.code != OK);
    CHECK_EQ_STR(err.text, want);
}

TEST(a_refusal_says_what_is_missing)
{
    check_refusal(401, "{\"error\":{\"message\":\"no\"}}",
                  "10.0.0.1:8000 wants a key: give one of its own with --api-key or BATON_API_KEY");
    check_refusal(503, "{\"error\":{\"message\":\"it loads\"}}",
                  "10.0.0.1:8000 answered 503: it loads");
    check_refusal(404, "{\"error\":\"no such path\"}", "10.0.0.1:8000 answered 404: no such path");
    check_refusal(502, "Bad Gateway", "10.0.0.1:8000 answered 502: Bad Gateway");
    check_refusal(500, "[1]", "10.0.0.1:8000 answered 500: [1]");
}

TEST_MAIN(CASE(a_word_that_is_an_address_names_its_option), CASE(a_refusal_says_what_is_missing))
