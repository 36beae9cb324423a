/* Staged shards are their originals, in the file's dtype, and nothing around them is touched. */
#include "ckpt/staging.h"

#include "base/mem.h"
#include "check.h"

enum { SHARDS = 9, FENCE_BYTES = 256, FENCE = 0xab };

static const size_t numels[SHARDS] = {0, 1, 15, 16, 17, 63, 64, 1000, 70001};

static void test_copies(fsdpc_dtype to)
{
    fsdpc_mem *mem;
    CHECK_OK(fsdpc_mem_create(&mem));
    float *source = malloc((numels[SHARDS - 1] + 1) * sizeof *source);
    for (size_t i = 0; i <= numels[SHARDS - 1]; i++)
        source[i] = (float)i * 1.375f - 100.0f;
    fsdpc_ckpt_shard shards[SHARDS];
    for (size_t i = 0; i < SHARDS; i++)
        shards[i] = (fsdpc_ckpt_shard){.memory_dtype = FSDPC_F32,
                                       .file_dtype = to,
                                       .data = source + i % 2, /* aligned to 4 bytes alone */
                                       .numel = numels[i]};
    size_t bytes;
    CHECK_OK(fsdpc_ckpt_staging_bytes(shards, SHARDS, &bytes));
    void *memory;
    CHECK_OK(fsdpc_mem_alloc(mem, FSDPC_MEM_OTHER, bytes + FENCE_BYTES, &memory));
    memset(memory, FENCE, bytes + FENCE_BYTES);
    fsdpc_ckpt_staging(shards, SHARDS, memory);
    for (size_t i = 0; i < SHARDS; i++) {
        const float *from = source + i % 2;
        size_t wrong = 0;
        for (size_t k = 0; k < numels[i]; k++) {
            uint16_t half = fsdpc_f32_to_bf16(from[k]);
            if (to == FSDPC_F32)
                wrong += ((const float *)shards[i].data)[k] != from[k];
            else
                wrong += ((const uint16_t *)shards[i].data)[k] != half;
        }
        CHECK_NOTE(wrong == 0, "%zu of %zu elements", wrong, numels[i]);
        CHECK(shards[i].memory_dtype == to && (uintptr_t)shards[i].data % 64 == 0);
        CHECK((unsigned char *)shards[i].data + numels[i] * fsdpc_dtype_bytes(to) <=
              (unsigned char *)memory + bytes);
    }
    for (size_t i = 0; i < FENCE_BYTES; i++)
        CHECK(((unsigned char *)memory)[bytes + i] == FENCE);
    fsdpc_mem_free(mem, memory);
    free(source);
    fsdpc_mem_destroy(mem);
}

static void test_refused(void)
{
    fsdpc_ckpt_shard shard = {.memory_dtype = FSDPC_F32, .file_dtype = FSDPC_I32, .numel = 1};
    size_t bytes;
    CHECK_FAILS(fsdpc_ckpt_staging_bytes(&shard, 1, &bytes), FSDPC_ERR_DTYPE, "cannot be read as");
}

int main(void)
{
    test_copies(FSDPC_F32);
    test_copies(FSDPC_BF16);
    test_refused();
    return check_report("test_ckpt_staging");
}
