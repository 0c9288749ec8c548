/* simt_tsan.h - what the thread sanitizer is told about the threads of a block.
 *
 * With SIMT_RACES (which CMakeLists.txt sets for a build with that sanitizer, where the files that
 * include this are not instrumented) a switch of fibers orders nothing, but barriers and __syncwarp
 * do: two threads of a block that touch the same memory without one of these in between are a data
 * race, which is reported. Shuffles, votes and products order no memory, as on a GPU. Without
 * SIMT_RACES these functions do nothing. */
#ifndef BATON_TESTS_SIMT_SIMT_TSAN_H
#define BATON_TESTS_SIMT_SIMT_TSAN_H

#ifdef SIMT_RACES
extern "C" {
void __tsan_acquire(void *sync);
void __tsan_release(void *sync);
void __tsan_read16(void *p);
void __tsan_ignore_thread_begin(void);
void __tsan_ignore_thread_end(void);
}
static inline void simt_tsan_acquire(void *sync) { __tsan_acquire(sync); }
static inline void simt_tsan_release(void *sync) { __tsan_release(sync); }
static inline void simt_tsan_read_16(const void *p) { __tsan_read16(const_cast<void *>(p)); }
/* Between these two the emulator uses memory for itself, which the sanitizer must not check. */
static inline void simt_tsan_ignore_begin(void) { __tsan_ignore_thread_begin(); }
static inline void simt_tsan_ignore_end(void) { __tsan_ignore_thread_end(); }
#else
#define simt_tsan_ignore_begin() ((void)0)
#define simt_tsan_ignore_end()   ((void)0)
#define simt_tsan_acquire(sync)  ((void)(sync))
#define simt_tsan_release(sync)  ((void)(sync))
#define simt_tsan_read_16(p)     ((void)(p))
#endif

#endif
