/* regex_translate.h - the regular expressions of tokenizer files, rewritten for PCRE2.
 *
 * The files are written for Oniguruma and for Rust's fancy-regex. Where those two and PCRE2 read
 * the same text differently the pattern is rewritten: white space, word characters, and characters
 * that Unicode 15 and 16 added to the categories (PCRE2 may be older; a model's digits and emoji
 * must not depend on it). What cannot be rewritten is refused by name. Thread: any. */
#ifndef BATON_TEXT_TOKENIZER_REGEX_TRANSLATE_H
#define BATON_TEXT_TOKENIZER_REGEX_TRANSLATE_H

#include "shared/base/buf.h"
#include "shared/base/err.h"

/* Append the PCRE2 form of `regex` to `out`. ERR_UNSUPPORTED names the construct. */
enum status regex_translate(struct str regex, struct buf *out, struct err *err) MUST_CHECK;

#endif
