/* fuzz_pull.c - arbitrary bytes for everything that `baton pull` reads: lists of files of both hubs,
 * the index of a checkpoint, heads of answers, what a user writes, journals and markers. What is
 * accepted names files below the model's folder, and addresses that an HTTP request may hold. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/pull/choose.h"
#include "deploy/pull/fetch/http_get.h"
#include "deploy/pull/fetch/part.h"
#include "deploy/pull/hub.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_failed(const struct err *err)
{
    if (err->code == OK || !err->text[0] || strchr(err->text, '\n')) abort();
}

/* ---- lists ---- */

static void check_list(const struct file_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        const struct pull_file *f = &l->files[i];
        if (f->name[0] == '/' || strstr(f->name, "//") || strncmp(f->name, "../", 3) == 0 ||
            strstr(f->name, "/../") || str_ends(str_of(f->name), "/.."))
            abort();
        for (const char *c = f->name; *c; c++)
            if ((unsigned char)*c < ' ') abort();
        if (i && strcmp(l->files[i - 1].name, f->name) >= 0) abort();
        if (f->size != FILE_SIZE_UNKNOWN && f->size > 1ull << 53) abort();
        if (file_list_find(l, f->name) != f) abort();
    }
    for (const char *c = l->commit; *c; c++)
        if (!strchr("0123456789abcdefABCDEF", *c)) abort();
}

static void check_choice(struct file_list *l)
{
    const struct choose_options o = { .file = "", .part = "" };
    struct err err = { 0 };
    size_t n = 0;
    if (choose_files(l, &o, &err) != OK) {
        check_failed(&err);
        return;
    }
    for (size_t i = 0; i < l->n; i++) n += l->files[i].chosen;
    if (n == 0) abort();
    (void)choose_model_file(l);
}

static void try_list(struct str text, bool modelscope)
{
    struct file_list l = { 0 };
    struct err err = { 0 };
    enum status st = modelscope ? file_list_read_modelscope(text, &l, &err)
                                : file_list_read_hugging_face(text, &l, &err);
    if (st == OK) {
        check_list(&l);
        check_choice(&l);
    } else {
        check_failed(&err);
    }
    file_list_release(&l);
}

static void try_index(struct str text)
{
    static const char *const NAMES[] = { "config.json", CHOOSE_INDEX, "a.safetensors",
                                         "b.safetensors" };
    struct file_list l = { 0 };
    struct err err = { 0 };
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        const struct pull_file f = { .name = NAMES[i], .size = 1, .chosen = true };
        if (file_list_add(&l, &f, &err) != OK) abort();
    }
    if (file_list_finish(&l, &err) != OK) abort();
    if (choose_shards(&l, text, &err) != OK) check_failed(&err);
    if (!file_list_find(&l, "config.json")->chosen) abort(); /* it decides about shards alone */
    file_list_release(&l);
}

/* ---- names and heads ---- */

static void try_source(const char *text)
{
    const struct source_options o = { PULL_HUGGING_FACE, "http://127.0.0.1:8", NULL, NULL };
    struct pull_source s;
    struct model_hub hub;
    struct err err = { 0 };
    struct buf url = { 0 };
    if (source_parse(text, &o, &s, &err) != OK) {
        check_failed(&err);
        return;
    }
    if (s.from != PULL_HUGGING_FACE && s.from != PULL_MODELSCOPE) return;
    const char *slash = strchr(s.repository, '/');
    if (!slash || strchr(slash + 1, '/') || s.repository[0] == '.' || slash[1] == '.') abort();
    if (s.file[0] && !file_name_is_safe(str_of(s.file))) abort();
    if (hub_init(&hub, s.from, "http://127.0.0.1:8", &err) != OK) abort();
    hub_list_url(&hub, &s, &url);
    hub_file_url(&hub, &s, "", "a/b c%?.json", &url);
    hub_page_url(&hub, &s, &url);
    for (size_t i = 0; i < url.len; i++)
        if (url.data[i] <= ' ' || url.data[i] >= 0x7f) abort();
    buf_release(&url);
}

static void check_text(const char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text >= 0x7f) abort();
}

static void try_head(struct str text)
{
    struct answer_head h = { .linked_size = FILE_SIZE_UNKNOWN };
    struct str line;
    while (str_split(&text, '\n', &line)) answer_head_read(&h, line);
    const char *const texts[] = { h.etag, h.modified, h.error_code, h.error_text, h.linked_etag };
    for (size_t i = 0; i < COUNT_OF(texts); i++) check_text(texts[i]);
    if (h.status < 0 || h.status > 999) abort();
}

/* ---- what lies on the disk ---- */

/* A folder of this process, and a file of 1000 bytes of which 500 are there. */
static void try_journal(struct str text)
{
    static char at[] = "/tmp/fuzz_pull_XXXXXX";
    static bool made;
    const struct pull_file file = { .name = "f", .size = 1000, .version = "1" };
    struct pull_folder folder = { .lock_fd = -1 };
    struct part p;
    struct buf path = { 0 };
    if (!made && !mkdtemp(at)) abort();
    made = true;
    buf_add_c(&folder.staging, at);
    folder_part_of(&folder, file.name, &path);
    FILE *f = fopen(path.data, "w");
    if (!f || ftruncate(fileno(f), 500) != 0) abort();
    fclose(f);
    folder_journal_of(&folder, file.name, &path);
    f = fopen(path.data, "w");
    if (!f || fwrite(text.p, 1, text.n, f) != text.n) abort();
    fclose(f);
    part_begin(&p, &folder, &file, 64);
    if (p.done > 1000 || p.n_chunks == 0 || p.n_chunks > 1000 || part_front(&p) > p.size) abort();
    for (uint32_t i = 0; i < p.n_chunks; i++) {
        const struct part_chunk *c = &p.chunks[i];
        if (c->done > part_chunk_length(&p, i)) abort();
        if (c->done && part_chunk_begin(&p, i) + c->done > 500) abort();
    }
    part_close(&p);
    unlink(path.data);
    folder_part_of(&folder, file.name, &path);
    unlink(path.data);
    rmdir(at);
    made = false;
    memcpy(at + sizeof at - 7, "XXXXXX", 6);
    buf_release(&path);
    buf_release(&folder.staging);
}

static void try_marker(struct str text)
{
    struct marker m;
    struct err err = { 0 };
    char path[] = "/tmp/fuzz_pull_XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0 || write(fd, text.p, text.n) != (ssize_t)text.n) abort();
    close(fd);
    marker_init(&m);
    struct str name;
    void *value;
    size_t pos = 0;
    if (marker_read(&m, path, &err) != OK) check_failed(&err);
    while (map_next(&m.files, &pos, &name, &value))
        if (!file_name_is_safe(name)) abort();
    marker_release(&m);
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1) return 0;
    const struct str text = { (const char *)data + 1, size - 1 };
    char *copy = mem_strndup(text.p, text.n);
    switch (data[0]) {
    case 'h': try_list(text, false); break;
    case 'm': try_list(text, true); break;
    case 'i': try_index(text); break;
    case 's': try_source(copy); break;
    case 'a': try_head(text); break;
    case 'j': try_journal(text); break;
    case 'k': try_marker(text); break;
    default: break;
    }
    mem_free(copy);
    return 0;
}
