/* The control of NCCL's communicator: another communicator of the same ranks, over host memory,
 * which it takes over.  It is shared memory on one host, and a link beside it on several.
 *
 * A communicator that stands on a control owns it (comm.h).
 * Words and notes go over the control: epochs, agreement on what is posted, who died and who is
 * late.  What closes the control closes the communicator, with the same reason.
 */
#ifndef FSDPC_CUDA_CONTROL_H
#define FSDPC_CUDA_CONTROL_H

#include "comm/comm.h"

/* The first member of a communicator over a control. */
typedef struct fsdpc_control_config {
    fsdpc_comm_config comm;
    fsdpc_comm *control;      /* taken over when create succeeds; NULL: this rank is in none */
    const char *library_path; /* the NCCL to prefer, or NULL; borrowed by create alone */
} fsdpc_control_config;

/* How many hosts its ranks are on. */
static inline int fsdpc_control_hosts(const fsdpc_control_config *config)
{
    return config->control->size / config->control->host_size;
}

/* Whether `config` can begin one: a control of the same ranks, and a GPU. */
fsdpc_status fsdpc_control_check(const fsdpc_control_config *config);

/* `status` of a call on the control; what closed that closes `comm` too. */
fsdpc_status fsdpc_control_settle(fsdpc_comm *comm, fsdpc_status status);

/* Collective.  Splits the control; *config_out is what the part begins with, its control NULL where
 * this rank is in none. */
fsdpc_status fsdpc_control_split(fsdpc_comm *comm, int color, int key,
                                 fsdpc_control_config *config_out);

/* Collective.  What all make alike, of as many bytes on each rank. */
fsdpc_status fsdpc_control_sizes(fsdpc_comm *comm, const char *what, size_t bytes);

/* Collective.  Memory of the GPU, zeroed, that all make alike: the sizes agree, and all have it or
 * none. */
fsdpc_status fsdpc_control_memory(fsdpc_comm *comm, const char *what, fsdpc_mem_kind kind,
                                  size_t bytes, void **out);

/* A wire in the GPU's memory, or in none (of several ranks), whose epochs are those of a wire of
 * the control. */
typedef struct fsdpc_controlled_wire {
    fsdpc_wire base;
    fsdpc_wire *control;
} fsdpc_controlled_wire;

fsdpc_status fsdpc_controlled_arrive(fsdpc_wire *wire, const fsdpc_epoch_note *mine);
fsdpc_status fsdpc_controlled_test(fsdpc_wire *wire, fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_controlled_publish(fsdpc_wire *wire);
fsdpc_status fsdpc_controlled_published(fsdpc_wire *wire);

#endif
