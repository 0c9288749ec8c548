/* regex_translate.h - rewrites the regular expressions of tokenizer files for PCRE2.
 *
 * The files are written for Oniguruma and Rust's fancy-regex. Rewritten is what PCRE2 reads
 * differently: white space, word characters, and the characters that Unicode 15 and 16 added to the
 * categories (the result must not depend on PCRE2's version). What cannot be rewritten is refused
 * by name.
 * Thread: any. */
#ifndef BATON_TEXT_TOKENIZER_REGEX_TRANSLATE_H
#define BATON_TEXT_TOKENIZER_REGEX_TRANSLATE_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

/* Appends the PCRE2 form of `regex` to `out`. ERR_UNSUPPORTED names the construct. */
enum status regex_translate(struct str regex, struct buf *out, struct err *err) MUST_CHECK;

#endif
