/* Products that a recomputation does not repeat: selective checkpointing.
 *
 * Products take most of a forward's time, and their results part of its memory. While a list is set
 * in the tape, operations that compute products (linear, matmul, attention) keep their results in
 * it. When the same function is recomputed with the list in replay, they take the results from
 * there, in the same order, instead of computing them.
 */
#ifndef FSDPC_NN_PRODUCTS_H
#define FSDPC_NN_PRODUCTS_H

#include "nn/tape.h"

typedef struct fsdpc_product {
    fsdpc_tensor *t; /* owned; NULL once taken */
    uint32_t version;
} fsdpc_product;

typedef struct fsdpc_products {
    fsdpc_product *kept;
    size_t n, capacity;
    size_t at; /* the next to take */
    bool replay;
} fsdpc_products;

/* Creates the result of a product; *known_out: it comes from the list, with its contents. */
fsdpc_status fsdpc_products_result(fsdpc_tape *tape, fsdpc_dtype dtype, int ndim,
                                   const size_t *shape, fsdpc_tensor **out, bool *known_out);
/* Keeps a result that has been computed, if the tape has a list. */
fsdpc_status fsdpc_products_keep(fsdpc_tape *tape, const fsdpc_tensor *y);
void fsdpc_products_drop(fsdpc_products *products);

#endif
