/* The NCCL communicator's control: another communicator of the same ranks, over host memory, owned
 * by the NCCL communicator. It uses shared memory on each host, and a transport between hosts.
 *
 * A communicator owns the control that it is built on (comm.h). Small messages use the control:
 * epochs, agreement on posts, and reports of dead and late ranks. If the control is closed, the
 * communicator is closed too, with the same reason.
 */
#ifndef FSDPC_CUDA_CONTROL_H
#define FSDPC_CUDA_CONTROL_H

#include "comm/comm.h"

/* The configuration of a communicator over a control. */
typedef struct fsdpc_control_config {
    fsdpc_comm_config comm;
    fsdpc_comm *control;      /* taken over if create succeeds; NULL: this rank is in no group */
    const char *library_path; /* the preferred NCCL, or NULL; borrowed only by create */
} fsdpc_control_config;

/* Returns the number of hosts that the control's ranks run on. */
static inline int fsdpc_control_hosts(const fsdpc_control_config *config)
{
    return config->control->size / config->control->host_size;
}

/* Checks that `config` has a control of the same ranks and a GPU. */
fsdpc_status fsdpc_control_check(const fsdpc_control_config *config);

/* Handles and returns the `status` of a call on the control; if the call closed the control, closes
 * `comm` too. */
fsdpc_status fsdpc_control_settle(fsdpc_comm *comm, fsdpc_status status);

/* Collective. Splits the control; *config_out is the new group's configuration. Its control is
 * NULL if this rank is in no group. */
fsdpc_status fsdpc_control_split(fsdpc_comm *comm, int color, int key,
                                 fsdpc_control_config *config_out);

/* Collective. Checks that an object created by all ranks has the same size on every rank. */
fsdpc_status fsdpc_control_sizes(fsdpc_comm *comm, const char *what, size_t bytes);

/* Collective. Allocates zeroed GPU memory on all ranks. The sizes must agree, and either every rank
 * gets its memory or none does. */
fsdpc_status fsdpc_control_memory(fsdpc_comm *comm, const char *what, fsdpc_mem_kind kind,
                                  size_t bytes, void **out);

/* A parameter buffer in GPU memory, or without memory if there are several ranks, that uses the
 * epochs of a parameter buffer in the control. */
typedef struct fsdpc_controlled_param_buffer {
    fsdpc_param_buffer base;
    fsdpc_param_buffer *control;
} fsdpc_controlled_param_buffer;

fsdpc_status fsdpc_controlled_arrive(fsdpc_param_buffer *param_buffer,
                                     const fsdpc_epoch_note *mine);
fsdpc_status fsdpc_controlled_test(fsdpc_param_buffer *param_buffer, fsdpc_epoch_note *all_out);
fsdpc_status fsdpc_controlled_copied_in(fsdpc_param_buffer *param_buffer);
fsdpc_status fsdpc_controlled_copy_in_test(fsdpc_param_buffer *param_buffer);

#endif
