/* What the parts of the fake NCCL share; fake_nccl.c says which they are. */
#ifndef FSDPC_TESTS_EMU_FAKE_INSIDE_H
#define FSDPC_TESTS_EMU_FAKE_INSIDE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "cuda/nccl_abi.h"
#include "fake_nccl.h"

enum { RANKS_MAX = 16, GROUP_MAX = 64, POLLS = 3, CONFIG_BYTES = 112 };
enum { AREA_BYTES = 1 << 20, MAIL_BYTES = 4 << 20, WINDOWS_MAX = 256 };

#define EXPORT __attribute__((visibility("default")))

typedef enum op_kind { GATHER, SCATTER, ALL_REDUCE, BROADCAST, SEND, RECV } op_kind;

typedef struct fake_op {
    op_kind kind;
    const unsigned char *send;
    unsigned char *recv;
    size_t numel;
    fsdpc_nccl_type type;
    fsdpc_nccl_red red;
    int root; /* or peer */
} fake_op;

/* Whether it is of an exchange, in which groups have nothing else. */
static inline bool fake_exchanges(const fake_op *op)
{
    return op->kind == SEND || op->kind == RECV;
}

/* Where the ranks of one identity meet. */
typedef struct meeting {
    _Atomic int size; /* 0 until the first rank joins */
    _Atomic int joined, finalized;
    int devices[RANKS_MAX]; /* of those who have joined */
    unsigned hosts[RANKS_MAX];
    _Atomic long arrived, finished; /* chunks, counted over ranks */
    _Atomic long windows;           /* the same */
    _Atomic size_t window_bytes[WINDOWS_MAX];
    unsigned char areas[RANKS_MAX][AREA_BYTES];
    size_t posted[RANKS_MAX][RANKS_MAX]; /* bytes of mail, from and to */
    unsigned char mail[RANKS_MAX][RANKS_MAX][MAIL_BYTES];
} meeting;

typedef struct fake_known fake_known; /* memory that was registered */

struct ncclComm {
    meeting *all;
    int rank, size;
    _Atomic int refs; /* the caller's, and one for each group on a stream */
    _Atomic bool aborted;
    bool begun, finalized;
    bool may_share;    /* a GPU with other ranks */
    bool spoiled;      /* a rule was broken where no call could say so */
    int polls;         /* left until the call in progress is done */
    long launched;     /* groups */
    _Atomic long turn; /* groups that have run */
    long chunks;       /* that have run; of whoever has the turn */
    _Atomic bool busy; /* somebody has */
    fake_op held[GROUP_MAX];
    int n_held;
    cudaStream_t stream;
    long captured;                /* when its group ended; -1: it is not captured */
    struct ncclComm *next_ending; /* of those aborted in one group */
    fake_known *known;
    int windows; /* that were registered */
    bool fails;  /* it broke at one */
};

/* ---- fake_nccl.c ---- */

bool fake_is_broken(fake_nccl_fault what, int rank);
bool fake_is_in_progress(const struct ncclComm *comm);
bool fake_is_ended(const struct ncclComm *comm);  /* what runs on streams sees that it is aborted */
fsdpc_nccl_result fake_complain(const char *why); /* an error to return */
void fake_comm_release(fsdpc_nccl_comm comm);

/* ---- fake_register.c ---- */

/* How far the windows are that this rank has registered. */
fsdpc_nccl_result fake_registering(const struct ncclComm *comm);
void fake_forget_all(fsdpc_nccl_comm comm, bool complains);
void fake_look_at_gather(const struct ncclComm *comm, const fake_op *op);

/* ---- fake_stream.c ---- */

/* Puts the operations that are held on the group's stream. */
void fake_run(fsdpc_nccl_comm comm);
long fake_captured(cudaStream_t stream); /* what the capture holds that it takes part in, or -1 */
/* Waits until no stream and no graph has anything of the communicator's. */
void fake_wait_unused(const struct ncclComm *comm);

/* ---- fake_join.c ---- */

size_t fake_type_bytes(fsdpc_nccl_type type);
/* *into becomes the join of both. */
void fake_join(fsdpc_nccl_type type, fsdpc_nccl_red red, unsigned char *into,
               const unsigned char *from);

#endif
