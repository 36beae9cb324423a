/* The state of one wait (`idle` in comm.h). Each waiting thread keeps it on its stack, zeroed before
 * the first call of `idle`. Only communicators over shared memory use it (shm_control.h).
 */
#ifndef FSDPC_COMM_NAP_H
#define FSDPC_COMM_NAP_H

#include <stdbool.h>
#include <stdint.h>

typedef struct fsdpc_nap {
    bool counted;  /* in the bell's `sleepers` */
    uint32_t seen; /* the last value of the bell that the thread read */
} fsdpc_nap;

#endif
