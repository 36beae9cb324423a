/* Runs the threads of a grid, block after block, on the calling thread: see emu_fibers.cpp. */
#ifndef FSDPC_TESTS_EMU_EMU_FIBERS_H
#define FSDPC_TESTS_EMU_EMU_FIBERS_H

#include <functional>

enum { EMU_SHARED_BYTES = 228 << 10 }; /* that a block may have */

/* In descending order of blocks and threads, from now on? */
void emu_fibers_descend(bool yes);

void emu_run_grid(unsigned grid, unsigned threads, const std::function<void()> &thread);

#endif
