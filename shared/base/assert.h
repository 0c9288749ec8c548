/* assert.h - ASSERT, for our own bugs, on in every build. Never assert on input, peers or the
 * network: those are errors. Thread: any. */
#ifndef BATON_BASE_ASSERT_H
#define BATON_BASE_ASSERT_H

/* Prints the expression, its place and a stack trace to stderr, then aborts. */
_Noreturn void assert_fail(const char *expr, const char *file, int line, const char *func);

#define ASSERT(expr) ((expr) ? (void)0 : assert_fail(#expr, __FILE__, __LINE__, __func__))

#endif
