/* What a test can ask of the fake NCCL beside NCCL's own functions; looked up by name. */
#ifndef FSDPC_TESTS_EMU_FAKE_NCCL_H
#define FSDPC_TESTS_EMU_FAKE_NCCL_H

typedef enum fake_nccl_fault {
    FAKE_NCCL_WELL,
    FAKE_NCCL_NEVER_BEGINS, /* inits go on for ever */
    FAKE_NCCL_STUCK,        /* that rank's operations never get to the others */
    FAKE_NCCL_REMOTE_ERROR, /* the same, and that rank is told of a remote error */
    FAKE_NCCL_NO_WINDOW,    /* that rank's communicator fails when it registers a window */
    FAKE_NCCL_CLINGS,       /* as stuck, and no abort ends it, as one by copy engines */
} fake_nccl_fault;

/* fake_nccl_break: from now on, for the communicators' rank `rank`; -1: for all of them. */
typedef void (*fake_nccl_break_fn)(fake_nccl_fault fault, int rank);
/* fake_nccl_counts: communicators that are neither destroyed nor aborted; scatters that were not in
 * place; calls that NCCL's rules forbid. */
typedef void (*fake_nccl_counts_fn)(int *open, int *out_of_place, int *forbidden);

/* Registered memory that lives; calls that gathered in place in such memory, and elsewhere. */
typedef struct fake_nccl_memory {
    int windows, buffers, in_place, elsewhere;
} fake_nccl_memory;

typedef void (*fake_nccl_registered_fn)(fake_nccl_memory *out);
/* fake_nccl_hide_windows: from now on NCCL makes none, as of GPUs that do not reach each other. */
typedef void (*fake_nccl_hide_windows_fn)(int yes);

typedef void (*fake_nccl_set_version_fn)(int version); /* fake_nccl_set_version: 23007 at first */

#endif
