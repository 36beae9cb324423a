/* Sets of saved tensors: what comes back is what left, and memory follows the calls, not the disk. */
#include "tier/saved_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/size.h"
#include "check.h"
#include "fs_faults.h"

enum { SETS = 5, ARRAYS = 3, CHUNK = 1 << 20 };

static char folder[] = "/tmp/fsdpc-test-saved-XXXXXX";
static fsdpc_mem *mem;

static fsdpc_saved *store_with(faults *f, double part)
{
    fsdpc_tier_config config = {.folder = folder, .mem = mem, .rank = 3};
    fsdpc_tier *tier;
    fsdpc_saved *saved = NULL;
    if (f)
        config.fs = (fsdpc_fs){.hook = hook, .arg = f};
    CHECK_OK(fsdpc_tier_open(&config, &tier));
    fsdpc_saved_mover *disk = NULL;
    CHECK_OK(fsdpc_saved_disk_create(tier, mem, &disk));
    CHECK_OK(fsdpc_saved_open(disk, part, &saved));
    fsdpc_tier_release(tier);
    return saved;
}

/* ---- An owner ---- */

static const size_t sizes[ARRAYS] = {2 * CHUNK + 5000, 4096, 9001};

typedef struct owner {
    int number;
    unsigned char *arrays[ARRAYS];
    bool left[ARRAYS];
    bool settled, restored;
    void *forgotten;
} owner;

static const owner *set_owner(const fsdpc_saved_set *set)
{
    return set->arg;
}

static _Atomic int alive; /* arrays in memory */

static unsigned char *make(size_t bytes)
{
    alive++;
    return malloc(bytes);
}

static void drop(unsigned char **array)
{
    alive -= *array != NULL;
    free(*array);
    *array = NULL;
}

static unsigned char byte_of(int number, int array, size_t at)
{
    return (unsigned char)((size_t)(number * 7 + array * 3) + at * 31);
}

static fsdpc_status collect(void *arg, fsdpc_saved_set *set)
{
    owner *o = arg;
    for (int i = 0; i < ARRAYS; i++)
        o->left[i] = fsdpc_saved_add(set, o->arrays[i], sizes[i]);
    return FSDPC_OK;
}

static void release(void *arg)
{
    owner *o = arg;
    for (int i = 0; i < ARRAYS; i++)
        if (o->left[i])
            drop(&o->arrays[i]);
}

static fsdpc_status restore(void *arg, void **memory_out)
{
    owner *o = arg;
    for (int i = 0; i < ARRAYS; i++)
        if (o->left[i])
            *memory_out++ = o->arrays[i] = make(sizes[i]);
    return FSDPC_OK;
}

static void settle(void *arg, bool restored)
{
    owner *o = arg;
    o->settled = true;
    o->restored = restored;
}

static void destroy(void *arg)
{
    owner *o = arg;
    for (int i = 0; i < ARRAYS; i++)
        drop(&o->arrays[i]);
    free(o);
}

static void forget(void *arg, void *part)
{
    ((owner *)arg)->forgotten = part;
}

static const fsdpc_saved_ops ops = {collect, release, restore, settle, forget, destroy};

static fsdpc_status forward(fsdpc_saved *saved, int number, fsdpc_saved_set **out)
{
    FSDPC_TRY(fsdpc_saved_begin(saved));
    owner *o = calloc(1, sizeof *o);
    o->number = number;
    for (int i = 0; i < ARRAYS; i++) {
        o->arrays[i] = make(sizes[i]);
        for (size_t at = 0; at < sizes[i]; at++)
            o->arrays[i][at] = byte_of(number, i, at);
    }
    char unit[24];
    snprintf(unit, sizeof unit, "blocks.%d", number);
    fsdpc_status status = fsdpc_saved_end(saved, unit, &ops, o, out);
    if (status != FSDPC_OK)
        destroy(o);
    return status;
}

static bool whole(const fsdpc_saved_set *set)
{
    const owner *o = set_owner(set);
    for (int i = 0; i < ARRAYS; i++)
        for (size_t at = 0; at < sizes[i]; at++)
            if (!o->arrays[i] || o->arrays[i][at] != byte_of(o->number, i, at))
                return false;
    return true;
}

static uint64_t set_bytes(void)
{
    uint64_t bytes = 0;
    for (int i = 0; i < ARRAYS; i++)
        bytes += fsdpc_round_up(sizes[i], 4096);
    return bytes;
}

/* ---- Tests ---- */

/* All sets but the last two are away after forward, and one of them returns ahead of its use. */
static void test_the_schedule(bool plan)
{
    fsdpc_saved *saved = plan ? NULL : store_with(NULL, 1);
    if (plan)
        CHECK_OK(fsdpc_saved_open(NULL, 1, &saved));
    for (int step = 0; step < 3; step++) {
        fsdpc_saved_set *sets[SETS];
        for (int i = 0; i < SETS; i++) {
            CHECK_OK(forward(saved, i, &sets[i]));
            CHECK(alive == ARRAYS * (i == 0 ? 1 : 2));
        }
        for (int i = SETS - 1; i >= 0; i--) {
            CHECK_OK(fsdpc_saved_need(sets[i]));
            CHECK_OK(fsdpc_saved_need(sets[i]));
            CHECK(plan || whole(sets[i]));
            const owner *o = set_owner(sets[i]);
            CHECK(o->restored == (i < SETS - 2));
            CHECK(alive == ARRAYS * (i > 0 ? 2 : 1));
            fsdpc_saved_set_release(sets[i]);
        }
        CHECK(alive == 0 && fsdpc_saved_away_bytes(saved) == (SETS - 1) * set_bytes());
    }
    fsdpc_saved_release(saved);
}

/* A set stays if backward comes before it leaves, or while it is being written. */
static void test_backward_at_once(void)
{
    fsdpc_saved *saved = store_with(NULL, 1);
    for (int i = 0; i < 20; i++) {
        fsdpc_saved_set *first, *second;
        CHECK_OK(forward(saved, 1, &first));
        CHECK_OK(forward(saved, 2, &second)); /* the first is being written */
        CHECK_OK(fsdpc_saved_need(i % 2 ? first : second));
        CHECK_OK(fsdpc_saved_need(i % 2 ? second : first));
        CHECK(whole(first) && whole(second));
        const owner *o = set_owner(first);
        CHECK(!o->restored);
        CHECK_OK(fsdpc_saved_begin(saved));
        CHECK(whole(first) && alive == 2 * ARRAYS);
        fsdpc_saved_forget(fsdpc_saved_set_acquire(first), second);
        CHECK(set_owner(first)->forgotten == second);
        fsdpc_saved_set_release(first);
        fsdpc_saved_set_release(second);
    }
    fsdpc_saved_release(saved);
}

/* Graphs that no backward uses, in each state of their sets; the file does not grow. */
static void test_graphs_that_are_dropped(void)
{
    fsdpc_saved *saved = store_with(NULL, 1);
    for (int round = 0; round < 20; round++) {
        fsdpc_saved_set *sets[SETS];
        for (int i = 0; i < SETS; i++)
            CHECK_OK(forward(saved, i, &sets[i]));
        if (round % 4 == 1)
            CHECK_OK(fsdpc_saved_need(sets[2])); /* so that the one before it returns */
        for (int i = 0; i < SETS; i++)
            fsdpc_saved_set_release(sets[round % 2 ? i : SETS - 1 - i]);
        CHECK(alive == 0);
        CHECK(fsdpc_saved_away_bytes(saved) == (SETS - 1) * set_bytes());
    }
    fsdpc_saved_release(saved);
}

/* Two graphs at once: the older one's sets come back from below the newer one's. */
static void test_two_graphs(void)
{
    fsdpc_saved *saved = store_with(NULL, 1);
    fsdpc_saved_set *sets[2 * SETS];
    for (int i = 0; i < 2 * SETS; i++)
        CHECK_OK(forward(saved, i, &sets[i]));
    for (int graph = 0; graph < 2; graph++)
        for (int i = SETS - 1; i >= 0; i--) {
            fsdpc_saved_set *set = sets[graph * SETS + i];
            CHECK_OK(fsdpc_saved_need(set));
            CHECK(whole(set));
            fsdpc_saved_set_release(set);
        }
    CHECK(alive == 0);
    fsdpc_saved_release(saved);
}

static void *drop_all(void *arg)
{
    fsdpc_saved_set **sets = arg;
    for (int i = 0; i < SETS; i++)
        fsdpc_saved_set_release(sets[i]);
    return NULL;
}

/* While forwards go on, in which the sets leave that another thread drops. */
static void test_graphs_dropped_on_another_thread(void)
{
    fsdpc_saved *saved = store_with(NULL, 1);
    fsdpc_saved_set *sets[2][SETS];
    pthread_t thread;
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < SETS; i++)
            CHECK_OK(forward(saved, i, &sets[round % 2][i]));
        if (round > 0)
            pthread_join(thread, NULL);
        CHECK(pthread_create(&thread, NULL, drop_all, sets[round % 2]) == 0);
    }
    pthread_join(thread, NULL);
    CHECK(alive == 0);
    fsdpc_saved_release(saved);
}

static void test_a_fraction(void)
{
    fsdpc_saved *saved = store_with(NULL, 0.5);
    for (int step = 0; step < 2; step++) {
        fsdpc_saved_set *sets[3];
        for (int i = 0; i < 3; i++)
            CHECK_OK(forward(saved, i, &sets[i]));
        const owner *first = set_owner(sets[0]), *second = set_owner(sets[1]);
        CHECK(!first->left[0] && first->left[1] && !first->left[2]); /* the 2nd, 4th and 6th */
        CHECK(second->left[0] && !second->left[1] && second->left[2]);
        for (int i = 2; i >= 0; i--) {
            CHECK_OK(fsdpc_saved_need(sets[i]));
            CHECK(whole(sets[i]));
            fsdpc_saved_set_release(sets[i]);
        }
    }
    fsdpc_saved_release(saved);
}

static void test_failures(void)
{
    static const char *calls[] = {"fallocate", "pwrite", "pread"};
    for (int c = 0; c < 3; c++) {
        faults f = {.call = calls[c], .left = c == 0 ? 2 : 1}; /* creating the files calls it too */
        fsdpc_saved *saved = store_with(&f, 1);
        fsdpc_saved_set *sets[SETS] = {NULL};
        fsdpc_status status = FSDPC_OK;
        int made = 0;
        for (; status == FSDPC_OK && made < SETS; made += status == FSDPC_OK)
            status = forward(saved, made, &sets[made]);
        for (int i = made - 1; status == FSDPC_OK && i >= 0; i--)
            status = fsdpc_saved_need(sets[i]);
        CHECK_NOTE(status == FSDPC_ERR_OS, "%s", calls[c]);
        CHECK(strstr(fsdpc_last_error(), calls[c]) != NULL);
        if (c > 0) {
            CHECK(strstr(fsdpc_last_error(), c == 1
                                                 ? "rank 3, writing saved tensors of unit 'blocks."
                                                 : "rank 3, reading saved tensors of unit "
                                                   "'blocks.") != NULL);
        }
        if (c == 2)
            CHECK_FAILS(fsdpc_saved_need(sets[0]), FSDPC_ERR_OS, "saved tensors of unit 'blocks.");
        for (int i = 0; i < made; i++)
            fsdpc_saved_set_release(sets[i]);
        CHECK(alive == 0);
        fsdpc_saved_release(saved);
    }
}

int main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    CHECK_OK(fsdpc_mem_create(&mem));
    test_the_schedule(false);
    test_the_schedule(true);
    test_backward_at_once();
    test_graphs_that_are_dropped();
    test_two_graphs();
    test_graphs_dropped_on_another_thread();
    test_a_fraction();
    test_failures();
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.total_now_bytes == 0);
    fsdpc_mem_destroy(mem);
    CHECK(rmdir(folder) == 0); /* no file had a name */
    return check_report("test_saved");
}
