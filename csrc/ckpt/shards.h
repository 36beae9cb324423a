/* Moves tensor shards between memory and files.
 *
 * A shard is a contiguous range of elements of one tensor: the part that one rank holds. It has a
 * location in memory and one in a file, each with a dtype. csrc/bind creates shards; this code
 * knows nothing about units or ranks.
 *
 * Checksums. CRC-32C is linear. If each shard's CRC is shifted by the bytes that follow the shard,
 * the exclusive or of the results is the tensor's CRC. Each rank therefore contributes one 32-bit
 * value per tensor (0 if it has no shard), and the exclusive or of all ranks' values is the
 * tensor's CRC. The CRC covers the file's bytes and is computed chunk by chunk while they are in
 * the cache.
 *
 * Memory use is one chunk, whatever the size of the shards.
 */
#ifndef FSDPC_CKPT_SHARDS_H
#define FSDPC_CKPT_SHARDS_H

#include "base/fs.h"
#include "ckpt/safetensors.h"

/* A chunk is small enough that data just read by the kernel stays in the core's own cache. */
enum { FSDPC_CKPT_CHUNK_BYTES = 1 << 20 };

typedef struct fsdpc_ckpt_file {
    char *path;
    uint64_t bytes;
    char *header; /* the beginning of the file, or all of it, written by rank 0 */
    size_t header_bytes;
    const char *name;         /* in its folder */
    size_t tensor, n_tensors; /* its first tensor and their number */
} fsdpc_ckpt_file;

typedef struct fsdpc_ckpt_shard {
    int tensor;
    uint64_t first; /* element of the tensor, or byte if the memory is bytes */
    size_t numel;
    void *data;
    fsdpc_dtype memory_dtype;

    /* set by fsdpc_ckpt_place */
    int file;
    fsdpc_dtype file_dtype;
    uint64_t offset;       /* bytes into the file */
    uint64_t bytes_behind; /* bytes of this tensor in the file after the shard */
} fsdpc_ckpt_shard;

/* Sets a shard's location in a file, given that its tensor occupies the bytes [begin, end). If the
 * memory dtype is U8, the memory holds the file's bytes, whatever the tensor's dtype. */
fsdpc_status fsdpc_ckpt_place(fsdpc_ckpt_shard *shard, int file, const fsdpc_st_dtype *dtype,
                              uint64_t begin, uint64_t end);

/* Writes the shards, file by file in the given order, and syncs each file to disk. Contributions
 * are xor-ed into crcs_io[tensor]. */
fsdpc_status fsdpc_ckpt_write(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                              const fsdpc_ckpt_shard *shards, size_t n_shards, uint32_t *crcs_io);

/* Reads the shards the same way; crcs_io may be NULL. */
fsdpc_status fsdpc_ckpt_read(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                             const fsdpc_ckpt_shard *shards, size_t n_shards, uint32_t *crcs_io);

#endif
