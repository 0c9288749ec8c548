/* test_text_bundle.c - a model's text as a node gives it to routers: what is written is read and
 * unpacked, and loads as the model does; what was changed or made by others is refused. */
#include "deploy/text/text_bundle.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deploy/node/node_model.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/model/load/file_map.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/harness/test.h"

static struct err err;
static const char *const NAMES[] = { "m", "other/name" };

static struct text_source source_of(const char *path)
{
    return (struct text_source){
        .model_path = path,
        .model = 0x0123456789abcdef,
        .max_model_len = 777,
        .reasoning_parser = "think",
        .tool_parser = "hermes",
        .names = NAMES,
        .n_names = 2,
    };
}

static struct buf write_bundle(const char *path, const char *secret)
{
    const struct text_source from = source_of(path);
    struct buf out = { 0 };
    if (text_bundle_write(&from, str_of(secret), &out, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    return out;
}

/* An empty folder below the test's own. */
static const char *make_folder(void)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s/text", test_tmpdir());
    CHECK(mkdir(path, 0700) == 0);
    return path;
}

static uint64_t text_of(const char *path)
{
    struct node_model m = { 0 };
    const struct node_options o = { .model_path = (char *)path,
                                    .reasoning_parser = "auto",
                                    .tool_parser = "auto" };
    if (node_model_load_text(&m, &o, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    const uint64_t text = m.text;
    CHECK(text != 0);
    node_model_release(&m);
    return text;
}

/* Unpacks it, loads it and removes it again. */
static uint64_t unpacked_text(const struct text_bundle *b)
{
    struct buf model = { 0 }, template = { 0 };
    const char *folder = make_folder();
    if (text_bundle_unpack(b, folder, &model, &template, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    CHECK_EQ_INT(template.len, 0);
    const uint64_t text = text_of(model.data);
    text_bundle_remove(folder);
    CHECK(access(folder, F_OK) != 0);
    buf_release(&model);
    buf_release(&template);
    return text;
}

TEST(a_folder_loads_as_it_did)
{
    char path[4096];
    struct text_bundle b;
    snprintf(path, sizeof path, "%s", test_data("goldens/llama/model"));
    struct buf bytes = write_bundle(path, "s3cret");
    CHECK_OK(text_bundle_read(buf_str(&bytes), STR("s3cret"), &b, &err));
    CHECK(b.model == 0x0123456789abcdef && b.max_model_len == 777 && !b.dummy);
    CHECK_EQ_STR(b.reasoning_parser, "think");
    CHECK_EQ_STR(b.tool_parser, "hermes");
    CHECK_EQ_INT(b.n_names, 2);
    CHECK_EQ_STR(b.names[1], "other/name");
    CHECK(unpacked_text(&b) == text_of(path));
    text_bundle_release(&b);
    buf_release(&bytes);
}

static void write_file(const char *path, struct str bytes)
{
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes.p, 1, bytes.n, f) == bytes.n && fclose(f) == 0);
}

/* A GGUF of which the tensors are far larger than all else. */
static void write_gguf(const char *path, uint32_t no, uint32_t count)
{
    static float data[64 * 256];
    static const char *const TOKENS[] = { "<unk>", "<s>", "</s>", "a" };
    const int32_t kinds[] = { 2, 3, 3, 1 };
    const float scores[] = { 0, 0, 0, 0 };
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    if (no == 0) {
        gguf_write_text(&w, "general.architecture", "llama");
        gguf_write_text(&w, "tokenizer.ggml.model", "llama");
        gguf_write_texts(&w, "tokenizer.ggml.tokens", TOKENS, 4);
        gguf_write_i32s(&w, "tokenizer.ggml.token_type", kinds, 4);
        gguf_write_f32s(&w, "tokenizer.ggml.scores", scores, 4);
        gguf_write_u32(&w, "llama.block_count", 1);
        gguf_write_u32(&w, "llama.context_length", 128);
        gguf_write_u32(&w, "llama.embedding_length", 64);
        gguf_write_u32(&w, "llama.feed_forward_length", 128);
        gguf_write_u32(&w, "llama.attention.head_count", 2);
        gguf_write_u32(&w, "llama.attention.head_count_kv", 2);
        gguf_write_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    }
    if (count > 1) {
        gguf_write_u32(&w, "split.no", no);
        gguf_write_u32(&w, "split.count", count);
        gguf_write_u32(&w, "split.tensors.count", count);
    }
    gguf_write_tensor(&w, no == 0 ? "token_embd.weight" : "output_norm.weight", 0, no == 0 ? 2 : 1,
                      no == 0 ? (uint64_t[]){ 64, 256 } : (uint64_t[]){ 64 }, data,
                      no == 0 ? sizeof data : 256);
    gguf_write_finish(&w, &b);
    write_file(path, buf_str(&b));
    buf_release(&b);
}

TEST(of_a_gguf_the_part_before_the_tensors_is_enough)
{
    char path[4096];
    struct text_bundle b;
    snprintf(path, sizeof path, "%s/m.gguf", test_tmpdir());
    write_gguf(path, 0, 1);
    struct buf bytes = write_bundle(path, "");
    CHECK(bytes.len < 4096); /* the file has more than 64 KiB */
    CHECK_OK(text_bundle_read(buf_str(&bytes), STR(""), &b, &err));
    CHECK_EQ_INT(b.n_files, 1);
    CHECK(b.files[0].size > 65536 && b.files[0].bytes.n < 4096);
    CHECK(unpacked_text(&b) == text_of(path));
    text_bundle_release(&b);
    buf_release(&bytes);
}

TEST(a_gguf_in_several_files)
{
    char path[4096], folder[2048];
    struct text_bundle b;
    snprintf(folder, sizeof folder, "%s", test_tmpdir());
    snprintf(path, sizeof path, "%s/m-00002-of-00002.gguf", folder);
    write_gguf(path, 1, 2);
    snprintf(path, sizeof path, "%s/m-00001-of-00002.gguf", folder);
    write_gguf(path, 0, 2);
    struct buf bytes = write_bundle(path, "");
    CHECK_OK(text_bundle_read(buf_str(&bytes), STR(""), &b, &err));
    CHECK_EQ_INT(b.n_files, 2);
    CHECK(unpacked_text(&b) == text_of(path));
    text_bundle_release(&b);
    buf_release(&bytes);
}

TEST(a_template_of_the_operator_goes_along)
{
    char path[4096], model[4096];
    struct text_bundle b;
    struct buf out = { 0 }, model_path = { 0 }, template = { 0 }, text = { 0 };
    snprintf(path, sizeof path, "%s/template", test_tmpdir());
    write_file(path, STR("{{ messages }}"));
    snprintf(model, sizeof model, "%s", test_data("goldens/llama/model"));
    struct text_source from = source_of(model);
    from.chat_template = path;
    CHECK_OK(text_bundle_write(&from, STR(""), &out, &err));
    CHECK_OK(text_bundle_read(buf_str(&out), STR(""), &b, &err));
    CHECK_OK(text_bundle_unpack(&b, make_folder(), &model_path, &template, &err));
    CHECK_OK(file_read(template.data, 100, &text, &err));
    CHECK_EQ_STR(text.data, "{{ messages }}");
    struct stat st;
    CHECK(stat(template.data, &st) == 0 && (st.st_mode & 0777) == 0600);
    text_bundle_release(&b);
    struct buf *all[] = { &out, &model_path, &template, &text };
    for (size_t i = 0; i < COUNT_OF(all); i++) buf_release(all[i]);
}

/* Every byte that is another one, and every cut, is noticed before anything is used. */
TEST(what_was_changed_is_refused)
{
    struct text_bundle b;
    struct buf bytes = write_bundle(test_data("goldens/llama/model"), "s3cret");
    CHECK_STATUS(text_bundle_read(buf_str(&bytes), STR("other"), &b, &err), ERR_UNAUTHORIZED);
    CHECK(strstr(err.text, "BATON_CLUSTER_SECRET"));
    for (size_t i = 0; i < bytes.len; i += 97) {
        bytes.data[i] ^= 1;
        CHECK(text_bundle_read(buf_str(&bytes), STR("s3cret"), &b, &err) == ERR_UNAUTHORIZED);
        bytes.data[i] ^= 1;
        CHECK(text_bundle_read(str_sub(buf_str(&bytes), 0, i), STR("s3cret"), &b, &err) != OK);
    }
    CHECK_OK(text_bundle_read(buf_str(&bytes), STR("s3cret"), &b, &err));
    text_bundle_release(&b);
    buf_release(&bytes);
}

/* Appends the HMAC of no secret. */
static void seal(struct buf *bytes)
{
    uint8_t mac[32];
    hmac_sha256("", 0, bytes->data, bytes->len, mac);
    for (size_t k = 0; k < sizeof mac; k++) buf_printf(bytes, "%02x", mac[k]);
}

/* They may be nodes of an older version, or be started without an option. */
TEST(nodes_that_say_no_parser_leave_it_to_the_template)
{
    static const char *const parsers[] = {
        "", "\"reasoning_parser\":\"auto\",\"tool_parser\":\"auto\",",
        "\"reasoning_parser\":null,\"tool_parser\":null,"
    };
    for (size_t i = 0; i < COUNT_OF(parsers); i++) {
        struct text_bundle b;
        struct buf bytes = { 0 };
        buf_printf(&bytes,
                   "{\"version\":1,\"model\":\"0000000000000001\",\"max_model_len\":8,"
                   "\"names\":[\"m\"],%s\"files\":[{\"name\":\"config.json\",\"bytes\":0,"
                   "\"size\":0}]}\n",
                   parsers[i]);
        seal(&bytes);
        CHECK_OK(text_bundle_read(buf_str(&bytes), STR(""), &b, &err));
        CHECK_EQ_STR(b.reasoning_parser, "auto");
        CHECK_EQ_STR(b.tool_parser, "auto");
        text_bundle_release(&b);
        buf_release(&bytes);
    }
}

/* Who has the secret may still be of another version, or worse. */
TEST(what_cannot_be_is_refused)
{
#define HEAD "{\"version\":1,\"model\":\"0000000000000001\",\"max_model_len\":8,\"names\":[\"m\"],"
    static const struct {
        const char *text;
        const char *want;
    } cases[] = {
        { "", "which cannot be" },
        { "{}", "its first line has no end" },
        { "{}\n", "this program reads 1" },
        { "{\"version\":2}\n", "version 2" },
        { "{\"version\":1}\n", "max_model_len" },
        { "{\"version\":1,\"max_model_len\":8,\"names\":[]}\n", "names must be an array" },
        { "{\"version\":1,\"max_model_len\":8,\"names\":[\"\"]}\n", "a name has" },
        { HEAD "\"tool_parser\":\"new\"}\n",
          "--tool-call-parser new, which this program does not" },
        { HEAD "\"reasoning_parser\":\"\"}\n", "the node has --reasoning-parser " },
        { HEAD "\"reasoning_parser\":1}\n", "reasoning_parser" },
        { HEAD "\"files\":[]}\n", "files must be an array" },
        { HEAD "\"files\":[{\"name\":\"../config.json\",\"bytes\":1,\"size\":1}]}\nx",
          "that no model has" },
        { HEAD "\"files\":[{\"name\":\"model.safetensors\",\"bytes\":1,\"size\":1}]}\nx",
          "that no model has" },
        { HEAD "\"files\":[{\"name\":\"model-00003-of-00002.gguf\",\"bytes\":1,\"size\":1}]}\nx",
          "that no model has" },
        { HEAD "\"files\":[{\"name\":\"config.json\",\"bytes\":2,\"size\":2}]}\nx", "cannot be" },
        { HEAD "\"files\":[{\"name\":\"config.json\",\"bytes\":1,\"size\":9}]}\nx", "cannot be" },
        { HEAD "\"files\":[{\"name\":\"model.gguf\",\"bytes\":1,\"size\":0}]}\nx", "cannot be" },
        { HEAD "\"files\":[{\"name\":\"config.json\",\"bytes\":1,\"size\":1}]}\nxy",
          "1 bytes belong to no file" },
        { HEAD "\"files\":[{\"name\":\"config.json\",\"bytes\":0,\"size\":0},"
               "{\"name\":\"config.json\",\"bytes\":0,\"size\":0}]}\n",
          "is there twice" },
    };
    struct text_bundle b;
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        struct buf bytes = { 0 };
        buf_add_c(&bytes, cases[i].text);
        if (i) seal(&bytes);
        CHECK(text_bundle_read(buf_str(&bytes), STR(""), &b, &err) != OK);
        if (!strstr(err.text, cases[i].want))
            test_fail(__FILE__, __LINE__, "%s: %s", cases[i].text, err.text);
        buf_release(&bytes);
    }
}

TEST_MAIN(CASE(a_folder_loads_as_it_did), CASE(of_a_gguf_the_part_before_the_tensors_is_enough),
          CASE(a_gguf_in_several_files), CASE(a_template_of_the_operator_goes_along),
          CASE(nodes_that_say_no_parser_leave_it_to_the_template),
          CASE(what_was_changed_is_refused), CASE(what_cannot_be_is_refused))
