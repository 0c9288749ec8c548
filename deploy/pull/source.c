/* source.c - reads what is to be pulled. Thread: any. */
#include "deploy/pull/source.h"

#include <stdio.h>
#include <string.h>

#include "shared/model/load/file_map.h"

/* What the last part of a static model's name asks for. */
static const struct {
    const char *name, *quantization, *note;
} STATIC_KINDS[] = {
    { "weight_only_int8", "wint8", NULL },
    { "weight_only_int4", "wint4", NULL },
    { "a8w8_fp8", "block_wise_fp8", NULL },
    { "a8w8_fp8_wint4", "block_wise_fp8",
      "experts in int4 beside F8 are not built: they stay F8, which is twice the memory" },
    { "bfloat16", NULL, NULL },
    { "float16", NULL, NULL },
};

/* Of exports, not of checkpoints. */
static const char *const STATIC_SUFFIXES[] = { "-MTP", "-Block-Attn", "-Append-Attn" };
static const char TWO_HOSTS[] = "-2nodes";

#define RIGHT                                                                                      \
    "give org/name, org/name@REVISION, org/name/FILE.gguf, an https:// address of one of these "   \
    "or "                                                                                          \
    "of a .gguf file, or a folder"

/* ---- small parts ---- */

static bool is_word(struct str s, const char *also)
{
    if (s.n == 0 || s.p[0] == '.') return false;
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              (c && strchr(also, c))))
            return false;
    }
    return true;
}

static bool is_revision(struct str s)
{
    return is_word(s, "-_./") && str_find(s, STR("..")) == SIZE_MAX && !str_ends(s, "/");
}

/* Copies into an array of `size`; false: too long. */
static bool put(char *to, size_t size, struct str s)
{
    if (s.n >= size) return false;
    if (s.n) memcpy(to, s.p, s.n);
    to[s.n] = 0;
    return true;
}

#define PUT(array, s) put(array, sizeof(array), s)

static int hex(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* "%20" of addresses. False: too long, or a 0 byte. */
static bool put_decoded(char *to, size_t size, struct str s)
{
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++, n++) {
        char c = s.p[i];
        if (n + 1 >= size) return false;
        if (c == '%' && i + 2 < s.n && hex(s.p[i + 1]) >= 0 && hex(s.p[i + 2]) >= 0) {
            c = (char)(hex(s.p[i + 1]) << 4 | hex(s.p[i + 2]));
            i += 2;
        }
        if (!c) return false;
        to[n] = c;
    }
    to[n] = 0;
    return true;
}

static enum status wrong(const char *text, const char *why, struct err *err)
{
    char shown[121];
    size_t n = 0;
    for (; text[n] && n + 1 < sizeof shown; n++)
        shown[n] = (unsigned char)text[n] < ' ' || text[n] == 0x7f ? '?' : text[n];
    shown[n] = 0;
    return err_field(err, ERR_CONFIG, "model", "\"%s\" %s; " RIGHT, shown, why);
}

/* ---- org/name... ---- */

/* Takes the ends off a static model's name that a checkpoint's has not. */
static void take_suffixes(struct pull_source *s)
{
    struct str name = str_of(s->repository);
    if (str_ends(name, TWO_HOSTS)) {
        s->n_hosts = 2;
        name.n -= strlen(TWO_HOSTS);
    }
    for (size_t i = 0; i < COUNT_OF(STATIC_SUFFIXES); i++) {
        if (!str_ends(name, STATIC_SUFFIXES[i])) continue;
        if (i == 0) s->has_draft = true;
        name.n -= strlen(STATIC_SUFFIXES[i]);
    }
    s->repository[name.n] = 0;
}

static enum status take_file(const char *text, struct str file, struct pull_source *s,
                             struct err *err)
{
    for (size_t i = 0; i < COUNT_OF(STATIC_KINDS); i++) {
        if (!str_eq_c(file, STATIC_KINDS[i].name)) continue;
        s->quantization = STATIC_KINDS[i].quantization;
        s->note = STATIC_KINDS[i].note;
        take_suffixes(s);
        return OK;
    }
    if (!str_ends(file, ".gguf") && str_find_char(file, '.') == SIZE_MAX)
        return wrong(text,
                     "ends in neither a file nor a quantisation of PaddleNLP's static models "
                     "(weight_only_int8, weight_only_int4, a8w8_fp8, a8w8_fp8_wint4)",
                     err);
    if (!file_name_is_safe(file) || !PUT(s->file, file))
        return wrong(text, "names no file that a repository can have", err);
    return OK;
}

/* Takes what is behind '@': up to '/', but "refs/pr/1" whole. */
static bool take_revision(struct str *rest, struct str first, struct pull_source *out)
{
    struct str kind = { 0 }, number = { 0 };
    if (str_eq_c(first, "refs") && str_split(rest, '/', &kind) && str_split(rest, '/', &number))
        first.n = (size_t)(number.p + number.n - first.p);
    return is_revision(first) && PUT(out->revision, first);
}

/* org/name, with @REVISION, :PART or /FILE behind it. */
static enum status take_name(const char *text, struct str s, struct pull_source *out,
                             struct err *err)
{
    struct str org, name = { 0 }, revision, file = s;
    if (!str_split(&file, '/', &org) || !str_split(&file, '/', &name))
        return wrong(text, "is no name of a model", err);
    size_t colon = str_find_char(name, ':');
    if (colon != SIZE_MAX) {
        struct str part = str_sub(name, colon + 1, SIZE_MAX);
        name.n = colon;
        if (!is_word(part, "-_.") || !PUT(out->part, part))
            return wrong(text, "has no part of a file's name behind its ':'", err);
    }
    size_t at = str_find_char(name, '@');
    if (at != SIZE_MAX) {
        revision = str_sub(name, at + 1, SIZE_MAX);
        name.n = at;
        if (!take_revision(&file, revision, out))
            return wrong(text, "has no revision behind its '@'", err);
    }
    if (!is_word(org, "-_.") || !is_word(name, "-_."))
        return wrong(text, "is no name of a model", err);
    if (org.n + name.n + 2 > sizeof out->repository) return wrong(text, "is too long", err);
    snprintf(out->repository, sizeof out->repository, "%.*s/%.*s", STR_ARG(org), STR_ARG(name));
    return file.p ? take_file(text, file, out, err) : OK;
}

/* ---- addresses ---- */

/* The path of an address below a hub's; false: it is not below it. */
static bool is_below(const char *text, const char *hub, struct str *path)
{
    size_t n = hub ? strlen(hub) : 0;
    while (n && hub[n - 1] == '/') n--;
    if (!n || strncmp(text, hub, n) != 0 || text[n] != '/') return false;
    *path = str_of(text + n + 1);
    path->n = strcspn(path->p, "?#");
    while (str_ends(*path, "/")) path->n--;
    return true;
}

/* org/name[/KIND/REVISION[/FILE]] of an address */
static enum status take_page(const char *text, struct str path, struct pull_source *out,
                             struct err *err)
{
    struct str org = { 0 }, name = { 0 }, kind, revision;
    char plain[REPOSITORY_MAX];
    bool named = str_split(&path, '/', &org) && str_split(&path, '/', &name);
    if (!named || !is_word(org, "-_.") || !is_word(name, "-_.") ||
        org.n + name.n + 2 > sizeof plain)
        return wrong(text, "names no model", err);
    snprintf(plain, sizeof plain, "%.*s/%.*s", STR_ARG(org), STR_ARG(name));
    TRY(take_name(text, str_of(plain), out, err));
    if (!str_split(&path, '/', &kind) || str_eq_c(kind, "files")) return OK;
    bool known = str_eq_c(kind, "tree") || str_eq_c(kind, "resolve") || str_eq_c(kind, "blob");
    if (!known || !str_split(&path, '/', &revision) ||
        !put_decoded(out->revision, sizeof out->revision, revision) ||
        !is_revision(str_of(out->revision)))
        return wrong(text, "is no address of a model, of a revision of it or of one of its files",
                     err);
    if (!path.p || str_eq_c(kind, "tree")) return OK;
    if (!put_decoded(out->file, sizeof out->file, path) || !file_name_is_safe(str_of(out->file)))
        return wrong(text, "names no file that a repository can have", err);
    return OK;
}

/* A file of another server: the last part of its path is the file's name. */
static enum status take_url(const char *text, struct pull_source *out, struct err *err)
{
    struct str path = { text, strcspn(text, "?#") }, host = { text, 0 }, name = path;
    const size_t from = (size_t)(strstr(text, "://") - text) + 3;
    struct str rest = str_sub(path, from, SIZE_MAX);
    (void)str_split(&rest, '/', &host);
    for (size_t i = 0; i < path.n; i++)
        if (path.p[i] == '/') name = str_sub(path, i + 1, SIZE_MAX);
    out->from = PULL_URL;
    if (host.n == 0 || str_find_char(host, '@') != SIZE_MAX)
        return wrong(text, "has no host, or a password in it, which would be in the log", err);
    for (const char *c = text; *c; c++)
        if ((unsigned char)*c <= ' ' || *c == 0x7f) return wrong(text, "is no address", err);
    if (!PUT(out->url, str_of(text))) return wrong(text, "is too long", err);
    if (!str_ends(path, ".gguf") || name.p < host.p + host.n ||
        !put_decoded(out->file, sizeof out->file, name) || strchr(out->file, '/') ||
        !file_name_is_safe(str_of(out->file)))
        return wrong(text, "is neither a model of a hub nor a .gguf file", err);
    return OK;
}

static bool has_scheme(const char *text) { return strstr(text, "://") != NULL; }

static enum status take_address(const char *text, const struct source_options *o,
                                struct pull_source *out, struct err *err)
{
    static const char *const OWN[][3] = {
        [PULL_HUGGING_FACE] = { "https://huggingface.co", "https://hf.co", NULL },
        [PULL_MODELSCOPE] = { "https://www.modelscope.cn", "https://modelscope.cn", NULL },
    };
    struct str path;
    const char *after = strstr(text, "://") + 3;
    for (enum pull_from hub = PULL_HUGGING_FACE; hub <= PULL_MODELSCOPE; hub++) {
        const char *other = hub == PULL_HUGGING_FACE ? o->hugging_face : o->modelscope;
        bool found = is_below(text, other, &path);
        for (size_t i = 0; !found && OWN[hub][i]; i++) found = is_below(text, OWN[hub][i], &path);
        if (!found) continue;
        out->from = hub;
        if (hub == PULL_MODELSCOPE && str_starts(path, "models/"))
            path = str_sub(path, 7, SIZE_MAX);
        return take_page(text, path, out, err);
    }
    if (strncmp(text, "hf://", 5) == 0 || strncmp(text, "ms://", 5) == 0 ||
        strncmp(text, "modelscope://", 13) == 0) {
        out->from = text[0] == 'h' ? PULL_HUGGING_FACE : PULL_MODELSCOPE;
        return take_name(text, str_of(after), out, err);
    }
    if (strncmp(text, "https://", 8) == 0 || strncmp(text, "http://", 7) == 0)
        return take_url(text, out, err);
    return wrong(text, "begins with neither https:// nor hf:// nor ms://", err);
}

/* ---- all ---- */

static bool looks_like_path(const char *text)
{
    return text[0] == '/' || text[0] == '~' || strcmp(text, ".") == 0 || strcmp(text, "..") == 0 ||
           strncmp(text, "./", 2) == 0 || strncmp(text, "../", 3) == 0;
}

bool source_is_elsewhere(const char *text)
{
    return has_scheme(text) || (!looks_like_path(text) && !file_is_folder(text) &&
                                !file_is_regular(text) && strchr(text, '/'));
}

enum status source_parse(const char *text, const struct source_options *o, struct pull_source *out,
                         struct err *err)
{
    struct pull_source s = { .from = o->hub };
    if (!text[0]) return err_field(err, ERR_CONFIG, "model", "no model was named; " RIGHT);
    if (has_scheme(text)) {
        TRY(take_address(text, o, &s, err));
    } else if (file_is_folder(text)) {
        s.from = PULL_FOLDER;
        if (!PUT(s.folder, str_of(text))) return wrong(text, "is too long", err);
    } else if (file_is_regular(text)) {
        return wrong(text, "is a file that is here already", err);
    } else if (looks_like_path(text)) {
        return wrong(text, "is a folder that is not there", err);
    } else {
        TRY(take_name(text, str_of(text), &s, err));
    }
    if (o->revision && !s.revision[0] && s.repository[0]) {
        if (!is_revision(str_of(o->revision)) || !PUT(s.revision, str_of(o->revision)))
            return err_field(err, ERR_CONFIG, "revision",
                             "\"%.80s\" is no name of a branch, a tag or a commit", o->revision);
    }
    *out = s;
    return OK;
}

void source_print(const struct pull_source *s, struct buf *out)
{
    if (s->from == PULL_URL) buf_add_c(out, s->url);
    else if (s->from == PULL_FOLDER) buf_add_c(out, s->folder);
    else buf_printf(out, "%s%s%s", s->repository, s->revision[0] ? "@" : "", s->revision);
}
