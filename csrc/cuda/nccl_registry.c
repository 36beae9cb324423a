/* Memory registered with NCCL: the kind of registration that NCCL supports, and the list of
 * registrations.
 *
 * The list belongs to the gather channel and ends with it. nccl_register.c adds to it.
 */
#include <stdlib.h>

#include "cuda/nccl_internal.h"

/* An old NCCL may lack either of these calls. */
fsdpc_status fsdpc_nccl_learn(fsdpc_comm_nccl *self)
{
    const fsdpc_nccl *nccl = &self->world->nccl;
    bool tries = !self->fails_to_register;
    bool windows = tries && nccl->ncclCommWindowRegister && nccl->ncclCommWindowDeregister;
    bool buffers = tries && nccl->ncclCommRegister && nccl->ncclCommDeregister;
    int64_t all[2] = {windows, buffers};
    FSDPC_TRY(fsdpc_comm_run(self->base.control, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                                               .unit = -1,
                                                               .what = "what gathers can do",
                                                               .dtype = FSDPC_I64,
                                                               .op = FSDPC_RED_MIN,
                                                               .send = all,
                                                               .recv = all,
                                                               .numel = 2}));
    self->registers = all[0]   ? FSDPC_NCCL_WINDOWS
                      : all[1] ? FSDPC_NCCL_BUFFERS
                               : FSDPC_NCCL_NOTHING;
    return FSDPC_OK;
}

fsdpc_nccl_registered *fsdpc_nccl_registered_find(const fsdpc_comm_nccl *self, const void *memory)
{
    const unsigned char *at = memory;
    fsdpc_nccl_registered *it = self->registered;
    while (it && (at < it->memory || (size_t)(at - it->memory) >= it->bytes))
        it = it->next;
    return it;
}

void fsdpc_nccl_registered_drop(fsdpc_comm_nccl *self, fsdpc_nccl_registered *known, bool tell)
{
    const fsdpc_nccl *nccl = &self->world->nccl;
    fsdpc_nccl_comm channel = self->channels[FSDPC_NCCL_GATHERS];
    fsdpc_nccl_registered **at = &self->registered;
    while (*at != known)
        at = &(*at)->next;
    *at = known->next;
    if (tell && known->window)
        (void)nccl->ncclCommWindowDeregister(channel, known->window);
    else if (tell)
        (void)nccl->ncclCommDeregister(channel, known->handle);
    free(known);
}

void fsdpc_nccl_forget(fsdpc_comm_nccl *self)
{
    while (self->registered)
        fsdpc_nccl_registered_drop(self, self->registered, false);
}
