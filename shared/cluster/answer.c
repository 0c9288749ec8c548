/* answer.c - see answer.h. */
#include "shared/cluster/answer.h"

#include "shared/base/log.h"

void answer_send(struct cluster *c, uint64_t entry, enum frame_type type, uint64_t request,
                 uint32_t attempt, const ProtobufCMessage *body)
{
    enum status st = cluster_send_proto(c, entry, type, request, attempt, body);
    if (st == ERR_FULL) cluster_disconnect(c, entry, "its queue of answers is full");
    else if (st != OK)
        log_debug("answer not sent", "request=%016llx st=%s", (unsigned long long)request,
                  status_name(st));
}

enum failed_blame failed_blame_of_engine(enum status st)
{
    enum status_class c = status_class_of(st);
    bool at_fault = c == CLASS_FATAL || c == CLASS_PEER || st == ERR_CANCELED || st == ERR_NOMEM;
    return at_fault ? BLAME_NODE : BLAME_NOBODY;
}

struct failure failure_of_transfer(enum status st, const char *text)
{
    /* A timeout is told as one: the path is broken, not a single transfer. */
    bool of_request = status_class_of(st) == CLASS_REQUEST && st != ERR_TIMEOUT;
    return (struct failure){
        .st = of_request ? ERR_IO : st,
        .blame = status_class_of(st) == CLASS_FATAL ? BLAME_NODE : BLAME_PAIR,
        .text = text[0] ? text : "the KV transfer failed",
    };
}

void answer_send_failed(struct cluster *c, uint64_t entry, uint64_t request, uint32_t attempt,
                        const struct failure *f)
{
    Baton__Failed m = BATON__FAILED__INIT;
    m.status = f->st;
    m.text = (char *)f->text;
    m.blame = f->blame;
    answer_send(c, entry, FRAME_FAILED, request, attempt, &m.base);
}

void answer_send_lacking(struct cluster *c, uint64_t entry, uint64_t request, uint32_t attempt,
                         uint32_t n_cached, const char *text)
{
    Baton__Failed m = BATON__FAILED__INIT;
    m.status = ERR_BUSY;
    m.text = (char *)(uintptr_t)text;
    m.blame = BLAME_HANDED_BACK;
    m.lacks_prompt = true;
    m.n_cached = n_cached;
    answer_send(c, entry, FRAME_FAILED, request, attempt, &m.base);
}

struct kv_kept kv_kept_learn(struct cluster *c, const Baton__KvKept *kept)
{
    const Baton__NodeAddress *a = kept ? kept->node : NULL;
    if (!a || a->node == 0 || a->port == 0 || a->port > UINT16_MAX || kept->n_tokens == 0)
        return (struct kv_kept){ 0 };
    cluster_learn(c, a->node, a->host, (uint16_t)a->port);
    return (struct kv_kept){ a->node, kept->n_tokens, kept->n_ranks ? kept->n_ranks : 1 };
}
