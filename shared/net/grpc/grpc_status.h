/* grpc_status.h - the ways in which a call of gRPC ends. Thread: any (constants). */
#ifndef BATON_NET_GRPC_GRPC_STATUS_H
#define BATON_NET_GRPC_GRPC_STATUS_H

/* name, number on the wire */
#define GRPC_STATUS_TABLE(X)                                                                       \
    X(OK, 0)                                                                                       \
    X(CANCELLED, 1)                                                                                \
    X(UNKNOWN, 2)                                                                                  \
    X(INVALID_ARGUMENT, 3)                                                                         \
    X(DEADLINE_EXCEEDED, 4)                                                                        \
    X(NOT_FOUND, 5)                                                                                \
    X(ALREADY_EXISTS, 6)                                                                           \
    X(PERMISSION_DENIED, 7)                                                                        \
    X(RESOURCE_EXHAUSTED, 8)                                                                       \
    X(FAILED_PRECONDITION, 9)                                                                      \
    X(ABORTED, 10)                                                                                 \
    X(OUT_OF_RANGE, 11)                                                                            \
    X(UNIMPLEMENTED, 12)                                                                           \
    X(INTERNAL, 13)                                                                                \
    X(UNAVAILABLE, 14)                                                                             \
    X(DATA_LOSS, 15)                                                                               \
    X(UNAUTHENTICATED, 16)

enum grpc_status {
#define X(name, number) GRPC_##name = number,
    GRPC_STATUS_TABLE(X)
#undef X
        GRPC_N_STATUSES
};

/* "INVALID_ARGUMENT" */
const char *grpc_status_name(enum grpc_status st);
/* What an answer of this HTTP status is in gRPC. */
enum grpc_status grpc_status_of_http(int http);

#endif
