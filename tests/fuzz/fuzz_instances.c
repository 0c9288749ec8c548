/* fuzz_instances.c - arbitrary bytes for the bodies by which nodes are added to a router: what is
 * accepted names hosts and ports that an HTTP request may hold. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/router/instances.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_node(const struct node_at *n)
{
    const char *end = memchr(n->host, 0, sizeof n->host);
    if (!end || end == n->host || n->port == 0 || n->role > ROLE_DECODE) abort();
    for (const char *p = n->host; p < end; p++)
        if (!isalnum((unsigned char)*p) && !strchr(".:-_%", *p)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct instances_change c;
    struct node_at one;
    struct err err = { 0 };
    const struct str body = { (const char *)data, size };
    if (instances_read_change(body, &c, &err) == OK) {
        if (c.n < 1 || c.n > INSTANCES_MAX) abort();
        for (size_t i = 0; i < c.n; i++) {
            check_node(&c.nodes[i]);
            if (c.nodes[i].role == ROLE_MIXED) abort();
        }
    } else if (err.code == OK || !err.text[0]) {
        abort();
    }
    err = (struct err){ 0 };
    if (instances_read_register(body, &one, &err) == OK) check_node(&one);
    else if (err.code == OK || !err.text[0]) abort();
    return 0;
}
