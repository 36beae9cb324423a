/* What a test can ask of the fake NCCL beside NCCL's own functions; looked up by name. */
#ifndef FSDPC_TESTS_EMU_FAKE_NCCL_H
#define FSDPC_TESTS_EMU_FAKE_NCCL_H

typedef enum fake_nccl_fault {
    FAKE_NCCL_WELL,
    FAKE_NCCL_NEVER_BEGINS, /* inits go on for ever */
    FAKE_NCCL_STUCK,        /* that rank's operations never get to the others */
    FAKE_NCCL_REMOTE_ERROR, /* the same, and that rank is told of a remote error */
} fake_nccl_fault;

/* fake_nccl_break: from now on, for the communicators' rank `rank`. */
typedef void (*fake_nccl_break_fn)(fake_nccl_fault fault, int rank);
/* fake_nccl_counts: communicators that are neither destroyed nor aborted; scatters that were not in
 * place; calls that NCCL's rules forbid. */
typedef void (*fake_nccl_counts_fn)(int *open, int *out_of_place, int *forbidden);

#endif
