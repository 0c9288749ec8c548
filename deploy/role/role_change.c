/* role_change.c - see role_change.h. */
#include "deploy/role/role_change.h"

#include <stdio.h>
#include <string.h>

/* ---- the body ---- */

void role_ask_write(const struct role_ask *ask, struct buf *out)
{
    buf_printf(out, "{\"role\":\"%s\"", node_role_name(ask->role));
    if (ask->node[0]) {
        buf_add_c(out, ",\"node\":");
        json_add_string(out, str_of(ask->node));
    }
    buf_add_char(out, '}');
}

static enum status read_members(const cJSON *doc, struct role_ask *out, struct err *err)
{
    const char *role = NULL, *node = "";
    TRY(json_get_str(doc, "role", &role, err));
    TRY(json_get_str(doc, "node", &node, err));
    if (!role || !node_role_from_name(role, &out->role))
        return err_field(err, ERR_INVALID, "role",
                         "role is '%.40s', but must be prefill, decode or mixed", role ? role : "");
    if (strlen(node) >= sizeof out->node)
        return err_field(err, ERR_INVALID, "node",
                         "node has more than the %zu characters of a name", sizeof out->node - 1);
    snprintf(out->node, sizeof out->node, "%s", node);
    return OK;
}

enum status role_ask_read(struct str body, struct role_ask *out, struct err *err)
{
    cJSON *doc = NULL;
    TRY(json_parse(body, true, &doc, err));
    const enum status st = cJSON_IsObject(doc)
                               ? read_members(doc, out, err)
                               : err_set(err, ERR_INVALID, "the body must be a JSON object");
    cJSON_Delete(doc);
    return st;
}

void role_answer_write(const char *node, enum node_role is, enum node_role was, struct buf *out)
{
    buf_add_c(out, "{\"node\":");
    json_add_string(out, str_of(node));
    buf_printf(out, ",\"role\":\"%s\",\"was\":\"%s\"}", node_role_name(is), node_role_name(was));
}

/* ---- the check ---- */

enum status role_check(const struct role_facts *f, const struct role_ask *ask, struct err *err)
{
    const char *to = node_role_name(ask->role);
    if (ask->node[0] && strcmp(ask->node, f->name) != 0)
        return err_set(err, ERR_NOT_FOUND, "this is the node %s, and %s was to become %s", f->name,
                       ask->node, to);
    if (ask->role == f->role) return OK;
    if (f->unsplit)
        return err_set(
            err, ERR_CONFLICT,
            "%s cannot become %s: with --scheduler-name global requests are never split, "
            "so every node does all of a request; start the nodes with --scheduler-name "
            "splitwise to give them roles",
            f->name, to);
    if (ask->role != ROLE_MIXED && !f->exchanges_kv)
        return err_set(err, ERR_CONFLICT,
                       "%s cannot become %s: no KV transport works on it, so it can only do all of "
                       "a request (mixed); start it with a --cache-transfer-protocol that works "
                       "there (baton doctor tells which)",
                       f->name, to);
    if (ask->role != ROLE_MIXED && !f->is_seen)
        return err_set(err, ERR_CONFLICT,
                       "%s cannot become %s: it keeps a view of its own and no router lists it, so "
                       "no other node would do the other half of its requests; start it with "
                       "--router or --scheduler-name splitwise",
                       f->name, to);
    if (ask->role == ROLE_PREFILL && f->shares_view && !f->others_decode)
        return err_set(err, ERR_CONFLICT,
                       "%s cannot become prefill: it is the last node of topic %s that decodes for "
                       "its model; make another one decode or mixed first",
                       f->name, f->topic);
    return OK;
}
