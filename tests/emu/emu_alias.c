/* Races between the addresses of one memory, for ThreadSanitizer, which knows memory by address.
 *
 * Linked into programs under it alone, with --wrap for every name below: what compiled code calls
 * before it reads or writes, and the functions that copy and fill. Each is told the address where
 * the memory was mapped first instead of the one that was used, so that a gather into a slot and a
 * kernel that reads the slot by another address meet. Not compiled with the sanitizer itself.
 */
#include <stddef.h>

#include "emu_driver.h"

#define TOLD(name)                                                                                 \
    void __real_##name(const void *at);                                                            \
    void __wrap_##name(const void *at);                                                            \
    void __wrap_##name(const void *at)                                                             \
    {                                                                                              \
        __real_##name(emu_home(at));                                                               \
    }

TOLD(__tsan_read1)
TOLD(__tsan_read2)
TOLD(__tsan_read4)
TOLD(__tsan_read8)
TOLD(__tsan_read16)
TOLD(__tsan_unaligned_read2)
TOLD(__tsan_unaligned_read4)
TOLD(__tsan_unaligned_read8)
TOLD(__tsan_unaligned_read16)
TOLD(__tsan_write1)
TOLD(__tsan_write2)
TOLD(__tsan_write4)
TOLD(__tsan_write8)
TOLD(__tsan_write16)
TOLD(__tsan_unaligned_write2)
TOLD(__tsan_unaligned_write4)
TOLD(__tsan_unaligned_write8)
TOLD(__tsan_unaligned_write16)

#define COPIED(name)                                                                               \
    void *__real_##name(void *to, const void *from, size_t bytes);                                 \
    void *__wrap_##name(void *to, const void *from, size_t bytes);                                 \
    void *__wrap_##name(void *to, const void *from, size_t bytes)                                  \
    {                                                                                              \
        __real_##name((void *)emu_home(to), emu_home(from), bytes);                                \
        return to;                                                                                 \
    }

COPIED(memcpy)
COPIED(memmove)

void *__real_memset(void *to, int byte, size_t bytes);
void *__wrap_memset(void *to, int byte, size_t bytes);
void *__wrap_memset(void *to, int byte, size_t bytes)
{
    __real_memset((void *)emu_home(to), byte, bytes);
    return to;
}
