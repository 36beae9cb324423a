/* Arrays in a file: what passes and the mapping see is what was written, whatever fails. */
#include "tier/tier.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/size.h"
#include "check.h"
#include "fs_faults.h"

enum { CHUNK = 8192 };

static char folder[] = "/tmp/fsdpc-test-tier-XXXXXX";
static fsdpc_mem *mem;

static fsdpc_tier *tier_with(faults *f)
{
    fsdpc_tier_config config = {.folder = folder, .mem = mem, .rank = 3, .chunk = CHUNK};
    fsdpc_tier *tier = NULL;
    if (f)
        config.fs = (fsdpc_fs){.hook = hook, .arg = f};
    CHECK_OK(fsdpc_tier_open(&config, &tier));
    return tier;
}

static size_t counted(fsdpc_mem_kind kind)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(mem, &stats);
    return stats.now_bytes[kind];
}

/* Walks through all rows of extents of floats, and adds `by` to every element it asks for. */
static fsdpc_status add(fsdpc_tier *tier, fsdpc_extent *const *extents, int n, size_t from,
                        float by)
{
    FSDPC_TRY(fsdpc_pass_begin(tier, NULL));
    FSDPC_TRY(fsdpc_pass_add(tier, extents, n));
    FSDPC_TRY(fsdpc_pass_start(tier));
    fsdpc_status status = FSDPC_OK;
    for (size_t at = from, many = 0; status == FSDPC_OK && at < extents[0]->numel; at += many) {
        for (int e = 0; status == FSDPC_OK && e < n; e++) {
            void *data;
            status = fsdpc_pass_at(extents[e], at, &data, &many);
            for (size_t i = 0; status == FSDPC_OK && i < many; i++)
                ((float *)data)[i] += by * (float)(e + 1);
        }
    }
    FSDPC_KEEP_FIRST(status, fsdpc_pass_end(tier));
    return status;
}

static bool all_are(const fsdpc_extent *extent, size_t from, float value)
{
    const float *data = (const float *)extent->memory;
    for (size_t i = 0; i < extent->numel; i++)
        if (data[i] != (i < from ? 0 : value))
            return false;
    return true;
}

static void test_passes_and_memory_agree(double on_disk, size_t numel)
{
    fsdpc_tier *tier = tier_with(NULL);
    fsdpc_extent *x[3];
    size_t kept = fsdpc_tier_kept(numel, on_disk);
    for (int e = 0; e < 3; e++)
        CHECK_OK(fsdpc_extent_create(tier, "exp_avg", NULL, FSDPC_MEM_STATE, numel, sizeof(float),
                                     on_disk, &x[e]));
    CHECK(counted(FSDPC_MEM_STATE) == fsdpc_round_up(3 * kept * sizeof(float), 64));
    CHECK(fsdpc_tier_stats_of(tier).file_bytes ==
          3 * fsdpc_tier_file_bytes(numel, sizeof(float), on_disk));
    for (int step = 0; step < 3; step++)
        CHECK_OK(add(tier, x, 3, 0, 1));
    size_t ring = fsdpc_min_size(numel - kept, CHUNK) * sizeof(float);
    CHECK(counted(FSDPC_MEM_STAGING) == FSDPC_TIER_BUFFERS * fsdpc_round_up(ring, 4096));
    for (int e = 0; e < 3; e++) {
        CHECK_OK(fsdpc_extent_check(x[e], 0, numel));
        CHECK(all_are(x[e], 0, 3 * (float)(e + 1)));
    }
    CHECK_OK(fsdpc_extent_written(x[1], 5, 1));
    ((float *)x[1]->memory)[5] = 6; /* as it is, but by another way */
    ((float *)x[1]->memory)[6] = 6;
    CHECK_OK(add(tier, x, 3, 0, 1));
    CHECK_OK(fsdpc_extent_check(x[1], 0, numel));
    CHECK(all_are(x[1], 0, 8));
    for (int e = 0; e < 3; e++)
        fsdpc_extent_destroy(x[e]);
    CHECK(fsdpc_tier_stats_of(tier).file_bytes == 0 && counted(FSDPC_MEM_STATE) == 0);
    fsdpc_tier_release(tier);
    CHECK(counted(FSDPC_MEM_STAGING) == 0);
}

/* Rows that nobody asks for are read, dropped, and not written. */
static void test_rows_left_out(void)
{
    fsdpc_tier *tier = tier_with(NULL);
    fsdpc_extent *x[2];
    enum { CHUNKS = 9 };
    for (int e = 0; e < 2; e++)
        CHECK_OK(fsdpc_extent_create(tier, "exp_avg", NULL, FSDPC_MEM_STATE, CHUNKS * CHUNK,
                                     sizeof(float), 1, &x[e]));
    CHECK_OK(add(tier, x, 2, 6 * CHUNK + 5, 1));
    CHECK_OK(fsdpc_extent_check(x[1], 0, x[1]->numel));
    CHECK(all_are(x[0], 6 * CHUNK + 5, 1) && all_are(x[1], 6 * CHUNK + 5, 2));
    CHECK(fsdpc_tier_stats_of(tier).written_bytes == (uint64_t)2 * 3 * CHUNK * sizeof(float));
    fsdpc_extent_destroy(x[0]);
    fsdpc_extent_destroy(x[1]);
    fsdpc_tier_release(tier);
}

/* Memory may be written as soon as its array has left an open pass, whatever was being read. */
static void test_an_array_leaves_a_pass(void)
{
    fsdpc_tier *tier = tier_with(NULL);
    fsdpc_extent *x[2];
    enum { CHUNKS = 5 };
    for (int e = 0; e < 2; e++)
        CHECK_OK(fsdpc_extent_create(tier, e ? "exp_avg" : "grad", NULL, FSDPC_MEM_GRAD,
                                     CHUNKS * CHUNK, sizeof(float), 1, &x[e]));
    x[0]->read_only = true;
    for (int step = 0; step < 20; step++) {
        void *data;
        size_t many;
        CHECK_OK(fsdpc_pass_begin(tier, NULL));
        CHECK_OK(fsdpc_pass_add(tier, x, 2));
        CHECK_OK(fsdpc_pass_start(tier));
        CHECK_OK(fsdpc_pass_at(x[1], (size_t)(step % CHUNKS) * CHUNK, &data, &many));
        *(float *)data += 1;
        CHECK_OK(fsdpc_pass_leave(x[0])); /* the rest is not asked for */
        CHECK_OK(fsdpc_extent_written(x[0], 0, x[0]->numel));
        memset(x[0]->memory, step, CHUNKS * CHUNK * sizeof(float));
        fsdpc_extent_seal(x[0]);
        CHECK_OK(fsdpc_pass_end(tier));
    }
    CHECK_OK(fsdpc_extent_check(x[1], 0, x[1]->numel));
    for (int c = 0; c < CHUNKS; c++) /* what it had got in the pass was written */
        CHECK(((float *)x[1]->memory)[c * CHUNK] == 4);
    x[0]->memory[3 * CHUNK * sizeof(float)] ^= 1;
    CHECK_FAILS(fsdpc_extent_check(x[0], 0, x[0]->numel), FSDPC_ERR_OS, "chunk 3 of grad");
    for (int e = 0; e < 2; e++)
        fsdpc_extent_destroy(x[e]);
    fsdpc_tier_release(tier);
}

static void test_a_flipped_bit_is_found(void)
{
    fsdpc_tier *tier = tier_with(NULL);
    fsdpc_extent *x = NULL;
    CHECK_OK(fsdpc_extent_create(tier, "exp_avg of 'layers.3'", NULL, FSDPC_MEM_STATE, 3 * CHUNK,
                                 sizeof(float), 1, &x));
    CHECK_OK(add(tier, &x, 1, 0, 1));
    CHECK_OK(fsdpc_pass_begin(tier, NULL)); /* written */
    x->memory[2 * CHUNK * sizeof(float) + 17] ^= 4;
    CHECK_FAILS(fsdpc_extent_check(x, 2 * CHUNK, 1), FSDPC_ERR_OS,
                "chunk 2 of exp_avg of 'layers.3', in '/tmp/fsdpc-test-tier");
    CHECK_OK(fsdpc_extent_check(x, 0, 2 * CHUNK));
    CHECK_FAILS(add(tier, &x, 1, 0, 1), FSDPC_ERR_OS,
                "rank 3, reading exp_avg of 'layers.3': chunk 2");
    CHECK_FAILS(add(tier, &x, 1, 0, 1), FSDPC_ERR_OS, "chunk 2"); /* it stays so */
    fsdpc_extent_destroy(x);
    fsdpc_tier_release(tier);
}

/* Each call of each kind fails once, the n-th: the step does, or the next look, and nothing hangs.
 */
static void test_each_call_fails(const char *call)
{
    int failed = 0;
    for (int n = 0;; n++) {
        faults f = {.call = NULL};
        fsdpc_tier *tier = tier_with(&f);
        fsdpc_extent *x[2] = {NULL, NULL};
        f.call = call;
        f.left = n;
        fsdpc_status status = FSDPC_OK;
        for (int e = 0; status == FSDPC_OK && e < 2; e++)
            status = fsdpc_extent_create(tier, "exp_avg", NULL, FSDPC_MEM_STATE, CHUNK + 9,
                                         sizeof(float), 1, &x[e]);
        for (int step = 0; status == FSDPC_OK && step < 2; step++)
            status = add(tier, x, 2, 0, 1);
        FSDPC_KEEP_FIRST(status, x[1] ? fsdpc_extent_check(x[1], 0, 1) : FSDPC_OK);
        if (status != FSDPC_OK)
            CHECK(strstr(fsdpc_last_error(), "the test lets") != NULL);
        else
            CHECK(all_are(x[0], 0, 2) && all_are(x[1], 0, 4));
        failed += status != FSDPC_OK;
        fsdpc_extent_destroy(x[0]);
        fsdpc_extent_destroy(x[1]);
        fsdpc_tier_release(tier);
        if (status == FSDPC_OK)
            break;
    }
    CHECK(failed >= 2);
}

static void test_no_disk_is_refused(void)
{
    fsdpc_tier_config config = {.folder = "/dev/shm", .mem = mem};
    fsdpc_tier *tier = NULL;
    if (access("/dev/shm", W_OK) == 0)
        CHECK_FAILS(fsdpc_tier_open(&config, &tier), FSDPC_ERR_VALUE, "tmpfs");
    config.folder = "/no/such/folder";
    CHECK_FAILS(fsdpc_tier_open(&config, &tier), FSDPC_ERR_OS, "'/no/such/folder'");
}

static void test_no_file_is_left(void)
{
    char command[128];
    snprintf(command, sizeof command, "rmdir %s", folder); /* fails if there is anything in it */
    CHECK(system(command) == 0);
}

int main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    CHECK_OK(fsdpc_mem_create(&mem));
    test_passes_and_memory_agree(1, 3 * CHUNK + 77);
    test_passes_and_memory_agree(1, 100);
    test_passes_and_memory_agree(0.5, 3 * CHUNK + 77);
    test_passes_and_memory_agree(0, CHUNK + 64);
    test_rows_left_out();
    test_an_array_leaves_a_pass();
    test_a_flipped_bit_is_found();
    test_each_call_fails("pread");
    test_each_call_fails("pwrite");
    test_each_call_fails("fallocate");
    test_no_disk_is_refused();
    test_no_file_is_left();
    fsdpc_mem_destroy(mem);
    return check_report("test_tier");
}
