/* chat.h - renders chat messages into the prompt text of one model.
 *
 * Holds the parsed template and the strings of special tokens that templates refer to.
 * Thread: any; read-only after chat_create. */
#ifndef BATON_TEXT_CHAT_H
#define BATON_TEXT_CHAT_H

#include "shared/text/jinja/jinja.h"

struct chat;

/* Templates (the model's own or --chat-template FILE) and the special tokens they refer to. */
struct chat_source {
    struct str template;
    struct str tool_template;          /* for requests with tools; empty: `template` */
    const char *bos, *eos, *pad, *unk; /* may be NULL */
};

/* Parses the templates; *s is copied. */
enum status chat_create(const struct chat_source *s, struct chat **out, struct err *err) MUST_CHECK;
void chat_free(struct chat *c);

struct chat_input {
    const cJSON *messages; /* array as the client sent it; roles and types are validated */
    const cJSON *tools;    /* array or NULL */
    const cJSON *kwargs;   /* chat_template_kwargs, object or NULL: its members become variables */
    bool add_generation_prompt;
    bool continue_final_message; /* leave the last message open: the text after it is cut */
};

/* Adapts the messages to the template (see chat.c), renders them and appends the prompt to `out`.
 * `now` is Unix time. */
enum status chat_render(const struct chat *c, const struct chat_input *in, int64_t now,
                        struct buf *out, struct err *err) MUST_CHECK;

#endif
