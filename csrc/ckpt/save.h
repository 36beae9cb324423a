/* A save: from pieces in memory to a committed folder.
 *
 * All ranks run it together, each with its own pieces and the same plan otherwise.  Afterwards the
 * folder is there under its final name with a manifest that checks, or it is not there.  Every rank
 * gets the same answer; on failure, the error of the lowest rank that failed.
 *
 *     rank 0 makes a temporary folder beside the final one and the files in it, sizes reserved
 *     agree: did it work?
 *     every rank writes its own byte ranges and brings them to the disk
 *     agree: did it work for all?  the checksums of pieces go with the answer
 *     rank 0 writes the manifest, fsync, fsync of the folder, rename without replacing, fsync above
 *     agree: is it there?
 *
 * With `overwrite` the last rename exchanges the old folder and the new one, and rank 0 removes the
 * old one when all is committed.
 *
 * One save of a folder at a time, over all processes: the caller sees to that.
 *
 * A killed save leaves a temporary folder.  The next save of the same name removes it, or the
 * manager of the folder above.
 *
 * Ranks agree through one function, an all-gather of a few bytes; it is the only thing that can
 * wait for others.  The save holds nothing of Python and may run on any thread.
 */
#ifndef FSDPC_CKPT_SAVE_H
#define FSDPC_CKPT_SAVE_H

#include "ckpt/pieces.h"

enum { FSDPC_CKPT_CHECKSUM_DIGITS = 8 };

/* recv (size x bytes) = every rank's send (bytes), in order of ranks. */
typedef fsdpc_status (*fsdpc_ckpt_gather_fn)(void *arg, const void *send, size_t bytes, void *recv);

typedef struct fsdpc_ckpt_plan {
    int rank, size;
    fsdpc_ckpt_gather_fn gather;
    void *gather_arg;
    fsdpc_fs fs;

    char *parent, *temp, *folder; /* paths; temp and folder lie in parent */
    bool overwrite;               /* a folder of this name is replaced, and removed then */
    fsdpc_ckpt_file *files;       /* paths inside temp; the same on all ranks */
    size_t n_files;
    fsdpc_ckpt_piece *pieces; /* this rank's */
    size_t n_pieces;
    size_t n_tensors;

    /* The text of the manifest, with room for the checksums: 8 digits each, at crc_at[tensor], and
     * that of all text before it at checksum_at. */
    char *manifest_path;
    char *manifest;
    size_t manifest_bytes;
    size_t *crc_at;
    size_t checksum_at;
} fsdpc_ckpt_plan;

fsdpc_status fsdpc_ckpt_save(const fsdpc_ckpt_plan *plan);

/* The same answer on every rank: FSDPC_OK if `status` is that everywhere, else the error of the
 * lowest rank that failed, with its text. */
fsdpc_status fsdpc_ckpt_agree(const fsdpc_ckpt_plan *plan, fsdpc_status status);

#endif
