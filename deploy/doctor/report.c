/* report.c - collects and prints the doctor's lines. Thread: main. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "deploy/doctor/doctor.h"
#include "shared/base/assert.h"
#include "shared/base/json/json.h"

static const char *const WORDS[] = {
    [DOCTOR_OK] = "ok", [DOCTOR_WARN] = "warn", [DOCTOR_FAIL] = "fail"
};

struct doctor_line *doctor_add(struct doctor *d, const char *what, enum doctor_result result,
                               const char *fmt, ...)
{
    va_list args;
    ASSERT(d->n < DOCTOR_LINES_MAX);
    struct doctor_line *line = &d->lines[d->n++];
    line->what = what;
    line->result = result;
    va_start(args, fmt);
    vsnprintf(line->text, sizeof line->text, fmt, args);
    va_end(args);
    return line;
}

void doctor_fix(struct doctor_line *line, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(line->fix, sizeof line->fix, fmt, args);
    va_end(args);
}

bool doctor_read_line(const char *path, char *out, size_t cap)
{
    FILE *f = fopen(path, "r");
    out[0] = 0;
    if (f && fgets(out, (int)cap, f)) out[strcspn(out, "\n")] = 0;
    if (f) fclose(f);
    return out[0] != 0;
}

size_t doctor_count(const struct doctor *d, enum doctor_result result)
{
    size_t n = 0;
    for (size_t i = 0; i < d->n; i++) n += d->lines[i].result == result;
    return n;
}

void doctor_print_text(const struct doctor *d, bool color, struct buf *out)
{
    const size_t n_warn = doctor_count(d, DOCTOR_WARN), n_fail = doctor_count(d, DOCTOR_FAIL);
    static const char *const colors[] = {
        [DOCTOR_OK] = "\033[32m", [DOCTOR_WARN] = "\033[33m", [DOCTOR_FAIL] = "\033[31m"
    };
    for (size_t i = 0; i < d->n; i++) {
        const struct doctor_line *line = &d->lines[i];
        buf_printf(out, "%s%-4s%s  %-14s %s\n", color ? colors[line->result] : "",
                   WORDS[line->result], color ? "\033[0m" : "", line->what, line->text);
        if (line->fix[0]) buf_printf(out, "      %-14s -> %s\n", "", line->fix);
    }
    if (d->tables.len) buf_printf(out, "%s\n", d->tables.data);
    buf_printf(out, "%zu ok, %zu warning%s, %zu failure%s\n", doctor_count(d, DOCTOR_OK), n_warn,
               n_warn == 1 ? "" : "s", n_fail, n_fail == 1 ? "" : "s");
}

void doctor_print_json(const struct doctor *d, struct buf *out)
{
    buf_printf(out, "{\"ok\":%s,\"checks\":[", doctor_count(d, DOCTOR_FAIL) ? "false" : "true");
    for (size_t i = 0; i < d->n; i++) {
        const struct doctor_line *line = &d->lines[i];
        buf_printf(out, "%s{\"what\":", i ? "," : "");
        json_add_string(out, str_of(line->what));
        buf_printf(out, ",\"result\":\"%s\",\"text\":", WORDS[line->result]);
        json_add_string(out, str_of(line->text));
        buf_add_c(out, ",\"fix\":");
        if (line->fix[0]) json_add_string(out, str_of(line->fix));
        else buf_add_c(out, "null");
        buf_add_char(out, '}');
    }
    buf_add_char(out, ']');
    buf_add_str(out, buf_str(&d->members));
    buf_add_c(out, "}\n");
}
