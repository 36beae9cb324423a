/* Computes checksums of file contents on several threads, without keeping the data.
 *
 * A run of bytes is divided into spans, which the threads take in turn. CRC-32C is linear, so any
 * thread can compute the contribution of a span at any time; shards.h explains how contributions
 * combine.
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

/* Reads all runs and sets crcs_out[i] to the checksum of run i. The calling thread is one of the
 * `n_threads`; if some threads cannot be started, fewer do the work. */
fsdpc_status fsdpc_ckpt_sum(const fsdpc_ckpt_run *runs, size_t n_runs, int n_threads,
                            uint32_t *crcs_out);

#endif
