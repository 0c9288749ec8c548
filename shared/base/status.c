/* status.c - names, texts, classes and HTTP statuses, all made from STATUS_TABLE.
 * Thread: any (constants). */
#include "shared/base/status.h"

struct status_entry {
    const char *name, *text;
    enum status_class class_;
    int http;
};

static struct status_entry status_entry(enum status st)
{
    switch (st) {
#define X(code, number, text, class_, http)                                                        \
    case code: return (struct status_entry){ #code, text, class_, http };
        STATUS_TABLE(X)
#undef X
    }
    return status_entry(ERR_INTERNAL);
}

const char *status_name(enum status st) { return status_entry(st).name; }

const char *status_text(enum status st) { return status_entry(st).text; }

enum status_class status_class_of(enum status st) { return status_entry(st).class_; }

int status_http(enum status st) { return status_entry(st).http; }
