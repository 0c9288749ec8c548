/* batch_file.c - see batch_file.h. Thread: a worker, one at a time. */
#include "deploy/generate/batch_file.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deploy/generate/batch_format.h"
#include "shared/base/mem.h"

enum { READ_STEP = 1 << 16, WAIT_MS = 200 };

static enum status io_failed(struct err *err, const char *name)
{
    int cause = errno;
    return err_set(err, cause == ENOENT ? ERR_NOT_FOUND : ERR_IO, "%s: %s", name, strerror(cause));
}

static const char *partial_of(const char *output, struct buf *out)
{
    struct stat link;
    if (lstat(output, &link) == 0 && !S_ISREG(link.st_mode)) return NULL; /* written in place */
    buf_printf(out, "%s.partial", output);
    return out->data;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return S_ISREG(a->st_mode) && a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* A shell opens standard output, so that the input may be there already: only to read and write it
 * at once is refused. */
static enum status check_input(const struct stat *in, const char *output, const char *partial,
                               struct err *err)
{
    struct stat s;
    bool standard = strcmp(output, "-") == 0;
    if (standard && in->st_size > 0 && fstat(STDOUT_FILENO, &s) == 0 && same_file(in, &s))
        return err_set(err, ERR_INVALID, "standard output is the input file; name another");
    if (standard) return OK;
    if (stat(output, &s) == 0 && same_file(in, &s))
        return err_set(err, ERR_INVALID, "--output %s is the input file; name another", output);
    if (partial && stat(partial, &s) == 0 && same_file(in, &s))
        return err_set(err, ERR_INVALID,
                       "--output %s is written as %s first, which is the input file; name another",
                       output, partial);
    return OK;
}

static enum status check_partial(const struct stat *s, const char *partial, struct err *err)
{
    if (s->st_size == 0) return OK;
    return err_set(err, ERR_INVALID,
                   "%s has the answers of an interrupted run; move it away, or remove it, to begin "
                   "anew",
                   partial);
}

enum status batch_file_check(const char *input, const char *output, struct err *err)
{
    struct stat s;
    struct buf name = { 0 };
    const char *partial = strcmp(output, "-") == 0 ? NULL : partial_of(output, &name);
    bool exists = strcmp(input, "-") == 0 ? fstat(STDIN_FILENO, &s) == 0 : stat(input, &s) == 0;
    enum status st = exists ? check_input(&s, output, partial, err) : OK;
    if (st == OK && partial && stat(partial, &s) == 0) st = check_partial(&s, partial, err);
    buf_release(&name);
    return st;
}

/* Does not wait for a named pipe's writer, since the caller would wait too: fill does. */
static enum status open_input(struct batch_file *f, const char *input, struct err *err)
{
    struct stat s;
    bool standard = strcmp(input, "-") == 0;
    int fd = standard ? STDIN_FILENO : open(input, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    f->input = mem_strdup(standard ? "standard input" : input);
    if (fd < 0) return io_failed(err, input);
    f->in = fd;
    if (!standard && fcntl(fd, F_SETFL, 0) != 0) return io_failed(err, f->input);
    if (fstat(fd, &s) != 0) return io_failed(err, f->input);
    return S_ISDIR(s.st_mode) ? err_set(err, ERR_IO, "%s: is a directory", f->input) : OK;
}

enum status batch_file_await_reader(struct batch_file *f, struct err *err)
{
    if (f->out >= 0) return OK;
    int fd = open(f->output, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno != ENXIO) return io_failed(err, f->output);
    if (fd < 0) {
        poll(NULL, 0, WAIT_MS);
        return ERR_TIMEOUT;
    }
    f->out = fd;
    return fcntl(fd, F_SETFL, 0) == 0 ? OK : io_failed(err, f->output);
}

/* The partial file is never truncated: what it has is somebody's answers. */
static enum status open_output(struct batch_file *f, const char *output, struct err *err)
{
    struct stat s;
    struct buf partial = { 0 };
    if (stat(output, &s) == 0 && S_ISDIR(s.st_mode))
        return err_set(err, ERR_IO, "%s: is a directory", output);
    f->output = mem_strdup(output);
    if (partial_of(output, &partial)) f->partial = buf_take(&partial);
    const char *name = f->partial ? f->partial : f->output;
    if (!f->partial && stat(output, &s) == 0 && S_ISFIFO(s.st_mode)) {
        f->out = -1;
        return OK;
    }
    int fd = open(name, O_WRONLY | O_CREAT | O_CLOEXEC | (f->partial ? 0 : O_TRUNC), 0644);
    if (fd < 0) return io_failed(err, name);
    f->out = fd;
    if (f->partial && fstat(fd, &s) != 0) return io_failed(err, name);
    return f->partial ? check_partial(&s, name, err) : OK;
}

enum status batch_file_open(struct batch_file *f, const char *input, const char *output,
                            struct err *err)
{
    struct err ignored;
    *f = (struct batch_file){ .in = STDIN_FILENO, .out = STDOUT_FILENO };
    enum status st = open_input(f, input, err);
    if (st == OK) st = batch_file_check(input, output, err);
    if (st == OK && strcmp(output, "-") != 0) st = open_output(f, output, err);
    if (st != OK && batch_file_close(f, false, &ignored) != OK) return st;
    return st;
}

static enum status fill(struct batch_file *f, struct err *err)
{
    struct pollfd p = { .fd = f->in, .events = POLLIN };
    if (poll(&p, 1, WAIT_MS) == 0) return ERR_TIMEOUT; /* read reports any other problem */
    char *at = buf_reserve(&f->pending, READ_STEP);
    ssize_t n;
    do n = read(f->in, at, READ_STEP);
    while (n < 0 && errno == EINTR);
    if (n < 0) return io_failed(err, f->input);
    f->eof = n == 0;
    f->pending.len += (size_t)n;
    f->pending.data[f->pending.len] = 0;
    return OK;
}

/* Moves pending[0, n) to `line` and drops it with its line break. */
static enum status take_line(struct batch_file *f, size_t n, size_t n_break, struct buf *line,
                             struct err *err)
{
    bool skipped = f->skipping;
    f->skipping = false;
    f->searched = 0;
    if (!skipped) {
        struct str text = { f->pending.data, n };
        buf_add_str(line, f->begun ? text : batch_format_skip_mark(text));
    }
    f->begun = true;
    buf_consume(&f->pending, n + n_break);
    if (line->len && line->data[line->len - 1] == '\r') line->data[--line->len] = 0;
    return skipped ? err_set(err, ERR_TOO_LONG, "the line is longer than %d bytes", BATCH_LINE_MAX)
                   : OK;
}

enum status batch_file_read(struct batch_file *f, struct buf *line, struct err *err)
{
    buf_clear(line);
    for (;;) {
        struct buf *p = &f->pending;
        char *at = p->len > f->searched ? memchr(p->data + f->searched, '\n', p->len - f->searched)
                                        : NULL;
        if (at) return take_line(f, (size_t)(at - p->data), 1, line, err);
        f->searched = p->len;
        if (f->eof && p->len == 0 && !f->skipping) return ERR_CANCELED;
        if (f->eof) return take_line(f, p->len, 0, line, err);
        if (p->len > BATCH_LINE_MAX) {
            buf_clear(p);
            f->searched = 0;
            f->skipping = true;
        }
        TRY(fill(f, err));
    }
}

enum status batch_file_write(struct batch_file *f, struct str text, struct err *err)
{
    while (text.n > 0) {
        ssize_t n = write(f->out, text.p, text.n);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return io_failed(err, f->partial  ? f->partial
                                  : f->output ? f->output
                                              : "standard output");
        text = str_sub(text, (size_t)n, SIZE_MAX);
    }
    return OK;
}

enum status batch_file_close(struct batch_file *f, bool complete, struct err *err)
{
    enum status st = OK;
    if (f->in > STDERR_FILENO) close(f->in);
    if (f->out > STDERR_FILENO && close(f->out) != 0)
        st = io_failed(err, f->partial ? f->partial : f->output);
    if (st == OK && complete && f->partial && rename(f->partial, f->output) != 0)
        st = io_failed(err, f->output);
    mem_free(f->input);
    mem_free(f->output);
    mem_free(f->partial);
    buf_release(&f->pending);
    *f = (struct batch_file){ .in = -1, .out = -1 };
    return st;
}
