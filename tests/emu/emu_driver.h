/* How tests see and change what the emulated driver does with virtual memory.
 *
 * FSDPC_EMU_WINDOWS=0 in the environment takes virtual memory away from a whole process.
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

#endif
