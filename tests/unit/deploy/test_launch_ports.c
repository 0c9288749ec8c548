/* test_launch_ports.c - ports that launchers choose at the same time. */
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "deploy/launch/launch_ports.h"
#include "tests/harness/test.h"

enum { PORT = 29999 };

TEST(a_port_that_another_has_claimed_is_not_claimed_again)
{
    struct launch_claims a = { 0 }, b = { 0 };
    CHECK(launch_port_claim(&a, PORT) && launch_port_claim(&a, PORT - 1));
    CHECK(!launch_port_claim(&b, PORT) && !launch_port_claim(&b, PORT - 1));
    CHECK(launch_port_claim(&b, PORT - 2));
    CHECK_EQ_INT(b.n, 1);
    launch_claims_release(&a);
    CHECK(launch_port_claim(&b, PORT));
    launch_claims_release(&b);
}

TEST(a_claim_ends_with_its_process)
{
    struct launch_claims a = { 0 };
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) _exit(launch_port_claim(&a, PORT) ? 0 : 1);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(launch_port_claim(&a, PORT));
    launch_claims_release(&a);
}

TEST(a_port_on_which_somebody_listens_is_not_free)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof at;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 1) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&at, &n) == 0);
    CHECK(!launch_port_is_free(ntohs(at.sin_port)));
    close(fd);
    CHECK(launch_port_is_free(ntohs(at.sin_port)));
}

TEST_MAIN(CASE(a_port_that_another_has_claimed_is_not_claimed_again),
          CASE(a_claim_ends_with_its_process), CASE(a_port_on_which_somebody_listens_is_not_free))
