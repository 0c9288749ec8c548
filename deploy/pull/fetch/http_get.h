/* http_get.h - one GET by libcurl: what is asked for, what the answer's head says, and what an end
 * means for the next try. fetch.c has the connections and decides when to try.
 *
 * Redirects are followed, from https to https alone. Heads are a stranger's: numbers are checked,
 * texts cut and cleaned before anybody sees them.
 * Thread: main. */
#ifndef BATON_DEPLOY_PULL_FETCH_HTTP_GET_H
#define BATON_DEPLOY_PULL_FETCH_HTTP_GET_H

#include "deploy/pull/fetch/curl_library.h"
#include "deploy/pull/fetch/part.h"

enum { ANSWER_TEXT_MAX = 256, ANSWER_BODY_SHOWN = 4096 };

/* Of the last answer; of redirects before it only linked_*. */
struct answer_head {
    int status; /* 0: none came, or no HTTP */
    bool has_range, has_length;
    uint64_t range_begin, range_total; /* Content-Range; total FILE_SIZE_UNKNOWN: "*" */
    uint64_t length;
    uint32_t retry_after_s; /* 0: not said */
    char etag[ANSWER_TEXT_MAX], modified[ANSWER_TEXT_MAX];
    char error_code[ANSWER_TEXT_MAX], error_text[ANSWER_TEXT_MAX]; /* X-Error-Code, -Message */
    char linked_etag[ANSWER_TEXT_MAX];
    uint64_t linked_size;
};

/* What an end means. */
enum get_end {
    GET_DONE,
    GET_AGAIN,    /* broke off, or the server cannot now: try again */
    GET_NO_RANGE, /* the server sends the whole file whatever is asked for */
    GET_REFUSED,  /* the server's answer will be the same next time */
    GET_CHANGED,  /* the file is not the one that the source listed */
    GET_BROKEN    /* here: the disk, a certificate, the address */
};

struct http_get {
    const struct curl_library *curl;
    CURL *easy;
    struct curl_slist *headers;
    bool busy;
    const char *url; /* kept until the end */
    bool direct;     /* the address that a redirect led to, not the source's own */
    /* Into one of: */
    struct part *part;
    uint32_t chunk;
    struct buf *text;
    size_t text_max;
    bool only_head; /* the body is of no use: ends behind the head */
    /* As it comes: */
    struct answer_head head;
    bool head_checked;
    enum get_end verdict; /* of the head and of writing; GET_DONE: nothing against it */
    struct err err;       /* with another verdict */
    struct buf body;      /* the begin of an answer that is an error */
    uint64_t n_bytes;
    uint64_t begun_ms, window_ms, window_bytes; /* for stalls */
    char curl_text[CURL_ERROR_SIZE];
};

struct http_get_options {
    const char *url;
    const char *auth; /* a header line for the host of `url` alone; "" : none */
    bool is_file;     /* a file:// of this host, instead of http and https */
    bool direct;
    bool is_ranged; /* bytes [begin, end) */
    uint64_t begin, end;
    uint32_t connect_ms;
    const char *ca_file, *ca_dir; /* NULL: the system's */
};

/* Sets the handle up for the options; one of part, text and only_head is set by the caller. */
void http_get_begin(struct http_get *r, const struct http_get_options *o, uint64_t now_ms);
/* What the end of the transfer means; says why in r->err unless it is GET_DONE. */
enum get_end http_get_end(struct http_get *r, CURLcode code);
void http_get_clear(struct http_get *r);
/* No byte, or next to none, for so long: ends it with GET_AGAIN if so. Before the answer begins
 * three times as long. */
bool http_get_is_stalled(struct http_get *r, uint32_t stall_ms, uint64_t now_ms);
/* Reads one line of a head into `h`. (For r's own use, and for tests.) */
void answer_head_read(struct answer_head *h, struct str line);

#endif
