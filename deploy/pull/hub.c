/* hub.c - see hub.h. Thread: main. */
#include "deploy/pull/hub.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/model/load/file_map.h"

enum { TOKEN_MAX = 512 };

static void add_encoded(struct buf *out, const char *text, const char *also)
{
    for (const char *c = text; *c; c++) {
        if (isalnum((unsigned char)*c) || strchr("-_.~", *c) || strchr(also, *c))
            buf_add_char(out, *c);
        else buf_printf(out, "%%%02X", (unsigned char)*c);
    }
}

/* ---- the endpoint ---- */

static bool is_this_host(const char *endpoint)
{
    static const char *const HOSTS[] = { "http://127.0.0.1", "http://localhost", "http://[::1]" };
    for (size_t i = 0; i < COUNT_OF(HOSTS); i++) {
        const size_t n = strlen(HOSTS[i]);
        if (strncmp(endpoint, HOSTS[i], n) == 0 && strchr(":/", endpoint[n])) return true;
    }
    return false;
}

static enum status set_endpoint(struct model_hub *h, const char *endpoint, struct err *err)
{
    const bool bare = !strstr(endpoint, "://");
    size_t n = strlen(endpoint);
    while (n && endpoint[n - 1] == '/') n--;
    bool right = n && n + 9 < sizeof h->endpoint && !memchr(endpoint, '@', n) &&
                 !memchr(endpoint, '?', n) && !memchr(endpoint, '#', n) &&
                 (bare || strncmp(endpoint, "https://", 8) == 0 ||
                  strncmp(endpoint, "http://", 7) == 0);
    for (size_t i = 0; i < n; i++) right = right && (unsigned char)endpoint[i] > ' ';
    if (!right)
        return err_field(
            err, ERR_CONFIG, h->from == PULL_MODELSCOPE ? "modelscope-endpoint" : "hf-endpoint",
            "\"%.120s\" is no address of a hub, such as https://hf-mirror.com", endpoint);
    snprintf(h->endpoint, sizeof h->endpoint, "%s%.*s", bare ? "https://" : "", (int)n, endpoint);
    return OK;
}

/* ---- the token ---- */

/* A token with a line break in it would be two headers. */
static bool take_token(struct str token, char out[TOKEN_MAX])
{
    token = str_trim(token);
    if (token.n == 0 || token.n >= TOKEN_MAX) return false;
    for (size_t i = 0; i < token.n; i++)
        if ((unsigned char)token.p[i] <= ' ' || (unsigned char)token.p[i] >= 0x7f ||
            token.p[i] == ';')
            return false;
    memcpy(out, token.p, token.n);
    out[token.n] = 0;
    return true;
}

static bool token_of_env(const char *const *names, char out[TOKEN_MAX])
{
    for (; *names; names++)
        if (take_token(str_of(getenv(*names)), out)) return true;
    return false;
}

static bool token_of_file(char out[TOKEN_MAX])
{
    const char *path = getenv("HF_TOKEN_PATH"), *home = getenv("HF_HOME"),
               *cache = getenv("XDG_CACHE_HOME"), *user = getenv("HOME");
    struct buf name = { 0 }, text = { 0 };
    struct err err;
    if (path && *path) buf_add_c(&name, path);
    else if (home && *home) buf_printf(&name, "%s/token", home);
    else if (cache && *cache) buf_printf(&name, "%s/huggingface/token", cache);
    else buf_printf(&name, "%s/.cache/huggingface/token", user ? user : "");
    bool found = file_read(name.data, TOKEN_MAX, &text, &err) == OK &&
                 take_token(buf_str(&text), out);
    buf_release(&name);
    buf_release(&text);
    return found;
}

static const char *const HF_TOKENS[] = { "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", NULL },
                         *const MS_TOKENS[] = { "MODELSCOPE_API_TOKEN", "MODELSCOPE_TOKEN", NULL };

const char *hub_token_name(const struct model_hub *h)
{
    return h->from == PULL_MODELSCOPE ? MS_TOKENS[0] : HF_TOKENS[0];
}

static void set_auth(struct model_hub *h)
{
    char token[TOKEN_MAX];
    if (strncmp(h->endpoint, "https://", 8) != 0 && !is_this_host(h->endpoint)) return;
    if (h->from == PULL_MODELSCOPE) {
        if (token_of_env(MS_TOKENS, token))
            snprintf(h->auth, sizeof h->auth, "Cookie: m_session_id=%s", token);
    } else if (token_of_env(HF_TOKENS, token) || token_of_file(token)) {
        snprintf(h->auth, sizeof h->auth, "Authorization: Bearer %s", token);
    }
}

enum status hub_init(struct model_hub *h, enum pull_from from, const char *endpoint,
                     struct err *err)
{
    *h = (struct model_hub){ .from = from };
    TRY(set_endpoint(h, endpoint, err));
    set_auth(h);
    return OK;
}

/* ---- addresses ---- */

static const char *revision_of(const struct model_hub *h, const struct pull_source *s)
{
    if (s->revision[0]) return s->revision;
    return h->from == PULL_MODELSCOPE ? "master" : "main";
}

void hub_list_url(const struct model_hub *h, const struct pull_source *s, struct buf *out)
{
    if (h->from == PULL_MODELSCOPE) {
        buf_printf(out, "%s/api/v1/models/%s/repo/files?Revision=", h->endpoint, s->repository);
        add_encoded(out, revision_of(h, s), "");
        buf_add_c(out, "&Recursive=True");
        return;
    }
    buf_printf(out, "%s/api/models/%s/revision/", h->endpoint, s->repository);
    add_encoded(out, revision_of(h, s), "");
    buf_add_c(out, "?blobs=true");
}

void hub_file_url(const struct model_hub *h, const struct pull_source *s, const char *commit,
                  const char *name, struct buf *out)
{
    if (h->from == PULL_MODELSCOPE) {
        buf_printf(out, "%s/api/v1/models/%s/repo?Revision=", h->endpoint, s->repository);
        add_encoded(out, revision_of(h, s), "");
        buf_add_c(out, "&FilePath=");
        add_encoded(out, name, "");
        return;
    }
    buf_printf(out, "%s/%s/resolve/", h->endpoint, s->repository);
    add_encoded(out, commit[0] ? commit : revision_of(h, s), "");
    buf_add_char(out, '/');
    add_encoded(out, name, "/");
}

void hub_page_url(const struct model_hub *h, const struct pull_source *s, struct buf *out)
{
    buf_printf(out, "%s/%s%s", h->endpoint, h->from == PULL_MODELSCOPE ? "models/" : "",
               s->repository);
}

void hub_local_url(const char *path, struct buf *out)
{
    buf_add_c(out, "file://");
    add_encoded(out, path, "/");
}

bool hub_has(const struct model_hub *h, const char *url)
{
    const size_t n = strlen(h->endpoint);
    return n && strncmp(url, h->endpoint, n) == 0 && (url[n] == '/' || url[n] == 0);
}
