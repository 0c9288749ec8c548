/* openai_tokenize.c - /tokenize (a prompt, or messages as the chat API renders them) and
 * /detokenize, in vLLM's formats. Thread: a worker. */
#include "shared/serve/completion_request.h"

static void write_tokens(const struct completion_request *c, const int32_t *ids, size_t n,
                         bool strings, struct buf *out)
{
    buf_printf(out, "{\"count\":%zu,\"max_model_len\":%u", n, c->serve->o.max_model_len);
    openai_write_ids(out, "tokens", ids, n);
    if (strings) {
        buf_add_c(out, ",\"token_strs\":[");
        for (size_t i = 0; i < n; i++) {
            if (i) buf_add_char(out, ',');
            json_add_string(out, tokenizer_piece(c->serve->o.tokenizer, ids[i]));
        }
        buf_add_char(out, ']');
    }
    buf_add_char(out, '}');
}

/* The spellings of tokens may be much longer than the text. */
static enum status check_strings(const struct completion_request *c, const int32_t *ids, size_t n,
                                 struct err *err)
{
    size_t n_bytes = 0;
    for (size_t i = 0; i < n; i++)
        n_bytes += tokenizer_piece(c->serve->o.tokenizer, ids[i]).n + sizeof "\"\",1234567";
    if (n_bytes <= c->serve->max_answer) return OK;
    return openai_text_too_long(c, "return_token_strs", n_bytes, err);
}

static enum status tokenize(struct completion_request *c, cJSON *doc, struct buf *text,
                            struct err *err)
{
    const char *prompt = NULL;
    bool chat = json_member(doc, "messages") != NULL, add_special = !chat, strings = false;
    int32_t *ids = NULL;
    size_t n = 0;
    TRY(json_get_str(doc, "prompt", &prompt, err));
    TRY(json_get_bool(doc, "add_special_tokens", &add_special, err));
    TRY(json_get_bool(doc, "return_token_strs", &strings, err));
    if (!chat && !prompt)
        return err_field(err, ERR_INVALID, "prompt", "the request has neither prompt nor messages");
    if (chat) {
        struct openai_tools tools;
        struct openai_answer_start opening = { .now = c->created };
        TRY(openai_tools_parse(c->serve, doc, true, &c->arena, &tools, err));
        TRY(openai_render_chat(c->serve, doc, &tools, &opening, text, err));
    }
    struct str s = chat ? buf_str(text) : str_of(prompt);
    size_t max = openai_tokens_max(c);
    enum status st = tokenizer_encode(c->serve->o.tokenizer, s, add_special, max, &ids, &n, err);
    if (st == ERR_TOO_LONG)
        st = err_field(err, ERR_TOO_LONG, chat ? "messages" : "prompt",
                       "the text has more than %zu tokens; send it in parts", max);
    if (st == OK && strings) st = check_strings(c, ids, n, err);
    if (st == OK) write_tokens(c, ids, n, strings, &c->out);
    mem_free(ids);
    return st;
}

static enum status tokenize_prepare(struct completion_request *c, cJSON *doc, struct err *err)
{
    struct buf text = { 0 };
    enum status st = tokenize(c, doc, &text, err);
    buf_release(&text);
    return st;
}

/* Measures the text before it is made: a token of a few bytes may stand for a hundred. */
static enum status check_text(const struct completion_request *c, const int32_t *ids, size_t n,
                              bool skip_special, struct err *err)
{
    struct buf token = { 0 };
    size_t n_bytes = 0;
    for (size_t i = 0; i < n && n_bytes <= c->serve->max_answer; i++) {
        buf_clear(&token);
        tokenizer_token_bytes(c->serve->o.tokenizer, ids[i], skip_special, &token);
        n_bytes += token.len;
    }
    buf_release(&token);
    return n_bytes <= c->serve->max_answer ? OK : openai_text_too_long(c, "tokens", n_bytes, err);
}

static enum status detokenize_prepare(struct completion_request *c, cJSON *doc, struct err *err)
{
    struct buf text = { 0 };
    bool skip_special = false;
    int32_t *ids = NULL;
    size_t n = 0;
    const cJSON *tokens = json_member(doc, "tokens");
    TRY(json_get_bool(doc, "skip_special_tokens", &skip_special, err));
    if (!tokens) return err_field(err, ERR_INVALID, "tokens", "the request has no tokens");
    TRY(openai_parse_ids(c->serve, tokens, "tokens", &c->packed, &ids, &n, err));
    enum status st = check_text(c, ids, n, skip_special, err);
    if (st == OK) tokenizer_decode(c->serve->o.tokenizer, ids, n, skip_special, &text);
    mem_free(ids);
    if (st != OK) return st;
    buf_add_c(&c->out, "{\"prompt\":");
    json_add_string(&c->out, buf_str(&text));
    buf_add_char(&c->out, '}');
    buf_release(&text);
    return OK;
}

const struct endpoint OPENAI_TOKENIZE = {
    .prepare = tokenize_prepare,
    .write_error = openai_write_error,
};
const struct endpoint OPENAI_DETOKENIZE = {
    .prepare = detokenize_prepare,
    .write_error = openai_write_error,
};
