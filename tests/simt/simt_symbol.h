/* simt_symbol.h - names of kernels, for messages. Thread: any. */
#ifndef BATON_TESTS_SIMT_SIMT_SYMBOL_H
#define BATON_TESTS_SIMT_SIMT_SYMBOL_H

#include <stddef.h>

/* The name of the function at f, without its parameters, static ones too. Without a symbol table:
 * "a kernel". */
void simt_symbol(const void *f, char *text, size_t text_bytes);

#endif
