/* Each backward ends with two small all-reduces, one over the replicas and one over the shard
 * group.
 *
 * Both take the byte-wise maximum. For usage marks, the maximum tells whether any rank used the
 * parameter. Each checksum is sent with its complement, and the two maxima are complementary only
 * if all checksums are equal.
 *
 * The position of the next slice is compared too. A rank that abandoned a backward early may be at
 * a different position from its replicas. In that case this backward skips the comparison, and all
 * ranks start again at position 0.
 */
#include "engine/agree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "ops/flat_ops.h"

enum { ROUNDS = 128, SMALLEST_SLICE = 4096 };

/* 24 bytes without padding. */
typedef struct mark {
    uint64_t at, not_at;
    uint32_t sum, not_sum;
} mark;

static bool is_agreed(const mark *m)
{
    return (m->at ^ m->not_at) == UINT64_MAX;
}

static bool is_equal(const mark *m)
{
    return (m->sum ^ m->not_sum) == UINT32_MAX;
}

static fsdpc_status highest(fsdpc_comm *comm, uint8_t *bytes, size_t n, const char *what)
{
    if (!comm || comm->size == 1)
        return FSDPC_OK;
    return fsdpc_comm_run(comm, &(fsdpc_coll){.kind = FSDPC_COLL_ALL_REDUCE,
                                              .unit = -1,
                                              .what = what,
                                              .dtype = FSDPC_U8,
                                              .op = FSDPC_RED_MAX,
                                              .send = bytes,
                                              .recv = bytes,
                                              .numel = n});
}

/* ---- Replicas ---- */

/* Returns the size of a rank's slice of a band, in bytes. */
static size_t master_bytes(const fsdpc_group *group, size_t band)
{
    return group->bands[band].numel * fsdpc_dtype_bytes(group->dtype);
}

static uint64_t all_master_bytes(const fsdpc_root *root)
{
    uint64_t bytes = 0;
    for (int u = 0; u < root->n_units; u++) {
        const fsdpc_layout *layout = root->units[u]->layout;
        for (int g = 0; g < layout->n_groups; g++)
            for (size_t b = 0; b < layout->groups[g].n_bands; b++)
                bytes += master_bytes(&layout->groups[g], b);
    }
    return bytes;
}

/* The state of a sequential walk over all masters. */
typedef struct walk {
    uint64_t skip, bytes; /* still to skip, and then to read */
    uint32_t sum;
} walk;

static void walk_group(const fsdpc_unit *unit, const fsdpc_unit_group *group, walk *w)
{
    for (size_t b = 0; w->bytes > 0 && b < group->plan->n_bands; b++) {
        const fsdpc_slice *band = &group->plan->bands[b];
        uint64_t size = master_bytes(group->plan, b);
        uint64_t from = w->skip < size ? w->skip : size;
        uint64_t part = size - from < w->bytes ? size - from : w->bytes;
        const unsigned char *at = fsdpc_unit_masters(unit, group, band, band->shard_offset);
        w->sum = fsdpc_crc32c(w->sum, at + from, part);
        w->skip -= from;
        w->bytes -= part;
    }
}

/* Returns the position and checksum of the next slice of the masters to compare. */
static mark mark_slice(const fsdpc_root *root, uint64_t bytes)
{
    walk w = {.skip = root->compared, .bytes = bytes};
    for (int u = 0; u < root->n_units; u++)
        for (int g = 0; g < root->units[u]->layout->n_groups; g++)
            walk_group(root->units[u], &root->units[u]->groups[g], &w);
    uint32_t sum = w.sum;
    return (mark){root->compared, ~root->compared, sum, ~sum};
}

/* Called by all ranks of a replica group, which all find the same parameter or all find none. */
static fsdpc_status name_difference(fsdpc_root *root)
{
    for (int u = 0; u < root->n_units; u++) {
        const fsdpc_unit *unit = root->units[u];
        for (int p = 0; p < unit->layout->n_params; p++) {
            fsdpc_local_shard local;
            const void *rows = fsdpc_unit_master(unit, p, &local);
            uint32_t sum = fsdpc_crc32c(
                0, rows, local.numel * fsdpc_dtype_bytes(unit->layout->params[p].dtype));
            mark m = {.sum = sum, .not_sum = ~sum};
            FSDPC_TRY(highest(root->replicate, (uint8_t *)&m, sizeof m, "weights of replicas"));
            if (!is_equal(&m))
                return fsdpc_fail(FSDPC_ERR_MISMATCH,
                                  "replicas drifted apart: '%s' of unit '%s' has other values on "
                                  "rank %d than on its replicas; its values or the optimizer's "
                                  "options were changed on only one rank: change them on every "
                                  "rank, and load the last checkpoint",
                                  unit->layout->params[p].name, unit->name, root->comm->world_rank);
        }
    }
    return FSDPC_OK;
}

/* ---- Together ---- */

size_t fsdpc_agree_bytes(size_t n_params, bool replicas)
{
    return n_params + 1 + (replicas ? sizeof(mark) : 0);
}

static const char used[] = "which parameters were used";

/* `bytes`: n usage marks, one byte that tells whether replicas differ, and space for a mark. */
static fsdpc_status agree_over_replicas(fsdpc_root *root, uint8_t *bytes, size_t n)
{
    uint64_t all = all_master_bytes(root), slice = all / ROUNDS;
    if (slice < SMALLEST_SLICE)
        slice = SMALLEST_SLICE;
    if (root->device->remote || root->device->flat == fsdpc_flat_ops_null())
        return highest(root->replicate, bytes, n, used); /* the host cannot read masters */
    for (int u = 0; u < root->n_units; u++)
        FSDPC_TRY(fsdpc_unit_end_step(root->units[u]));
    mark m = mark_slice(root, slice);
    memcpy(bytes + n + 1, &m, sizeof m);
    FSDPC_TRY(highest(root->replicate, bytes, fsdpc_agree_bytes(n, true), used));
    memcpy(&m, bytes + n + 1, sizeof m);
    bytes[n] = is_agreed(&m) && !is_equal(&m);
    root->compared = is_agreed(&m) && root->compared + slice < all ? root->compared + slice : 0;
    return FSDPC_OK;
}

static fsdpc_status agree(fsdpc_root *root, bool summed, uint8_t *bytes, size_t n)
{
    if (root->captured) { /* ranks do not communicate in a capture, so all must have used the
                           * same */
        root->comm->captured = fsdpc_crc32c(root->comm->captured, bytes, n);
        return FSDPC_OK;
    }
    if (summed && root->replicate)
        FSDPC_TRY(agree_over_replicas(root, bytes, n));
    FSDPC_TRY(highest(root->comm, bytes, fsdpc_agree_bytes(n, false), used));
    if (!bytes[n])
        return FSDPC_OK;
    return fsdpc_comm_agree(root->comm, name_difference(root), "weights of replicas");
}

/* Units that are stepped inside backward have been stepped by what each rank has used. */
static fsdpc_status check_stepped(const fsdpc_root *root, const uint8_t *used_on_any,
                                  const uint8_t *unused_on_any)
{
    size_t at = 0;
    for (int i = 0; i < root->n_units; i++) {
        const fsdpc_layout *layout = root->units[i]->layout;
        for (int p = 0; p < layout->n_params; p++, at++)
            if (root->units[i]->backward_steps && used_on_any[at] && unused_on_any[at])
                return fsdpc_fail(FSDPC_ERR_MISMATCH,
                                  "parameter '%s' of unit '%s' was used on some ranks only, and "
                                  "these have stepped it inside backward: use it on every rank, or "
                                  "leave step_in_backward() out",
                                  layout->params[p].name, root->units[i]->name);
    }
    return FSDPC_OK;
}

fsdpc_status fsdpc_backward_agree(fsdpc_root *root)
{
    size_t n = 0, at = 0;
    bool synced = false, summed = false, stepped = false;
    for (int i = 0; i < root->n_units; i++) {
        n += (size_t)root->units[i]->layout->n_params;
        synced |= root->units[i]->settings.requires_sync;
        summed |= root->units[i]->settings.requires_all_reduce;
        stepped |= root->units[i]->backward_steps != NULL;
    }
    if (!synced || n == 0 || root->ranks == 1)
        return FSDPC_OK;
    size_t n_marks = stepped ? 2 * n : n; /* used, and not used */
    uint8_t *bytes = calloc(fsdpc_agree_bytes(n_marks, true), 1);
    if (!bytes)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for marks of %zu gradients", n);
    for (int i = 0; i < root->n_units; i++) {
        const fsdpc_unit *unit = root->units[i];
        memcpy(bytes + at, unit->grads, (size_t)unit->layout->n_params);
        at += (size_t)unit->layout->n_params;
    }
    for (size_t i = n; i < n_marks; i++)
        bytes[i] = bytes[i - n] == FSDPC_GRAD_NONE;
    fsdpc_status status = agree(root, summed, bytes, n_marks);
    if (status == FSDPC_OK && stepped)
        status = check_stepped(root, bytes, bytes + n);
    at = 0;
    for (int i = 0; status == FSDPC_OK && i < root->n_units; i++) {
        const fsdpc_unit *unit = root->units[i];
        memcpy(unit->grads, bytes + at, (size_t)unit->layout->n_params);
        at += (size_t)unit->layout->n_params;
    }
    free(bytes);
    return status;
}

/* ---- What is trained ---- */

/* Describes the change for a peer that has not made it, keeping only the end of a long name. */
static void say_change(const fsdpc_unit *unit, int param, char *text, size_t bytes)
{
    char whole[512];
    int n = snprintf(whole, sizeof whole, "%s.%s.requires_grad=%s", unit->name,
                     unit->layout->params[param].name, unit->trainable[param] ? "True" : "False");
    size_t length = (size_t)n < sizeof whole ? (size_t)n : sizeof whole - 1;
    size_t kept = length < bytes ? length : bytes - 1;
    memcpy(text, whole + length - kept, kept + 1);
    for (size_t i = 0; kept < length && i < 3; i++)
        text[i] = '.';
}

fsdpc_status fsdpc_trainable_agree(fsdpc_root *root)
{
    char what[64];
    fsdpc_coll op = {.kind = FSDPC_COLL_BARRIER, .unit = -1, .what = what, .dtype = FSDPC_U8};
    for (int i = 0; i < root->n_units; i++) {
        const fsdpc_unit *unit = root->units[i];
        const bool *is = unit->trainable, *was = unit->agreed;
        int n = unit->layout->n_params, p = 0;
        if (unit->settings.rank_dependent || memcmp(is, was, (size_t)n * sizeof *is) == 0)
            continue;
        while (is[p] == was[p])
            p++;
        if (op.unit < 0)
            say_change(unit, p, what, sizeof what);
        op.unit = op.unit < 0 ? unit->id : op.unit;
        op.trains = fsdpc_crc32c(op.trains, is, (size_t)n * sizeof *is);
    }
    if (op.unit < 0 || root->captured)
        return FSDPC_OK;
    if (root->comm->size > 1)
        FSDPC_TRY(fsdpc_comm_run(root->comm, &op));
    if (root->replicate)
        FSDPC_TRY(fsdpc_comm_run(root->replicate, &op));
    for (int i = 0; i < root->n_units; i++) {
        const fsdpc_unit *unit = root->units[i];
        memcpy(unit->agreed, unit->trainable,
               (size_t)unit->layout->n_params * sizeof *unit->agreed);
    }
    return FSDPC_OK;
}
