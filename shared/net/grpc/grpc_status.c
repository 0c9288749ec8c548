/* grpc_status.c - see grpc_status.h. Thread: any. */
#include "shared/net/grpc/grpc_status.h"

const char *grpc_status_name(enum grpc_status st)
{
    static const char *const names[] = {
#define X(name, number) [number] = #name,
        GRPC_STATUS_TABLE(X)
#undef X
    };
    return (unsigned)st < GRPC_N_STATUSES ? names[st] : "UNKNOWN";
}

enum grpc_status grpc_status_of_http(int http)
{
    switch (http) {
    case 401: return GRPC_UNAUTHENTICATED;
    case 403: return GRPC_PERMISSION_DENIED;
    case 404: return GRPC_NOT_FOUND;
    case 408:
    case 504: return GRPC_DEADLINE_EXCEEDED;
    case 409: return GRPC_ALREADY_EXISTS;
    case 429: return GRPC_RESOURCE_EXHAUSTED;
    case 499: return GRPC_CANCELLED;
    case 501: return GRPC_UNIMPLEMENTED;
    case 502:
    case 503: return GRPC_UNAVAILABLE;
    default: break;
    }
    return http < 400 ? GRPC_OK : http < 500 ? GRPC_INVALID_ARGUMENT : GRPC_INTERNAL;
}
