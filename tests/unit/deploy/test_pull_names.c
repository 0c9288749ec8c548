/* test_pull_names.c - what `baton pull` understands: the names and addresses that users write, the
 * lists of hubs, which files are chosen, and the heads of answers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/pull/choose.h"
#include "deploy/pull/fetch/http_get.h"
#include "deploy/pull/hub.h"
#include "tests/harness/test.h"

#define MIRROR "http://127.0.0.1:8080"

static const struct source_options USUAL = { .hub = PULL_HUGGING_FACE, .hugging_face = MIRROR };

/* ---- what users write ---- */

static struct pull_source reads(const char *text)
{
    struct pull_source s = { 0 };
    struct err err = { 0 };
    if (source_parse(text, &USUAL, &s, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s: %s", text, err.text);
    return s;
}

static void refuses(const char *text, const char *why)
{
    struct pull_source s;
    struct err err = { 0 };
    CHECK_STATUS(source_parse(text, &USUAL, &s, &err), ERR_CONFIG);
    if (!strstr(err.text, why)) test_fail(__FILE__, __LINE__, "%s: %s", text, err.text);
}

TEST(names_and_addresses)
{
    static const struct {
        const char *text;
        enum pull_from from;
        const char *repository, *revision, *file, *part;
    } CASES[] = {
        { "org/name", PULL_HUGGING_FACE, "org/name", "", "", "" },
        { "org/name@v1.0", PULL_HUGGING_FACE, "org/name", "v1.0", "", "" },
        { "org/name@refs/pr/1", PULL_HUGGING_FACE, "org/name", "refs/pr/1", "", "" },
        { "org/name@refs/pr/1/f.gguf", PULL_HUGGING_FACE, "org/name", "refs/pr/1", "f.gguf", "" },
        { "org/name:Q4_K_M", PULL_HUGGING_FACE, "org/name", "", "", "Q4_K_M" },
        { "org/name@v1:Q8_0", PULL_HUGGING_FACE, "org/name", "v1", "", "Q8_0" },
        { "org/name/a/b.gguf", PULL_HUGGING_FACE, "org/name", "", "a/b.gguf", "" },
        { "org/name/config.json", PULL_HUGGING_FACE, "org/name", "", "config.json", "" },
        { "hf://org/name@x/f.gguf", PULL_HUGGING_FACE, "org/name", "x", "f.gguf", "" },
        { "ms://org/name", PULL_MODELSCOPE, "org/name", "", "", "" },
        { "https://huggingface.co/org/name", PULL_HUGGING_FACE, "org/name", "", "", "" },
        { "https://huggingface.co/org/name/", PULL_HUGGING_FACE, "org/name", "", "", "" },
        { "https://hf.co/org/name/tree/v2", PULL_HUGGING_FACE, "org/name", "v2", "", "" },
        { "https://huggingface.co/org/name/tree/refs%2Fpr%2F1", PULL_HUGGING_FACE, "org/name",
          "refs/pr/1", "", "" },
        { "https://huggingface.co/org/name/resolve/main/a%20b.gguf?download=true",
          PULL_HUGGING_FACE, "org/name", "main", "a b.gguf", "" },
        { MIRROR "/org/name/blob/main/d/f.gguf", PULL_HUGGING_FACE, "org/name", "main", "d/f.gguf",
          "" },
        { "https://modelscope.cn/models/org/name", PULL_MODELSCOPE, "org/name", "", "", "" },
        { "https://www.modelscope.cn/models/org/name/files", PULL_MODELSCOPE, "org/name", "", "",
          "" },
        { "https://example.com/x/f.gguf?key=a/b", PULL_URL, "", "", "f.gguf", "" },
    };
    for (size_t i = 0; i < COUNT_OF(CASES); i++) {
        struct pull_source s = reads(CASES[i].text);
        CHECK_EQ_INT(s.from, CASES[i].from);
        CHECK_EQ_STR(s.repository, CASES[i].repository);
        CHECK_EQ_STR(s.revision, CASES[i].revision);
        CHECK_EQ_STR(s.file, CASES[i].file);
        CHECK_EQ_STR(s.part, CASES[i].part);
        CHECK(source_is_elsewhere(CASES[i].text));
    }
    CHECK_EQ_INT(reads(test_tmpdir()).from, PULL_FOLDER);
    CHECK(!source_is_elsewhere(test_tmpdir()) && !source_is_elsewhere("name") &&
          !source_is_elsewhere("./a/b"));
}

TEST(what_is_no_model)
{
    refuses("", "no model was named");
    refuses("name", "is no name of a model");
    refuses("../x/y", "is a folder that is not there");
    refuses("/no/such", "is a folder that is not there");
    refuses("a/.b", "is no name of a model");
    refuses("a/b@", "no revision behind its '@'");
    refuses("a/b@../c", "no revision behind its '@'");
    refuses("a/b:", "behind its ':'");
    refuses("a/b/weight_only_int3", "weight_only_int8, weight_only_int4");
    refuses("a/b/../c.gguf", "names no file that a repository can have");
    refuses("a/b\n", "is no name of a model");
    refuses("ftp://a/b.gguf", "begins with neither https://");
    refuses("https://example.com/", "neither a model of a hub nor a .gguf file");
    refuses("https://example.com/x.bin", "neither a model of a hub nor a .gguf file");
    refuses("https://user:secret@example.com/x.gguf", "a password in it");
    refuses("https://huggingface.co/org", "names no model");
    refuses("https://huggingface.co/org/name/discussions/1", "is no address of a model");
    refuses(test_data("goldens/llama/model/config.json"), "is a file that is here already");
}

TEST(names_of_static_models)
{
    struct pull_source s = reads("deepseek-ai/DeepSeek-R1-MTP-2nodes/weight_only_int8");
    CHECK_EQ_STR(s.repository, "deepseek-ai/DeepSeek-R1");
    CHECK_EQ_STR(s.quantization, "wint8");
    CHECK(s.has_draft && s.n_hosts == 2 && !s.file[0]);
    s = reads("deepseek-ai/DeepSeek-R1-Distill-Llama-8B/weight_only_int4");
    CHECK_EQ_STR(s.repository, "deepseek-ai/DeepSeek-R1-Distill-Llama-8B");
    CHECK_EQ_STR(s.quantization, "wint4");
    CHECK(!s.has_draft && s.n_hosts == 0 && !s.note);
    s = reads("meta-llama/Meta-Llama-3-8B-Instruct-Block-Attn/float16");
    CHECK_EQ_STR(s.repository, "meta-llama/Meta-Llama-3-8B-Instruct");
    CHECK(!s.quantization);
    s = reads("deepseek-ai/DeepSeek-R1/a8w8_fp8_wint4");
    CHECK_EQ_STR(s.quantization, "block_wise_fp8");
    CHECK(strstr(s.note, "int4 beside F8 are not built"));
    CHECK_EQ_STR(reads("org/a-2nodes").repository, "org/a-2nodes"); /* a name like any other */
}

TEST(addresses_of_hubs)
{
    struct err err = { 0 };
    struct model_hub h;
    struct buf url = { 0 };
    struct pull_source s = reads("org/name@refs/pr/1");
    unsetenv("HF_HOME");
    unsetenv("HF_TOKEN_PATH");
    setenv("HF_TOKEN", " hf_x \n", 1);
    CHECK_OK(hub_init(&h, PULL_HUGGING_FACE, "hf-mirror.com//", &err));
    CHECK_EQ_STR(h.endpoint, "https://hf-mirror.com");
    CHECK_EQ_STR(h.auth, "Authorization: Bearer hf_x");
    hub_list_url(&h, &s, &url);
    CHECK_EQ_STR(url.data, "https://hf-mirror.com/api/models/org/name/revision/refs%2Fpr%2F1"
                           "?blobs=true");
    buf_clear(&url);
    hub_file_url(&h, &s, "c0ffee", "d/a b#%.json", &url);
    CHECK_EQ_STR(url.data, "https://hf-mirror.com/org/name/resolve/c0ffee/d/a%20b%23%25.json");
    CHECK(hub_has(&h, "https://hf-mirror.com/x") && !hub_has(&h, "https://hf-mirror.com.evil/x"));
    CHECK_OK(hub_init(&h, PULL_HUGGING_FACE, "http://mirror.lan", &err));
    CHECK_EQ_STR(h.auth, ""); /* it would be read on the way */
    CHECK_OK(hub_init(&h, PULL_HUGGING_FACE, "http://localhost.evil.com", &err));
    CHECK_EQ_STR(h.auth, "");
    setenv("HF_TOKEN", "a\r\nHost: b", 1);
    CHECK_OK(hub_init(&h, PULL_HUGGING_FACE, MIRROR, &err));
    CHECK(!strstr(h.auth, "Host"));
    CHECK_STATUS(hub_init(&h, PULL_MODELSCOPE, "https://a@b", &err), ERR_CONFIG);
    CHECK_EQ_STR(err.field, "modelscope-endpoint");
    CHECK_OK(hub_init(&h, PULL_MODELSCOPE, "www.modelscope.cn", &err));
    buf_clear(&url);
    hub_file_url(&h, &s, "", "d/a&b.json", &url);
    CHECK_EQ_STR(url.data,
                 "https://www.modelscope.cn/api/v1/models/org/name/repo?Revision=refs%2Fpr"
                 "%2F1&FilePath=d%2Fa%26b.json");
    buf_release(&url);
}

/* ---- lists, and what is chosen of them ---- */

#define SHA "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
#define GIT "0123456789abcdef0123456789abcdef01234567"

TEST(lists_of_both_hubs)
{
    struct file_list l = { 0 };
    struct err err = { 0 };
    CHECK_OK(file_list_read_hugging_face(
        STR("{\"sha\":\"c0ffee\",\"siblings\":[{\"rfilename\":\"z\",\"size\":7,\"blobId\":\"" GIT
            "\"},{\"rfilename\":\"b\",\"size\":1,\"blobId\":\"" GIT "\",\"lfs\":{\"sha256\":\"" SHA
            "\",\"size\":9}},{\"rfilename\":\"a/c\"}]}"),
        &l, &err));
    CHECK_EQ_INT(l.n, 3);
    CHECK_EQ_STR(l.commit, "c0ffee");
    const struct pull_file *b = file_list_find(&l, "b"), *z = file_list_find(&l, "z");
    CHECK(b->size == 9 && b->sum.kind == SUM_SHA256 && b->sum.bytes[1] == 0x11);
    CHECK(z->size == 7 && z->sum.kind == SUM_GIT && z->sum.bytes[19] == 0x67);
    CHECK(file_list_find(&l, "a/c")->size == FILE_SIZE_UNKNOWN && !file_list_find(&l, "a"));
    file_list_release(&l);
    CHECK_OK(file_list_read_modelscope(
        STR("{\"Data\":{\"Files\":[{\"Path\":\"d\",\"Type\":\"tree\"},{\"Path\":\"d/f\",\"Type\":"
            "\"blob\",\"Size\":5,\"Sha256\":\"" SHA "\",\"Revision\":\"r\"}]}}"),
        &l, &err));
    CHECK(l.n == 1 && l.files[0].size == 5 && l.files[0].sum.kind == SUM_SHA256);
    file_list_release(&l);
}

static struct file_list list_of(const char *names)
{
    struct file_list l = { 0 };
    struct err err = { 0 };
    struct str rest = str_of(names), name;
    while (str_split(&rest, ' ', &name)) {
        char text[200];
        snprintf(text, sizeof text, "%.*s", STR_ARG(name));
        const struct pull_file f = { .name = text, .size = 1 };
        CHECK_OK(file_list_add(&l, &f, &err));
    }
    CHECK_OK(file_list_finish(&l, &err));
    return l;
}

/* The chosen names, or what is said. */
static void chooses(const char *names, const struct choose_options *o, const char *want)
{
    struct file_list l = list_of(names);
    struct err err = { 0 };
    struct buf got = { 0 };
    buf_reserve(&got, 1);
    if (choose_files(&l, o, &err) != OK) buf_add_c(&got, err.text);
    else
        for (size_t i = 0; i < l.n; i++)
            if (l.files[i].chosen) buf_printf(&got, "%s%s", got.len ? " " : "", l.files[i].name);
    if (!strstr(got.data, want) || (err.code == OK && strcmp(got.data, want) != 0))
        test_fail(__FILE__, __LINE__, "of %s: %s", names, got.data);
    buf_release(&got);
    file_list_release(&l);
}

TEST(what_a_model_needs)
{
    const struct choose_options all = { .file = "", .part = "" };
    chooses("README.md config.json model.safetensors onnx/m.onnx other.safetensors tokenizer.json "
            "tokenizer.model",
            &all, "config.json model.safetensors tokenizer.json");
    chooses("config.json model.safetensors spm.model tokenizer.model", &all,
            "config.json model.safetensors tokenizer.model");
    chooses("a.safetensors config.json d/b.safetensors model.safetensors.index.json m.gguf", &all,
            "a.safetensors config.json model.safetensors.index.json");
    chooses("a.gguf config.json imatrix.gguf mmproj-a.gguf", &all, "a.gguf");
    chooses("m-00001-of-00002.gguf m-00002-of-00002.gguf", &all,
            "m-00001-of-00002.gguf m-00002-of-00002.gguf");
    chooses("m-00001-of-00002.gguf x.gguf", &all, "has several models in .gguf files");
    chooses("m-00001-of-00003.gguf m-00003-of-00003.gguf", &all, "of which the source has 2");
    chooses("model.safetensors", &all, "no config.json");
    chooses("config.json pytorch_model.bin", &all, "PyTorch's pickled files");
    chooses("config.json rank_0/model.pdiparams", &all, "static-graph exports");
    chooses("README.md", &all, "neither model.safetensors nor");
}

TEST(what_a_user_chooses)
{
    static const char *const JSON[] = { "*.json" }, *const FOLDER[] = { "d/" };
    struct choose_options o = { .include = JSON, .n_include = 1, .file = "", .part = "" };
    chooses("a.json d/b.json m.gguf", &o, "a.json d/b.json");
    o.exclude = FOLDER;
    o.n_exclude = 1;
    chooses("a.json d/b.json m.gguf", &o, "a.json");
    chooses("m.gguf", &o, "--include and --exclude leave none");
    const struct choose_options part = { .file = "", .part = "q4_0" },
                                file = { .file = "d/m-00002-of-00002.gguf", .part = "" },
                                absent = { .file = "none", .part = "" };
    chooses("m-Q4_0.gguf m-Q8_0.gguf", &part, "m-Q4_0.gguf");
    chooses("m-Q8_0.gguf", &part, "no .gguf file with \"q4_0\"");
    chooses("d/m-00001-of-00002.gguf d/m-00002-of-00002.gguf m.gguf", &file,
            "d/m-00001-of-00002.gguf d/m-00002-of-00002.gguf");
    chooses("a", &absent, "has no file \"none\"");
}

TEST(shards_that_the_index_names)
{
    struct file_list l = list_of("a.safetensors b.safetensors config.json " CHOOSE_INDEX);
    const struct choose_options all = { .file = "", .part = "" };
    struct err err = { 0 };
    CHECK_OK(choose_files(&l, &all, &err));
    CHECK(choose_needs_index(&l) && !choose_model_file(&l));
    CHECK_OK(choose_shards(&l, STR("{\"weight_map\":{\"t\":\"b.safetensors\"}}"), &err));
    CHECK(!file_list_find(&l, "a.safetensors")->chosen);
    CHECK(file_list_find(&l, "b.safetensors")->chosen && file_list_find(&l, "config.json")->chosen);
    CHECK_STATUS(choose_shards(&l, STR("{\"weight_map\":{\"t\":\"c\"}}"), &err), ERR_FORMAT);
    file_list_release(&l);
}

/* ---- heads ---- */

static void read_lines(struct answer_head *h, const char *lines)
{
    struct str rest = str_of(lines), line;
    while (str_split(&rest, '\n', &line)) answer_head_read(h, line);
}

TEST(heads_of_answers)
{
    struct answer_head h = { .linked_size = FILE_SIZE_UNKNOWN };
    read_lines(&h,
               "HTTP/1.1 302 Found\nX-Linked-Etag: \"abc\"\nx-linked-size: 77\nETag: \"other\"\n"
               "Retry-After: 5\n\nHTTP/1.1 206 Partial Content\nContent-Range: bytes 10-19/77\n"
               "Content-Length: 10\nETag: W/\"de\x01\"\n");
    CHECK_EQ_INT(h.status, 206);
    CHECK(h.has_range && h.range_begin == 10 && h.range_total == 77 && h.length == 10);
    CHECK_EQ_STR(h.linked_etag, "abc");
    CHECK_EQ_STR(h.etag, "de?");
    CHECK(h.linked_size == 77 && h.retry_after_s == 0); /* the redirect asked for that pause */
    read_lines(&h, "HTTP/2 429\nRetry-After: 99999999999\nContent-Range: bytes 0-1/x\n");
    CHECK(h.status == 429 && h.retry_after_s == 24 * 3600 && !h.has_range);
    read_lines(&h, "HTTP/1.1 abc\nContent-Range: bytes */5\nretry-after: soon\n");
    CHECK(h.status == 0 && !h.has_range && h.retry_after_s == 0);
}

TEST_MAIN(CASE(names_and_addresses), CASE(what_is_no_model), CASE(names_of_static_models),
          CASE(addresses_of_hubs), CASE(lists_of_both_hubs), CASE(what_a_model_needs),
          CASE(what_a_user_chooses), CASE(shards_that_the_index_names), CASE(heads_of_answers))
