/* fuzz_role.c - arbitrary bytes for the body by which a node's role is changed: what is accepted is
 * written and read as the same. */
#include <stdlib.h>
#include <string.h>

#include "deploy/role/role_change.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct role_ask ask = { 0 }, again = { 0 };
    struct err err = { 0 };
    struct buf body = { 0 };
    if (role_ask_read((struct str){ (const char *)data, size }, &ask, &err) != OK) {
        if (err.code == OK || !err.text[0]) abort();
        return 0;
    }
    if (ask.role > ROLE_DECODE || !memchr(ask.node, 0, sizeof ask.node)) abort();
    role_ask_write(&ask, &body);
    if (role_ask_read(buf_str(&body), &again, &err) != OK) abort();
    if (again.role != ask.role || strcmp(again.node, ask.node) != 0) abort();
    buf_release(&body);
    return 0;
}
