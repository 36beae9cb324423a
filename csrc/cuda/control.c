/* Tasks that the NCCL communicator delegates to its control.
 *
 * A parameter buffer uses the epochs of a parameter buffer in the control, so the shared-memory
 * protocol and its proofs apply. This file does not use streams.
 */
#include "cuda/control.h"

#include <string.h>

fsdpc_status fsdpc_control_check(const fsdpc_control_config *config)
{
    const fsdpc_comm *control = config->control;
    const fsdpc_device *device = config->comm.device;
    if (!control)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "NCCL needs a communicator of the same ranks to begin over: shm on one "
                          "host, hosts on several, self for one rank");
    if (control->rank != config->comm.rank || control->size != config->comm.size)
        return fsdpc_fail(FSDPC_ERR_VALUE,
                          "rank %d of %d was to begin over a communicator in which it is rank %d "
                          "of %d",
                          config->comm.rank, config->comm.size, control->rank, control->size);
    if (!device || strcmp(device->ops->name, "cuda") != 0)
        return fsdpc_fail(FSDPC_ERR_VALUE, "NCCL needs a GPU, not the device '%s'",
                          device ? device->ops->name : "none");
    return FSDPC_OK;
}

fsdpc_status fsdpc_control_settle(fsdpc_comm *comm, fsdpc_status status)
{
    const fsdpc_comm *control = comm->control;
    if (status >= 0 || !control->poison[0] || comm->poison[0])
        return status;
    if (status == FSDPC_ERR_POISONED) /* the reason, not just the fact */
        fsdpc_fail(status, "%s", control->poison);
    return fsdpc_comm_poison(comm, status);
}

fsdpc_status fsdpc_control_split(fsdpc_comm *comm, int color, int key,
                                 fsdpc_control_config *config_out)
{
    fsdpc_comm *part = NULL;
    FSDPC_TRY(fsdpc_comm_health(comm));
    FSDPC_TRY(fsdpc_control_settle(comm, fsdpc_comm_split(comm->control, color, key, &part)));
    *config_out = (fsdpc_control_config){.control = part};
    if (part)
        config_out->comm = fsdpc_comm_config_like(comm, part->rank, part->size);
    return FSDPC_OK;
}

/* ---- Memory ---- */

fsdpc_status fsdpc_control_sizes(fsdpc_comm *comm, const char *what, size_t bytes)
{
    FSDPC_TRY(fsdpc_comm_health(comm));
    fsdpc_status status = fsdpc_comm_run(comm->control, &(fsdpc_coll){.kind = FSDPC_COLL_BARRIER,
                                                                      .unit = -1,
                                                                      .what = what,
                                                                      .dtype = FSDPC_U8,
                                                                      .numel = bytes});
    return fsdpc_control_settle(comm, status);
}

fsdpc_status fsdpc_control_memory(fsdpc_comm *comm, const char *what, fsdpc_mem_kind kind,
                                  size_t bytes, void **out)
{
    void *data = NULL;
    FSDPC_TRY(fsdpc_control_sizes(comm, what, bytes));
    fsdpc_status status = fsdpc_device_alloc_zeroed(comm->device, kind, bytes, &data);
    status = fsdpc_control_settle(comm, fsdpc_comm_agree(comm->control, status, what));
    if (status != FSDPC_OK)
        fsdpc_device_free(comm->device, data);
    else
        *out = data;
    return status;
}

/* ---- Epochs ---- */

static fsdpc_param_buffer *control_param_buffer(fsdpc_param_buffer *base)
{
    fsdpc_param_buffer *control = ((fsdpc_controlled_param_buffer *)base)->control;
    control->kind_text = base->kind_text;
    return control;
}

fsdpc_status fsdpc_controlled_arrive(fsdpc_param_buffer *base, const fsdpc_epoch_note *mine)
{
    FSDPC_TRY(fsdpc_comm_health(base->comm));
    fsdpc_param_buffer *control = control_param_buffer(base);
    FSDPC_TRY(fsdpc_control_settle(base->comm, fsdpc_param_buffer_arrive(control, mine)));
    base->epoch = control->epoch;
    return FSDPC_OK;
}

fsdpc_status fsdpc_controlled_test(fsdpc_param_buffer *base, fsdpc_epoch_note *all_out)
{
    fsdpc_param_buffer *control = control_param_buffer(base);
    FSDPC_TRY(fsdpc_comm_health(base->comm));
    return fsdpc_control_settle(base->comm, control->comm->ops->epoch_test(control, all_out));
}

fsdpc_status fsdpc_controlled_copied_in(fsdpc_param_buffer *base)
{
    FSDPC_TRY(fsdpc_comm_health(base->comm));
    return fsdpc_control_settle(base->comm,
                                fsdpc_param_buffer_copied_in(control_param_buffer(base)));
}

fsdpc_status fsdpc_controlled_copy_in_test(fsdpc_param_buffer *base)
{
    FSDPC_TRY(fsdpc_comm_health(base->comm));
    fsdpc_param_buffer *control = control_param_buffer(base);
    return fsdpc_control_settle(base->comm, control->comm->ops->epoch_copy_in_test(control));
}
