/* fuzz_node_record.c - arbitrary bytes for node_record_read: an accepted record must be within its
 * bounds, and equal after being written and read again, its identity byte by byte. */
#include <stdlib.h>
#include <string.h>

#include "scheduler/directory/directory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool same_text(const char a[NODE_NAME_MAX], const char b[NODE_NAME_MAX])
{
    return memchr(a, 0, NODE_NAME_MAX) && memchr(b, 0, NODE_NAME_MAX) && strcmp(a, b) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct node_record a, b;
    static char rooms[2][2 * RECORD_TEXT_MAX + 1024];
    struct err err = { 0 };
    struct buf text = { 0 };
    if (node_record_read((struct str){ (const char *)data, size }, rooms[0], &a, &err) != OK) {
        if (err.code == OK || err.text[0] == 0) abort();
        return 0;
    }
    if (a.node == 0 || a.role > ROLE_DECODE) abort();
    if (a.identity.n > size) abort();
    node_record_write(&a, &text);
    /* Escapes of one version may be longer than those of another. */
    enum status st = node_record_read(buf_str(&text), rooms[1], &b, &err);
    bool too_long = text.len > RECORD_TEXT_MAX;
    buf_release(&text);
    if (too_long && st == ERR_TOO_LONG) return 0;
    if (st != OK) abort();
    /* Else no proof would survive the directory server. */
    if (a.identity.n != b.identity.n || memcmp(a.identity.p, b.identity.p, a.identity.n) != 0)
        abort();
    if (strcmp(a.proof, b.proof) != 0) abort();
    if (!same_text(a.name, b.name) || !same_text(a.topic, b.topic) || !same_text(a.host, b.host))
        abort();
    if (a.node != b.node || a.model != b.model || a.role != b.role ||
        a.cluster_port != b.cluster_port)
        abort();
    if (a.waiting_tokens != b.waiting_tokens || a.placed_tokens != b.placed_tokens ||
        a.progress != b.progress)
        abort();
    if (a.prefill_tokens_per_s != b.prefill_tokens_per_s || a.step_us != b.step_us) abort();
    if (a.placed_blocks != b.placed_blocks || a.max_seqs != b.max_seqs || a.draining != b.draining)
        abort();
    return 0;
}
