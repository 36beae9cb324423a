/* Collectives over shared memory, in both kinds of ranks. */
#include "comm_suite.h"

int main(void)
{
    for (int size = 1; size <= 4; size++) {
        ranks_run_threads(size, everything, &(rank_options){.async = false, .spin = size <= 2});
        ranks_run_threads(size, everything, &(rank_options){.async = true});
        ranks_run_processes(size, everything, &(rank_options){.async = size == 3});
    }
    return check_report("test_comm_shm_coll");
}
