/* The schedule of saved tensors, and where each set is in the other place.
 *
 *     HERE -> LEAVING -> AWAY -> RETURNING -> BACK
 *
 * A backward that needs a set early takes the short way: one that has not begun to leave stays, and
 * writing one is cancelled. Both are then BACK, with the memory that they had.
 *
 * Sets that are not in memory form a list in the order in which they left, from which backward
 * takes the newest first. Each has a part of the place, at the lowest offset that is free. If every
 * backward follows its forward, this is a stack, whose height in the first step is the place's size
 * in all steps.
 *
 * A graph may be dropped on any thread, and by the garbage collector inside a function of the
 * owner. The store's calls therefore hold references to the sets that they move, and the last
 * release of a set only takes it out of the lists and waits for its copies.
 */
#include "tier/saved.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ref.h"
#include "base/size.h"
#include "tier/saved_internal.h"

struct fsdpc_saved {
    _Atomic int refs;
    fsdpc_saved_mover *mover; /* NULL: a plan */
    double part;
    pthread_mutex_t busy; /* held by calls that move sets, during waits and the owner's functions */
    pthread_mutex_t lock; /* guards the list and the three sets below; never held during those */
    uint64_t away_bytes;
    uint64_t seen;         /* arrays offered since no set was alive */
    fsdpc_saved_set *last; /* whose forward ended last; not owned, nor are those below */
    fsdpc_saved_set *leaving;
    fsdpc_saved_set *newest; /* of the sets with a part of the place */
};

fsdpc_status fsdpc_saved_open(fsdpc_saved_mover *mover, double part, fsdpc_saved **out)
{
    fsdpc_saved *saved = calloc(1, sizeof *saved);
    if (!saved) {
        if (mover)
            mover->destroy(mover);
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for a store of saved tensors");
    }
    saved->refs = 1;
    saved->part = part;
    saved->mover = mover;
    pthread_mutex_init(&saved->busy, NULL);
    pthread_mutex_init(&saved->lock, NULL);
    *out = saved;
    return FSDPC_OK;
}

fsdpc_saved *fsdpc_saved_acquire(fsdpc_saved *saved)
{
    atomic_fetch_add_explicit(&saved->refs, 1, memory_order_relaxed);
    return saved;
}

void fsdpc_saved_release(fsdpc_saved *saved)
{
    /* acq_rel: the last holder sees all of the others' writes. */
    if (!saved || atomic_fetch_sub_explicit(&saved->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (saved->mover)
        saved->mover->destroy(saved->mover);
    pthread_mutex_destroy(&saved->busy);
    pthread_mutex_destroy(&saved->lock);
    free(saved);
}

uint64_t fsdpc_saved_away_bytes(const fsdpc_saved *saved)
{
    return saved->away_bytes;
}

/* ---- The place ---- */

/* Gives a set the lowest part that is free, and makes it the newest. */
static fsdpc_status place(fsdpc_saved *saved, fsdpc_saved_set *set)
{
    uint64_t at = 0;
    for (bool moved = true; moved;) { /* until no other set is in the way */
        moved = false;
        for (const fsdpc_saved_set *other = saved->newest; other; other = other->older)
            if (at < other->offset + other->bytes && other->offset < at + set->bytes) {
                at = other->offset + other->bytes;
                moved = true;
            }
    }
    if (at + set->bytes > saved->away_bytes) {
        if (saved->mover)
            FSDPC_TRY(saved->mover->grow(saved->mover, saved->away_bytes, at + set->bytes));
        saved->away_bytes = at + set->bytes;
    }
    set->offset = at;
    set->older = saved->newest;
    if (set->older)
        set->older->newer = set;
    saved->newest = set;
    return FSDPC_OK;
}

/* Removes a set from all that the store knows. */
static void take_out(fsdpc_saved *saved, fsdpc_saved_set *set)
{
    if (set->older)
        set->older->newer = set->newer;
    if (set->newer)
        set->newer->older = set->older;
    if (saved->newest == set)
        saved->newest = set->older;
    set->older = set->newer = NULL;
    saved->last = saved->last == set ? NULL : saved->last;
    saved->leaving = saved->leaving == set ? NULL : saved->leaving;
}

/* ---- Forward ---- */

static fsdpc_status start(fsdpc_saved_set *set, bool reads)
{
    set->state = reads ? FSDPC_SAVED_RETURNING : FSDPC_SAVED_LEAVING;
    fsdpc_saved_mover *mover = set->saved->mover;
    return mover ? mover->start(mover, set, reads) : FSDPC_OK;
}

static fsdpc_status wait_for(fsdpc_saved_set *set)
{
    fsdpc_saved_mover *mover = set->saved->mover;
    return mover ? mover->wait(mover, set) : FSDPC_OK;
}

static void cancel(fsdpc_saved_set *set)
{
    if (set->saved->mover)
        set->saved->mover->cancel(set->saved->mover, set);
}

/* Keeps a set in memory from now on. */
static void stay(fsdpc_saved_set *set, bool restored)
{
    if (set->n > 0)
        set->ops->settle(set->arg, restored);
    set->state = FSDPC_SAVED_BACK;
}

/* Returns a reference to one of the store's sets, or NULL if its last holder is releasing it. */
static fsdpc_saved_set *hold(fsdpc_saved_set *set)
{
    return set && fsdpc_ref_try_acquire(&set->refs) ? set : NULL;
}

static fsdpc_status leave(fsdpc_saved *saved, fsdpc_saved_set *set)
{
    fsdpc_status status = set->ops->collect(set->arg, set);
    if (status == FSDPC_OK && set->failed)
        status = fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the list of saved tensors");
    if (status == FSDPC_OK && set->n > 0) {
        pthread_mutex_lock(&saved->lock);
        status = place(saved, set);
        saved->leaving = status == FSDPC_OK ? set : NULL;
        pthread_mutex_unlock(&saved->lock);
    }
    if (status == FSDPC_OK && set->n > 0)
        return start(set, false);
    stay(set, false);
    return status;
}

/* Completes the set that is leaving, then lets the one that ended last leave. */
static fsdpc_status begin(fsdpc_saved *saved, fsdpc_saved_set *gone, fsdpc_saved_set *last)
{
    if (gone) {
        FSDPC_TRY(wait_for(gone));
        gone->ops->release(gone->arg);
        gone->state = FSDPC_SAVED_AWAY;
    }
    pthread_mutex_lock(&saved->lock);
    saved->leaving = NULL;
    pthread_mutex_unlock(&saved->lock);
    return last ? leave(saved, last) : FSDPC_OK;
}

fsdpc_status fsdpc_saved_begin(fsdpc_saved *saved)
{
    pthread_mutex_lock(&saved->busy);
    pthread_mutex_lock(&saved->lock);
    fsdpc_saved_set *gone = hold(saved->leaving), *last = hold(saved->last);
    if (!saved->newest && !last)
        saved->seen = 0;
    saved->last = NULL;
    pthread_mutex_unlock(&saved->lock);
    fsdpc_status status = begin(saved, gone, last);
    pthread_mutex_unlock(&saved->busy);
    fsdpc_saved_set_release(gone);
    fsdpc_saved_set_release(last);
    return status;
}

fsdpc_status fsdpc_saved_end(fsdpc_saved *saved, const char *unit, const fsdpc_saved_ops *ops,
                             void *arg, fsdpc_saved_set **out)
{
    fsdpc_saved_set *set = calloc(1, sizeof *set);
    if (!set)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the saved tensors of unit '%s'", unit);
    set->refs = 1;
    set->saved = fsdpc_saved_acquire(saved);
    set->ops = ops;
    set->arg = arg;
    snprintf(set->unit, sizeof set->unit, "%s", unit);
    pthread_mutex_lock(&saved->lock);
    saved->last = set;
    pthread_mutex_unlock(&saved->lock);
    *out = set;
    return FSDPC_OK;
}

bool fsdpc_saved_add(fsdpc_saved_set *set, void *memory, size_t bytes)
{
    if (bytes < FSDPC_SAVED_LEAST)
        return false;
    /* Evenly spread over the arrays, as many leave as the fraction says. */
    double before = (double)set->saved->seen * set->saved->part, after = before + set->saved->part;
    set->saved->seen++;
    if ((uint64_t)before == (uint64_t)after)
        return false;
    if (set->n == set->room) {
        size_t room = set->room ? 2 * set->room : 16;
        fsdpc_saved_array *grown = realloc(set->arrays, room * sizeof *grown);
        if (!grown) {
            set->failed = true;
            return false;
        }
        set->arrays = grown;
        set->room = room;
    }
    uint32_t *crcs = malloc((bytes + FSDPC_SAVED_CHUNK - 1) / FSDPC_SAVED_CHUNK * sizeof *crcs);
    set->failed = set->failed || !crcs;
    if (!crcs)
        return false;
    set->arrays[set->n++] =
        (fsdpc_saved_array){.memory = memory, .bytes = bytes, .offset = set->bytes, .crcs = crcs};
    set->bytes += fsdpc_round_up(bytes, FSDPC_TIER_PAGE);
    return true;
}

/* ---- Backward ---- */

static fsdpc_status bring(fsdpc_saved_set *set)
{
    void **memory = malloc(set->n * sizeof *memory);
    if (!memory)
        return fsdpc_fail(FSDPC_ERR_NOMEM, "no memory for the saved tensors of unit '%s'",
                          set->unit);
    fsdpc_status status = set->ops->restore(set->arg, memory);
    for (size_t i = 0; status == FSDPC_OK && i < set->n; i++)
        set->arrays[i].memory = memory[i];
    free(memory);
    return status == FSDPC_OK ? start(set, true) : status;
}

/* Brings a set into memory; *before_out is the one that left before it, with a reference. */
static fsdpc_status need(fsdpc_saved *saved, fsdpc_saved_set *set, fsdpc_saved_set **before_out)
{
    if (set->state == FSDPC_SAVED_BACK)
        return FSDPC_OK;
    bool here = set->state == FSDPC_SAVED_HERE;
    if (set->state == FSDPC_SAVED_AWAY)
        FSDPC_TRY(bring(set));
    bool restored = set->state == FSDPC_SAVED_RETURNING;
    if (restored)
        FSDPC_TRY(wait_for(set));
    else if (set->state == FSDPC_SAVED_LEAVING)
        cancel(set);
    pthread_mutex_lock(&saved->lock);
    *before_out = hold(here ? saved->newest : set->older);
    take_out(saved, set);
    pthread_mutex_unlock(&saved->lock);
    stay(set, restored);
    return *before_out && (*before_out)->state == FSDPC_SAVED_AWAY ? bring(*before_out) : FSDPC_OK;
}

fsdpc_status fsdpc_saved_need(fsdpc_saved_set *set)
{
    fsdpc_saved *saved = set->saved;
    fsdpc_saved_set *before = NULL;
    pthread_mutex_lock(&saved->busy);
    fsdpc_status status = need(saved, set, &before);
    pthread_mutex_unlock(&saved->busy);
    fsdpc_saved_set_release(before);
    return status;
}

/* ---- Sets ---- */

fsdpc_saved_set *fsdpc_saved_set_acquire(fsdpc_saved_set *set)
{
    atomic_fetch_add_explicit(&set->refs, 1, memory_order_relaxed);
    return set;
}

void fsdpc_saved_set_release(fsdpc_saved_set *set)
{
    if (!set || atomic_fetch_sub_explicit(&set->refs, 1, memory_order_acq_rel) != 1)
        return;
    fsdpc_saved *saved = set->saved;
    pthread_mutex_lock(&saved->lock);
    take_out(saved, set);
    pthread_mutex_unlock(&saved->lock);
    cancel(set);
    set->ops->destroy(set->arg);
    for (size_t i = 0; i < set->n; i++)
        free(set->arrays[i].crcs);
    free(set->arrays);
    free(set);
    fsdpc_saved_release(saved);
}

void fsdpc_saved_forget(fsdpc_saved_set *set, void *part)
{
    set->ops->forget(set->arg, part);
    fsdpc_saved_set_release(set);
}
