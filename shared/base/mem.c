/* mem.c - allocation that succeeds or ends the process with a sentence; and arenas.
 *
 * mem_try_* may fail and is for request paths; mem_fail_nth makes one call fail, so that tests
 * reach those paths.
 * Thread: mem_* any; an arena its owner's. */
#include "shared/base/mem.h"

#include <malloc.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/log.h"

enum { ARENA_CHUNK_MIN = 4096, ARENA_CHUNK_MAX = 65536, ARENA_ALIGN = 16 };
enum { MEM_LARGE_BLOCK = 1 << 20 };

struct arena_chunk {
    struct arena_chunk *next;
    size_t used, cap;
    alignas(ARENA_ALIGN) char data[];
};

/* Calls left until one fails; 0: off. Relaxed: tests set it before they start the code under
 * test. */
static atomic_long fail_countdown;

static _Noreturn void out_of_memory(size_t n, size_t size)
{
    char text[96];
    int len = snprintf(text, sizeof text, "out of memory: cannot get %zu x %zu bytes\n", n, size);
    log_last_words(text, (size_t)len);
    abort();
}

static bool fails_now(void)
{
    long left = atomic_load_explicit(&fail_countdown, memory_order_relaxed);
    while (left > 0)
        if (atomic_compare_exchange_weak_explicit(&fail_countdown, &left, left - 1,
                                                  memory_order_relaxed, memory_order_relaxed))
            return left == 1;
    return false;
}

void mem_return_large_blocks(void)
{
    /* A size that is set is not adapted any more. */
    (void)mallopt(M_MMAP_THRESHOLD, MEM_LARGE_BLOCK);
    (void)mallopt(M_TRIM_THRESHOLD, 2 * MEM_LARGE_BLOCK);
}

void mem_return_free_pages(void) { (void)malloc_trim(0); }

void mem_fail_nth(long n) { atomic_store_explicit(&fail_countdown, n, memory_order_relaxed); }

void *mem_calloc(size_t n, size_t size)
{
    /* At least one byte, so that empty arrays are not NULL either. calloc checks the product. */
    void *p = n && size ? calloc(n, size) : calloc(1, 1);
    if (!p) out_of_memory(n, size);
    return p;
}

void *mem_try_calloc(size_t n, size_t size)
{
    /* Requests decide these sizes: an impossible one must become an answer, not an allocator
     * error. */
    if (fails_now() || (size && n > PTRDIFF_MAX / size)) return NULL;
    return n && size ? calloc(n, size) : calloc(1, 1);
}

void *mem_realloc(void *p, size_t n, size_t size)
{
    if (size && n > SIZE_MAX / size) out_of_memory(n, size);
    void *q = n && size ? realloc(p, n * size) : realloc(p, 1);
    if (!q) out_of_memory(n, size);
    return q;
}

char *mem_strdup(const char *s) { return mem_strndup(s, strlen(s)); }

char *mem_strndup(const char *s, size_t n)
{
    if (n == SIZE_MAX) out_of_memory(n, 1);
    char *copy = mem_calloc(n + 1, 1);
    if (n) memcpy(copy, s, n);
    return copy;
}

void *mem_dup(const void *p, size_t n)
{
    void *copy = mem_calloc(n, 1);
    if (n) memcpy(copy, p, n);
    return copy;
}

void mem_free(void *p) { free(p); }

void *mem_aligned(size_t align, size_t size)
{
    ASSERT(align && (align & (align - 1)) == 0);
    void *p = NULL;
    size_t at_least = align < sizeof(void *) ? sizeof(void *) : align;
    if (posix_memalign(&p, at_least, size ? size : 1) != 0) out_of_memory(1, size);
    memset(p, 0, size);
    return p;
}

void arena_init(struct arena *a) { *a = (struct arena){ 0 }; }

static struct arena_chunk *arena_grow(struct arena *a, size_t size)
{
    /* Chunks grow with the arena: a small request costs one page, a large one few calls. */
    size_t cap = a->used < ARENA_CHUNK_MIN   ? ARENA_CHUNK_MIN
                 : a->used > ARENA_CHUNK_MAX ? ARENA_CHUNK_MAX
                                             : a->used;
    cap &= ~(size_t)(ARENA_ALIGN - 1);
    bool large = size > cap;
    if (large) cap = size;
    if (cap > SIZE_MAX - sizeof(struct arena_chunk)) out_of_memory(1, size);
    struct arena_chunk *c = mem_aligned(ARENA_ALIGN, sizeof *c + cap);
    c->cap = cap;
    if (large && a->head) { /* behind the head, whose free space stays in use */
        c->next = a->head->next;
        a->head->next = c;
    } else {
        c->next = a->head;
        a->head = c;
    }
    return c;
}

void *arena_alloc(struct arena *a, size_t size)
{
    if (size > SIZE_MAX - ARENA_ALIGN) out_of_memory(1, size);
    size_t rounded = (size + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    if (rounded == 0) rounded = ARENA_ALIGN;
    struct arena_chunk *c = a->head;
    if (!c || c->cap - c->used < rounded) c = arena_grow(a, rounded);
    void *p = c->data + c->used;
    c->used += rounded;
    a->used += rounded;
    return p;
}

char *arena_strndup(struct arena *a, const char *s, size_t n)
{
    if (n == SIZE_MAX) out_of_memory(n, 1);
    char *copy = arena_alloc(a, n + 1);
    if (n) memcpy(copy, s, n);
    return copy;
}

void arena_release(struct arena *a)
{
    struct arena_chunk *next;
    for (struct arena_chunk *c = a->head; c; c = next) {
        next = c->next;
        mem_free(c);
    }
    *a = (struct arena){ 0 };
}
