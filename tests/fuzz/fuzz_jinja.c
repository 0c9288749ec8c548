/* fuzz_jinja.c - arbitrary template source: parses it, and renders it with messages that hold all
 * kinds of values. */
#include "shared/text/jinja/jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char VARS[] = "{\"messages\": [{\"role\": \"system\", \"content\": \"S\"}, {\"role\": "
                           "\"user\", \"content\": \" \\u00e9 \", \"tool_calls\": [{\"function\":"
                           " {\"name\": \"f\", \"arguments\": {\"x\": [1, 2.5, null, true]}}}]}, "
                           "{\"role\": \"assistant\", \"content\": null}], \"tools\": [],"
                           " \"add_generation_prompt\": true, \"s\": \"a,b\\nc\", \"i\": -7, "
                           "\"l\": [3, 1, 2], \"d\": {\"k\": {\"z\": 1}}}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct jinja *t = NULL;
    struct err err;
    if (jinja_parse((struct str){ (const char *)data, size }, &t, &err) != OK) return 0;
    cJSON *vars = NULL;
    struct buf out = { 0 };
    if (json_parse(STR(VARS), false, &vars, NULL) == OK &&
        jinja_render(t, vars, 1721995200, &out, &err) != OK)
        buf_clear(&out);
    buf_release(&out);
    cJSON_Delete(vars);
    jinja_free(t);
    return 0;
}
