/* fuzz_node_protocol.c - hostile bytes between nodes; the first byte chooses where they go.
 *
 *   0      a frame's header: an accepted one must encode to the same bytes
 *   1      token records: likewise
 *   2      every protobuf body, and its contents (a generation, records, a command to KV tiers)
 *   3      a generation with valid sampling parameters around fuzzed tokens
 *   4, 5   a real link (accepting, dialing) over a socket: the bytes come from its peer, and a peer
 *          that does not know the secret must not bring it up
 *   6      the same after an honest handshake: frames of an authenticated peer */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/tiers/tier_message.h"
#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/cluster/generation_wire.h"
#include "shared/cluster/link.h"

enum { SELF = 7, PEER = 9 };

static void fuzz_header(struct str in)
{
    uint8_t exact[FRAME_HEADER_BYTES], again[FRAME_HEADER_BYTES];
    struct frame_header h;
    struct err err = { 0 };
    if (in.n < sizeof exact) return;
    memcpy(exact, in.p, sizeof exact);
    if (frame_header_decode(exact, &h, &err) != OK) {
        ASSERT(err.text[0] != 0);
        return;
    }
    ASSERT(h.length <= FRAME_BODY_MAX);
    ASSERT(strcmp(frame_type_name(h.type), "unknown") != 0);
    frame_header_encode(&h, again);
    ASSERT(memcmp(exact, again, sizeof again) == 0);
}

static void fuzz_records(struct str in)
{
    struct str rest = in;
    struct buf again = { 0 };
    struct token_logprobs t;
    uint64_t request;
    uint32_t attempt, index;
    while (token_record_next(&rest, &request, &attempt, &index, &t) == OK) {
        ASSERT(t.id >= 0 && t.n_top <= SAMPLER_LOGPROBS_MAX && t.ends <= FINISH_LENGTH);
        token_record_add(&again, request, attempt, index, &t);
    }
    ASSERT(again.len == in.n - rest.n);
    bool nan = false; /* a signalling NaN may become a quiet one on the way through a float */
    for (size_t i = 0; i < again.len; i++) nan |= again.data[i] != in.p[i];
    if (nan) {
        struct str second = buf_str(&again);
        while (token_record_next(&second, &request, &attempt, &index, &t) == OK) {}
        ASSERT(second.n == 0);
    }
    buf_release(&again);
}

static void fuzz_generation(const Baton__Generation *m)
{
    struct arena arena;
    struct generation_wire g;
    struct err err = { 0 };
    arena_init(&arena);
    if (m && generation_wire_decode(m, &arena, &g, &err) == OK) {
        ASSERT(g.n_prompt >= 1 && g.n_prompt <= g.n_tokens && g.n_tokens <= GENERATION_TOKENS_MAX);
        for (uint32_t i = 0; i < g.n_tokens; i++) ASSERT(g.tokens[i] >= 0);
        ASSERT(g.sampling.n_stop_ids <= SAMPLER_STOP_IDS_MAX &&
               g.sampling.n_bias <= SAMPLER_BIAS_MAX);
        ASSERT(g.sampling.temperature >= 0 && g.sampling.repetition_penalty > 0);
        Baton__Generation *again = generation_wire_encode(&g, &arena);
        struct generation_wire back;
        /* the next node must accept it too */
        ASSERT(generation_wire_decode(again, &arena, &back, NULL) == OK);
        ASSERT(back.hears_preempted == g.hears_preempted);
        ASSERT(back.has_resume_key == g.has_resume_key &&
               (!g.has_resume_key || hash128_eq(back.resume_key, g.resume_key)));
        ASSERT(back.n_tokens == g.n_tokens &&
               memcmp(back.tokens, g.tokens, g.n_tokens * sizeof *g.tokens) == 0);
    } else if (m) {
        ASSERT(err.text[0] != 0);
    }
    arena_release(&arena);
}

static void fuzz_resume_key(ProtobufCBinaryData bytes)
{
    struct hash128 key;
    if (!generation_wire_read_key(bytes, &key)) return;
    ASSERT(memcmp(generation_wire_key_bytes(&key).data, bytes.data, bytes.len) == 0);
}

/* What is read must mean the same to the next rank. */
static void fuzz_tier_command(struct str in)
{
    struct tier_message m, back;
    struct buf again = { 0 };
    if (!tier_message_read(7, in, &m)) return;
    tier_message_write(&m.c, &again);
    const bool is_good = tier_message_read(7, buf_str(&again), &back);
    ASSERT(is_good);
    ASSERT(back.c.kind == m.c.kind && back.c.tier == m.c.tier && back.c.id == m.c.id);
    ASSERT(back.c.n == m.c.n && back.c.block == m.c.block && m.c.block >= -1);
    ASSERT(hash128_eq(back.c.of.key, m.c.of.key) && hash128_eq(back.c.of.parent, m.c.of.parent));
    ASSERT(m.c.kind != TIER_PUT || back.c.of.depth == m.c.of.depth);
    if (m.c.n) ASSERT(memcmp(back.keys, m.keys, m.c.n * sizeof *m.keys) == 0);
    for (uint32_t i = 0; i < m.c.n; i++)
        ASSERT(m.c.blocks[i] >= 0 && back.c.blocks[i] == m.c.blocks[i]);
    tier_message_release(&m);
    tier_message_release(&back);
    buf_release(&again);
}

static void fuzz_tier_answer(struct str in)
{
    struct tier_answer a, back;
    struct buf again = { 0 };
    if (!tier_message_read_answer(7, in, &a)) return;
    ASSERT(a.tier < KV_TIER_KINDS);
    tier_message_write_answer(&a, &again);
    const bool is_good = tier_message_read_answer(7, buf_str(&again), &back);
    ASSERT(is_good && back.tier == a.tier && back.status == a.status && back.n_good == a.n_good);
    buf_release(&again);
}

#define BODY(type, use)                                                                            \
    do {                                                                                           \
        Baton__##type *m = (Baton__##type *)protobuf_c_message_unpack(descriptors[i], NULL, in.n,  \
                                                                      (const uint8_t *)in.p);      \
        if (!m) break;                                                                             \
        use;                                                                                       \
        protobuf_c_message_free_unpacked(&m->base, NULL);                                          \
    } while (0)

static void fuzz_bodies(struct str in)
{
    static const ProtobufCMessageDescriptor *const descriptors[] = {
        &baton__link_hello__descriptor,
        &baton__link_proof__descriptor,
        &baton__ping__descriptor,
        &baton__ask_credit__descriptor,
        &baton__credit__descriptor,
        &baton__grant__descriptor,
        &baton__prefill_report__descriptor,
        &baton__finished__descriptor,
        &baton__failed__descriptor,
        &baton__cancel__descriptor,
        &baton__preempted__descriptor,
        &baton__kvt_hello__descriptor,
        &baton__kvt_answer__descriptor,
        &baton__reserve__descriptor,
        &baton__run__descriptor,
        &baton__prefill__descriptor,
        &baton__prefill_done__descriptor,
        &baton__prompt_logprobs__descriptor,
        &baton__kv_expect__descriptor,
        &baton__kv_grants__descriptor,
        &baton__kv_send__descriptor,
        &baton__attach__descriptor,
        &baton__attached__descriptor,
        &baton__detached__descriptor,
        &baton__fetch__descriptor,
        &baton__fetch_refused__descriptor,
    };
    for (size_t i = 0; i < sizeof descriptors / sizeof descriptors[0]; i++) {
        if (descriptors[i] == &baton__reserve__descriptor)
            BODY(Reserve, fuzz_generation(m->generation));
        else if (descriptors[i] == &baton__run__descriptor)
            BODY(Run, fuzz_generation(m->generation));
        else if (descriptors[i] == &baton__prefill__descriptor)
            BODY(Prefill, fuzz_generation(m->generation));
        else if (descriptors[i] == &baton__prefill_done__descriptor)
            BODY(PrefillDone,
                 fuzz_records((struct str){ (const char *)m->first.data, m->first.len }));
        else if (descriptors[i] == &baton__prompt_logprobs__descriptor)
            BODY(PromptLogprobs,
                 fuzz_records((struct str){ (const char *)m->records.data, m->records.len }));
        else if (descriptors[i] == &baton__attach__descriptor)
            BODY(Attach, fuzz_resume_key(m->resume_key));
        else BODY(Ping, (void)m);
    }
    fuzz_tier_command(in);
    fuzz_tier_answer(in);
}

static void fuzz_tokens(struct str in)
{
    Baton__Generation m = BATON__GENERATION__INIT;
    Baton__Sampling s = BATON__SAMPLING__INIT;
    if (in.n < 4) return;
    memcpy(&m.n_prompt, in.p, 4);
    m.tokens = (ProtobufCBinaryData){ in.n - 4, (uint8_t *)in.p + 4 };
    s.repetition_penalty = 1;
    m.sampling = &s;
    fuzz_generation(&m);
}

/* ---- a link ---- */

struct watcher {
    struct link *l;
    bool up, dead, strange; /* strange: its peer does not know the secret */
    uint32_t n_frames;
};

static void on_up(void *arg, struct link *l)
{
    struct watcher *w = arg;
    (void)l;
    ASSERT(!w->strange && !w->up && !w->dead);
    w->up = true;
}

static void on_frame(void *arg, struct link *l, const struct frame_header *h, struct str body)
{
    struct watcher *w = arg;
    ASSERT(w->up && !w->dead && l == w->l);
    ASSERT(h->type > FRAME_PING && h->length == body.n && h->incarnation == SELF);
    w->n_frames++;
}

static void on_dead(void *arg, struct link *l)
{
    struct watcher *w = arg;
    ASSERT(!w->dead && l->why[0] != 0);
    w->dead = true;
}

static void turn(struct loop *loop)
{
    for (int i = 0; i < 4; i++) uv_run(loop_uv(loop), UV_RUN_NOWAIT);
}

static void send_frame(int fd, enum frame_type type, uint64_t incarnation,
                       const ProtobufCMessage *m)
{
    uint8_t bytes[FRAME_HEADER_BYTES + 512];
    size_t n = m ? protobuf_c_message_pack(m, bytes + FRAME_HEADER_BYTES) : 0;
    frame_header_encode(
        &(struct frame_header){
            .type = (uint16_t)type,
            .length = (uint32_t)n,
            .incarnation = incarnation,
        },
        bytes);
    ASSERT(write(fd, bytes, FRAME_HEADER_BYTES + n) == (ssize_t)(FRAME_HEADER_BYTES + n));
}

/* Act as an honest dialer until the link is up. */
static void shake_hands(struct loop *loop, int fd, const struct link_options *options,
                        const struct watcher *w)
{
    uint8_t nonce[LINK_NONCE] = { 1 }, mac[32], in[1024];
    struct buf text = { 0 };
    Baton__LinkHello hello = BATON__LINK_HELLO__INIT;
    Baton__LinkProof mine = BATON__LINK_PROOF__INIT;
    hello.node = PEER;
    hello.want = SELF;
    hello.nonce = (ProtobufCBinaryData){ sizeof nonce, nonce };
    send_frame(fd, FRAME_LINK_HELLO, SELF, &hello.base);
    turn(loop);
    ssize_t n = recv(fd, in, sizeof in, MSG_DONTWAIT);
    ASSERT(n > FRAME_HEADER_BYTES);
    Baton__LinkProof *proof = baton__link_proof__unpack(NULL, (size_t)n - FRAME_HEADER_BYTES,
                                                        in + FRAME_HEADER_BYTES);
    buf_add_c(&text, "dialer");
    buf_add(&text, nonce, sizeof nonce);
    buf_add(&text, proof->nonce.data, proof->nonce.len);
    buf_add_u64le(&text, PEER);
    buf_add_u64le(&text, SELF);
    hmac_sha256(options->secret.p, options->secret.n, text.data, text.len, mac);
    mine.node = PEER;
    mine.mac = (ProtobufCBinaryData){ sizeof mac, mac };
    send_frame(fd, FRAME_LINK_PROOF, SELF, &mine.base);
    turn(loop);
    ASSERT(w->up && !w->dead);
    baton__link_proof__free_unpacked(proof, NULL);
    buf_release(&text);
}

struct acceptor {
    const struct link_options *options;
    struct link *accepted;
};

static void on_connection(uv_stream_t *listener, int st)
{
    struct acceptor *d = listener->data;
    if (st == 0 && !d->accepted) d->accepted = link_accept(d->options, listener);
}

static void on_closed(uv_handle_t *h) { (void)h; }

static void listen_on(struct loop *loop, uv_tcp_t *t, struct sockaddr_in *address,
                      struct acceptor *d)
{
    int len = sizeof *address;
    uv_tcp_init(loop_uv(loop), t);
    uv_ip4_addr("127.0.0.1", 0, address);
    ASSERT(uv_tcp_bind(t, (const struct sockaddr *)address, 0) == 0);
    ASSERT(uv_listen((uv_stream_t *)t, 4, on_connection) == 0);
    ASSERT(uv_tcp_getsockname(t, (struct sockaddr *)address, &len) == 0);
    t->data = d;
}

static void feed(struct loop *loop, int fd, struct str in, const struct watcher *w)
{
    /* In two pieces, so that a frame is cut. */
    size_t cut = in.n ? (uint8_t)in.p[0] % in.n : 0;
    if (cut && write(fd, in.p, cut) < 0) return;
    turn(loop);
    if (!w->dead && in.n > cut && write(fd, in.p + cut, in.n - cut) < 0) return;
    turn(loop);
}

/* Closes without TIME_WAIT: thousands of connections follow each other. */
static void close_hard(int fd)
{
    struct linger now = { .l_onoff = 1 };
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close(fd);
}

/* Makes the fuzzed node dial; returns our end of the connection. */
static int be_dialed(struct loop *loop, const struct link_options *options, struct watcher *w)
{
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    socklen_t len = sizeof address;
    ASSERT(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 &&
           listen(listener, 1) == 0);
    ASSERT(getsockname(listener, (struct sockaddr *)&address, &len) == 0);
    w->l = link_dial(options, PEER, "127.0.0.1", ntohs(address.sin_port));
    turn(loop);
    int fd;
    do fd = accept(listener, NULL, NULL);
    while (fd < 0 && errno == EINTR); /* the fuzzer's SIGALRM */
    close(listener);
    return fd;
}

static int dial(const struct sockaddr_in *address)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int st;
    do st = connect(fd, (const struct sockaddr *)address, sizeof *address);
    /* interrupted by the fuzzer's SIGALRM; the connect continues */
    while (st != 0 && (errno == EINTR || errno == EALREADY));
    ASSERT(st == 0 || errno == EISCONN);
    return fd;
}

static void fuzz_link(struct str in, unsigned how)
{
    struct loop *loop;
    struct watcher w = { .strange = how != 6 };
    struct sockaddr_in address;
    uv_tcp_t listener;
    ASSERT(loop_create(&loop, NULL) == OK);
    struct link_options options = {
        .loop = loop,
        .self = SELF,
        .name = "fuzzed",
        .secret = STR("what only members know"),
        .queue_bytes = 1 << 20,
        .on_up = on_up,
        .on_frame = on_frame,
        .on_dead = on_dead,
        .arg = &w,
    };
    struct acceptor acceptor = { .options = &options };
    listen_on(loop, &listener, &address, &acceptor);
    int fd;
    if (how == 5) {
        fd = be_dialed(loop, &options, &w);
    } else {
        fd = dial(&address);
        for (int i = 0; i < 100 && !acceptor.accepted; i++) uv_run(loop_uv(loop), UV_RUN_NOWAIT);
        w.l = acceptor.accepted;
    }
    ASSERT(w.l && fd >= 0);
    if (how == 6) shake_hands(loop, fd, &options, &w);
    feed(loop, fd, in, &w);
    ASSERT(!w.strange || !w.up);
    close_hard(fd);
    turn(loop);
    link_close(w.l);
    uv_close((uv_handle_t *)&listener, on_closed);
    loop_free(loop);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    struct str in = { (const char *)data + 1, size - 1 };
    log_set_level(LOG_ERROR);
    switch (data[0] % 7) {
    case 0: fuzz_header(in); break;
    case 1: fuzz_records(in); break;
    case 2: fuzz_bodies(in); break;
    case 3: fuzz_tokens(in); break;
    default: fuzz_link(in, data[0] % 7); break;
    }
    return 0;
}
