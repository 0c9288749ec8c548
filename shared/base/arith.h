/* arith.h - arithmetic on counts that every split of work needs. Thread: any. */
#ifndef BATON_BASE_ARITH_H
#define BATON_BASE_ARITH_H

#include <stddef.h>
#include <stdint.h>

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
static inline int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
static inline size_t div_up(size_t n, size_t by) { return (n + by - 1) / by; }
static inline size_t round_up(size_t n, size_t to) { return div_up(n, to) * to; }

#endif
