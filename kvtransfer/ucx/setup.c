/* setup.c - the UCP context and the registered pool of the ucx row; see setup.h. Thread: creator's. */
#include "kvtransfer/ucx/setup.h"

#include <assert.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>
#include <unistd.h>

#include "shared/base/mem.h"

/* ---- what UCX does to a process ---- */

/* Loading libucs installs handlers for these signals (backtraces, and HUP for a debugger). Signals are the program's affair: they are put
 * back before main, unless the operator asked UCX for them. */
__attribute__((constructor)) static void keep_signals(void)
{
    static const int signals[] = { SIGILL, SIGSEGV, SIGBUS, SIGFPE };
    struct sigaction now;
    if (getenv("UCX_HANDLE_ERRORS") || getenv("UCX_ERROR_SIGNALS") || getenv("UCX_DEBUG_SIGNO")) return;
    for (size_t i = 0; i < COUNT_OF(signals); i++) ucs_debug_disable_signal(signals[i]);
    if (sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler != SIG_IGN) {
        now.sa_handler = SIG_DFL;
        now.sa_flags = 0;
        (void)sigaction(SIGHUP, &now, NULL);
    }
}

/* Every failure that matters comes back as a status and is said by this program; UCX's own lines are for its operator. */
static void keep_quiet(void)
{
    if (!getenv("UCX_LOG_LEVEL")) (void)ucs_global_opts_set_value("LOG_LEVEL", "fatal");
}

/* ---- which transports ---- */

/* Names of UCX 1.13 (`ucx_info -d`, and the aliases of `ucx_info -cf` UCX_TLS). */
static const char *const ALLOWED[] = { "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "ib", "tcp" };
static const char *const SHARED[] = { "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "self", "all" };

static const char DEFAULT_TLS[] = "rc,dc";

static bool is_in(struct str name, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (str_eq_c(name, list[i])) return true;
    return false;
}

enum status ucx_check_tls(const char *tls, struct buf *out, struct err *err)
{
    struct str rest = str_of(tls ? tls : DEFAULT_TLS), item;
    size_t before = out->len;
    while (str_split(&rest, ',', &item)) {
        item = str_trim(item);
        if (item.n == 0) continue;
        if (is_in(item, SHARED, COUNT_OF(SHARED)))
            return err_set(err, ERR_CONFIG, "ucx: the UCX transport '%.*s' is or includes shared memory, whose writes cannot be stopped when a peer is lost; "
                           "between processes of one host use the protocol ipc", STR_ARG(item));
        if (!is_in(item, ALLOWED, COUNT_OF(ALLOWED)))
            return err_set(err, ERR_CONFIG, "ucx: '%.*s' is not a UCX transport that may be used here; possible are rc, dc, ud (also with _v, _x, _verbs, _mlx5), ib, tcp", STR_ARG(item));
        if (str_eq_c(item, "rc_verbs")) item = STR("rc_v"); /* the short names bring the datagrams that wire the queue pairs up */
        else if (str_eq_c(item, "rc_mlx5")) item = STR("rc_x");
        else if (str_eq_c(item, "dc_mlx5")) item = STR("dc_x");
        buf_printf(out, "%s%.*s", out->len > before ? "," : "", STR_ARG(item));
    }
    return out->len > before ? OK : err_set(err, ERR_CONFIG, "ucx: the list of UCX transports is empty");
}

void ucx_net_devices(const char *nics, struct buf *out)
{
    struct str rest = str_of(nics), item;
    while (str_split(&rest, ',', &item)) {
        item = str_trim(item);
        if (item.n == 0) continue;
        buf_printf(out, "%s%.*s%s", out->len ? "," : "", STR_ARG(item), str_find_char(item, ':') == SIZE_MAX ? ":1" : "");
    }
}

/* Are all RDMA devices of this host Soft-RoCE? Their driver alone shows the network interface they sit on as `parent`. */
static bool only_soft_roce(void)
{
    DIR *d = opendir("/sys/class/infiniband");
    size_t n_soft = 0, n = 0;
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char path[320];
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/sys/class/infiniband/%s/parent", e->d_name);
        n++;
        n_soft += access(path, F_OK) == 0;
    }
    if (d) closedir(d);
    return n && n == n_soft;
}

static void set(ucp_config_t *config, const char *name, const char *value)
{
    char variable[64];
    snprintf(variable, sizeof variable, "UCX_%s", name);
    if (!getenv(variable)) (void)ucp_config_modify(config, name, value); /* a name this build of UCX does not have changes nothing */
}

static void set_number(ucp_config_t *config, const char *name, unsigned value)
{
    char text[16];
    snprintf(text, sizeof text, "%u", value);
    set(config, name, text);
}

/* What this program knows and UCX does not; the operator's own UCX_* variables win, except over TLS. */
static void configure(ucp_config_t *config, const struct kvt_rdma_tuning *rdma, const char *tls)
{
    struct buf devices = { 0 };
    (void)ucp_config_modify(config, "TLS", tls);
    if (rdma->nics && !strstr(tls, "tcp")) {
        ucx_net_devices(rdma->nics, &devices);
        set(config, "NET_DEVICES", devices.data);
    }
    /* A mark follows the bytes it vouches for: PCIe must not reorder them. */
    if (!getenv("UCX_IB_PCI_RELAXED_ORDERING")) set(config, "PCI_RELAXED_ORDERING", "off"); /* of a memory domain: named without its prefix */
    /* The control connection notices a peer's death. UCX's own keepalive adds a UD endpoint that it also wires up over, and
     * closing that half-way trips an assertion in UCX 1.13, which ends the process. */
    set(config, "KEEPALIVE_INTERVAL", "inf");
    /* Workers get marks and wire-up messages only: default queues (4,096 buffers of 8 KiB per worker) would be mostly idle memory. */
    set(config, "RC_RX_QUEUE_LEN", "256");
    set(config, "UD_RX_QUEUE_LEN", "256");
    /* Options of a memory domain are named without their prefix here. UCX's wire-up over UD does not get through between IPv4 GIDs of
     * Soft-RoCE; its first GID is IPv6 (link-local, RoCE v2) and works. */
    if (!getenv("UCX_IB_GID_INDEX") && (rdma->gid_given || only_soft_roce())) set_number(config, "GID_INDEX", rdma->gid_given ? rdma->gid_index : 0);
    if (rdma->traffic_class_given) set_number(config, "IB_TRAFFIC_CLASS", rdma->traffic_class);
    if (rdma->service_level) set_number(config, "IB_SL", rdma->service_level);
    buf_release(&devices);
}

/* ---- context and memory ---- */

static enum status map(ucp_context_h context, const struct dev_mem *m, ucp_mem_h *out, struct err *err)
{
    ucp_mem_map_params_t p = { .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH, .address = m->ptr, .length = m->bytes };
    ucs_status_t st = ucp_mem_map(context, &p, out);
    if (st == UCS_OK) return OK;
    return err_set(err, ERR_CONFIG, "ucx: %zu bytes of KV memory cannot be registered: %s (the locked-memory limit, ulimit -l, may be too low)", m->bytes, ucs_status_string(st));
}

static enum status open_context(const struct kvt_env *env, const char *tls, ucp_context_h *out, struct err *err)
{
    ucp_config_t *config;
    ucs_status_t st = ucp_config_read(NULL, NULL, &config);
    if (st != UCS_OK) return err_set(err, ERR_CONFIG, "ucx: the UCX_* variables cannot be read: %s", ucs_status_string(st));
    configure(config, &env->tuning.rdma, tls);
    ucp_params_t p = { .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME, .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                       .name = "baton" };
    st = ucp_init(&p, config, out);
    ucp_config_release(config);
    if (st == UCS_OK) return OK;
    *out = NULL;
    return err_set(err, ERR_NODEV, "ucx: no device of this host can be used with the UCX transports %s: %s%s", tls, ucs_status_string(st),
                   strstr(tls, "tcp") ? "" : "; without RDMA devices use the protocol tcp");
}

enum status ucx_setup(const struct kvt_env *env, struct ucx_setup *s, struct err *err)
{
    struct buf tls = { 0 };
    keep_quiet();
    enum status st = ucx_check_tls(env->tuning.ucx_tls ? env->tuning.ucx_tls : getenv("UCX_TLS"), &tls, err);
    if (st == OK) st = open_context(env, tls.data, &s->context, err);
    buf_release(&tls);
    if (st == OK) st = map(s->context, env->mem, &s->pool, err);
    if (st == OK && env->staging) st = map(s->context, env->staging, &s->staging, err);
    TRY(st);
    ucs_status_t packed = ucp_rkey_pack(s->context, s->pool, &s->key, &s->key_bytes);
    if (packed == UCS_OK && s->key_bytes <= UCX_KEY_MAX) return OK;
    return err_set(err, ERR_CONFIG, "ucx: no key for the KV pool: %s", packed == UCS_OK ? "it is too long" : ucs_status_string(packed));
}

void ucx_release(struct ucx_setup *s)
{
    if (s->key) ucp_rkey_buffer_release(s->key);
    if (s->pool) (void)ucp_mem_unmap(s->context, s->pool);
    if (s->staging) (void)ucp_mem_unmap(s->context, s->staging);
    if (s->context) ucp_cleanup(s->context);
    *s = (struct ucx_setup){ 0 };
}

/* ---- the region on the wire ---- */

struct wire_region { /* then the key */
    uint64_t base, bytes;
    uint32_t address_bytes, key_bytes;
};
static_assert(sizeof(struct wire_region) == 24, "wire size");
static_assert(sizeof(struct wire_region) + UCX_KEY_MAX <= 4096, "one control frame");

void ucx_region_encode(const struct ucx_region *r, struct buf *out)
{
    struct wire_region w = { .base = r->base, .bytes = r->bytes, .address_bytes = r->address_bytes, .key_bytes = (uint32_t)r->key.n };
    buf_add(out, &w, sizeof w);
    buf_add_str(out, r->key);
}

enum status ucx_region_decode(struct str in, struct ucx_region *out)
{
    struct wire_region w;
    if (in.n < sizeof w) return ERR_FORMAT;
    memcpy(&w, in.p, sizeof w);
    if (w.key_bytes == 0 || w.key_bytes > UCX_KEY_MAX || in.n - sizeof w != w.key_bytes) return ERR_FORMAT;
    if (w.address_bytes == 0 || w.address_bytes > UCX_ADDRESS_MAX || w.bytes == 0 || w.base + w.bytes < w.base) return ERR_FORMAT;
    *out = (struct ucx_region){ .base = w.base, .bytes = w.bytes, .address_bytes = w.address_bytes, .key = { in.p + sizeof w, w.key_bytes } };
    return OK;
}
