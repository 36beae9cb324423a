/* Saves by several ranks, which are threads here: what is written is read back, by other shards
 * than wrote it; and whichever call fails on whichever rank, all ranks say so and nothing is left.
 *
 * Two tensors in a file each: `a` is fp32 there and in memory and larger than two chunks, `b` is
 * bf16 in the file. Another file, `own`, is all header.
 */
#include "ckpt/save.h"

#include <pthread.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "check.h"
#include "ckpt/safetensors.h"
#include "ckpt/sums.h"

enum { RANKS = 3, TENSORS = 2, PATH_BYTES = 512, NEVER = -1 };

static const size_t numels[TENSORS] = {2 * FSDPC_CKPT_CHUNK_BYTES / 4 + 4099, 1237};
static const char *const names[TENSORS] = {"a", "b"};
static const char *const file_names[TENSORS] = {"model-00001-of-00002.safetensors",
                                                "model-00002-of-00002.safetensors"};
static const char own[] = "what rank 0 writes alone";

/* Where threads meet: what a communicator does for processes. */
typedef struct meeting {
    pthread_barrier_t barrier;
    unsigned char rows[RANKS * 4096];
} meeting;

typedef struct place {
    char parent[PATH_BYTES], temp[PATH_BYTES], folder[PATH_BYTES], manifest[PATH_BYTES];
} place;

typedef struct saver {
    int rank, world;
    meeting *meeting;
    const place *place;
    int fail_at;            /* call to fail on this rank, or NEVER */
    bool lost;              /* the meeting fails instead */
    int calls;              /* to the file system */
    float *values[TENSORS]; /* all of each tensor */
    fsdpc_status status;
    char text[512];
} saver;

static fsdpc_status meet(void *arg, const void *send, size_t bytes, void *recv)
{
    saver *self = arg;
    if (self->lost)
        return fsdpc_fail(FSDPC_ERR_PEER, "rank 1 is gone");
    memcpy(self->meeting->rows + (size_t)self->rank * bytes, send, bytes);
    pthread_barrier_wait(&self->meeting->barrier);
    memcpy(recv, self->meeting->rows, (size_t)self->world * bytes);
    pthread_barrier_wait(&self->meeting->barrier);
    return FSDPC_OK;
}

static fsdpc_status hook(void *arg, const char *call, const char *path)
{
    saver *self = arg;
    if (self->calls++ == self->fail_at)
        return fsdpc_fail(FSDPC_ERR_OS, "%s '%s': No space left on device", call, path);
    return FSDPC_OK;
}

static bool there(const char *path)
{
    return access(path, F_OK) == 0;
}

static void make_place(place *p)
{
    const char *base = getenv("TMPDIR");
    snprintf(p->parent, sizeof p->parent, "%.400s/fsdpc-ckpt-XXXXXX", base ? base : "/tmp");
    CHECK(mkdtemp(p->parent) != NULL);
    snprintf(p->temp, sizeof p->temp, "%.400s/.c.saving", p->parent);
    snprintf(p->folder, sizeof p->folder, "%.400s/c", p->parent);
    snprintf(p->manifest, sizeof p->manifest, "%.400s/manifest", p->temp);
}

static void remove_place(const place *p)
{
    fsdpc_fs fs = {0};
    CHECK_OK(fsdpc_fs_remove_tree(&fs, p->parent));
}

static fsdpc_st_tensor tensor_of(int t)
{
    return (fsdpc_st_tensor){.name = names[t],
                             .dtype = fsdpc_st_dtype_find(t == 0 ? "F32" : "BF16"),
                             .ndim = 1,
                             .shape = {numels[t]}};
}

/* The header of tensor t's file. */
static fsdpc_status header_of(int t, char **header, size_t *header_bytes)
{
    fsdpc_st_tensor tensor = tensor_of(t);
    return fsdpc_st_layout(&tensor, 1, header, header_bytes);
}

static size_t file_item(int t)
{
    return t == 0 ? 4 : 2;
}

/* Rank r of n holds elements [r * numel / n, (r + 1) * numel / n) of each. */
static fsdpc_ckpt_shard local_of(int t, int rank, int world, float *all)
{
    size_t begin = numels[t] * (size_t)rank / (size_t)world;
    size_t end = numels[t] * (size_t)(rank + 1) / (size_t)world;
    return (fsdpc_ckpt_shard){.tensor = t,
                              .first = begin,
                              .memory_dtype = FSDPC_F32,
                              .data = all + begin,
                              .numel = end - begin};
}

static fsdpc_status save_here(saver *self)
{
    fsdpc_st_tensor tensors[TENSORS];
    fsdpc_ckpt_shard shards[TENSORS];
    fsdpc_st_pair other = {"own", own};
    for (int t = 0; t < TENSORS; t++) {
        tensors[t] = tensor_of(t);
        shards[t] = local_of(t, self->rank, self->world, self->values[t]);
    }
    fsdpc_ckpt_plan plan = {.rank = self->rank,
                            .size = self->world,
                            .gather = meet,
                            .gather_arg = self,
                            .fs = {.hook = hook, .arg = self},
                            .parent = (char *)self->place->parent,
                            .temp = (char *)self->place->temp,
                            .folder = (char *)self->place->folder,
                            .manifest_path = (char *)self->place->manifest,
                            .layout = {.tensors = tensors,
                                       .n_tensors = TENSORS,
                                       .n_model = TENSORS,
                                       .max_file_bytes = 1,
                                       .others = &other,
                                       .n_others = 1},
                            .shards = shards,
                            .n_shards = TENSORS};
    fsdpc_status status = fsdpc_ckpt_lay_out(&plan.layout, plan.temp, shards, TENSORS);
    if (status == FSDPC_OK)
        status = fsdpc_ckpt_save(&plan);
    fsdpc_ckpt_layout_fini(&plan.layout);
    return status;
}

static void *save_thread(void *arg)
{
    saver *self = arg;
    self->status = save_here(self);
    snprintf(self->text, sizeof self->text, "%s", fsdpc_last_error());
    return NULL;
}

/* All ranks save; `victim`'s call number `fail_at` fails. Returns that rank's number of calls. */
static int save_all(const place *p, int world, int victim, int fail_at, float *const *values,
                    saver *savers)
{
    meeting m;
    pthread_t threads[RANKS];
    pthread_barrier_init(&m.barrier, NULL, (unsigned)world);
    for (int r = 0; r < world; r++) {
        savers[r] = (saver){.rank = r,
                            .world = world,
                            .meeting = &m,
                            .place = p,
                            .fail_at = r == victim ? fail_at : NEVER,
                            .values = {values[0], values[1]}};
        CHECK(pthread_create(&threads[r], NULL, save_thread, &savers[r]) == 0);
    }
    for (int r = 0; r < world; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&m.barrier);
    return savers[victim].calls;
}

static void make_values(float **values)
{
    for (int t = 0; t < TENSORS; t++) {
        values[t] = malloc(numels[t] * sizeof *values[t]);
        for (size_t i = 0; i < numels[t]; i++)
            values[t][i] = (float)((i * 2654435761u) % 1000003) / 512.0f - 900.0f;
    }
}

static void free_values(float **values)
{
    for (int t = 0; t < TENSORS; t++)
        free(values[t]);
}

static size_t read_all(const char *folder, const char *name, unsigned char *data, size_t room)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%.400s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    CHECK_NOTE(file != NULL, "%s", path);
    size_t n = file ? fread(data, 1, room, file) : 0;
    if (file)
        fclose(file);
    return n;
}

/* The files hold what one process would write alone; the manifest has their checksums. */
static void check_files(const place *p, float *const *values)
{
    unsigned char manifest[4096] = "";
    size_t manifest_bytes = read_all(p->folder, "manifest", manifest, sizeof manifest - 1);
    for (int t = 0; t < TENSORS; t++) {
        char *header;
        size_t header_bytes, data_bytes = numels[t] * file_item(t);
        CHECK_OK(header_of(t, &header, &header_bytes));
        size_t room = header_bytes + data_bytes + 1;
        unsigned char *found = malloc(room);
        CHECK(read_all(p->folder, file_names[t], found, room) == room - 1);
        CHECK(memcmp(found, header, header_bytes) == 0);
        size_t wrong = 0;
        for (size_t i = 0; i < numels[t]; i++) {
            uint16_t half = fsdpc_f32_to_bf16(values[t][i]);
            const void *one = t == 0 ? (const void *)&values[t][i] : (const void *)&half;
            wrong += memcmp(found + header_bytes + i * file_item(t), one, file_item(t)) != 0;
        }
        CHECK_NOTE(wrong == 0, "%zu elements of '%s'", wrong, names[t]);
        char want[64];
        snprintf(want, sizeof want, ",%zu],\"crc32c\":\"%08x\"}", room - 1,
                 fsdpc_crc32c(0, found + header_bytes, data_bytes));
        CHECK_NOTE(strstr((char *)manifest, want), "%s is not in %s", want, manifest);
        free(found);
        free(header);
    }
    unsigned char alone[sizeof own + 1];
    CHECK(read_all(p->folder, "own", alone, sizeof alone) == sizeof own - 1);
    CHECK(memcmp(alone, own, sizeof own - 1) == 0);
    char want[16];
    size_t checksum_at = manifest_bytes - 12;
    snprintf(want, sizeof want, "%08x\"\n}\n", fsdpc_crc32c(0, manifest, checksum_at));
    CHECK_NOTE(strcmp((char *)manifest + checksum_at, want) == 0, "%s, want %s", manifest, want);
}

/* Read by `world` ranks' shards: the values, and contributions that make the whole checksum. */
static void check_reading(const place *p, int world, float *const *values)
{
    fsdpc_ckpt_file files[TENSORS];
    char paths[TENSORS][PATH_BYTES];
    size_t header_bytes[TENSORS];
    uint32_t crcs[TENSORS] = {0}, alone[TENSORS] = {0};
    float *found[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        char *header;
        CHECK_OK(header_of(t, &header, &header_bytes[t]));
        free(header);
        snprintf(paths[t], sizeof paths[t], "%.400s/%s", p->folder, file_names[t]);
        files[t] = (fsdpc_ckpt_file){.path = paths[t]};
        found[t] = calloc(numels[t], sizeof *found[t]);
    }
    for (int rank = 0; rank < world; rank++) {
        fsdpc_ckpt_shard shards[TENSORS];
        for (int t = 0; t < TENSORS; t++) {
            shards[t] = local_of(t, rank, world, found[t]);
            CHECK_OK(fsdpc_ckpt_place(&shards[t], t, tensor_of(t).dtype, header_bytes[t],
                                      header_bytes[t] + numels[t] * file_item(t)));
        }
        CHECK_OK(fsdpc_ckpt_read(NULL, files, TENSORS, shards, TENSORS, crcs));
    }
    fsdpc_ckpt_run wholes[TENSORS];
    for (int t = 0; t < TENSORS; t++) {
        wholes[t] = (fsdpc_ckpt_run){
            .path = paths[t], .offset = header_bytes[t], .bytes = numels[t] * file_item(t)};
    }
    CHECK_OK(fsdpc_ckpt_sum(wholes, TENSORS, world, alone));
    for (int t = 0; t < TENSORS; t++) {
        size_t wrong = 0;
        for (size_t i = 0; i < numels[t]; i++) {
            float want = values[t][i];
            if (t == 1)
                want = fsdpc_bf16_to_f32(fsdpc_f32_to_bf16(want));
            wrong += found[t][i] != want;
        }
        CHECK_NOTE(wrong == 0, "%zu elements of '%s' at %d ranks", wrong, names[t], world);
        CHECK_NOTE(crcs[t] == alone[t], "%08x, not %08x", crcs[t], alone[t]);
        free(found[t]);
    }
}

static void test_written_is_read(void)
{
    float *values[TENSORS];
    make_values(values);
    for (int world = 1; world <= RANKS; world++) {
        place p;
        saver savers[RANKS];
        make_place(&p);
        save_all(&p, world, 0, NEVER, values, savers);
        for (int r = 0; r < world; r++)
            CHECK_NOTE(savers[r].status == FSDPC_OK, "rank %d: %s", r, savers[r].text);
        CHECK(there(p.folder) && !there(p.temp));
        check_files(&p, values);
        for (int readers = 1; readers <= RANKS; readers++)
            check_reading(&p, readers, values);
        remove_place(&p);
    }
    free_values(values);
}

static void test_any_call_may_fail(void)
{
    float *values[TENSORS];
    make_values(values);
    place p;
    saver savers[RANKS];
    make_place(&p);
    for (int victim = 0; victim < RANKS; victim++) {
        int fails = 0;
        for (int k = 0; save_all(&p, RANKS, victim, k, values, savers) > k; k++, fails++) {
            char begin[32];
            snprintf(begin, sizeof begin, "rank %d: ", victim);
            for (int r = 0; r < RANKS; r++) {
                CHECK_NOTE(savers[r].status == FSDPC_ERR_OS, "call %d: %s", k, savers[r].text);
                CHECK_NOTE(strncmp(savers[r].text, begin, strlen(begin)) == 0 &&
                               strstr(savers[r].text, "No space left"),
                           "call %d of rank %d, rank %d says: %s", k, victim, r, savers[r].text);
            }
            CHECK_NOTE(!there(p.folder) && !there(p.temp), "call %d of rank %d", k, victim);
        }
        CHECK_NOTE(fails >= 8, "rank %d made %d calls", victim, fails);
        CHECK(there(p.folder)); /* the last turn had nothing to fail */
        check_files(&p, values);
        CHECK_OK(fsdpc_fs_remove_tree(NULL, p.folder));
    }
    remove_place(&p);
    free_values(values);
}

static void test_what_is_there_stays(void)
{
    float *values[TENSORS];
    make_values(values);
    place p;
    saver savers[RANKS];
    make_place(&p);
    save_all(&p, 2, 0, NEVER, values, savers);
    values[0][0] += 1.0f;
    save_all(&p, 2, 0, NEVER, values, savers);
    CHECK(savers[1].status == FSDPC_ERR_OS && strstr(savers[1].text, "is not written over"));
    values[0][0] -= 1.0f;
    check_files(&p, values);
    remove_place(&p);
    free_values(values);
}

/* Ranks that cannot agree say why, and rank 0 leaves nothing. */
static void test_a_peer_that_is_gone(void)
{
    float *values[TENSORS];
    make_values(values);
    place p;
    make_place(&p);
    saver self = {
        .world = 2, .place = &p, .fail_at = NEVER, .lost = true, .values = {values[0], values[1]}};
    CHECK_FAILS(save_here(&self), FSDPC_ERR_PEER, "rank 1 is gone");
    CHECK(!there(p.folder) && !there(p.temp) && there(p.parent));
    remove_place(&p);
    free_values(values);
}

static void test_pieces_beyond_their_tensor(void)
{
    fsdpc_ckpt_shard shard = {.first = 4, .numel = 3, .memory_dtype = FSDPC_F32};
    CHECK_FAILS(fsdpc_ckpt_place(&shard, 0, fsdpc_st_dtype_find("F32"), 8, 32), FSDPC_ERR_VALUE,
                "3 elements from 4 on are not in a tensor of 6 elements");
    shard.memory_dtype = FSDPC_U8; /* 3 bytes */
    CHECK_OK(fsdpc_ckpt_place(&shard, 0, fsdpc_st_dtype_find("F32"), 8, 32));
    CHECK(shard.offset == 12 && shard.bytes_behind == 17);
}

/* What a name leads to is not ours to remove: a transport in the place of a left-over is refused.
 */
static void test_transports_are_not_followed(void)
{
    place p, other;
    make_place(&p);
    make_place(&other);
    CHECK_OK(fsdpc_fs_mkdir(NULL, other.folder));
    CHECK(symlink(other.parent, p.temp) == 0);
    CHECK_FAILS(fsdpc_fs_remove_tree(NULL, p.temp), FSDPC_ERR_OS, "to remove it");
    CHECK(there(other.folder));
    CHECK_OK(fsdpc_fs_remove_tree(NULL, p.parent)); /* the transport itself goes with its folder */
    CHECK(!there(p.parent) && there(other.folder));
    remove_place(&other);
}

/* Some file systems answer EINVAL to the fsync of a folder; proc is one that is always there. */
static void test_folders_that_cannot_be_synced(void)
{
    CHECK_OK(fsdpc_fs_sync_folder(NULL, "/proc"));
    CHECK_FAILS(fsdpc_fs_sync_folder(NULL, "/proc/none"), FSDPC_ERR_OS, "No such file");
}

int main(void)
{
    test_written_is_read();
    test_any_call_may_fail();
    test_what_is_there_stays();
    test_a_peer_that_is_gone();
    test_pieces_beyond_their_tensor();
    test_transports_are_not_followed();
    test_folders_that_cannot_be_synced();
    return check_report("test_ckpt_save");
}
