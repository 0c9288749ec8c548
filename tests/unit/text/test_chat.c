/* test_chat.c - templates of real models against the prompts of their own tokenizers, adapting
 * contents and tool calls, and continuing the last message. */
#include "shared/text/chat.h"

#include "shared/base/mem.h"
#include "tests/harness/test.h"

#include <stdio.h>
#include <string.h>

static const char SMOLLM2[] =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\nYou are a helpful AI assistant "
    "named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
static const char CHATML[] = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ "
                             "message['content'] | trim }}<|im_end|>\n{% endfor %}"
                             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
static const char DIALOG[] = "[{\"role\": \"system\", \"content\": \"S\"}, {\"role\": \"user\", "
                             "\"content\": \"U1\"}, {\"role\": \"assistant\", \"content\": \"A1\"},"
                             " {\"role\": \"user\", \"content\": \"U2\"}]";

static cJSON *json(const char *text)
{
    cJSON *doc = NULL;
    CHECK_OK(json_parse(str_of(text), false, &doc, NULL));
    return doc;
}

struct ask {
    const char *template, *messages, *tools, *kwargs, *tool_template;
    bool prompt, open_end;
};

static enum status render(struct ask a, struct buf *out, struct err *err)
{
    struct chat *c = NULL;
    cJSON *messages = json(a.messages), *tools = a.tools ? json(a.tools) : NULL,
          *kwargs = a.kwargs ? json(a.kwargs) : NULL;
    enum status st = chat_create(
        &(struct chat_source){ str_of(a.template), str_of(a.tool_template ? a.tool_template : ""),
                               "<s>", "</s>", NULL, NULL },
        &c, err);
    if (st == OK) {
        struct chat_input in = { messages, tools, kwargs, a.prompt, a.open_end };
        st = chat_render(c, &in, 1721995200, out, err);
    }
    chat_free(c);
    cJSON_Delete(messages);
    cJSON_Delete(tools);
    cJSON_Delete(kwargs);
    return st;
}

static void check(struct ask a, const char *want)
{
    struct buf out = { 0 };
    struct err err = { 0 };
    if (render(a, &out, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    CHECK_EQ_STR(out.data, want);
    buf_release(&out);
}

static void check_fails(struct ask a, enum status want, const char *text)
{
    struct buf out = { 0 };
    struct err err = { 0 };
    enum status st = render(a, &out, &err);
    if (st != want || !strstr(err.text, text))
        test_fail(__FILE__, __LINE__, "%s: %s", status_name(st), err.text);
    buf_release(&out);
}

TEST(chat_renders_smollm2_as_its_tokenizer)
{
    static char line[1 << 16];
    FILE *f = fopen(test_data("text/chat_smollm2.jsonl"), "r");
    int n = 0;
    CHECK(f != NULL);
    for (; fgets(line, sizeof line, f); n++) {
        cJSON *doc = json(line);
        char *messages = cJSON_PrintUnformatted(cJSON_GetObjectItem(doc, "messages"));
        check((struct ask){ .template = SMOLLM2, .messages = messages, .prompt = true },
              cJSON_GetObjectItem(doc, "rendered")->valuestring);
        cJSON_free(messages);
        cJSON_Delete(doc);
    }
    fclose(f);
    CHECK_EQ_INT(n, 6);
}

TEST(chat_renders_chatml)
{
    static const char want[] =
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>"
        "assistant\nA1<|im_end|>\n<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n";
    check((struct ask){ .template = CHATML, .messages = DIALOG, .prompt = true }, want);
    check((struct ask){ .template = SMOLLM2, .messages = DIALOG, .prompt = true }, want);
}

TEST(chat_gives_templates_their_variables)
{
    static const char t[] =
        "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ tools is none }}{{ documents "
        "is none }}{{ add_generation_prompt }}{{ enable_thinking }}{{ strftime_now('%Y') }}";
    check(
        (struct ask){ .template = t, .messages = DIALOG, .kwargs = "{\"enable_thinking\": false}" },
        "<s></s>FalseTrueTrueFalseFalse2024");
    check(
        (struct ask){
            .template = "{{ tools[0].function.name }}{{ eos_token }}",
            .messages = DIALOG,
            .tools = "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]",
            .kwargs = "{\"eos_token\": \"E\"}",
        },
        "fE");
    check_fails((struct ask){ .template = "x", .messages = DIALOG, .kwargs = "{\"messages\": []}" },
                ERR_INVALID, "cannot set 'messages'");
}

/* The two templates expect different contents. */
TEST(chat_takes_the_template_for_tools_when_there_are_some)
{
    static const char tools[] = "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]",
                      null[] = "[{\"role\": \"assistant\", \"content\": null}]";
    static const char plain[] = "plain{{ messages[0].content }}{{ tools is none }}";
    static const char with_tools[] =
        "tools{{ messages[0].content is none }}{{ tools[0].function.name }}";
    check((struct ask){ .template = plain, .tool_template = with_tools, .messages = null },
          "plainTrue");
    check(
        (struct ask){
            .template = plain, .tool_template = with_tools, .messages = null, .tools = "null" },
        "plainTrue");
    check(
        (struct ask){
            .template = plain, .tool_template = with_tools, .messages = null, .tools = tools },
        "toolsTruef");
    check((struct ask){ .template = plain, .messages = null, .tools = tools }, "plainFalse");
    check_fails((struct ask){ .template = plain, .tool_template = "{{", .messages = null },
                ERR_FORMAT, "the template for tools: chat template line 1");
}

TEST(chat_joins_text_parts)
{
    static const char parts[] = "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", "
                                "\"text\": \"a\"}, {\"type\": \"text\", \"text\": \"b\"}]}]";
    static const char image[] = "[{\"role\": \"user\", \"content\": [{\"type\": \"image_url\", "
                                "\"image_url\": {\"url\": \"x\"}}]}]";
    check((struct ask){ .template = CHATML, .messages = parts },
          "<|im_start|>user\na\nb<|im_end|>\n");
    check_fails((struct ask){ .template = CHATML, .messages = image }, ERR_UNSUPPORTED,
                "image_url");
}

TEST(chat_keeps_parts_for_templates_that_read_them)
{
    static const char reads[] =
        "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}";
    static const char both[] =
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
        "m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}";
    static const char parts[] =
        "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"}, {\"type\": "
        "\"text\", \"text\": \"b\"}]}, {\"role\": \"user\", \"content\": \"c\"}]";
    check((struct ask){ .template = reads, .messages = parts }, "<a><b><c>");
    check((struct ask){ .template = both, .messages = parts }, "<a><b>c");
}

/* Templates of families that no package holds, written after their published files. */
static const char ERNIE[] =
    "{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- "
    "endif -%}{{- '<|begin_of_sentence|>' -}}"
    "{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{- 'User: ' + m['content'] + '\n' -}}"
    "{%- elif m['role'] == 'assistant' -%}{{- 'Assistant: ' + m['content'] + '<|end_of_sentence|>' "
    "-}}"
    "{%- elif m['role'] == 'system' -%}{{- m['content'] + '\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}";
static const char ERNIE_THINKING[] =
    "{{- '<|im_start|>system\n<global_setting>\nthink_mode=True\n</global_setting>' -}}"
    "{%- if messages[0].role == 'system' -%}{{- '\n\n<system_setting>\n' + messages[0].content + "
    "'\n</system_setting>' -}}{%- set messages = messages[1:] -%}{%- endif -%}"
    "{%- if tools -%}{{- '\n\n<tool_list>\n' + tools | tojson + '\n</tool_list>' -}}{%- endif "
    "-%}{{- '<|im_end|>\n\n' -}}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' and m.tool_calls -%}{%- for c in m.tool_calls -%}{{- "
    "'<tool_call>\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + "
    "'\n</tool_call>\n' -}}{%- endfor -%}"
    "{%- elif m.role == 'assistant' -%}{{- '<response>\n' + "
    "m.content.split('</think>')[-1].strip('\n') + '\n</response>\n' -}}{%- else -%}{{- m.content "
    "-}}{%- endif -%}"
    "{{- '<|im_end|>\n\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- "
    "'<|im_start|>assistant\n<think>\n' -}}{%- endif -%}";
static const char DEEPSEEK_V31[] =
    "{%- set ns = namespace(system='') -%}{%- for m in messages if m['role'] == 'system' -%}{%- "
    "set ns.system = ns.system + m['content'] -%}{%- endfor -%}"
    "{{- bos_token + ns.system -}}{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{- "
    "'<｜User｜>' + m['content'] -}}"
    "{%- elif m['role'] == 'assistant' -%}{{- '<｜Assistant｜></think>' + "
    "m['content'].split('</think>')[-1] + eos_token -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' + ('<think>' if thinking else "
    "'</think>') -}}{%- endif -%}";

TEST(chat_renders_families_without_a_package)
{
    static const char u2[] =
        "[{\"role\": \"user\", \"content\": \"U1\"}, {\"role\": \"assistant\", \"content\": "
        "\"A1\"}, {\"role\": \"user\", \"content\": \"U2\"}]";
    static const char thought[] =
        "[{\"role\": \"user\", \"content\": \"U1\"}, {\"role\": \"assistant\", \"content\": "
        "\"<think>\\nhm\\n</think>\\n\\nA1\"}, {\"role\": \"user\", \"content\": \"U2\"}]";
    static const char call[] =
        "[{\"role\": \"user\", \"content\": \"U\"}, {\"role\": \"assistant\", \"content\": null, "
        "\"tool_calls\": [{\"id\": \"1\", \"type\": \"function\", \"function\": {\"name\": \"f\", "
        "\"arguments\": \"{\\\"x\\\": 1}\"}}]}, {\"role\": \"tool\", \"content\": \"7\"}]";
    static const char tools[] = "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]";
    check(
        (struct ask){ .template = ERNIE, .messages = DIALOG, .prompt = true },
        "<|begin_of_sentence|>S\nUser: U1\nAssistant: A1<|end_of_sentence|>User: U2\nAssistant: ");
    check((struct ask){ .template = ERNIE, .messages = u2 },
          "<|begin_of_sentence|>User: U1\nAssistant: A1<|end_of_sentence|>User: U2\n");
    check((struct ask){ .template = ERNIE_THINKING, .messages = DIALOG, .prompt = true },
          "<|im_start|>system\n<global_setting>\nthink_mode=True\n</"
          "global_setting>\n\n<system_setting>\nS\n</system_setting><|im_end|>\n\n"
          "<|im_start|>user\nU1<|im_end|>\n\n<|im_start|>assistant\n<response>\nA1\n</"
          "response>\n<|im_end|>\n\n<|im_start|>user\nU2<|im_end|>\n\n<|im_start|>assistant\n<"
          "think>\n");
    check(
        (struct ask){
            .template = ERNIE_THINKING, .messages = call, .tools = tools, .prompt = true },
        "<|im_start|>system\n<global_setting>\nthink_mode=True\n</"
        "global_setting>\n\n<tool_list>\n[{\"type\": \"function\", \"function\": {\"name\": "
        "\"f\"}}]\n</tool_list><|im_end|>\n\n"
        "<|im_start|>user\nU<|im_end|>\n\n<|im_start|>assistant\n<tool_call>\n{\"name\": \"f\", "
        "\"arguments\": {\"x\": 1}}\n</tool_call>\n<|im_end|>\n\n"
        "<|im_start|>tool\n7<|im_end|>\n\n<|im_start|>assistant\n<think>\n");
    check((struct ask){ .template = DEEPSEEK_V31, .messages = DIALOG, .prompt = true },
          "<s>S<｜User｜>U1<｜Assistant｜></think>A1</s><｜User｜>U2<｜Assistant｜></think>");
    check(
        (struct ask){
            .template = DEEPSEEK_V31,
            .messages = thought,
            .kwargs = "{\"thinking\": true}",
            .prompt = true,
        },
        "<s><｜User｜>U1<｜Assistant｜></think>\n\nA1</s><｜User｜>U2<｜Assistant｜><think>");
}

/* Most templates join the content with other text, or print it. */
TEST(chat_makes_null_content_empty_unless_asked_for)
{
    static const char m[] = "[{\"role\": \"assistant\", \"content\": null, \"tool_calls\": []}]";
    check(
        (struct ask){
            .template =
                "{% for m in messages %}{{ '<' + m.content + '>' }}{{ m['content'] }}{% endfor %}",
            .messages = m },
        "<>");
    check(
        (struct ask){
            .template = "{% for m in messages %}{{ m['content'] is none }}{% if "
                        "m.tool_calls is not none %}x{% endif %}{% endfor %}",
            .messages = m,
        },
        "Truex");
    check(
        (struct ask){
            .template = "{% for m in messages %}{% if m.tool_calls is not none %}{{ "
                        "'<' + m.content + '>' }}{% endif %}{% endfor %}",
            .messages = m,
        },
        "<>");
}

TEST(chat_keeps_absent_and_null_content)
{
    static const char t[] =
        "{% for m in messages %}{{ m.content is defined }}{{ m.content is none }} {% endfor %}";
    check(
        (struct ask){
            .template = t,
            .messages =
                "[{\"role\": \"assistant\", \"content\": null}, {\"role\": \"assistant\"}]" },
        "TrueTrue FalseFalse ");
}

TEST(chat_gives_tool_arguments_as_the_template_needs_them)
{
    static const char calls[] = "[{\"role\": \"assistant\", \"content\": null, \"tool_calls\": "
                                "[{\"id\": \"1\", \"type\": \"function\", \"function\": {\"name\": "
                                "\"f\", \"arguments\": \"{\\\"x\\\": 1}\"}}], \"z\": 1}]";
    static const char broken[] = "[{\"role\": \"assistant\", \"tool_calls\": [{\"function\": "
                                 "{\"name\": \"f\", \"arguments\": \"{oops\"}}]}]";
    static const char empty[] = "[{\"role\": \"assistant\", \"tool_calls\": [{\"function\": "
                                "{\"name\": \"f\", \"arguments\": \"\"}}]}]";
    static const char object[] =
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}";
    static const char text[] =
        "{% for c in messages[0].tool_calls %}{{ '<' + c.function.arguments + '>' }}{% endfor %}";
    check((struct ask){ .template = object, .messages = calls }, "{\"x\": 1}");
    check((struct ask){ .template = text, .messages = calls }, "<{\"x\": 1}>");
    check((struct ask){ .template = object, .messages = broken }, "\"{oops\"");
    check((struct ask){ .template = object, .messages = empty }, "{}");
    check((struct ask){ .template = "{{ messages[0] | tojson }}", .messages = calls },
          "{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"id\": \"1\", \"type\": "
          "\"function\", \"function\": {\"name\": \"f\", \"arguments\": {\"x\": 1}}}], \"z\": 1}");
    check_fails(
        (struct ask){
            .template = "{{ messages[0].tool_calls[0].function.arguments.x + 'a' }}",
            .messages = calls,
        },
        ERR_FORMAT, "a int and a string");
}

TEST(chat_leaves_the_last_message_open)
{
    static const char m[] = "[{\"role\": \"user\", \"content\": \"U\"}, {\"role\": \"assistant\", "
                            "\"content\": \"The answer \"}]";
    static const char e[] =
        "[{\"role\": \"user\", \"content\": \"U\"}, {\"role\": \"assistant\", \"content\": \"\"}]";
    check((struct ask){ .template = SMOLLM2, .messages = m, .open_end = true },
          "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
          "Face<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nThe answer ");
    check((struct ask){ .template = CHATML, .messages = m, .open_end = true },
          "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nThe answer");
    check(
        (struct ask){
            .template = "{% for m in messages %}[{{ m.content }}]{% endfor %}",
            .messages = e,
            .open_end = true,
        },
        "[U][");
    check_fails((struct ask){ .template = CHATML, .messages = m, .open_end = true, .prompt = true },
                ERR_INVALID, "exclude each other");
    check_fails((struct ask){ .template = "x", .messages = m, .open_end = true }, ERR_INVALID,
                "does not print the last message");
    check_fails(
        (struct ask){
            .template = CHATML,
            .messages = "[{\"role\": \"assistant\", \"content\": null}]",
            .open_end = true,
        },
        ERR_INVALID, "no content");
}

TEST(chat_appends_to_the_buffer)
{
    struct buf out = { 0 };
    buf_add_c(&out, "before ");
    CHECK_OK(render((struct ask){ .template = "{{ messages[0].content }}", .messages = DIALOG },
                    &out, NULL));
    CHECK_EQ_STR(out.data, "before S");
    buf_release(&out);
}

TEST(chat_refuses_bad_input)
{
    check_fails((struct ask){ .template = "x", .messages = "[]" }, ERR_INVALID,
                "at least one message");
    check_fails((struct ask){ .template = "x", .messages = "[1]" }, ERR_INVALID, "messages[0]");
    check_fails(
        (struct ask){ .template = "{{ raise_exception('no system role') }}", .messages = DIALOG },
        ERR_INVALID, "no system role");
    check_fails((struct ask){ .template = "{{", .messages = DIALOG }, ERR_FORMAT, "line 1");
}

TEST_MAIN(CASE(chat_renders_smollm2_as_its_tokenizer), CASE(chat_renders_chatml),
          CASE(chat_gives_templates_their_variables),
          CASE(chat_takes_the_template_for_tools_when_there_are_some), CASE(chat_joins_text_parts),
          CASE(chat_keeps_parts_for_templates_that_read_them),
          CASE(chat_renders_families_without_a_package),
          CASE(chat_makes_null_content_empty_unless_asked_for),
          CASE(chat_keeps_absent_and_null_content),
          CASE(chat_gives_tool_arguments_as_the_template_needs_them),
          CASE(chat_leaves_the_last_message_open), CASE(chat_appends_to_the_buffer),
          CASE(chat_refuses_bad_input))
