/* chat.h - messages to the prompt text of one model.
 *
 * Holds the parsed template and the special token strings that templates refer to. Read-only after
 * chat_create: any thread may render. Thread: any. */
#ifndef BATON_TEXT_CHAT_H
#define BATON_TEXT_CHAT_H

#include "shared/text/jinja/jinja.h"

struct chat;

/* Templates (the model's own or --chat-template FILE) and what they know the special tokens by. All
 * is copied. */
struct chat_source {
    struct str template;
    struct str tool_template;          /* for requests with tools; empty: the same */
    const char *bos, *eos, *pad, *unk; /* may be NULL */
};
enum status chat_create(const struct chat_source *s, struct chat **out, struct err *err) MUST_CHECK;
void chat_free(struct chat *c);

struct chat_input {
    const cJSON *messages; /* array as the client sent it, roles and types already
                            * validated */
    const cJSON *tools;    /* array or NULL */
    const cJSON *kwargs;   /* chat_template_kwargs: object or NULL; its members become
                            * variables */
    bool add_generation_prompt;
    bool continue_final_message; /* leave the last message open: text after it is cut */
};

/* Normalise messages (content parts of type text are joined when the template reads content as a
 * string; null content becomes "" unless the template asks for none), render, append to `out`. */
enum status chat_render(const struct chat *c, const struct chat_input *in, int64_t now,
                        struct buf *out, struct err *err) MUST_CHECK;

#endif
