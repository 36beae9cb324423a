/* Counted memory: alignment, reuse, counts, peaks, trimming, threads, refusals. */
#include <pthread.h>

#include "base/mem.h"
#include "base/size.h"
#include "check.h"

static int aligned(const void *pointer, size_t to)
{
    return (size_t)pointer % to == 0;
}

static void test_sizes(void)
{
    fsdpc_mem *mem;
    fsdpc_mem_stats stats;
    CHECK_OK(fsdpc_mem_create(&mem));
    size_t wrong = 0;
    for (size_t power = 0; power <= 23; power++) {
        for (int step = -1; step <= 1; step++) {
            size_t bytes = ((size_t)1 << power) + (size_t)step;
            void *block;
            CHECK_OK(fsdpc_mem_alloc(mem, FSDPC_MEM_OTHER, bytes, &block));
            wrong += !aligned(block, bytes >= (size_t)4 << 20 ? 2 << 20 : 64);
            memset(block, 0x5a, bytes); /* all of it is ours: AddressSanitizer watches */
            fsdpc_mem_stats_read(mem, &stats);
            wrong += stats.total_now_bytes != fsdpc_round_up(bytes, 64);
            fsdpc_mem_free(mem, block);
        }
    }
    CHECK_NOTE(wrong == 0, "%zu", wrong);
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.total_now_bytes == 0 && stats.total_peak_bytes == (8 << 20) + 64);
    /* a class is at most an eighth larger than the request, from 512 bytes up */
    fsdpc_mem_trim(mem);
    for (size_t bytes = 512; bytes < 100000; bytes = bytes * 9 / 8 + 1) {
        void *block;
        CHECK_OK(fsdpc_mem_alloc(mem, FSDPC_MEM_OTHER, bytes, &block));
        fsdpc_mem_free(mem, block);
        fsdpc_mem_stats_read(mem, &stats);
        CHECK_NOTE(stats.cached_bytes >= bytes && stats.cached_bytes <= bytes + bytes / 8 + 64,
                   "%zu in a block of %zu", bytes, stats.cached_bytes);
        fsdpc_mem_trim(mem);
    }
    fsdpc_mem_destroy(mem);
}

static void test_reuse(void)
{
    fsdpc_mem *mem;
    fsdpc_mem_stats before, after;
    CHECK_OK(fsdpc_mem_create(&mem));
    const size_t sizes[] = {0, 1, 100, 5000, 70000, 5 << 20};
    void *blocks[6];
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < 6; i++)
            CHECK_OK(fsdpc_mem_alloc(mem, FSDPC_MEM_ACTIVATION, sizes[i], &blocks[i]));
        CHECK(blocks[0] != NULL && blocks[0] != blocks[1]);
        if (turn == 0)
            fsdpc_mem_stats_read(mem, &before);
        fsdpc_mem_stats_read(mem, &after);
        CHECK(after.cached_bytes == 0); /* all is out again */
        for (int i = 0; i < 6; i++)
            fsdpc_mem_free(mem, blocks[i]);
    }
    fsdpc_mem_stats_read(mem, &after);
    CHECK(before.system_allocs == 6 &&
          after.system_allocs == 6); /* steady state asks for nothing */
    CHECK(after.cached_bytes >= 5 << 20);
    void *again;
    CHECK_OK(
        fsdpc_mem_alloc(mem, FSDPC_MEM_UNSHARDED, 4999, &again)); /* same class, another size */
    CHECK(again == blocks[3]);
    fsdpc_mem_free(mem, again);
    fsdpc_mem_trim(mem);
    fsdpc_mem_stats_read(mem, &after);
    CHECK(after.cached_bytes == 0);
    fsdpc_mem_free(mem, NULL);
    fsdpc_mem_destroy(mem);
    fsdpc_mem_destroy(NULL);
}

static void test_counts(void)
{
    fsdpc_mem *mem;
    fsdpc_mem_stats stats;
    void *a, *b;
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_mem_alloc(mem, FSDPC_MEM_GRAD, 100, &a));
    CHECK_OK(fsdpc_mem_alloc(mem, FSDPC_MEM_STATE, 1000, &b));
    fsdpc_mem_free(mem, a);
    fsdpc_mem_count(mem, FSDPC_MEM_UNSHARDED, 512);
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_GRAD] == 0 && stats.peak_bytes[FSDPC_MEM_GRAD] == 128);
    CHECK(stats.now_bytes[FSDPC_MEM_STATE] == 1024 && stats.now_bytes[FSDPC_MEM_UNSHARDED] == 512);
    CHECK(stats.total_now_bytes == 1536 && stats.total_peak_bytes == 1536);
    fsdpc_mem_count(mem, FSDPC_MEM_UNSHARDED, -512);
    fsdpc_mem_peak_reset(mem);
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.total_peak_bytes == 1024 && stats.peak_bytes[FSDPC_MEM_UNSHARDED] == 0);
    CHECK(stats.peak_bytes[FSDPC_MEM_STATE] == 1024);
    uint64_t asked = stats.system_allocs;
    fsdpc_mem_count_system_alloc(mem);
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.system_allocs == asked + 1);
    fsdpc_mem_free(mem, b);
    CHECK(strcmp(fsdpc_mem_kind_name(FSDPC_MEM_ACTIVATION), "activation") == 0);
    CHECK(strcmp(fsdpc_mem_kind_name(FSDPC_MEM_COUNT), "unknown category") == 0);
    fsdpc_mem_destroy(mem);
}

static void test_refusals(void)
{
    fsdpc_mem *mem;
    fsdpc_mem_stats stats;
    void *block = &mem;
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_FAILS(fsdpc_mem_alloc(mem, FSDPC_MEM_MASTER, SIZE_MAX, &block), FSDPC_ERR_NOMEM,
                "'master'");
    CHECK_FAILS(fsdpc_mem_alloc(mem, FSDPC_MEM_MASTER, (size_t)1 << 60, &block), FSDPC_ERR_NOMEM,
                "1152921504606846976 bytes");
    CHECK(block == &mem);
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.total_now_bytes == 0 && stats.system_allocs == 0);
    fsdpc_mem_destroy(mem);
}

static void *churn(void *arg)
{
    fsdpc_mem *mem = arg;
    unsigned char *blocks[16] = {0};
    size_t wrong = 0;
    for (size_t turn = 0; turn < 4000; turn++) {
        size_t slot = turn * 7 % 16, bytes = 64 + turn * 37 % 3000;
        if (blocks[slot])
            wrong += blocks[slot][0] != (unsigned char)slot;
        fsdpc_mem_free(mem, blocks[slot]);
        void *block = NULL;
        wrong += fsdpc_mem_alloc(mem, FSDPC_MEM_OTHER, bytes, &block) != FSDPC_OK;
        blocks[slot] = block;
        memset(block, (int)slot, bytes);
    }
    for (int i = 0; i < 16; i++)
        fsdpc_mem_free(mem, blocks[i]);
    return wrong ? mem : NULL;
}

static void test_threads(void)
{
    fsdpc_mem *mem;
    fsdpc_mem_stats stats;
    pthread_t threads[3];
    CHECK_OK(fsdpc_mem_create(&mem));
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, mem) == 0);
    for (int i = 0; i < 3; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        CHECK(wrong == NULL);
    }
    fsdpc_mem_stats_read(mem, &stats);
    CHECK(stats.total_now_bytes == 0 && stats.system_allocs > 0);
    fsdpc_mem_destroy(mem);
}

int main(void)
{
    test_sizes();
    test_reuse();
    test_counts();
    test_refusals();
    test_threads();
    return check_report("mem");
}
