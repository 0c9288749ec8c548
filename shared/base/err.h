/* err.h - a status with a sentence for people.
 *
 * Functions at the edges (configuration, model files, requests, peers) take `struct err *` and fill
 * it when they fail; hot paths return only the status. The caller owns the struct, usually on its
 * stack; it holds no pointers.
 * Thread: the caller's. */
#ifndef BATON_BASE_ERR_H
#define BATON_BASE_ERR_H

#include "shared/base/status.h"

enum { ERR_TEXT_MAX = 512, ERR_FIELD_MAX = 64 };

struct err {
    enum status code;
    char field[ERR_FIELD_MAX]; /* the option, JSON member or tensor at fault; "" when none */
    char text[ERR_TEXT_MAX];   /* one sentence, no newline: what, which value, what is right */
};

/* Fills `e` (may be NULL) and returns `code`; usual form: return err_set(e, ERR_INVALID, "...").
 * Text that does not fit is cut at a character boundary. */
enum status err_set(struct err *e, enum status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* As err_set, and set the field at fault. */
enum status err_field(struct err *e, enum status code, const char *field, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Puts a prefix ("model.safetensors: ") before the sentence already in `e`; returns e->code. */
enum status err_prefix(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
