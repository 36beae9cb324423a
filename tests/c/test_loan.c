/* Loans without an engine: what moves, what comes back, and who frees the memory. */
#include "check.h"

#include <pthread.h>

#include "engine/loan.h"
#include "ops/flat_ops.h"

enum { NUMEL = 1024, BYTES = NUMEL * 4 };

typedef struct rig {
    fsdpc_mem *mem;
    fsdpc_device *device;
    fsdpc_lender lender;
    float buffer[3 * NUMEL];
    fsdpc_loan loan;
    void *data; /* the borrower's */
} rig;

static void open_rig(rig *r)
{
    memset(r, 0, sizeof *r);
    CHECK_OK(fsdpc_mem_create(&r->mem));
    CHECK_OK(fsdpc_device_cpu_create(r->mem, NULL, fsdpc_isa_best(), 0, &r->device));
    fsdpc_lender_init(&r->lender);
}

static void close_rig(rig *r)
{
    fsdpc_device_destroy(r->device);
    fsdpc_mem_destroy(r->mem);
}

static fsdpc_loan loan_of(rig *r, void **data)
{
    return (fsdpc_loan){
        .device = r->device, .param = "weight", .unit = "head", .data = data, .bytes = BYTES};
}

/* Borrows the middle third, and fills it. */
static void borrow(rig *r)
{
    r->loan = loan_of(r, &r->data);
    CHECK(fsdpc_loan_begin(&r->lender, r->buffer + NUMEL, &r->loan));
    CHECK(r->data == r->buffer + NUMEL);
    for (int i = 0; i < NUMEL; i++)
        ((float *)r->data)[i] = (float)i;
}

static bool has_values(const rig *r)
{
    for (int i = 0; i < NUMEL; i++)
        if (((const float *)r->data)[i] != (float)i)
            return false;
    return true;
}

static void test_it_comes_back(void)
{
    rig r;
    open_rig(&r);
    borrow(&r);
    void *other = NULL;
    fsdpc_loan second = loan_of(&r, &other);
    CHECK(!fsdpc_loan_begin(&r.lender, r.buffer, &second) && !second.lender && !other);
    CHECK(!fsdpc_loan_end(&second));
    bool back = false;
    CHECK_OK(fsdpc_loan_settle(&r.loan, r.buffer + NUMEL, &back));
    CHECK(back && r.data == r.buffer + NUMEL && has_values(&r) && !r.lender.loan);
    CHECK(fsdpc_loan_begin(&r.lender, r.buffer, &second));
    CHECK(!fsdpc_loan_end(&r.loan)); /* which leaves the next one alone */
    CHECK(r.lender.loan == &second);
    CHECK(!fsdpc_loan_end(&second) && !r.lender.loan);
    close_rig(&r);
}

static void test_it_moves_where_memory_overlaps(void)
{
    const struct {
        int first, n;
        bool moves;
    } cases[] = {{0, NUMEL, false},        {2 * NUMEL, NUMEL, false}, {0, NUMEL + 1, true},
                 {2 * NUMEL - 1, 1, true}, {0, 3 * NUMEL, true},      {NUMEL + 1, 1, true},
                 {NUMEL, NUMEL, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig r;
        open_rig(&r);
        borrow(&r);
        CHECK_OK(fsdpc_loan_move(&r.lender, r.buffer + cases[i].first, (size_t)cases[i].n * 4));
        CHECK((r.data != r.buffer + NUMEL) == cases[i].moves);
        CHECK((r.lender.loan == NULL) == cases[i].moves && has_values(&r));
        memset(r.buffer, 0, cases[i].moves ? sizeof r.buffer : 0);
        bool back = true;
        CHECK_OK(fsdpc_loan_settle(&r.loan, NULL, &back)); /* moves it, unless that is done */
        CHECK(!back && r.data != r.buffer + NUMEL && has_values(&r));
        CHECK_OK(fsdpc_loan_move(&r.lender, NULL, SIZE_MAX));
        CHECK(fsdpc_loan_end(&r.loan));
        fsdpc_device_free(r.device, r.data);
        close_rig(&r);
    }
}

static void test_without_memory_nothing_changes(void)
{
    rig r;
    open_rig(&r);
    borrow(&r);
    r.loan.bytes = SIZE_MAX / 4;
    CHECK_FAILS(fsdpc_loan_move(&r.lender, r.buffer + NUMEL, 1), FSDPC_ERR_NOMEM,
                "gradient of parameter 'weight' of unit 'head'");
    CHECK(r.lender.loan == &r.loan && r.data == r.buffer + NUMEL && has_values(&r));
    r.loan.bytes = BYTES;
    CHECK_OK(fsdpc_loan_move(&r.lender, r.buffer + NUMEL, 1));
    CHECK(has_values(&r) && fsdpc_loan_end(&r.loan));
    fsdpc_device_free(r.device, r.data);
    close_rig(&r);
}

static void *end_loan(void *arg)
{
    rig *r = arg;
    if (fsdpc_loan_end(&r->loan))
        fsdpc_device_free(r->device, r->data);
    return NULL;
}

static void test_ends_on_another_thread(void)
{
    rig r;
    open_rig(&r);
    for (int i = 0; i < 200; i++) {
        pthread_t thread;
        borrow(&r);
        CHECK(pthread_create(&thread, NULL, end_loan, &r) == 0);
        CHECK_OK(fsdpc_loan_move(&r.lender, r.buffer, sizeof r.buffer));
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(!r.lender.loan);
    }
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(r.mem, &stats);
    CHECK(stats.now_bytes[FSDPC_MEM_ACTIVATION] == 0);
    close_rig(&r);
}

int main(void)
{
    test_it_comes_back();
    test_it_moves_where_memory_overlaps();
    test_without_memory_nothing_changes();
    test_ends_on_another_thread();
    return check_report("loan");
}
