/* Moves pieces to files and back, one chunk at a time.
 *
 * A chunk is converted if dtypes differ, checksummed, and passed to the kernel, all while it is in
 * the cache.  Reads go straight into the piece's memory if no conversion is needed.  Every few
 * chunks the kernel is asked to begin writing to the disk, so the final fsync has little left to
 * do.
 */
#include "ckpt/pieces.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "ckpt/convert.h"

enum { WRITE_OUT_BYTES = 8 << 20 };

fsdpc_status fsdpc_ckpt_place(fsdpc_ckpt_piece *piece, int file, const fsdpc_st_dtype *dtype,
                              uint64_t begin, uint64_t end)
{
    bool raw = piece->memory_dtype == FSDPC_U8;
    if (!raw && dtype->dtype < 0)
        return fsdpc_fail(FSDPC_ERR_DTYPE, "fsdpc has no tensors of %s", dtype->name);
    size_t item = raw ? 1 : dtype->bytes;
    uint64_t numel = (end - begin) / item;
    if (piece->first > numel || piece->numel > numel - piece->first)
        return fsdpc_fail(
            FSDPC_ERR_VALUE, "%zu elements from %llu on are not in a tensor of %llu elements",
            piece->numel, (unsigned long long)piece->first, (unsigned long long)numel);
    piece->file = file;
    piece->file_dtype = raw ? FSDPC_U8 : (fsdpc_dtype)dtype->dtype;
    piece->offset = begin + piece->first * item;
    piece->bytes_behind = end - piece->offset - piece->numel * item;
    return FSDPC_OK;
}

/* The state of a pass over the pieces. */
typedef struct pass {
    const fsdpc_fs *fs;
    const fsdpc_ckpt_file *file;
    int fd;
    unsigned char *chunk; /* FSDPC_CKPT_CHUNK_BYTES, in the file's dtype */
    uint32_t *crcs;
} pass;

static size_t chunk_numel(const fsdpc_ckpt_piece *piece)
{
    return FSDPC_CKPT_CHUNK_BYTES / fsdpc_dtype_bytes(piece->file_dtype);
}

static fsdpc_status write_piece(pass *p, const fsdpc_ckpt_piece *piece)
{
    size_t memory_bytes = fsdpc_dtype_bytes(piece->memory_dtype);
    size_t file_bytes = fsdpc_dtype_bytes(piece->file_dtype), step = chunk_numel(piece);
    uint64_t begun = piece->offset, at = piece->offset;
    uint32_t crc = 0;
    for (size_t done = 0; done < piece->numel; done += step) {
        size_t n = piece->numel - done < step ? piece->numel - done : step;
        const unsigned char *source = (const unsigned char *)piece->data + done * memory_bytes;
        if (piece->memory_dtype != piece->file_dtype) {
            fsdpc_ckpt_convert(p->chunk, piece->file_dtype, source, piece->memory_dtype, n);
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
    p->crcs[piece->tensor] ^= fsdpc_crc32c_combine(crc, 0, piece->bytes_behind);
    return FSDPC_OK;
}

static fsdpc_status read_piece(pass *p, const fsdpc_ckpt_piece *piece)
{
    size_t memory_bytes = fsdpc_dtype_bytes(piece->memory_dtype);
    size_t file_bytes = fsdpc_dtype_bytes(piece->file_dtype), step = chunk_numel(piece);
    bool direct = piece->memory_dtype == piece->file_dtype;
    uint32_t crc = 0;
    for (size_t done = 0; done < piece->numel; done += step) {
        size_t n = piece->numel - done < step ? piece->numel - done : step;
        unsigned char *memory = (unsigned char *)piece->data + done * memory_bytes;
        unsigned char *target = direct ? memory : p->chunk;
        FSDPC_TRY(fsdpc_fs_pread(p->fs, p->fd, p->file->path, target, n * file_bytes,
                                 piece->offset + done * file_bytes));
        if (p->crcs)
            crc = fsdpc_crc32c(crc, target, n * file_bytes);
        if (!direct)
            fsdpc_ckpt_convert(memory, piece->memory_dtype, target, piece->file_dtype, n);
    }
    if (p->crcs)
        p->crcs[piece->tensor] ^= fsdpc_crc32c_combine(crc, 0, piece->bytes_behind);
    return FSDPC_OK;
}

/* ---- over files ---- */

typedef fsdpc_status (*piece_fn)(pass *p, const fsdpc_ckpt_piece *piece);

static fsdpc_status run_file(pass *p, int file, bool write, const fsdpc_ckpt_piece *pieces,
                             size_t n_pieces)
{
    piece_fn fn = write ? write_piece : read_piece;
    fsdpc_status status = fsdpc_fs_open(p->fs, p->file->path, write, &p->fd);
    if (status != FSDPC_OK)
        return status;
    for (size_t i = 0; status == FSDPC_OK && i < n_pieces; i++)
        if (pieces[i].file == file)
            status = fn(p, &pieces[i]);
    if (status == FSDPC_OK && write)
        status = fsdpc_fs_sync(p->fs, p->fd, p->file->path);
    FSDPC_KEEP_FIRST(status, fsdpc_fs_close(p->fs, p->fd, p->file->path));
    return status;
}

static fsdpc_status run(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                        bool write, const fsdpc_ckpt_piece *pieces, size_t n_pieces, uint32_t *crcs)
{
    for (size_t i = 0; i < n_pieces; i++)
        FSDPC_TRY(fsdpc_ckpt_convert_check(pieces[i].file_dtype, pieces[i].memory_dtype));
    bool *wanted = calloc(n_files + 1, sizeof *wanted);
    unsigned char *chunk = malloc(FSDPC_CKPT_CHUNK_BYTES);
    fsdpc_status status = FSDPC_OK;
    if (!wanted || !chunk)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a chunk of a checkpoint");
    for (size_t i = 0; status == FSDPC_OK && i < n_pieces; i++)
        wanted[pieces[i].file] |= pieces[i].numel > 0;
    for (size_t f = 0; status == FSDPC_OK && f < n_files; f++) {
        pass p = {.fs = fs, .file = &files[f], .fd = -1, .chunk = chunk, .crcs = crcs};
        if (wanted[f])
            status = run_file(&p, (int)f, write, pieces, n_pieces);
    }
    free(chunk);
    free(wanted);
    return status;
}

fsdpc_status fsdpc_ckpt_write(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                              const fsdpc_ckpt_piece *pieces, size_t n_pieces, uint32_t *crcs_io)
{
    return run(fs, files, n_files, true, pieces, n_pieces, crcs_io);
}

fsdpc_status fsdpc_ckpt_read(const fsdpc_fs *fs, const fsdpc_ckpt_file *files, size_t n_files,
                             const fsdpc_ckpt_piece *pieces, size_t n_pieces, uint32_t *crcs_io)
{
    return run(fs, files, n_files, false, pieces, n_pieces, crcs_io);
}
