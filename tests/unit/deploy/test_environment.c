/* test_environment.c - variables that nothing reads: which are named, what was meant, and which stop
 * a node. */
#include "deploy/options/environment.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/options/option_table.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static void collect(void *arg, const char *sentence)
{
    struct buf *text = arg;
    buf_printf(text, "%s\n", sentence);
}

/* The warnings of an environment that has only this variable. */
static void check(const char *name, const char *value, const char *want)
{
    struct buf text = { 0 };
    clearenv();
    setenv(name, value, 1);
    environment_warnings(collect, &text);
    const char *got = text.data ? text.data : "";
    if (strcmp(got, want) != 0)
        test_fail(__FILE__, __LINE__, "%s=%s gives %s, wanted %s", name, value, got, want);
    buf_release(&text);
}

TEST(a_misspelt_variable_is_named_with_what_was_meant)
{
    static const char *const rows[][2] = {
        { "BATON_API_KYE", "did you mean BATON_API_KEY?" },
        { "BATON_APIKEY", "did you mean BATON_API_KEY?" },
        { "BATON_CLUSTR_SECRET", "did you mean BATON_CLUSTER_SECRET?" },
        { "BATON_SECRET", "did you mean BATON_CLUSTER_SECRET?" },
        { "BATON_SECRET_FILE", "did you mean BATON_CLUSTER_SECRET_FILE?" },
        { "BATON_PROT", "did you mean BATON_PORT?" },
        { "BATON_MODLE", "did you mean BATON_MODEL?" },
        { "BATON_SCHEDULER_HOSTNAME", "did you mean BATON_SCHEDULER_HOST?" },
        { "BATON_RDMA_MUT", "did you mean BATON_RDMA_MTU?" },
        { "KVCACHE_RDMA_NIC", "did you mean KVCACHE_RDMA_NICS?" },
        { "BATON_NCCL_LIB", "did you mean BATON_NCCL_LIBRARY?" },
        /* the option's name instead of its variable's */
        { "BATON_SPLITWISE_ROLE", "did you mean BATON_ROLE?" },
        { "BATON_SCHEDULER_PASSWORD", "did you mean BATON_REDIS_PASSWORD?" },
        { "BATON_CONTEXT_LENGTH", "did you mean BATON_MAX_MODEL_LEN?" },
        { "BATON_QUANTIZATION", "--quantization is for the command line only" },
        /* nothing is near */
        { "BATON_FOO", "docs/configuration.md lists those that are" },
        { "BATON_KEY", "docs/configuration.md lists those that are" },
        { "BATON_VERSION", "docs/configuration.md lists those that are" },
        { "BATON_CLUSTER_NAME", "docs/configuration.md lists those that are" },
    };
    struct buf want = { 0 };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        buf_clear(&want);
        buf_printf(&want, "%s: no variable of that name is read; %s\n", rows[i][0], rows[i][1]);
        check(rows[i][0], "x", want.data);
    }
    buf_release(&want);
}

TEST(variables_that_something_reads_are_not_named)
{
    static const char *const rows[][2] = {
        { "BATON_API_KEY", "k" },
        { "BATON_CLUSTER_SECRET", "s" },
        { "BATON_CLUSTER_SECRET_FILE", "/f" },
        { "BATON_ROUTER", "h:1" },
        { "BATON_DIRECTORY", "h:1" },
        { "BATON_LOG_LEVEL", "info" },
        { "BATON_MODELS", "/m" },
        { "BATON_RDMA_MTU", "1024" },
        { "KVCACHE_RDMA_NICS", "mlx5_0" },
        { "BATON_SUPERVISED", "1" },
        /* of tests and scripts */
        { "BATON_TEST_GGUF", "/m.gguf" },
        { "BATON_BIN", "build/baton" },
        { "BATON_CACHE", "/c" },
        /* not ours, or absent */
        { "BATONS", "x" },
        { "XBATON_PORT", "x" },
        { "BATON_PROT", "" },
        /* Kubernetes, for the Services baton and baton-prefill */
        { "BATON_SERVICE_HOST", "10.0.0.1" },
        { "BATON_SERVICE_PORT_HTTP", "8000" },
        { "BATON_PORT_8000_TCP", "tcp://10.0.0.1:8000" },
        { "BATON_PORT_8000_TCP_ADDR", "10.0.0.1" },
        { "BATON_PREFILL_PORT", "tcp://10.0.0.1:8000" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) check(rows[i][0], rows[i][1], "");
}

TEST(a_variable_of_a_kubernetes_service_says_so)
{
    struct err err = { 0 };
    clearenv();
    setenv("BATON_PORT", "tcp://10.96.0.1:8000", 1);
    struct config *c = config_create(OPTIONS, "serve");
    CHECK_STATUS(config_load_env(c, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.text, "BATON_PORT is \"tcp://10.96.0.1:8000\", as Kubernetes sets it for a "
                           "Service of that name: call the Service otherwise, or give the pod "
                           "enableServiceLinks: false");
    config_free(c);
}

/* environment_check with the variables NAME=value of `set`, separated by blanks, and a flag. */
static enum status start(const char *set, char *flag, struct err *err)
{
    char copy[256];
    clearenv();
    snprintf(copy, sizeof copy, "%s", set);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) {
        char *value = strchr(word, '=');
        *value++ = 0;
        setenv(word, value, 1);
    }
    struct config *c = config_create(OPTIONS, "serve");
    int none = 0;
    CHECK_OK(config_load_env(c, err));
    if (flag) CHECK_OK(config_load_args(c, 1, &flag, NULL, &none, err));
    enum status st = environment_check(c, err);
    config_free(c);
    return st;
}

TEST(a_misspelt_secret_stops_a_node)
{
    struct err err = { 0 };
    CHECK_STATUS(start("BATON_API_KYE=k", NULL, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.text, "BATON_API_KYE: no variable of that name is read; did you mean "
                           "BATON_API_KEY? Rename or unset it: without the key anybody could use "
                           "the API");
    CHECK_STATUS(start("BATON_CLUSTR_SECRET=s", NULL, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "BATON_CLUSTER_SECRET?") && strstr(err.text, "would not trust"));
    CHECK_STATUS(start("BATON_CLUSTER_SECRT_FILE=/f", NULL, &err), ERR_CONFIG);
    /* A secret that is there is not lost. */
    CHECK_OK(start("BATON_API_KYE=k BATON_API_KEY=k", NULL, &err));
    CHECK_OK(start("BATON_API_KYE=k", "--api-key=k", &err));
    CHECK_OK(start("BATON_API_KYE=k VLLM_API_KEY=k", NULL, &err));
    CHECK_OK(start("BATON_CLUSTR_SECRET=s BATON_CLUSTER_SECRET=s", NULL, &err));
    CHECK_OK(start("BATON_CLUSTR_SECRET=s", "--cluster-secret-file=/f", &err));
    CHECK_STATUS(start("BATON_CLUSTR_SECRET=s", "--api-key=k", &err), ERR_CONFIG);
    /* What is no secret is for environment_warnings. */
    CHECK_OK(start("BATON_PROT=1 BATON_RDMA_MUT=1 BATON_FOO=1", NULL, &err));
    CHECK_OK(start("", NULL, &err));
}

TEST_MAIN(CASE(a_misspelt_variable_is_named_with_what_was_meant),
          CASE(variables_that_something_reads_are_not_named),
          CASE(a_variable_of_a_kubernetes_service_says_so), CASE(a_misspelt_secret_stops_a_node))
