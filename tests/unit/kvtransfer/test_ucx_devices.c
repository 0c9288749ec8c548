/* test_ucx_devices.c - the network devices that an operator's list selects for transport ucx, and
 * lists that name none. */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_UCX
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/ucx/devices.h"
#include "shared/base/mem.h"

TEST(lists_of_names)
{
    struct ucx_devices d;
    ucx_devices_of_list(str_of("mlx5_0"), &d);
    CHECK_EQ_INT(d.n, 1);
    CHECK_EQ_STR(d.name[0], "mlx5_0:1");
    ucx_devices_of_list(str_of(" mlx5_3:2 ,, mlx5_1"), &d);
    CHECK_EQ_INT(d.n, 2);
    CHECK_EQ_STR(d.name[0], "mlx5_3:2"); /* the operator's order: both ends number rails by it */
    CHECK_EQ_STR(d.name[1], "mlx5_1:1");
}

TEST(what_is_left_to_ucx)
{
    const char *const lists[] = { "", " , ", "all", "^mlx5_0", "mlx5_0,mlx5_[2-3]", "mlx*" };
    struct ucx_devices d;
    for (size_t i = 0; i < COUNT_OF(lists); i++) {
        ucx_devices_of_list(str_of(lists[i]), &d);
        CHECK_EQ_INT(d.n, 1);
        CHECK_EQ_STR(d.name[0], "");
    }
    char many[(UCX_DEVICES_MAX + 1) * 4 + 1] = "", longest[UCX_DEVICE_NAME_MAX + 1];
    for (int i = 0; i < UCX_DEVICES_MAX; i++) strcat(many, "a:1,");
    ucx_devices_of_list(str_of(many), &d);
    CHECK_EQ_INT(d.n, UCX_DEVICES_MAX);
    strcat(many, "a:1,");
    ucx_devices_of_list(str_of(many), &d);
    CHECK_EQ_INT(d.n, 1);
    CHECK_EQ_STR(d.name[0], "");
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    ucx_devices_of_list(str_of(longest), &d);
    CHECK_EQ_STR(d.name[0], "");
}

TEST(who_decides)
{
    struct ucx_devices d;
    CHECK_EQ_INT(unsetenv("UCX_NET_DEVICES"), 0);
    ucx_devices_choose("mlx5_0,mlx5_1", false, &d);
    CHECK_EQ_INT(d.n, 2);
    ucx_devices_choose("mlx5_0,mlx5_1", true, &d);
    CHECK_EQ_INT(d.n, 1);
    CHECK_EQ_STR(d.name[0], "");
    ucx_devices_choose(NULL, false, &d); /* whatever this host has */
    CHECK(d.n >= 1);
    for (uint32_t i = 0; i < d.n; i++) CHECK(ucx_device_active(d.name[i]));
    CHECK_EQ_INT(setenv("UCX_NET_DEVICES", "mlx5_7:1", 1), 0);
    ucx_devices_choose("mlx5_0,mlx5_1", false, &d);
    CHECK_EQ_INT(d.n, 1);
    CHECK_EQ_STR(d.name[0], "mlx5_7:1");
}

/* A device that the system does not list may be of any kind, so it is tried. */
TEST(an_unknown_port_counts_as_active)
{
    CHECK(ucx_device_active(""));
    CHECK(ucx_device_active("no-such-device"));
    CHECK(ucx_device_active("no-such-device:1"));
}

TEST_MAIN(CASE(lists_of_names), CASE(what_is_left_to_ucx), CASE(who_decides),
          CASE(an_unknown_port_counts_as_active))

#else

TEST(not_built) { SKIP("built without UCX: ucx's choice of devices is NOT tested"); }

TEST_MAIN(CASE(not_built))

#endif
