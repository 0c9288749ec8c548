/* wire.h - the messages between the `http` backend and the directory server (POST /cluster/v1/...):
 *
 *   publish   { owner, fence, record } -> { }
 *   leave     { owner, node } -> { }
 *   snapshot  { owner, topic } -> { topics, nodes: [record] }
 *   reserve   { owner, fence, id, prefill, decode, tokens, blocks, ttl_ms,
 *               prefix: { rungs, compute, decode, drops } } -> { status, fence, placed }
 *             (prefix_text.h; earlier versions answer without `placed`)
 *   release   { owner, ids: [id], computed: [id] } -> { }
 *   meter     { owner, topic, entry, number, uses } -> { entries, least, sums } (meter_wire.h)
 *
 * owner: a random number of the calling entry node; its reservations end when it has not called for
 * a lease. fence: the highest fencing number it has seen, so that a server that lost its memory
 * goes on above it. Ids are 16 hex digits: a JSON number is a double and would lose bits. status:
 * "ok", "busy" or "not_found"; other failures are HTTP statuses with { error }. Thread: any. */
#ifndef BATON_SCHEDULER_DIRECTORY_WIRE_H
#define BATON_SCHEDULER_DIRECTORY_WIRE_H

#include <inttypes.h>

#include "scheduler/directory/directory.h"
#include "shared/base/json/json.h"

#define DIRECTORY_PATH "/cluster/v1/"
#define DIRECTORY_ID   "%016" PRIx64

enum {
    /* a record, twice DIRECTORY_RELEASE_MAX ids, or METER_TENANTS_MAX uses of 84 bytes */
    DIRECTORY_BODY_MAX = 32 << 10,
    DIRECTORY_ANSWER_MAX = 8 << 20, /* DIRECTORY_NODES_MAX usual records are 3 MiB */
    DIRECTORY_VALUES_MAX = DIRECTORY_NODES_MAX * 64, /* JSON values of an answer */
    DIRECTORY_RELEASE_MAX = 256,                     /* ids in a release, of each kind */
    DIRECTORY_PROOF_MAX = 80,
    DIRECTORY_PROOF_HEADER_MAX = DIRECTORY_PROOF_MAX + 32
};

/* Writes "Baton <hex HMAC-SHA256(secret, method ' ' path ' ' body)>". */
void directory_prove(struct str secret, const char *method, struct str path, struct str body,
                     char out[DIRECTORY_PROOF_MAX]);
/* Writes the header of a call that proves the secret, "Authorization: ...\r\n"; "" without one. */
void directory_prove_header(struct str secret, const char *method, struct str path, struct str body,
                            char out[DIRECTORY_PROOF_HEADER_MAX]);
/* An answer other than 200: its { error }, or `otherwise` if it has none, and the status in a
 * sentence. Returns ERR_PEER_REFUSED. */
enum status directory_read_refusal(int http_status, struct str answer, const char *otherwise,
                                   struct err *err);
/* Appends "name":"<id>" (no comma). */
void directory_add_id(struct buf *b, const char *name, uint64_t id);
/* Reads a member; when it is absent *out stays as it is. Anything but 16 hex digits is
 * ERR_INVALID. */
enum status directory_get_id(const cJSON *o, const char *name, uint64_t *out,
                             struct err *err) MUST_CHECK;
enum status directory_read_id(struct str text, uint64_t *out) MUST_CHECK;

/* A topic is part of Redis keys and of sentences: 1 to NODE_NAME_MAX - 1 printable bytes without
 * blanks and braces. */
bool directory_topic_is_valid(const char *topic);
/* As node_record_read, for a parsed object, in which out->identity then lies. */
enum status node_record_from_json(const cJSON *o, struct node_record *out,
                                  struct err *err) MUST_CHECK;

/* Counts the roles of each topic, for the `topics` text. Topics after DIRECTORY_TOPICS_MAX are not
 * listed. */
struct directory_topic {
    char name[NODE_NAME_MAX];
    uint32_t n_role[ROLE_DECODE + 1];
};
void directory_topics_add(struct directory_topic *t, size_t *n, const char *name,
                          enum node_role role, uint32_t count);
/* Sorts t by name and writes it; text that does not fit ends with "...". */
void directory_topics_write(struct directory_topic *t, size_t n, char *out, size_t cap);

#endif
