/* devices.c - the network devices that transport ucx uses; see devices.h. Thread: any. */
#include "kvtransfer/ucx/devices.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Linux, Documentation/ABI/stable/sysfs-class-infiniband */
static const char DEVICES[] = "/sys/class/infiniband";

static void only_any(struct ucx_devices *out)
{
    out->n = 1;
    out->name[0][0] = 0;
}

void ucx_devices_of_list(struct str list, struct ucx_devices *out)
{
    struct str item;
    out->n = 0;
    while (str_split(&list, ',', &item)) {
        item = str_trim(item);
        if (item.n == 0) continue;
        bool pattern = str_eq_c(item, "all");
        for (size_t i = 0; i < item.n; i++) pattern |= strchr("^*?[", item.p[i]) != NULL;
        if (pattern || item.n > UCX_DEVICE_NAME_MAX - 8 || out->n == UCX_DEVICES_MAX) {
            only_any(out);
            return;
        }
        snprintf(out->name[out->n++], UCX_DEVICE_NAME_MAX, "%.*s%s", STR_ARG(item),
                 str_find_char(item, ':') == SIZE_MAX ? ":1" : "");
    }
    if (out->n == 0) only_any(out);
}

bool ucx_device_active(const char *name)
{
    char path[2 * UCX_DEVICE_NAME_MAX], state[32] = "";
    const char *colon = strrchr(name, ':');
    if (!colon) return true;
    snprintf(path, sizeof path, "%s/%.*s/ports/%s/state", DEVICES, (int)(colon - name), name,
             colon + 1);
    FILE *f = fopen(path, "re");
    bool known = f && fgets(state, sizeof state, f);
    if (f) fclose(f);
    return !known || atoi(state) == 4; /* IBV_PORT_ACTIVE: "4: ACTIVE" */
}

static int by_version(const void *a, const void *b) { return strverscmp(a, b); }

/* The active ports of one device. */
static void add_ports(const char *device, struct ucx_devices *out)
{
    char path[320];
    snprintf(path, sizeof path, "%s/%s/ports", DEVICES, device);
    DIR *d = opendir(path);
    for (const struct dirent *e; d && (e = readdir(d)) != NULL && out->n < UCX_DEVICES_MAX;) {
        char *name = out->name[out->n];
        if (e->d_name[0] == '.' || strlen(device) + strlen(e->d_name) + 2 > UCX_DEVICE_NAME_MAX)
            continue;
        memcpy(name, device, strlen(device));
        name[strlen(device)] = ':';
        memcpy(name + strlen(device) + 1, e->d_name, strlen(e->d_name) + 1);
        out->n += ucx_device_active(name);
    }
    if (d) closedir(d);
}

void ucx_devices_choose(const char *nics, bool any, struct ucx_devices *out)
{
    const char *given = getenv("UCX_NET_DEVICES");
    out->n = 0;
    if (any) only_any(out);
    else if (given || nics) ucx_devices_of_list(str_of(given ? given : nics), out);
    else {
        DIR *d = opendir(DEVICES);
        for (const struct dirent *e; d && (e = readdir(d)) != NULL;)
            if (e->d_name[0] != '.') add_ports(e->d_name, out);
        if (d) closedir(d);
        qsort(out->name, out->n, sizeof out->name[0], by_version);
        if (out->n == 0) only_any(out);
    }
}
