/* The norm that clipping uses, as a number, for tests in C. */
#ifndef FSDPC_TESTS_CLIP_NORM_H
#define FSDPC_TESTS_CLIP_NORM_H

#include "engine/clip.h"

/* The global 2-norm of all gradients. */
static inline fsdpc_status clip_norm(fsdpc_unit *const *units, int n_units, double *norm_out)
{
    fsdpc_norm_scratch total;
    fsdpc_device *device = fsdpc_unit_device(units[0]);
    fsdpc_status status = fsdpc_norm_scratch_init(&total, device, 1);
    if (status == FSDPC_OK)
        status = fsdpc_clip_norms(units, n_units, 2, total.at, NULL);
    if (status == FSDPC_OK)
        status = fsdpc_norm_read(total.at, 2, device, norm_out);
    fsdpc_norm_scratch_fini(&total);
    return status;
}

#endif
