/* text_bundle.c - see text_bundle.h. Thread: any. */
#include "deploy/text/text_bundle.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "scheduler/directory/wire.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/model/load/file_map.h"
#include "shared/model/load/gguf_split.h"
#include "shared/model/load/model_files.h"
#include "shared/text/output/reasoning.h"
#include "shared/text/output/tool_parser.h"

enum {
    VERSION = 1,
    HEAD_MAX = 64 << 10, /* the JSON line */
    MAC_TEXT = 64
};

#define TEMPLATE_FILE "chat-template" /* --chat-template's */
#define GGUF_FILE     "model.gguf"
#define SIZE_MAX_GGUF (INT64_C(1) << 44)

/* ---- writing ---- */

struct writer {
    cJSON *files;
    struct buf bytes;
};

static enum status add_file(struct writer *w, const char *name, struct str bytes, uint64_t size,
                            struct err *err)
{
    if (w->bytes.len + bytes.n > TEXT_BUNDLE_MAX)
        return err_set(err, ERR_TOO_LONG, "tokenizer and configs are larger than %d MiB",
                       TEXT_BUNDLE_MAX >> 20);
    cJSON *one = cJSON_CreateObject();
    cJSON_AddStringToObject(one, "name", name);
    cJSON_AddNumberToObject(one, "bytes", (double)bytes.n);
    cJSON_AddNumberToObject(one, "size", (double)size);
    cJSON_AddItemToArray(w->files, one);
    buf_add_str(&w->bytes, bytes);
    return OK;
}

static enum status add_path(struct writer *w, const char *name, const char *path, struct err *err)
{
    struct buf text = { 0 };
    enum status st = file_read(path, TEXT_BUNDLE_MAX, &text, err);
    if (st == OK) st = add_file(w, name, buf_str(&text), text.len, err);
    buf_release(&text);
    return st;
}

/* Vocabularies are read only where there is no tokenizer.json. */
static enum status add_folder(struct writer *w, const char *folder, struct err *err)
{
    struct buf path = { 0 };
    bool has_tokenizer = false;
    enum status st = OK;
    for (size_t i = 0; st == OK && MODEL_TEXT_FILES[i].name; i++) {
        const struct model_text_file *f = &MODEL_TEXT_FILES[i];
        buf_clear(&path);
        buf_printf(&path, "%s/%s", folder, f->name);
        if ((f->is_vocabulary && has_tokenizer) || !file_is_regular(path.data)) continue;
        has_tokenizer |= strcmp(f->name, "tokenizer.json") == 0;
        st = add_path(w, f->name, path.data, err);
    }
    buf_release(&path);
    return st;
}

/* The part before the tensors. */
static enum status add_gguf(struct writer *w, const char *name, const char *path, struct err *err)
{
    struct gguf *g;
    TRY(gguf_open_alone(path, &g, err));
    const uint8_t *end = g->file.data + g->file.bytes;
    for (size_t i = 0; i < g->n_tensors; i++)
        if (g->tensors[i].data < end) end = g->tensors[i].data;
    const struct str head = { (const char *)g->file.data, (size_t)(end - g->file.data) };
    enum status st = add_file(w, name, head, g->file.bytes, err);
    gguf_close(g);
    return st;
}

static enum status add_ggufs(struct writer *w, const char *path, struct err *err)
{
    const uint32_t n = gguf_split_count(str_of(path));
    const size_t tail = strlen("-00001-of-00001.gguf"), stem = strlen(path) - (n ? tail : 0);
    struct buf one = { 0 };
    char name[TEXT_NAME_MAX];
    if (n == 0) return add_gguf(w, GGUF_FILE, path, err);
    if (n > TEXT_FILES_MAX - 1)
        return err_set(err, ERR_TOO_LONG, "the model has %u files, more than %d", n,
                       TEXT_FILES_MAX - 1);
    enum status st = OK;
    for (uint32_t i = 1; i <= n && st == OK; i++) {
        buf_clear(&one);
        buf_printf(&one, "%.*s-%05u-of-%05u.gguf", (int)stem, path, i, n);
        snprintf(name, sizeof name, "model-%05u-of-%05u.gguf", i, n);
        st = add_gguf(w, name, one.data, err);
    }
    buf_release(&one);
    return st;
}

static void write_mac(struct str secret, struct str bytes, char out[MAC_TEXT + 1])
{
    uint8_t mac[32];
    hmac_sha256(secret.n ? secret.p : "", secret.n, bytes.p, bytes.n, mac);
    for (size_t i = 0; i < sizeof mac; i++) snprintf(out + 2 * i, 3, "%02x", mac[i]);
}

/* Takes w->files. */
static void write_bundle(const struct text_source *from, struct str secret, struct writer *w,
                         struct buf *out)
{
    char mac[MAC_TEXT + 1], id[32];
    const size_t begin = out->len;
    cJSON *head = cJSON_CreateObject(), *names = cJSON_CreateArray();
    snprintf(id, sizeof id, DIRECTORY_ID, from->model);
    cJSON_AddNumberToObject(head, "version", VERSION);
    cJSON_AddStringToObject(head, "model", id);
    cJSON_AddNumberToObject(head, "max_model_len", from->max_model_len);
    cJSON_AddBoolToObject(head, "dummy", from->dummy);
    cJSON_AddStringToObject(head, "reasoning_parser", from->reasoning_parser);
    cJSON_AddStringToObject(head, "tool_parser", from->tool_parser);
    for (size_t i = 0; i < from->n_names && i < TEXT_NAMES_MAX; i++)
        cJSON_AddItemToArray(names, cJSON_CreateString(from->names[i]));
    cJSON_AddItemToObject(head, "names", names);
    cJSON_AddItemToObject(head, "files", w->files);
    w->files = NULL;
    char *text = cJSON_PrintUnformatted(head);
    buf_add_c(out, text);
    buf_add_char(out, '\n');
    buf_add_str(out, buf_str(&w->bytes));
    write_mac(secret, (struct str){ out->data + begin, out->len - begin }, mac);
    buf_add_c(out, mac);
    cJSON_free(text);
    cJSON_Delete(head);
}

enum status text_bundle_write(const struct text_source *from, struct str secret, struct buf *out,
                              struct err *err)
{
    struct writer w = { .files = cJSON_CreateArray() };
    enum status st = file_is_folder(from->model_path) ? add_folder(&w, from->model_path, err)
                                                      : add_ggufs(&w, from->model_path, err);
    if (st == OK && from->chat_template) st = add_path(&w, TEMPLATE_FILE, from->chat_template, err);
    if (st == OK) write_bundle(from, secret, &w, out);
    cJSON_Delete(w.files);
    buf_release(&w.bytes);
    return st;
}

/* ---- reading ---- */

static bool is_gguf(const char *name) { return str_ends(str_of(name), ".gguf"); }

/* "model.gguf", or the name of one of at most 99999 files. */
static bool is_gguf_name(const char *name)
{
    unsigned i, n;
    char again[64];
    if (strcmp(name, GGUF_FILE) == 0) return true;
    if (sscanf(name, "model-%5u-of-%5u.gguf", &i, &n) != 2 || i < 1 || i > n) return false;
    snprintf(again, sizeof again, "model-%05u-of-%05u.gguf", i, n);
    return strcmp(name, again) == 0;
}

static bool is_known_name(const char *name)
{
    for (size_t i = 0; MODEL_TEXT_FILES[i].name; i++)
        if (strcmp(MODEL_TEXT_FILES[i].name, name) == 0) return true;
    return strcmp(name, TEMPLATE_FILE) == 0 || is_gguf_name(name);
}

static enum status read_file_entry(const cJSON *o, struct str *rest, const struct text_bundle *b,
                                   struct text_file *out, struct err *err)
{
    int64_t bytes = -1, size = -1;
    TRY(json_get_str(o, "name", &out->name, err));
    TRY(json_get_i64(o, "bytes", 0, TEXT_BUNDLE_MAX, &bytes, err));
    TRY(json_get_i64(o, "size", 0, SIZE_MAX_GGUF, &size, err));
    if (!out->name || !is_known_name(out->name))
        return err_field(err, ERR_INVALID, "name", "there is a file \"%.80s\" that no model has",
                         out->name ? out->name : "");
    for (size_t i = 0; i < b->n_files; i++)
        if (strcmp(b->files[i].name, out->name) == 0)
            return err_field(err, ERR_INVALID, "name", "the file %.80s is there twice", out->name);
    if (bytes < 0 || (size_t)bytes > rest->n || (is_gguf(out->name) ? size < bytes : size != bytes))
        return err_field(err, ERR_INVALID, "bytes", "the length of %.80s cannot be", out->name);
    out->bytes = str_sub(*rest, 0, (size_t)bytes);
    out->size = (uint64_t)size;
    *rest = str_sub(*rest, (size_t)bytes, SIZE_MAX);
    return OK;
}

static enum status read_files(const cJSON *head, struct str rest, struct text_bundle *out,
                              struct err *err)
{
    const cJSON *files = json_member(head, "files"), *one;
    const int n = cJSON_IsArray(files) ? cJSON_GetArraySize(files) : 0;
    if (n < 1 || n > TEXT_FILES_MAX)
        return err_field(err, ERR_INVALID, "files", "files must be an array of 1 to %d",
                         TEXT_FILES_MAX);
    out->files = MEM_ARRAY(struct text_file, (size_t)n);
    cJSON_ArrayForEach (one, files) {
        TRY(read_file_entry(one, &rest, out, &out->files[out->n_files], err));
        out->n_files++;
    }
    if (rest.n == 0) return OK;
    return err_set(err, ERR_FORMAT, "%zu bytes belong to no file", rest.n);
}

static enum status read_names(const cJSON *head, struct text_bundle *out, struct err *err)
{
    const cJSON *names = json_member(head, "names"), *one;
    const int n = cJSON_IsArray(names) ? cJSON_GetArraySize(names) : 0;
    if (n < 1 || n > TEXT_NAMES_MAX)
        return err_field(err, ERR_INVALID, "names", "names must be an array of 1 to %d",
                         TEXT_NAMES_MAX);
    cJSON_ArrayForEach (one, names) {
        const size_t length = cJSON_IsString(one) ? strlen(one->valuestring) : 0;
        if (length < 1 || length >= TEXT_NAME_MAX)
            return err_field(err, ERR_INVALID, "names", "a name has 1 to %d characters",
                             TEXT_NAME_MAX - 1);
        out->names[out->n_names++] = one->valuestring;
    }
    return OK;
}

/* A node of a newer version may know more. */
static enum status read_parser(const cJSON *head, const char *member, const char *option,
                               bool (*is_known)(struct str name), const char **out, struct err *err)
{
    *out = NULL;
    TRY(json_get_str(head, member, out, err));
    if (!*out) *out = "auto";
    if (is_known(str_of(*out))) return OK;
    return err_field(err, ERR_INVALID, member,
                     "the node has %s %.80s, which this program does not know: give all nodes the "
                     "same version of baton",
                     option, *out);
}

static enum status read_head(const cJSON *head, struct text_bundle *out, struct err *err)
{
    int64_t version = 0, length = 0;
    TRY(json_get_i64(head, "version", 0, INT32_MAX, &version, err));
    if (version != VERSION)
        return err_field(err, ERR_INVALID, "version",
                         "it has version %lld and this program reads %d: give all nodes the same "
                         "version of baton",
                         (long long)version, VERSION);
    TRY(directory_get_id(head, "model", &out->model, err));
    TRY(json_get_i64(head, "max_model_len", 1, 1 << 30, &length, err));
    TRY(json_get_bool(head, "dummy", &out->dummy, err));
    TRY(read_parser(head, "reasoning_parser", "--reasoning-parser", reasoning_parser_is_known,
                    &out->reasoning_parser, err));
    TRY(read_parser(head, "tool_parser", "--tool-call-parser", tool_parser_is_known,
                    &out->tool_parser, err));
    if (length == 0)
        return err_field(err, ERR_INVALID, "max_model_len", "max_model_len is missing");
    out->max_model_len = (uint32_t)length;
    return read_names(head, out, err);
}

enum status text_bundle_read(struct str bytes, struct str secret, struct text_bundle *out,
                             struct err *err)
{
    char mac[MAC_TEXT + 1];
    struct text_bundle b = { 0 };
    cJSON *head = NULL;
    if (bytes.n < MAC_TEXT || bytes.n > TEXT_BUNDLE_MAX + HEAD_MAX)
        return err_set(err, ERR_FORMAT, "it has %zu bytes, which cannot be", bytes.n);
    const struct str said = str_sub(bytes, bytes.n - MAC_TEXT, MAC_TEXT);
    bytes.n -= MAC_TEXT;
    write_mac(secret, bytes, mac);
    if (!equal_constant_time(said.p, mac, MAC_TEXT))
        return err_set(err, ERR_UNAUTHORIZED,
                       "it was cut, or made with another cluster secret (BATON_CLUSTER_SECRET)");
    const size_t end = str_find_char(str_sub(bytes, 0, HEAD_MAX), '\n');
    if (end == SIZE_MAX) return err_set(err, ERR_FORMAT, "its first line has no end");
    TRY(json_parse(str_sub(bytes, 0, end), true, &head, err));
    b.doc = head;
    enum status st = read_head(head, &b, err);
    if (st == OK) st = read_files(head, str_sub(bytes, end + 1, SIZE_MAX), &b, err);
    if (st == OK) *out = b;
    else text_bundle_release(&b);
    return st;
}

void text_bundle_release(struct text_bundle *b)
{
    mem_free(b->files);
    cJSON_Delete(b->doc);
    *b = (struct text_bundle){ 0 };
}

/* ---- files ---- */

static enum status write_all(int fd, struct str bytes)
{
    while (bytes.n) {
        const ssize_t n = write(fd, bytes.p, bytes.n);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return ERR_IO;
        bytes = str_sub(bytes, (size_t)n, SIZE_MAX);
    }
    return OK;
}

/* The tensors of a GGUF file become a hole, which takes no room. */
static enum status unpack_file(const struct text_file *f, const char *path, struct err *err)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    enum status st = fd < 0 ? ERR_IO : write_all(fd, f->bytes);
    if (st == OK && f->size > f->bytes.n && ftruncate(fd, (off_t)f->size) != 0) st = ERR_IO;
    if (st != OK) st = err_set(err, ERR_IO, "%s cannot be written: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    return st;
}

static enum status make_folder_of(const char *folder, const char *name, struct err *err)
{
    struct buf path = { 0 };
    const char *slash = strchr(name, '/');
    enum status st = OK;
    if (!slash) return OK;
    buf_printf(&path, "%s/%.*s", folder, (int)(slash - name), name);
    if (mkdir(path.data, 0700) != 0 && errno != EEXIST)
        st = err_set(err, ERR_IO, "%s cannot be made: %s", path.data, strerror(errno));
    buf_release(&path);
    return st;
}

enum status text_bundle_unpack(const struct text_bundle *b, const char *folder,
                               struct buf *model_path, struct buf *chat_template, struct err *err)
{
    struct buf path = { 0 };
    enum status st = OK;
    buf_clear(model_path);
    buf_clear(chat_template);
    for (size_t i = 0; i < b->n_files && st == OK; i++) {
        const struct text_file *f = &b->files[i];
        buf_clear(&path);
        buf_printf(&path, "%s/%s", folder, f->name);
        st = make_folder_of(folder, f->name, err);
        if (st == OK) st = unpack_file(f, path.data, err);
        if (is_gguf(f->name) && model_path->len == 0) buf_add_str(model_path, buf_str(&path));
        if (strcmp(f->name, TEMPLATE_FILE) == 0) buf_add_str(chat_template, buf_str(&path));
    }
    if (model_path->len == 0) buf_add_c(model_path, folder);
    buf_release(&path);
    return st;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    if (remove(path) != 0) log_warn("not removed", "path=%s why=\"%s\"", path, strerror(errno));
    return 0;
}

void text_bundle_remove(const char *folder)
{
    enum { OPEN_MAX_FOLDERS = 4 };
    if (nftw(folder, remove_one, OPEN_MAX_FOLDERS, FTW_DEPTH | FTW_PHYS) != 0)
        log_warn("not removed", "path=%s why=\"%s\"", folder, strerror(errno));
}
