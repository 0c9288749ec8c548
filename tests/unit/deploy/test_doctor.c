/* test_doctor.c - the doctor finds what is wrong, says how to fix it, and counts it. */
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "deploy/options/option_table.h"
#include "kernels/device.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* Options as on a command line; ended by NULL. */
static struct doctor *doctor_with(char **argv)
{
    struct err err = { 0 };
    struct doctor *d = MEM_NEW(struct doctor);
    struct config *c = config_create(OPTIONS, "doctor");
    int argc = 0, none = 0;
    while (argv[argc]) argc++;
    if (config_load_args(c, argc, argv, NULL, &none, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    d->c = c;
    return d;
}

static void doctor_done(struct doctor *d)
{
    config_free((struct config *)d->c);
    mem_free(d);
}

static int listen_somewhere(uint16_t *port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY) };
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    CHECK_EQ_INT(bind(fd, (struct sockaddr *)&a, n), 0);
    CHECK_EQ_INT(listen(fd, 1), 0);
    CHECK_EQ_INT(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    *port = ntohs(a.sin_port);
    return fd;
}

TEST(a_port_in_use_fails)
{
    uint16_t port;
    char text[16];
    int fd = listen_somewhere(&port);
    snprintf(text, sizeof text, "%u", port);
    struct doctor *d = doctor_with((char *[]){ "--port", text, NULL });
    doctor_check_ports(d);
    CHECK_EQ_INT(d->n, 1);
    CHECK_EQ_INT(d->lines[0].result, DOCTOR_FAIL);
    CHECK(strstr(d->lines[0].text, "in use") != NULL);
    CHECK(d->lines[0].fix[0] != 0);
    close(fd);
    doctor_done(d);
}

TEST(a_port_given_twice_fails)
{
    struct doctor *d = doctor_with(
        (char *[]){ "--port", "39871", "--metrics-port", "39871", NULL });
    doctor_check_ports(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 1);
    CHECK(strstr(d->lines[0].text, "--metrics-port") != NULL);
    doctor_done(d);
}

TEST(more_kv_memory_than_there_is_fails)
{
    struct doctor *d = doctor_with((char *[]){ "--kv-cache-memory", "1000000", NULL });
    doctor_check_memory(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 1);
    doctor_done(d);
}

static const struct doctor_line *line_of(const struct doctor *d, const char *what)
{
    for (size_t i = 0; i < d->n; i++)
        if (strcmp(d->lines[i].what, what) == 0) return &d->lines[i];
    return NULL;
}

TEST(a_gpu_that_is_not_there_fails)
{
    struct doctor *d = doctor_with((char *[]){ "--device", "cuda", NULL }),
                  *plain = doctor_with((char *[]){ NULL });
    setenv("BATON_SIMT_DEVICES", "0", 1); /* of the emulated GPU */
    if (device_count("cuda") > 0) SKIP("there is a GPU");
    doctor_check_gpu(d);
    CHECK_EQ_INT(d->n, 1);
    CHECK_EQ_INT(d->lines[0].result, DOCTOR_FAIL);
    CHECK(strstr(d->lines[0].text, "cuda") || strstr(d->lines[0].text, "CUDA"));
    CHECK(d->lines[0].fix[0] != 0);
    doctor_check_gpu(plain);
    CHECK_EQ_INT(plain->n, 0);
    doctor_done(d);
    doctor_done(plain);
}

/* The emulated GPU with little memory. */
TEST(the_kv_cache_is_held_against_the_memory_of_the_gpu)
{
    char path[512];
    snprintf(path, sizeof path, "%s", test_data("goldens/llama/model"));
    if (access(path, R_OK) != 0) SKIP("tests/data/goldens/llama/model is not there");
    if (device_count("cuda") == 0) SKIP("no CUDA device, or a build without");
    setenv("BATON_SIMT_MEMORY", "100000", 1);
    struct doctor *d = doctor_with(
        (char *[]){ "--device", "cuda", "--model", path, "--kv-cache-memory", "1", NULL });
    doctor_check_gpu(d);
    if (!strstr(line_of(d, "GPU")->text, "SIMT")) SKIP("a real GPU has more memory than that");
    CHECK_EQ_INT(line_of(d, "GPU")->result, DOCTOR_OK);
    CHECK(d->gpu_room > 80000 && d->gpu_room <= 90000); /* --gpu-memory-utilization is 0.9 */
    doctor_check_memory(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 1);
    CHECK(strstr(d->lines[d->n - 3].fix, "--kv-cache-memory"));
    doctor_check_model(d);
    CHECK(line_of(d, "KV cache")->result != DOCTOR_OK &&
          strstr(line_of(d, "KV cache")->fix, "0 MiB may be used"));
    doctor_done(d);
    d = doctor_with((char *[]){ NULL });
    doctor_check_gpu(d);
    CHECK(line_of(d, "GPU")->result == DOCTOR_OK && strstr(line_of(d, "GPU")->text, "not used"));
    doctor_done(d);
}

/* A model of 57 GB on the emulated GPU of 4 GiB. */
TEST(weights_that_do_not_fit_fail)
{
    char path[512];
    snprintf(path, sizeof path, "%s", test_data("configs/qwen3-30b-a3b"));
    if (access(path, R_OK) != 0) SKIP("tests/data/configs/qwen3-30b-a3b is not there");
    if (device_count("cuda") == 0) SKIP("no CUDA device, or a build without");
    struct doctor *d = doctor_with(
        (char *[]){ "--device", "cuda", "--load-format", "dummy", "--model", path, NULL });
    doctor_check_gpu(d);
    if (!strstr(line_of(d, "GPU")->text, "SIMT")) SKIP("a real GPU may have that much memory");
    doctor_check_options(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 1);
    CHECK(strstr(d->lines[d->n - 1].text, "weights 5") &&
          strstr(d->lines[d->n - 1].text, "are available"));
    doctor_done(d);
}

TEST(a_redis_that_is_not_there_fails)
{
    uint16_t port;
    char text[16];
    close(listen_somewhere(&port));
    snprintf(text, sizeof text, "%u", port);
    struct doctor *d = doctor_with(
        (char *[]){ "--scheduler-name", "splitwise", "--scheduler-port", text, NULL });
    doctor_check_redis(d);
    CHECK_EQ_INT(d->n, 1);
    CHECK_EQ_INT(d->lines[0].result, DOCTOR_FAIL);
    doctor_done(d);
}

TEST(redis_is_left_alone_without_the_splitwise_scheduler)
{
    struct doctor *d = doctor_with((char *[]){ NULL });
    doctor_check_redis(d);
    CHECK_EQ_INT(d->n, 0);
    doctor_done(d);
}

TEST(a_model_is_described_with_its_kv_size)
{
    char path[512];
    snprintf(path, sizeof path, "%s", test_data("goldens/llama/model"));
    if (access(path, R_OK) != 0) SKIP("tests/data/goldens/llama/model is not there");
    struct doctor *d = doctor_with((char *[]){ "--model", path, NULL });
    doctor_check_model(d);
    CHECK_EQ_INT(d->n, 2);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 0);
    CHECK_EQ_STR(d->lines[1].what, "KV cache");
    CHECK(strstr(d->lines[1].text, "bf16: "));
    doctor_done(d);
}

TEST(the_kv_size_follows_the_type_of_the_cache)
{
    char llama[512], latent[512];
    snprintf(llama, sizeof llama, "%s", test_data("goldens/llama/model"));
    snprintf(latent, sizeof latent, "%s", test_data("goldens/deepseek_v3/model"));
    if (access(llama, R_OK) != 0 || access(latent, R_OK) != 0)
        SKIP("tests/data/goldens is not there");
    struct doctor *d = doctor_with((char *[]){ "--model", llama, "--kv-cache-dtype", "fp8", NULL });
    doctor_check_model(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 0);
    CHECK(strstr(d->lines[1].text, "f8_e4m3: "));
    doctor_done(d);
    d = doctor_with((char *[]){ "--model", llama, "--kv-cache-dtype", "fp8_e5m2", NULL });
    doctor_check_model(d);
    CHECK_EQ_INT(d->lines[1].result, DOCTOR_FAIL);
    CHECK(strstr(d->lines[1].text, "--kv-cache-dtype: a KV cache cannot be held as \"fp8_e5m2\"; "
                                   "it can as bfloat16, float16, int8, fp8"));
    doctor_done(d);
    d = doctor_with((char *[]){ "--model", latent, "--kv-cache-dtype", "int8", NULL });
    doctor_check_model(d);
    CHECK_EQ_INT(d->lines[1].result, DOCTOR_FAIL);
    CHECK(strstr(d->lines[1].text, "latents (MLA), which can only be held as bf16, not as int8"));
    doctor_done(d);
}

TEST(a_model_that_is_nowhere_fails)
{
    struct doctor *d = doctor_with((char *[]){ "--model", "nobody/nothing", NULL });
    doctor_check_model(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 1);
    doctor_done(d);
}

TEST(a_far_redis_needs_a_secret)
{
    unsetenv("BATON_CLUSTER_SECRET");
    struct doctor *d = doctor_with(
        (char *[]){ "--scheduler-name", "splitwise", "--scheduler-host", "192.0.2.1", NULL });
    doctor_check_cluster(d);
    CHECK_EQ_INT(doctor_count(d, DOCTOR_FAIL), 1);
    CHECK(strstr(d->lines[0].fix, "BATON_CLUSTER_SECRET") != NULL);
    doctor_done(d);
}

TEST(the_json_report_is_json_and_says_whether_all_is_well)
{
    cJSON *doc = NULL;
    struct err err = { 0 };
    struct buf out = { 0 };
    struct doctor *d = doctor_with((char *[]){ NULL });
    doctor_add(d, "one", DOCTOR_OK, "fine");
    doctor_fix(doctor_add(d, "two", DOCTOR_FAIL, "a \"quoted\" %s", "word"), "mend it");
    doctor_print_json(d, &out);
    CHECK_OK(json_parse(buf_str(&out), true, &doc, &err));
    CHECK(cJSON_IsFalse(cJSON_GetObjectItem(doc, "ok")));
    CHECK_EQ_INT(cJSON_GetArraySize(cJSON_GetObjectItem(doc, "checks")), 2);
    cJSON_Delete(doc);
    buf_clear(&out);
    doctor_print_text(d, false, &out);
    CHECK(strstr(out.data, "-> mend it") != NULL);
    CHECK(strstr(out.data, "1 ok, 0 warnings, 1 failure") != NULL);
    buf_release(&out);
    doctor_done(d);
}

TEST_MAIN(CASE(a_port_in_use_fails), CASE(a_port_given_twice_fails),
          CASE(more_kv_memory_than_there_is_fails), CASE(a_redis_that_is_not_there_fails),
          CASE(a_gpu_that_is_not_there_fails),
          CASE(the_kv_cache_is_held_against_the_memory_of_the_gpu),
          CASE(weights_that_do_not_fit_fail),
          CASE(redis_is_left_alone_without_the_splitwise_scheduler),
          CASE(a_model_is_described_with_its_kv_size),
          CASE(the_kv_size_follows_the_type_of_the_cache), CASE(a_model_that_is_nowhere_fails),
          CASE(a_far_redis_needs_a_secret),
          CASE(the_json_report_is_json_and_says_whether_all_is_well))
