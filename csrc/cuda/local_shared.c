/* Ranks that share memory of one GPU: nothing of a gather or reduction passes through the host.
 *
 * Own slices and reduce buffers lie in memory that all ranks map (shared_memory.h).
 *
 *     publish      what writes the own slices is waited for, then the control publishes
 *     gather       agreed on over the control; then each copies its peers' slices into its full
 *     reduction    what fills the buffer is waited for, then the control's reduction is posted,
 * over the same memory and on the GPU's main stream: when all have posted, each sums its slices of
 * all buffers there, by the kernel that is the CPU's twin, in the same order of ranks
 *
 * Who may write when is the protocol of shared memory, unchanged.  Peers' slices change only after
 * an arrival of all, and a rank arrives when its gathers are done, copies and all.  A buffer is
 * filled again when the control says that all have read it, and the control says so of a rank when
 * its sums are (comm/shm_coll.c).  Every step that another process sees is waited for on the host:
 * right, and slow.
 */
#include <stdlib.h>

#include "comm/coll_math.h"
#include "cuda/local_cuda.h"
#include "cuda/shared_memory.h"

typedef struct shared_wire {
    fsdpc_controlled_wire of; /* first */
    fsdpc_cuda_shared *own;   /* NULL: none yet */
    size_t own_bytes;
} shared_wire;

typedef struct shared_buffer {
    fsdpc_local_buffer of; /* first */
    fsdpc_cuda_shared *memory;
} shared_buffer;

/* ---- Wires ---- */

static fsdpc_status shared_wire_create(fsdpc_comm *comm, size_t bytes, fsdpc_wire **out)
{
    shared_wire *wire = calloc(1, sizeof *wire);
    if (!wire)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a wire");
    fsdpc_status status = fsdpc_local_wire_open(comm, bytes, 0, &wire->of);
    if (status != FSDPC_OK)
        free(wire);
    else
        *out = &wire->of.base;
    return status;
}

static void shared_wire_destroy(fsdpc_wire *base)
{
    shared_wire *wire = (shared_wire *)base;
    fsdpc_local_wire_close(&wire->of);
    fsdpc_cuda_shared_destroy(wire->own);
    free(wire);
}

static fsdpc_status shared_wire_own(fsdpc_wire *base, size_t bytes, unsigned char **out)
{
    shared_wire *wire = (shared_wire *)base;
    fsdpc_local_comm *self = fsdpc_local_of(base->comm);
    FSDPC_TRY(fsdpc_comm_health(base->comm));
    FSDPC_TRY(fsdpc_local_settle(
        self,
        fsdpc_cuda_shared_create(fsdpc_control_of(base->comm, self->control), base->comm->device,
                                 FSDPC_MEM_WIRE, bytes, "own slices", &wire->own)));
    wire->own_bytes = bytes;
    *out = base->own = fsdpc_cuda_shared_own(wire->own);
    return FSDPC_OK;
}

static fsdpc_status shared_epoch_publish(fsdpc_wire *base)
{
    FSDPC_TRY(fsdpc_local_copied(fsdpc_local_of(base->comm)));
    return fsdpc_controlled_publish(base);
}

/* ---- Buffers ---- */

static fsdpc_status shared_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out)
{
    fsdpc_local_comm *self = fsdpc_local_of(comm);
    shared_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a buffer");
    fsdpc_status status;
    FSDPC_TRY_GOTO(status, fsdpc_control_sizes(comm, self->control, "buffer_create", bytes),
                   free_buffer);
    FSDPC_TRY_GOTO(status,
                   fsdpc_local_settle(
                       self, fsdpc_cuda_shared_create(self->control, comm->device, FSDPC_MEM_REDUCE,
                                                      bytes, "buffer_create", &buffer->memory)),
                   free_buffer);
    FSDPC_TRY_GOTO(
        status,
        fsdpc_local_settle(self, self->control->ops->buffer_over(
                                     self->control, bytes, fsdpc_cuda_shared_parts(buffer->memory),
                                     &buffer->of.control)),
        destroy_memory);
    buffer->of.base =
        (fsdpc_buffer){.comm = comm, .bytes = bytes, .data = fsdpc_cuda_shared_own(buffer->memory)};
    *out = &buffer->of.base;
    return FSDPC_OK;

destroy_memory:
    fsdpc_cuda_shared_destroy(buffer->memory);
free_buffer:
    free(buffer);
    return status;
}

static void shared_buffer_destroy(fsdpc_buffer *base)
{
    shared_buffer *buffer = (shared_buffer *)base;
    fsdpc_buffer_destroy(buffer->of.control);
    fsdpc_cuda_shared_destroy(buffer->memory);
    free(buffer);
}

/* ---- Gathers and reductions ---- */

static fsdpc_status gather_check(const fsdpc_coll *op)
{
    const shared_wire *wire = (const shared_wire *)op->wire;
    const unsigned char *own = op->wire->own, *send = op->send;
    if (own && send >= own && (size_t)(send - own) <= wire->own_bytes)
        return FSDPC_OK;
    return fsdpc_fail(FSDPC_ERR_INTERNAL,
                      "gather of '%s' sends from elsewhere than the wire's own memory",
                      op->what ? op->what : "");
}

static fsdpc_status out(fsdpc_local_comm *self, fsdpc_local_flight *it, fsdpc_coll *op)
{
    (void)it;
    if (op->kind == FSDPC_COLL_GATHER) {
        op->agree_only = true;
        return gather_check(op);
    }
    op->buffer = ((fsdpc_local_buffer *)op->buffer)->control;
    op->stream = fsdpc_device_main(self->base.device);
    return fsdpc_local_copied(self); /* what fills it runs there too */
}

/* All ranks' own slices lie at the same offset. */
static fsdpc_status gather_back(fsdpc_local_comm *self, const fsdpc_coll *op)
{
    const shared_wire *wire = (const shared_wire *)op->wire;
    const unsigned char *const *parts = fsdpc_cuda_shared_parts(wire->own);
    size_t element = fsdpc_dtype_bytes(op->dtype), first;
    size_t at = (size_t)((const unsigned char *)op->send - op->wire->own);
    for (int p = 0; p < self->base.size; p++)
        for (size_t i = 0; i < op->n_slices; i++) {
            const fsdpc_slice *slice = &op->slices[i];
            size_t numel = fsdpc_coll_part(op, slice, p, &first);
            FSDPC_TRY(fsdpc_local_copy(self, (unsigned char *)op->recv + first * element,
                                       parts[p] + at + slice->shard_offset * element,
                                       numel * element));
        }
    return FSDPC_OK;
}

/* Sums are in the shard already, but for a world of one, whose control does not wait for them. */
static fsdpc_status back(fsdpc_local_comm *self, fsdpc_local_flight *it, fsdpc_coll *op)
{
    (void)it;
    if (op->kind == FSDPC_COLL_GATHER)
        FSDPC_TRY(gather_back(self, op));
    return fsdpc_local_copied(self);
}

static fsdpc_status shared_post(fsdpc_work *work)
{
    return fsdpc_local_post(work, out);
}

static fsdpc_status shared_test(fsdpc_work *work)
{
    return fsdpc_local_test(work, back);
}

const fsdpc_comm_ops fsdpc_local_shared_ops = {
    .name = "local_cuda",
    .destroy = fsdpc_local_destroy,
    .split = fsdpc_local_split,
    .abort = fsdpc_local_abort,
    .leave = fsdpc_local_leave,
    .wire_create = shared_wire_create,
    .wire_destroy = shared_wire_destroy,
    .wire_own = shared_wire_own,
    .epoch_arrive = fsdpc_controlled_arrive,
    .epoch_test = fsdpc_controlled_test,
    .epoch_publish = shared_epoch_publish,
    .epoch_published = fsdpc_controlled_published,
    .buffer_create = shared_buffer_create,
    .buffer_destroy = shared_buffer_destroy,
    .buffer_idle = fsdpc_local_buffer_idle,
    .post = shared_post,
    .test = shared_test,
    .idle = fsdpc_local_idle,
    .describe = fsdpc_local_describe,
    .locate = fsdpc_local_locate,
    .waits = fsdpc_local_waits,
};
