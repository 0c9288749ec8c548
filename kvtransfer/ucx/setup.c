/* setup.c - the UCP contexts and the registered pool of transport ucx; see setup.h. Thread:
 * creator's. */
#include "kvtransfer/ucx/setup.h"

#include <assert.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/fabric/ucx.h"

/* ---- which transports ---- */

/* Names of UCX 1.13 (`ucx_info -d`, and the aliases of `ucx_info -cf` UCX_TLS). */
static const char *const ALLOWED[] = { "rc",   "rc_v",     "rc_x",    "rc_verbs", "rc_mlx5",
                                       "dc",   "dc_x",     "dc_mlx5", "ud",       "ud_v",
                                       "ud_x", "ud_verbs", "ud_mlx5", "ib",       "tcp" };
static const char *const SHARED[] = { "sm",    "shm", "mm",   "posix", "sysv",
                                      "xpmem", "cma", "knem", "self",  "all" };

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
            return err_set(err, ERR_CONFIG,
                           "ucx: the UCX transport '%.*s' is or includes shared memory, whose "
                           "writes cannot be stopped when a peer is lost; "
                           "between processes of one host use the protocol ipc",
                           STR_ARG(item));
        if (!is_in(item, ALLOWED, COUNT_OF(ALLOWED)))
            return err_set(err, ERR_CONFIG,
                           "ucx: '%.*s' is not a UCX transport that may be used here; possible are "
                           "rc, dc, ud (also with _v, _x, _verbs, _mlx5), ib, tcp",
                           STR_ARG(item));
        if (str_eq_c(item, "rc_verbs"))
            item = STR("rc_v"); /* the short names also select ud, which wires up the queue pairs */
        else if (str_eq_c(item, "rc_mlx5")) item = STR("rc_x");
        else if (str_eq_c(item, "dc_mlx5")) item = STR("dc_x");
        buf_printf(out, "%s%.*s", out->len > before ? "," : "", STR_ARG(item));
    }
    return out->len > before ? OK
                             : err_set(err, ERR_CONFIG, "ucx: the list of UCX transports is empty");
}

/* Whether all RDMA devices of this host are Soft-RoCE. Only its driver has a file `parent`, the
 * network interface under the device. */
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

bool ucx_gid_index(const struct kvt_rdma_tuning *rdma, unsigned *out)
{
    *out = rdma->gid_given ? rdma->gid_index : 0;
    return rdma->gid_given || only_soft_roce();
}

static void set(ucp_config_t *config, const char *name, const char *value)
{
    char variable[64];
    snprintf(variable, sizeof variable, "UCX_%s", name);
    /* a name that this build of UCX does not have changes nothing */
    if (!getenv(variable)) (void)ucp_config_modify(config, name, value);
}

static void set_number(ucp_config_t *config, const char *name, unsigned value)
{
    char text[16];
    snprintf(text, sizeof text, "%u", value);
    set(config, name, text);
}

/* Sets the time until an unanswered packet ends a queue pair: 0.13 s, sent 8 times, is 1.1 s (UCX's
 * default of 1 s each is 8 s). */
static void set_retries(ucp_config_t *config, const struct kvt_rdma_tuning *rdma)
{
    enum { TIMEOUT = 15, RETRIES = 7 };
    char text[32];
    unsigned exponent = rdma->timeout ? rdma->timeout : TIMEOUT;
    /* IBA vol. 1, 9.7.6.1.3 */
    snprintf(text, sizeof text, "%.0fus", 4.096 * (double)(UINT64_C(1) << (exponent & 31)));
    set(config, "RC_TIMEOUT", text);
    set_number(config, "RC_RETRY_COUNT", rdma->retries ? rdma->retries : RETRIES);
}

/* Sets what this program knows better than UCX. The operator's UCX_* variables take precedence,
 * except over the allowed transports and the device of a rail. */
static void configure(ucp_config_t *config, const struct kvt_rdma_tuning *rdma, const char *tls,
                      const char *device)
{
    (void)ucp_config_modify(config, "TLS", tls);
    if (device[0]) (void)ucp_config_modify(config, "NET_DEVICES", device);
    set_retries(config, rdma);
    /* A marker follows its bytes, so PCIe must not reorder them. */
    /* of a memory domain: named without its prefix */
    if (!getenv("UCX_IB_PCI_RELAXED_ORDERING")) set(config, "PCI_RELAXED_ORDERING", "off");
    /* The control connection notices a peer's death. UCX's keepalive adds a UD endpoint; closing
     * that while it wires up trips an assertion in UCX 1.13, which ends the process. */
    set(config, "KEEPALIVE_INTERVAL", "inf");
    /* UCX waits for events of interfaces that it considers unused without polling again (see
     * ucx_conn_arm), so a wire-up message may lie there until it is sent again. A worker has two or
     * three interfaces here; polling all of them costs nothing. */
    set(config, "ADAPTIVE_PROGRESS", "n");
    /* Workers receive only markers and wire-up messages. Default queues (4,096 buffers of 8 KiB per
     * worker) and pools (from 1,024 on, 32 MiB of registered memory per worker) would be mostly
     * idle, and registering them is most of the cost of a worker. */
    set(config, "RC_RX_QUEUE_LEN", "256");
    set(config, "UD_RX_QUEUE_LEN", "256");
    set(config, "RC_RX_BUFS_GROW", "256");
    set(config, "UD_RX_BUFS_GROW", "256");
    set(config, "RC_TX_BUFS_GROW", "128");
    set(config, "UD_TX_BUFS_GROW", "128");
    unsigned gid;
    /* of a memory domain, as above */
    if (!getenv("UCX_IB_GID_INDEX") && ucx_gid_index(rdma, &gid))
        set_number(config, "GID_INDEX", gid);
    if (rdma->traffic_class_given) set_number(config, "IB_TRAFFIC_CLASS", rdma->traffic_class);
    if (rdma->service_level) set_number(config, "IB_SL", rdma->service_level);
}

/* ---- context and memory ---- */

/* Registers memory and tells UCX its type; UCX would find the same by itself, if it can. */
static enum status map(ucp_context_h context, const struct dev_mem *m, ucp_mem_h *out,
                       struct err *err)
{
    bool is_device = m->kind == DEV_MEM_CUDA;
    ucp_mem_map_params_t p = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = m->ptr,
        .length = m->bytes,
        .memory_type = is_device ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST,
    };
    ucs_status_t st = ucp_mem_map(context, &p, out);
    if (st == UCS_OK) return OK;
    if (is_device)
        return err_set(err, ERR_NODEV,
                       "ucx: %zu bytes of KV in GPU memory cannot be registered: %s", m->bytes,
                       ucs_status_string(st));
    return err_set(err, ERR_CONFIG,
                   "ucx: %zu bytes of KV memory cannot be registered: %s (the locked-memory limit, "
                   "ulimit -l, may be too low)",
                   m->bytes, ucs_status_string(st));
}

static enum status open_context(const struct kvt_env *env, const char *tls, const char *device,
                                ucp_context_h *out, struct err *err)
{
    ucp_config_t *config;
    ucs_status_t st = ucp_config_read(NULL, NULL, &config);
    if (st != UCS_OK)
        return err_set(err, ERR_CONFIG, "ucx: the UCX_* variables cannot be read: %s",
                       ucs_status_string(st));
    configure(config, &env->tuning.rdma, tls, device);
    ucp_params_t p = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        .name = "baton",
    };
    st = ucp_init(&p, config, out);
    ucp_config_release(config);
    if (st == UCS_OK) return OK;
    *out = NULL;
    return err_set(err, ERR_NODEV,
                   "ucx: no device of this host can be used with the UCX transports %s: %s%s", tls,
                   ucs_status_string(st),
                   strstr(tls, "tcp") ? "" : "; without RDMA devices use the protocol tcp");
}

/* ---- a pool in GPU memory ---- */

/* Opens a context that supports GPU memory: cuda_copy moves nothing here but adds that support.
 * With it a context would open even on a host without a network device, so one without it must open
 * first. */
static enum status open_device_context(const struct kvt_env *env, const char *tls,
                                       const char *device, ucp_context_h *out, struct err *err)
{
    ucp_context_attr_t attr = { .field_mask = UCP_ATTR_FIELD_MEMORY_TYPES };
    struct buf with_cuda = { 0 };
    TRY(open_context(env, tls, device, out, err));
    ucp_cleanup(*out);
    buf_printf(&with_cuda, "%s,cuda_copy", tls);
    enum status st = open_context(env, with_cuda.data, device, out, err);
    buf_release(&with_cuda);
    TRY(st);
    if (ucp_context_query(*out, &attr) == UCS_OK &&
        (attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)))
        return OK;
    return err_set(err, ERR_NODEV,
                   "ucx: this UCX (%s) was built without CUDA, or its module for it is not "
                   "installed: it cannot register GPU memory; "
                   "rdma does without, and ipc and tcp move KV of GPUs on any host",
                   ucp_get_version_string());
}

/* Checks that writes of a NIC can be made visible to the GPU, as for rdma: asks the driver that
 * exports the pool's dma-buf, once. */
static enum status check_device_memory(const struct kvt_env *env, struct err *err)
{
    struct err why = { 0 };
    int fd = -1;
    if (device_mem_dmabuf(env->device, env->mem, &fd, &why) != OK)
        return err_set(err, ERR_NODEV, "ucx: %s", why.text);
    close(fd);
    return OK;
}

/* Checks that the pool's key covers every device. UCX registers memory with the devices that can
 * and does not report the others, and the peer's worker would execute puts without a device's key
 * in software. A key has a part of at least 8 bytes per device, so the key of host memory shows how
 * long the pool's must be. */
static enum status check_key(const struct ucx_rail *r, struct err *err)
{
    enum { DEVICE_KEY_BYTES = 8 };
    void *host = NULL;
    size_t n = 0;
    ucs_status_t st = ucp_rkey_pack(r->context, r->staging, &host, &n);
    if (st != UCS_OK)
        return err_set(err, ERR_CONFIG, "ucx: no key for staging memory: %s",
                       ucs_status_string(st));
    ucp_rkey_buffer_release(host);
    if (n < r->key_bytes + DEVICE_KEY_BYTES) return OK;
    return err_set(err, ERR_NODEV,
                   "ucx: %s cannot register GPU memory: that needs the module "
                   "nvidia_peermem, or a UCX and a driver with dma-buf",
                   r->device[0] ? r->device : "the network device");
}

static enum status open_rail(const struct kvt_env *env, const char *tls, struct ucx_rail *r,
                             struct err *err)
{
    TRY(env->device ? open_device_context(env, tls, r->device, &r->context, err)
                    : open_context(env, tls, r->device, &r->context, err));
    if (env->device) TRY(check_device_memory(env, err));
    TRY(map(r->context, env->mem, &r->pool, err));
    if (env->staging) TRY(map(r->context, env->staging, &r->staging, err));
    ucs_status_t packed = ucp_rkey_pack(r->context, r->pool, &r->key, &r->key_bytes);
    if (packed == UCS_OK && r->key_bytes <= UCX_KEY_MAX)
        return env->device ? check_key(r, err) : OK;
    return err_set(err, ERR_CONFIG, "ucx: no key for the KV pool: %s",
                   packed == UCS_OK ? "it is too long" : ucs_status_string(packed));
}

/* Closes a rail, which keeps its name and number. */
static void close_rail(struct ucx_rail *r)
{
    if (r->key) ucp_rkey_buffer_release(r->key);
    if (r->pool) (void)ucp_mem_unmap(r->context, r->pool);
    if (r->staging) (void)ucp_mem_unmap(r->context, r->staging);
    if (r->context) ucp_cleanup(r->context);
    r->key = NULL;
    r->pool = r->staging = NULL;
    r->context = NULL;
}

static enum status open_rails(const struct kvt_env *env, const char *tls, struct ucx_setup *s,
                              struct err *err)
{
    struct ucx_devices devices;
    enum status st = OK;
    bool some = false;
    ucx_devices_choose(env->tuning.rdma.nics, strstr(tls, "tcp") != NULL, &devices);
    s->n_rails = devices.n;
    for (uint32_t i = 0; i < devices.n && (st == OK || st == ERR_NODEV); i++) {
        snprintf(s->rails[i].device, sizeof s->rails[i].device, "%s", devices.name[i]);
        st = open_rail(env, tls, &s->rails[i], err);
        some |= st == OK;
        if (st == ERR_NODEV) close_rail(&s->rails[i]);
        if (st == ERR_NODEV && devices.n > 1)
            log_warn("ucx device not used", "device=%s why=\"%s\"", devices.name[i],
                     err ? err->text : "");
    }
    return some && st == ERR_NODEV ? OK : st;
}

enum status ucx_setup(const struct kvt_env *env, struct ucx_setup *s, struct err *err)
{
    struct buf tls = { 0 };
    fabric_keep_ucx_quiet();
    enum status st = ucx_check_tls(env->tuning.ucx_tls ? env->tuning.ucx_tls : getenv("UCX_TLS"),
                                   &tls, err);
    if (st == OK) st = open_rails(env, tls.data, s, err);
    buf_release(&tls);
    return st;
}

void ucx_release(struct ucx_setup *s)
{
    for (uint32_t i = 0; i < s->n_rails; i++) close_rail(&s->rails[i]);
    *s = (struct ucx_setup){ 0 };
}

/* ---- which rail ---- */

/* When a connection over it last failed; 0: never, or UCX_FORGIVE_MS ago. */
static uint64_t recent_failure_ms(const struct ucx_rail *r, uint64_t now)
{
    return r->failed_ms && now - r->failed_ms < UCX_FORGIVE_MS ? r->failed_ms : 0;
}

static bool is_better(const struct ucx_rail *a, const struct ucx_rail *b, uint64_t now)
{
    bool up_a = ucx_device_active(a->device), up_b = ucx_device_active(b->device);
    uint64_t bad_a = recent_failure_ms(a, now), bad_b = recent_failure_ms(b, now);
    if (up_a != up_b) return up_a;
    return bad_a != bad_b ? bad_a < bad_b : a->n_begun < b->n_begun;
}

struct ucx_rail *ucx_rail_choose(struct ucx_setup *s)
{
    struct ucx_rail *best = NULL;
    uint64_t now = clock_ms();
    for (uint32_t i = 0; i < s->n_rails; i++)
        if (s->rails[i].context && (!best || is_better(&s->rails[i], best, now)))
            best = &s->rails[i];
    ASSERT(best); /* ucx_setup has opened one */
    best->n_begun++;
    return best;
}

struct ucx_rail *ucx_rail_by_number(struct ucx_setup *s, uint32_t number)
{
    uint32_t i = number % s->n_rails;
    for (uint32_t tried = 1; !s->rails[i].context; tried++, i = (i + 1) % s->n_rails)
        ASSERT(tried < s->n_rails);
    return &s->rails[i];
}

/* ---- the region on the wire ---- */

struct ucx_wire_region { /* then the key */
    uint64_t base, bytes;
    uint32_t address_bytes, key_bytes;
};
static_assert(sizeof(struct ucx_wire_region) == 24, "wire size");
static_assert(sizeof(struct ucx_wire_region) + UCX_KEY_MAX <= 4096, "one control frame");

void ucx_region_encode(const struct ucx_region *r, struct buf *out)
{
    struct ucx_wire_region w = {
        .base = r->base,
        .bytes = r->bytes,
        .address_bytes = r->address_bytes,
        .key_bytes = (uint32_t)r->key.n,
    };
    buf_add(out, &w, sizeof w);
    buf_add_str(out, r->key);
}

enum status ucx_region_decode(struct str in, struct ucx_region *out)
{
    struct ucx_wire_region w;
    if (in.n < sizeof w) return ERR_FORMAT;
    memcpy(&w, in.p, sizeof w);
    if (w.key_bytes == 0 || w.key_bytes > UCX_KEY_MAX || in.n - sizeof w != w.key_bytes)
        return ERR_FORMAT;
    if (w.address_bytes == 0 || w.address_bytes > UCX_ADDRESS_MAX || w.bytes == 0 ||
        w.base + w.bytes < w.base)
        return ERR_FORMAT;
    *out = (struct ucx_region){
        .base = w.base,
        .bytes = w.bytes,
        .address_bytes = w.address_bytes,
        .key = { in.p + sizeof w, w.key_bytes },
    };
    return OK;
}
