/* test_kv_gpu_ucx.c - transport ucx with pools in GPU memory. The GPU is emulated (its memory is
 * host memory), and wrapped UCX functions claim support for such memory. The calls to UCX and the
 * transferred bytes are real. The emulated GPU protects its memory from everybody else; UCX's
 * writes are let through, as a NIC's would be. Uses UCX's own tcp, which needs no device. Also
 * checks the errors of a UCX or a GPU without this support. */
#include "kvtransfer/convert.h"
#include "tests/conformance/kvt_fixture.h"

#ifdef BATON_HAVE_UCX
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "kvtransfer/ucx/setup.h"

enum { TOKENS = 9 * 16 + 5, BLOCKS = 24 };

/* ---- a UCX that supports GPU memory ---- */

static bool knows_gpus;           /* UCX claims support for GPU memory */
static bool forgets_device;       /* its keys of GPU memory lack the NIC's part */
static struct iovec gpu_pools[2]; /* mapped as GPU memory */
static int n_gpu_pools, n_host_maps, n_arrivals, n_exports;
static bool has_dmabuf;

/* Stores the address of UCX's own function. Uses memcpy: ISO C has no cast between void * and
 * function pointers. */
static void real(const char *name, void *function)
{
    void *p = dlsym(RTLD_NEXT, name);
    CHECK(p);
    memcpy(function, &p, sizeof p);
}

ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t *attr)
{
    ucs_status_t (*query)(ucp_context_h, ucp_context_attr_t *);
    real("ucp_context_query", &query);
    ucs_status_t st = query(context, attr);
    if (st == UCS_OK && (attr->field_mask & UCP_ATTR_FIELD_MEMORY_TYPES) && knows_gpus)
        attr->memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
    return st;
}

/* The emulated GPU protects its memory with this call; memory that a NIC may write stays open. */
int mprotect(void *at, size_t n, int access)
{
    for (int i = 0; i < n_gpu_pools; i++)
        if ((char *)gpu_pools[i].iov_base >= (char *)at &&
            (char *)gpu_pools[i].iov_base < (char *)at + n)
            access = PROT_READ | PROT_WRITE;
    return (int)syscall(SYS_mprotect, at, n, access);
}

ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *out)
{
    ucs_status_t (*map)(ucp_context_h, const ucp_mem_map_params_t *, ucp_mem_h *);
    ucp_mem_map_params_t p = *params;
    real("ucp_mem_map", &map);
    CHECK(p.field_mask & UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE);
    if (p.memory_type == UCS_MEMORY_TYPE_CUDA && n_gpu_pools < 2)
        gpu_pools[n_gpu_pools++] = (struct iovec){ p.address, p.length };
    n_host_maps += p.memory_type == UCS_MEMORY_TYPE_HOST;
    p.memory_type = UCS_MEMORY_TYPE_HOST; /* what it really is */
    return map(context, &p, out);
}

/* Packs the second of two keys (the staging memory's) like a device that cannot register the
 * pool. */
ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memory, void **key, size_t *n)
{
    static int calls;
    ucs_status_t (*pack)(ucp_context_h, ucp_mem_h, void **, size_t *);
    real("ucp_rkey_pack", &pack);
    ucs_status_t st = pack(context, memory, key, n);
    if (st == UCS_OK && forgets_device && ++calls % 2 == 0) *n += 9;
    return st;
}

/* ---- a GPU with GPUDirect RDMA ---- */

static enum status give_dmabuf(struct device *d, const struct dev_mem *m, int *fd, struct err *err)
{
    (void)d;
    if (!has_dmabuf)
        return err_set(err, ERR_UNSUPPORTED,
                       "NICs cannot write into this GPU's memory: a test says so");
    CHECK_EQ_INT(m->kind, DEV_MEM_CUDA);
    *fd = memfd_create("test", 0);
    n_exports++;
    return *fd >= 0 ? OK : ERR_IO;
}

static enum status count_arrivals(struct device *d)
{
    (void)d;
    __atomic_add_fetch(&n_arrivals, 1, __ATOMIC_RELAXED);
    return OK;
}

static void make_direct(struct device *d)
{
    static struct device_ops ops;
    static struct device_sharing_ops sharing;
    if (d->is_host) return;
    ops = *d->ops;
    sharing = *ops.sharing;
    sharing.dmabuf = give_dmabuf;
    sharing.flush_rdma_writes = count_arrivals;
    ops.sharing = &sharing;
    d->ops = &ops;
}

static void need_all(void)
{
    ucp_context_attr_t attr = { .field_mask = UCP_ATTR_FIELD_MEMORY_TYPES };
    ucp_params_t p = { .field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA };
    ucp_context_h context;
#ifdef __SANITIZE_THREAD__
    SKIP("ThreadSanitizer ends the process when a thread of UCX does (libucm calls into it then): "
         "ucx is NOT tested");
#endif
#ifndef BATON_EMULATED_GPU
    SKIP("no emulated GPU: what ucx does with pools in GPU memory is NOT tested");
#endif
    CHECK_EQ_INT(ucp_init(&p, NULL, &context), UCS_OK);
    CHECK_EQ_INT(ucp_context_query(context, &attr), UCS_OK);
    ucp_cleanup(context);
    if (attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA))
        SKIP("a UCX that knows GPUs: this test pretends to be one");
    setenv("BATON_UCX_TLS", "tcp", 1);
}

static struct node *start(const char *device, uint32_t dtype, uint32_t block_tokens)
{
    struct kv_layout l = small_layout(BLOCKS);
    l.dtype = dtype;
    l.block_tokens = block_tokens;
    return node_start((struct node_options){
        .layout = l, .protocols = "ucx", .lossy = true, .device = device, .opened = make_direct });
}

/* Checks that the receiver's blocks hold kvt_convert_piece of the sender's. */
static void check_converted(struct node *from, const int32_t *src, struct node *to,
                            const int32_t *dst)
{
    struct kvt_head_slice a = head_slice_all(&from->layout), b = head_slice_all(&to->layout);
    char *piece = malloc(kv_layout_piece_bytes(&to->layout));
    struct kvt_copy *copies = malloc(sizeof *copies * kvt_plan_max_copies(&to->layout));
    node_pull(to);
    for (uint32_t layer = 0; layer < to->layout.n_layers; layer++)
        for (uint32_t i = 0; i < kvt_plan_n_blocks(&to->layout, TOKENS); i++) {
            kvt_convert_piece(&a, from->image, src, &b, TOKENS, layer, i, piece);
            uint32_t n = kvt_plan_copies_from(0, &b, dst, TOKENS,
                                              (struct kvt_block_range){ layer, i, 1 }, copies);
            for (uint32_t k = 0; k < n; k++)
                CHECK(memcmp(to->image + copies[k].remote, piece + copies[k].local,
                             copies[k].bytes) == 0);
        }
    free(piece);
    free(copies);
}

static void move(struct node *from, struct node *to, uint64_t id)
{
    int32_t src[TOKENS], dst[TOKENS];
    struct buf grant = { 0 };
    struct err err = { 0 };
    random_table(BLOCKS, kvt_plan_n_blocks(&from->layout, TOKENS), src);
    random_table(BLOCKS, kvt_plan_n_blocks(&to->layout, TOKENS), dst);
    pool_set(to, 0xee);
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        fill_layer(from, id, layer, src, 0, kvt_plan_n_blocks(&from->layout, TOKENS));
    uint64_t peer = node_connect(from, to);
    CHECK_OK(
        kvt_expect(to->kvt, id, dst, kvt_plan_n_blocks(&to->layout, TOKENS), 0, TOKENS, &grant));
    CHECK_OK(kvt_send_open(from->kvt, id, peer, buf_str(&grant), &err));
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        CHECK_OK(kvt_send_ready_after(from->kvt, id, layer, 0, TOKENS, src,
                                      device_record_event(from->device)));
    kvt_send_finish(from->kvt, id);
    CHECK_EQ_INT(node_wait(to, KVT_RECEIVED, id, 20000).bytes,
                 layout_total_bytes(&to->layout, TOKENS, 0));
    node_wait(from, KVT_SENT, id, 5000);
    check_converted(from, src, to, dst);
    buf_release(&grant);
}

/* GPU to host, host to GPU, GPU to GPU: pools are mapped with their memory type, and received bytes
 * are made visible to the GPU. */
TEST(pools_in_gpu_memory_by_ucx)
{
    static const char *const ends[][2] = { { "cuda", "cpu" },
                                           { "cpu", "cuda" },
                                           { "cuda", "cuda" } };
    need_all();
    knows_gpus = has_dmabuf = true;
    for (size_t i = 0; i < COUNT_OF(ends); i++) {
        n_gpu_pools = n_arrivals = n_exports = n_host_maps = 0;
        struct node *from = start(ends[i][0], DTYPE_BF16, 16),
                    *to = start(ends[i][1], DTYPE_BF16, 16);
        int n_gpus = !from->device->is_host + !to->device->is_host;
        CHECK_EQ_INT(n_gpu_pools, n_gpus);
        CHECK_EQ_INT(n_exports, n_gpus);
        CHECK_EQ_INT(n_host_maps, 2 + 2 - n_gpus); /* both staging memories, pools in host memory */
        for (int k = 0; k < n_gpus; k++)
            CHECK(gpu_pools[k].iov_base == from->mem.ptr || gpu_pools[k].iov_base == to->mem.ptr);
        move(from, to, i + 1);
        CHECK((__atomic_load_n(&n_arrivals, __ATOMIC_RELAXED) > 0) == !to->device->is_host);
        node_stop(from);
        node_stop(to);
    }
}

/* Pieces converted in staging memory are sent by ucx too. */
TEST(another_layout_from_a_gpu_by_ucx)
{
    need_all();
    knows_gpus = has_dmabuf = true;
    struct node *from = start("cuda", DTYPE_BF16, 64), *to = start("cuda", DTYPE_BF16, 16);
    move(from, to, 7);
    node_stop(from);
    node_stop(to);
}

static void check_refused(const char *says)
{
    struct kvt *k = NULL;
    struct err err = { 0 };
    struct node *n = node_start((struct node_options){
        .layout = small_layout(4), .protocols = "tcp", .device = "cuda", .opened = make_direct });
    struct kvt_options o = {
        .layout = n->layout,
        .mem = &n->mem,
        .device = n->device,
        .protocols = "ucx",
        .n_transfers = 1,
        .tuning = tuning_of_environment(NULL),
        .on_event = node_on_event,
        .arg = n,
    };
    CHECK_STATUS(kvt_create(&o, &k, &err), ERR_CONFIG);
    if (!strstr(err.text, says) || !strstr(err.text, "ucx: "))
        test_fail(__FILE__, __LINE__, "'%s' does not say '%s'", err.text, says);
    CHECK(k == NULL);
    node_stop(n);
}

TEST(a_ucx_without_cuda_is_refused)
{
    need_all();
    has_dmabuf = true;
    check_refused("was built without CUDA");
    check_refused("tcp");
}

TEST(a_gpu_that_nics_cannot_write_is_refused)
{
    need_all();
    knows_gpus = true;
    check_refused("NICs cannot write into this GPU's memory");
}

TEST(a_device_that_cannot_register_gpu_memory_is_refused)
{
    need_all();
    knows_gpus = has_dmabuf = forgets_device = true;
    check_refused("nvidia_peermem");
}

TEST_MAIN(CASE(pools_in_gpu_memory_by_ucx), CASE(another_layout_from_a_gpu_by_ucx),
          CASE(a_ucx_without_cuda_is_refused), CASE(a_gpu_that_nics_cannot_write_is_refused),
          CASE(a_device_that_cannot_register_gpu_memory_is_refused))
#else
TEST(ucx_is_built) { SKIP("built without UCX: KV by ucx from and to GPU memory is NOT tested"); }
TEST_MAIN(CASE(ucx_is_built))
#endif
