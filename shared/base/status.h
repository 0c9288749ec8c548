/* status.h - the one list of ways in which a call can end.
 *
 * Every fallible function returns `enum status`: OK is 0, every error is negative. The table below
 * is the only place that holds a code's text, class and HTTP status. The class says what is lost,
 * and so which recovery is possible: scheduler/retry.c chooses by class, never by code.
 * Thread: any (constants). */
#ifndef BATON_BASE_STATUS_H
#define BATON_BASE_STATUS_H

#define MUST_CHECK __attribute__((warn_unused_result))

enum status_class {
    CLASS_OK,
    CLASS_BUSY,    /* nothing is lost: try again later (queue full, would block, no free blocks) */
    CLASS_REQUEST, /* this request only: its input or its deadline is at fault */
    CLASS_PEER,    /* that node or that connection: another node may still do the work */
    CLASS_FATAL    /* this process cannot go on, or not with this configuration */
};

/*        code               number  text                                   class          http */
#define STATUS_TABLE(X)                                                                            \
    X(OK, 0, "ok", CLASS_OK, 200)                                                                  \
    X(ERR_BUSY, -1, "busy, try again", CLASS_BUSY, 429)                                            \
    X(ERR_FULL, -2, "a limit is reached", CLASS_BUSY, 429)                                         \
    X(ERR_UNAVAILABLE, -3, "no node can take the request", CLASS_BUSY, 503)                        \
    X(ERR_INVALID, -4, "invalid argument", CLASS_REQUEST, 400)                                     \
    X(ERR_TOO_LONG, -5, "longer than the limit", CLASS_REQUEST, 400)                               \
    X(ERR_NOT_FOUND, -6, "not found", CLASS_REQUEST, 404)                                          \
    X(ERR_UNSUPPORTED, -7, "not supported", CLASS_REQUEST, 400)                                    \
    X(ERR_FORMAT, -8, "malformed data", CLASS_REQUEST, 400)                                        \
    X(ERR_UNAUTHORIZED, -9, "not authorized", CLASS_REQUEST, 401)                                  \
    X(ERR_TIMEOUT, -10, "deadline passed", CLASS_REQUEST, 504)                                     \
    X(ERR_CANCELED, -11, "canceled", CLASS_REQUEST, 499)                                           \
    X(ERR_NOMEM, -12, "out of memory", CLASS_REQUEST, 503)                                         \
    X(ERR_PEER_LOST, -13, "the peer is gone", CLASS_PEER, 502)                                     \
    X(ERR_PEER_REFUSED, -14, "the peer refused", CLASS_PEER, 502)                                  \
    X(ERR_PEER_MISMATCH, -15, "the peer is not compatible", CLASS_PEER, 502)                       \
    X(ERR_STALE, -16, "of an earlier attempt or generation", CLASS_PEER, 502)                      \
    X(ERR_CHECKSUM, -17, "checksum mismatch", CLASS_PEER, 502)                                     \
    X(ERR_IO, -18, "input/output error", CLASS_PEER, 502)                                          \
    X(ERR_NODEV, -19, "no such device here", CLASS_FATAL, 500)                                     \
    X(ERR_CONFIG, -20, "configuration error", CLASS_FATAL, 500)                                    \
    X(ERR_INTERNAL, -21, "internal error", CLASS_FATAL, 500)                                       \
    X(ERR_CONFLICT, -22, "in conflict with what the client already has", CLASS_REQUEST, 409)

enum status {
#define X(code, number, text, class_, http) code = number,
    STATUS_TABLE(X)
#undef X
};

/* A code's name ("ERR_BUSY"), text, class and HTTP status. Unknown numbers count as
 * ERR_INTERNAL. */
const char *status_name(enum status st);
const char *status_text(enum status st);
enum status_class status_class_of(enum status st);
int status_http(enum status st);

/* If `expr` is not OK, return its status from the calling function. Use only where nothing needs
 * undoing. */
#define TRY(expr)                                                                                  \
    do {                                                                                           \
        enum status try_st_ = (expr);                                                              \
        if (try_st_ != OK) return try_st_;                                                         \
    } while (0)

#endif
