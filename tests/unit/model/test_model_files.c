/* test_model_files.c - what a folder or a GGUF file gives to the tokenizer and the chat
 * template. */
#include "shared/model/load/model_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/model/load/foreign_checkpoint.h"
#include "tests/fixtures/gguf_write.h"
#include "tests/harness/test.h"

static char dir[2048];

static void put(const char *name, struct str text)
{
    char path[4096];
    if (!dir[0]) snprintf(dir, sizeof dir, "%s", test_tmpdir());
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(text.p, 1, text.n, f) == text.n && fclose(f) == 0);
}

static struct model_text load(void)
{
    struct model_text t;
    struct err err;
    if (model_text_load(dir, &t, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return t;
}

TEST(folder)
{
    put("config.json", STR("{}"));
    put("tokenizer.json", STR("{\"model\":{}}"));
    put("tokenizer_config.json",
        STR("{\"bos_token\":\"<s>\",\"eos_token\":{\"content\":\"</"
            "s>\",\"lstrip\":false},\"pad_token\":null,"
            "\"add_bos_token\":true,\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"T\"},{"
            "\"name\":\"default\",\"template\":\"D\"}]}"));
    put("special_tokens_map.json", STR("{\"unk_token\":\"<unk>\",\"bos_token\":\"other\"}"));
    struct model_text t = load();
    CHECK_EQ_STR(t.tokenizer_json.data, "{\"model\":{}}");
    CHECK(t.tokenizer_config.len > 0 && t.n_tokens == 0 && t.add_bos && !t.add_eos);
    CHECK_EQ_STR(t.chat_template.data, "D");
    CHECK_EQ_STR(t.tool_template.data, "T");
    CHECK_EQ_STR(t.bos_text, "<s>");
    CHECK_EQ_STR(t.eos_text, "</s>");
    CHECK_EQ_STR(t.unk_text, "<unk>");
    CHECK(t.pad_text == NULL);
    model_text_release(&t);
}

TEST(places_of_the_chat_template)
{
    put("config.json", STR("{}"));
    struct model_text t = load();
    CHECK_EQ_STR(t.chat_template.data, "");
    model_text_release(&t);
    put("chat_template.json", STR("{\"chat_template\":\"J\"}"));
    t = load();
    CHECK_EQ_STR(t.chat_template.data, "J");
    model_text_release(&t);
    put("tokenizer_config.json", STR("{\"chat_template\":\"C\"}"));
    t = load();
    CHECK_EQ_STR(t.chat_template.data, "C");
    model_text_release(&t);
    put("chat_template.jinja", STR("F"));
    t = load();
    CHECK_EQ_STR(t.chat_template.data, "F");
    CHECK(t.tool_template.len == 0);
    model_text_release(&t);
    char tools[4096];
    snprintf(tools, sizeof tools, "%s/additional_chat_templates", dir);
    CHECK(mkdir(tools, 0700) == 0);
    put("additional_chat_templates/tool_use.jinja", STR("T"));
    /* the files take precedence */
    put("tokenizer_config.json",
        STR("{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"X\"}]}"));
    t = load();
    CHECK_EQ_STR(t.chat_template.data, "F");
    CHECK_EQ_STR(t.tool_template.data, "T");
    model_text_release(&t);
}

TEST(vocabulary_of_another_format)
{
    put("config.json", STR("{}"));
    put("tokenizer.model", STR("spm"));
    put("added_tokens.json", STR("{\"x\":1}"));
    put("special_tokens_map.json", STR("{}"));
    struct model_text t = load();
    CHECK_EQ_STR(t.tokenizer_model.data, "spm");
    CHECK_EQ_STR(t.tokenizer_model_name, "tokenizer.model");
    CHECK_EQ_STR(t.added_tokens.data, "{\"x\":1}");
    CHECK_EQ_STR(t.special_tokens.data, "{}");
    model_text_release(&t);
    put("tekken.json", STR("{}")); /* takes precedence */
    t = load();
    CHECK_EQ_STR(t.tokenizer_model_name, "tekken.json");
    model_text_release(&t);
    put("tokenizer.json", STR("{\"model\":{}}")); /* and this over all */
    t = load();
    CHECK(t.tokenizer_model.len == 0 && t.tokenizer_model_name == NULL && t.tokenizer_json.len > 0);
    model_text_release(&t);
}

TEST(malformed_file_is_named)
{
    struct model_text t;
    struct err err;
    put("config.json", STR("{}"));
    put("tokenizer_config.json", STR("{"));
    CHECK(model_text_load(dir, &t, &err) != OK);
    CHECK(strstr(err.text, "tokenizer_config.json") != NULL);
}

static void put_gguf(const int32_t *kinds, size_t n_kinds, uint32_t bos)
{
    static const char *const tokens[] = { "<s>", "</s>", "a", "b" }, *const merges[] = { "a b" };
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    gguf_write_text(&w, "tokenizer.ggml.model", "gpt2");
    gguf_write_text(&w, "tokenizer.ggml.pre", "smollm");
    gguf_write_texts(&w, "tokenizer.ggml.tokens", tokens, 4);
    gguf_write_texts(&w, "tokenizer.ggml.merges", merges, 1);
    gguf_write_i32s(&w, "tokenizer.ggml.token_type", kinds, n_kinds);
    gguf_write_u32(&w, "tokenizer.ggml.bos_token_id", bos);
    gguf_write_u32(&w, "tokenizer.ggml.eos_token_id", 1);
    gguf_write_bool(&w, "tokenizer.ggml.add_bos_token", true);
    gguf_write_text(&w, "tokenizer.chat_template", "G");
    gguf_write_text(&w, "tokenizer.chat_template.tool_use", "GT");
    gguf_write_finish(&w, &b);
    put("m.gguf", buf_str(&b));
    buf_release(&b);
}

TEST(gguf)
{
    put_gguf((int32_t[]){ 3, 3, 1, 1 }, 4, 0);
    struct model_text t = load(); /* a folder with one .gguf */
    CHECK(t.n_tokens == 4 && t.n_merges == 1 && t.bos == 0 && t.eos == 1 && t.add_bos &&
          !t.add_eos && t.kinds[1] == 3);
    CHECK_EQ_STR(t.gguf_model, "gpt2");
    CHECK_EQ_STR(t.gguf_pre, "smollm");
    CHECK(str_eq_c(t.tokens[1], "</s>") && str_eq_c(t.merges[0], "a b"));
    CHECK_EQ_STR(t.bos_text, "<s>");
    CHECK(t.pad_text == NULL && t.unk_text == NULL);
    CHECK_EQ_STR(t.chat_template.data, "G");
    CHECK_EQ_STR(t.tool_template.data, "GT");
    model_text_release(&t);
}

static void put_gguf_llama(const char *model, const char *pre, size_t n_scores, int bos)
{
    static const char *const tokens[] = { "<unk>", "<s>", "</s>", "a" };
    struct gguf_write w = { 0 };
    struct buf b = { 0 };
    gguf_write_text(&w, "tokenizer.ggml.model", model);
    if (pre) gguf_write_text(&w, "tokenizer.ggml.pre", pre);
    gguf_write_texts(&w, "tokenizer.ggml.tokens", tokens, 4);
    gguf_write_i32s(&w, "tokenizer.ggml.token_type", (int32_t[]){ 2, 3, 3, 1 }, 4);
    if (n_scores)
        gguf_write_f32s(&w, "tokenizer.ggml.scores", (float[]){ 0, 0, 0, -1.5f, 9 }, n_scores);
    if (bos >= 0) gguf_write_u32(&w, "tokenizer.ggml.bos_token_id", (uint32_t)bos);
    gguf_write_finish(&w, &b);
    put("m.gguf", buf_str(&b));
    buf_release(&b);
}

TEST(gguf_says_nothing_of_what_is_usual)
{
    put_gguf_llama("llama", NULL, 4, -1);
    struct model_text t = load();
    CHECK(t.add_bos && !t.add_eos && t.add_space_prefix && t.bos == 1 && t.eos == 2 &&
          t.scores[3] == -1.5f);
    CHECK_EQ_STR(t.unk_text, "<unk>");
    model_text_release(&t);
    put_gguf_llama("gpt2", "llama-bpe", 0, 1);
    t = load();
    CHECK(t.add_bos && !t.add_space_prefix && t.scores == NULL && t.eos == -1);
    model_text_release(&t);
    put_gguf_llama("gpt2", "llama-bpe", 0, -1); /* there is none to add */
    t = load();
    CHECK(!t.add_bos);
    model_text_release(&t);
    put_gguf_llama("gpt2", "qwen2", 0, 1);
    t = load();
    CHECK(!t.add_bos);
    model_text_release(&t);
    struct err err;
    put_gguf_llama("llama", NULL, 3, -1);
    CHECK_STATUS(model_text_load(dir, &t, &err), ERR_FORMAT);
    CHECK(strstr(err.text, "scores") != NULL);
}

TEST(gguf_faults)
{
    struct model_text t;
    struct err err;
    put_gguf((int32_t[]){ 3, 3, 1 }, 3, 0);
    CHECK_STATUS(model_text_load(dir, &t, &err), ERR_FORMAT);
    CHECK(strstr(err.text, "token_type") != NULL);
    put_gguf((int32_t[]){ 3, 3, 1, 1 }, 4, 4);
    CHECK_STATUS(model_text_load(dir, &t, &err), ERR_INVALID);
    CHECK(strstr(err.text, "bos_token_id") != NULL && strstr(err.text, "m.gguf") != NULL);
}

TEST(checkpoints_of_other_engines)
{
    static const struct {
        const char *file, *sentence; /* NULL: read as usual */
    } rows[] = {
        { "model.safetensors", NULL },
        { "quant_model_description.txt", NULL },
        { "rank_0.pdiparams", FOREIGN_STATIC },
        { "model.pdmodel", FOREIGN_STATIC },
        { "quant_model_description_w8a8.json", FOREIGN_ASCEND },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char path[4096];
        struct err err = { 0 };
        put(rows[i].file, STR(""));
        CHECK_STATUS(foreign_checkpoint_check_folder(dir, &err),
                     rows[i].sentence ? ERR_UNSUPPORTED : OK);
        CHECK(!rows[i].sentence || strstr(err.text, rows[i].sentence));
        snprintf(path, sizeof path, "%s/%s", dir, rows[i].file);
        CHECK(unlink(path) == 0);
    }
    CHECK_OK(foreign_checkpoint_check_folder("/nowhere", NULL));
}

/* Beside weights that are read a static-graph export is no obstacle; the description of an Ascend
 * checkpoint is, since it says what those weights are. */
TEST(checkpoints_of_other_engines_beside_readable_weights)
{
    static const struct {
        const char *weights, *beside, *sentence;
    } rows[] = {
        { "model.safetensors", "inference.pdmodel", NULL },
        { "model.gguf", "inference.pdiparams", NULL },
        { "model.safetensors", "rank_0/model.pdiparams", NULL },
        { "config.json", "rank_0/model.pdiparams", FOREIGN_STATIC },
        { "model.safetensors", "quant_model_description.json", FOREIGN_ASCEND },
    };
    char rank[4096], paths[2][4096];
    put("config.json", STR("")); /* makes the folder */
    snprintf(rank, sizeof rank, "%s/rank_0", dir);
    CHECK(mkdir(rank, 0700) == 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct err err = { 0 };
        put(rows[i].weights, STR(""));
        put(rows[i].beside, STR(""));
        CHECK_STATUS(foreign_checkpoint_check_folder(dir, &err),
                     rows[i].sentence ? ERR_UNSUPPORTED : OK);
        CHECK(!rows[i].sentence || strstr(err.text, rows[i].sentence));
        snprintf(paths[0], sizeof paths[0], "%s/%s", dir, rows[i].weights);
        snprintf(paths[1], sizeof paths[1], "%s/%s", dir, rows[i].beside);
        CHECK(unlink(paths[0]) == 0 && unlink(paths[1]) == 0);
    }
    CHECK(rmdir(rank) == 0);
}

TEST_MAIN(CASE(folder), CASE(checkpoints_of_other_engines),
          CASE(checkpoints_of_other_engines_beside_readable_weights),
          CASE(places_of_the_chat_template), CASE(vocabulary_of_another_format),
          CASE(malformed_file_is_named), CASE(gguf), CASE(gguf_says_nothing_of_what_is_usual),
          CASE(gguf_faults))
