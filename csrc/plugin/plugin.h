/* Plugins: how a shared library hands over devices, a transport and links, and what it gets.
 *
 * A plugin (libfsdpc_cuda.so, libfsdpc_mpi_mpich.so) is compiled from the same headers as the core
 * and loaded by path at first use.  It exports one symbol, fsdpc_plugin_open.  The core calls it
 * with its host table, and gets the plugin's table, or NULL with the reason in the core's error
 * text.  Both tables begin with the ABI number and the sizes of the structs that cross the border.
 * A difference is never a crash, but an error that says to build both from one source.
 *
 * A plugin has no error text, log or counters.  Its sources call fsdpc_fail and fsdpc_mem_count by
 * those names, and its guest file passes the calls on to the host table.
 *
 * Rules: a plugin stays loaded until the process ends.  Opening it asks nothing of the machine; a
 * missing driver is device_count's to explain.  The host table outlives the plugin.
 */
#ifndef FSDPC_PLUGIN_PLUGIN_H
#define FSDPC_PLUGIN_PLUGIN_H

#include <string.h>

#include "base/log.h"
#include "comm/comm.h"
#include "comm/link.h"
#include "device/device.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

enum { FSDPC_PLUGIN_ABI = 12 };

/* Sizes of what crosses the border; grows at the end only. */
typedef struct fsdpc_plugin_layout {
    uint32_t abi;
    uint32_t device_ops, flat_ops, nn_ops, comm_ops, coll, comm_config, link_ops, link_op, link;
} fsdpc_plugin_layout;

#define FSDPC_PLUGIN_LAYOUT                                                                        \
    {                                                                                              \
        FSDPC_PLUGIN_ABI, sizeof(fsdpc_device_ops), sizeof(fsdpc_flat_ops), sizeof(fsdpc_nn_ops),  \
            sizeof(fsdpc_comm_ops), sizeof(fsdpc_coll), sizeof(fsdpc_comm_config),                 \
            sizeof(fsdpc_link_ops), sizeof(fsdpc_link_op), sizeof(fsdpc_link)                      \
    }

typedef struct fsdpc_plugin_host {
    fsdpc_plugin_layout layout;
    fsdpc_status (*fail)(fsdpc_status code, const char *message); /* returns code */
    const char *(*last_error)(void);
    void (*log)(const fsdpc_log *log, fsdpc_log_level level, const char *line);
    fsdpc_status (*mem_alloc)(fsdpc_mem *mem, fsdpc_mem_kind kind, size_t bytes, void **out);
    void (*mem_free)(fsdpc_mem *mem, void *pointer);
    void (*mem_count)(fsdpc_mem *mem, fsdpc_mem_kind kind, int64_t bytes);
    void (*mem_count_system_alloc)(fsdpc_mem *mem);
} fsdpc_plugin_host;

/* What only the plugin understands, handed through: pairs that end with a NULL name. */
typedef struct fsdpc_plugin_option {
    const char *name, *value; /* a NULL value says nothing */
} fsdpc_plugin_option;

/* The option's value; NULL: there is none. */
static inline const char *fsdpc_plugin_option_get(const fsdpc_plugin_option *options,
                                                  const char *name)
{
    while (options->name && strcmp(options->name, name) != 0)
        options++;
    return options->value;
}

typedef struct fsdpc_plugin {
    fsdpc_plugin_layout layout;
    const char *name; /* "cuda", "mpi" */

    /* What it was built with and what it found, one line for show_config(). */
    void (*describe)(char *text, size_t bytes);

    /* Devices, with their kernels in device->flat and device->nn.  Optional: has none. */
    fsdpc_status (*device_count)(int *out); /* fails with the reason why there can be none */
    fsdpc_status (*device_create)(fsdpc_mem *mem, int ordinal, const fsdpc_plugin_option *options,
                                  fsdpc_device **out);
    fsdpc_status (*device_select)(
        const fsdpc_device *device); /* once in every thread that uses it */

    /* Opens the library that its transport stands on and names it, "NCCL 2.28.9 at /usr/lib/...".
     * `path`, which may be NULL, comes after a copy that the process has and before the usual
     * places.  Optional: needs none. */
    fsdpc_status (*comm_library)(const char *path, char *text, size_t bytes);

    /* A communicator of ranks on its devices.  Optional: has no transport.  `control` is a
     * communicator of the same ranks over host memory; success takes it over.  Options are borrowed
     * by the call. */
    fsdpc_status (*comm_create)(const fsdpc_comm_config *config, fsdpc_comm *control,
                                const fsdpc_plugin_option *options, fsdpc_comm **out);

    /* Links to ranks of other hosts.  Collective; optional: has none. */
    fsdpc_status (*link_create)(int rank, int size, fsdpc_link **out);
} fsdpc_plugin;

typedef const fsdpc_plugin *(*fsdpc_plugin_open_fn)(const fsdpc_plugin_host *host);

/* Loads the plugin at `path`, or finds it loaded; any thread. */
fsdpc_status fsdpc_plugin_load(const char *path, const fsdpc_plugin **out);

#endif
