/* kv_answer.c - see kv_answer.h. */
#include "decode/kv_answer.h"

#include "shared/base/log.h"
#include "shared/cluster/proto/node.pb-c.h"

void kv_answer_send(struct cluster *c, struct kvt *kvt, const struct cluster_message *m)
{
    Baton__KvtHello *body = baton__kvt_hello__unpack(NULL, m->body.n, (const uint8_t *)m->body.p);
    Baton__KvtAnswer answer = BATON__KVT_ANSWER__INIT;
    struct err err = { 0 };
    struct buf bytes = { 0 };
    enum status st = ERR_FORMAT;
    if (!kvt)
        st = err_set(&err, ERR_UNSUPPORTED,
                     "this node receives no KV: no cache transfer protocol is enabled");
    else if (body)
        st = kvt_answer(kvt, (struct str){ (const char *)body->hello.data, body->hello.len },
                        &bytes, &err);
    answer.status = st;
    answer.text = err.text;
    answer.answer.data = (uint8_t *)bytes.data;
    answer.answer.len = st == OK ? bytes.len : 0;
    if (cluster_send_proto(c, m->from, FRAME_KVT_ANSWER, m->request, m->attempt, &answer.base) !=
        OK)
        log_debug("kvt answer not sent", "peer=%s", m->from_name);
    if (st != OK) log_warn("kvt peer refused", "peer=%s why=\"%s\"", m->from_name, err.text);
    buf_release(&bytes);
    if (body) baton__kvt_hello__free_unpacked(body, NULL);
}
