/* The flat kernel table for each instruction set, and code shared by the CPU's tables.
 *
 * A kernel passes its range to fsdpc_flat_split, which divides it among the team's threads. The
 * split points depend on the number of threads, but results do not: every kernel is elementwise or,
 * for norms, sums whole leaves into an exact accumulator. There are several times more parts than
 * threads, so that one delayed thread does not hold up the others. Each part is long enough to
 * justify waking a thread.
 */
#include "ops/flat_cpu.h"

#include "base/size.h"

#include <stdlib.h>
#include <string.h>

enum { PART_NUMEL_MIN = 1 << 15, PARTS_PER_THREAD = 4 };

const fsdpc_flat_ops *fsdpc_flat_ops_cpu(fsdpc_isa isa)
{
#if defined(__x86_64__)
    if (isa >= FSDPC_ISA_AVX512)
        return &fsdpc_flat_ops_avx512;
    if (isa >= FSDPC_ISA_AVX2)
        return &fsdpc_flat_ops_avx2;
#endif
    (void)isa;
    return &fsdpc_flat_ops_portable;
}

fsdpc_status fsdpc_flat_same_bytes(const void *a, const void *b, size_t bytes, bool *equal_io,
                                   fsdpc_stream *stream)
{
    if (!stream->device->remote) {
        *equal_io = *equal_io && memcmp(a, b, bytes) == 0;
        return FSDPC_OK;
    }
    char *copies = malloc(fsdpc_max_size(2 * bytes, 1));
    if (!copies)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory to compare %zu bytes", bytes);
    fsdpc_status st = fsdpc_device_copy(stream->device, copies, a, bytes, NULL);
    if (st == FSDPC_OK)
        st = fsdpc_device_copy(stream->device, copies + bytes, b, bytes, NULL);
    if (st == FSDPC_OK)
        *equal_io = *equal_io && memcmp(copies, copies + bytes, bytes) == 0;
    free(copies);
    return st;
}

typedef struct split {
    fsdpc_flat_range_fn fn;
    void *arg;
    size_t numel, part_numel;
} split;

static void split_part(void *arg, size_t part)
{
    const split *s = arg;
    size_t begin = part * s->part_numel;
    s->fn(s->arg, begin, fsdpc_min_size(begin + s->part_numel, s->numel));
}

void fsdpc_flat_split(fsdpc_stream *stream, size_t numel, size_t unit, fsdpc_flat_range_fn fn,
                      void *arg)
{
    fsdpc_team *team = stream->device->team;
    size_t parts = (size_t)fsdpc_team_threads(team) * PARTS_PER_THREAD;
    parts = fsdpc_min_size(parts, numel / PART_NUMEL_MIN);
    if (numel == 0)
        return;
    if (fsdpc_team_threads(team) == 1 || parts <= 1) {
        fn(arg, 0, numel);
        return;
    }
    split s = {fn, arg, numel, fsdpc_round_up(fsdpc_ceil_div(numel, parts), unit)};
    fsdpc_team_run(team, fsdpc_ceil_div(numel, s.part_numel), split_part, &s);
}
