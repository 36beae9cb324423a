/* libfsdpc_mpi_<family>.so: the table that the core receives, and the library's only exported
 * symbol.
 *
 * Before version 5, MPI has no standard ABI: programs and libraries are compatible only within a
 * family. A process may already have loaded the other family's library (through mpi4py or
 * LD_PRELOAD), which would then receive the plugin's calls. When the plugin is opened, it therefore
 * queries the library's name, which MPI allows before MPI_Init, and rejects the other family.
 */
#include <stdio.h>
#include <string.h>

#include "guest/guest.h"
#include "mpi/transport_mpi.h"

#if defined(OPEN_MPI)
#define FAMILY "openmpi"
static const char *const relatives[] = {"Open MPI"};
#else /* MPICH, and libraries with its ABI */
#define FAMILY "mpich"
static const char *const relatives[] = {"MPICH", "MVAPICH", "Intel(R) MPI"};
#endif

static fsdpc_status check_family(void)
{
    char version[128];
    fsdpc_mpi_version(version, sizeof version);
    for (size_t i = 0; i < sizeof relatives / sizeof *relatives; i++)
        if (strstr(version, relatives[i]))
            return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                      "libfsdpc_mpi_" FAMILY ".so was built with %s and this process has '%s': "
                      "start the ranks by the mpiexec of %s, or build fsdpc with the mpicc of the "
                      "other",
                      relatives[0], version, relatives[0]);
}

static void describe(char *text, size_t bytes)
{
    fsdpc_mpi_version(text, bytes);
}

static const fsdpc_plugin plugin = {
    .layout = FSDPC_PLUGIN_LAYOUT,
    .name = "mpi",
    .describe = describe,
    .transport_create = fsdpc_transport_mpi_create,
};

__attribute__((visibility("default"))) const fsdpc_plugin *
fsdpc_plugin_open(const fsdpc_plugin_host *host);

const fsdpc_plugin *fsdpc_plugin_open(const fsdpc_plugin_host *host)
{
    fsdpc_guest_init(host);
    return check_family() == FSDPC_OK ? &plugin : NULL;
}
