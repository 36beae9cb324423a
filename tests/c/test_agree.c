/* What ranks agree upon at the end of backward: replicas that differ are found wherever they do, on
 * a mesh too, and ranks that compare other slices raise no alarm. */
#include "engine_fixture.h"

enum { ROWS = 200, COLUMNS = 96, BACKWARDS = 50 }; /* 77 kB a unit, in slices of 4 kB */

static fsdpc_status open_mesh(rig *r, int shards, fsdpc_mesh *mesh)
{
    fsdpc_param_spec specs[] = {rig_spec("w", FSDPC_F32, 2, ROWS, COLUMNS, 0),
                                rig_spec("bias", FSDPC_BF16, 1, 70, 0, 0)};
    *mesh = (fsdpc_mesh){0};
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank / shards, r->rank, &mesh->shard));
    FSDPC_TRY(fsdpc_comm_split(r->comm, r->rank % shards, r->rank, &mesh->replicate));
    for (int u = 0; u < 2; u++) {
        fsdpc_unit_options options = rig_options(r, u ? "a" : "root");
        options.mesh = *mesh;
        FSDPC_TRY(rig_add(r, &options, specs, 2));
    }
    return rig_root(r);
}

static void close_mesh(rig *r, fsdpc_mesh *mesh)
{
    rig_close_units(r);
    fsdpc_comm_destroy(mesh->replicate);
    fsdpc_comm_destroy(mesh->shard);
}

static fsdpc_status backwards(rig *r, int n, int *done)
{
    for (*done = 0; *done < n; ++*done) {
        FSDPC_TRY(rig_step(r));
        for (int u = 0; u < r->n_units; u++)
            fsdpc_unit_zero_grad(r->units[u]);
    }
    return FSDPC_OK;
}

/* One byte of one master of the last rank changes: result[0] is how many backwards went well, and
 * result[1] whether what comes then is its name. */
static fsdpc_status drift(rig *r)
{
    int shards = *(const int *)r->arg, done;
    fsdpc_mesh mesh;
    FSDPC_TRY(open_mesh(r, shards, &mesh));
    FSDPC_TRY(backwards(r, 3, &done));
    fsdpc_local_shard local;
    unsigned char *rows = fsdpc_unit_master(r->units[1], 0, &local);
    if (r->rank == r->world - 1)
        rows[local.numel * 4 - 1] ^= 1;
    fsdpc_status status = backwards(r, BACKWARDS, &done);
    r->result[0] = done;
    r->result[1] = status == FSDPC_ERR_MISMATCH && strstr(fsdpc_last_error(), "'w' of unit 'a'");
    close_mesh(r, &mesh);
    return FSDPC_OK;
}

static void test_drift(int shards)
{
    rig rigs[RIG_RANKS];
    rigs_run(rigs, 2 * shards, drift, &shards);
    for (int rank = 0; rank < 2 * shards; rank++) {
        CHECK_NOTE(rigs[rank].result[1] == 1, "rank %d: %s", rank, rigs[rank].message);
        CHECK(rigs[rank].result[0] == rigs[0].result[0]);
    }
    CHECK(rigs[0].result[0] > 0 && rigs[0].result[0] < BACKWARDS);
    rigs_close(rigs, 2 * shards);
}

/* As after an interrupt that ended one rank's backward alone. */
static fsdpc_status elsewhere(rig *r)
{
    int done;
    fsdpc_mesh mesh;
    FSDPC_TRY(open_mesh(r, 1, &mesh));
    FSDPC_TRY(backwards(r, 2, &done));
    uint64_t slice = r->root->compared / 2;
    if (r->rank == 1)
        r->root->compared += slice;
    FSDPC_TRY(backwards(r, 1, &done));
    r->result[0] = (double)r->root->compared;
    FSDPC_TRY(backwards(r, 1, &done));
    r->result[1] = slice > 0 && r->root->compared == slice;
    close_mesh(r, &mesh);
    return FSDPC_OK;
}

static void test_elsewhere(void)
{
    rig rigs[RIG_RANKS];
    rigs_run(rigs, 2, elsewhere, NULL);
    for (int rank = 0; rank < 2; rank++)
        CHECK(rigs[rank].result[0] == 0 && rigs[rank].result[1] == 1);
    rigs_close(rigs, 2);
}

int main(void)
{
    test_drift(1);
    test_drift(2);
    test_elsewhere();
    return check_report("test_agree");
}
