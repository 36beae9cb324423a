/* Implements fingerprints, which show whether all ranks have posted the same operation.
 *
 * A rank that posts operation s writes entry s % RING of its slot and then raises `posted` to s +
 * 1. A peer that has also posted operation s compares a single word: `chain` hashes the entry and
 * all entries before it, so equal chains mean equal histories. If the chains differ, the error
 * message names the first differing entry that is still in the ring.
 *
 * An entry may be overwritten while a slow peer reads it (gathers let a rank run ahead). The
 * reader therefore checks `posted` again afterwards: entry s is overwritten only once posted has
 * reached s + RING. Loads acquire and stores release (both free on x86), so this second check
 * cannot happen too early.
 */
#include "comm/shm_ring.h"

#include <stdio.h>
#include <string.h>

#include "comm/shm_world.h"

static inline uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

static uint64_t mix_text(uint64_t hash, const char *text)
{
    size_t left = strlen(text);
    for (; left >= 8; left -= 8, text += 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        hash = mix(hash, word);
    }
    uint64_t tail = 0;
    memcpy(&tail, text, left);
    return mix(hash, tail | (uint64_t)left << 56);
}

static uint64_t detail_of(const fsdpc_coll *op, uint64_t object)
{
    uint64_t hash = mix(mix((uint64_t)op->root << 32 | (uint64_t)op->op, object), op->trains);
    if (op->what)
        hash = mix_text(hash, op->what);
    if (op->kind != FSDPC_COLL_GATHER && !fsdpc_coll_reduces(op->kind))
        return hash;
    if (fsdpc_coll_reduces(op->kind)) {
        uint64_t scale;
        memcpy(&scale, &op->scale, sizeof scale);
        hash = mix(mix(hash, (uint64_t)op->shard_dtype), scale);
    }
    hash = mix(hash, op->offset);
    for (size_t i = 0; i < op->n_slices; i++) {
        hash = mix(hash, op->slices[i].unsharded_offset);
        hash = mix(hash, op->slices[i].numel);
    }
    return hash;
}

static inline void put(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static inline uint64_t get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

uint64_t fsdpc_shm_ring_post(fsdpc_shm_slot *mine, uint64_t sequence, uint64_t chain,
                             const fsdpc_coll *op, size_t bytes, uint64_t object)
{
    fsdpc_shm_entry *entry = &mine->ring[sequence % FSDPC_SHM_RING];
    uint64_t kind =
        (uint64_t)op->kind | (uint64_t)op->dtype << 8 | (uint64_t)(uint32_t)op->unit << 32;
    uint64_t detail = detail_of(op, object);
    chain = mix(mix(mix(mix(chain, kind), bytes), op->epoch), detail);
    put(&entry->kind, kind);
    put(&entry->bytes, bytes);
    put(&entry->epoch, op->epoch);
    put(&entry->detail, detail);
    put(&entry->chain, chain);
    fsdpc_shm_text_store(entry->what, FSDPC_SHM_WHAT_WORDS, op->what);
    put(&mine->posted, sequence + 1);
    return chain;
}

static bool still_there(const fsdpc_shm_slot *slot, uint64_t sequence)
{
    return get(&slot->posted) < sequence + FSDPC_SHM_RING;
}

bool fsdpc_shm_ring_same(const fsdpc_shm_slot *mine, const fsdpc_shm_slot *peer, uint64_t sequence)
{
    uint64_t ours = get(&mine->ring[sequence % FSDPC_SHM_RING].chain);
    uint64_t theirs = get(&peer->ring[sequence % FSDPC_SHM_RING].chain);
    return ours == theirs || !still_there(peer, sequence) || !still_there(mine, sequence);
}

static void describe(const fsdpc_shm_entry *entry, int rank, char *text, size_t bytes)
{
    uint64_t kind = get(&entry->kind);
    char what[8 * FSDPC_SHM_WHAT_WORDS + 1];
    fsdpc_shm_text_load(entry->what, FSDPC_SHM_WHAT_WORDS, what, sizeof what);
    snprintf(text, bytes, "rank %d posted %s of '%s' (unit %d, %s, %llu bytes, epoch %llu)", rank,
             fsdpc_coll_name((fsdpc_coll_kind)(kind & 255)), what, (int)(uint32_t)(kind >> 32),
             fsdpc_dtype_name((fsdpc_dtype)(kind >> 8 & 255)),
             (unsigned long long)get(&entry->bytes), (unsigned long long)get(&entry->epoch));
}

void fsdpc_shm_ring_describe(const fsdpc_shm_slot *slot, int rank, uint64_t sequence, char *text,
                             size_t bytes)
{
    describe(&slot->ring[sequence % FSDPC_SHM_RING], rank, text, bytes);
}

static bool entries_differ(const fsdpc_shm_entry *a, const fsdpc_shm_entry *b)
{
    return get(&a->kind) != get(&b->kind) || get(&a->bytes) != get(&b->bytes) ||
           get(&a->epoch) != get(&b->epoch) || get(&a->detail) != get(&b->detail);
}

fsdpc_status fsdpc_shm_ring_differ(const fsdpc_shm_slot *mine, int my_rank,
                                   const fsdpc_shm_slot *peer, int peer_rank, uint64_t sequence)
{
    uint64_t ahead =
        get(&peer->posted) > get(&mine->posted) ? get(&peer->posted) : get(&mine->posted);
    uint64_t first = ahead > FSDPC_SHM_RING - 1 ? ahead - (FSDPC_SHM_RING - 1) : 0;
    while (first < sequence && !entries_differ(&mine->ring[first % FSDPC_SHM_RING],
                                               &peer->ring[first % FSDPC_SHM_RING]))
        first++;
    char ours[256], theirs[256];
    const fsdpc_shm_entry *a = &mine->ring[first % FSDPC_SHM_RING];
    const fsdpc_shm_entry *b = &peer->ring[first % FSDPC_SHM_RING];
    describe(a, my_rank, ours, sizeof ours);
    describe(b, peer_rank, theirs, sizeof theirs);
    bool same_words = get(&a->kind) == get(&b->kind) && get(&a->bytes) == get(&b->bytes) &&
                      get(&a->epoch) == get(&b->epoch);
    return fsdpc_fail(FSDPC_ERR_MISMATCH,
                      "ranks disagree in operation %llu: %s, %s%s; every rank must run the same "
                      "units in the same order, with the same requires_grad",
                      (unsigned long long)first, ours, theirs,
                      same_words ? " (names, slices, requires_grad, scale or root differ)" : "");
}
