/* tls.c - see tls.h: OpenSSL between two memory BIOs. Thread: the owner's. */
#include "shared/net/tls.h"

#include <errno.h>
#include <limits.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <string.h>

#include "shared/base/address/host_port.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

struct tls_client {
    SSL_CTX *ctx;
};

struct tls_session {
    SSL *ssl;
    BIO *in, *out; /* owned by ssl */
    char server[HOST_TEXT_MAX];
};

/* A key with a pass phrase would be asked for on the terminal. */
static int no_pass_phrase(char *out, int cap, int writing, void *arg)
{
    (void)out;
    (void)cap;
    (void)writing;
    (void)arg;
    return 0;
}

/* The first reason that OpenSSL noted: the later ones only say which function passed it on. */
static const char *tls_reason(void)
{
    unsigned long e = ERR_peek_error();
    const char *why = ERR_SYSTEM_ERROR(e) ? strerror(ERR_GET_REASON(e))
                                          : ERR_reason_error_string(e);
    ERR_clear_error();
    return why ? why : "OpenSSL gives no reason";
}

static enum status refuse_file(struct err *err, const char *field, const char *what,
                               const char *path)
{
    return err_field(err, ERR_CONFIG, field, "%s %s cannot be used: %s", path, what, tls_reason());
}

static enum status client_trust(SSL_CTX *ctx, const char *ca, struct err *err)
{
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER, NULL);
    if (ca && *ca) {
        if (SSL_CTX_load_verify_locations(ctx, ca, NULL) == 1) return OK;
        return refuse_file(err, "ca", "as a file of CAs in PEM form", ca);
    }
    if (SSL_CTX_set_default_verify_paths(ctx) == 1) return OK;
    return err_field(err, ERR_CONFIG, "ca", "the CAs that this host trusts cannot be read: %s",
                     tls_reason());
}

static enum status client_identify(SSL_CTX *ctx, const char *cert, const char *key, struct err *err)
{
    const bool has_cert = cert && *cert, has_key = key && *key;
    if (!has_cert && !has_key) return OK;
    if (!has_key)
        return err_field(err, ERR_CONFIG, "key", "the certificate %s was given without its key",
                         cert);
    if (!has_cert)
        return err_field(err, ERR_CONFIG, "cert", "the key %s was given without its certificate",
                         key);
    if (SSL_CTX_use_certificate_chain_file(ctx, cert) != 1)
        return refuse_file(err, "cert", "as a certificate in PEM form", cert);
    /* A key of the certificate's type is compared with it as it is read, another one is not. */
    if (SSL_CTX_use_PrivateKey_file(ctx, key, SSL_FILETYPE_PEM) != 1 &&
        ERR_GET_REASON(ERR_peek_error()) != X509_R_KEY_VALUES_MISMATCH)
        return refuse_file(err, "key", "as a key in PEM form without a pass phrase", key);
    if (SSL_CTX_check_private_key(ctx) == 1) return OK;
    ERR_clear_error();
    return err_field(err, ERR_CONFIG, "key", "the key %s does not belong to the certificate %s",
                     key, cert);
}

enum status tls_client_create(const struct tls_client_options *o, struct tls_client **out,
                              struct err *err)
{
    ERR_clear_error();
    SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
    if (!ctx || SSL_CTX_set_min_proto_version(ctx, TLS1_2_VERSION) != 1) {
        SSL_CTX_free(ctx);
        return err_set(err, ERR_NODEV, "OpenSSL offers no TLS 1.2 here: %s", tls_reason());
    }
    SSL_CTX_set_default_passwd_cb(ctx, no_pass_phrase);
    enum status st = client_trust(ctx, o->ca_file, err);
    if (st == OK) st = client_identify(ctx, o->cert_file, o->key_file, err);
    if (st != OK) {
        SSL_CTX_free(ctx);
        return st;
    }
    *out = MEM_NEW(struct tls_client);
    (*out)->ctx = ctx;
    return OK;
}

void tls_client_free(struct tls_client *c)
{
    if (!c) return;
    SSL_CTX_free(c->ctx);
    mem_free(c);
}

/* The certificate has to be for `server`. Returns whether OpenSSL took that. */
static bool session_name(struct tls_session *s)
{
    X509_VERIFY_PARAM *p = SSL_get0_param(s->ssl);
    if (host_is_number(s->server)) return X509_VERIFY_PARAM_set1_ip_asc(p, s->server) == 1;
    X509_VERIFY_PARAM_set_hostflags(p, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    return X509_VERIFY_PARAM_set1_host(p, s->server, 0) == 1 &&
           SSL_set_tlsext_host_name(s->ssl, s->server) == 1;
}

enum status tls_session_create(struct tls_client *c, const char *server, struct tls_session **out,
                               struct err *err)
{
    struct tls_session *s = MEM_NEW(struct tls_session);
    struct buf none = { 0 };
    if (!host_copy(server, s->server)) s->server[0] = 0; /* which is refused as a name */
    ERR_clear_error();
    s->ssl = SSL_new(c->ctx);
    s->in = BIO_new(BIO_s_mem());
    s->out = BIO_new(BIO_s_mem());
    if (!s->ssl || !s->in || !s->out || !s->server[0] || !session_name(s)) {
        BIO_free(s->in);
        BIO_free(s->out);
        SSL_free(s->ssl);
        mem_free(s);
        return err_set(err, ERR_INVALID, "no TLS session for the server %.80s: %s", server,
                       tls_reason());
    }
    BIO_set_mem_eof_return(s->in, -1); /* an empty BIO waits for more, it has not ended */
    BIO_set_mem_eof_return(s->out, -1);
    SSL_set_bio(s->ssl, s->in, s->out);
    SSL_set_connect_state(s->ssl);
    enum status st = tls_session_receive(s, "", 0, &none, err); /* writes the first bytes */
    buf_release(&none);
    if (st == OK) *out = s;
    else tls_session_free(s);
    return st;
}

void tls_session_free(struct tls_session *s)
{
    if (!s) return;
    SSL_free(s->ssl);
    mem_free(s);
}

/* A sentence for what ended the session. */
static enum status session_refuse(const struct tls_session *s, int rc, struct err *err)
{
    const int kind = SSL_get_error(s->ssl, rc);
    const long verified = SSL_get_verify_result(s->ssl);
    if (kind == SSL_ERROR_ZERO_RETURN)
        return err_set(err, ERR_PEER_LOST, "the server ended the TLS connection");
    const int reason = ERR_GET_REASON(ERR_peek_error());
    const char *why = tls_reason();
    if (verified != X509_V_OK)
        return err_set(err, ERR_PEER_REFUSED, "the certificate of the server %s is refused: %s",
                       s->server, X509_verify_cert_error_string(verified));
    if (reason == SSL_R_WRONG_VERSION_NUMBER)
        return err_set(err, ERR_PEER_REFUSED, "the server does not speak TLS at this port");
    if (reason >= SSL_AD_REASON_OFFSET) /* it has sent an alert */
        return err_set(err, ERR_PEER_REFUSED, "the server refuses the TLS connection: %s", why);
    return err_set(err, ERR_PEER_REFUSED, "the TLS connection failed: %s", why);
}

static bool session_waits(const struct tls_session *s, int rc)
{
    const int kind = SSL_get_error(s->ssl, rc);
    return kind == SSL_ERROR_WANT_READ || kind == SSL_ERROR_WANT_WRITE;
}

enum status tls_session_receive(struct tls_session *s, const char *bytes, size_t n,
                                struct buf *plain, struct err *err)
{
    enum { PIECE = 16384 }; /* of plain text in a TLS record */
    ERR_clear_error();
    ASSERT(n <= INT_MAX);
    if (n > 0 && BIO_write(s->in, bytes, (int)n) != (int)n)
        return err_set(err, ERR_NOMEM, "no memory for %zu bytes of a TLS connection", n);
    if (!SSL_is_init_finished(s->ssl)) {
        const int rc = SSL_do_handshake(s->ssl);
        if (rc != 1) return session_waits(s, rc) ? OK : session_refuse(s, rc, err);
    }
    for (;;) {
        char *room = buf_reserve(plain, PIECE);
        const int got = SSL_read(s->ssl, room, PIECE);
        if (got <= 0) return session_waits(s, got) ? OK : session_refuse(s, got, err);
        plain->len += (size_t)got;
        plain->data[plain->len] = 0;
    }
}

enum status tls_session_send(struct tls_session *s, const char *bytes, size_t n, struct err *err)
{
    ASSERT(tls_session_is_up(s));
    ERR_clear_error();
    for (size_t at = 0; at < n;) {
        const int piece = (int)(n - at < INT_MAX ? n - at : INT_MAX),
                  sent = SSL_write(s->ssl, bytes + at, piece);
        if (sent <= 0) return session_refuse(s, sent, err);
        at += (size_t)sent;
    }
    return OK;
}

void tls_session_take_output(struct tls_session *s, struct buf *out)
{
    char *bytes;
    const long n = BIO_get_mem_data(s->out, &bytes);
    if (n > 0) buf_add(out, bytes, (size_t)n);
    (void)BIO_reset(s->out);
}

bool tls_session_is_up(const struct tls_session *s) { return SSL_is_init_finished(s->ssl) != 0; }

const char *tls_session_version(const struct tls_session *s) { return SSL_get_version(s->ssl); }
