/* How tests see and change what the emulated driver does with virtual memory.
 */
#ifndef FSDPC_TESTS_EMU_EMU_DRIVER_H
#define FSDPC_TESTS_EMU_EMU_DRIVER_H

#include <stddef.h>

typedef struct emu_driver_counts {
    int handles, ranges, mappings; /* that live */
    size_t bytes;                  /* of the handles */
    int forbidden;                 /* calls that broke CUDA's rules so far */
} emu_driver_counts;

emu_driver_counts emu_driver_look(void);

/* After so many more calls that make something, the next one says that there is no memory; -1:
 * never. */
void emu_driver_fail_after(int calls);
void emu_driver_hide_windows(int yes);
/* All calls of a kind fail with that result; 0: they succeed again. */
typedef enum emu_driver_call { EMU_CREATE, EMU_MAP, EMU_CALLS } emu_driver_call;
void emu_driver_fail(emu_driver_call call, int result);

/* Where the memory at an address was mapped first; the address itself of memory that is not the
 * driver's. */
const void *emu_home(const void *at);
typedef const void *(*emu_home_fn)(const void *at);
/* Whether memory of at least so many bytes is mapped there, and was first. */
int emu_driver_is_home(const void *at, size_t bytes);
typedef int (*emu_driver_is_home_fn)(const void *at, size_t bytes);

#endif
