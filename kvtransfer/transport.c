/* transport.c - the transports of this build. A missing library is a missing line here, never a
 * branch elsewhere. Constants only.
 * Thread: any. */
#include "kvtransfer/transport.h"

#include "kvtransfer/transports.h"

const struct kvt_transport_ops *const kvt_transports[] = {
    &kvt_ipc_ops,
#ifdef BATON_HAVE_RDMA
    &kvt_rdma_ops,
#endif
#ifdef BATON_HAVE_UCX
    &kvt_ucx_ops,
#endif
    &kvt_tcp_ops,  &kvt_mem_ops, NULL,
};

const char *const kvt_transport_names[] = { "ipc", "rdma", "ucx", "tcp", NULL };

bool kvt_transport_is_known(struct str name)
{
    for (size_t i = 0; kvt_transport_names[i]; i++)
        if (str_eq_c(name, kvt_transport_names[i])) return true;
    return false;
}

unsigned kvt_transport_caps(struct str name)
{
    for (size_t i = 0; kvt_transports[i]; i++)
        if (str_eq_c(name, kvt_transports[i]->name)) return kvt_transports[i]->caps;
    return 0;
}

enum status kvt_transport_find(struct str name, const struct kvt_transport_ops **out,
                               struct err *err)
{
    struct buf names = { 0 };
    for (size_t i = 0; kvt_transports[i]; i++) {
        if (str_eq_c(name, kvt_transports[i]->name)) {
            *out = kvt_transports[i];
            buf_release(&names);
            return OK;
        }
        buf_printf(&names, "%s%s", i ? ", " : "", kvt_transports[i]->name);
    }
    enum status st = err_set(err, ERR_UNSUPPORTED,
                             "KV transfer protocol '%.*s' is not in this build, which has %s",
                             STR_ARG(name), names.data);
    buf_release(&names);
    return st;
}
