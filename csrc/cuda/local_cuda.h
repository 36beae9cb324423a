/* Inside of comm_local_cuda: what its two ways share.
 *
 *     comm_local_cuda.c   life and the choice of a way, post and test, values
 *     local_staged.c      gathers and reductions by way of host memory
 *     local_shared.c      gathers and reductions in memory of the GPU that ranks share
 *
 * A way is a table of its own, which fills in wires and buffers and what is done at the post (out:
 * what this rank gives becomes readable for its peers) and when the control is done (back: the
 * outcome goes where it belongs).
 */
#ifndef FSDPC_CUDA_LOCAL_CUDA_H
#define FSDPC_CUDA_LOCAL_CUDA_H

#include "cuda/control.h"

/* A posted operation; kept and used again. */
typedef struct fsdpc_local_flight {
    struct fsdpc_local_flight *next; /* of all that were made */
    bool taken;
    bool staged;         /* values: both ways through `host` */
    fsdpc_work carried;  /* on the control */
    unsigned char *host; /* staging */
    size_t host_bytes;
} fsdpc_local_flight;

typedef struct fsdpc_local_comm {
    fsdpc_comm base;
    fsdpc_comm *control; /* owned */
    fsdpc_device *host;  /* the control's */
    fsdpc_local_flight *flights;
} fsdpc_local_comm;

typedef struct fsdpc_local_buffer {
    fsdpc_buffer base;
    fsdpc_buffer *control; /* its posts and reads are counted here */
} fsdpc_local_buffer;

extern const fsdpc_comm_ops fsdpc_local_staged_ops, fsdpc_local_shared_ops;

static inline fsdpc_local_comm *fsdpc_local_of(fsdpc_comm *comm)
{
    return (fsdpc_local_comm *)comm;
}

static inline fsdpc_status fsdpc_local_settle(fsdpc_local_comm *self, fsdpc_status status)
{
    return fsdpc_control_settle(&self->base, self->control, status);
}

/* ---- comm_local_cuda.c: slots of both tables ---- */

void fsdpc_local_destroy(fsdpc_comm *comm);
fsdpc_status fsdpc_local_split(fsdpc_comm *comm, int color, int key, fsdpc_comm **out);
void fsdpc_local_abort(fsdpc_comm *comm, const char *reason);
void fsdpc_local_leave(fsdpc_comm *comm);
fsdpc_status fsdpc_local_buffer_idle(fsdpc_buffer *buffer);
fsdpc_status fsdpc_local_idle(fsdpc_comm *comm, int64_t max_ns);
void fsdpc_local_describe(fsdpc_comm *comm, char *text, size_t bytes);
void fsdpc_local_locate(fsdpc_comm *comm, const char *phase, const char *unit);
void fsdpc_local_waits(fsdpc_comm *comm, const char *what);

/* ---- comm_local_cuda.c: parts of a way ---- */

/* The head of a wire, whose epochs are those of a wire of the control of `control_bytes`; it has
 * memory in a world of one alone.  *wire_out is written on success, and finished by wire_close. */
fsdpc_status fsdpc_local_wire_open(fsdpc_comm *comm, size_t bytes, size_t control_bytes,
                                   fsdpc_controlled_wire *wire_out);
void fsdpc_local_wire_close(fsdpc_controlled_wire *wire);

/* A gather or reduction of this way: `op` may be made what the control is to do (out), or is what
 * was posted (back). */
typedef fsdpc_status (*fsdpc_local_move_fn)(fsdpc_local_comm *self, fsdpc_local_flight *it,
                                            fsdpc_coll *op);
fsdpc_status fsdpc_local_post(fsdpc_work *work, fsdpc_local_move_fn out);
fsdpc_status fsdpc_local_test(fsdpc_work *work, fsdpc_local_move_fn back);

/* Copies on the main stream, and the wait for all of them. */
fsdpc_status fsdpc_local_copy(fsdpc_local_comm *self, void *to, const void *from, size_t bytes);
fsdpc_status fsdpc_local_copied(fsdpc_local_comm *self);
/* Room in the flight's staging. */
fsdpc_status fsdpc_local_room(fsdpc_local_comm *self, fsdpc_local_flight *it, size_t bytes);

#endif
