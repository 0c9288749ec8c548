/* http_clients.c - see http_clients.h. Thread: loop. */
#include "shared/net/http/http_clients.h"

#include <netinet/in.h>
#include <string.h>

#include "shared/base/mem.h"

enum { IPV6_NETWORK_BYTES = 8 };

static struct str address_key(const struct sockaddr_storage *a)
{
    static const uint8_t mapped[12] = { [10] = 0xFF, [11] = 0xFF }; /* ::ffff:0:0/96 */
    if (a->ss_family == AF_INET)
        return (struct str){ (const char *)&((const struct sockaddr_in *)a)->sin_addr, 4 };
    const char *bytes = (const char *)&((const struct sockaddr_in6 *)a)->sin6_addr;
    if (memcmp(bytes, mapped, sizeof mapped) == 0) return (struct str){ bytes + 12, 4 };
    return (struct str){ bytes, IPV6_NETWORK_BYTES };
}

struct http_client_entry *http_clients_enter(struct map *clients,
                                             const struct sockaddr_storage *address)
{
    struct str key = address_key(address);
    struct http_client_entry *e = map_get(clients, key);
    if (!e) {
        e = MEM_NEW(struct http_client_entry);
        http_turn_init(&e->turn);
        e->n_key = (uint8_t)key.n;
        memcpy(e->key, key.p, key.n);
        map_put(clients, key, e);
    }
    e->n_conns++;
    return e;
}

void http_clients_leave(struct map *clients, struct http_client_entry *e)
{
    if (--e->n_conns > 0) return;
    map_del(clients, (struct str){ e->key, e->n_key });
    mem_free(e);
}
