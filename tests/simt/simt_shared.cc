/* simt_shared.cc - dynamic shared memory: garbage at the beginning of a block, a red zone behind
 * its end.
 *
 * The garbage is NaN as f32, f16, bf16 and e4m3. The address sanitizer reports every access to the
 * red zone; without it the next 1 KiB is compared when the block ends. */
#include "tests/simt/simt_shared.h"

#include <stdint.h>

#include "tests/simt/include/cuda_runtime.h"
#include "tests/simt/simt_block.h"
#include "tests/simt/simt_sanitize.h"

enum { RED_ZONE = SIMT_SHARED_STRIDE - SIMT_SHARED_MAX };
static const uint32_t GARBAGE[2] = { 0xffffffffu, 0x7fff7fffu }, RED = 0xfddeadfdu;

alignas(1024) static char memory[SIMT_CLUSTER_MAX][SIMT_SHARED_STRIDE];

static size_t size;
static unsigned n_used; /* blocks */
/* by the running blocks: most kernels do not use it, and filling takes time */
static bool is_used[SIMT_CLUSTER_MAX];

/* The red zone begins at the byte behind the end. */
static uint8_t red_byte(size_t i) { return (uint8_t)(RED >> (8 * (i % 4))); }

static void fill(char *of)
{
    ASAN_UNPOISON_MEMORY_REGION(of, SIMT_SHARED_STRIDE);
    uint32_t *words = (uint32_t *)of;
    for (size_t i = 0; i < (size + 3) / 4; i++) words[i] = GARBAGE[i % 2];
    for (size_t i = size; i < size + RED_ZONE; i++) of[i] = (char)red_byte(i);
    ASAN_POISON_MEMORY_REGION(of + size, SIMT_SHARED_STRIDE - size);
}

static void use(unsigned rank)
{
    if (!is_used[rank]) fill(memory[rank]);
    is_used[rank] = true;
}

void *simt_dynamic_shared(void)
{
    if (!simt_in_kernel()) simt_die("dynamic shared memory outside a kernel");
    use(simt_block_rank());
    return memory[simt_block_rank()];
}

/* Addresses begin behind what a GPU reserves for itself. */
enum { FIRST_ADDRESS = 1024 };

size_t simt_shared_offset(const void *shared, size_t bytes)
{
    const uintptr_t at = (uintptr_t)shared - (uintptr_t)memory, in = at % SIMT_SHARED_STRIDE;
    const bool is_block = at / SIMT_SHARED_STRIDE < n_used;
    return is_block && in <= size && bytes <= size - in ? (size_t)at : SIMT_NOT_SHARED;
}

static size_t offset_in_own(const void *shared, size_t bytes)
{
    const size_t at = simt_shared_offset(shared, bytes);
    return at != SIMT_NOT_SHARED && at / SIMT_SHARED_STRIDE == simt_block_rank()
               ? at % SIMT_SHARED_STRIDE
               : SIMT_NOT_SHARED;
}

unsigned simt_shared_address(const void *shared)
{
    const size_t at = offset_in_own(shared, 1);
    if (at == SIMT_NOT_SHARED) simt_die("%p is not in the block's dynamic shared memory", shared);
    return (unsigned)at + FIRST_ADDRESS;
}

void *simt_shared_at(unsigned address, size_t bytes)
{
    char *own = memory[simt_block_rank()];
    if (address < FIRST_ADDRESS ||
        offset_in_own(own + (address - FIRST_ADDRESS), bytes) == SIMT_NOT_SHARED)
        simt_die("%zu bytes at shared address %u, of which the block has %zu from %d on", bytes,
                 address, size, FIRST_ADDRESS);
    return own + (address - FIRST_ADDRESS);
}

void *simt_shared_of(const void *own, unsigned rank, const char *what)
{
    const unsigned at = simt_shared_address(own) - FIRST_ADDRESS;
    if (rank >= n_used) simt_die("%s: block %u of a cluster of %u", what, rank, n_used);
    if (simt_block_has_ended(rank)) simt_die("%s: block %u of the cluster has ended", what, rank);
    use(rank);
    return memory[rank] + at;
}

void simt_shared_begin(size_t bytes, unsigned n_blocks)
{
    size = bytes;
    n_used = n_blocks;
    for (bool &b : is_used) b = false;
}

void simt_shared_end(void)
{
    for (unsigned rank = 0; rank < n_used; rank++) {
        if (!is_used[rank]) continue;
        ASAN_UNPOISON_MEMORY_REGION(memory[rank], SIMT_SHARED_STRIDE);
        for (size_t i = size; i < size + RED_ZONE; i++)
            if ((uint8_t)memory[rank][i] != red_byte(i))
                simt_die("block (%u, %u, %u) wrote byte %zu of its %zu bytes of dynamic shared "
                         "memory",
                         blockIdx.x, blockIdx.y, blockIdx.z, i, size);
    }
}
