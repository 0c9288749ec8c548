/* unproven.c - see unproven.h. */
#include "shared/base/address/unproven.h"

#include <netinet/in.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"

enum { COUNTS_MAX = 2 * UNPROVEN_MAX }; /* a power of two, so that a chain of counts stays short */

/* How many places a source has. */
struct count {
    struct unproven_place *oldest; /* NULL: free */
    uint32_t n;
};

void unproven_init(struct unproven *u, uint32_t n_max)
{
    ASSERT(n_max > 0);
    list_init(&u->places);
    u->n = 0;
    u->n_max = n_max < UNPROVEN_MAX ? n_max : UNPROVEN_MAX;
    u->n_max_per_source = (u->n_max + 1) / 2;
}

/* Returns the oldest place of `source`, and how many it has. */
static struct unproven_place *oldest_of(const struct unproven *u, uint64_t source, uint32_t *n)
{
    struct unproven_place *oldest = NULL;
    *n = 0;
    LIST_FOREACH (p, &u->places, struct unproven_place, link) {
        if (p->source != source) continue;
        if (!oldest) oldest = p;
        ++*n;
    }
    return oldest;
}

/* Returns the oldest place of the source that has most. One pass, however many sources there
 * are. */
static struct unproven_place *oldest_of_most(const struct unproven *u)
{
    struct count counts[COUNTS_MAX] = { 0 };
    const struct count *most = NULL;
    LIST_FOREACH (p, &u->places, struct unproven_place, link) {
        size_t at = hash_64(&p->source, sizeof p->source, 0) % COUNTS_MAX;
        while (counts[at].oldest && counts[at].oldest->source != p->source)
            at = (at + 1) % COUNTS_MAX;
        if (!counts[at].oldest) counts[at].oldest = p;
        counts[at].n++;
        if (!most || counts[at].n > most->n) most = &counts[at];
    }
    return most ? most->oldest : NULL;
}

struct unproven_place *unproven_enter(struct unproven *u, struct unproven_place *newcomer,
                                      uint64_t source)
{
    uint32_t n_of_source;
    struct unproven_place *gives = oldest_of(u, source, &n_of_source);
    if (n_of_source < u->n_max_per_source) gives = u->n < u->n_max ? NULL : oldest_of_most(u);
    if (gives) unproven_leave(gives);
    *newcomer = (struct unproven_place){ .of = u, .source = source };
    list_push(&u->places, &newcomer->link);
    u->n++;
    return gives;
}

void unproven_leave(struct unproven_place *p)
{
    if (!p->of) return;
    list_remove(&p->link);
    p->of->n--;
    p->of = NULL;
}

uint64_t unproven_source(const struct sockaddr *address)
{
    uint64_t source = 0;
    if (address->sa_family == AF_INET) {
        memcpy(&source, &((const struct sockaddr_in *)(const void *)address)->sin_addr, 4);
    } else if (address->sa_family == AF_INET6) {
        const struct in6_addr *a = &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;
        if (IN6_IS_ADDR_V4MAPPED(a)) memcpy(&source, a->s6_addr + 12, 4);
        else memcpy(&source, a->s6_addr, sizeof source);
    }
    return source;
}
