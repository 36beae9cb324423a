/* Copies data without going through the caches if the processor supports non-temporal stores.
 *
 * The C library's memcpy also bypasses the caches, but only for calls of tens of megabytes, and
 * shards are smaller. Every x86-64 processor has SSE2; other processors use memcpy. Shards begin at
 * multiples of 64 bytes, so whole lines are stored.
 */
#include "ckpt/staging.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/size.h"
#include "ckpt/convert.h"

enum { LINE_BYTES = 64 };

static size_t room_of(const fsdpc_ckpt_shard *shard)
{
    return fsdpc_round_up(shard->numel * fsdpc_dtype_bytes(shard->file_dtype), LINE_BYTES);
}

fsdpc_status fsdpc_ckpt_staging_bytes(const fsdpc_ckpt_shard *shards, size_t n_shards,
                                      size_t *bytes_out)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n_shards; i++) {
        FSDPC_TRY(fsdpc_ckpt_convert_check(shards[i].file_dtype, shards[i].memory_dtype));
        bytes += room_of(&shards[i]);
    }
    *bytes_out = bytes;
    return FSDPC_OK;
}

/* `dst` is aligned to a cache line. */
static void copy_past_caches(void *dst, const void *src, size_t bytes)
{
    size_t done = 0;
#ifdef __SSE2__
    for (; done + LINE_BYTES <= bytes; done += LINE_BYTES) {
        const __m128i *from = (const __m128i *)((const char *)src + done);
        __m128i *to = (__m128i *)((char *)dst + done);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
#endif
    if (done < bytes)
        memcpy((char *)dst + done, (const char *)src + done, bytes - done);
}

void fsdpc_ckpt_staging(fsdpc_ckpt_shard *shards, size_t n_shards, void *memory)
{
    unsigned char *at = memory;
    for (size_t i = 0; i < n_shards; i++) {
        fsdpc_ckpt_shard *shard = &shards[i];
        if (shard->file_dtype == shard->memory_dtype)
            copy_past_caches(at, shard->data, shard->numel * fsdpc_dtype_bytes(shard->file_dtype));
        else
            fsdpc_ckpt_convert(at, shard->file_dtype, shard->data, shard->memory_dtype,
                               shard->numel);
        shard->data = at;
        shard->memory_dtype = shard->file_dtype;
        at += room_of(shard);
    }
#ifdef __SSE2__
    _mm_sfence(); /* orders streamed stores before the signal to another thread */
#endif
}
