/* simt_bulk.cc - bulk copies of boxes of a tensor: they take place, in each block that they go to,
 * when somebody waits at that block's barrier.
 *
 * Until then the targets hold garbage, of every block from the moment of the order on: so a block is
 * found that still reads what another one's copy overwrites. Thread: simt_block.h. */
#include "tests/simt/include/simt_bulk.h"

#include <string.h>

#include <list>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_cluster.h"
#include "tests/simt/simt_memory.h"
#include "tests/simt/simt_overlap.h"
#include "tests/simt/simt_sanitize.h"
#include "tests/simt/simt_shared.h"
#include "tests/simt/simt_tsan.h"

enum { PIECE = 16, ATOM_BYTES = 1024, ROWS_MAX = 256, TO_ALIGNED = 128 };
static const unsigned MAGIC = 0x7e4502a9u;

struct bulk_copy {
    simt_tensor_map map;
    int byte, row, group;
    char *to;
    void *barrier;
};
static std::list<bulk_copy> copies;

bool simt_tensor_map_rows(struct simt_tensor_map *map, const void *base, size_t row_bytes,
                          int n_rows, size_t group_stride, int n_groups, int box_rows)
{
    if (row_bytes >> 32 || group_stride >> 40) return false;
    if ((uintptr_t)base % 16 || row_bytes % 16 || group_stride % 16 || row_bytes == 0 ||
        n_rows < 1 || n_groups < 1 || box_rows < 1 || box_rows > ROWS_MAX)
        return false;
    *map = { (const char *)base, row_bytes, group_stride, n_rows, n_groups, box_rows, MAGIC };
    return true;
}

/* NULL: it is outside. */
static const char *piece_at(const bulk_copy &c, int in_box, int piece)
{
    const int row = c.row + in_box, byte = c.byte + piece * PIECE;
    const bool is_inside = row >= 0 && row < c.map.n_rows && c.group >= 0 &&
                           c.group < c.map.n_groups && byte >= 0 && (size_t)byte < c.map.row_bytes;
    return is_inside ? c.map.base + (size_t)c.group * c.map.group_stride +
                           (size_t)row * c.map.row_bytes + byte
                     : nullptr;
}

static void check_source(const bulk_copy &c)
{
    for (int row = 0; row < c.map.box_rows; row++)
        for (int piece = 0; piece < SIMT_BOX_BYTES / PIECE; piece++) {
            const char *from = piece_at(c, row, piece);
            if (!from) continue;
#if !SIMT_TSAN
            if (!simt_memory_is_visible(from))
                simt_die("cp.async.bulk.tensor from %p, which is no memory of the device",
                         (const void *)from);
#endif
            if (simt_is_early) simt_overlap_check_read(from, PIECE);
        }
}

static void order(bulk_copy c, unsigned rank, bool is_own)
{
    const size_t bytes = (size_t)c.map.box_rows * SIMT_BOX_BYTES;
    if (!is_own) {
        c.to = (char *)simt_shared_of(c.to, rank, "cp.async.bulk.tensor");
        c.barrier = simt_shared_of(c.barrier, rank, "cp.async.bulk.tensor");
        simt_mbarrier_check_visible(c.barrier, "cp.async.bulk.tensor");
    }
    if (simt_shared_offset(c.to, bytes) == SIMT_NOT_SHARED)
        simt_die("cp.async.bulk.tensor of %zu bytes to %p: not all of it is shared memory", bytes,
                 (void *)c.to);
    memset(c.to, 0xff, bytes);
    simt_proxy_bulk_ordered(c.to, bytes);
    copies.push_back(c);
}

void simt_bulk_copy(const struct simt_tensor_map *map, void *to, void *barrier, int byte, int row,
                    int group, unsigned mask)
{
    simt_tsan_ignore_begin();
    if (map->magic != MAGIC) simt_die("cp.async.bulk.tensor: %p is no tensor map", (void *)map);
    if (simt_shared_address(to) % TO_ALIGNED)
        simt_die("cp.async.bulk.tensor to %p: not aligned to %d", to, TO_ALIGNED);
    if (byte % PIECE) simt_die("cp.async.bulk.tensor from byte %d of a row", byte);
    if (mask >> simt_n_blocks())
        simt_die("cp.async.bulk.tensor: mask %x of a cluster of %u", mask, simt_n_blocks());
    const bulk_copy c = { *map, byte, row, group, (char *)to, barrier };
    check_source(c);
    const unsigned own = simt_block_rank();
    if (!mask) mask = 1u << own;
    for (unsigned rank = 0; rank < simt_n_blocks(); rank++)
        if (mask >> rank & 1) order(c, rank, rank == own);
    simt_tsan_ignore_end();
}

static void perform(const bulk_copy &c)
{
    for (int row = 0; row < c.map.box_rows; row++)
        for (int piece = 0; piece < SIMT_BOX_BYTES / PIECE; piece++) {
            const char *from = piece_at(c, row, piece);
            char *line = c.to + row * SIMT_BOX_BYTES;
            const size_t in_atom = simt_shared_offset(line, 1) % ATOM_BYTES / SIMT_BOX_BYTES;
            char *at = line + ((size_t)piece ^ in_atom) * PIECE;
            if (from) memcpy(at, from, PIECE);
            else memset(at, 0, PIECE);
        }
}

void simt_bulk_arrive(void *barrier)
{
    simt_tsan_ignore_begin();
    for (auto c = copies.begin(); c != copies.end();) {
        if (c->barrier != barrier) {
            ++c;
            continue;
        }
        const size_t bytes = (size_t)c->map.box_rows * SIMT_BOX_BYTES;
        perform(*c);
        simt_proxy_bulk_arrived(c->to, bytes);
        c = copies.erase(c);
        simt_mbarrier_complete(barrier, (unsigned)bytes);
    }
    simt_tsan_ignore_end();
}

void simt_bulk_end(void)
{
    if (!copies.empty()) simt_die("a block ended and nobody had waited for a cp.async.bulk.tensor");
}
