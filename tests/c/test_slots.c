/* Which units share memory for their unsharded parameters: only sizes decide. (That it works out
 * when they are used is tests/gpu/test_engine_windows.c's to show, on a device that has windows.)
 */
#include "check.h"
#include "engine/slots.h"

enum { MOST = 12, GRANULE = 1000 };

/* `bytes`: of each unit's full, negative where it never shares. */
static int assign(const int *bytes, int n, int per_class, size_t granule, fsdpc_slot_want *wants)
{
    for (int i = 0; i < n; i++)
        wants[i] = (fsdpc_slot_want){.bytes = (size_t)abs(bytes[i]), .unshared = bytes[i] < 0};
    return fsdpc_slots_assign(wants, n, per_class, granule);
}

#define CHECK_SLOTS(per_class, granule, n_slots, bytes, ...)                                       \
    do {                                                                                           \
        fsdpc_slot_want got[MOST];                                                                 \
        int want[] = __VA_ARGS__, n = (int)(sizeof want / sizeof *want);                           \
        CHECK(assign(bytes, n, per_class, granule, got) == (n_slots));                             \
        for (int i = 0; i < n; i++)                                                                \
            CHECK_NOTE(got[i].slot == want[i], "unit %d has slot %d instead of %d", i,             \
                       got[i].slot, want[i]);                                                      \
    } while (0)

static void test_repeated_blocks_take_turns(void)
{
    const int blocks[] = {-9000, 5000, 5000, 5000, 5000, 5000, 5000};
    CHECK_SLOTS(2, GRANULE, 2, blocks, {-1, 0, 1, 0, 1, 0, 1});
    CHECK_SLOTS(3, GRANULE, 3, blocks, {-1, 0, 1, 2, 0, 1, 2});
    CHECK_SLOTS(1, GRANULE, 1, blocks, {-1, 0, 0, 0, 0, 0, 0});
}

static void test_each_size_has_slots_of_its_own(void)
{
    const int two[] = {-9000, 5000, 7000, 5000, 7000, 5000, 7000, 6000};
    CHECK_SLOTS(2, GRANULE, 4, two, {-1, 0, 2, 1, 3, 0, 2, -1});
}

static void test_the_others_have_memory_of_their_own(void)
{
    const int unshared[] = {5000, -5000, 5000, 5000, -5000, 5000, 0};
    CHECK_SLOTS(2, GRANULE, 2, unshared, {0, -1, 1, 0, -1, 1, -1});
    CHECK_SLOTS(2, 0, 0, unshared, {-1, -1, -1, -1, -1, -1, -1}); /* a device without windows */
    const int few[] = {-9000, 5000, 5000};
    CHECK_SLOTS(2, GRANULE, 0, few, {-1, -1, -1});
}

/* Slots are whole granules: small units may take more room by turns than side by side. */
static void test_sharing_that_saves_nothing(void)
{
    const int small[] = {600, 600, 600, 600};
    CHECK_SLOTS(2, GRANULE, 2, small, {0, 1, 0, 1});
    CHECK_SLOTS(2, 2 * GRANULE, 0, small, {-1, -1, -1, -1});
}

int main(void)
{
    test_repeated_blocks_take_turns();
    test_each_size_has_slots_of_its_own();
    test_the_others_have_memory_of_their_own();
    test_sharing_that_saves_nothing();
    return check_report("test_slots");
}
