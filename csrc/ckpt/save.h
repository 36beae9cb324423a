/* A save turns shards in memory into a committed folder.
 *
 * All ranks run it together, with their own shards and otherwise identical plans. Afterwards the
 * folder either exists under its final name with a valid manifest or does not exist. Every rank
 * gets the same result, which on failure is the error of the lowest rank that failed.
 *
 *     rank 0 makes a temporary folder next to the final one and the files in it, sizes reserved
 *     agree: did it work?
 *     every rank writes its own byte ranges and syncs them to the disk
 *     agree: did it work for all? the checksums of shards travel with the answer
 *     rank 0 writes the manifest, fsync, fsync of the folder, rename without replacing, fsync above
 *     agree: does it exist?
 *
 * With `overwrite`, the final rename exchanges the old and new folders, and rank 0 removes the old
 * one after the commit.
 *
 * The caller ensures that only one save of a folder runs at a time, across all processes.
 *
 * A killed save leaves a temporary folder. The next save of the same name, or the parent folder's
 * checkpoint manager, removes it.
 *
 * Ranks communicate only through an all-gather of a few bytes, so no other function can wait for
 * other ranks. The save uses no Python objects and may run on any thread.
 */
#ifndef FSDPC_CKPT_SAVE_H
#define FSDPC_CKPT_SAVE_H

#include "ckpt/layout.h"

/* recv (size x bytes) = every rank's send (bytes), in rank order. */
typedef fsdpc_status (*fsdpc_ckpt_gather_fn)(void *arg, const void *send, size_t bytes, void *recv);

typedef struct fsdpc_ckpt_plan {
    int rank, size;
    fsdpc_ckpt_gather_fn gather;
    void *gather_arg;
    fsdpc_fs fs;

    char *parent, *temp, *folder; /* paths; temp and folder are in parent */
    char *manifest_path;          /* in temp */
    bool overwrite;               /* replaces a folder of this name, which is then removed */
    fsdpc_ckpt_layout layout;     /* in temp; the same on all ranks */
    fsdpc_ckpt_shard *shards;     /* this rank's */
    size_t n_shards;
} fsdpc_ckpt_plan;

fsdpc_status fsdpc_ckpt_save(const fsdpc_ckpt_plan *plan);

/* Returns the same result on every rank: FSDPC_OK if every rank's `status` is OK, else the error of
 * the lowest rank that failed, with its message. */
fsdpc_status fsdpc_ckpt_agree(const fsdpc_ckpt_plan *plan, fsdpc_status status);

#endif
