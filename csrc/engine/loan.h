/* Loans of the memory that gradients will have.
 *
 * A head computes its weight's gradient in forward, when reduce buffers are idle. A buffer then
 * lends it the place that this gradient will have there, so that a step has no second copy of it.
 * A loan ends in one of these ways:
 *
 *     settled   backward has opened the same buffer: the gradient is in its place
 *     moved     the engine needs the place first: the contents move to private memory
 *     ended     the borrower is freed
 *
 * A loan has no part in the choice of buffers, so ranks fill the same ones even if only some have
 * a loan (they free dropped graphs at different times). Another unit may open a lent buffer and
 * fill it around the loan. Code calls fsdpc_loan_move before it writes a place that may be lent,
 * and before a buffer is posted, as peers read all of it.
 *
 * A lender has one loan at a time. The struct fsdpc_loan is the borrower's, which keeps the lender
 * alive until it has ended the loan.
 */
#ifndef FSDPC_ENGINE_LOAN_H
#define FSDPC_ENGINE_LOAN_H

#include <pthread.h>

#include "device/device.h"

typedef struct fsdpc_loan fsdpc_loan;

typedef struct fsdpc_lender {
    pthread_mutex_t lock; /* against borrowers that are freed on another thread */
    fsdpc_loan *loan;     /* NULL: none */
} fsdpc_lender;

static inline void fsdpc_lender_init(fsdpc_lender *lender)
{
    pthread_mutex_init(&lender->lock, NULL); /* an idle mutex holds nothing: none is destroyed */
    lender->loan = NULL;
}

struct fsdpc_loan {
    fsdpc_lender *lender; /* NULL: nothing was lent */
    fsdpc_device *device;
    const char *param, *unit; /* for errors */
    void **data;              /* the borrower's pointer, which changes if the contents move */
    size_t bytes;
    bool moved; /* the memory is private: the borrower frees it */
};

/* Lends memory: sets *loan->data. The other fields have been filled in. Returns whether it did;
 * if not, there is a loan already. */
bool fsdpc_loan_begin(fsdpc_lender *lender, void *place, fsdpc_loan *loan);
/* Returns the memory if it is `place`; otherwise moves the contents, unless that is done. */
fsdpc_status fsdpc_loan_settle(fsdpc_loan *loan, const void *place, bool *returned_out);
/* Moves the contents of a loan that overlaps this memory. On failure, nothing has changed. */
fsdpc_status fsdpc_loan_move(fsdpc_lender *lender, const void *memory, size_t bytes);
/* Call when the borrower is freed, on any thread. Returns whether it must free the memory. */
bool fsdpc_loan_end(fsdpc_loan *loan);

#endif
