/* openai_tools.h - parses tools, tool_choice and parallel_tool_calls of a chat request.
 *
 * The output is not constrained. tool_choice "auto" leaves the choice to the model; "required" and
 * a named function put the beginning of a call into the prompt, which the model nearly always
 * continues; "none" leaves the tools out of the prompt. Where only one function can be called, its
 * name is part of that beginning. Thread: a worker. */
#ifndef BATON_SERVE_OPENAI_OPENAI_TOOLS_H
#define BATON_SERVE_OPENAI_OPENAI_TOOLS_H

#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "shared/serve/serve_state.h"

enum tool_choice { TOOL_CHOICE_NONE, TOOL_CHOICE_AUTO, TOOL_CHOICE_REQUIRED, TOOL_CHOICE_NAMED };

struct openai_tools {
    enum tool_choice choice; /* NONE also without tools */
    struct str name;         /* the function to call, if demanded and known; in the arena */
    bool parallel;           /* more than one call */
};

enum status openai_tools_parse(const struct serve *s, const cJSON *o, bool chat,
                               struct arena *arena, struct openai_tools *out,
                               struct err *err) MUST_CHECK;

#endif
