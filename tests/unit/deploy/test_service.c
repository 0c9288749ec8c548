/* test_service.c - the variables of PaddleNLP's service: what each becomes, which of them only
 * start_server's process reads, where the model is, several hosts, the health port's verdict, and
 * the file that says which service runs. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deploy/launch/ranks.h"
#include "deploy/launch/ranks_model.h"
#include "deploy/options/option_table.h"
#include "deploy/service/foreign_value.h"
#include "deploy/service/health_port.h"
#include "deploy/service/ready_pipe.h"
#include "deploy/service/run_file.h"
#include "deploy/service/service.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* Sets NAME=value of a list separated by blanks, and nothing else. */
static void set_env(const char *set)
{
    char copy[1024];
    clearenv();
    snprintf(copy, sizeof copy, "%s", set);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) {
        char *value = strchr(word, '=');
        *value++ = 0;
        setenv(word, value, 1);
    }
}

/* `serve` with these variables and one flag (NULL: none), as start_server starts it. */
static enum status load(bool service, const char *flag, struct config **out, struct err *err)
{
    char *argv[] = { (char *)flag };
    int none = 0;
    if (service) setenv(SERVICE_VARIABLE, "1", 0);
    struct config *c = *out = config_create(OPTIONS, "serve");
    if (service) config_as_service(c);
    TRY(config_load_env(c, err));
    TRY(config_load_args(c, flag ? 1 : 0, argv, NULL, &none, err));
    return service_complete(c, err);
}

static struct config *loaded(bool service, const char *flag)
{
    struct config *c;
    struct err err = { 0 };
    if (load(service, flag, &c, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return c;
}

static void fails(bool service, const char *set, enum status how, const char *want)
{
    struct config *c;
    struct err err = { 0 };
    set_env(set);
    CHECK_STATUS(load(service, NULL, &c, &err), how);
    if (!strstr(err.text, want)) test_fail(__FILE__, __LINE__, "%s says: %s", set, err.text);
    config_free(c);
}

static void refuses(bool service, const char *set, const char *want)
{
    fails(service, set, ERR_CONFIG, want);
}

#define MODEL "BATON_MODEL=m "

TEST(a_variable_that_has_another_meaning_is_translated)
{
    static const char *const rows[][3] = {
        { "MP_NUM=16 MP_NNODE=2", "MP_NUM", "8" },
        { "MP_NUM=16 POD_IPS=192.0.2.7,192.0.2.8,", "MP_NUM", "8" },
        { "MP_NUM=2", "MP_NUM", "2" },
        { "USE_CACHE_KV_INT8=1", "USE_CACHE_KV_INT8", "int8" },
        { "USE_CACHE_KV_INT8=0", "USE_CACHE_KV_INT8", "" },
        { "USE_CACHE_KV_INT4=0", "USE_CACHE_KV_INT4", "" },
        { "SPECULATE_METHOD=mtp SPECULATE_MAX_DRAFT_TOKEN_NUM=2", "SPECULATE_METHOD",
          "{\"method\":\"mtp\",\"num_speculative_tokens\":2}" },
        { "SPECULATE_METHOD=draft_model SPECULATE_MODEL_PATH=/m", "SPECULATE_METHOD",
          "{\"method\":\"draft\",\"model\":\"/m\"}" },
        { "SPECULATE_METHOD=inference_with_reference SPECULATE_MAX_NGRAM_SIZE=4",
          "SPECULATE_METHOD", "{\"method\":\"ngram\",\"prompt_lookup_max\":4}" },
        { "SPECULATE_METHOD=None", "SPECULATE_METHOD", "" },
        { "MAX_SEQ_LEN=8192", "MAX_SEQ_LEN", "8192" },
    };
    struct buf out = { 0 };
    struct err err = { 0 };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        set_env(rows[i][0]);
        buf_clear(&out);
        CHECK_OK(foreign_value(rows[i][1], getenv(rows[i][1]), &out, &err));
        CHECK_EQ_STR(out.len ? out.data : "", rows[i][2]);
    }
    buf_release(&out);
}

TEST(a_bad_value_names_the_variable_and_what_would_be_right)
{
    static const char *const rows[][2] = {
        { "MP_NUM=15 MP_NNODE=2", "MP_NUM 15 cannot be divided evenly among the 2 hosts of "
                                  "MP_NNODE; give 14 or 16" },
        { "MP_NUM=1 MP_NNODE=2", "MP_NUM 1 is fewer than one rank for each of the 2 hosts" },
        { "MP_NUM=3 POD_IPS=192.0.2.7,192.0.2.8", "MP_NUM 3 cannot be divided evenly among the 2 "
                                                  "hosts of POD_IPS; give 2 or 4" },
        { "MP_NUM=eight", "MP_NUM is \"eight\", but must be a whole number from 1 to" },
        { "MP_NUM=64 MP_NNODE=2", "MP_NUM 64 is 32 ranks for each host, and a node has at most 16; "
                                  "give 32 or fewer" },
        { "MP_NUM=2 MP_NNODE=x", "MP_NNODE is \"x\"" },
        { "USE_CACHE_KV_INT8=yes!", "USE_CACHE_KV_INT8 is \"yes!\", but must be 0 or 1" },
        { "USE_CACHE_KV_INT4=1", "USE_CACHE_KV_INT4 is \"1\": a KV cache of 4 bits is not built; "
                                 "give 0, and for one of 8 bits USE_CACHE_KV_INT8=1" },
        { "SPECULATE_METHOD=eagle", "SPECULATE_METHOD is \"eagle\", but must be mtp" },
        { "SPECULATE_METHOD=mtp SPECULATE_MAX_DRAFT_TOKEN_NUM=0",
          "SPECULATE_MAX_DRAFT_TOKEN_NUM is \"0\"" },
        { "SPECULATE_METHOD=mtp SPECULATE_MAX_DRAFT_TOKEN_NUM=9",
          "SPECULATE_MAX_DRAFT_TOKEN_NUM is \"9\", but must be a whole number from 1 to 8" },
        { "HEALTH_HTTP_PORT=81100",
          "HEALTH_HTTP_PORT is \"81100\", but must be a whole number from 0 to 65535" },
        { "SERVICE_HTTP_PORT=http", "SERVICE_HTTP_PORT is \"http\"" },
        { "MAX_CACHED_TASK_NUM=0", "MAX_CACHED_TASK_NUM is \"0\", but must be a whole number" },
        { "CHECK_HEALTH_INTERVAL=0", "CHECK_HEALTH_INTERVAL is \"0\"" },
        { "BLOCK_BS=0", "BLOCK_BS is \"0\", but must be a number above 0" },
        { "BLOCK_BS=many", "BLOCK_BS is \"many\"" },
        { "PUSH_MODE_HTTP_WORKERS=x", "PUSH_MODE_HTTP_WORKERS is \"x\"" },
        { "BLOCK_RATIO=x", "BLOCK_RATIO is \"x\"" },
        { "MAX_DEC_LEN=-1", "MAX_DEC_LEN is \"-1\"" },
        { "DISABLE_STREAMING=maybe", "DISABLE_STREAMING is \"maybe\"" },
        { "USE_WARMUP=x", "USE_WARMUP is \"x\"" },
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) refuses(false, rows[i][0], rows[i][1]);
    refuses(true, MODEL "BATCH_SIZE=0", "BATCH_SIZE is \"0\", but must be a whole number from 1");
    refuses(true, MODEL "BATCH_SIZE=4097", "BATCH_SIZE is \"4097\"");
    refuses(true, MODEL "MAX_SEQ_LEN=long", "MAX_SEQ_LEN is \"long\"");
    refuses(true, MODEL "OUTPUT_LOG_TO_CONSOLE=file", "OUTPUT_LOG_TO_CONSOLE is \"file\"");
    refuses(
        true, MODEL "DTYPE=float16",
        "DTYPE is \"float16\", but must be auto or bfloat16: weights keep the type of their file");
    refuses(true, MODEL "OUTPUT_LOG_TO_CONSOLE=2",
            "OUTPUT_LOG_TO_CONSOLE is \"2\", but must be true or false");
    refuses(false, "BATON_LOG_TO_CONSOLE=auto", "BATON_LOG_TO_CONSOLE is \"auto\", but must be");
    refuses(false, "DISABLE_STREAMING=2", "DISABLE_STREAMING is \"2\", but must be true or false");
}

TEST(names_that_other_programs_have_are_read_in_a_service_alone)
{
    set_env(MODEL "BATCH_SIZE=48 MAX_SEQ_LEN=4096 HTTP_PORT=8111 METRICS_PORT=8723 BLOCK_SIZE=32 "
                  "INTER_QUEUE_PORT=8813 OUTPUT_LOG_TO_CONSOLE=1 HEALTH_HTTP_PORT=8110");
    struct config *c = loaded(false, NULL);
    CHECK_EQ_INT(config_int(c, "max-num-seqs"), 8);
    CHECK_EQ_INT(config_int(c, "max-model-len"), 2048);
    CHECK_EQ_INT(config_int(c, "metrics-port"), 0);
    CHECK_EQ_INT(config_int(c, "health-port"), 8110);
    CHECK(!config_is_set(c, "engine-worker-queue-port"));
    config_free(c);
    c = loaded(true, NULL);
    CHECK_EQ_INT(config_int(c, "max-num-seqs"), 48);
    CHECK_EQ_STR(config_source_text(c, "max-num-seqs"), "BATCH_SIZE");
    CHECK_EQ_INT(config_int(c, "max-model-len"), 4096);
    CHECK_EQ_INT(config_int(c, "block-size"), 32);
    CHECK_EQ_INT(config_int(c, "metrics-port"), 8723);
    CHECK_EQ_INT(config_int(c, "health-port"), 8110); /* the newer name comes first */
    CHECK_EQ_STR(config_list(c, "engine-worker-queue-port", 0, NULL), "8813");
    CHECK(config_bool(c, "log-to-console"));
    config_free(c);
}

TEST(a_service_has_the_documents_defaults_and_flags_come_before_them)
{
    set_env(MODEL);
    struct config *c = loaded(true, NULL);
    CHECK_EQ_INT(config_int(c, "port"), 9965);
    CHECK_EQ_INT(config_int(c, "health-port"), 8110);
    CHECK_EQ_INT(config_int(c, "metrics-port"), 8722);
    CHECK_EQ_INT(config_int(c, "max-model-len"), 8192);
    CHECK(!config_is_set(c, "max-model-len")); /* so the model's own limit may lower it */
    CHECK_EQ_STR(config_source_text(c, "max-model-len"), "start_server's default");
    CHECK_EQ_INT(config_int(c, "grpc-port"), 8811);
    CHECK_EQ_INT(config_int(c, "max-dec-len"), 1024);
    CHECK_EQ_INT(config_int(c, "max-num-seqs"), 50);
    CHECK_EQ_INT(config_int(c, "max-concurrency"), 50 + 128);
    CHECK_EQ_INT(config_int(c, "drain-timeout"), 300);
    CHECK_EQ_STR(config_string(c, "log-dir"), "log");
    config_free(c);
    set_env(MODEL "SERVICE_HTTP_PORT=9000 BATON_PORT=9001");
    c = loaded(true, NULL);
    CHECK_EQ_INT(config_int(c, "port"), 9001);
    config_free(c);
    c = loaded(true, "--port=9002");
    CHECK_EQ_INT(config_int(c, "port"), 9002);
    config_forget(c, "port");
    CHECK_EQ_INT(config_int(c, "port"), 9965);
    config_free(c);
}

/* As that service's total is counted: however long answers may be. */
TEST(block_bs_counts_sequences_of_the_context)
{
    set_env(MODEL "BLOCK_BS=5 MAX_SEQ_LEN=8192 MAX_DEC_LEN=16384");
    struct config *c = loaded(true, NULL);
    CHECK_EQ_INT(config_int(c, "num-gpu-blocks-override"), 640);
    CHECK_EQ_STR(config_source_text(c, "num-gpu-blocks-override"), "BLOCK_BS");
    config_free(c);
    set_env("BLOCK_BS=2.5");
    c = loaded(false, "--max-model-len=100"); /* two blocks of 64 each */
    CHECK_EQ_INT(config_int(c, "num-gpu-blocks-override"), 5);
    config_free(c);
    c = loaded(false, "--kv-cache-memory=1");
    CHECK(!config_is_set(c, "num-gpu-blocks-override"));
    config_free(c);
    setenv("BATON_SUPERVISED", "1", 1); /* its parent has given it all options */
    c = loaded(false, NULL);
    CHECK(!config_is_set(c, "num-gpu-blocks-override"));
    config_free(c);
}

TEST(max_cached_task_num_counts_what_waits_beside_what_runs)
{
    set_env(MODEL "MAX_CACHED_TASK_NUM=7 BATCH_SIZE=5");
    struct config *c = loaded(true, NULL);
    CHECK_EQ_INT(config_int(c, "max-concurrency"), 12);
    CHECK_EQ_STR(config_source_text(c, "max-concurrency"), "MAX_CACHED_TASK_NUM");
    config_free(c);
    c = loaded(true, "--max-concurrency=3");
    CHECK_EQ_INT(config_int(c, "max-concurrency"), 3);
    config_free(c);
    set_env("MAX_CACHED_TASK_NUM=7 POD_IPS=192.0.2.7,192.0.2.8");
    c = loaded(false, NULL); /* of two hosts: eight run on each */
    CHECK_EQ_INT(config_int(c, "max-concurrency"), 2 * 8 + 7);
    config_free(c);
    set_env("MAX_CACHED_TASK_NUM=7"); /* of no service: BATCH_SIZE has its own default */
    c = loaded(false, NULL);
    CHECK_EQ_INT(config_int(c, "max-concurrency"), 15);
    config_free(c);
    set_env("");
    c = loaded(false, NULL);
    CHECK(!config_is_set(c, "max-concurrency"));
    config_free(c);
}

TEST(the_start_page_says_which_variable_gave_what_but_no_secret)
{
    struct buf page = { 0 };
    set_env(MODEL
            "BATCH_SIZE=48 VLLM_API_KEY=hidden SERVICE_HTTP_PORT=9000 PUSH_MODE_HTTP_WORKERS=4 "
            "BATON_HOST=127.0.0.1");
    struct config *c = loaded(true, NULL);
    config_print_variables(c, &page);
    CHECK(strstr(page.data, "BATCH_SIZE is --max-num-seqs 48\n"));
    CHECK(strstr(page.data, "SERVICE_HTTP_PORT is --port 9000\n"));
    CHECK(strstr(page.data, "VLLM_API_KEY is --api-key\n"));
    CHECK(!strstr(page.data, "hidden") && !strstr(page.data, "BATON_HOST"));
    CHECK(!strstr(page.data, "WORKERS")); /* without effect: a note says that */
    buf_release(&page);
    config_free(c);
}

TEST(variables_are_unset_for_processes_that_would_inherit_them)
{
    set_env(MODEL "BATON_CONTROL_PORT=1 INTER_PROC_PORT=2 INFER_QUEUE_PORT=3 MAX_SEQ_LEN=64");
    struct config *c = loaded(true, NULL);
    config_unset_env(c, "engine-worker-queue-port");
    CHECK(!getenv("BATON_CONTROL_PORT") && !getenv("INTER_PROC_PORT") &&
          !getenv("INFER_QUEUE_PORT") && getenv("MAX_SEQ_LEN"));
    config_free(c);
}

TEST(ranks_that_mp_num_counts_have_a_gpu_each)
{
    const struct ranks r = { .tp.size = 4 };
    struct err err = { 0 };
    set_env(MODEL "MP_NUM=4 CUDA_VISIBLE_DEVICES=2,3");
    struct config *c = loaded(true, NULL);
    CHECK_STATUS(ranks_check_gpus(c, &r, 2, &err), ERR_CONFIG);
    CHECK_EQ_STR(err.text, "MP_NUM gives this host 4 ranks, and there are 2 GPUs, "
                           "CUDA_VISIBLE_DEVICES=2,3; list one for each in CUDA_VISIBLE_DEVICES, "
                           "or give MP_NUM 2 for each host");
    CHECK_OK(ranks_check_gpus(c, &r, 4, &err));
    config_free(c);
    c = loaded(true, "--tensor-parallel-size=4"); /* who says it so may share them */
    CHECK_OK(ranks_check_gpus(c, &r, 2, &err));
    config_free(c);
}

/* ---- the model ---- */

static void touch(const char *folder, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL);
    fclose(f);
}

static const char *below(const char *folder, const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

TEST(the_model_is_that_of_model_dir_or_the_one_that_is_named)
{
    char dir[256], want[512];
    snprintf(dir, sizeof dir, "%s", test_tmpdir());
    CHECK_EQ_INT(mkdir(below(dir, "org"), 0700), 0);
    CHECK_EQ_INT(mkdir(below(dir, "org/name"), 0700), 0);
    touch(below(dir, "org/name"), "config.json");
    clearenv();
    setenv("MODEL_DIR", dir, 1);
    setenv("model_name", "org/name", 1);
    struct config *c = loaded(true, NULL); /* MODEL_DIR itself has none */
    snprintf(want, sizeof want, "%s", below(dir, "org/name"));
    CHECK_EQ_STR(config_string(c, "model"), want);
    CHECK_EQ_STR(config_source_text(c, "model"), "model_name");
    CHECK_EQ_STR(config_list(c, "served-model-name", 0, NULL), "org/name");
    config_free(c);
    touch(dir, "config.json");
    c = loaded(true, NULL); /* it has: a variable for a download does not change that */
    CHECK_EQ_STR(config_string(c, "model"), dir);
    CHECK_EQ_STR(config_source_text(c, "model"), "MODEL_DIR");
    config_free(c);
    setenv(SERVICE_VARIABLE, SERVICE_NAMED, 1);
    c = loaded(true, NULL); /* an argument does */
    CHECK_EQ_STR(config_string(c, "model"), want);
    config_free(c);
    c = loaded(true, "--model=other");
    CHECK_EQ_STR(config_string(c, "model"), "other");
    config_free(c);
}

TEST(a_static_models_name_says_how_its_checkpoint_is_quantised)
{
    static const char *const rows[][2] = { { "weight_only_int8", "wint8" },
                                           { "weight_only_int4", "wint4" },
                                           { "a8w8_fp8", "block_wise_fp8" } };
    char dir[256], name[64];
    snprintf(dir, sizeof dir, "%s", test_tmpdir());
    CHECK_EQ_INT(mkdir(below(dir, "org"), 0700), 0);
    CHECK_EQ_INT(mkdir(below(dir, "org/name-2nodes"), 0700), 0);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        snprintf(name, sizeof name, "org/name-2nodes/%s", rows[i][0]);
        CHECK_EQ_INT(mkdir(below(dir, name), 0700), 0);
        touch(below(dir, name), "config.json");
        clearenv();
        setenv("MODEL_DIR", dir, 1);
        setenv("model_name", name, 1);
        struct config *c = loaded(true, NULL);
        CHECK_EQ_STR(config_string(c, "quantization"), rows[i][1]);
        CHECK_EQ_STR(config_source_text(c, "quantization"), "model_name");
        config_free(c);
        c = loaded(true, "--quantization=none");
        CHECK_EQ_STR(config_string(c, "quantization"), "none");
        config_free(c);
    }
}

TEST(a_model_that_is_not_there_is_refused_with_what_to_do)
{
    refuses(true, "MODEL_DIR=/nonexistent",
            "MODEL_DIR (/nonexistent) has no model: neither a "
            "config.json nor a single .gguf file");
    refuses(true, "", "MODEL_DIR (/models) has no model");
    fails(true, "MODEL_DIR=/nonexistent model_name=org/name", ERR_NOT_FOUND,
          "model_name org/name: MODEL_DIR (/nonexistent) has no such folder");
}

/* ---- several hosts ---- */

static void set_hosts(const char *golden, const char *more)
{
    char path[512], set[1024];
    snprintf(path, sizeof path, "goldens/%s/model", golden);
    snprintf(set, sizeof set, "BATON_MODEL=%s POD_IPS=192.0.2.7,127.0.0.1 MP_NNODE=2 MP_NUM=2 %s",
             test_data(path), more);
    set_env(set);
}

#define SECRET "BATON_CLUSTER_SECRET=0123456789abcdef0123456789abcdef "

TEST(hosts_of_a_model_without_experts_are_nodes_that_share_the_requests)
{
    set_hosts("llama", SECRET "POD_0_IP=192.0.2.7 INTER_PROC_PORT=8813");
    struct config *c = loaded(true, NULL);
    CHECK_EQ_STR(config_string(c, "router"), "192.0.2.7:8813");
    CHECK_EQ_STR(config_source_text(c, "router"), "POD_0_IP");
    CHECK_EQ_STR(config_string(c, "advertise-host"), "127.0.0.1");
    CHECK(!config_is_set(c, "engine-worker-queue-port") && !config_is_set(c, "ips"));
    CHECK(!config_bool(c, "enable-expert-parallel"));
    config_free(c);
    set_hosts("llama", SECRET "POD_0_IP=127.0.0.1");
    c = loaded(true, NULL); /* it is the master: it holds the view */
    CHECK(!config_string(c, "router"));
    CHECK_EQ_STR(config_list(c, "engine-worker-queue-port", 0, NULL), "56666");
    config_free(c);
    set_hosts("llama", SECRET "POD_0_IP=127.0.0.1 HOST_IP=192.0.2.7");
    c = loaded(true, NULL); /* whatever its interfaces say */
    CHECK_EQ_STR(config_string(c, "router"), "127.0.0.1:56666");
    CHECK_EQ_STR(config_string(c, "advertise-host"), "192.0.2.7");
    config_free(c);
}

TEST(hosts_of_a_model_with_experts_are_one_group_whose_rank_0_is_the_master)
{
    set_hosts("ernie_moe", SECRET "BATON_DEVICE=cpu POD_0_IP=127.0.0.1");
    struct config *c = loaded(true, NULL);
    CHECK(config_bool(c, "enable-expert-parallel"));
    CHECK_EQ_INT(config_int(c, "data-parallel-size"), 2);
    CHECK_EQ_STR(config_list(c, "ips", 0, NULL), "127.0.0.1");
    CHECK_EQ_STR(config_list(c, "ips", 1, NULL), "192.0.2.7");
    CHECK_EQ_INT(config_int(c, "node-rank"), 0);
    CHECK_EQ_STR(config_list(c, "engine-worker-queue-port", 0, NULL), "56666");
    config_free(c);
    set_hosts("ernie_moe", SECRET "BATON_DEVICE=cpu POD_0_IP=192.0.2.7");
    c = loaded(true, NULL);
    CHECK_EQ_INT(config_int(c, "node-rank"), 1);
    CHECK_EQ_STR(config_string(c, "router"), "192.0.2.7:56666");
    config_free(c);
}

static void refuses_hosts(const char *golden, const char *more, const char *want)
{
    char set[1024];
    set_hosts(golden, more);
    snprintf(set, sizeof set, "BATON_MODEL=%s POD_IPS=%s MP_NNODE=2 MP_NUM=2 %s",
             getenv("BATON_MODEL"), getenv("POD_IPS"), more);
    refuses(true, set, want);
}

TEST(hosts_that_cannot_be_a_service_are_refused)
{
    refuses_hosts("llama", "", "without a secret in common ports between nodes stay on loopback");
    refuses_hosts("llama", SECRET "POD_0_IP=192.0.2.8",
                  "POD_0_IP 192.0.2.8 is not one of the addresses of POD_IPS");
    refuses_hosts("llama", SECRET "HOST_IP=192.0.2.8",
                  "HOST_IP 192.0.2.8 is not one of the addresses of POD_IPS");
    refuses_hosts("llama", SECRET "POD_IPS=192.0.2.7,192.0.2.8",
                  "none of its 2 addresses is one of this host");
    refuses_hosts("llama", SECRET "MP_NNODE=3 MP_NUM=3", "MP_NNODE 3, but POD_IPS lists 2");
    refuses_hosts("ernie_moe", SECRET "BATON_DEVICE=cuda",
                  "GPUs of several hosts cannot share the experts");
    refuses(true, MODEL "MP_NNODE=2 MP_NUM=2",
            "MP_NNODE is 2: give the addresses of all hosts in POD_IPS");
}

/* ---- health ---- */

TEST(the_health_port_tells_loading_down_and_hanging_apart)
{
    struct health_watch w = { 0 };
    struct health_facts f = { .ready = false };
    const uint32_t hang_ms = 10000;
    CHECK_EQ_INT(health_watch_look(&w, &f, 1000, hang_ms), HEALTH_NOT_READY);
    f.ready = f.takes = true;
    CHECK_EQ_INT(health_watch_look(&w, &f, 1100, hang_ms), HEALTH_OK);
    f.takes = false;
    CHECK_EQ_INT(health_watch_look(&w, &f, 1200, hang_ms), HEALTH_NOT_READY);
    f.behind = true;
    CHECK_EQ_INT(health_watch_look(&w, &f, 1300, hang_ms), HEALTH_ENGINE_DOWN);
    /* An engine that stands still is given up by others first; it hangs after the interval. */
    f = (struct health_facts){ .ready = true, .takes = true, .has_work = true, .progress = 7 };
    CHECK_EQ_INT(health_watch_look(&w, &f, 2000, hang_ms), HEALTH_OK);
    f.takes = false;
    CHECK_EQ_INT(health_watch_look(&w, &f, 6000, hang_ms), HEALTH_OK);
    CHECK_EQ_INT(health_watch_look(&w, &f, 12000, hang_ms), HEALTH_ENGINE_HANGS);
    f.progress++;
    f.takes = true;
    CHECK_EQ_INT(health_watch_look(&w, &f, 12100, hang_ms), HEALTH_OK);
    f.has_work = false; /* idle for long */
    CHECK_EQ_INT(health_watch_look(&w, &f, 90000, hang_ms), HEALTH_OK);
    f.has_work = true;
    CHECK_EQ_INT(health_watch_look(&w, &f, 90100, hang_ms), HEALTH_OK);
    CHECK_EQ_STR(health_text(HEALTH_NOT_READY), "server is not ready");
    CHECK_EQ_STR(health_text(HEALTH_ENGINE_DOWN), "infer engine is down");
    CHECK_EQ_STR(health_text(HEALTH_ENGINE_HANGS), "infer engine hangs");
}

/* ---- which service runs ---- */

TEST(the_lock_is_the_services_until_its_last_process_has_ended)
{
    struct run_file mine, other;
    struct err err = { 0 };
    struct run_info info = { .pid = getpid(), .start = run_process_start(getpid()), .log = "/l" },
                    back;
    setenv("BATON_RUN_DIR", below(test_tmpdir(), "run"), 1);
    CHECK_OK(run_file_open(&mine, &err));
    CHECK(run_file_lock(&mine));
    run_file_clear(&mine);
    CHECK(!run_file_read(&mine, &back));
    CHECK_OK(run_file_write(&mine, &info, &err));
    CHECK_OK(run_file_open(&other, &err));
    CHECK(!run_file_lock(&other));
    CHECK(run_file_read(&other, &back));
    CHECK_EQ_INT(back.pid, getpid());
    CHECK_EQ_STR(back.log, "/l");
    CHECK(run_info_lives(&back));
    const pid_t child = fork(); /* has the lock with its parent */
    if (child == 0) {
        pause();
        _exit(0);
    }
    run_file_close(&mine);
    CHECK(!run_file_lock(&other));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CHECK(run_file_lock(&other));
    back.start++; /* a later process of the same number */
    CHECK(!run_info_lives(&back));
    run_file_close(&other);
}

TEST(a_folder_of_somebody_else_is_not_taken)
{
    struct run_file f;
    struct err err = { 0 };
    const char *dir = below(test_tmpdir(), "open");
    CHECK_EQ_INT(mkdir(dir, 0700), 0);
    CHECK_EQ_INT(chmod(dir, 0777), 0);
    setenv("BATON_RUN_DIR", dir, 1);
    CHECK_STATUS(run_file_open(&f, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "is not a folder that only this user can write to"));
    setenv("BATON_RUN_DIR", "/nonexistent/run", 1);
    CHECK_STATUS(run_file_open(&f, &err), ERR_IO);
}

TEST(a_file_with_other_text_is_not_understood)
{
    static const char *const texts[] = {
        "", "x", "12", "0 5\n/l\n", "-4 5\n/l\n", "1 1\n/\n", "99999999999999999999 1\n"
    };
    struct run_file f;
    struct run_info info;
    struct err err = { 0 };
    setenv("BATON_RUN_DIR", below(test_tmpdir(), "run"), 1);
    CHECK_OK(run_file_open(&f, &err));
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        run_file_clear(&f);
        const ssize_t n = pwrite(f.fd, texts[i], strlen(texts[i]), 0);
        CHECK_EQ_INT(n, strlen(texts[i]));
        CHECK(!run_file_read(&f, &info));
    }
    run_file_close(&f);
}

TEST(a_pipe_tells_two_stages_and_ends)
{
    int ends[2];
    char number[16], byte;
    CHECK_EQ_INT(pipe(ends), 0);
    snprintf(number, sizeof number, "%d", ends[1]);
    setenv(READY_PIPE_VARIABLE, number, 1);
    struct ready_pipe p = ready_pipe_take();
    CHECK_EQ_INT(p.fd, ends[1]);
    CHECK(!getenv(READY_PIPE_VARIABLE));
    ready_pipe_say(&p, READY_LISTENS);
    ready_pipe_say(&p, READY_SERVES);
    ready_pipe_say(&p, READY_SERVES); /* nobody is told twice */
    CHECK_EQ_INT(read(ends[0], &byte, 1), 1);
    CHECK_EQ_INT(byte, READY_LISTENS);
    CHECK_EQ_INT(read(ends[0], &byte, 1), 1);
    CHECK_EQ_INT(byte, READY_SERVES);
    CHECK_EQ_INT(read(ends[0], &byte, 1), 0);
    setenv(READY_PIPE_VARIABLE, "x", 1);
    CHECK_EQ_INT(ready_pipe_take().fd, -1);
}

TEST_MAIN(CASE(a_variable_that_has_another_meaning_is_translated),
          CASE(a_bad_value_names_the_variable_and_what_would_be_right),
          CASE(names_that_other_programs_have_are_read_in_a_service_alone),
          CASE(a_service_has_the_documents_defaults_and_flags_come_before_them),
          CASE(block_bs_counts_sequences_of_the_context),
          CASE(max_cached_task_num_counts_what_waits_beside_what_runs),
          CASE(the_start_page_says_which_variable_gave_what_but_no_secret),
          CASE(variables_are_unset_for_processes_that_would_inherit_them),
          CASE(ranks_that_mp_num_counts_have_a_gpu_each),
          CASE(the_model_is_that_of_model_dir_or_the_one_that_is_named),
          CASE(a_static_models_name_says_how_its_checkpoint_is_quantised),
          CASE(a_model_that_is_not_there_is_refused_with_what_to_do),
          CASE(hosts_of_a_model_without_experts_are_nodes_that_share_the_requests),
          CASE(hosts_of_a_model_with_experts_are_one_group_whose_rank_0_is_the_master),
          CASE(hosts_that_cannot_be_a_service_are_refused),
          CASE(the_health_port_tells_loading_down_and_hanging_apart),
          CASE(the_lock_is_the_services_until_its_last_process_has_ended),
          CASE(a_folder_of_somebody_else_is_not_taken),
          CASE(a_file_with_other_text_is_not_understood), CASE(a_pipe_tells_two_stages_and_ends))
