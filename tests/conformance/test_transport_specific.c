/* test_transport_specific.c - guarantees of single transports beyond the common contract: several
 * tcp connections per peer and their loss, a full descriptor table, copiers, pools in private
 * memory, GPU pools, interfaces. test_transports runs the common contract over these configurations
 * with BATON_* variables set (tests/CMakeLists.txt). */
#include <dirent.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "kvtransfer/connect/address.h"
#include "kvtransfer/local/ipc.h"
#include "kvtransfer/transports.h"
#include "tests/conformance/kvt_fixture.h"

/* Pieces of 256 KiB and puts of 1 MiB, so that puts are really split into slices and jobs. */
static struct kv_layout large_layout(void)
{
    return (struct kv_layout){
        .model_fingerprint = 7,
        .dtype = DTYPE_BF16,
        .block_tokens = 64,
        .n_layers = 3,
        .n_kv_heads = 8,
        .model_kv_heads = 8,
        .head_dim = 128,
        .tp_size = 1,
        .n_blocks = 24,
    };
}

static struct node_options large(const char *transport)
{
    return (struct node_options){ .layout = large_layout(), .protocols = transport };
}

static void random_bytes_of(struct node *n, uint64_t seed)
{
    uint64_t *p = (uint64_t *)(void *)n->image;
    for (size_t i = 0; i < kv_layout_pool_bytes(&n->layout) / 8; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        p[i] = seed ^ seed >> 29;
    }
    node_push(n);
}

/* Opens a transfer and pushes everything; the caller finishes it and waits. */
static void push(struct node *from, struct node *to, uint64_t peer, uint64_t id, const int32_t *src,
                 const int32_t *dst, uint32_t n_tokens)
{
    struct buf grant = { 0 };
    struct err err = { 0 };
    uint32_t n = kvt_plan_n_blocks(&to->layout, n_tokens);
    CHECK_OK(kvt_expect(to->kvt, id, dst, n, 0, n_tokens, &grant));
    CHECK_OK(kvt_send_open(from->kvt, id, peer, buf_str(&grant), &err));
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        CHECK_OK(kvt_send_ready(from->kvt, id, layer, 0, n_tokens, src));
    buf_release(&grant);
}

static void check_moved(struct node *from, struct node *to, const int32_t *src, const int32_t *dst,
                        uint32_t n_full)
{
    node_pull(to);
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        for (uint32_t i = 0; i < n_full; i++)
            if (memcmp(piece_of(from, layer, src[i]), piece_of(to, layer, dst[i]),
                       kv_layout_piece_bytes(&to->layout)) != 0)
                test_fail(__FILE__, __LINE__, "layer %u position %u differs", layer, i);
}

static void check_all_bytes(struct node *n, char value)
{
    const char *p = n->image;
    node_pull(n);
    CHECK_EQ_INT(p[0], value);
    CHECK(memcmp(p, p + 1, kv_layout_pool_bytes(&n->layout) - 1) == 0);
}

/* Fewer tokens where an emulated GPU computes the checksums (0.1 s per MiB; the sender waits 5 s
 * for the acknowledgement), but more than a frame. */
static uint32_t most_tokens(void) { return getenv("BATON_TEST_KV_DEVICES") ? 5 * 64 : 24 * 64; }

/* Large pieces over a transport, with full and partly filled last blocks; then a transfer that is
 * cancelled in flight, after which the pool must not change. */
static void large_transfers(const char *transport)
{
    struct node *from = node_start(large(transport)), *to = node_start(large(transport));
    uint64_t peer = node_connect(from, to);
    int32_t src[24], dst[24];
    srand(3);
    for (uint64_t id = 1; id <= 6; id++) {
        uint32_t n_tokens = most_tokens() - (uint32_t)(id - 1) * 37;
        random_table(24, 24, src);
        random_table(24, 24, dst);
        random_bytes_of(from, id);
        push(from, to, peer, id, src, dst, n_tokens);
        kvt_send_finish(from->kvt, id);
        node_wait(to, KVT_RECEIVED, id, 10000);
        node_wait(from, KVT_SENT, id, 10000);
        check_moved(from, to, src, dst, n_tokens / 64);
    }
    for (uint64_t id = 10; id < 22; id++) {
        push(from, to, peer, id, src, dst, most_tokens());
        if (id % 2) kvt_send_cancel(from->kvt, id);
        else kvt_expect_cancel(to->kvt, id);
        node_wait(to, KVT_FENCED, id, 5000);
        pool_set(to, 0x66);
        node_wait(from, KVT_SEND_FAILED, id, 5000);
        random_bytes_of(from, id); /* the source is the sender's again: nothing may still read it */
        check_all_bytes(to, 0x66);
    }
    /* disconnected with everything in flight */
    push(from, to, peer, 40, src, dst, most_tokens());
    kvt_disconnect(from->kvt, peer);
    node_wait(from, KVT_PEER_LOST, peer, 3000);
    node_wait(to, KVT_FENCED, 40, 3000);
    pool_set(to, 0x77);
    pause_ms(20);
    check_all_bytes(to, 0x77);
    node_stop(from);
    node_stop(to);
}

TEST(large_transfers_tcp) { large_transfers("tcp"); }
TEST(large_transfers_ipc) { large_transfers("ipc"); }
TEST(large_transfers_mem) { large_transfers("mem"); }
TEST(large_transfers_tcp_connections)
{
    setenv("BATON_TCP_CONNECTIONS", "5", 1);
    large_transfers("tcp");
}
TEST(large_transfers_tcp_zerocopy)
{
    setenv("BATON_TCP_CONNECTIONS", "2", 1);
    setenv("BATON_TCP_ZEROCOPY", "on", 1);
    large_transfers("tcp");
}
TEST(large_transfers_ipc_copiers)
{
    setenv("BATON_IPC_COPIERS", "4", 1);
    large_transfers("ipc");
}
TEST(large_transfers_mem_copiers)
{
    setenv("BATON_IPC_COPIERS", "3", 1);
    large_transfers("mem");
}
TEST(large_transfers_ipc_cma)
{
    setenv("BATON_IPC_CMA", "on", 1);
    setenv("BATON_IPC_COPIERS", "2", 1);
    large_transfers("ipc");
}

/* ---- several connections ---- */

/* Finds the sockets of this process whose remote port is `port`. */
static int sockets_to(uint16_t port, int *fds, int cap)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    CHECK(d != NULL);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        struct sockaddr_in a;
        socklen_t len = sizeof a;
        int fd = atoi(e->d_name);
        if (e->d_name[0] == '.' || getpeername(fd, (struct sockaddr *)&a, &len) != 0 ||
            a.sin_family != AF_INET || ntohs(a.sin_port) != port)
            continue;
        if (n < cap) fds[n] = fd;
        n++;
    }
    closedir(d);
    return n;
}

TEST(tcp_opens_the_connections_asked_for)
{
    setenv("BATON_TCP_CONNECTIONS", "6", 1);
    struct node *from = node_start(large("tcp")), *to = node_start(large("tcp"));
    node_connect(from, to);
    CHECK_EQ_INT(sockets_to(kvt_port(to->kvt), NULL, 0), 6);
    node_stop(from);
    node_stop(to);
}

/* The loss of any one connection: both sides report the peer as lost, the transfer fails, and a new
 * connection works. */
TEST(tcp_loss_of_one_connection_is_the_peers)
{
    enum { N = 3 };
    char number[8];
    snprintf(number, sizeof number, "%d", N);
    setenv("BATON_TCP_CONNECTIONS", number, 1);
    struct node *from = node_start(large("tcp")), *to = node_start(large("tcp"));
    int32_t table[24];
    random_table(24, 24, table);
    for (uint64_t lost = 0; lost < N; lost++) {
        uint64_t peer = node_connect(from, to), id = 100 + lost;
        int fds[N];
        CHECK_EQ_INT(sockets_to(kvt_port(to->kvt), fds, N), N);
        push(from, to, peer, id, table, table, 24 * 64);
        shutdown(fds[lost], SHUT_RDWR);
        CHECK_STATUS(node_wait(from, KVT_PEER_LOST, peer, 3000).status, ERR_PEER_LOST);
        node_wait(from, KVT_SEND_FAILED, id, 3000);
        kvt_expect_cancel(to->kvt, id); /* for a receiver that did not know the transfer yet */
        node_wait(to, KVT_RECEIVE_FAILED, id, 3000);
        node_wait(to, KVT_FENCED, id, 3000);
        CHECK_EQ_INT(node_count(to, KVT_FENCED, id), 1);
    }
    uint64_t peer = node_connect(from, to);
    push(from, to, peer, 1, table, table, 24 * 64);
    kvt_send_finish(from->kvt, 1);
    node_wait(to, KVT_RECEIVED, 1, 10000);
    node_stop(from);
    node_stop(to);
}

/* A further connection with a ticket that does not belong to the first one is refused, and the peer
 * continues. */
TEST(tcp_stranger_cannot_join)
{
    setenv("BATON_TCP_CONNECTIONS", "2", 1);
    struct node *from = node_start(large("tcp")), *to = node_start(large("tcp"));
    uint64_t peer = node_connect(from, to);
    for (int i = 0; i < 4; i++) {
        struct sockaddr_in a = {
            .sin_family = AF_INET,
            .sin_port = htons(kvt_port(to->kvt)),
            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
        };
        struct kvt_preamble p = { .kind = KVT_PREAMBLE_TICKET };
        uint8_t bytes[KVT_PREAMBLE_BYTES];
        memset(p.ticket, i, sizeof p.ticket);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK_OK(connect(fd, (struct sockaddr *)&a, sizeof a));
        kvt_preamble_encode(&p, bytes);
        CHECK(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL) == sizeof bytes);
        CHECK(recv(fd, bytes, sizeof bytes, MSG_WAITALL) == sizeof bytes);
        CHECK_OK(kvt_preamble_decode(bytes, sizeof bytes, &p));
        CHECK_EQ_INT(p.kind, KVT_PREAMBLE_REFUSED);
        CHECK(recv(fd, bytes, sizeof bytes, 0) == 0);
        close(fd);
    }
    CHECK(node_transport(from, peer) != NULL);
    node_stop(from);
    node_stop(to);
}

static double cpu_seconds(void)
{
    struct rusage u;
    CHECK_OK(getrusage(RUSAGE_SELF, &u));
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* Starts to connect with so few free descriptors that the receiver cannot accept. Both ends are in
 * this process: if the receiver takes the descriptor that the connecting side needs for the pidfd,
 * neither makes progress, and the attempt is repeated. */
static uint64_t connect_in_full_table(struct node *from, struct node *to, rlim_t room,
                                      const struct rlimit *limit)
{
    struct buf hello = { 0 }, answer = { 0 };
    struct err err = { 0 };
    struct rlimit full = *limit;
    uint64_t peer = 0;
    for (int tries = 0; tries < 50; tries++) {
        buf_clear(&hello);
        buf_clear(&answer);
        kvt_hello(from->kvt, &hello);
        CHECK_OK(kvt_answer(to->kvt, buf_str(&hello), &answer, &err));
        int next = dup(0);
        close(next);
        full.rlim_cur = (rlim_t)next + room;
        CHECK_OK(setrlimit(RLIMIT_NOFILE, &full));
        CHECK_OK(kvt_connect(from->kvt, buf_str(&answer), &peer, &err));
        pause_ms(100);
        if (node_count(from, KVT_PEER_LOST, peer) == 0) break;
        CHECK_OK(setrlimit(RLIMIT_NOFILE, limit));
        pause_ms(100); /* the receiver closes its end */
    }
    buf_release(&hello);
    buf_release(&answer);
    return peer;
}

/* No free descriptor: a connection waits in the listener's queue without a busy loop, and is
 * accepted when a descriptor is free again. */
static void full_table(const char *transport)
{
    struct node *from = node_start(large(transport)), *to = node_start(large(transport));
    struct rlimit limit;
    CHECK_OK(getrlimit(RLIMIT_NOFILE, &limit));
    /* the connecting side's socket (ipc: also its pidfd) */
    uint64_t peer = connect_in_full_table(from, to, strcmp(transport, "tcp") == 0 ? 1 : 2, &limit);
    double before = cpu_seconds();
    pause_ms(600);
    double used = cpu_seconds() - before;
    CHECK_EQ_INT(node_count(from, KVT_CONNECTED, peer), 0);
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &limit));
    node_wait(from, KVT_CONNECTED, peer, 2500);
    if (used > 0.3)
        test_fail(__FILE__, __LINE__, "%.2f s of CPU time while waiting 0.6 s for a descriptor",
                  used);
    node_stop(from);
    node_stop(to);
}

TEST(full_descriptor_table_tcp) { full_table("tcp"); }
TEST(full_descriptor_table_ipc) { full_table("ipc"); }

/* Descriptors for the connecting socket alone, or for both ends' sockets and pidfds but not for the
 * pool's: the connection is refused for that reason, and a WELCOME without its descriptor is not
 * misread. */
static void no_room(rlim_t descriptors)
{
    struct node *from = node_start(large("ipc")), *to = node_start(large("ipc"));
    struct rlimit limit, full;
    struct buf hello = { 0 }, answer = { 0 };
    struct err err = { 0 };
    uint64_t peer;
    kvt_hello(from->kvt, &hello);
    CHECK_OK(kvt_answer(to->kvt, buf_str(&hello), &answer, &err));
    CHECK_OK(getrlimit(RLIMIT_NOFILE, &limit));
    int next = dup(0);
    close(next);
    full = limit;
    full.rlim_cur = (rlim_t)next + descriptors;
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &full));
    CHECK_OK(kvt_connect(from->kvt, buf_str(&answer), &peer, &err));
    struct kvt_event lost = node_wait(from, KVT_PEER_LOST, peer, 3000);
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &limit));
    CHECK_STATUS(lost.status, ERR_FULL);
    CHECK(strstr(lost.text, "file descriptor"));
    buf_release(&hello);
    buf_release(&answer);
    node_stop(from);
    node_stop(to);
}

TEST(ipc_no_room_for_a_pidfd) { no_room(1); }
TEST(ipc_no_room_for_the_pools_descriptor) { no_room(4); }

TEST(tcp_interface_of_its_own)
{
    struct kvt *k = NULL;
    struct err err = { 0 };
    struct buf name = { 0 };
    struct node *n = node_start(large("mem"));
    struct kvt_options o = {
        .layout = n->layout,
        .mem = &n->mem,
        .protocols = "tcp",
        .listen_host = "0.0.0.0",
        .n_transfers = 1,
        .tuning = { .socket_ifname = "nosuch0" },
        .on_event = node_on_event,
        .arg = n,
    };
    CHECK_STATUS(kvt_create(&o, &k, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "nosuch0") && strstr(err.text, "lo"));
    o.listen_host = "127.0.0.1"; /* an error although the interface would not be used */
    CHECK_STATUS(kvt_create(&o, &k, &err), ERR_CONFIG);
    o.listen_host = "0.0.0.0";
    CHECK_OK(kvt_address_of_interface("lo", &name, &err));
    CHECK_EQ_STR(name.data, "127.0.0.1");
    o.tuning.socket_ifname = "lo";
    CHECK_OK(kvt_create(&o, &k, &err));
    struct buf hello = { 0 }, answer = { 0 };
    struct kvt_answer_msg m;
    kvt_hello(k, &hello);
    CHECK_OK(kvt_answer(k, buf_str(&hello), &answer, &err));
    CHECK_OK(kvt_answer_decode(buf_str(&answer), &m, &err));
    CHECK(m.transports[0].address.n > 10 &&
          memcmp(m.transports[0].address.p, "127.0.0.1 ", 10) == 0);
    struct kvt *second = NULL;
    o.port = kvt_port(k);
    CHECK_STATUS(kvt_create(&o, &second, &err), ERR_CONFIG);
    CHECK(str_starts(str_of(err.text), "cannot listen on 127.0.0.1:"));
    kvt_free(k);
    buf_release(&name);
    buf_release(&hello);
    buf_release(&answer);
    node_stop(n);
}

/* ---- pools in private memory ---- */

TEST(ipc_private_pool_by_cma)
{
    struct node *from = node_start(large("ipc")), *to = calloc(1, sizeof *to);
    struct err err = { 0 };
    pthread_mutex_init(&to->lock, NULL);
    to->layout = large_layout();
    CHECK_OK(device_open("cpu", &to->device, &err));
    CHECK_OK(device_mem_alloc(to->device, kv_layout_pool_bytes(&to->layout), DEVICE_MEM_PRIVATE,
                              &to->mem, &err));
    CHECK_EQ_INT(to->mem.fd, -1);
    to->image = to->mem.ptr;
    struct kvt_options o = {
        .layout = to->layout,
        .mem = &to->mem,
        .protocols = "ipc",
        .checksum = true,
        .n_transfers = 4,
        .tuning = { .cma = KVT_OFF },
        .on_event = node_on_event,
        .arg = to,
    };
    CHECK_STATUS(kvt_create(&o, &to->kvt, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "private"));
    o.tuning.cma = KVT_AUTO;
    CHECK_OK(kvt_create(&o, &to->kvt, &err));
    uint64_t peer = node_connect(from, to);
    int32_t src[24], dst[24];
    random_table(24, 24, src);
    random_table(24, 24, dst);
    random_bytes_of(from, 9);
    push(from, to, peer, 1, src, dst, 24 * 64);
    kvt_send_finish(from->kvt, 1);
    node_wait(to, KVT_RECEIVED, 1, 10000);
    check_moved(from, to, src, dst, 24);
    node_stop(from);
    node_stop(to);
}

/* ---- GPU pools ---- */

/* ---- a writer played by hand ---- */

static enum status admit_all(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    (void)arg, (void)ticket;
    return OK;
}

struct writer {
    int fd;
    _Atomic bool left;
};

/* After end of file the writer needs a moment more before it leaves the pool. */
static void *leave_slowly(void *arg)
{
    struct writer *w = arg;
    uint8_t bytes[KVT_MESSAGE_MAX];
    CHECK_EQ_INT(recv(w->fd, bytes, sizeof bytes, 0), 0);
    pause_ms(100);
    atomic_store(&w->left, true);
    close(w->fd);
    return NULL;
}

/* A pool whose address a writer has may be freed only after that writer has left it. */
TEST(ipc_close_waits_for_writers_by_address)
{
    static char pool[4096];
    struct dev_mem mem = { .ptr = pool, .bytes = sizeof pool, .fd = -1 };
    struct kvt_env env = { .mem = &mem, .max_copies = 4, .max_peers = 4, .admit = admit_all };
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    struct kvt_transport *t = NULL;
    struct kvt_transport_event in[4];
    struct buf address = { 0 };
    struct err err = { 0 };
    struct writer w = { .left = false };
    uint8_t bytes[KVT_PREAMBLE_BYTES];
    pthread_t thread;
    CHECK_OK(kvt_ipc_ops.open(&env, &t, &err));
    kvt_ipc_ops.export_address(t, &address);
    int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "baton-ipc-%.*s",
                     LOCAL_NAME_CHARS, address.data + LOCAL_BOOT_CHARS);
    w.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK_OK(connect(w.fd, (struct sockaddr *)&name,
                     (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)));
    kvt_preamble_encode(&(struct kvt_preamble){ .kind = KVT_PREAMBLE_TICKET }, bytes);
    CHECK_EQ_INT(send(w.fd, bytes, sizeof bytes, 0), sizeof bytes);
    size_t got = 0;
    for (uint64_t end = clock_ms() + 3000; got == 0 && clock_ms() < end;)
        got = kvt_ipc_ops.poll(t, in, COUNT_OF(in));
    CHECK_EQ_INT(got, 1);
    CHECK_EQ_INT(in[0].kind, KVT_UP);
    CHECK_EQ_INT(recv(w.fd, bytes, sizeof bytes, 0), sizeof bytes); /* WELCOME, by address */
    CHECK_OK(pthread_create(&thread, NULL, leave_slowly, &w));
    kvt_ipc_ops.close(t);
    CHECK(atomic_load(&w.left));
    pthread_join(thread, NULL);
    buf_release(&address);
}

TEST(ipc_gpu_pool_needs_a_gpu)
{
    struct kvt *k = NULL;
    struct err err = { 0 };
    struct node *n = node_start(large("mem"));
    struct dev_mem gpu = n->mem;
    gpu.kind = DEV_MEM_CUDA;
    struct kvt_options o = {
        .layout = n->layout,
        .mem = &gpu,
        .protocols = "ipc",
        .n_transfers = 1,
        .on_event = node_on_event,
        .arg = n,
    };
    CHECK_STATUS(kvt_create(&o, &k, &err), ERR_INVALID);
    CHECK(strstr(err.text, "no device was given"));
    /* Host memory that claims to be GPU memory: no handle of it exists. */
    o.device = n->device;
    CHECK_STATUS(kvt_create(&o, &k, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "ipc: ") && strstr(err.text, "handle"));
    CHECK(k == NULL);
    CHECK(!ipc_is_device_offer(n->mem.fd) && !ipc_is_device_offer(-1));
    node_stop(n);
}

/* A node whose pool is in GPU memory, every byte `fill`. */
static struct node *gpu_node(int fill, bool checksum)
{
    struct node *n = calloc(1, sizeof *n);
    struct err err = { 0 };
    pthread_mutex_init(&n->lock, NULL);
    n->layout = large_layout();
    CHECK_OK(device_open("cuda", &n->device, &err));
    CHECK_OK(device_mem_alloc(n->device, kv_layout_pool_bytes(&n->layout), DEVICE_MEM_SHARED,
                              &n->mem, &err));
    n->image = malloc(n->mem.bytes);
    pool_set(n, fill);
    struct kvt_options o = {
        .layout = n->layout,
        .mem = &n->mem,
        .device = n->device,
        .protocols = "ipc",
        .checksum = checksum,
        .n_transfers = 4,
        .on_event = node_on_event,
        .arg = n,
    };
    if (kvt_create(&o, &n->kvt, &err) != OK)
        test_fail(__FILE__, __LINE__, "kvt_create: %s", err.text);
    return n;
}

/* Transfers of fewer and fewer tokens, each after an event. Transfer i has the bytes of seed i. */
enum { GPU_TRANSFERS = 4 };
static uint32_t gpu_tokens(uint64_t id) { return 6 * 64 - (uint32_t)(id - 1) * 77; }

static _Noreturn void gpu_sender(int in, int out, bool checksum)
{
    struct node *n = gpu_node(0x5b, checksum);
    struct buf b = { 0 };
    struct err err = { 0 };
    uint64_t peer;
    int32_t table[24];
    srand(9);
    random_table(24, 24, table);
    kvt_hello(n->kvt, &b);
    pipe_put(out, &b);
    pipe_take(in, &b);
    CHECK_OK(kvt_connect(n->kvt, buf_str(&b), &peer, &err));
    node_wait(n, KVT_CONNECTED, peer, 5000);
    for (uint64_t id = 1; id <= GPU_TRANSFERS; id++) {
        pipe_take(in, &b);
        CHECK_OK(kvt_send_open(n->kvt, id, peer, buf_str(&b), &err));
        random_bytes_of(n, id);
        for (uint32_t layer = 0; layer < n->layout.n_layers; layer++) {
            uint32_t half = gpu_tokens(id) / 2;
            CHECK_OK(kvt_send_ready_after(n->kvt, id, layer, 0, half, table,
                                          device_record_event(n->device)));
            CHECK_OK(kvt_send_ready_after(n->kvt, id, layer, half, gpu_tokens(id), table,
                                          device_record_event(n->device)));
        }
        kvt_send_finish(n->kvt, id);
        node_wait(n, KVT_SENT, id, 30000);
    }
    pipe_take(in, &b); /* a transfer that is cancelled in the middle */
    CHECK_OK(kvt_send_open(n->kvt, 9, peer, buf_str(&b), &err));
    CHECK_OK(kvt_send_ready_after(n->kvt, 9, 0, 0, 24 * 64, table, device_record_event(n->device)));
    kvt_send_cancel(n->kvt, 9);
    node_wait(n, KVT_SEND_FAILED, 9, 5000);
    node_stop(n);
    _exit(0);
}

static void gpu_pools(bool checksum)
{
    int down[2], up[2], status;
    CHECK_OK(pipe(down));
    CHECK_OK(pipe(up));
    pid_t child = fork(); /* before this process uses CUDA */
    if (child == 0) {
        char go;
        if (read(down[0], &go, 1) != 1 || go != 'g') _exit(0);
        gpu_sender(down[0], up[1], checksum);
    }
    bool has = device_count("cuda") > 0;
    CHECK(write(down[1], has ? "g" : "n", 1) == 1);
    if (!has) SKIP("no GPU here: KV between GPU pools of two processes (CUDA IPC)");
    /* `from`: the sender's bytes, generated here again */
    struct node *to = gpu_node(0x11, checksum), *from = calloc(1, sizeof *from);
    struct buf b = { 0 }, answer = { 0 };
    struct err err = { 0 };
    int32_t table[24], src[24];
    srand(9);
    random_table(24, 24, src);
    random_table(24, 24, table);
    from->layout = to->layout;
    from->image = from->mem.ptr = malloc(to->mem.bytes);
    pipe_take(up[0], &b);
    CHECK_OK(kvt_answer(to->kvt, buf_str(&b), &answer, &err));
    pipe_put(down[1], &answer);
    for (uint64_t id = 1; id <= GPU_TRANSFERS; id++) {
        uint32_t n_blocks = kvt_plan_n_blocks(&to->layout, gpu_tokens(id));
        buf_clear(&b);
        CHECK_OK(kvt_expect(to->kvt, id, table, n_blocks, 0, gpu_tokens(id), &b));
        pipe_put(down[1], &b);
        CHECK_EQ_INT(node_wait(to, KVT_RECEIVED, id, 30000).bytes,
                     layout_total_bytes(&to->layout, gpu_tokens(id), 0));
        random_bytes_of(from, id);
        check_moved(from, to, src, table, gpu_tokens(id) / 64);
        pool_set(to, 0x11);
    }
    buf_clear(&b);
    CHECK_OK(kvt_expect(to->kvt, 9, table, 24, 0, 24 * 64, &b));
    pipe_put(down[1], &b);
    node_wait(to, KVT_RECEIVE_FAILED, 9, 5000);
    node_wait(to, KVT_FENCED, 9, 5000);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK_EQ_INT(node_count(to, KVT_RECEIVED, 9), 0);
    free(from->image);
    free(from);
    buf_release(&b);
    buf_release(&answer);
    node_stop(to);
}

TEST(ipc_gpu_pools) { gpu_pools(true); }
TEST(ipc_gpu_pools_without_checksums) { gpu_pools(false); }

/* tcp within one host, with GPU pools on both sides or on one. */
static void gpu_by_tcp(const char *devices)
{
    setenv("BATON_TEST_KV_DEVICES", devices, 1);
    large_transfers("tcp");
}
TEST(large_transfers_tcp_gpu) { gpu_by_tcp("cuda"); }
TEST(large_transfers_tcp_gpu_to_host) { gpu_by_tcp("cuda,cpu"); }
TEST(large_transfers_tcp_host_to_gpu)
{
    setenv("BATON_TCP_CONNECTIONS", "5", 1);
    gpu_by_tcp("cpu,cuda");
}

TEST_MAIN(CASE(large_transfers_tcp), CASE(large_transfers_ipc), CASE(large_transfers_mem),
          CASE(large_transfers_tcp_connections), CASE(large_transfers_tcp_zerocopy),
          CASE(large_transfers_ipc_copiers), CASE(large_transfers_mem_copiers),
          CASE(large_transfers_ipc_cma), CASE(tcp_opens_the_connections_asked_for),
          CASE(tcp_loss_of_one_connection_is_the_peers), CASE(tcp_stranger_cannot_join),
          CASE(full_descriptor_table_tcp), CASE(full_descriptor_table_ipc),
          CASE(ipc_no_room_for_a_pidfd), CASE(ipc_no_room_for_the_pools_descriptor),
          CASE(tcp_interface_of_its_own), CASE(ipc_private_pool_by_cma),
          CASE(ipc_close_waits_for_writers_by_address), CASE(ipc_gpu_pool_needs_a_gpu),
          CASE(ipc_gpu_pools), CASE(ipc_gpu_pools_without_checksums), CASE(large_transfers_tcp_gpu),
          CASE(large_transfers_tcp_gpu_to_host), CASE(large_transfers_tcp_host_to_gpu))
