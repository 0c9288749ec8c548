/* cmd_nics.c - `baton nics`: names the RDMA devices near the GPUs, or the network interface of the
 * host's own traffic, as deploy/get_rdma_nics.sh does. The program carries that script, so the two
 * cannot differ, and becomes the shell that runs it. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/cli/nics_script.h"

static const char USAGE[] =
    "usage: baton nics gpu      prints KVCACHE_RDMA_NICS=mlx5_0,mlx5_1,...\n"
    "       baton nics cpu      prints KV_CACHE_SOCKET_IFNAME=bond0\n"
    "Prints one line for `export $(baton nics gpu)`. Without such a device the line has no value,\n"
    "which the other commands read as not set, and a sentence on stderr says why.\n";

int cmd_nics(int argc, char **argv)
{
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        fputs(USAGE, stdout);
        return 0;
    }
    /* The script refuses other arguments too: its line on stdout keeps an `export` harmless. */
    char *args[] = { "bash",
                     "-c",
                     (char *)NICS_SCRIPT,
                     "baton nics",
                     argc > 1 ? argv[1] : NULL,
                     argc > 2 ? argv[2] : NULL,
                     NULL };
    signal(SIGPIPE, SIG_DFL); /* main ignores it, and a program that is started inherits that */
    execvp(args[0], args);
    printf("KVCACHE_RDMA_NICS=\n");
    fprintf(stderr, "baton nics: bash cannot be started: %s\n", strerror(errno));
    return 1;
}
