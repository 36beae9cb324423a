/* A list of results, taken in the order in which they were kept. */
#include "nn/products.h"

#include <stdlib.h>
#include <string.h>

#include "nn/frame.h"

static bool fits(const fsdpc_tensor *t, fsdpc_dtype dtype, int ndim, const size_t *shape)
{
    return t && t->dtype == dtype && t->ndim == ndim &&
           (ndim == 0 || memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) == 0);
}

fsdpc_status fsdpc_products_result(fsdpc_tape *tape, fsdpc_dtype dtype, int ndim,
                                   const size_t *shape, fsdpc_tensor **out, bool *known_out)
{
    fsdpc_products *products = tape->products;
    *known_out = products && products->replay;
    if (!*known_out)
        return fsdpc_tensor_create(tape->device, dtype, ndim, shape, out);
    fsdpc_product *next = products->at < products->n ? &products->kept[products->at++] : NULL;
    if (next && next->t && next->t->storage->version != next->version)
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a product that a checkpoint keeps was changed in place since: write x = "
                          "x + y for x += y");
    if (!next || !fits(next->t, dtype, ndim, shape)) {
        char text[FSDPC_SHAPE_TEXT];
        return fsdpc_fail(FSDPC_ERR_STATE,
                          "a recomputation needs a product of shape %s of %s that the forward did "
                          "not compute at this place: it must run the same operations",
                          fsdpc_shape_text(ndim, shape, text), fsdpc_dtype_name(dtype));
    }
    if (tape->retain_graph)
        return fsdpc_tensor_detach(next->t, out);
    *out = next->t;
    next->t = NULL;
    return FSDPC_OK;
}

fsdpc_status fsdpc_products_keep(fsdpc_tape *tape, const fsdpc_tensor *y)
{
    fsdpc_products *products = tape->products;
    if (!products || products->replay)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_frame_grow(&products->kept, products->n, &products->capacity,
                               sizeof *products->kept));
    fsdpc_product *next = &products->kept[products->n];
    FSDPC_TRY(fsdpc_tensor_detach(y, &next->t));
    next->version = y->storage->version;
    products->n++;
    return FSDPC_OK;
}

void fsdpc_products_drop(fsdpc_products *products)
{
    for (size_t i = 0; i < products->n; i++)
        fsdpc_tensor_release(products->kept[i].t);
    free(products->kept);
    *products = (fsdpc_products){0};
}
