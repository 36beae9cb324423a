/* Registers memory with NCCL before gathers write to it.
 *
 * NCCL can gather into any memory, through its own buffers. If all ranks have registered a
 * symmetric window together, peers write to it directly. Slots, and unsharded parameters that
 * occupy a whole device window, are therefore each registered once with the gather communicator, by
 * the address of their first mapping. NCCL registers the memory behind one driver handle, which it
 * can find only by the first mapping. Reduce buffers are in the device's pooled memory, for which
 * NCCL cannot create a window, and are not registered.
 *
 * If NCCL cannot create a window, because GPUs cannot access each other, each rank registers the
 * memory separately. An old NCCL, or a GPU without windows, works without registration.
 *
 * Registration continues in the background, as an init does. A failure does not end the run, but it
 * also breaks NCCL's communicator, and a peer may wait in the same call for ever. Ranks therefore
 * agree on the call and on its completion, and wait for each for a bounded time. After a failure,
 * they create a new communicator, with nothing registered.
 *
 * A gather into registered memory is in place: this rank's slices are first copied to their places
 * among the unsharded parameters, so both source and destination are registered.
 */
#include <stdlib.h>

#include "cuda/nccl_internal.h"

enum { PATIENCE_S = 30 };

/* ---- Registering with NCCL ---- */

static fsdpc_status poll_done(void *arg)
{
    fsdpc_comm_nccl *self = arg;
    FSDPC_TRY(fsdpc_nccl_carry_on(self));
    FSDPC_TRY(fsdpc_comm_health(&self->base));
    return self->in_flight ? FSDPC_IN_PROGRESS : FSDPC_OK;
}

typedef struct registering {
    fsdpc_comm_nccl *self;
    int64_t until;
} registering;

static fsdpc_status poll_registered(void *arg)
{
    const registering *r = arg;
    fsdpc_status status =
        fsdpc_nccl_channel_state(r->self, FSDPC_NCCL_GATHERS, "register memory of all ranks");
    if (status == FSDPC_IN_PROGRESS && fsdpc_clock_ns() > r->until)
        return fsdpc_fail(FSDPC_ERR_TIMEOUT, "NCCL did not register memory of all ranks in time");
    return status;
}

/* Returns at most half of the deadline, because the agreement that follows may take a whole
 * deadline. */
static int64_t patience_ns(const fsdpc_comm *comm)
{
    double s = comm->timeout_s / 2;
    return (int64_t)((s < PATIENCE_S ? s : PATIENCE_S) * 1e9);
}

static fsdpc_status accepted(const fsdpc_nccl *nccl, fsdpc_nccl_result result)
{
    return fsdpc_nccl_is_accepted(result) ? FSDPC_OK
                                          : fsdpc_nccl_check(nccl, result, "register memory");
}

/* Collective. Ranks agree on whether NCCL still works. */
static fsdpc_status make_window(fsdpc_comm_nccl *self, fsdpc_nccl_registered *made)
{
    static const char what[] = "registering memory";
    const fsdpc_nccl *nccl = &self->world->nccl;
    fsdpc_status status = FSDPC_OK;
    if (!made)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to note what NCCL is told");
    else
        status = accepted(nccl, nccl->ncclCommWindowRegister(
                                    self->channels[FSDPC_NCCL_GATHERS], made->memory, made->bytes,
                                    &made->window, FSDPC_NCCL_WIN_COLL_SYMMETRIC));
    FSDPC_TRY(
        fsdpc_control_settle(&self->base, fsdpc_comm_agree(self->base.control, status, what)));
    registering r = {self, fsdpc_clock_ns() + patience_ns(&self->base)};
    status = fsdpc_comm_wait_for(&self->base, poll_registered, &r, what, NULL);
    return fsdpc_control_settle(&self->base, fsdpc_comm_agree(self->base.control, status, what));
}

static void make_buffer(const fsdpc_comm_nccl *self, fsdpc_nccl_registered *made)
{
    const fsdpc_nccl *nccl = &self->world->nccl;
    if (!nccl->ncclCommRegister || !nccl->ncclCommDeregister ||
        nccl->ncclCommRegister(self->channels[FSDPC_NCCL_GATHERS], made->memory, made->bytes,
                               &made->handle) != FSDPC_NCCL_SUCCESS)
        made->handle = NULL;
}

static void keep(fsdpc_comm_nccl *self, fsdpc_nccl_registered *made)
{
    made->next = self->registered;
    self->registered = made;
}

/* An unfinished call may still write to `made`, so it is kept until the channels are closed. */
static fsdpc_status go_on_without(fsdpc_comm_nccl *self, fsdpc_nccl_registered *made)
{
    fsdpc_status status = fsdpc_comm_health(&self->base);
    if (status == FSDPC_OK) {
        FSDPC_WARN(&self->base.log, "gathers go into memory that NCCL was not told of: %s",
                   fsdpc_last_error());
        fsdpc_nccl_channel_abort(self, FSDPC_NCCL_GATHERS);
        self->fails_to_register = true;
    }
    if (made) {
        made->bytes = 0; /* the entry contains no memory */
        keep(self, made);
    }
    return status == FSDPC_OK ? fsdpc_nccl_channel_open(self, FSDPC_NCCL_GATHERS) : status;
}

fsdpc_status fsdpc_nccl_param_buffer_attach(fsdpc_param_buffer *param_buffer, void *memory,
                                            size_t bytes)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(param_buffer->comm);
    FSDPC_TRY(fsdpc_comm_health(param_buffer->comm));
    if (self->registers == FSDPC_NCCL_NOTHING)
        return FSDPC_OK;
    FSDPC_TRY(
        fsdpc_comm_wait_for(param_buffer->comm, poll_done, self, "what was posted before", NULL));
    fsdpc_nccl_registered *made = calloc(1, sizeof *made);
    if (made)
        *made = (fsdpc_nccl_registered){.memory = memory, .bytes = bytes};
    fsdpc_status status =
        self->registers == FSDPC_NCCL_WINDOWS ? make_window(self, made) : FSDPC_OK;
    if (status != FSDPC_OK) {
        FSDPC_TRY(go_on_without(self, made));
        return status == FSDPC_ERR_INTERRUPT ? fsdpc_fail(status, "interrupted") : FSDPC_OK;
    }
    if (made && !made->window)
        make_buffer(self, made);
    bool known = made && (made->window || made->handle);
    FSDPC_NOTE(&self->base.log, "NCCL was told of %zu bytes that gathers write: %s", bytes,
               !known         ? "it keeps no note of them"
               : made->window ? "a window of all ranks"
                              : "a buffer of this rank");
    if (known)
        keep(self, made);
    else
        free(made);
    return FSDPC_OK;
}

/* ---- Deregistering ---- */

void fsdpc_nccl_param_buffer_detach(fsdpc_param_buffer *param_buffer, void *memory)
{
    fsdpc_comm_nccl *self = fsdpc_nccl_of(param_buffer->comm);
    bool forked = fsdpc_nccl_is_forked(self);
    if (!forked && fsdpc_nccl_registered_find(self, memory))
        (void)fsdpc_nccl_launched(self); /* if it fails, NCCL itself drops all registrations */
    fsdpc_nccl_registered *known = fsdpc_nccl_registered_find(self, memory);
    if (known)
        fsdpc_nccl_registered_drop(self, known, !forked);
}
