/* mem.h - memory allocation.
 *
 * mem_* abort the process with a sentence when memory runs out. mem_try_* return NULL: request
 * paths use these and answer ERR_NOMEM, and tests make the n-th call fail. An arena serves memory
 * that lives exactly as long as one request or one parse and is freed as a whole.
 * Thread: mem_* any; an arena belongs to one thread at a time. */
#ifndef BATON_BASE_MEM_H
#define BATON_BASE_MEM_H

#include <stddef.h>

/* Zeroed memory of n * size bytes (overflow checked); freed with mem_free. Never NULL; n * size may
 * be 0. */
void *mem_calloc(size_t n, size_t size);
/* Like realloc for n * size bytes; new bytes are not zeroed. Never NULL. */
void *mem_realloc(void *p, size_t n, size_t size);
/* As mem_calloc, but NULL when memory runs out. */
void *mem_try_calloc(size_t n, size_t size);
/* Copies; freed with mem_free. */
char *mem_strdup(const char *s);
char *mem_strndup(const char *s, size_t n);
void *mem_dup(const void *p, size_t n);
/* Frees; NULL is accepted. */
void mem_free(void *p);
/* Memory aligned to `align` (a power of two), zeroed; freed with mem_free. */
void *mem_aligned(size_t align, size_t size);

/* At the start of a program: large blocks go back to the system as soon as they are freed. (glibc
 * otherwise learns to keep blocks of up to 32 MiB, for each thread that had a large request.) */
void mem_return_large_blocks(void);
/* Gives the free pages between small blocks back to the system, after a burst of them. It may take
 * tens of milliseconds, in which others may have to wait for memory. */
void mem_return_free_pages(void);

/* For tests: make the n-th following mem_try_calloc of this process fail (1: the next); 0 switches
 * it off. */
void mem_fail_nth(long n);

struct arena {
    struct arena_chunk *head; /* newest chunk first */
    size_t used;              /* bytes handed out in all chunks */
};

void arena_init(struct arena *a);
/* Zeroed, aligned to 16. Never NULL. */
void *arena_alloc(struct arena *a, size_t size);
char *arena_strndup(struct arena *a, const char *s, size_t n);
/* Frees everything; the arena may be used again. */
void arena_release(struct arena *a);

#define MEM_NEW(type)           ((type *)mem_calloc(1, sizeof(type)))
#define MEM_ARRAY(type, n)      ((type *)mem_calloc((n), sizeof(type)))
#define ARENA_NEW(a, type)      ((type *)arena_alloc((a), sizeof(type)))
#define ARENA_ARRAY(a, type, n) ((type *)arena_alloc((a), sizeof(type) * (n)))
#define COUNT_OF(array)         (sizeof(array) / sizeof((array)[0]))

#endif
