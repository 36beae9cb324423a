/* Moving pieces of tensors between memory and files.
 *
 * A piece is a run of elements of one tensor: what one rank holds of it.  It has a place in memory
 * and a place in a file, each with a dtype.  csrc/py makes pieces; nothing here knows of layouts,
 * units or ranks.
 *
 * Checksums.  CRC-32C is linear: the CRC of a tensor is the exclusive or, over its pieces, of the
 * piece's CRC moved over the bytes behind it.  So each rank gives one word per tensor, its
 * contribution (0 where it has no piece), and the words of all ranks together are the tensor's CRC.
 * It is taken of the file's bytes, chunk by chunk while they are in the cache.
 *
 * Memory: one chunk, whatever the size of the pieces.
 */
#ifndef FSDPC_CKPT_PIECES_H
#define FSDPC_CKPT_PIECES_H

#include "base/dtype.h"
#include "base/fs.h"

/* Small enough that what the kernel has just read is still in a core's own cache. */
enum { FSDPC_CKPT_CHUNK_BYTES = 1 << 20 };

typedef struct fsdpc_ckpt_file {
    char *path;
    uint64_t bytes;
    const void *header; /* what it begins with, written by its creator; may be all of it */
    size_t header_bytes;
    int creator; /* rank; a file of another rank is written by its creator only */
} fsdpc_ckpt_file;

typedef struct fsdpc_ckpt_piece {
    int file, tensor;
    fsdpc_dtype memory_dtype, file_dtype;
    void *data;
    size_t numel;
    uint64_t offset;       /* bytes into the file */
    uint64_t bytes_behind; /* of this tensor in the file, after the piece */
} fsdpc_ckpt_piece;

/* Writes the pieces, grouped by file (in the order given), and brings each file to the disk.
 * Contributions are xor-ed into crcs_io[tensor]. */
fsdpc_status fsdpc_ckpt_write(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                              const fsdpc_ckpt_piece *pieces, size_t n_pieces, uint32_t *crcs_io);

/* Reads the pieces in the same way; crcs_io may be NULL. */
fsdpc_status fsdpc_ckpt_read(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                             const fsdpc_ckpt_piece *pieces, size_t n_pieces, uint32_t *crcs_io);

#endif
