/* http_client.c - see http_client.h.
 *
 * One request occupies one connection. Idle connections are read, to notice that the peer closed
 * them. When the peer closes just as a request is sent, the request is sent once more on a fresh
 * connection if its method is safe to repeat. Connections outlive http_client_free until their
 * close callbacks have run. Thread: loop. */
#include "shared/net/http/http_client.h"

#include <llhttp.h>
#include <string.h>

#include "shared/base/list.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum { CLIENT_REQUESTS_MAX = 1024, CLIENT_HEAD_MAX = 65536 };

struct client_request {
    struct list link; /* of http_client.requests */
    struct http_client *client;
    struct client_conn *conn;
    struct loop_timer *deadline;
    http_client_fn *cb;
    void *arg;
    struct buf bytes, body;
    char *host;
    uint16_t port;
    int status;
    size_t n_head;
    bool is_head, repeatable, headers_done, complete;
    enum status st; /* why the parser stopped */
};

struct client_conn {
    struct list link; /* of http_client.conns or .idle */
    struct http_client *client;
    struct client_request *request;
    uv_tcp_t tcp;
    uv_connect_t connect;
    uv_getaddrinfo_t resolve;
    uv_write_t write;
    struct buf out; /* libuv reads it until the write is done */
    llhttp_t llhttp;
    char *host;
    uint16_t port;
    uint32_t n_refs; /* the tcp handle; a name being resolved */
    bool closing, used, writing, keep;
};

struct http_client {
    struct http_client_options o;
    struct list requests, conns, idle; /* idle: least recently used first */
    uint32_t n_requests, n_conns, n_idle;
    bool freed;
    char read_buf[65536];
};

static enum status client_begin(struct client_request *r, bool fresh);

static void client_conn_unref(struct client_conn *k)
{
    if (--k->n_refs > 0) return;
    struct http_client *c = k->client;
    buf_release(&k->out);
    mem_free(k->host);
    mem_free(k);
    if (--c->n_conns == 0 && c->freed) mem_free(c);
}

static void client_conn_on_closed(uv_handle_t *h) { client_conn_unref(h->data); }

static void client_conn_close(struct client_conn *k, bool idle)
{
    if (k->closing) return;
    k->closing = true;
    if (idle) k->client->n_idle--;
    list_remove(&k->link);
    if (k->n_refs > 1) uv_cancel((uv_req_t *)&k->resolve);
    uv_close((uv_handle_t *)&k->tcp, client_conn_on_closed);
}

static void client_conn_keep(struct client_conn *k)
{
    struct http_client *c = k->client;
    k->request = NULL;
    k->used = true;
    buf_clear(&k->out);
    if (c->freed || c->o.n_idle == 0) {
        client_conn_close(k, false);
        return;
    }
    if (c->n_idle >= c->o.n_idle)
        client_conn_close(LIST_FIRST(&c->idle, struct client_conn, link), true);
    list_remove(&k->link);
    list_push(&c->idle, &k->link);
    c->n_idle++;
}

/* Every request ends here. */
static void client_request_finish(struct client_request *r, enum status st)
{
    struct client_conn *k = r->conn;
    list_remove(&r->link);
    r->client->n_requests--;
    loop_timer_free(r->deadline);
    if (k) {
        k->request = NULL;
        if (st == OK && k->keep && !k->writing) client_conn_keep(k);
        else client_conn_close(k, false);
    }
    r->cb(r->arg, st, st == OK ? r->status : 0,
          st == OK ? buf_str(&r->body) : (struct str){ NULL, 0 });
    buf_release(&r->bytes);
    buf_release(&r->body);
    mem_free(r->host);
    mem_free(r);
}

static void client_request_on_deadline(void *arg) { client_request_finish(arg, ERR_TIMEOUT); }

/* The connection failed before any byte of the answer. */
static void client_request_retry_or_fail(struct client_request *r)
{
    struct client_conn *k = r->conn;
    bool again = k->used && r->repeatable && r->n_head == 0;
    k->request = NULL;
    r->conn = NULL;
    client_conn_close(k, false);
    enum status st = again ? client_begin(r, true) : ERR_PEER_LOST;
    if (st != OK) client_request_finish(r, st);
}

static int answer_on_headers(llhttp_t *h)
{
    struct client_conn *k = h->data;
    struct client_request *r = k->request;
    r->status = llhttp_get_status_code(h);
    h->upgrade = 0;
    if (r->status == 101) {
        r->st = ERR_IO; /* the client never asks for another protocol */
        return HPE_USER;
    }
    k->keep = llhttp_should_keep_alive(h) != 0;
    r->headers_done = r->status >= 200;
    return r->is_head ? 1 : 0;
}

static int answer_on_body(llhttp_t *h, const char *at, size_t n)
{
    struct client_conn *k = h->data;
    struct client_request *r = k->request;
    if (n > k->client->o.body_max - r->body.len) {
        r->st = ERR_TOO_LONG;
        return HPE_USER;
    }
    buf_add(&r->body, at, n);
    return 0;
}

static int answer_on_complete(llhttp_t *h)
{
    struct client_conn *k = h->data;
    if (k->request->status < 200) return 0; /* an interim answer; the real one follows */
    k->request->complete = true;
    return HPE_PAUSED;
}

static const llhttp_settings_t ANSWER_SETTINGS = {
    .on_headers_complete = answer_on_headers,
    .on_body = answer_on_body,
    .on_message_complete = answer_on_complete,
};

static void client_conn_on_data(struct client_conn *k, const char *p, size_t n)
{
    struct client_request *r = k->request;
    if (!r) {
        client_conn_close(k, true); /* an answer without a request */
        return;
    }
    if (!r->headers_done) r->n_head += n;
    r->st = OK;
    llhttp_errno_t e = llhttp_execute(&k->llhttp, p, n);
    if (r->complete) {
        /* Bytes after the answer: the connection is out of sync. */
        if (llhttp_get_error_pos(&k->llhttp) != p + n) k->keep = false;
        client_request_finish(r, OK);
    } else if (e != HPE_OK) {
        client_request_finish(r, r->st != OK ? r->st : ERR_IO);
    } else if (!r->headers_done && r->n_head > CLIENT_HEAD_MAX) {
        client_request_finish(r, ERR_TOO_LONG);
    }
}

static void client_conn_on_end(struct client_conn *k)
{
    struct client_request *r = k->request;
    k->keep = false;
    if (!r) {
        client_conn_close(k, true);
        return;
    }
    if (r->headers_done)
        llhttp_finish(&k->llhttp); /* completes a body that ends with the connection */
    if (r->complete) client_request_finish(r, OK);
    else client_request_retry_or_fail(r);
}

static void client_conn_on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *out)
{
    struct client_conn *k = h->data;
    (void)suggested;
    *out = uv_buf_init(k->client->read_buf, sizeof k->client->read_buf);
}

static void client_conn_on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *b)
{
    struct client_conn *k = stream->data;
    if (n == 0 || k->closing) return;
    if (n > 0) client_conn_on_data(k, b->base, (size_t)n);
    else client_conn_on_end(k);
}

static void client_conn_on_written(uv_write_t *w, int rc)
{
    struct client_conn *k = w->handle->data;
    k->writing = false;
    if (rc != 0 && !k->closing && k->request) client_request_retry_or_fail(k->request);
}

static enum status client_conn_send(struct client_conn *k)
{
    buf_clear(&k->out);
    buf_add_str(&k->out, buf_str(&k->request->bytes));
    llhttp_init(&k->llhttp, HTTP_RESPONSE, &ANSWER_SETTINGS);
    k->llhttp.data = k;
    k->keep = false;
    uv_buf_t b = { .base = k->out.data, .len = k->out.len };
    if (uv_write(&k->write, (uv_stream_t *)&k->tcp, &b, 1, client_conn_on_written) != 0)
        return ERR_PEER_LOST;
    k->writing = true;
    return OK;
}

static void client_conn_on_connect(uv_connect_t *req, int rc)
{
    struct client_conn *k = req->handle->data;
    if (k->closing || !k->request) return;
    uv_tcp_nodelay(&k->tcp, 1);
    if (rc == 0)
        rc = uv_read_start((uv_stream_t *)&k->tcp, client_conn_on_alloc, client_conn_on_read);
    if (rc != 0 || client_conn_send(k) != OK) client_request_finish(k->request, ERR_PEER_LOST);
}

static enum status client_conn_connect(struct client_conn *k, const struct sockaddr *a)
{
    return uv_tcp_connect(&k->connect, &k->tcp, a, client_conn_on_connect) == 0 ? OK
                                                                                : ERR_PEER_LOST;
}

static void client_conn_on_resolved(uv_getaddrinfo_t *req, int rc, struct addrinfo *list)
{
    struct client_conn *k = req->data;
    enum status st = rc == 0 ? OK : ERR_PEER_LOST;
    if (!k->closing && st == OK) st = client_conn_connect(k, list->ai_addr);
    if (list) uv_freeaddrinfo(list);
    if (!k->closing && k->request && st != OK) client_request_finish(k->request, st);
    client_conn_unref(k);
}

static enum status client_conn_resolve(struct client_conn *k)
{
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC,
        .ai_socktype = SOCK_STREAM,
        .ai_flags = AI_NUMERICSERV,
    };
    char service[8];
    snprintf(service, sizeof service, "%u", k->port);
    k->resolve.data = k;
    if (uv_getaddrinfo(loop_uv(k->client->o.loop), &k->resolve, client_conn_on_resolved, k->host,
                       service, &hints) != 0)
        return ERR_PEER_LOST;
    k->n_refs++;
    return OK;
}

static enum status client_conn_open(struct client_request *r)
{
    struct http_client *c = r->client;
    struct client_conn *k = mem_try_calloc(1, sizeof *k);
    if (!k) return ERR_NOMEM;
    k->client = c;
    k->host = mem_strdup(r->host);
    k->port = r->port;
    k->request = r;
    k->n_refs = 1;
    uv_tcp_init(loop_uv(c->o.loop), &k->tcp);
    k->tcp.data = k;
    c->n_conns++;
    list_push(&c->conns, &k->link);
    struct sockaddr_storage a;
    enum status st;
    if (uv_ip4_addr(k->host, k->port, (struct sockaddr_in *)&a) == 0 ||
        uv_ip6_addr(k->host, k->port, (struct sockaddr_in6 *)&a) == 0)
        st = client_conn_connect(k, (const struct sockaddr *)&a);
    else st = client_conn_resolve(k);
    if (st != OK) client_conn_close(k, false);
    else r->conn = k;
    return st;
}

static enum status client_begin(struct client_request *r, bool fresh)
{
    struct http_client *c = r->client;
    struct client_conn *k = NULL;
    LIST_FOREACH (it, &c->idle, struct client_conn, link)
        if (!fresh && it->port == r->port && strcmp(it->host, r->host) == 0)
            k = it; /* the most recently used one */
    if (!k) return client_conn_open(r);
    c->n_idle--;
    list_remove(&k->link);
    list_push(&c->conns, &k->link);
    k->request = r;
    r->conn = k;
    if (client_conn_send(k) == OK) return OK;
    r->conn = NULL;
    k->request = NULL;
    client_conn_close(k, false);
    return client_conn_open(r);
}

struct http_client *http_client_create(const struct http_client_options *o)
{
    struct http_client *c = MEM_NEW(struct http_client);
    c->o = *o;
    list_init(&c->requests);
    list_init(&c->conns);
    list_init(&c->idle);
    return c;
}

void http_client_free(struct http_client *c)
{
    if (!c) return;
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(!c->freed);
    c->freed = true;
    c->n_conns++; /* held while callbacks run */
    while (!list_empty(&c->requests))
        client_request_finish(LIST_FIRST(&c->requests, struct client_request, link), ERR_CANCELED);
    while (!list_empty(&c->idle))
        client_conn_close(LIST_FIRST(&c->idle, struct client_conn, link), true);
    if (--c->n_conns == 0) mem_free(c);
}

/* Rejects line breaks and blanks: parts of the path and headers come from configuration. */
static bool client_request_is_safe(const char *method, const char *host, const char *path,
                                   const char *headers)
{
    for (const char *p = path; *p; p++)
        if ((unsigned char)*p <= ' ' || *p == 0x7f) return false;
    if (path[0] != '/' || method[0] == 0 || host[0] == 0 || strpbrk(method, " \r\n") ||
        strpbrk(host, " \r\n/"))
        return false;
    size_t n = headers ? strlen(headers) : 0;
    return n == 0 ||
           (n > 2 && strcmp(headers + n - 2, "\r\n") == 0 && !strstr(headers, "\r\n\r\n"));
}

static void client_request_write(struct client_request *r, const char *method, const char *path,
                                 const char *headers, struct str body)
{
    bool is_ip6 = strchr(r->host, ':') != NULL,
         bodiless = body.n == 0 && (strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0);
    buf_printf(&r->bytes, "%s %s HTTP/1.1\r\nHost: %s%s%s:%u\r\n", method, path, is_ip6 ? "[" : "",
               r->host, is_ip6 ? "]" : "", r->port);
    if (headers) buf_add_c(&r->bytes, headers);
    if (!bodiless) buf_printf(&r->bytes, "Content-Length: %zu\r\n", body.n);
    buf_add_c(&r->bytes, "\r\n");
    buf_add_str(&r->bytes, body);
}

enum status http_client_request(struct http_client *c, const char *method, const char *host,
                                uint16_t port, const char *path, const char *headers,
                                struct str body, uint32_t timeout_ms, http_client_fn *cb, void *arg)
{
    ASSERT_THREAD(THREAD_LOOP);
    if (c->freed) return ERR_CANCELED;
    if (c->n_requests >= CLIENT_REQUESTS_MAX) return ERR_BUSY;
    if (!client_request_is_safe(method, host, path, headers)) return ERR_INVALID;
    struct client_request *r = mem_try_calloc(1, sizeof *r);
    if (!r) return ERR_NOMEM;
    *r = (struct client_request){
        .client = c, .cb = cb, .arg = arg, .host = mem_strdup(host), .port = port
    };
    r->is_head = strcmp(method, "HEAD") == 0;
    r->repeatable = r->is_head || strcmp(method, "GET") == 0 || strcmp(method, "PUT") == 0 ||
                    strcmp(method, "DELETE") == 0;
    client_request_write(r, method, path, headers, body);
    enum status st = client_begin(r, false);
    if (st != OK) {
        buf_release(&r->bytes);
        mem_free(r->host);
        mem_free(r);
        return st;
    }
    r->deadline = loop_timer_start(c->o.loop, timeout_ms, 0, client_request_on_deadline, r);
    list_push(&c->requests, &r->link);
    c->n_requests++;
    return OK;
}
