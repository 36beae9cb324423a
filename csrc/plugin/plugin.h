/* Plugins: shared libraries that provide devices, a communicator and transports to the core.
 *
 * A plugin (libfsdpc_cuda.so, libfsdpc_mpi_mpich.so) is compiled from the same headers as the core
 * and loaded by path at first use. It exports one symbol, fsdpc_plugin_open. The core passes it
 * the host table and receives the plugin's table, or NULL with the reason in the core's error text.
 * Both tables begin with the ABI number and the sizes of all structs that the core and a plugin
 * exchange. On a mismatch, loading fails with an error that advises building both from one source;
 * it never crashes.
 *
 * A plugin has no error text, log or counters of its own. Its sources call fsdpc_fail and
 * fsdpc_mem_count by name, and guest.c forwards the calls to the host table.
 *
 * A plugin stays loaded until the process ends. Opening it does not touch the hardware;
 * device_count reports a missing driver. The host table outlives the plugin.
 */
#ifndef FSDPC_PLUGIN_PLUGIN_H
#define FSDPC_PLUGIN_PLUGIN_H

#include <string.h>

#include "base/log.h"
#include "comm/comm.h"
#include "comm/transport.h"
#include "device/device.h"
#include "ops/flat_ops.h"
#include "ops/nn_ops.h"

enum { FSDPC_PLUGIN_ABI = 13 };

/* Sizes of the structs that the core and a plugin exchange; new members go at the end. */
typedef struct fsdpc_plugin_layout {
    uint32_t abi;
    uint32_t device_ops, flat_ops, nn_ops, comm_ops, coll, comm_config, transport_ops, transport_op,
        transport;
} fsdpc_plugin_layout;

#define FSDPC_PLUGIN_LAYOUT                                                                        \
    {                                                                                              \
        FSDPC_PLUGIN_ABI, sizeof(fsdpc_device_ops), sizeof(fsdpc_flat_ops), sizeof(fsdpc_nn_ops),  \
            sizeof(fsdpc_comm_ops), sizeof(fsdpc_coll), sizeof(fsdpc_comm_config),                 \
            sizeof(fsdpc_transport_ops), sizeof(fsdpc_transport_op), sizeof(fsdpc_transport)       \
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

/* Options that only the plugin understands, passed through as pairs; the last has a NULL name. */
typedef struct fsdpc_plugin_option {
    const char *name, *value; /* a NULL value is ignored */
} fsdpc_plugin_option;

/* Returns the option's value, or NULL if it is not set. */
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

    /* Describes the build and the libraries found, in one line for show_config(). */
    void (*describe)(char *text, size_t bytes);

    /* The plugin's devices, whose kernels are in device->flat and device->nn. These are NULL if the
     * plugin has no devices. */
    fsdpc_status (*device_count)(int *out); /* on failure, explains why no device can be used */
    fsdpc_status (*device_create)(fsdpc_mem *mem, int ordinal, const fsdpc_plugin_option *options,
                                  fsdpc_device **out);

    /* Opens the library that the plugin's communicator uses and describes it, for example "NCCL
     * 2.28.9 at /usr/lib/...". It tries a copy already loaded in the process, then `path` (may be
     * NULL), then the default locations. NULL if the plugin needs no library. */
    fsdpc_status (*comm_library)(const char *path, char *text, size_t bytes);

    /* Creates a communicator for ranks on the plugin's devices. NULL if the plugin has no
     * communicator. `control` is a communicator of the same ranks over host memory; on success the
     * communicator owns it. Options are borrowed for the call. */
    fsdpc_status (*comm_create)(const fsdpc_comm_config *config, fsdpc_comm *control,
                                const fsdpc_plugin_option *options, fsdpc_comm **out);

    /* Creates a transport to ranks on other hosts. The call is collective; NULL if the plugin has
     * no transports. */
    fsdpc_status (*transport_create)(int rank, int size, fsdpc_transport **out);
} fsdpc_plugin;

typedef const fsdpc_plugin *(*fsdpc_plugin_open_fn)(const fsdpc_plugin_host *host);

/* Loads the plugin at `path`, or finds it if it is already loaded; callable from any thread. */
fsdpc_status fsdpc_plugin_load(const char *path, const fsdpc_plugin **out);

#endif
