/* test_host_id.c - which processes are on this one's host, and can be seen from here. */
#include "kernels/host/host_id.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/harness/test.h"

enum { NOBODY = 65534, LACKS = 77 };

/* What `child` returns in a process of its own. */
static int in_child(int (*child)(int32_t parent))
{
    const int32_t parent = getpid();
    const pid_t pid = fork();
    int status;
    CHECK(pid >= 0);
    if (pid == 0) _exit(child(parent));
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int sees_its_parent(int32_t parent)
{
    const struct host_id mine = host_id_or_alone();
    return host_sees_process(&mine, parent) && host_sees_process(&mine, getpid());
}

static int sees_as_nobody(int32_t parent)
{
    if (setgid(NOBODY) != 0 || setuid(NOBODY) != 0) return LACKS;
    return sees_its_parent(parent);
}

static int is_alone(int32_t parent)
{
    struct host_id a, b, c;
    (void)parent;
    if (host_id_read(&a, NULL) != OK) return 1;
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("/dev/null", "/proc/sys/kernel/random/boot_id", NULL, MS_BIND, NULL) != 0)
        return LACKS;
    b = host_id_or_alone();
    c = host_id_or_alone();
    return host_id_read(&a, NULL) == OK || host_id_same(&a, &b) || host_id_same(&b, &c);
}

TEST(processes_of_one_user_see_each_other)
{
    const struct host_id a = host_id_or_alone(), b = host_id_or_alone();
    CHECK(host_id_same(&a, &b));
    CHECK_EQ_INT(in_child(sees_its_parent), 1);
    CHECK(!host_sees_process(&a, INT32_MAX));
}

TEST(another_users_process_is_not_seen)
{
    const int sees = in_child(sees_as_nobody);
    if (sees == LACKS) SKIP("only root can become another user");
    CHECK_EQ_INT(sees, 0);
}

TEST(a_host_without_a_name_is_nobody_elses)
{
    const int wrong = in_child(is_alone);
    if (wrong == LACKS) SKIP("it needs the right to mount");
    CHECK_EQ_INT(wrong, 0);
}

TEST_MAIN(CASE(processes_of_one_user_see_each_other), CASE(another_users_process_is_not_seen),
          CASE(a_host_without_a_name_is_nobody_elses))
