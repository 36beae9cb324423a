/* Performs the steps of a save in order.
 *
 * Only rank 0 creates or renames anything: it creates the temporary folder and its files, and
 * renames the folder. The other ranks open existing files. A rank that dies therefore leaves at
 * most a temporary folder. A folder gets its final name only after all ranks have confirmed that
 * their data is on the disk.
 *
 * If the ranks cannot agree because one has died, the save returns the gather's error. Even then
 * rank 0 removes the temporary folder: ranks that are still writing have the files open, and learn
 * of the failure at their own gather. If the parent folder cannot be synced after the rename, rank
 * 0 reverts the rename, because a commit that might vanish must not count.
 */
#include "ckpt/save.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct verdict {
    int32_t status;
    char text[508];
} verdict;

fsdpc_status fsdpc_ckpt_agree(const fsdpc_ckpt_plan *plan, fsdpc_status status)
{
    if (plan->size == 1)
        return status;
    verdict mine = {.status = status}, *all = calloc((size_t)plan->size, sizeof *all);
    if (!all)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to agree on a save");
    if (status != FSDPC_OK)
        snprintf(mine.text, sizeof mine.text, "%s", fsdpc_last_error());
    fsdpc_status result = plan->gather(plan->gather_arg, &mine, sizeof mine, all);
    for (int r = 0; result == FSDPC_OK && r < plan->size; r++)
        if (all[r].status != FSDPC_OK)
            result = fsdpc_fail((fsdpc_status)all[r].status, "rank %d: %s", r, all[r].text);
    free(all);
    return result;
}

/* Writes a file's header and syncs it; the remaining bytes of the file are only reserved. */
static fsdpc_status create_file(const fsdpc_ckpt_plan *plan, const fsdpc_ckpt_file *file)
{
    int fd;
    FSDPC_TRY(fsdpc_fs_create(&plan->fs, file->path, file->bytes, &fd));
    fsdpc_status status =
        fsdpc_fs_pwrite(&plan->fs, fd, file->path, file->header, file->header_bytes, 0);
    if (status == FSDPC_OK)
        status = fsdpc_fs_sync(&plan->fs, fd, file->path);
    FSDPC_KEEP_FIRST(status, fsdpc_fs_close(&plan->fs, fd, file->path));
    return status;
}

static fsdpc_status begin(const fsdpc_ckpt_plan *plan)
{
    if (plan->rank != 0)
        return FSDPC_OK;
    if (!plan->overwrite)
        FSDPC_TRY(fsdpc_fs_refuse_existing(&plan->fs, plan->folder));
    FSDPC_TRY(fsdpc_fs_remove_tree(&plan->fs, plan->temp));
    FSDPC_TRY(fsdpc_fs_mkdir(&plan->fs, plan->temp));
    for (size_t f = 0; f < plan->layout.n_files; f++)
        FSDPC_TRY(create_file(plan, &plan->layout.files[f]));
    return FSDPC_OK;
}

/* Combines all ranks' contributions into the tensors' checksums. */
static fsdpc_status combine(const fsdpc_ckpt_plan *plan, uint32_t *crcs)
{
    if (plan->size == 1)
        return FSDPC_OK;
    size_t n = plan->layout.n_tensors;
    uint32_t *all = calloc((size_t)plan->size * n + 1, sizeof *all);
    if (!all)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the checksums of %zu tensors", n);
    fsdpc_status status = plan->gather(plan->gather_arg, crcs, n * sizeof *crcs, all);
    memset(crcs, 0, n * sizeof *crcs);
    for (size_t i = 0; status == FSDPC_OK && i < n * (size_t)plan->size; i++)
        crcs[i % n] ^= all[i];
    free(all);
    return status;
}

static fsdpc_status write_manifest(const fsdpc_ckpt_plan *plan, const uint32_t *crcs)
{
    fsdpc_json_text text = {0};
    fsdpc_status status = fsdpc_ckpt_manifest(&plan->layout, crcs, &text);
    fsdpc_ckpt_file manifest = {
        .path = plan->manifest_path, .header = text.data, .header_bytes = text.bytes};
    if (status == FSDPC_OK)
        status = create_file(plan, &manifest);
    free(text.data);
    return status;
}

static fsdpc_status commit(const fsdpc_ckpt_plan *plan, const uint32_t *crcs)
{
    if (plan->rank != 0)
        return FSDPC_OK;
    FSDPC_TRY(write_manifest(plan, crcs));
    FSDPC_TRY(fsdpc_fs_sync_folder(&plan->fs, plan->temp));
    bool replaced = false;
    if (plan->overwrite)
        FSDPC_TRY(fsdpc_fs_exchange(&plan->fs, plan->temp, plan->folder, &replaced));
    if (!replaced)
        FSDPC_TRY(fsdpc_fs_rename_new(&plan->fs, plan->temp, plan->folder));
    fsdpc_status status = fsdpc_fs_sync_folder(&plan->fs, plan->parent);
    if (status != FSDPC_OK) {
        bool back = false;
        if (replaced)
            (void)fsdpc_fs_exchange(NULL, plan->folder, plan->temp, &back);
        else
            (void)rename(plan->folder, plan->temp);
    }
    return status;
}

/* Removes the temporary folder and returns the error that ended the save. */
static fsdpc_status give_up(const fsdpc_ckpt_plan *plan, fsdpc_status status)
{
    char text[512];
    if (plan->rank != 0)
        return status;
    snprintf(text, sizeof text, "%s", fsdpc_last_error());
    (void)fsdpc_fs_remove_tree(&plan->fs, plan->temp);
    return fsdpc_fail(status, "%s", text);
}

fsdpc_status fsdpc_ckpt_save(const fsdpc_ckpt_plan *plan)
{
    uint32_t *crcs = calloc(plan->layout.n_tensors + 1, sizeof *crcs);
    fsdpc_status status = crcs ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for checksums");
    if (status == FSDPC_OK)
        status = begin(plan);
    FSDPC_TRY_GOTO(status, fsdpc_ckpt_agree(plan, status), remove);
    status = fsdpc_ckpt_write(&plan->fs, plan->layout.files, plan->layout.n_files, plan->shards,
                              plan->n_shards, crcs);
    FSDPC_TRY_GOTO(status, fsdpc_ckpt_agree(plan, status), remove);
    FSDPC_TRY_GOTO(status, combine(plan, crcs), remove);
    status = commit(plan, crcs);
    FSDPC_TRY_GOTO(status, fsdpc_ckpt_agree(plan, status), remove);
    free(crcs);
    if (plan->rank == 0 && plan->overwrite) /* the next save removes any remains of the old
                                             * folder */
        (void)fsdpc_fs_remove_tree(&plan->fs, plan->temp);
    return FSDPC_OK;

remove:
    status = give_up(plan, status);
    free(crcs);
    return status;
}
