/* test_node_model_text.c - tokenizer and template of a model that has only a vocabulary and a chat
 * template. */
#include "deploy/node/node_model.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/model/load/model_files.h"
#include "tests/fixtures/spm_write.h"
#include "tests/harness/test.h"

/* A folder of tokenizer.model and chat_template.jinja. */
static void check_ends(const char *bos_given, const char *want)
{
    static const char *const pieces[] = { "<unk>", "<s>", "</s>", "a" };
    struct model_text t = {
        .bos = -1,
        .eos = -1,
        .bos_text = bos_given ? mem_strdup(bos_given) : NULL,
    };
    struct tokenizer *tok = NULL;
    struct chat *chat = NULL;
    struct buf out = { 0 };
    struct err err = { 0 };
    cJSON *messages = NULL;
    for (int i = 0; i < 4; i++)
        spm_write_piece(&t.tokenizer_model, pieces[i], 0, i == 0 ? 2 : i < 3 ? 3 : 1);
    spm_write_rest(&t.tokenizer_model, 2, false, false, false, STR(""));
    CHECK_OK(node_model_tokenizer(&t, &tok, &err));
    struct chat_source source = {
        .template = STR("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"),
        .bos = t.bos_text,
        .eos = t.eos_text,
    };
    CHECK_OK(chat_create(&source, &chat, &err));
    CHECK_OK(json_parse(STR("[{\"role\":\"user\",\"content\":\"U\"}]"), false, &messages, &err));
    CHECK_OK(chat_render(chat, &(struct chat_input){ .messages = messages }, 0, &out, &err));
    CHECK_EQ_STR(out.data, want);
    cJSON_Delete(messages);
    buf_release(&out);
    chat_free(chat);
    tokenizer_free(tok);
    model_text_release(&t);
}

TEST(templates_see_the_ends_that_only_the_vocabulary_knows)
{
    check_ends(NULL, "<s>U</s>");
    check_ends("<b>", "<b>U</s>"); /* what a file names stays */
}

TEST_MAIN(CASE(templates_see_the_ends_that_only_the_vocabulary_knows))
