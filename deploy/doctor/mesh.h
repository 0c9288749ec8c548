/* mesh.h - measures every ordered pair of hosts over every allowed transport and keeps the results
 * as a matrix.
 *
 * The doctor talks to one probe server per host and relays their hellos and answers; KV bytes go
 * directly from host to host. Pairs are measured one at a time, so that no measurement disturbs
 * another. Host 0 is this host: a probe server in a child process.
 * Life cycle: zeroed, mesh_dial, mesh_measure, print, mesh_release.
 * Thread: main. */
#ifndef BATON_DEPLOY_DOCTOR_MESH_H
#define BATON_DEPLOY_DOCTOR_MESH_H

#include "deploy/probe/measurement.h"

enum { MESH_HOSTS_MAX = 33, MESH_TRANSPORTS_MAX = 8 };

enum mesh_state {
    MESH_NOT_TRIED, /* a host of the pair does not answer */
    MESH_MEASURED,
    MESH_FAILED,       /* both hosts have the transport, but do not connect */
    MESH_OUT_OF_REACH, /* ipc between two hosts */
    MESH_NOT_BUILT,    /* not in the binary of `culprit` */
    MESH_UNAVAILABLE   /* `culprit` cannot open it: no device, no such port */
};

struct mesh_host {
    char where[128];             /* as --peers names it; "" for this host */
    struct probe_client *client; /* NULL: the host does not answer, see `error` */
    struct err error;
    char name[64];
};

struct mesh_cell {
    enum mesh_state state;
    uint32_t culprit; /* index of a host */
    double rate;      /* bytes per second, best of the rounds */
    double p50_us;    /* one small transfer, from open to acknowledgement */
    uint64_t link_speed;
    char text[PROBE_TEXT_MAX];
};

struct mesh {
    struct probe_dialer *dialer;
    struct mesh_host hosts[MESH_HOSTS_MAX];
    uint32_t n_hosts;
    char transports[MESH_TRANSPORTS_MAX][PROBE_NAME_MAX];
    uint32_t n_transports;
    struct mesh_cell *cells; /* [transport][from][to] */
};

/* Adds a host and dials it; a failure goes to its `error`. False: MESH_HOSTS_MAX hosts exist. */
bool mesh_dial(struct mesh *m, const char *where, const char *address);
void mesh_measure(struct mesh *m, bool checksum);
struct mesh_cell *mesh_cell(const struct mesh *m, uint32_t transport, uint32_t from, uint32_t to);
void mesh_release(struct mesh *m);

void mesh_print_text(const struct mesh *m, struct buf *out); /* a matrix per transport */
/* Appends members of an object: ,"peers":[...],"mesh":[...] */
void mesh_print_json(const struct mesh *m, struct buf *out);

#endif
