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

enum { RED_ZONE = 1024 };
static const uint32_t GARBAGE[2] = { 0xffffffffu, 0x7fff7fffu }, RED = 0xfddeadfdu;

alignas(1024) static char memory[SIMT_SHARED_MAX + RED_ZONE];

static size_t size;
static bool is_used; /* by the running block: most kernels do not use it, and filling takes time */

/* The red zone begins at the byte behind the end. */
static uint8_t red_byte(size_t i) { return (uint8_t)(RED >> (8 * (i % 4))); }

static void fill(void)
{
    ASAN_UNPOISON_MEMORY_REGION(memory, sizeof memory);
    uint32_t *words = (uint32_t *)memory;
    for (size_t i = 0; i < (size + 3) / 4; i++) words[i] = GARBAGE[i % 2];
    for (size_t i = size; i < size + RED_ZONE; i++) memory[i] = (char)red_byte(i);
    ASAN_POISON_MEMORY_REGION(memory + size, sizeof memory - size);
}

void *simt_dynamic_shared(void)
{
    if (!simt_in_kernel()) simt_die("dynamic shared memory outside a kernel");
    if (!is_used) fill();
    is_used = true;
    return memory;
}

/* Addresses begin behind what a GPU reserves for itself. */
enum { FIRST_ADDRESS = 1024 };

size_t simt_shared_offset(const void *shared, size_t bytes)
{
    const uintptr_t at = (uintptr_t)shared - (uintptr_t)memory;
    return at <= size && bytes <= size - at ? (size_t)at : SIMT_NOT_SHARED;
}

unsigned simt_shared_address(const void *shared)
{
    const size_t at = simt_shared_offset(shared, 1);
    if (at == SIMT_NOT_SHARED) simt_die("%p is not in the block's dynamic shared memory", shared);
    return (unsigned)at + FIRST_ADDRESS;
}

void *simt_shared_at(unsigned address, size_t bytes)
{
    if (address < FIRST_ADDRESS ||
        simt_shared_offset(memory + (address - FIRST_ADDRESS), bytes) == SIMT_NOT_SHARED)
        simt_die("%zu bytes at shared address %u, of which the block has %zu from %d on", bytes,
                 address, size, FIRST_ADDRESS);
    return memory + (address - FIRST_ADDRESS);
}

void simt_shared_begin(size_t bytes)
{
    size = bytes;
    is_used = false;
}

void simt_shared_end(void)
{
    if (!is_used) return;
    ASAN_UNPOISON_MEMORY_REGION(memory, sizeof memory);
    for (size_t i = size; i < size + RED_ZONE; i++)
        if ((uint8_t)memory[i] != red_byte(i))
            simt_die("block (%u, %u, %u) wrote byte %zu of its %zu bytes of dynamic shared memory",
                     blockIdx.x, blockIdx.y, blockIdx.z, i, size);
}
