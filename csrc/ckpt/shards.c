/* Moves shards between memory and files, one chunk at a time.
 *
 * While a chunk is in the cache, it is converted if the dtypes differ, checksummed, and passed to
 * the kernel. If no conversion is needed, reads go directly into the shard's memory. Every few
 * chunks the kernel is asked to begin writing to the disk, so the final fsync has little left to
 * do.
 */
#include "ckpt/shards.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "ckpt/convert.h"

enum { WRITE_OUT_BYTES = 8 << 20 };

fsdpc_status fsdpc_ckpt_place(fsdpc_ckpt_shard *shard, int file, const fsdpc_st_dtype *dtype,
                              uint64_t begin, uint64_t end)
{
    bool raw = shard->memory_dtype == FSDPC_U8;
    if (!raw && dtype->dtype < 0)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "fsdpc has no tensors of %s", dtype->name);
    size_t item = raw ? 1 : dtype->bytes;
    uint64_t numel = (end - begin) / item;
    if (shard->first > numel || shard->numel > numel - shard->first)
        return fsdpc_fail(
            FSDPC_ERR_VALUE, "%zu elements from %llu on are not in a tensor of %llu elements",
            shard->numel, (unsigned long long)shard->first, (unsigned long long)numel);
    shard->file = file;
    shard->file_dtype = raw ? FSDPC_U8 : (fsdpc_dtype)dtype->dtype;
    shard->offset = begin + shard->first * item;
    shard->bytes_behind = end - shard->offset - shard->numel * item;
    return FSDPC_OK;
}

/* The state of a pass over the shards. */
typedef struct pass {
    const fsdpc_fs *fs;
    const fsdpc_ckpt_file *file;
    int fd;
    unsigned char *chunk; /* FSDPC_CKPT_CHUNK_BYTES, in the file's dtype */
    uint32_t *crcs;
} pass;

static size_t chunk_numel(const fsdpc_ckpt_shard *shard)
{
    return FSDPC_CKPT_CHUNK_BYTES / fsdpc_dtype_bytes(shard->file_dtype);
}

static fsdpc_status write_shard(pass *p, const fsdpc_ckpt_shard *shard)
{
    size_t memory_bytes = fsdpc_dtype_bytes(shard->memory_dtype);
    size_t file_bytes = fsdpc_dtype_bytes(shard->file_dtype), step = chunk_numel(shard);
    uint64_t begun = shard->offset, at = shard->offset;
    uint32_t crc = 0;
    for (size_t done = 0; done < shard->numel; done += step) {
        size_t n = shard->numel - done < step ? shard->numel - done : step;
        const unsigned char *source = (const unsigned char *)shard->data + done * memory_bytes;
        if (shard->memory_dtype != shard->file_dtype) {
            fsdpc_ckpt_convert(p->chunk, shard->file_dtype, source, shard->memory_dtype, n);
            source = p->chunk;
        }
        crc = fsdpc_crc32c(crc, source, n * file_bytes);
        FSDPC_TRY(fsdpc_fs_pwrite(p->fs, p->fd, p->file->path, source, n * file_bytes, at));
        at += n * file_bytes;
        if (at - begun >= WRITE_OUT_BYTES) {
            fsdpc_fs_begin_writing(p->fd, begun, at - begun);
            begun = at;
        }
    }
    p->crcs[shard->tensor] ^= fsdpc_crc32c_combine(crc, 0, shard->bytes_behind);
    return FSDPC_OK;
}

static fsdpc_status read_shard(pass *p, const fsdpc_ckpt_shard *shard)
{
    size_t memory_bytes = fsdpc_dtype_bytes(shard->memory_dtype);
    size_t file_bytes = fsdpc_dtype_bytes(shard->file_dtype), step = chunk_numel(shard);
    bool direct = shard->memory_dtype == shard->file_dtype;
    uint32_t crc = 0;
    for (size_t done = 0; done < shard->numel; done += step) {
        size_t n = shard->numel - done < step ? shard->numel - done : step;
        unsigned char *memory = (unsigned char *)shard->data + done * memory_bytes;
        unsigned char *target = direct ? memory : p->chunk;
        FSDPC_TRY(fsdpc_fs_pread(p->fs, p->fd, p->file->path, target, n * file_bytes,
                                 shard->offset + done * file_bytes));
        if (p->crcs)
            crc = fsdpc_crc32c(crc, target, n * file_bytes);
        if (!direct)
            fsdpc_ckpt_convert(memory, shard->memory_dtype, target, shard->file_dtype, n);
    }
    if (p->crcs)
        p->crcs[shard->tensor] ^= fsdpc_crc32c_combine(crc, 0, shard->bytes_behind);
    return FSDPC_OK;
}

/* ---- over files ---- */

typedef fsdpc_status (*shard_fn)(pass *p, const fsdpc_ckpt_shard *shard);

static fsdpc_status run_file(pass *p, int file, bool write, const fsdpc_ckpt_shard *shards,
                             size_t n_shards)
{
    shard_fn fn = write ? write_shard : read_shard;
    fsdpc_status status = fsdpc_fs_open(p->fs, p->file->path, write, &p->fd);
    if (status != FSDPC_OK)
        return status;
    for (size_t i = 0; status == FSDPC_OK && i < n_shards; i++)
        if (shards[i].file == file)
            status = fn(p, &shards[i]);
    if (status == FSDPC_OK && write)
        status = fsdpc_fs_sync(p->fs, p->fd, p->file->path);
    FSDPC_KEEP_FIRST(status, fsdpc_fs_close(p->fs, p->fd, p->file->path));
    return status;
}

static fsdpc_status run(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                        bool write, const fsdpc_ckpt_shard *shards, size_t n_shards, uint32_t *crcs)
{
    for (size_t i = 0; i < n_shards; i++)
        FSDPC_TRY(fsdpc_ckpt_convert_check(shards[i].file_dtype, shards[i].memory_dtype));
    bool *wanted = calloc(n_files + 1, sizeof *wanted);
    unsigned char *chunk = malloc(FSDPC_CKPT_CHUNK_BYTES);
    fsdpc_status status = FSDPC_OK;
    if (!wanted || !chunk)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a chunk of a checkpoint");
    for (size_t i = 0; status == FSDPC_OK && i < n_shards; i++)
        wanted[shards[i].file] |= shards[i].numel > 0;
    for (size_t f = 0; status == FSDPC_OK && f < n_files; f++) {
        pass p = {.fs = fs, .file = &files[f], .fd = -1, .chunk = chunk, .crcs = crcs};
        if (wanted[f])
            status = run_file(&p, (int)f, write, shards, n_shards);
    }
    free(chunk);
    free(wanted);
    return status;
}

fsdpc_status fsdpc_ckpt_write(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                              const fsdpc_ckpt_shard *shards, size_t n_shards, uint32_t *crcs_io)
{
    return run(fs, files, n_files, true, shards, n_shards, crcs_io);
}

fsdpc_status fsdpc_ckpt_read(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                             const fsdpc_ckpt_shard *shards, size_t n_shards, uint32_t *crcs_io)
{
    return run(fs, files, n_files, false, shards, n_shards, crcs_io);
}
