/* The native tape's side of tier/saved.h: which tensors a set holds, and their memory.
 *
 * A set knows the nodes of its region, which tell it when they free their saved tensors. When the
 * set leaves, it lists the tensors in them and the storages below, which it keeps while they are
 * being written. While its arrays are away, these tensors stay in their nodes without a storage;
 * when they are back, they get a new one. A node reads its saved tensors after fsdpc_node_check,
 * which brings the set back.
 */
#include "nn/saved_tensors.h"

#include <pthread.h>
#include <stdlib.h>

#include "nn/frame.h"
#include "nn/tape.h"

typedef struct moved_tensor {
    fsdpc_tensor *t; /* not owned, since it may own a node of the set; NULL: freed */
    size_t array;
    size_t offset; /* of its data in the storage */
    int uses;      /* slots of nodes that hold it */
} moved_tensor;

typedef struct moved_array {
    fsdpc_storage *storage; /* owned while it is being written; NULL while it is away */
    fsdpc_tensor *fresh;    /* owns the memory that the array came back to */
    size_t bytes;
    uint32_t version;
    int tensors; /* that the nodes hold */
    bool stays;
} moved_array;

typedef struct region_set {
    pthread_mutex_t lock; /* against nodes that free their tensors on another thread */
    fsdpc_device *device;
    fsdpc_node **nodes; /* not owned; NULL: its saved tensors are gone */
    size_t n_nodes, nodes_room;
    moved_tensor *tensors;
    size_t n_tensors, tensors_room;
    moved_array *arrays;
    size_t n_arrays, arrays_room;
} region_set;

/* ---- What may leave ---- */

static bool own_memory(const fsdpc_tensor *t)
{
    return t->storage && !t->storage->owner && !t->storage->exported && !t->guard.check &&
           !t->sink.target && !t->grad;
}

static fsdpc_status array_of(region_set *set, fsdpc_tensor *t, size_t *out)
{
    for (*out = 0; *out < set->n_arrays; ++*out)
        if (set->arrays[*out].storage == t->storage)
            return FSDPC_OK;
    FSDPC_TRY(
        fsdpc_frame_grow(&set->arrays, set->n_arrays, &set->arrays_room, sizeof *set->arrays));
    set->arrays[set->n_arrays++] = (moved_array){
        .storage = t->storage, .bytes = t->storage->bytes, .version = t->storage->version};
    return FSDPC_OK;
}

static fsdpc_status list_tensor(region_set *set, fsdpc_tensor *t, uint32_t version)
{
    size_t array, i = 0;
    if (!own_memory(t))
        return FSDPC_OK;
    FSDPC_TRY(array_of(set, t, &array));
    if (version != t->storage->version)
        set->arrays[array].stays = true; /* its node will say so */
    while (i < set->n_tensors && set->tensors[i].t != t)
        i++;
    if (i == set->n_tensors) {
        FSDPC_TRY(fsdpc_frame_grow(&set->tensors, set->n_tensors, &set->tensors_room,
                                   sizeof *set->tensors));
        set->tensors[set->n_tensors++] = (moved_tensor){
            .t = t, .array = array, .offset = (size_t)((char *)t->data - (char *)t->storage->data)};
        set->arrays[array].tensors++;
    }
    set->tensors[i].uses++;
    return FSDPC_OK;
}

/* Offers the arrays to the store and keeps lists of those that leave. */
static void choose(region_set *set, fsdpc_saved_set *of)
{
    for (size_t i = 0; i < set->n_tensors; i++)
        if (atomic_load_explicit(&set->tensors[i].t->refs, memory_order_acquire) !=
            set->tensors[i].uses)
            set->arrays[set->tensors[i].array].stays = true;
    size_t n = 0, kept = 0;
    for (size_t i = 0; i < set->n_arrays; i++) {
        moved_array *array = &set->arrays[i];
        fsdpc_storage *storage = array->storage;
        int refs = atomic_load_explicit(&storage->refs, memory_order_acquire);
        bool leaves = !array->stays && refs == array->tensors &&
                      fsdpc_saved_add(of, storage->data, storage->bytes);
        array->stays = !leaves;
    }
    for (size_t i = 0; i < set->n_tensors; i++)
        if (!set->arrays[set->tensors[i].array].stays)
            set->tensors[kept++] = set->tensors[i];
    set->n_tensors = kept;
    for (size_t i = 0; i < set->n_arrays; i++) {
        if (set->arrays[i].stays)
            continue;
        for (size_t t = 0; t < kept; t++)
            if (set->tensors[t].array == i)
                set->tensors[t].array = n;
        set->arrays[n++] = set->arrays[i];
    }
    set->n_arrays = n;
    for (size_t i = 0; i < n; i++)
        fsdpc_storage_acquire(set->arrays[i].storage);
}

static fsdpc_status list_all(region_set *set)
{
    for (size_t i = 0; i < set->n_nodes; i++)
        for (int s = 0; set->nodes[i] && s < FSDPC_NODE_MAX_SAVED; s++)
            if (set->nodes[i]->saved[s])
                FSDPC_TRY(
                    list_tensor(set, set->nodes[i]->saved[s], set->nodes[i]->saved_version[s]));
    return FSDPC_OK;
}

static fsdpc_status collect(void *arg, fsdpc_saved_set *of)
{
    region_set *set = arg;
    pthread_mutex_lock(&set->lock);
    fsdpc_status status = list_all(set);
    if (status == FSDPC_OK)
        choose(set, of);
    pthread_mutex_unlock(&set->lock);
    return status;
}

/* ---- Moving ---- */

static void drop_storages(region_set *set)
{
    for (size_t i = 0; i < set->n_arrays; i++) {
        fsdpc_storage_release(set->arrays[i].storage);
        set->arrays[i].storage = NULL;
    }
}

static void release(void *arg)
{
    region_set *set = arg;
    pthread_mutex_lock(&set->lock);
    for (size_t i = 0; i < set->n_tensors; i++) {
        fsdpc_tensor *t = set->tensors[i].t;
        if (!t)
            continue;
        if (t->kept)
            atomic_fetch_sub_explicit(&t->storage->kept, 1, memory_order_relaxed);
        t->kept = false;
        fsdpc_storage_release(t->storage);
        t->storage = NULL;
        t->data = NULL;
    }
    pthread_mutex_unlock(&set->lock);
    drop_storages(set);
}

static fsdpc_status restore(void *arg, void **memory_out)
{
    region_set *set = arg;
    fsdpc_status status = FSDPC_OK;
    for (size_t i = 0; status == FSDPC_OK && i < set->n_arrays; i++) {
        moved_array *array = &set->arrays[i];
        status = fsdpc_tensor_create(set->device, FSDPC_U8, 1, &array->bytes, &array->fresh);
        if (status == FSDPC_OK)
            memory_out[i] = array->fresh->data;
    }
    for (size_t i = 0; status != FSDPC_OK && i < set->n_arrays; i++) {
        fsdpc_tensor_release(set->arrays[i].fresh);
        set->arrays[i].fresh = NULL;
    }
    return status;
}

static void drop_lists(region_set *set)
{
    drop_storages(set);
    for (size_t i = 0; i < set->n_arrays; i++)
        fsdpc_tensor_release(set->arrays[i].fresh);
    set->n_tensors = set->n_arrays = 0;
}

static void settle(void *arg, bool restored)
{
    region_set *set = arg;
    pthread_mutex_lock(&set->lock);
    for (size_t i = 0; restored && i < set->n_tensors; i++) {
        const moved_tensor *moved = &set->tensors[i];
        if (!moved->t)
            continue;
        const moved_array *array = &set->arrays[moved->array];
        moved->t->storage = fsdpc_storage_acquire(array->fresh->storage);
        moved->t->storage->version = array->version;
        moved->t->data = (char *)array->fresh->data + moved->offset;
    }
    drop_lists(set);
    pthread_mutex_unlock(&set->lock);
}

static void destroy(void *arg)
{
    region_set *set = arg;
    drop_lists(set);
    pthread_mutex_destroy(&set->lock);
    free(set->nodes);
    free(set->tensors);
    free(set->arrays);
    free(set);
}

/* A node frees its saved tensors: those that no other node of the set has are gone. */
static void forget(void *arg, void *part)
{
    region_set *set = arg;
    const fsdpc_node *node = part;
    pthread_mutex_lock(&set->lock);
    for (size_t i = 0; i < set->n_tensors; i++)
        for (int s = 0; set->tensors[i].t && s < FSDPC_NODE_MAX_SAVED; s++)
            if (node->saved[s] == set->tensors[i].t && --set->tensors[i].uses == 0)
                set->tensors[i].t = NULL;
    set->nodes[node->set_at] = NULL;
    pthread_mutex_unlock(&set->lock);
}

static const fsdpc_saved_ops region_ops = {collect, release, restore, settle, forget, destroy};

/* ---- Regions ---- */

fsdpc_status fsdpc_region_begin(fsdpc_tape *tape, fsdpc_saved *saved, fsdpc_region *out)
{
    *out = (fsdpc_region){0};
    if (!saved || tape->in_region || tape->backward_depth || !tape->grad_enabled)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_saved_begin(saved));
    tape->in_region = true;
    *out = (fsdpc_region){saved, atomic_load_explicit(&tape->next_number, memory_order_relaxed)};
    return FSDPC_OK;
}

static fsdpc_status visit(region_set *set, const fsdpc_region *region, fsdpc_node *node,
                          uint64_t mark)
{
    if (!node || node->number < region->first || node->mark == mark)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_frame_grow(&set->nodes, set->n_nodes, &set->nodes_room, sizeof *set->nodes));
    node->mark = mark;
    set->nodes[set->n_nodes++] = node;
    return FSDPC_OK;
}

/* Lists the nodes below the outputs, which serves as the queue of the walk too. */
static fsdpc_status walk(fsdpc_tape *tape, const fsdpc_region *region, region_set *set, int n,
                         fsdpc_tensor *const *outputs)
{
    uint64_t mark = ++tape->next_mark;
    for (int i = 0; i < n; i++)
        FSDPC_TRY(visit(set, region, outputs[i]->node, mark));
    for (size_t at = 0; at < set->n_nodes; at++)
        for (int i = 0; i < set->nodes[at]->n_inputs; i++)
            FSDPC_TRY(visit(set, region, set->nodes[at]->inputs[i].node, mark));
    return FSDPC_OK;
}

static void tag_nodes(region_set *nodes, fsdpc_saved_set *set)
{
    for (size_t i = 0; i < nodes->n_nodes; i++) {
        fsdpc_node *node = nodes->nodes[i];
        node->set = fsdpc_saved_set_acquire(set);
        node->set_at = i;
    }
}

fsdpc_status fsdpc_region_end(fsdpc_tape *tape, const fsdpc_region *region, const char *unit, int n,
                              fsdpc_tensor *const *outputs)
{
    if (!region->saved)
        return FSDPC_OK;
    tape->in_region = false;
    if (n == 0)
        return FSDPC_OK;
    region_set *nodes = calloc(1, sizeof *nodes);
    if (!nodes)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the saved tensors of unit '%s'", unit);
    pthread_mutex_init(&nodes->lock, NULL);
    nodes->device = tape->device;
    fsdpc_saved_set *set = NULL;
    fsdpc_status status = walk(tape, region, nodes, n, outputs);
    if (status == FSDPC_OK)
        status = fsdpc_saved_end(region->saved, unit, &region_ops, nodes, &set);
    if (status != FSDPC_OK) {
        destroy(nodes);
        return status;
    }
    tag_nodes(nodes, set);
    fsdpc_saved_set_release(set);
    return FSDPC_OK;
}
