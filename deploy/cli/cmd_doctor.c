/* cmd_doctor.c - `baton doctor`: checks this host with the options of a node that is about to
 * start. Thread: main. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/doctor/doctor.h"
#include "shared/base/mem.h"

static const char INTRO[] =
    "usage: baton doctor [the options of `baton serve` or `baton launch`] [--peers host:port,...] "
    "[--json]\n"
    "       baton doctor --listen host:port\n\n"
    "Check this host before the first request: CPU, memory, limits, RDMA devices, ports, Redis, "
    "the model. Nothing is started or changed.\n"
    "With --peers also every pair of hosts, this one included, over every transport of "
    "--cache-transfer-protocol: connected and measured. Each peer\n"
    "is a probe server that `baton doctor --listen` started there; hosts must share the cluster "
    "secret "
    "(BATON_CLUSTER_SECRET).\n"
    "Exit status 0: a node with these options would serve; 1: something fails.\n";

int cmd_doctor(int argc, char **argv)
{
    bool done;
    const char *words[1];
    int n_words = 1;
    struct err err = { 0 };
    struct config *c = command_config("doctor", INTRO, argc, argv, words, &n_words, &done);
    if (!c) return done ? 0 : 2;
    if (config_is_set(c, "listen")) {
        int listened = command_listen(c, "doctor");
        config_free(c);
        return listened;
    }
    if (n_words == 1 && config_set(c, "model", words[0], &err) != OK) {
        fprintf(stderr, "baton doctor: %s\n", err.text);
        config_free(c);
        return 2;
    }
    struct doctor *d = MEM_NEW(struct doctor);
    struct buf out = { 0 };
    d->c = c;
    doctor_check_host(d);
    doctor_check_peers(d);
    if (config_bool(c, "json")) doctor_print_json(d, &out);
    else doctor_print_text(d, isatty(STDOUT_FILENO) && !getenv("NO_COLOR"), &out);
    fwrite(out.data, 1, out.len, stdout);
    int exit_status = doctor_count(d, DOCTOR_FAIL) ? 1 : 0;
    buf_release(&out);
    buf_release(&d->tables);
    buf_release(&d->members);
    mem_free(d);
    config_free(c);
    return exit_status;
}
