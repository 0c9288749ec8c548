/* config_spelling.h - how people write values and mistype flags, and what is set that nobody wrote;
 * for config.c and environment.c only. Thread: main. */
#ifndef BATON_DEPLOY_OPTIONS_CONFIG_SPELLING_H
#define BATON_DEPLOY_OPTIONS_CONFIG_SPELLING_H

#include "deploy/options/config.h"
#include "shared/base/mem.h"
#include "shared/base/str.h"

enum { SPELLING_NUMBER_MAX = 24 };

/* "32k" is 32000 and "32K" 32768, as vLLM reads them; m, M, g, G alike, also "1.5k". False: the
 * text is no such number. */
bool spelling_number(const char *text, char out[SPELLING_NUMBER_MAX]);
/* "9500-9507"; false: the text is no range of ports. */
bool spelling_port_range(struct str text, int64_t *first, int64_t *last);
/* Web pages put a no-break space for a blank, or no blank before the backslash that ends a line,
 * and a shell does not end a word there. Returns the words with those split that hold flags, and
 * changes *argc: `argv` itself, or a copy in `arena`. */
char **spelling_split_words(struct arena *arena, int *argc, char **argv);
/* ERR_CONFIG for a word that a text editor or a shell has spoilt: a long dash instead of two
 * hyphens, blanks alone. */
enum status spelling_check_word(const char *word, struct err *err) MUST_CHECK;
/* Did Kubernetes set this variable, as it does in every pod for each Service? */
bool spelling_is_of_service(struct str name, struct str value);

#endif
