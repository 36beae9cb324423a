/* Computes checksums of file contents on several threads, without keeping the data.
 *
 * Threads take spans of a run of bytes in turn.  CRC-32C is linear, so any thread can compute the
 * contribution of a span at any time; shards.h explains how contributions combine.
 */
#ifndef FSDPC_CKPT_SUMS_H
#define FSDPC_CKPT_SUMS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct fsdpc_ckpt_run {
    const char *path;       /* runs of one file share the pointer */
    uint64_t offset, bytes; /* in the file */
} fsdpc_ckpt_run;

/* Reads all runs; crcs_out[i] is the checksum of run i.  The caller is one of `n_threads`; if some
 * cannot be started, fewer threads work. */
fsdpc_status fsdpc_ckpt_sum(const fsdpc_ckpt_run *runs, size_t n_runs, int n_threads,
                            uint32_t *crcs_out);

#endif
