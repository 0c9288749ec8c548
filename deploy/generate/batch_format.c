/* batch_format.c - see batch_format.h. */
#include "deploy/generate/batch_format.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/base/buf.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"

enum { LOOKED_AT = 1 << 16 /* bytes; the first line of an ordinary batch has a few hundred */ };

static const char MARK[] = "\xef\xbb\xbf"; /* U+FEFF, with which editors of Windows begin a file */

static const char UTF16[] = "the file is UTF-16; it must be UTF-8 (iconv -f UTF-16 -t UTF-8)";
static const char NO_TEXT[] = "a 0 byte, so the file is not text in UTF-8; it must have one JSON "
                              "object or one prompt on each line";
static const char ARRAY[] = "the file is a JSON array; a batch file has one JSON object on each "
                            "line (jq -c '.[]' writes it so)";
static const char ARRAY_OF_TEXT[] = "the file is a JSON array; a file of prompts has one prompt on "
                                    "each line (jq -r '.[]' writes it so)";
static const char SPREAD[] = "the JSON object goes on in the next line; a batch file has one whole "
                             "JSON object on each line (jq -c . writes it so)";
static const char TAIL[] = "the end of a JSON object without its beginning; a batch file has one "
                           "whole JSON object on each line";

struct str batch_format_skip_mark(struct str line)
{
    return str_starts(line, MARK) ? str_sub(line, sizeof MARK - 1, SIZE_MAX) : line;
}

/* A prompt may begin with [, as "[INST] ..." does. */
static const char *wrong_array(struct str line)
{
    struct str rest = str_trim(str_sub(line, 1, SIZE_MAX));
    struct err ignored = { 0 };
    cJSON *doc = NULL;
    if (rest.n == 0 || rest.p[0] == '{') return ARRAY;
    bool whole = json_parse(line, false, &doc, &ignored) == OK;
    cJSON_Delete(doc);
    return whole ? ARRAY_OF_TEXT : NULL;
}

/* What is left of a file that was cut in a line: more braces are closed than opened, and something
 * in them has a name. */
static const char *wrong_tail(struct str line)
{
    long n_open = 0;
    if (line.p[line.n - 1] != '}' || str_find(line, STR("\":")) == SIZE_MAX) return NULL;
    for (size_t i = 0; i < line.n; i++) n_open += (line.p[i] == '{') - (line.p[i] == '}');
    return n_open < 0 ? TAIL : NULL;
}

static const char *what_is_wrong(struct str line)
{
    if (str_starts(line, "\xff\xfe") || str_starts(line, "\xfe\xff")) return UTF16;
    if (memchr(line.p, 0, line.n)) return NO_TEXT;
    if (line.p[0] == '{') return line.n == 1 ? SPREAD : NULL;
    return line.p[0] == '[' ? wrong_array(line) : wrong_tail(line);
}

/* Prompts may be JSON: only what names a batch line's members is one that was meant as such. */
enum status batch_format_prompt(struct str line, uint64_t first, struct err *err)
{
    static const char *const members[] = { "custom_id", "body", "messages" };
    struct err ignored = { 0 };
    cJSON *doc = NULL;
    bool meant = false, object = str_starts(str_trim(line), "{") &&
                                 json_parse(str_trim(line), false, &doc, &ignored) == OK;
    for (size_t i = 0; object && i < COUNT_OF(members); i++)
        meant = meant || json_member(doc, members[i]);
    cJSON_Delete(doc);
    if (!meant) return OK;
    return err_set(err, ERR_FORMAT,
                   "a JSON object, but line %" PRIu64 " made this a file of prompts; take "
                   "that line out, or make it a JSON object too",
                   first);
}

enum status batch_format_of(struct str line, const char *name, uint64_t number, bool *prompts,
                            struct err *err)
{
    const struct str text = str_trim(line);
    const char *wrong = text.n ? what_is_wrong(text) : NULL;
    *prompts = text.n > 0 && text.p[0] != '{';
    return wrong ? err_set(err, ERR_FORMAT, "%s, line %" PRIu64 ": %s", name, number, wrong) : OK;
}

/* Reads the beginning of a regular file; nothing of any other. */
static void read_beginning(const char *path, struct buf *out)
{
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return;
    if (fstat(fd, &s) == 0 && S_ISREG(s.st_mode)) {
        ssize_t n = read(fd, buf_reserve(out, LOOKED_AT), LOOKED_AT);
        out->len = n > 0 ? (size_t)n : 0;
    }
    close(fd);
}

enum status batch_format_check(const char *path, struct err *err)
{
    struct buf text = { 0 };
    struct str line;
    uint64_t number = 0, first = 0;
    bool prompts = false;
    enum status st = OK;
    read_beginning(path, &text);
    struct str rest = batch_format_skip_mark(buf_str(&text));
    while (str_split(&rest, '\n', &line)) {
        number++;
        if (str_trim(line).n == 0) continue;
        bool cut = !rest.p && text.len == LOOKED_AT; /* then only an array can be told */
        if (first) {
            st = cut ? OK : batch_format_prompt(line, first, err);
            if (st != OK) err_prefix(err, "%s, line %" PRIu64 ": ", path, number);
            break;
        }
        if (!cut || line.p[0] == '[') st = batch_format_of(line, path, number, &prompts, err);
        if (st != OK || !prompts) break;
        first = number;
    }
    buf_release(&text);
    return st;
}
