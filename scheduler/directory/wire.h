/* directory/wire.h - what both sides of the `http` row agree on: paths, limits, the proof of
 * membership, and ids in JSON.
 *
 *   POST /cluster/v1/publish   { owner, fence, record }                                             -> { }
 *                    leave     { owner, node }                                                      -> { }
 *                    snapshot  { owner, topic } -> { topics, nodes: [record] }
 *                    reserve   { owner, fence, id, prefill, decode, tokens, blocks, ttl_ms }        -> { status, fence }
 *                    release   { owner, ids: [id] }                                                 -> { }
 * owner: a random number of the calling entry; its reservations end when it has not called for a
 * lease. fence: the highest fencing number it has seen, so that a holder that lost its memory goes
 * on above it. Ids are 16 hex digits: a JSON number is a double and would lose bits. status: "ok",
 * "busy" or "not_found"; other failures are HTTP statuses with { error }. Thread: any (pure
 * functions). */
#ifndef BATON_SCHEDULER_DIRECTORY_WIRE_H
#define BATON_SCHEDULER_DIRECTORY_WIRE_H

#include <inttypes.h>

#include "scheduler/directory/directory.h"
#include "shared/base/json/json.h"

#define DIRECTORY_PATH "/cluster/v1/"
#define DIRECTORY_ID   "%016" PRIx64

enum {
    DIRECTORY_BODY_MAX = 1 << 20,
    DIRECTORY_ANSWER_MAX = 16 << 20, /* a snapshot of DIRECTORY_NODES_MAX nodes is under 4 MiB */
    DIRECTORY_RELEASE_MAX = 256,     /* ids in one release */
    DIRECTORY_PROOF_MAX = 80
};

/* "Baton <hex HMAC-SHA256(secret, method ' ' path ' ' body)>". */
void directory_prove(struct str secret, const char *method, struct str path, struct str body,
                     char out[DIRECTORY_PROOF_MAX]);
/* Append "name":"<id>" (no comma). */
void directory_add_id(struct buf *b, const char *name, uint64_t id);
/* The reverse of json_get_*: absent is OK and leaves *out; anything but 16 hex digits is
 * ERR_INVALID. */
enum status directory_get_id(const cJSON *o, const char *name, uint64_t *out,
                             struct err *err) MUST_CHECK;
enum status directory_read_id(struct str text, uint64_t *out) MUST_CHECK;

/* 1 to NODE_NAME_MAX - 1 printable bytes without blanks and braces: a topic is a part of Redis keys
 * and of sentences. */
bool directory_topic_is_valid(const char *topic);
/* node_record_read for a parsed object. */
enum status node_record_from_json(const cJSON *o, struct node_record *out,
                                  struct err *err) MUST_CHECK;

/* The `topics` text: roles counted per topic, at most DIRECTORY_TOPICS_MAX topics (others are not
 * listed). */
struct directory_topic {
    char name[NODE_NAME_MAX];
    uint32_t n_role[ROLE_DECODE + 1];
};
void directory_topics_add(struct directory_topic *t, size_t *n, const char *name,
                          enum node_role role, uint32_t count);
/* Sorts t by name; text that does not fit ends with "...". */
void directory_topics_write(struct directory_topic *t, size_t n, char *out, size_t cap);

#endif
