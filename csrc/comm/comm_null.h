/* The communicator that pretends its peers, and what it records. */
#ifndef FSDPC_COMM_COMM_NULL_H
#define FSDPC_COMM_COMM_NULL_H

#include "comm/comm.h"

/* Simulates any rank of any world size in one process. A split returns a group of the same rank
 * and size, as if every peer had passed the same colour. Nothing is summed for more than 256
 * ranks. */
fsdpc_status fsdpc_comm_null_create(const fsdpc_comm_config *config, fsdpc_comm **out);

/* The calls that the null communicator received, in order; borrowed until its next call. (The
 * engine writes the trace.) */
typedef struct fsdpc_comm_record {
    /* "post", "done", "arrive", "copy_in", "parameter buffer", "buffer", "split", "abort" */
    const char *what;
    fsdpc_coll_kind kind; /* for "post" and "done" */
    int unit;             /* -1: none */
    uint64_t epoch;
    size_t bytes;
} fsdpc_comm_record;
size_t fsdpc_comm_null_records(const fsdpc_comm *comm, const fsdpc_comm_record **out);

#endif
