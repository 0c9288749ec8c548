/* http_answer.c - see http_answer.h. Thread: the owner's. */
#include "shared/net/http/http_answer.h"

#include <string.h>
#include <strings.h>

static int answer_fail(struct http_answer *a, enum status st)
{
    a->st = st;
    return HPE_USER;
}

/* Headers of one connection, and those that the server writes itself. */
static bool is_of_connection(struct str name)
{
    static const char *const own[] = { "connection",     "keep-alive", "transfer-encoding",
                                       "content-length", "date",       "trailer",
                                       "upgrade",        "te",         "proxy-connection" };
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (name.n == strlen(own[i]) && strncasecmp(name.p, own[i], name.n) == 0) return true;
    return false;
}

static bool is_clean(struct str s, bool name)
{
    for (size_t i = 0; i < s.n; i++) {
        unsigned char c = (unsigned char)s.p[i];
        if ((c < ' ' && c != '\t') || c == 0x7f) return false;
        if (name && (c <= ' ' || c == ':')) return false;
    }
    return true;
}

/* Takes the header that was read. */
static int take_header(struct http_answer *a)
{
    struct str name = buf_str(&a->name), value = str_trim(buf_str(&a->value));
    if (name.n == 0) return 0;
    if (!is_clean(name, true) || !is_clean(value, false)) return answer_fail(a, ERR_IO);
    if (name.n == 12 && strncasecmp(name.p, "content-type", 12) == 0) {
        buf_clear(&a->type);
        buf_add_str(&a->type, value);
    } else if (!is_of_connection(name)) {
        buf_add_str(&a->headers, name);
        buf_add_c(&a->headers, ": ");
        buf_add_str(&a->headers, value);
        buf_add_c(&a->headers, "\r\n");
    }
    buf_clear(&a->name);
    buf_clear(&a->value);
    return 0;
}

static int on_name(llhttp_t *h, const char *at, size_t n)
{
    struct http_answer *a = h->data;
    if (!a->has_head) buf_add(&a->name, at, n); /* a trailer is dropped */
    return 0;
}

static int on_value(llhttp_t *h, const char *at, size_t n)
{
    struct http_answer *a = h->data;
    if (!a->has_head) buf_add(&a->value, at, n);
    return 0;
}

static int on_value_complete(llhttp_t *h)
{
    struct http_answer *a = h->data;
    return a->has_head ? 0 : take_header(a);
}

static int on_headers_complete(llhttp_t *h)
{
    struct http_answer *a = h->data;
    a->status = llhttp_get_status_code(h);
    h->upgrade = 0;
    if (a->status < 100 || a->status == 101) return answer_fail(a, ERR_IO);
    if (a->status < 200) { /* the real answer follows */
        buf_clear(&a->type);
        buf_clear(&a->headers);
        return 0;
    }
    bool other_coding = (h->flags & F_TRANSFER_ENCODING) && !(h->flags & F_CHUNKED);
    if (llhttp_message_needs_eof(h) || other_coding) return answer_fail(a, ERR_IO);
    a->has_head = true;
    a->length = h->flags & F_CHUNKED ? UINT64_MAX : h->content_length;
    enum status st = a->on_head ? a->on_head(a->arg) : OK;
    return st == OK ? 0 : answer_fail(a, st);
}

static int on_body(llhttp_t *h, const char *at, size_t n)
{
    struct http_answer *a = h->data;
    /* An interim answer has no body, and 204 none whatever its head says. */
    if (!a->has_head || n > a->length - a->n_body) return answer_fail(a, ERR_IO);
    a->n_body += n;
    enum status st = a->on_body ? a->on_body(a->arg, (struct str){ at, n }) : OK;
    return st == OK ? 0 : answer_fail(a, st);
}

static int on_complete(llhttp_t *h)
{
    struct http_answer *a = h->data;
    if (!a->has_head) return 0;
    a->complete = true;
    return HPE_PAUSED;
}

static const llhttp_settings_t ANSWER_SETTINGS = {
    .on_header_field = on_name,
    .on_header_value = on_value,
    .on_header_value_complete = on_value_complete,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_complete,
};

void http_answer_init(struct http_answer *a)
{
    llhttp_init(&a->llhttp, HTTP_RESPONSE, &ANSWER_SETTINGS);
    a->llhttp.data = a;
}

void http_answer_release(struct http_answer *a)
{
    buf_release(&a->type);
    buf_release(&a->headers);
    buf_release(&a->name);
    buf_release(&a->value);
}

enum status http_answer_feed(struct http_answer *a, const char *data, size_t n)
{
    size_t used = 0;
    while (used < n && !a->complete) {
        /* The head is fed in small pieces, so that the body does not count as part of it. */
        size_t piece = n - used;
        if (!a->has_head && piece > 1024) piece = 1024;
        if (!a->has_head && (a->n_head += piece) > HTTP_ANSWER_HEAD_MAX) return ERR_TOO_LONG;
        llhttp_errno_t e = llhttp_execute(&a->llhttp, data + used, piece);
        used += piece;
        if (e != HPE_OK && !a->complete) return a->st != OK ? a->st : ERR_IO;
    }
    return OK;
}
