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

void answer_send_failed(struct cluster *c, uint64_t entry, uint64_t request, uint32_t attempt,
                        enum status st, const char *text)
{
    Baton__Failed f = BATON__FAILED__INIT;
    f.status = st;
    f.text = (char *)text;
    answer_send(c, entry, FRAME_FAILED, request, attempt, &f.base);
}
