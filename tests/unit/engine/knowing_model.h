/* knowing_model.h - a checkpoint whose draft layer is often right, for tests of the engine.
 *
 * A token's successor depends on nothing else, and the draft layer knows it: nothing, or little, is
 * added to the embedding, and the layer passes that of the next token on. Thread: the test's. */
#ifndef BATON_TESTS_UNIT_ENGINE_KNOWING_MODEL_H
#define BATON_TESTS_UNIT_ENGINE_KNOWING_MODEL_H

#include <stdio.h>
#include <string.h>

#include "tests/fixtures/checkpoint_write.h"
#include "tests/harness/test.h"

/* Multiplies bf16 numbers by 2^-by. */
__attribute__((unused)) static void knowing_shrink(struct checkpoint_tensor *t, uint32_t by)
{
    for (size_t i = 0; i < t->bytes; i += 2) {
        uint16_t v;
        memcpy(&v, t->data + i, sizeof v);
        v = (v >> 7 & 0xff) > by ? (uint16_t)(v - (by << 7)) : 0;
        memcpy(t->data + i, &v, sizeof v);
    }
}

/* What layers add is divided by 2^shrink; 0: they add nothing. Returns a folder, valid until the
 * next call. */
__attribute__((unused)) static const char *knowing_model(uint32_t shrink)
{
    static char folder[256];
    char config[8192];
    struct checkpoint *s = checkpoint_read(test_data("goldens/deepseek_v3/model"));
    FILE *f = fopen(test_data("goldens/deepseek_v3/model/config.json"), "r");
    CHECK(f != NULL);
    const size_t n_config = fread(config, 1, sizeof config - 1, f);
    config[n_config] = 0;
    fclose(f);
    for (size_t i = 0; i < s->n; i++)
        if (checkpoint_ends(&s->t[i], "o_proj.weight") ||
            checkpoint_ends(&s->t[i], "down_proj.weight"))
            knowing_shrink(&s->t[i], shrink ? shrink : 0xff);
    static const char *const SAME[][2] = {
        { "model.layers.3.embed_tokens.weight", "model.embed_tokens.weight" },
        { "model.layers.3.shared_head.head.weight", "lm_head.weight" },
        { "model.layers.3.shared_head.norm.weight", "model.norm.weight" },
    };
    for (size_t i = 0; i < COUNT_OF(SAME); i++)
        memcpy(checkpoint_find(s, SAME[i][0])->data, checkpoint_find(s, SAME[i][1])->data,
               checkpoint_find(s, SAME[i][1])->bytes);
    struct checkpoint_tensor *norm = checkpoint_find(s, "model.layers.3.enorm.weight"),
                             *join = checkpoint_find(s, "model.layers.3.eh_proj.weight");
    const uint16_t one = 0x3f80; /* bf16 */
    for (size_t i = 0; i < norm->shape[0]; i++) memcpy(norm->data + 2 * i, &one, 2);
    memset(join->data, 0, join->bytes);
    for (size_t i = 0; i < join->shape[0]; i++)
        memcpy(join->data + 2 * (i * join->shape[1] + i), &one, 2);
    snprintf(folder, sizeof folder, "%s/knowing", test_tmpdir());
    checkpoint_write_folder(s, folder, str_of(config));
    checkpoint_release(s);
    return folder;
}

#endif
