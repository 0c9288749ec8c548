/* http_answer.c - reads what the directory server answers, with every bound checked: it has not
 * proven itself. Thread: loop. */
#include <stdio.h>
#include <string.h>

#include "scheduler/directory/http_state.h"
#include "scheduler/directory/meter_wire.h"
#include "shared/base/clock.h"
#include "shared/base/json/json_packed.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

static void read_snapshot(struct directory_http *d, const cJSON *doc,
                          struct directory_http_answer *a)
{
    const cJSON *list = json_member(doc, "nodes"), *one;
    const char *topics = "";
    int n = cJSON_IsArray(list) ? cJSON_GetArraySize(list) : -1;
    struct map seen = { 0 };
    struct err err;
    if (n < 0 || n > DIRECTORY_NODES_MAX || json_get_str(doc, "topics", &topics, NULL) != OK) {
        a->st = ERR_FORMAT;
        return;
    }
    a->nodes = mem_calloc((size_t)n, sizeof *a->nodes);
    cJSON_ArrayForEach (one, list) {
        struct node_record *r = &a->nodes[a->snapshot.n];
        enum status st = node_record_from_json(one, r, &err);
        if (st == OK && strcmp(r->topic, d->topic) != 0)
            st = err_set(&err, ERR_INVALID, "it is the record of a node of topic %s", r->topic);
        if (st == OK && map_get(&seen, map_key_u64(&r->node)))
            st = err_set(&err, ERR_INVALID, "the record of node %s comes more than once", r->name);
        if (st == OK) map_put(&seen, map_key_u64(&a->nodes[a->snapshot.n++].node), r);
        else directory_remote_refuse_record(&d->remote, STR(""), err.text);
    }
    map_release(&seen);
    a->snapshot.nodes = a->nodes;
    snprintf(a->snapshot.topics, sizeof a->snapshot.topics, "%s", topics);
}

static void read_reserved(const struct directory_http_call *c, const cJSON *doc,
                          struct directory_http_answer *a)
{
    const char *text = "", *on = NULL;
    bool is_well_formed = json_get_str(doc, "status", &text, NULL) == OK &&
                          json_get_str(doc, "placed", &on, NULL) == OK &&
                          directory_get_id(doc, "fence", &a->placed.fence, NULL) == OK;
    a->placed.on = c->chosen;
    if (is_well_formed && on && c->told_prefix)
        is_well_formed = prefix_placed_read(str_of(on), &a->placed.on) == OK;
    if (is_well_formed && strcmp(text, "ok") == 0) return;
    if (is_well_formed && strcmp(text, "busy") == 0) a->st = ERR_BUSY;
    else if (is_well_formed && strcmp(text, "not_found") == 0) a->st = ERR_NOT_FOUND;
    else a->st = ERR_FORMAT;
}

static void read_sums(const struct directory_http_call *c, const cJSON *doc,
                      struct directory_http_answer *a)
{
    struct err err;
    if (meter_sums_read(doc, c->room, c->n_room, &a->sums, &err) != OK) a->st = ERR_FORMAT;
}

#define WHERE_SERVERS_ARE                                                                          \
    "--router names the port of a router, or the control port of a launcher or prefill node"

static void explain_status(const struct directory_http *d, int http_status, const char *said,
                           struct directory_http_answer *a)
{
    if (http_status == 401)
        snprintf(a->why, sizeof a->why,
                 "the directory server at %s %s; give every node the same "
                 "BATON_CLUSTER_SECRET or --cluster-secret-file",
                 d->at,
                 d->secret.len ? "has another cluster secret, or none"
                               : "asks for a cluster secret, and this node has none");
    else if (http_status == 404)
        snprintf(a->why, sizeof a->why,
                 "what listens at %s is no directory server (it answered 404): " WHERE_SERVERS_ARE,
                 d->at);
    else
        snprintf(a->why, sizeof a->why, "the directory server at %s answered %d: %.160s", d->at,
                 http_status, said);
}

/* An answer other than 200. A server of an earlier version does not know the path of reports, or
 * refuses their length. */
static void read_error(const struct directory_http *d, enum directory_op op, int http_status,
                       const cJSON *doc, struct directory_http_answer *a)
{
    const char *said = "";
    if (json_get_str(doc, "error", &said, NULL) != OK) said = "";
    const bool is_unknown = op == DIRECTORY_OP_METER && (http_status == 404 || http_status == 413);
    a->st = http_status == 401   ? ERR_UNAUTHORIZED
            : http_status == 429 ? ERR_FULL
            : http_status == 400 ? ERR_INVALID
            : is_unknown         ? ERR_UNSUPPORTED
                                 : ERR_IO;
    explain_status(d, http_status, said, a);
}

/* No answer, or not one of this protocol. */
static void explain_failure(const struct directory_http *d, const struct err *err,
                            struct directory_http_answer *a)
{
    if (a->st == ERR_TOO_LONG || a->st == ERR_INVALID) {
        snprintf(a->why, sizeof a->why,
                 "the directory server at %s sent an answer of more than %d MiB or %d JSON values, "
                 "which was not read; does another program use that port?",
                 d->at, DIRECTORY_ANSWER_MAX >> 20, DIRECTORY_VALUES_MAX);
        a->st = ERR_FORMAT;
        return;
    }
    const char *why = err->text[0]             ? err->text
                      : a->st == ERR_TIMEOUT   ? "no answer within 1 s"
                      : a->st == ERR_PEER_LOST ? "the connection was refused or closed"
                                               : status_text(a->st);
    snprintf(a->why, sizeof a->why,
             "the directory server at %s cannot be reached: %.120s; is it running, and is that its "
             "port (" WHERE_SERVERS_ARE ")? check with: baton doctor --router %s",
             d->at, why, d->at);
}

bool directory_http_read_answer(struct directory_http *d, const struct directory_http_call *c,
                                enum status st, int http_status, struct str body,
                                struct directory_http_answer *a)
{
    struct err err = { 0 };
    cJSON *doc = NULL;
    a->st = st;
    if (st == OK) a->st = json_parse_bounded(body, DIRECTORY_VALUES_MAX, &doc, &err);
    if (a->st != OK) {
        explain_failure(d, &err, a);
    } else if (http_status != 200) {
        read_error(d, c->op, http_status, doc, a);
    } else {
        if (c->op == DIRECTORY_OP_SNAPSHOT) read_snapshot(d, doc, a);
        if (c->op == DIRECTORY_OP_RESERVE) read_reserved(c, doc, a);
        if (c->op == DIRECTORY_OP_METER) read_sums(c, doc, a);
        if (a->st == ERR_FORMAT)
            snprintf(a->why, sizeof a->why, "the directory server at %s sent a malformed answer",
                     d->at);
    }
    a->doc = doc;
    uint32_t n_unlogged;
    const bool is_refused = a->st == ERR_FULL || a->st == ERR_INVALID || a->st == ERR_UNSUPPORTED;
    if (is_refused && log_repeats_due(&d->refused_calls, a->why, clock_ms(), &n_unlogged))
        log_warn("directory call refused", "why=\"%s\" repeats=%u", a->why, n_unlogged);
    return is_refused || a->st == OK || a->st == ERR_BUSY || a->st == ERR_NOT_FOUND;
}

void directory_http_answer_release(struct directory_http_answer *a)
{
    mem_free(a->nodes);
    cJSON_Delete(a->doc);
}
