/* This is the only file that sets the process's environment variables for NCCL.
 *
 * NCCL reads each variable only once, on first use, so all are set when the library is opened,
 * before the first unique id is generated. Variables that are already set are left unchanged,
 * because the user chose them.
 *
 * If NCCL is already in the process (torch's copy), it may have been used. Its socket variables are
 * then left unchanged, because it may communicate with other hosts. Before 2.31, the config has no
 * launch order field. Setting the variable at this point may be too late, so a warning is logged.
 *
 * If all ranks are on one host, their sockets only need its loopback interface. NCCL does not use
 * that interface's IPv6 address, and fails if the interface has no other address. With several
 * hosts, NCCL selects the interface unless the user does. If NCCL was opened only to describe it,
 * before the number of hosts was known, the loopback setting is removed later, because loopback
 * cannot connect hosts.
 */
#include "cuda/nccl_env.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/nccl_abi.h"

typedef struct variable {
    const char *name, *value;
} variable;

static const char launch_order[] = "NCCL_LAUNCH_ORDER_IMPLICIT";
static const char sharing[] = "NCCL_MULTI_RANK_GPU_ENABLE";
static const char interface[] = "NCCL_SOCKET_IFNAME", loopback[] = "=lo";

static const variable always[] = {
    {launch_order, "1"},          /* nccl_channel.c */
    {"NCCL_GRAPH_REGISTER", "0"}, /* ranks would synchronise in a capture: step_graph.c */
    {"NCCL_SYM_CE_THRESHOLD", "9223372036854775807"}, /* bytes: never by copy engines */
};

static bool is_set(const char *name)
{
    return getenv(name) != NULL;
}

static fsdpc_status set(const char *name, const char *value)
{
    if (!is_set(name) && setenv(name, value, 0) != 0)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to set %s", name);
    return FSDPC_OK;
}

/* Returns whether the loopback interface is up and has the IPv4 address that NCCL needs. */
static bool has_loopback(void)
{
    struct ifaddrs *all = NULL;
    bool found = false;
    if (getifaddrs(&all) != 0)
        return false;
    for (const struct ifaddrs *it = all; it; it = it->ifa_next)
        found = found || (it->ifa_addr && it->ifa_addr->sa_family == AF_INET &&
                          (it->ifa_flags & IFF_RUNNING) && strcmp(it->ifa_name, "lo") == 0);
    freeifaddrs(all);
    return found;
}

static fsdpc_status stay_on_host(void)
{
    if (is_set(interface) || is_set("NCCL_SOCKET_FAMILY") || !has_loopback())
        return FSDPC_OK;
    return set(interface, loopback);
}

static void reach_hosts(void)
{
    const char *value = getenv(interface);
    if (value && strcmp(value, loopback) == 0)
        unsetenv(interface);
}

fsdpc_status fsdpc_nccl_environment(int version, bool was_here, bool several_hosts,
                                    const fsdpc_log *log)
{
    bool late = was_here && !is_set(launch_order) && version < FSDPC_NCCL_LAUNCH_ORDER_FIELD;
    if (late && !log)
        return FSDPC_OK;
    if (late)
        FSDPC_WARN(log,
                   "this process had NCCL %d.%d.%d before fsdpc did; if it has used it, set %s=1 "
                   "in its environment before it starts, or operations of fsdpc and of others may "
                   "wait for each other for ever",
                   version / 10000, version / 100 % 100, version % 100, launch_order);
    for (size_t i = 0; i < sizeof always / sizeof always[0]; i++)
        FSDPC_TRY(set(always[i].name, always[i].value));
    if (several_hosts)
        reach_hosts();
    if (was_here)
        return FSDPC_OK;
    FSDPC_TRY(set("NCCL_RAS_ENABLE", "0")); /* a thread that listens for a monitor */
    return several_hosts ? FSDPC_OK : stay_on_host();
}

fsdpc_status fsdpc_nccl_allow_sharing(void)
{
    return set(sharing, "1");
}
