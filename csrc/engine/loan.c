#include "engine/loan.h"

#include <stdint.h>

bool fsdpc_loan_begin(fsdpc_lender *lender, void *place, fsdpc_loan *loan)
{
    pthread_mutex_lock(&lender->lock);
    bool lends = !lender->loan;
    if (lends) {
        lender->loan = loan;
        loan->lender = lender;
        *loan->data = place;
    }
    pthread_mutex_unlock(&lender->lock);
    return lends;
}

/* The caller holds the lock. */
static fsdpc_status move_contents(fsdpc_lender *lender)
{
    fsdpc_loan *loan = lender->loan;
    fsdpc_stream *main = fsdpc_device_main(loan->device);
    void *own;
    fsdpc_status status = fsdpc_device_alloc(loan->device, FSDPC_MEM_ACTIVATION, loan->bytes, &own);
    if (status != FSDPC_OK)
        return fsdpc_fail(status,
                          "no memory for the gradient of parameter '%s' of unit '%s', of "
                          "%zu bytes, which waits for backward",
                          loan->param, loan->unit, loan->bytes);
    status = fsdpc_device_copy(loan->device, own, *loan->data, loan->bytes, main);
    if (status != FSDPC_OK) {
        fsdpc_device_free(loan->device, own);
        return status;
    }
    *loan->data = own;
    loan->moved = true;
    lender->loan = NULL;
    return FSDPC_OK;
}

fsdpc_status fsdpc_loan_settle(fsdpc_loan *loan, const void *place, bool *returned_out)
{
    fsdpc_lender *lender = loan->lender;
    fsdpc_status status = FSDPC_OK;
    pthread_mutex_lock(&lender->lock);
    *returned_out = lender->loan == loan && *loan->data == place;
    if (*returned_out)
        lender->loan = NULL;
    else if (lender->loan == loan)
        status = move_contents(lender);
    pthread_mutex_unlock(&lender->lock);
    return status;
}

fsdpc_status fsdpc_loan_move(fsdpc_lender *lender, const void *memory, size_t bytes)
{
    fsdpc_status status = FSDPC_OK;
    pthread_mutex_lock(&lender->lock);
    if (lender->loan) {
        uintptr_t lent = (uintptr_t)*lender->loan->data, first = (uintptr_t)memory;
        if (lent - first < bytes || first - lent < lender->loan->bytes)
            status = move_contents(lender);
    }
    pthread_mutex_unlock(&lender->lock);
    return status;
}

bool fsdpc_loan_end(fsdpc_loan *loan)
{
    fsdpc_lender *lender = loan->lender;
    if (!lender)
        return false;
    pthread_mutex_lock(&lender->lock);
    if (lender->loan == loan)
        lender->loan = NULL;
    pthread_mutex_unlock(&lender->lock);
    return loan->moved;
}
