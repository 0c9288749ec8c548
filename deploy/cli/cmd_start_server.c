/* cmd_start_server.c - `baton start_server [NAME]` and `baton stop_server [SECONDS]`: a service as
 * that of PaddleNLP; deploy/start_server and deploy/stop_server call them.
 * Thread: main. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/options/option_table.h"
#include "deploy/service/service.h"
#include "deploy/service/service_hosts.h"
#include "deploy/service/service_model.h"
#include "deploy/service/service_start.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"

static const char START_INTRO[] =
    "usage: start_server [MODEL_NAME] [options of baton serve]\n\n"
    "Start `baton serve` in the background, with the variables of PaddleNLP's service\n"
    "(docs/start_server.md): MODEL_DIR is the model, or the folder that has MODEL_NAME. Returns\n"
    "when the service is ready; on several hosts (POD_IPS) when it listens. Its log is in ./log.\n";

static const char STOP_INTRO[] =
    "usage: stop_server [SECONDS]\n\n"
    "Stop the service that start_server has started on this host: running requests are finished,\n"
    "for at most so many seconds (300).\n";

enum { STOP_S = 300, STOP_MAX_S = 86400 };

static bool asks_help(int argc, char **argv)
{
    return argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
}

static int fail(const char *who, const struct err *err)
{
    fprintf(stderr, "%s: %s\n", who, err->text);
    return 1;
}

/* Locks the file of this user's service, or says that one runs. Returns an exit status. */
static int take_file(struct run_file *file)
{
    struct run_info info;
    struct err err = { 0 };
    if (run_file_open(file, &err) != OK) return fail("start_server", &err);
    if (run_file_lock(file)) return 0;
    if (run_file_read(file, &info))
        fprintf(stderr,
                "start_server: a service runs already (process %d, its log is in %s); "
                "stop_server ends it\n",
                (int)info.pid, info.log);
    else fprintf(stderr, "start_server: another service is being started\n");
    run_file_close(file);
    return 1;
}

/* mpirun starts as many as a host has slots; a host has one service, the first one's. */
static bool is_further_rank(void)
{
    static const char *const RANKS[] = { "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID" };
    for (size_t i = 0; i < COUNT_OF(RANKS); i++) {
        const char *rank = getenv(RANKS[i]);
        if (rank && strtol(rank, NULL, 10) > 0) return true;
    }
    return false;
}

/* Takes the name off the words, if they begin with one. */
static void take_name(int *argc, char ***argv)
{
    setenv(SERVICE_VARIABLE, "1", 1);
    if (*argc < 1 || (*argv)[0][0] == '-') return;
    if ((*argv)[0][0]) {
        setenv("model_name", (*argv)[0], 1);
        setenv(SERVICE_VARIABLE, SERVICE_NAMED, 1);
    }
    --*argc;
    ++*argv;
}

/* ---- the model ---- */

/* `baton pull NAME --dir MODEL_DIR/NAME`, in a process of its own. */
static int pull(const char *name)
{
    struct buf dir = { 0 };
    int status = 0;
    buf_printf(&dir, "%s/%s", service_model_dir(), name);
    const pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* who ends the start ends this, too */
        execl("/proc/self/exe", "baton", "pull", name, "--dir", dir.data, (char *)NULL);
        _exit(127);
    }
    if (pid < 0 || waitpid(pid, &status, 0) < 0) status = -1;
    buf_release(&dir);
    return status == 0 ? 0 : 1;
}

/* Is there no mistake but that the model is not on this host? A fetch may take hours, so any other
 * one is found before it. */
static bool lacks_model_alone(int argc, char **argv, struct err *err)
{
    int no_words = 0;
    struct config *c = config_create(OPTIONS, "serve");
    config_as_service(c);
    const bool lacks = config_load_env(c, err) == OK &&
                       config_load_args(c, argc, argv, NULL, &no_words, err) == OK &&
                       service_complete(c, err) == ERR_NOT_FOUND;
    config_free(c);
    return lacks;
}

/* A named model that is not on this host is fetched, where that can be done. */
static int fetch_model(int argc, char **argv)
{
    struct run_file file;
    struct err err = { 0 };
    const char *name = service_model_name();
    if (!name || !lacks_model_alone(argc, argv, &err)) return 0; /* what else is wrong is said */
    if (!service_model_is_elsewhere(name)) return fail("start_server", &err);
    if (take_file(&file) != 0) return 1;
    run_file_close(&file);
    return pull(name);
}

/* ---- start ---- */

static int start(const struct config *c, int argc, char **argv)
{
    struct run_file file;
    if (take_file(&file) != 0) return 1;
    const struct service_start s = {
        .file = &file,
        .log_dir = config_string(c, "log-dir"),
        .words = argv,
        .n_words = argc,
        .until_ready = !service_hosts_several(),
    };
    run_file_clear(&file);
    const int status = service_start(&s);
    run_file_close(&file);
    return status;
}

int cmd_start_server(int argc, char **argv)
{
    bool done;
    if (asks_help(argc, argv)) {
        fputs(START_INTRO, stdout);
        return 0;
    }
    if (is_further_rank()) {
        fprintf(stderr, "start_server: the first process of this host starts its service\n");
        return 0;
    }
    --argc;
    ++argv;
    take_name(&argc, &argv);
    if (fetch_model(argc, argv) != 0) return 1;
    struct config *c = command_config("serve", START_INTRO, argc + 1, argv - 1, NULL, NULL, &done);
    if (!c) return done ? 0 : 2;
    const int status = start(c, argc, argv);
    config_free(c);
    return status;
}

/* ---- stop ---- */

static bool read_seconds(int argc, char **argv, int64_t *out)
{
    *out = STOP_S;
    if (argc < 2) return true;
    return argc == 2 && str_to_i64(str_of(argv[1]), out) == OK && *out >= 0 && *out <= STOP_MAX_S;
}

static void print_bad_seconds(int argc, char **argv)
{
    struct buf word = { 0 };
    if (argc == 2) json_add_string(&word, str_sub(str_of(argv[1]), 0, 80));
    if (argc == 2) fprintf(stderr, "stop_server: SECONDS is %s, but must be", word.data);
    else fprintf(stderr, "stop_server: there are %d words, but may be one:", argc - 1);
    fprintf(stderr, " a whole number from 0 to %d, for so long requests may go on\n", STOP_MAX_S);
    buf_release(&word);
}

int cmd_stop_server(int argc, char **argv)
{
    struct run_file file;
    struct err err = { 0 };
    int64_t seconds;
    int status = 0;
    if (asks_help(argc, argv)) {
        fputs(STOP_INTRO, stdout);
        return 0;
    }
    if (!read_seconds(argc, argv, &seconds)) {
        print_bad_seconds(argc, argv);
        return 2;
    }
    if (run_file_open(&file, &err) != OK) return fail("stop_server", &err);
    if (run_file_lock(&file)) fprintf(stderr, "stop_server: no service runs\n");
    else status = service_stop(&file, (unsigned)seconds);
    run_file_close(&file);
    return status;
}
