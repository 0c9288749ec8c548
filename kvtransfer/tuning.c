/* tuning.c - the names of what an operator may tune, their values, and the fields they set. One
 * table entry per name. Names that begin with KVCACHE_, KV_ or SET_ are FastDeploy's and keep its
 * meaning; BATON_ names are for what FastDeploy has no name for.
 * Thread: any; no state. */
#include "kvtransfer/tuning.h"

#include <assert.h>
#include <ctype.h>
#include <net/if.h>
#include <stddef.h>
#include <string.h>
#include <strings.h>

#include "shared/base/mem.h"

enum tuning_kind { NOTHING, BOOL, SWITCH, U8, U32, MTU, KEY, NICS, IFNAME, WORDS, TEXT };

struct tuning_entry {
    enum tuning_kind kind;
    size_t offset, given; /* of the field; of the flag that says it was given (0: it has none) */
    unsigned min, max;
};

#define AT(field)   offsetof(struct kvt_tuning, field)
#define ON_OFF      "0 or 1"
#define AUTO_ON_OFF "auto, on or off"

/*    name, kind, field, flag, min, max, values, help. Flag 0 (offsetof rdma.nics) means none. */
#define TUNING(X)                                                                                  \
    X("KVCACHE_RDMA_NICS", NICS, AT(rdma.nics), 0, 0, 0,                                           \
      "a comma list such as mlx5_0,mlx5_1 or mlx5_0:1",                                            \
      "RDMA devices to use, in this order, at most 8; without it every active port near the KV "   \
      "cache's memory")                                                                            \
    X("KVCACHE_RDMA_GID_INDEX", U8, AT(rdma.gid_index), AT(rdma.gid_given), 0, 255,                \
      "a number from 0 to 255",                                                                    \
      "the GID of every device to speak from; without it a RoCE v2 one with an address that the "  \
      "peer can reach")                                                                            \
    X("KVCACHE_IB_TIMEOUT", U8, AT(rdma.timeout), 0, 1, 31, "a number from 1 to 31",               \
      "how long a queue pair waits for an acknowledgement, as the exponent of 4.096 us * 2^n")     \
    X("KVCACHE_RDMA_RELAX_ORDERING", BOOL, AT(rdma.relaxed_ordering), 0, 0, 0, ON_OFF,             \
      "register the KV cache for relaxed PCIe ordering")                                           \
    X("KVCACHE_RELAX_ORDERING", BOOL, AT(rdma.relaxed_ordering), 0, 0, 0, ON_OFF, "the same")      \
    X("KVCACHE_GDRCOPY_FLUSH_ENABLE", BOOL, AT(rdma.flush_read), 0, 0, 0, ON_OFF,                  \
      "read back after the last write of a put, so that the write is past the PCIe bus before it " \
      "counts as done")                                                                            \
    X("KVCACHE_VERIFY_READ", BOOL, AT(rdma.verify_read), 0, 0, 0, ON_OFF,                          \
      "read every put back and compare: slow, for finding faults")                                 \
    X("KV_CACHE_SOCKET_IFNAME", IFNAME, AT(socket_ifname), 0, 0, 0,                                \
      "the name of a network interface",                                                           \
      "the interface that control connections listen on and leave from (get_rdma_nics.sh cpu "     \
      "prints it)")                                                                                \
    X("KVCACHE_SOCKET_IFNAME", IFNAME, AT(socket_ifname), 0, 0, 0,                                 \
      "the name of a network interface", "the same")                                               \
    X("BATON_RDMA_MTU", MTU, AT(rdma.mtu), 0, 0, 0, "auto, 256, 512, 1024, 2048 or 4096",          \
      "path MTU of queue pairs in bytes; auto: the smaller of both ports' active ones")            \
    X("BATON_RDMA_QPS", U32, AT(rdma.qps_per_rail), 0, 1, 16, "a number from 1 to 16",             \
      "queue pairs per peer and port")                                                             \
    X("BATON_RDMA_RETRIES", U8, AT(rdma.retries), 0, 1, 7, "a number from 1 to 7",                 \
      "how often a queue pair sends again before it gives up")                                     \
    X("BATON_RDMA_TRAFFIC_CLASS", U8, AT(rdma.traffic_class), AT(rdma.traffic_class_given), 0,     \
      255, "a number from 0 to 255",                                                               \
      "traffic class of the packets (RoCE v2: DSCP * 4), by which switches put them on a "         \
      "lossless queue")                                                                            \
    X("BATON_RDMA_SERVICE_LEVEL", U8, AT(rdma.service_level), 0, 0, 15, "a number from 0 to 15",   \
      "service level (RoCE: the VLAN priority)")                                                   \
    X("BATON_RDMA_CM", BOOL, AT(rdma.rdma_cm), 0, 0, 0, ON_OFF,                                    \
      "1: queue pairs are connected by librdmacm, which asks the fabric for addresses and "        \
      "routes; set it alike on all nodes")                                                         \
    X("BATON_RDMA_KEY", KEY, AT(rdma.key), 0, 0, 0, "auto, window or region",                      \
      "how a peer's right to write is given: a memory window of its queue pair, or a region of "   \
      "its own")                                                                                   \
    X("BATON_RDMA_ODP", SWITCH, AT(rdma.odp), 0, 0, 0, AUTO_ON_OFF,                                \
      "register the KV cache for on-demand paging, without locking its memory; auto: where "       \
      "locking fails and the device can")                                                          \
    X("BATON_UCX_TLS", WORDS, AT(ucx_tls), 0, 0, 0, "a comma list such as rc_verbs,tcp",           \
      "UCX transports that the ucx transport may use")                                             \
    X("BATON_TCP_CONNECTIONS", U32, AT(tcp_connections), 0, 1, 16, "a number from 1 to 16",        \
      "TCP connections per peer")                                                                  \
    X("BATON_TCP_ZEROCOPY", SWITCH, AT(zerocopy), 0, 0, 0, AUTO_ON_OFF,                            \
      "MSG_ZEROCOPY; auto: where it was measured to win")                                          \
    X("BATON_IPC_COPIERS", U32, AT(copiers), 0, 1, 16, "a number from 1 to 16",                    \
      "threads that copy for ipc, the transfer thread among them")                                 \
    X("BATON_IPC_CMA", SWITCH, AT(cma), 0, 0, 0, AUTO_ON_OFF,                                      \
      "process_vm_writev instead of mapping the peer's pool; auto: where the pool cannot be "      \
      "shared")                                                                                    \
    X("BATON_KV_LOSSY", BOOL, AT(lossy), 0, 0, 0, ON_OFF,                                          \
      "let a peer with a narrower KV type connect: its answers may differ")                        \
    X("BATON_KV_FAULT", TEXT, AT(fault), 0, 0, 0, "a fault plan",                                  \
      "faults to put into transfers; for tests only")

#define NO_EFFECT(X)                                                                               \
    X("SET_RDMA_DEST_PORT", "no effect: peers tell each other their ports")                        \
    X("KVCACHE_DEBUG", "no effect: --log-level says how much is logged")                           \
    X("KV_IS_DEBUG_ENABLED", "no effect: --log-level says how much is logged")                     \
    X("KVCACHE_DEBUG_OUTPUT", "no effect: the log has one place")                                  \
    X("KVCACHE_DEBUG_FILE", "no effect: the log has one place")                                    \
    X("KVCACHE_ERROR_FILE", "no effect: the log has one place")

#define NAME(name, kind, field, flag, min, max, values, help) { name, values, help, false },
#define IDLE_NAME(name, help)                                 { name, "anything", help, true },
const struct kvt_tuning_name kvt_tuning_names[] = { TUNING(NAME) NO_EFFECT(IDLE_NAME){
    NULL, NULL, NULL, false } };

#define ENTRY(name, kind, field, flag, min, max, values, help) { kind, field, flag, min, max },
#define IDLE_ENTRY(name, help)                                 { NOTHING, 0, 0, 0, 0 },
static const struct tuning_entry ENTRIES[] = { TUNING(ENTRY) NO_EFFECT(IDLE_ENTRY) };
static_assert(COUNT_OF(ENTRIES) + 1 == COUNT_OF(kvt_tuning_names), "an entry per name");

static bool parse_bool(struct str s, bool *out)
{
    static const char *const yes[] = { "1", "true", "on", "yes" }, *const no[] = { "0", "false",
                                                                                   "off", "no" };
    for (size_t i = 0; i < COUNT_OF(yes); i++) {
        bool is_yes = strncasecmp(s.p, yes[i], s.n) == 0 && yes[i][s.n] == 0;
        if (!is_yes && !(strncasecmp(s.p, no[i], s.n) == 0 && no[i][s.n] == 0)) continue;
        *out = is_yes;
        return true;
    }
    return false;
}

static bool parse_switch(struct str s, enum kvt_switch *out)
{
    bool on = false;
    if (str_eq_c(s, "auto")) *out = KVT_AUTO;
    else if (parse_bool(s, &on)) *out = on ? KVT_ON : KVT_OFF;
    else return false;
    return true;
}

static bool parse_number(struct str s, const struct tuning_entry *r, unsigned *out)
{
    int64_t v;
    if (str_to_i64(s, &v) != OK || v < r->min || v > r->max) return false;
    *out = (unsigned)v;
    return true;
}

static bool parse_mtu(struct str s, uint32_t *out)
{
    static const struct {
        const char *text;
        uint32_t bytes;
    } all[] = { { "auto", 0 },    { "256", 256 },   { "512", 512 },
                { "1024", 1024 }, { "2048", 2048 }, { "4096", 4096 } };
    for (size_t i = 0; i < COUNT_OF(all); i++) {
        if (!str_eq_c(s, all[i].text)) continue;
        *out = all[i].bytes;
        return true;
    }
    return false;
}

static bool parse_key(struct str s, enum kvt_rdma_key *out)
{
    static const char *const names[] = { [KVT_RDMA_KEY_AUTO] = "auto",
                                         [KVT_RDMA_KEY_WINDOW] = "window",
                                         [KVT_RDMA_KEY_REGION] = "region" };
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        if (!str_eq_c(s, names[i])) continue;
        *out = (enum kvt_rdma_key)i;
        return true;
    }
    return false;
}

/* Whether `s` is printable, without blanks and without any character of `except`. */
static bool is_word(struct str s, const char *except)
{
    for (size_t i = 0; i < s.n; i++)
        if (!isgraph((unsigned char)s.p[i]) || strchr(except, s.p[i])) return false;
    return s.n > 0;
}

static bool is_nic(struct str item)
{
    struct str rest = item, name;
    int64_t port;
    if (!str_split(&rest, ':', &name) || !is_word(name, "/=\"'") || name.n >= 64) return false;
    return !rest.p || (str_to_i64(rest, &port) == OK && port >= 1 && port <= 255);
}

static bool is_list(struct str s, bool nics)
{
    struct str item;
    while (str_split(&s, ',', &item)) {
        item = str_trim(item);
        if (nics ? !is_nic(item) : !is_word(item, "/=\"'")) return false;
    }
    return true;
}

static bool is_text_of(enum tuning_kind kind, struct str s)
{
    switch (kind) {
    case NICS: return is_list(s, true);
    case WORDS: return is_list(s, false);
    case IFNAME: return is_word(s, "/:,") && s.n < IF_NAMESIZE;
    default: return true;
    }
}

/* Sets the field if `value` is valid, through the field's own type. */
static bool store(struct kvt_tuning *t, const struct tuning_entry *r, const char *value)
{
    void *field = (char *)t + r->offset;
    struct str s = str_trim(str_of(value));
    unsigned v = 0;
    switch (r->kind) {
    case NOTHING: return true;
    case BOOL: return parse_bool(s, field);
    case SWITCH: return parse_switch(s, field);
    case MTU: return parse_mtu(s, field);
    case KEY: return parse_key(s, field);
    case U8:
    case U32:
        if (!parse_number(s, r, &v)) return false;
        if (r->kind == U8) *(uint8_t *)field = (uint8_t)v;
        else *(uint32_t *)field = v;
        return true;
    case NICS:
    case IFNAME:
    case WORDS:
    case TEXT:
        if (!is_text_of(r->kind, str_of(value))) return false;
        *(const char **)field = value;
        return true;
    }
    return false;
}

enum status kvt_tuning_set(struct kvt_tuning *t, const char *name, const char *value, bool *known,
                           struct err *err)
{
    *known = false;
    for (size_t i = 0; i < COUNT_OF(ENTRIES); i++) {
        const struct tuning_entry *r = &ENTRIES[i];
        if (strcmp(kvt_tuning_names[i].name, name) != 0) continue;
        *known = true;
        if (!value || str_trim(str_of(value)).n == 0) return OK;
        if (!store(t, r, value))
            return err_field(err, ERR_CONFIG, name, "%s: '%s' is not %s", name, value,
                             kvt_tuning_names[i].values);
        if (r->given) *(bool *)((char *)t + r->given) = true;
        return OK;
    }
    return OK;
}
