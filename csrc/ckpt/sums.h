/* Checksums of what files hold, by several threads, without keeping any of it.
 *
 * A run of bytes is read in spans that threads take in turn.  CRC-32C is linear, so each span gives
 * its contribution on any thread and at any time: pieces.h says how contributions join.
 */
#ifndef FSDPC_CKPT_SUMS_H
#define FSDPC_CKPT_SUMS_H

#include "base/fs.h"

typedef struct fsdpc_ckpt_run {
    const char *path; /* runs of one file share the pointer */
    int tensor;
    uint64_t offset, bytes; /* in the file */
    uint64_t bytes_behind;  /* of this tensor, after the run */
} fsdpc_ckpt_run;

/* Reads all runs and xors their contributions into crcs_io[tensor].  The caller is one of
 * `n_threads`; fewer do where they cannot be started.  The hook is asked from any of them. */
fsdpc_status fsdpc_ckpt_sum(const fsdpc_fs *fs, const fsdpc_ckpt_run *runs, size_t n_runs,
                            int n_threads, uint32_t *crcs_io);

#endif
