/* Inside of comm_local_cuda: two files share these.
 *
 *     comm_local_cuda.c   life, post and test, values
 *     local_staged.c      wires and buffers, gathers and reductions
 */
#ifndef FSDPC_CUDA_LOCAL_CUDA_H
#define FSDPC_CUDA_LOCAL_CUDA_H

#include "cuda/control.h"

/* A posted operation; kept and used again. */
typedef struct fsdpc_local_op {
    struct fsdpc_local_op *next; /* of all that were made */
    bool taken;
    bool staged;         /* values: both ways through `host` */
    fsdpc_work carried;  /* on the control */
    unsigned char *host; /* staging */
    size_t host_bytes;
    fsdpc_coll_sum sums[FSDPC_COLL_MAX_SUMS]; /* a reduction: those of the control */
} fsdpc_local_op;

typedef struct fsdpc_local_comm {
    fsdpc_comm base;
    fsdpc_device *host; /* the control's */
    fsdpc_local_op *made;
} fsdpc_local_comm;

typedef struct fsdpc_local_buffer {
    fsdpc_buffer base;
    fsdpc_buffer *control; /* its posts and reads are counted here */
} fsdpc_local_buffer;

static inline fsdpc_local_comm *fsdpc_local_of(fsdpc_comm *comm)
{
    return (fsdpc_local_comm *)comm;
}

/* ---- local_staged.c ---- */

fsdpc_status fsdpc_local_wire_create(fsdpc_comm *comm, size_t bytes, fsdpc_wire **out);
void fsdpc_local_wire_destroy(fsdpc_wire *wire);
fsdpc_status fsdpc_local_publish(fsdpc_wire *wire);
fsdpc_status fsdpc_local_buffer_create(fsdpc_comm *comm, size_t bytes, fsdpc_buffer **out);
void fsdpc_local_buffer_destroy(fsdpc_buffer *buffer);
fsdpc_status fsdpc_local_buffer_idle(fsdpc_buffer *buffer);

/* A gather or reduction: out, at the post, makes `op` what the control is to do; back, when that is
 * done, takes what was posted. */
fsdpc_status fsdpc_local_out(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op);
fsdpc_status fsdpc_local_back(fsdpc_local_comm *self, fsdpc_local_op *it, fsdpc_coll *op);

/* ---- comm_local_cuda.c ---- */

/* Copies on the main stream, and the wait for all of them. */
fsdpc_status fsdpc_local_copy(fsdpc_local_comm *self, void *to, const void *from, size_t bytes);
fsdpc_status fsdpc_local_copied(fsdpc_local_comm *self);
/* Room in the operation's staging. */
fsdpc_status fsdpc_local_room(fsdpc_local_comm *self, fsdpc_local_op *it, size_t bytes);

#endif
