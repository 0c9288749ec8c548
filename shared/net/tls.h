/* tls.h - the client's side of TLS, apart from any socket: what the network brings and what it has
 * to carry pass through memory, so that one stream serves plain and encrypted connections.
 *
 *     socket ──received──▶ tls_session_receive ──▶ plain bytes
 *     socket ◀──tls_session_take_output── tls_session_send ◀── plain bytes
 *
 * TLS 1.2 is the least. The server's certificate must lead to a CA that the client trusts and must
 * be for the name, or the address, under which the server was called; that cannot be left out.
 * LIMIT: files are read once, when the client is created; renewed ones need a new client.
 * Thread: the owner's. */
#ifndef BATON_NET_TLS_H
#define BATON_NET_TLS_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

struct tls_client;  /* what the connections of one owner share: trusted CAs, its own certificate */
struct tls_session; /* one connection */

struct tls_client_options {
    const char *ca_file;              /* PEM; NULL or "": the CAs that this host trusts */
    const char *cert_file, *key_file; /* PEM, both or none: the client's own certificate */
};

/* ERR_CONFIG: a file cannot be used; err->field is "ca", "cert" or "key". */
enum status tls_client_create(const struct tls_client_options *o, struct tls_client **out,
                              struct err *err) MUST_CHECK;
/* Sessions live on without it. */
void tls_client_free(struct tls_client *c);

/* Begins a handshake; its first bytes are output at once. `server`: a name, which is also sent
 * (SNI), or an IP address without brackets. */
enum status tls_session_create(struct tls_client *c, const char *server, struct tls_session **out,
                               struct err *err) MUST_CHECK;
void tls_session_free(struct tls_session *s);
/* Takes n bytes from the network, goes on with the handshake and appends what the server sent to
 * `plain`. After an error the connection is over, and err says why. ERR_PEER_LOST: the server ended
 * it in order; ERR_PEER_REFUSED: one side refuses the other, or what came is not TLS. Output may
 * have to be sent all the same (an alert). */
enum status tls_session_receive(struct tls_session *s, const char *bytes, size_t n,
                                struct buf *plain, struct err *err) MUST_CHECK;
/* Encrypts; only after the handshake. */
enum status tls_session_send(struct tls_session *s, const char *bytes, size_t n,
                             struct err *err) MUST_CHECK;
/* Appends to `out` what has to be sent to the server, and forgets it. */
void tls_session_take_output(struct tls_session *s, struct buf *out);
/* Is the handshake done, and the server verified? */
bool tls_session_is_up(const struct tls_session *s);
/* "TLSv1.3"; valid as long as the program runs. */
const char *tls_session_version(const struct tls_session *s);

#endif
