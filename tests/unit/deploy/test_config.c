/* test_config.c - the option table: sources, checks, sentences, texts. */
#include <stdlib.h>
#include <string.h>

#include "deploy/options/config.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static const struct option options[] = {
    {
        .name = "model",
        .aliases = "m model-path",
        .env = "T_MODEL T_MODEL_OLD",
        .type = OPT_STRING,
        .group = "Model",
        .help = "The model to serve.",
    },
    {
        .name = "port",
        .env = "T_PORT",
        .type = OPT_INT,
        .min = 0,
        .max = 65535,
        .def = "8000",
        .group = "Network",
        .help = "Port of the HTTP API.",
    },
    {
        .name = "rate",
        .type = OPT_FLOAT,
        .min = 0,
        .max = 1,
        .def = "0.9",
        .group = "Network",
        .help = "A rate.",
    },
    { .name = "offset", .type = OPT_INT, .group = "Network", .help = "Any number." },
    {
        .name = "splitwise-role",
        .type = OPT_ENUM,
        .choices = "mixed|prefill|decode",
        .def = "mixed",
        .group = "Model",
        .help = "What the node does.",
    },
    {
        .name = "prefix-caching",
        .aliases = "enable-prefix-caching",
        .type = OPT_BOOL,
        .def = "true",
        .group = "Model",
        .help = "Keep blocks.",
    },
    {
        .name = "served-model-name",
        .env = "T_NAMES",
        .type = OPT_LIST,
        .def = "a,b",
        .group = "Model",
        .help = "Names.",
    },
    { .name = "override", .type = OPT_JSON, .group = "Model", .help = "JSON <text>|more." },
    {
        .name = "swap-space",
        .env = "T_SWAP",
        .type = OPT_FLOAT,
        .effect = EFFECT_ACCEPTED,
        .group = "Model",
        .help = "Swap.",
        .note = "there is no swapping.",
    },
    {
        .name = "lora",
        .type = OPT_BOOL,
        .effect = EFFECT_REFUSED,
        .neutral = "false",
        .group = "Model",
        .help = "Adapters.",
        .note = "adapters are not supported.",
    },
    {
        .name = "pp-size",
        .aliases = "pp",
        .env = "T_PP",
        .type = OPT_INT,
        .min = 1,
        .max = 64,
        .effect = EFFECT_REFUSED,
        .neutral = "1",
        .group = "Model",
        .help = "Stages.",
        .note = "pipelines are not supported.",
    },
    {
        .name = "bench-only",
        .type = OPT_INT,
        .group = "Bench",
        .commands = "bench other",
        .help = "For bench.",
    },
    { .name = "ticket", .type = OPT_INT, .group = "Bench", .commands = "bench", .help = "One." },
    {
        .name = "tickets",
        .type = OPT_LIST,
        .group = "Bench",
        .commands = "launch",
        .help = "Several.",
    },
    {
        .name = "node-ports",
        .type = OPT_LIST,
        .group = "Bench",
        .commands = "launch",
        .help = "One per node.",
    },
    { .name = NULL },
};
static const struct option *const table[] = { options, NULL };

static struct err err;
static const char *words[4];
static int n_words;

/* Parses a command line of words separated by '~'. */
static enum status load(struct config *c, const char *line)
{
    static char copy[2048];
    char *argv[64];
    int argc = 0;
    strncpy(copy, line, sizeof copy - 1);
    for (char *word = strtok(copy, "~"); word; word = strtok(NULL, "~")) argv[argc++] = word;
    n_words = 4;
    err = (struct err){ 0 };
    return config_load_args(c, argc, argv, words, &n_words, &err);
}

static struct config *loaded(const char *line)
{
    struct config *c = config_create(table, "serve");
    if (load(c, line) != OK) test_fail(__FILE__, __LINE__, "%s: %s", line, err.text);
    return c;
}

static void check_error(const char *line, const char *want)
{
    struct config *c = config_create(table, "serve");
    if (load(c, line) == OK) test_fail(__FILE__, __LINE__, "%s was taken", line);
    CHECK_EQ_INT(err.code, ERR_CONFIG);
    CHECK_EQ_STR(err.text, want);
    config_free(c);
}

TEST(config_defaults)
{
    struct config *c = config_create(table, "serve");
    CHECK(config_string(c, "model") == NULL);
    CHECK_EQ_INT(config_int(c, "port"), 8000);
    CHECK_EQ_INT(config_int(c, "offset"), 0);
    CHECK_NEAR(config_float(c, "rate"), 0.9, 0);
    CHECK(config_bool(c, "prefix-caching"));
    size_t n = 0;
    CHECK_EQ_STR(config_list(c, "served-model-name", 1, &n), "b");
    CHECK_EQ_INT(n, 2);
    CHECK(config_list(c, "served-model-name", 2, NULL) == NULL);
    CHECK(!config_is_set(c, "port"));
    CHECK_EQ_STR(config_source_text(c, "port"), "default");
    config_free(c);
}

TEST(config_args_in_every_form)
{
    struct config *c = loaded(
        "-m~/x~--port=1~--splitwise_role~decode~--rate~1~--no-prefix-caching~--offset~-5");
    CHECK_EQ_STR(config_string(c, "model"), "/x");
    CHECK_EQ_STR(config_source_text(c, "model"), "-m");
    CHECK_EQ_INT(config_int(c, "port"), 1);
    CHECK_EQ_STR(config_source_text(c, "port"), "--port");
    CHECK_EQ_STR(config_string(c, "splitwise-role"), "decode");
    CHECK_EQ_INT(config_int(c, "offset"), -5);
    CHECK(!config_bool(c, "prefix-caching"));
    CHECK(config_source(c, "rate") == SOURCE_ARGS);
    config_free(c);
    c = loaded("--model-path=/y=z~--model~/"
               "last~--enable-prefix-caching~--prefix-caching=false~--override~{\"a\":1}~-pp~1");
    CHECK_EQ_STR(config_string(c, "model"), "/last");
    CHECK(!config_bool(c, "prefix-caching"));
    CHECK_EQ_STR(config_string(c, "override"), "{\"a\":1}");
    config_free(c);
}

TEST(config_lists_by_comma_repetition_and_words)
{
    struct config *c = loaded("--served-model-name~x,y~z~--port~1~--served-model-name= w ,,v~word");
    const char *want[] = { "x", "y", "z", "w", "v" };
    size_t n = 0;
    for (size_t i = 0; i < 5; i++)
        CHECK_EQ_STR(config_list(c, "served-model-name", i, &n), want[i]);
    CHECK_EQ_INT(n, 5);
    CHECK_EQ_INT(n_words, 1);
    CHECK_OK(config_set(c, "served-model-name", "only", &err));
    CHECK_EQ_STR(config_list(c, "served-model-name", 0, &n), "only");
    CHECK_EQ_INT(n, 1);
    config_free(c);
}

TEST(config_positional_words)
{
    struct config *c = loaded("one~--port~1~-~--~--port~-m");
    CHECK_EQ_INT(n_words, 4);
    CHECK_EQ_STR(words[0], "one");
    CHECK_EQ_STR(words[1], "-");
    CHECK_EQ_STR(words[2], "--port");
    CHECK_EQ_STR(words[3], "-m");
    config_free(c);
    check_error("a~b~c~d~e", "unexpected word \"e\"");
    /* A switch takes only a boolean word as its value. */
    c = loaded("--prefix-caching~off~one");
    CHECK(!config_bool(c, "prefix-caching"));
    CHECK_EQ_INT(n_words, 1);
    CHECK_EQ_STR(words[0], "one");
    config_free(c);
}

TEST(config_errors_say_what_would_be_right)
{
    check_error("--splitwise-rol~decode",
                "there is no option --splitwise-rol; did you mean --splitwise-role?");
    check_error("--modle=x", "there is no option --modle; did you mean --model?");
    check_error("--zzzzzzzzzz", "there is no option --zzzzzzzzzz; --help shows all");
    check_error("-port~1", "there is no option -port; did you mean --port?");
    check_error("--port~70000", "--port is \"70000\", but must be a whole number from 0 to 65535");
    check_error("--port=", "--port is \"\", but must be a whole number from 0 to 65535");
    check_error("--offset=1.5", "--offset is \"1.5\", but must be a whole number");
    check_error("--rate~nan", "--rate is \"nan\", but must be a number from 0 to 1");
    check_error("--splitwise-role~both",
                "--splitwise-role is \"both\", but must be mixed, prefill or decode");
    check_error("--prefix-caching=maybe",
                "--prefix-caching is \"maybe\", but must be true or false");
    check_error("--no-prefix-caching=true", "--no-prefix-caching takes no value");
    check_error("--no-port", "there is no option --no-port; --help shows all");
    check_error("--port", "--port needs a value");
    check_error("--model~--port~1", "--model needs a value");
    check_error("--served-model-name", "--served-model-name needs a value");
    check_error("--served-model-name=", "--served-model-name is \"\", which names nothing");
    check_error("--served-model-name~,", "--served-model-name is \",\", which names nothing");
    check_error("--override~{", "--override is \"{\", but must be JSON: malformed JSON at byte 1: "
                                "a member name in quotes is expected");
    check_error("--bench-only~1",
                "--bench-only is not an option of \"serve\"; these take it: bench other");
}

TEST(config_words_that_an_editor_or_a_shell_has_spoilt)
{
    check_error("\xE2\x80\x93port~1",
                "\"\xE2\x80\x93port\" begins with a long dash, which editors put for two hyphens; "
                "write --port");
    check_error(
        "\xE2\x80\x94\xE2\x80\x94model=x",
        "\"\xE2\x80\x94\xE2\x80\x94model=x\" begins with a long dash, which editors put for "
        "two hyphens; write --model=x");
    check_error("--port~1~ ",
                "a word of blanks alone: most likely a blank stands behind a backslash at the end "
                "of a line, so that the shell ended the command there");
    /* A page's no-break space parts words as a blank does, but for those of a value. */
    struct config *c = config_create(table, "serve");
    CHECK_OK(load(c, "--port\xC2\xA0"
                     "81\xC2\xA0~--offset~4\xC2\xA0--rate\xC2\xA0"
                     "0.5~--model=a\xC2\xA0"
                     "b"));
    CHECK_EQ_INT(config_int(c, "port"), 81);
    CHECK_EQ_INT(config_int(c, "offset"), 4);
    CHECK(config_float(c, "rate") == 0.5);
    CHECK_EQ_STR(config_string(c, "model"), "a\xC2\xA0"
                                            "b");
    config_free(c);
    check_error("--prot\xC2\xA0"
                "81",
                "there is no option --prot; did you mean --port?");
}

TEST(config_numbers_with_a_suffix)
{
    static const struct {
        const char *text;
        int64_t value;
    } rows[] = { { "32k", 32000 },  { "32K", 32768 },     { "1.5k", 1500 }, { "2m", 2000000 },
                 { "1M", 1048576 }, { "3g", 3000000000 }, { "1G", 1 << 30 } };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct config *c = config_create(table, "serve");
        CHECK_OK(config_set(c, "offset", rows[i].text, &err));
        CHECK_EQ_INT(config_int(c, "offset"), rows[i].value);
        config_free(c);
    }
    check_error("--offset=1.0001k", "--offset is \"1.0001k\", but must be a whole number");
    check_error("--offset=k", "--offset is \"k\", but must be a whole number");
    check_error("--offset=3t", "--offset is \"3t\", but must be a whole number");
    check_error("--port=70k", "--port is \"70000\", but must be a whole number from 0 to 65535");
}

TEST(config_port_ranges_and_the_plural_of_an_option)
{
    struct config *c = config_create(table, "launch");
    size_t n;
    CHECK_OK(load(c, "--node-ports~9500-9503,9600"));
    config_list(c, "node-ports", 0, &n);
    CHECK_EQ_INT(n, 5);
    CHECK_EQ_STR(config_list(c, "node-ports", 3, NULL), "9503");
    CHECK_EQ_STR(config_list(c, "node-ports", 4, NULL), "9600");
    CHECK_OK(load(c, "--node-ports~9-1,-1"));
    CHECK_EQ_STR(config_list(c, "node-ports", 5, NULL),
                 "9-1"); /* no range: its reader refuses it */
    CHECK_STATUS(load(c, "--ticket~1"), ERR_CONFIG);
    CHECK_EQ_STR(err.text, "--ticket is not an option of \"launch\"; did you mean --tickets?");
    config_free(c);
}

TEST(config_refused_unless_neutral)
{
    check_error("--lora", "--lora is \"true\", but must be false: adapters are not supported.");
    check_error("--pp-size~2", "--pp-size is \"2\", but must be 1: pipelines are not supported.");
    config_free(loaded("--lora=0~--no-lora~--pp-size=+1"));
    setenv("T_PP", "4", 1);
    struct config *c = config_create(table, "serve");
    CHECK_STATUS(config_load_env(c, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.text, "T_PP is \"4\", but must be 1: pipelines are not supported.");
    CHECK_EQ_STR(err.field, "pp-size");
    config_free(c);
}

TEST(config_environment_and_precedence)
{
    struct config *c = config_create(table, "serve");
    setenv("T_MODEL_OLD", "old", 1);
    setenv("T_PORT", "99", 1);
    setenv("T_NAMES", "p,q", 1);
    setenv("T_MODEL", "", 1); /* empty counts as absent */
    CHECK_OK(config_load_env(c, &err));
    CHECK_EQ_STR(config_string(c, "model"), "old");
    CHECK_EQ_STR(config_source_text(c, "model"), "T_MODEL_OLD");
    CHECK(config_source(c, "port") == SOURCE_ENV);
    CHECK_OK(load(c, "--port~7~--served-model-name~r"));
    CHECK_EQ_INT(config_int(c, "port"), 7);
    size_t n = 0;
    /* replaces, does not add to, the environment's */
    CHECK_EQ_STR(config_list(c, "served-model-name", 0, &n), "r");
    CHECK_EQ_INT(n, 1);
    setenv("T_MODEL", "new", 1);
    CHECK_OK(config_load_env(c, &err)); /* afterwards it does not undo the command line */
    CHECK_EQ_INT(config_int(c, "port"), 7);
    CHECK_EQ_STR(config_string(c, "model"), "new");
    setenv("T_PORT", "x", 1);
    config_free(c);
    c = config_create(table, "serve");
    CHECK_STATUS(config_load_env(c, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.text, "T_PORT is \"x\", but must be a whole number from 0 to 65535");
    config_free(c);
}

static void add_note(void *arg, const char *sentence)
{
    buf_add_c(arg, sentence);
    buf_add_char(arg, '\n');
}

TEST(config_notes_say_what_was_accepted)
{
    struct buf b = { 0 };
    struct config *c = loaded("--port~1");
    config_notes(c, add_note, &b);
    CHECK_EQ_INT(b.len, 0);
    setenv("T_SWAP", "4", 1);
    CHECK_OK(config_load_env(c, &err));
    config_notes(c, add_note, &b);
    CHECK_EQ_STR(b.data, "T_SWAP: there is no swapping.\n");
    buf_clear(&b);
    CHECK_OK(load(c, "--swap-space~8"));
    config_notes(c, add_note, &b);
    CHECK_EQ_STR(b.data, "--swap-space: there is no swapping.\n");
    config_free(c);
    buf_release(&b);
}

TEST(config_set_checks_too)
{
    struct config *c = config_create(table, "serve");
    CHECK_OK(config_set(c, "port", "80", &err));
    CHECK_EQ_INT(config_int(c, "port"), 80);
    CHECK_EQ_STR(config_source_text(c, "port"), "--port");
    CHECK_STATUS(config_set(c, "port", "-1", &err), ERR_CONFIG);
    CHECK_EQ_INT(config_int(c, "port"), 80);
    config_free(c);
}

TEST(config_help_groups_options)
{
    struct buf b = { 0 };
    struct config_help_options o = { .command = "serve", .intro = "usage: baton serve" };
    config_help(table, &o, &b);
    const char *model = strstr(b.data, "\nModel\n"), *network = strstr(b.data, "\nNetwork\n");
    CHECK(model && network && model < network);
    CHECK(strstr(b.data, "  --model, -m, --model-path TEXT\n        The model to serve. "
                         "Environment: T_MODEL, T_MODEL_OLD.\n"));
    CHECK(strstr(b.data,
                 "Port of the HTTP API. From 0 to 65535. Default: 8000. Environment: T_PORT.\n"));
    CHECK(strstr(b.data, "--splitwise-role mixed|prefill|decode\n"));
    CHECK(!strstr(b.data, "--lora") && !strstr(b.data, "--bench-only"));
    buf_clear(&b);
    o = (struct config_help_options){ .command = "bench", .all = true };
    config_help(table, &o, &b);
    CHECK(strstr(b.data, "--bench-only N\n"));
    CHECK(strstr(b.data, "Adapters. Refused: adapters are not supported.\n"));
    buf_clear(&b);
    o = (struct config_help_options){ .command = "serve", .all = true, .word = "ADAPTER" };
    config_help(table, &o, &b);
    CHECK(strstr(b.data, "--lora") && !strstr(b.data, "--port") && strstr(b.data, "\nModel\n"));
    buf_release(&b);
}

TEST(config_markdown_has_one_table_per_group)
{
    struct buf b = { 0 };
    config_markdown(table, &b);
    CHECK(strncmp(b.data, "## Model\n\n| Option |", 20) == 0);
    CHECK(strstr(b.data, "| `--port` |  | `T_PORT` | whole number, 0 to 65535 | `8000` | Port of "
                         "the HTTP API. | works |\n"));
    CHECK(strstr(b.data, "| `--model` | `-m`, `--model-path` | `T_MODEL`, `T_MODEL_OLD` | text |  "
                         "| The model to serve. | works |\n"));
    CHECK(strstr(b.data, "JSON &lt;text>\\|more."));
    CHECK(strstr(b.data, "| refused unless `1`: pipelines are not supported. |\n"));
    CHECK(strstr(b.data, "\n\n## Bench\n\n| Option"));
    buf_release(&b);
}

TEST_MAIN(CASE(config_defaults), CASE(config_args_in_every_form),
          CASE(config_lists_by_comma_repetition_and_words), CASE(config_positional_words),
          CASE(config_errors_say_what_would_be_right),
          CASE(config_words_that_an_editor_or_a_shell_has_spoilt),
          CASE(config_numbers_with_a_suffix), CASE(config_port_ranges_and_the_plural_of_an_option),
          CASE(config_refused_unless_neutral), CASE(config_environment_and_precedence),
          CASE(config_notes_say_what_was_accepted), CASE(config_set_checks_too),
          CASE(config_help_groups_options), CASE(config_markdown_has_one_table_per_group))
