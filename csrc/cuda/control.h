/* The control of the NCCL communicator: another communicator of the same ranks, over host memory,
 * which it takes over.  It uses shared memory on one host, plus a link between several.
 *
 * A communicator over a control owns it (comm.h).  Words and notes use the control: epochs,
 * agreement on posts, news of dead and late ranks.  If the control is closed, so is the
 * communicator, with the same reason.
 */
#ifndef FSDPC_CUDA_CONTROL_H
#define FSDPC_CUDA_CONTROL_H

#include "comm/comm.h"

/* The first member of a communicator over a control. */
typedef struct fsdpc_control_config {
    fsdpc_comm_config comm;
    fsdpc_comm *control;      /* taken over if create succeeds; NULL: this rank is in no group */
    const char *library_path; /* the preferred NCCL, or NULL; borrowed only by create */
} fsdpc_control_config;

/* The number of hosts that its ranks are on. */
static inline int fsdpc_control_hosts(const fsdpc_control_config *config)
{
    return config->control->size / config->control->host_size;
}

/* Whether `config` is complete: a control of the same ranks, and a GPU. */
fsdpc_status fsdpc_control_check(const fsdpc_control_config *config);

/* Takes the `status` of a call on the control; if the call closed the control, closes `comm`
 * too. */
fsdpc_status fsdpc_control_settle(fsdpc_comm *comm, fsdpc_status status);

/* Collective.  Splits the control; *config_out is the configuration for the part.  Its control is
 * NULL if this rank is in no part. */
fsdpc_status fsdpc_control_split(fsdpc_comm *comm, int color, int key,
                                 fsdpc_control_config *config_out);

/* Collective.  Checks that an object made by all ranks has the same size on each. */
fsdpc_status fsdpc_control_sizes(fsdpc_comm *comm, const char *what, size_t bytes);

/* Collective.  Zeroed GPU memory that all ranks allocate together: the sizes agree, and either all
 * ranks get it or none. */
fsdpc_status fsdpc_control_memory(fsdpc_comm *comm, const char *what, fsdpc_mem_kind kind,
                                  size_t bytes, void **out);

/* A wire in the GPU's memory (without memory if there are several ranks), whose epochs are those of
 * a wire of the control. */
typedef struct fsdpc_controlled_wire {
    fsdpc_wire base;
    fsdpc_wire *control;
} fsdpc_controlled_wire;

fsdpc_status fsdpc_controlled_arrive(fsdpc_wire *wire, const fsdpc_epoch_note *mine);
fsdpc_status fsdpc_controlled_test(fsdpc_wire *wire, fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_controlled_publish(fsdpc_wire *wire);
fsdpc_status fsdpc_controlled_published(fsdpc_wire *wire);

#endif
