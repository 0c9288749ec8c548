/* simt_sanitize.h - which sanitizer this file is compiled with, for gcc and clang, and poisoning
 * for the address sanitizer. */
#ifndef BATON_TESTS_SIMT_SIMT_SANITIZE_H
#define BATON_TESTS_SIMT_SIMT_SANITIZE_H

#if defined(__has_feature)
#define SIMT_HAS_FEATURE(f) __has_feature(f)
#else
#define SIMT_HAS_FEATURE(f) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || SIMT_HAS_FEATURE(address_sanitizer)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#else
#define SIMT_ASAN                         0
#define ASAN_POISON_MEMORY_REGION(p, n)   ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

/* A function of the emulator's own in which neither looks for errors. */
#define SIMT_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

/* simt_tsan.h explains SIMT_RACES. */
#if defined(__SANITIZE_THREAD__) || SIMT_HAS_FEATURE(thread_sanitizer) || defined(SIMT_RACES)
#include <sanitizer/tsan_interface.h>
#define SIMT_TSAN 1
#else
#define SIMT_TSAN 0
#endif

#endif
