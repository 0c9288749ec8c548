/* gid.c - chooses the entry of a port's GID table, and formats links, MTUs and GIDs. Thread: any
 * (pure functions). */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "kvtransfer/rdma/device.h"
#include "shared/base/mem.h"

uint64_t rdma_link_speed(enum rdma_link link, unsigned width, unsigned speed)
{
    static const struct {
        unsigned code, lanes;
    } widths[] = { { 1, 1 }, { 2, 4 }, { 4, 8 }, { 8, 12 }, { 16, 2 } };
    /* Mbit/s of one lane: nominal, and after 8b/10b (up to QDR) or 64b/66b (FDR) coding. */
    static const struct {
        unsigned code, nominal, data;
    } speeds[] = {
        { 1, 2500, 2000 },    { 2, 5000, 4000 },       { 4, 10000, 8000 },
        { 8, 10000, 10000 },  { 16, 14000, 13636 },    { 32, 25000, 25000 },
        { 64, 50000, 50000 }, { 128, 100000, 100000 }, { 256, 200000, 200000 },
    };
    unsigned lanes = 0, rate = 0;
    for (size_t i = 0; i < COUNT_OF(widths); i++)
        if (widths[i].code == width) lanes = widths[i].lanes;
    for (size_t i = 0; i < COUNT_OF(speeds); i++)
        if (speeds[i].code == speed)
            rate = link == RDMA_LINK_INFINIBAND ? speeds[i].data : speeds[i].nominal;
    return (uint64_t)lanes * rate * (1000 * 1000 / 8);
}

uint32_t rdma_mtu_bytes(unsigned code) { return code >= 1 && code <= 5 ? 128u << code : 0; }

unsigned rdma_mtu_code(uint32_t bytes)
{
    for (unsigned code = 1; code <= 5; code++)
        if (rdma_mtu_bytes(code) == bytes) return code;
    return 0;
}

const char *rdma_port_text(const struct rdma_port *p, char out[RDMA_PORT_TEXT_MAX])
{
    snprintf(out, RDMA_PORT_TEXT_MAX, "%s:%u", p->device, p->number);
    return out;
}

const char *rdma_gid_text(const struct rdma_gid *g, char out[RDMA_GID_TEXT_MAX])
{
    static const char *const types[] = {
        [RDMA_GID_IB] = "InfiniBand", [RDMA_GID_ROCE_V1] = "RoCE v1", [RDMA_GID_ROCE_V2] = "RoCE v2"
    };
    char address[INET6_ADDRSTRLEN] = "?";
    if (g->ipv4) inet_ntop(AF_INET, g->raw + 12, address, sizeof address);
    else inet_ntop(AF_INET6, g->raw, address, sizeof address);
    snprintf(out, RDMA_GID_TEXT_MAX, "%u (%s %s)", g->index, types[g->type], address);
    return out;
}

/* Whether the GID is the address of `local`. RoCE uses IPv4-mapped addresses (IBA annex A17). */
static bool is_address(const struct rdma_gid *g, const struct sockaddr *local)
{
    if (local && local->sa_family == AF_INET)
        return g->ipv4 &&
               memcmp(g->raw + 12, &((const struct sockaddr_in *)local)->sin_addr, 4) == 0;
    if (!local || local->sa_family != AF_INET6) return false;
    /* mapped addresses compare equal as they are */
    return memcmp(g->raw, &((const struct sockaddr_in6 *)local)->sin6_addr, 16) == 0;
}

static int score(const struct rdma_gid *g, const struct sockaddr *local)
{
    return (g->type == RDMA_GID_ROCE_V2 ? 8 : 0) + (is_address(g, local) ? 4 : 0) +
           (g->link_local ? 0 : 2) + (g->ipv4 ? 1 : 0);
}

static void add_table(const struct rdma_port *p, struct buf *out)
{
    char text[RDMA_GID_TEXT_MAX];
    for (size_t i = 0; i < p->n_gids && i < 8; i++)
        buf_printf(out, "%s%s", i ? ", " : "", rdma_gid_text(&p->gids[i], text));
    if (p->n_gids > 8) buf_printf(out, " and %zu more", p->n_gids - 8);
}

static enum status find_index(const struct rdma_port *p, unsigned index,
                              const struct rdma_gid **out, struct err *err)
{
    char port[RDMA_PORT_TEXT_MAX];
    struct buf there = { 0 };
    for (size_t i = 0; i < p->n_gids; i++) {
        if (p->gids[i].index != index) continue;
        *out = &p->gids[i];
        return OK;
    }
    add_table(p, &there);
    enum status st = err_field(err, ERR_CONFIG, "KVCACHE_RDMA_GID_INDEX",
                               "KVCACHE_RDMA_GID_INDEX=%u: %s has no such GID; it has %s", index,
                               rdma_port_text(p, port), there.data);
    buf_release(&there);
    return st;
}

enum status rdma_gid_choose(const struct rdma_port *p, const struct sockaddr *local,
                            const struct kvt_rdma_tuning *t, const struct rdma_gid **out,
                            struct err *err)
{
    char port[RDMA_PORT_TEXT_MAX];
    const struct rdma_gid *best = NULL;
    if (p->n_gids == 0)
        return err_set(err, ERR_NODEV, "%s has no GID: give its network interface%s%s an address",
                       rdma_port_text(p, port), p->netdev[0] ? " " : "", p->netdev);
    if (t->gid_given) return find_index(p, t->gid_index, out, err);
    if (p->link == RDMA_LINK_INFINIBAND) best = &p->gids[0];
    for (size_t i = 0; p->link != RDMA_LINK_INFINIBAND && i < p->n_gids; i++)
        if (!best || score(&p->gids[i], local) > score(best, local)) best = &p->gids[i];
    *out = best;
    return OK;
}
