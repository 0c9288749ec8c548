/* openai_models.c - lists the served model under each of its names. Thread: loop. */
#include "shared/serve/openai/openai.h"

#include <string.h>

static void write_one(const struct serve *s, const char *name, struct buf *out)
{
    buf_add_c(out, "{\"id\":");
    json_add_string(out, str_of(name));
    buf_printf(out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"baton\",\"root\":",
               (long long)s->created);
    json_add_string(out, str_of(s->names[0]));
    buf_printf(out, ",\"parent\":null,\"max_model_len\":%u,\"permission\":[]}", s->o.max_model_len);
}

void openai_write_models(const struct serve *s, struct buf *out)
{
    buf_add_c(out, "{\"object\":\"list\",\"data\":[");
    for (size_t i = 0; i < s->o.n_names; i++) {
        if (i) buf_add_char(out, ',');
        write_one(s, s->names[i], out);
    }
    buf_add_c(out, "]}");
}

bool openai_write_model(const struct serve *s, const char *name, struct buf *out)
{
    for (size_t i = 0; i < s->o.n_names; i++) {
        if (strcmp(s->names[i], name) != 0) continue;
        write_one(s, name, out);
        return true;
    }
    return false;
}
