/* perf_tool_env.c - see perf_tool_env.h. */
#include "deploy/probe/perf_tool_env.h"

#include <stdlib.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/base/str.h"
#ifdef BATON_HAVE_UCX
#include "kvtransfer/ucx/setup.h"
#endif

extern char **environ;

#ifdef BATON_HAVE_UCX
/* The next free place. */
static struct buf *add(struct perf_tool_env *s)
{
    ASSERT(s->n < PERF_TOOL_ENV_MAX);
    return &s->text[s->n++];
}

static void add_devices(struct perf_tool_env *s, const char *nics)
{
    struct str rest = str_of(nics), item;
    struct buf *out = add(s);
    buf_printf(out, "UCX_NET_DEVICES=");
    for (const char *comma = ""; str_split(&rest, ',', &item); comma = ",")
        buf_printf(out, "%s%.*s%s", comma, STR_ARG(item),
                   str_find_char(item, ':') == SIZE_MAX ? ":1" : "");
}

void perf_tool_env_make(struct perf_tool_env *s, const struct kvt_tuning *tuning)
{
    struct buf tls = { 0 };
    struct err err = { 0 };
    unsigned gid;
    *s = (struct perf_tool_env){ 0 };
    /* The ucx transport refuses a list that is not allowed, and it opens before any tool runs. */
    if (ucx_check_tls(tuning->ucx_tls ? tuning->ucx_tls : getenv("UCX_TLS"), &tls, &err) == OK) {
        buf_printf(add(s), "UCX_TLS=%s", tls.data);
        if (tuning->rdma.nics && !strstr(tls.data, "tcp") && !getenv("UCX_NET_DEVICES"))
            add_devices(s, tuning->rdma.nics);
    }
    buf_release(&tls);
    if (!getenv("UCX_KEEPALIVE_INTERVAL")) buf_printf(add(s), "UCX_KEEPALIVE_INTERVAL=inf");
    if (!getenv("UCX_IB_GID_INDEX") && ucx_gid_index(&tuning->rdma, &gid))
        buf_printf(add(s), "UCX_IB_GID_INDEX=%u", gid);
}
#else
void perf_tool_env_make(struct perf_tool_env *s, const struct kvt_tuning *tuning)
{
    (void)tuning;
    *s = (struct perf_tool_env){ 0 };
}
#endif

void perf_tool_env_release(struct perf_tool_env *s)
{
    for (int i = 0; i < s->n; i++) buf_release(&s->text[i]);
    s->n = 0;
}

/* Does one of our settings replace `entry` (NAME=value)? */
static bool is_replaced(const struct perf_tool_env *s, const char *entry)
{
    for (int i = 0; i < s->n; i++) {
        const char *mine = s->text[i].data;
        size_t name = (size_t)(strchr(mine, '=') - mine) + 1;
        if (strncmp(entry, mine, name) == 0) return true;
    }
    return false;
}

char **perf_tool_env_array(const struct perf_tool_env *s)
{
    size_t n = 0, kept = 0;
    while (environ[n]) n++;
    char **env = MEM_ARRAY(char *, n + PERF_TOOL_ENV_MAX + 1);
    for (size_t i = 0; i < n; i++)
        if (!is_replaced(s, environ[i])) env[kept++] = environ[i];
    for (int i = 0; i < s->n; i++) env[kept++] = s->text[i].data;
    return env;
}
