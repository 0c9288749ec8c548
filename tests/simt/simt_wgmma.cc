/* simt_wgmma.cc - products of a warpgroup with operands in shared memory, which are computed when
 * their group is waited for.
 *
 * A thread queues the products that it issued, and its accumulators hold a pattern of NaN until
 * their last product is done; the pattern must still be there when the results are written. A warp
 * computes its 16 rows of a product when its last lane waits. The products that the four warps of a
 * warpgroup issue must agree, one by one. Products are exact in double; their sum over one
 * instruction's k is rounded once, with the accumulator. Thread: simt_block.h. */
#include <string.h>

#include <list>
#include <vector>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_cluster.h"
#include "tests/simt/simt_sanitize.h"
#include "tests/simt/simt_shared.h"
#include "tests/simt/simt_sm90.h"
#include "tests/simt/simt_tsan.h"

enum {
    MAX_THREADS = 1024,
    GROUP_WARPS = 4,
    GROUP_ROWS = 64,
    WARP_ROWS = 16,
    N_MAX = 256,
    K_BYTES = 32,
    ROW_BYTES = 128,
    ATOM_ROWS = 8
};
static const unsigned POISON = 0x7fbadbadu, WHOLE_WARP = 0xffffffffu;

enum wgmma_kind { WGMMA_BF16, WGMMA_F16, WGMMA_E4M3 };
struct order { /* the part of a wgmma.mma_async that must be equal in all threads of a warpgroup */
    wgmma_kind kind;
    int n, scale_d;
    bool rows; /* A in registers, B with n contiguous */
    uint64_t a, b;
    bool operator!=(const order &o) const
    {
        return kind != o.kind || n != o.n || scale_d != o.scale_d || rows != o.rows || a != o.a ||
               b != o.b;
    }
};

/* A thread's accumulators while products that add to them are in flight. */
struct accumulators {
    float *d;
    int count, n_orders;
    float values[N_MAX / 2];
};

struct queued {
    order what;
    accumulators *to;
    unsigned a[4];           /* if `rows` */
    uint32_t fenced, waited; /* simt_proxy_fenced and _waited when it was issued */
};

struct wgmma_thread {
    std::vector<queued> queue;  /* oldest first */
    std::vector<size_t> groups; /* products of each committed group */
    std::list<accumulators> held;
    bool fenced; /* wgmma.fence since the thread last had its accumulators */
};

static wgmma_thread threads[MAX_THREADS];
/* kept by the warp of each warpgroup that is ahead */
static std::vector<order> done[MAX_THREADS / 32 / GROUP_WARPS];
static size_t n_done[MAX_THREADS / 32];
static bool is_used;

void simt_wgmma_begin(void)
{
    if (!is_used) return;
    for (auto &d : done) d.clear();
    memset(n_done, 0, sizeof n_done);
    for (wgmma_thread &t : threads) t.fenced = false;
    is_used = false;
}

void simt_wgmma_end(void)
{
    if (!is_used) return;
    for (unsigned w = 0; w < MAX_THREADS / 32; w++)
        if (n_done[w] != done[w / GROUP_WARPS].size())
            simt_die("warp %u did %zu wgmma and another of its warpgroup %zu", w, n_done[w],
                     done[w / GROUP_WARPS].size());
}

void simt_wgmma_leave(void)
{
    const wgmma_thread &t = threads[simt_thread_number()];
    if (!t.queue.empty())
        simt_die("a thread returned and had not waited for %zu of its wgmma", t.queue.size());
}

/* ---- operands ---- */

struct operand {
    unsigned start, stride, leading;
};

static operand decode(uint64_t d, const char *which)
{
    const unsigned swizzle = (unsigned)(d >> 62), base = (unsigned)(d >> 49 & 7);
    const operand o = { (unsigned)(d & 0x3fff) << 4, (unsigned)(d >> 32 & 0x3fff) << 4,
                        (unsigned)(d >> 16 & 0x3fff) << 4 };
    if (swizzle != 1 || base != 0)
        simt_die("wgmma: %s's descriptor has swizzle %u, base offset %u: only the 128-byte swizzle "
                 "and 0 are built",
                 which, swizzle, base);
    if (d >> 52 & 0x3ff || d >> 46 & 7 || d >> 30 & 3 || d >> 14 & 3)
        simt_die("wgmma: bits of %s's descriptor that must be zero are set: %016llx", which,
                 (unsigned long long)d);
    if (o.stride % 1024 || o.start / ROW_BYTES % ATOM_ROWS)
        simt_die("wgmma: %s's atoms of 8 rows do not lie at multiples of 1,024 bytes", which);
    if (o.start % ROW_BYTES + K_BYTES > ROW_BYTES)
        simt_die("wgmma: a row of %s goes on behind its 128 bytes", which);
    return o;
}

/* Reads the 16 bytes that are at this address before it is swizzled. */
static uint32_t reader_fenced, reader_waited; /* of the product that is computed */
static void read_16(unsigned char to[16], unsigned at)
{
    const void *from = simt_shared_at(at ^ (at >> 7 & 7) << 4, 16);
    simt_proxy_check_read(from, 16, reader_fenced, reader_waited);
    simt_tsan_ignore_end();
    simt_tsan_read_16(from);
    simt_tsan_ignore_begin();
    memcpy(to, from, 16);
}

/* Reads the 32 bytes of a row. */
static void read_row(unsigned char to[K_BYTES], const operand &o, int row)
{
    const unsigned at = o.start + (unsigned)(row / ATOM_ROWS) * o.stride +
                        (unsigned)(row % ATOM_ROWS) * ROW_BYTES;
    for (unsigned i = 0; i < K_BYTES; i += 16) read_16(to + i, at + i);
}

static double element(wgmma_kind kind, unsigned bits)
{
    return (double)(kind == WGMMA_F16 ? simt_f16_to_float((uint16_t)bits)
                                      : simt_bf16_to_float((uint16_t)bits));
}

static int read_elements(double to[K_BYTES], wgmma_kind kind, const operand &o, int row)
{
    unsigned char bytes[K_BYTES];
    read_row(bytes, o, row);
    if (kind == WGMMA_E4M3) {
        for (int i = 0; i < K_BYTES; i++) to[i] = (double)simt_e4m3_to_float(bytes[i]);
        return K_BYTES;
    }
    for (int i = 0; i < K_BYTES / 2; i++) {
        const uint16_t bits = (uint16_t)(bytes[2 * i] | bytes[2 * i + 1] << 8);
        to[i] = element(kind, bits);
    }
    return K_BYTES / 2;
}

/* ---- one product of a warp ---- */

static double sums[WARP_ROWS][N_MAX], of_a[WARP_ROWS][K_BYTES], of_b[K_BYTES][N_MAX];

/* Both operands have k contiguous. Returns the number of k. */
static int read_operands(const order &what, unsigned warp)
{
    const operand a = decode(what.a, "A"), b = decode(what.b, "B");
    double elements[K_BYTES];
    int k = 0;
    for (int column = 0; column < what.n; column++) {
        k = read_elements(elements, what.kind, b, column);
        for (int i = 0; i < k; i++) of_b[i][column] = elements[i];
    }
    for (int row = 0; row < WARP_ROWS; row++)
        read_elements(of_a[row], what.kind, a, (int)(warp % GROUP_WARPS) * WARP_ROWS + row);
    return k;
}

/* B has n contiguous; of_a has been filled. */
static int read_rows(const order &what)
{
    enum { K = K_BYTES / 2, COLUMNS = ROW_BYTES / 2 };
    const operand b = decode(what.b, "B");
    if (b.start % 1024) simt_die("wgmma: B's atoms of 8 k do not lie at multiples of 1,024 bytes");
    if (what.n > COLUMNS && (b.leading == 0 || b.leading % 1024))
        simt_die("wgmma: %u bytes from 64 columns of B to the next", b.leading);
    for (unsigned k = 0; k < K; k++)
        for (unsigned n = 0; n < (unsigned)what.n; n += 8) {
            unsigned char bytes[16];
            read_16(bytes, b.start + n / COLUMNS * b.leading + k / ATOM_ROWS * b.stride +
                               k % ATOM_ROWS * ROW_BYTES + n % COLUMNS * 2);
            for (unsigned i = 0; i < 8; i++)
                of_b[k][n + i] = element(what.kind, bytes[2 * i] | (unsigned)bytes[2 * i + 1] << 8);
        }
    return K;
}

/* A lane's part of A, which it has in registers. */
static void put_registers(const queued &q, unsigned lane)
{
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < 2; j++)
            of_a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + j] = element(
                q.what.kind, q.a[i] >> 16 * j & 0xffff);
}

/* Nearly all of a product's time. */
SIMT_UNCHECKED static void add_up(int n_k, int n)
{
    for (int row = 0; row < WARP_ROWS; row++)
        for (int k = 0; k < n_k; k++)
            for (int column = 0; column < n; column++)
                sums[row][column] += of_a[row][k] * of_b[k][column];
}

static void multiply(const order &what, unsigned warp)
{
    const int n_k = what.rows ? read_rows(what) : read_operands(what, warp);
    memset(sums, 0, sizeof sums);
    add_up(n_k, what.n);
}

static void check_agreement(const order &what, unsigned warp)
{
    std::vector<order> &of_group = done[warp / GROUP_WARPS];
    if (n_done[warp] == of_group.size()) of_group.push_back(what);
    if (of_group[n_done[warp]++] != what)
        simt_die("the warps of warpgroup %u ordered different wgmma", warp / GROUP_WARPS);
}

static void check_untouched(const accumulators &a, const char *when)
{
    for (int i = 0; i < a.count; i++)
        if (__float_as_uint(a.d[i]) != POISON) simt_die("accumulator %d was touched %s", i, when);
}

/* Completes the thread's oldest product: adds the thread's part of `sums` to its accumulators. */
static void take_oldest(wgmma_thread *t, unsigned lane)
{
    const order what = t->queue.front().what;
    accumulators *to = t->queue.front().to;
    t->queue.erase(t->queue.begin());
    for (int i = 0; i < to->count; i++) {
        const double sum =
            sums[lane / 4 + (unsigned)(i / 2 % 2) * 8][i / 4 * 8 + (int)(lane % 4) * 2 + i % 2];
        to->values[i] = (float)(what.scale_d ? (double)to->values[i] + sum : sum);
    }
    if (--to->n_orders) return;
    check_untouched(*to, "before its wgmma was waited for");
    memcpy(to->d, to->values, (size_t)to->count * sizeof(float));
    t->held.remove_if([to](const accumulators &a) { return &a == to; });
    t->fenced = false;
}

struct wait_call : simt_warp_call {
    wgmma_thread *thread;
    unsigned warp;
};

static void perform_wait(simt_warp_call *const lanes[32], unsigned)
{
    simt_tsan_ignore_begin();
    const size_t left = (size_t)lanes[0]->variant;
    wgmma_thread *first = static_cast<wait_call *>(lanes[0])->thread;
    while (first->groups.size() > left) {
        const size_t n = first->groups.front();
        for (size_t i = 0; i < n; i++) {
            const order what = first->queue.front().what;
            check_agreement(what, static_cast<wait_call *>(lanes[0])->warp);
            for (unsigned lane = 0; what.rows && lane < 32; lane++) {
                const wgmma_thread *t = static_cast<wait_call *>(lanes[lane])->thread;
                if (!t->queue.empty()) put_registers(t->queue.front(), lane);
            }
            reader_fenced = first->queue.front().fenced;
            reader_waited = first->queue.front().waited;
            multiply(what, static_cast<wait_call *>(lanes[0])->warp);
            for (unsigned lane = 0; lane < 32; lane++) {
                wgmma_thread *t = static_cast<wait_call *>(lanes[lane])->thread;
                if (t->queue.empty() || t->queue.front().what != what)
                    simt_die("the lanes of a warp ordered different wgmma");
                take_oldest(t, lane);
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            std::vector<size_t> &groups = static_cast<wait_call *>(lanes[lane])->thread->groups;
            if (groups.empty() || groups.front() != n)
                simt_die("the lanes of a warp committed different wgmma");
            groups.erase(groups.begin());
        }
    }
    simt_tsan_ignore_end();
}

/* ---- instructions ---- */

static wgmma_thread &current(void)
{
    is_used = true;
    return threads[simt_thread_number()];
}

static accumulators *take_accumulators(wgmma_thread *t, float *d, int count)
{
    for (accumulators &a : t->held)
        if (a.d == d) {
            if (a.count != count)
                simt_die("wgmma of another shape adds to accumulators that one in flight adds to");
            check_untouched(a, "between two wgmma");
            return &a;
        }
    if (!t->fenced) simt_die("wgmma without a wgmma.fence since the thread had its accumulators");
    t->held.push_back({ d, count, 0, {} });
    accumulators *a = &t->held.back();
    memcpy(a->values, d, (size_t)count * sizeof(float));
    for (int i = 0; i < count; i++) d[i] = __uint_as_float(POISON);
    return a;
}

static void enqueue(const order &what, float *d, const unsigned *registers)
{
    if (what.n < 8 || what.n > N_MAX || what.n % 8) simt_die("wgmma of n %d", what.n);
    simt_tsan_ignore_begin();
    wgmma_thread &t = current();
    accumulators *to = take_accumulators(&t, d, what.n / 2);
    to->n_orders++;
    queued q = { what, to, {}, simt_proxy_fenced(), simt_proxy_waited() };
    if (what.rows) memcpy(q.a, registers, sizeof q.a);
    t.queue.push_back(q);
    simt_tsan_ignore_end();
}

void simt_wgmma_fence(void) { current().fenced = true; }
void simt_wgmma_bf16(float *d, int n, uint64_t a, uint64_t b, int scale_d)
{
    enqueue({ WGMMA_BF16, n, scale_d != 0, false, a, b }, d, nullptr);
}
void simt_wgmma_f16(float *d, int n, uint64_t a, uint64_t b, int scale_d)
{
    enqueue({ WGMMA_F16, n, scale_d != 0, false, a, b }, d, nullptr);
}
void simt_wgmma_e4m3(float *d, int n, uint64_t a, uint64_t b, int scale_d)
{
    enqueue({ WGMMA_E4M3, n, scale_d != 0, false, a, b }, d, nullptr);
}
void simt_wgmma_rows_bf16(float *d, int n, const unsigned *a, uint64_t b, int scale_d)
{
    enqueue({ WGMMA_BF16, n, scale_d != 0, true, 0, b }, d, a);
}

void simt_wgmma_commit(void)
{
    simt_tsan_ignore_begin();
    wgmma_thread &t = current();
    size_t committed = 0;
    for (size_t n : t.groups) committed += n;
    t.groups.push_back(t.queue.size() - committed);
    simt_tsan_ignore_end();
}

void simt_wgmma_wait(int n_groups_left)
{
    if (n_groups_left < 0 || n_groups_left > 7) simt_die("wgmma.wait_group %d", n_groups_left);
    wait_call call;
    call.what = "wgmma.wait_group", call.mask = WHOLE_WARP, call.variant = n_groups_left,
    call.perform = perform_wait;
    call.thread = &current(), call.warp = simt_thread_number() / 32;
    simt_warp_collect(&call);
}
