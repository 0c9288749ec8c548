/* host_port.c - see host_port.h. Thread: any. */
#include "shared/base/address/host_port.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/str.h"

bool host_copy(const char *text, char out[HOST_TEXT_MAX])
{
    size_t n = strlen(text);
    bool brackets = n > 2 && text[0] == '[' && text[n - 1] == ']';
    if (brackets) n -= 2;
    if (n >= HOST_TEXT_MAX) return false;
    memcpy(out, text + brackets, n);
    out[n] = 0;
    return true;
}

bool host_port_parse(const char *text, char host[HOST_TEXT_MAX], uint16_t *port)
{
    char name[HOST_TEXT_MAX];
    const char *colon = strrchr(text, ':');
    int64_t number;
    size_t n = colon ? (size_t)(colon - text) : 0;
    if (!colon || n >= sizeof name || str_to_i64(str_of(colon + 1), &number) != OK || number < 0 ||
        number > UINT16_MAX)
        return false;
    memcpy(name, text, n);
    name[n] = 0;
    if (strchr(name, ':') && name[0] != '[') return false;
    *port = (uint16_t)number;
    return host_copy(name, host);
}

bool host_is_ipv6(const char *host) { return strchr(host, ':') != NULL; }

bool host_is_number(const char *host)
{
    struct in6_addr either; /* room for both */
    return inet_pton(AF_INET, host, &either) == 1 || inet_pton(AF_INET6, host, &either) == 1;
}

bool host_is_loopback(const char *host)
{
    struct in_addr v4;
    if (inet_pton(AF_INET, host, &v4) == 1) return ntohl(v4.s_addr) >> 24 == IN_LOOPBACKNET;
    return strcmp(host, "::1") == 0;
}

const char *host_loopback(const char *host) { return host_is_ipv6(host) ? "::1" : "127.0.0.1"; }

const char *host_wildcard(const char *host) { return host_is_ipv6(host) ? "::" : "0.0.0.0"; }

bool host_is_wildcard(const char *host)
{
    return strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0;
}

const char *host_port_text(const char *host, uint16_t port, char out[HOST_PORT_TEXT_MAX])
{
    bool brackets = host_is_ipv6(host) && host[0] != '[';
    snprintf(out, HOST_PORT_TEXT_MAX, "%s%.255s%s:%u", brackets ? "[" : "", host,
             brackets ? "]" : "", port);
    return out;
}
