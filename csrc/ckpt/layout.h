/* The files of a checkpoint, laid out from a list of tensors.
 *
 *     model.safetensors                    or, if it would be larger than max_file_bytes,
 *     model-00001-of-00003.safetensors     files with the tensors in their order, and
 *     model.safetensors.index.json         which file has which tensor, for transformers
 *     optimizer-00001-of-00001.safetensors
 *     other files, such as config.json
 *     manifest.json                        the places and checksums of all these
 *
 * Apart from the checksums, the layout depends only on names, dtypes, shapes and max_file_bytes.
 * Every rank therefore lays out the same files and knows where its shards belong.
 */
#ifndef FSDPC_CKPT_LAYOUT_H
#define FSDPC_CKPT_LAYOUT_H

#include "ckpt/shards.h"

typedef struct fsdpc_ckpt_layout {
    /* The caller sets and owns these fields. */
    fsdpc_st_tensor *tensors; /* the model's, then the optimizer's */
    size_t n_tensors, n_model;
    double max_file_bytes;  /* files of several tensors have at most this much data */
    fsdpc_st_pair *members; /* the manifest's other members: keys in order, values in JSON */
    size_t n_members;
    fsdpc_st_pair *others; /* other files: names and texts */
    size_t n_others;

    /* Set by fsdpc_ckpt_lay_out. */
    fsdpc_ckpt_file *files;
    size_t n_files;
} fsdpc_ckpt_layout;

/* Lays out the files in `folder`, records where each tensor is stored, and places the shards. */
fsdpc_status fsdpc_ckpt_lay_out(fsdpc_ckpt_layout *layout, const char *folder,
                                fsdpc_ckpt_shard *shards, size_t n_shards);
void fsdpc_ckpt_layout_fini(fsdpc_ckpt_layout *layout); /* may be all zeros */

/* Writes the manifest, whose last member is the checksum of all preceding text. The caller frees
 * it. */
fsdpc_status fsdpc_ckpt_manifest(const fsdpc_ckpt_layout *layout, const uint32_t *crcs,
                                 fsdpc_json_text *out);

#endif
