/* Computes checksums of file contents on several threads, without keeping the data.
 *
 * Threads take spans of a run of bytes in turn.  CRC-32C is linear, so any thread can compute the
 * contribution of a span at any time; pieces.h says how contributions combine.
 */
#ifndef FSDPC_CKPT_SUMS_H
#define FSDPC_CKPT_SUMS_H

#include "base/fs.h"

typedef struct fsdpc_ckpt_run {
    const char *path; /* runs of one file share the pointer */
    int tensor;
    uint64_t offset, bytes; /* in the file */
    uint64_t bytes_behind;  /* bytes of this tensor after the run */
} fsdpc_ckpt_run;

/* Reads all runs and xors their contributions into crcs_io[tensor].  The caller is one of
 * `n_threads`; if fewer can be started, those do the work.  Any of them may call the hook. */
fsdpc_status fsdpc_ckpt_sum(const fsdpc_fs *fs, const fsdpc_ckpt_run *runs, size_t n_runs,
                            int n_threads, uint32_t *crcs_io);

#endif
