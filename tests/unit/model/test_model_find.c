/* test_model_find.c - names found in BATON_MODELS and in the caches of Hugging Face and
 * ModelScope. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "shared/base/mem.h"
#include "shared/model/load/model_files.h"
#include "tests/harness/test.h"

static char root[2048];

/* Creates ROOT/PATH with its folders; a path ending in '/' is a folder. */
static void make(const char *path, const char *text)
{
    char full[4096];
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *c = full + strlen(root) + 1; *c; c++)
        if (*c == '/') {
            *c = 0;
            mkdir(full, 0755);
            *c = '/';
        }
    if (full[strlen(full) - 1] == '/') return;
    FILE *f = fopen(full, "wb");
    CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

static void clean_environment(void)
{
    static const char *const NAMES[] = { "BATON_MODELS", "HF_HUB_CACHE", "HF_HOME",
                                         "XDG_CACHE_HOME", "MODELSCOPE_CACHE" };
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) unsetenv(NAMES[i]);
    snprintf(root, sizeof root, "%s", test_tmpdir());
    setenv("HOME", root, 1);
}

static void finds(const char *name, const char *relative)
{
    struct buf out = { 0 };
    struct err err;
    char want[4096];
    enum status st = model_find(name, &out, &err);
    if (st != OK) test_fail(__FILE__, __LINE__, "%s: %s", name, err.text);
    snprintf(want, sizeof want, "%s/%s", root, relative);
    CHECK_EQ_STR(out.data, want);
    buf_release(&out);
}

static void misses(const char *name, enum status want, const char *words)
{
    struct buf out = { 0 };
    struct err err = { 0 };
    CHECK_STATUS(model_find(name, &out, &err), want);
    if (!strstr(err.text, words))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"%s\"", err.text, words);
    buf_release(&out);
}

TEST(paths)
{
    char path[4096];
    clean_environment();
    make("m/config.json", "{}");
    make("g/only.gguf", "GGUF");
    make("two/a.gguf", "");
    make("two/b.gguf", "");
    make("split/a-00002-of-00002.gguf", "");
    make("split/a-00001-of-00002.gguf", "");
    make("torn/a-00001-of-00003.gguf", "");
    make("torn/a-00002-of-00003.gguf", "");
    make("none/model.safetensors", "");
    snprintf(path, sizeof path, "%s/split", root);
    finds(path, "split/a-00001-of-00002.gguf");
    snprintf(path, sizeof path, "%s/torn", root);
    misses(path, ERR_CONFIG, "2 .gguf files");
    snprintf(path, sizeof path, "%s/m", root);
    finds(path, "m");
    snprintf(path, sizeof path, "%s/g", root);
    finds(path, "g/only.gguf");
    snprintf(path, sizeof path, "%s/g/only.gguf", root);
    finds(path, "g/only.gguf");
    snprintf(path, sizeof path, "%s/two", root);
    misses(path, ERR_CONFIG, "2 .gguf files");
    snprintf(path, sizeof path, "%s/none", root);
    misses(path, ERR_NOT_FOUND, "no config.json");
    misses("", ERR_NOT_FOUND, "not on this host");
}

TEST(a_model_that_is_not_here)
{
    char too_long[200] = "hf://org/", *end = too_long + strlen(too_long);
    clean_environment();
    misses("org/none", ERR_NOT_FOUND,
           "model \"org/none\" is not on this host: fetch it with `baton pull org/none`, or add "
           "--pull; looked at: org/none");
    static const char *const addresses[] = { "hf://org/none", "https://huggingface.co/org/none",
                                             "https://huggingface.co/org/none/tree/main" };
    for (size_t i = 0; i < COUNT_OF(addresses); i++)
        misses(addresses[i], ERR_NOT_FOUND,
               "`baton pull org/none` and give --model org/none, or add --pull; looked at: ");
    memset(end, 'a', 180);
    static const char *const others[] = { "/no/such/folder", "none", "https://example.com",
                                          "hf://;/rm", "hf://" };
    for (size_t i = 0; i < COUNT_OF(others); i++)
        misses(others[i], ERR_NOT_FOUND,
               "give a folder or a file that is here, or org/name and --pull; looked at: ");
    misses(too_long, ERR_NOT_FOUND, "give a folder or a file that is here");
}

TEST(folders_of_models)
{
    char folders[8192];
    clean_environment();
    make("a/org/one/config.json", "{}");
    make("b/two/config.json", "{}");
    make("b/three.gguf", "GGUF");
    snprintf(folders, sizeof folders, "%s/a::%s/b", root, root);
    setenv("BATON_MODELS", folders, 1);
    finds("org/one", "a/org/one");
    finds("two", "b/two");
    finds("three", "b/three.gguf");
    misses("org/none", ERR_NOT_FOUND, "b/org/none");
    misses("../a/org/one", ERR_NOT_FOUND, "not on this host");
}

TEST(hugging_face)
{
    char path[4096];
    clean_environment();
    make(".cache/huggingface/hub/models--org--m/refs/main", "abc\n");
    make(".cache/huggingface/hub/models--org--m/snapshots/abc/config.json", "{}");
    make(".cache/huggingface/hub/models--org--m/snapshots/old/config.json", "{}");
    finds("org/m", ".cache/huggingface/hub/models--org--m/snapshots/abc");
    make(".cache/huggingface/hub/models--org--n/snapshots/only/config.json", "{}");
    finds("org/n", ".cache/huggingface/hub/models--org--n/snapshots/only");
    make(".cache/huggingface/hub/models--org--bad/refs/main", "../../..");
    misses("org/bad", ERR_NOT_FOUND, "no snapshot");
    make("elsewhere/hub/models--org--m/snapshots/x/config.json", "{}");
    snprintf(path, sizeof path, "%s/elsewhere", root);
    setenv("HF_HOME", path, 1);
    finds("org/m", "elsewhere/hub/models--org--m/snapshots/x");
    make("hub2/models--org--m/snapshots/y/config.json", "{}");
    snprintf(path, sizeof path, "%s/hub2", root);
    setenv("HF_HUB_CACHE", path, 1);
    finds("org/m", "hub2/models--org--m/snapshots/y");
}

TEST(modelscope)
{
    char path[4096];
    clean_environment();
    make(".cache/modelscope/hub/org/m/config.json", "{}");
    make(".cache/modelscope/hub/models/org/m-1___5/config.json", "{}");
    finds("org/m", ".cache/modelscope/hub/org/m");
    finds("org/m-1.5", ".cache/modelscope/hub/models/org/m-1___5");
    make("ms/models/org/k/config.json", "{}");
    snprintf(path, sizeof path, "%s/ms", root);
    setenv("MODELSCOPE_CACHE", path, 1);
    finds("org/k", "ms/models/org/k");
}

TEST(a_miss_lists_every_place)
{
    clean_environment();
    setenv("BATON_MODELS", "/nowhere/models", 1);
    setenv("HOME", "/nowhere", 1); /* short: a list that is too long is cut */
    misses("org/m", ERR_NOT_FOUND, "/nowhere/models/org/m");
    misses("org/m", ERR_NOT_FOUND, "huggingface/hub/models--org--m");
    misses("org/m", ERR_NOT_FOUND, "modelscope");
}

TEST_MAIN(CASE(paths), CASE(a_model_that_is_not_here), CASE(folders_of_models), CASE(hugging_face),
          CASE(modelscope), CASE(a_miss_lists_every_place))
