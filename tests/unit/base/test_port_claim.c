/* test_port_claim.c - ports that launchers choose at the same time. */
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shared/base/address/port_claim.h"
#include "tests/harness/test.h"

enum { PORT = 29999 };

TEST(a_port_that_another_has_claimed_is_not_claimed_again)
{
    struct port_claims a = { 0 }, b = { 0 };
    CHECK(port_claim(&a, PORT) && port_claim(&a, PORT - 1));
    CHECK(!port_claim(&b, PORT) && !port_claim(&b, PORT - 1));
    CHECK(port_claim(&b, PORT - 2));
    CHECK_EQ_INT(b.n, 1);
    port_claims_release(&a);
    CHECK(port_claim(&b, PORT));
    port_claims_release(&b);
}

TEST(a_claim_ends_with_its_process)
{
    struct port_claims a = { 0 };
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) _exit(port_claim(&a, PORT) ? 0 : 1);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(port_claim(&a, PORT));
    port_claims_release(&a);
}

TEST(a_port_on_which_somebody_listens_is_not_free)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof at;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 1) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&at, &n) == 0);
    CHECK(!port_is_free(ntohs(at.sin_port)));
    close(fd);
    CHECK(port_is_free(ntohs(at.sin_port)));
}

TEST_MAIN(CASE(a_port_that_another_has_claimed_is_not_claimed_again),
          CASE(a_claim_ends_with_its_process), CASE(a_port_on_which_somebody_listens_is_not_free))
