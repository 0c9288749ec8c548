/* http_get.c - see http_get.h. Thread: main. */
#include "deploy/pull/fetch/http_get.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "shared/base/clock.h"

enum {
    REDIRECTS_MAX = 10,
    BUFFER_BYTES = 256 << 10,
    WINDOW_BYTES_MIN = 1024,   /* fewer in a whole stall time are none */
    ERROR_BYTES_MAX = 1 << 20, /* of a body that is an error: what is longer need not end */
    RETRY_AFTER_MAX_S = 24 * 3600
};

/* ---- the head ---- */

/* A stranger's text as a sentence may show it. */
static void take_text(struct str value, char out[ANSWER_TEXT_MAX])
{
    size_t n = value.n < ANSWER_TEXT_MAX - 1 ? value.n : ANSWER_TEXT_MAX - 1;
    for (size_t i = 0; i < n; i++)
        out[i] = (unsigned char)value.p[i] < ' ' || (unsigned char)value.p[i] >= 0x7f ? '?'
                                                                                      : value.p[i];
    out[n] = 0;
}

static bool take_number(struct str value, uint64_t *out)
{
    int64_t v;
    if (value.n == 0 || !isdigit((unsigned char)value.p[0]) || str_to_i64(value, &v) != OK)
        return false;
    *out = (uint64_t)v;
    return true;
}

/* "bytes 0-99/1000", "bytes 0-99/" followed by '*' */
static void take_range(struct str value, struct answer_head *h)
{
    struct str begin, total = { 0 };
    uint64_t at, n = FILE_SIZE_UNKNOWN;
    if (!str_starts(value, "bytes ")) return;
    value = str_trim(str_sub(value, 6, SIZE_MAX));
    size_t slash = str_find_char(value, '/');
    if (slash == SIZE_MAX || !str_split(&value, '-', &begin) || !take_number(begin, &at)) return;
    slash = str_find_char(value, '/');
    if (slash != SIZE_MAX) total = str_sub(value, slash + 1, SIZE_MAX);
    if (!str_eq_c(total, "*") && !take_number(total, &n)) return;
    h->has_range = true;
    h->range_begin = at;
    h->range_total = n;
}

/* The weak mark and the quotes are no part of what it names. */
static void take_etag(struct str value, char out[ANSWER_TEXT_MAX])
{
    if (str_starts(value, "W/")) value = str_sub(value, 2, SIZE_MAX);
    if (value.n >= 2 && value.p[0] == '"' && value.p[value.n - 1] == '"')
        value = str_sub(value, 1, value.n - 2);
    take_text(value, out);
}

static void begin_head(struct answer_head *h, struct str line)
{
    struct answer_head next = { .linked_size = h->linked_size };
    struct str rest = line, word;
    uint64_t status = 0;
    memcpy(next.linked_etag, h->linked_etag, sizeof next.linked_etag);
    if (str_split(&rest, ' ', &word) && str_split(&rest, ' ', &word) && word.n == 3 &&
        take_number(word, &status))
        next.status = (int)status;
    *h = next;
}

void answer_head_read(struct answer_head *h, struct str line)
{
    struct str name, value = line;
    uint64_t n;
    if (str_starts(line, "HTTP/")) {
        begin_head(h, str_trim(line));
        return;
    }
    if (!str_split(&value, ':', &name) || !value.p) return;
    value = str_trim(value);
    char lower[32];
    if (name.n >= sizeof lower) return;
    for (size_t i = 0; i < name.n; i++) lower[i] = (char)tolower((unsigned char)name.p[i]);
    lower[name.n] = 0;
    if (strcmp(lower, "content-range") == 0) take_range(value, h);
    else if (strcmp(lower, "content-length") == 0) h->has_length = take_number(value, &h->length);
    else if (strcmp(lower, "etag") == 0) take_etag(value, h->etag);
    else if (strcmp(lower, "last-modified") == 0) take_text(value, h->modified);
    else if (strcmp(lower, "x-linked-etag") == 0) take_etag(value, h->linked_etag);
    else if (strcmp(lower, "x-error-code") == 0) take_text(value, h->error_code);
    else if (strcmp(lower, "x-error-message") == 0) take_text(value, h->error_text);
    else if (strcmp(lower, "x-linked-size") == 0 && take_number(value, &n)) h->linked_size = n;
    else if (strcmp(lower, "retry-after") == 0 && take_number(value, &n))
        h->retry_after_s = n > RETRY_AFTER_MAX_S ? RETRY_AFTER_MAX_S : (uint32_t)n;
}

static size_t on_header(char *bytes, size_t size, size_t n, void *arg)
{
    struct http_get *r = arg;
    answer_head_read(&r->head, (struct str){ bytes, size * n });
    return size * n;
}

/* ---- the body ---- */

static bool decide(struct http_get *r, enum get_end verdict, const char *why)
{
    r->verdict = verdict;
    (void)err_set(&r->err, verdict == GET_CHANGED ? ERR_CHECKSUM : ERR_PEER_REFUSED, "%s", why);
    return false;
}

static uint64_t chunk_at(const struct http_get *r)
{
    return part_chunk_begin(r->part, r->chunk) + r->part->chunks[r->chunk].done;
}

/* Without a sum only the head says that the bytes are not of the file whose others are here. */
static bool was_replaced(const struct pull_file *f, const struct answer_head *h)
{
    if (f->sum.kind != SUM_NONE) return false;
    if (f->tag) return h->etag[0] && strcmp(f->tag, h->etag) != 0;
    return f->modified && h->modified[0] && strcmp(f->modified, h->modified) != 0;
}

/* Is the body what was asked for? Called once, before the first byte. */
static bool check_head(struct http_get *r)
{
    const struct answer_head *h = &r->head;
    if (!r->part || h->status == 0) return true;
    if (was_replaced(r->part->file, h))
        return decide(r, GET_CHANGED, "the file was replaced at its source meanwhile");
    if (h->status == 206) {
        if (!h->has_range || h->range_begin != chunk_at(r))
            return decide(r, GET_AGAIN, "the server sent another range than it was asked for");
        if (h->range_total != FILE_SIZE_UNKNOWN && h->range_total != r->part->size)
            return decide(r, GET_CHANGED, "the file has another size than the source said");
        return true;
    }
    if (!r->part->whole && r->part->n_chunks > 1)
        return decide(r, GET_NO_RANGE, "the server does not serve ranges");
    if (chunk_at(r) != 0) return decide(r, GET_NO_RANGE, "the server does not go on with a file");
    if (h->has_length && h->length != r->part->size)
        return decide(r, GET_CHANGED, "the file has another size than the source said");
    return true;
}

static bool take_bytes(struct http_get *r, const char *bytes, size_t n)
{
    if (r->text) {
        if (n > r->text_max - r->text->len)
            return decide(r, GET_REFUSED, "the answer is longer than any of its kind");
        buf_add(r->text, bytes, n);
        return true;
    }
    const uint64_t left = part_chunk_length(r->part, r->chunk) - r->part->chunks[r->chunk].done;
    const size_t some = n < left ? n : (size_t)left;
    if (part_write(r->part, r->chunk, bytes, some, &r->err) != OK) {
        r->verdict = GET_BROKEN;
        return false;
    }
    return n <= left || decide(r, GET_AGAIN, "the server sent more bytes than it was asked for");
}

static size_t on_body(char *bytes, size_t size, size_t n, void *arg)
{
    struct http_get *r = arg;
    n *= size;
    r->n_bytes += n;
    if (r->head.status >= 300) { /* an error: its begin may say why */
        const size_t room = ANSWER_BODY_SHOWN - r->body.len;
        buf_add(&r->body, bytes, n < room ? n : room);
        return r->n_bytes <= ERROR_BYTES_MAX ? n : 0;
    }
    if (r->only_head) return 0;
    if (!r->head_checked && !check_head(r)) return 0;
    r->head_checked = true;
    return take_bytes(r, bytes, n) ? n : 0;
}

/* ---- begin ---- */

static void set_tls(struct http_get *r, const struct http_get_options *o)
{
    if (o->ca_file) r->curl->easy_setopt(r->easy, CURLOPT_CAINFO, o->ca_file);
    if (o->ca_dir) r->curl->easy_setopt(r->easy, CURLOPT_CAPATH, o->ca_dir);
    r->curl->easy_setopt(r->easy, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
}

static void set_protocols(struct http_get *r, const struct http_get_options *o)
{
    const bool secure = strncasecmp(o->url, "https:", 6) == 0;
    r->curl->easy_setopt(r->easy, CURLOPT_PROTOCOLS_STR, o->is_file ? "file" : "http,https");
    r->curl->easy_setopt(r->easy, CURLOPT_REDIR_PROTOCOLS_STR, secure ? "https" : "http,https");
    r->curl->easy_setopt(r->easy, CURLOPT_FOLLOWLOCATION, 1L);
    r->curl->easy_setopt(r->easy, CURLOPT_MAXREDIRS, (long)REDIRECTS_MAX);
    /* Several transfers of one HTTP/2 connection would share its one TCP stream. */
    r->curl->easy_setopt(r->easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
}

void http_get_begin(struct http_get *r, const struct http_get_options *o, uint64_t now_ms)
{
    const struct curl_library *curl = r->curl;
    char range[64];
    curl->easy_reset(r->easy);
    r->head = (struct answer_head){ .linked_size = FILE_SIZE_UNKNOWN };
    r->head_checked = false;
    r->verdict = GET_DONE;
    r->err = (struct err){ 0 };
    buf_clear(&r->body);
    r->url = o->url;
    r->direct = o->direct;
    r->n_bytes = r->window_bytes = 0;
    r->begun_ms = r->window_ms = now_ms;
    r->curl_text[0] = 0;
    r->busy = true;
    curl->easy_setopt(r->easy, CURLOPT_URL, o->url);
    set_protocols(r, o);
    set_tls(r, o);
    curl->easy_setopt(r->easy, CURLOPT_NOSIGNAL, 1L);
    curl->easy_setopt(r->easy, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    curl->easy_setopt(r->easy, CURLOPT_CONNECTTIMEOUT_MS, (long)o->connect_ms);
    curl->easy_setopt(r->easy, CURLOPT_BUFFERSIZE, (long)BUFFER_BYTES);
    curl->easy_setopt(r->easy, CURLOPT_USERAGENT, "baton/" BATON_VERSION);
    curl->easy_setopt(r->easy, CURLOPT_ERRORBUFFER, r->curl_text);
    curl->easy_setopt(r->easy, CURLOPT_HEADERFUNCTION, on_header);
    curl->easy_setopt(r->easy, CURLOPT_HEADERDATA, r);
    curl->easy_setopt(r->easy, CURLOPT_WRITEFUNCTION, on_body);
    curl->easy_setopt(r->easy, CURLOPT_WRITEDATA, r);
    curl->easy_setopt(r->easy, CURLOPT_PRIVATE, r);
    if (o->is_ranged) {
        snprintf(range, sizeof range, "%" PRIu64 "-%" PRIu64, o->begin, o->end - 1);
        curl->easy_setopt(r->easy, CURLOPT_RANGE, range);
    }
    /* libcurl keeps such a header from other hosts that a redirect leads to. */
    if (o->auth[0]) r->headers = curl->slist_append(NULL, o->auth);
    if (r->headers) curl->easy_setopt(r->easy, CURLOPT_HTTPHEADER, r->headers);
}

void http_get_clear(struct http_get *r)
{
    if (r->headers) {
        r->curl->easy_setopt(r->easy, CURLOPT_HTTPHEADER, NULL);
        r->curl->slist_free_all(r->headers);
    }
    r->headers = NULL;
    r->busy = false;
    r->part = NULL;
    r->text = NULL;
    r->only_head = false;
}

/* ---- end ---- */

bool http_get_is_stalled(struct http_get *r, uint32_t stall_ms, uint64_t now_ms)
{
    const uint64_t limit = r->n_bytes ? stall_ms : 3 * (uint64_t)stall_ms;
    if (r->n_bytes - r->window_bytes >= WINDOW_BYTES_MIN) {
        r->window_bytes = r->n_bytes;
        r->window_ms = now_ms;
    }
    if (now_ms - r->window_ms < limit) return false;
    r->verdict = GET_AGAIN;
    (void)err_set(&r->err, ERR_TIMEOUT, "no byte came for %.1f s", (double)limit / 1000);
    return true;
}

/* Names of hosts, certificates and addresses: the same next time. */
static bool is_broken_here(CURLcode code)
{
    switch (code) {
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_URL_MALFORMAT:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_TOO_MANY_REDIRECTS:
    case CURLE_OUT_OF_MEMORY:
    case CURLE_FILE_COULDNT_READ_FILE: return true;
    default: return false;
    }
}

static enum get_end end_of_status(struct http_get *r)
{
    const int status = r->head.status;
    char text[ANSWER_TEXT_MAX];
    const char *said = r->head.error_text;
    if (!said[0] && r->body.len && r->body.data[0] != '<') { /* no page of HTML */
        take_text(str_sub(str_trim(buf_str(&r->body)), 0, 160), text);
        said = text;
    }
    (void)err_set(&r->err, ERR_PEER_REFUSED, "the server answers %d%s%s", status,
                  said[0] ? ": " : "", said);
    return status == 408 || status == 425 || status == 429 || status >= 500 ? GET_AGAIN
                                                                            : GET_REFUSED;
}

static bool is_short(const struct http_get *r)
{
    return r->part && !part_chunk_is_done(r->part, r->chunk);
}

enum get_end http_get_end(struct http_get *r, CURLcode code)
{
    if (r->verdict != GET_DONE) return r->verdict;
    if (r->head.status >= 300 && !is_broken_here(code)) return end_of_status(r);
    if (code == CURLE_WRITE_ERROR && r->only_head) return GET_DONE;
    if (code == CURLE_OK && !is_short(r)) return GET_DONE;
    const char *why = r->curl_text[0] ? r->curl_text : r->curl->easy_strerror(code);
    if (code == CURLE_OK) why = "the answer ended early";
    (void)err_set(&r->err, is_broken_here(code) ? ERR_PEER_REFUSED : ERR_PEER_LOST, "%s", why);
    return is_broken_here(code) ? GET_BROKEN : GET_AGAIN;
}
