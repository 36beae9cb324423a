/* The trace ring: order, overwriting, resizing. */
#include "base/trace.h"
#include "check.h"

static void test_ring(void)
{
    fsdpc_trace *trace;
    CHECK_OK(fsdpc_trace_create(4, &trace));
    CHECK(fsdpc_trace_length(trace) == 0 && fsdpc_trace_at(trace, 0) == NULL);
    for (int i = 0; i < 3; i++)
        fsdpc_trace_add(trace, FSDPC_TRACE_GATHER, i, (uint64_t)i * 10, 5, i == 2 ? 7 : 0);
    CHECK(fsdpc_trace_length(trace) == 3);
    const fsdpc_trace_event *event = fsdpc_trace_at(trace, 2);
    CHECK(event && event->unit == 2 && event->bytes == 20 && event->epoch == 5);
    CHECK(event && event->kind == FSDPC_TRACE_GATHER && event->in_backward == 1);
    CHECK(fsdpc_trace_at(trace, 0)->in_backward == 0);
    for (int i = 3; i < 11; i++)
        fsdpc_trace_add(trace, FSDPC_TRACE_RESHARD, i, 0, 6, 1);
    CHECK(fsdpc_trace_length(trace) == 4 && fsdpc_trace_at(trace, 4) == NULL);
    for (size_t i = 0; i < 4; i++)
        CHECK(fsdpc_trace_at(trace, i)->unit == (int)(7 + i));
    for (size_t i = 1; i < 4; i++)
        CHECK(fsdpc_trace_at(trace, i)->ns >= fsdpc_trace_at(trace, i - 1)->ns);
    fsdpc_trace_reset(trace);
    CHECK(fsdpc_trace_length(trace) == 0);
    fsdpc_trace_add(trace, FSDPC_TRACE_OPTIM, -1, 1, 1, 0);
    CHECK(fsdpc_trace_length(trace) == 1 && fsdpc_trace_at(trace, 0)->unit == -1);
    fsdpc_trace_destroy(trace);
}

static void test_edges(void)
{
    fsdpc_trace *trace;
    CHECK_OK(fsdpc_trace_create(0, &trace)); /* keeps nothing */
    fsdpc_trace_add(trace, FSDPC_TRACE_EPOCH, 0, 0, 0, 0);
    CHECK(fsdpc_trace_length(trace) == 0);
    fsdpc_trace_destroy(trace);
    fsdpc_trace_add(NULL, FSDPC_TRACE_EPOCH, 0, 0, 0, 0);
    CHECK(fsdpc_trace_length(NULL) == 0);
    fsdpc_trace_reset(NULL);
    fsdpc_trace_destroy(NULL);
    CHECK_FAILS(fsdpc_trace_create(SIZE_MAX / 8, &trace), FSDPC_ERR_VALUE, "does not fit");
    CHECK(strcmp(fsdpc_trace_kind_name(FSDPC_TRACE_GATHER_DONE), "gather_done") == 0);
    CHECK(strcmp(fsdpc_trace_kind_name(FSDPC_TRACE_KIND_COUNT), "unknown event") == 0);
}

static void test_tail(void)
{
    fsdpc_trace *trace;
    char text[256], small[50];
    CHECK_OK(fsdpc_trace_create(8, &trace));
    CHECK(fsdpc_trace_tail(trace, 4, text, sizeof text) == 0 && text[0] == 0);
    CHECK(fsdpc_trace_tail(NULL, 4, text, sizeof text) == 0 && text[0] == 0);
    for (int i = 0; i < 3; i++)
        fsdpc_trace_add(trace, FSDPC_TRACE_GATHER, i, 64, (uint64_t)i, i == 2);
    fsdpc_trace_add(trace, FSDPC_TRACE_OPTIM, -1, 0, 0, 0);
    CHECK(fsdpc_trace_tail(trace, 3, text, sizeof text) == 3);
    CHECK_NOTE(strncmp(text, "gather of unit 1 in epoch 1, ", 29) == 0, "%s", text);
    CHECK(strstr(text, " s ago; gather of unit 2 in epoch 2 (backward), ") != NULL);
    CHECK(strstr(text, " s ago; optim, ") != NULL);
    /* What does not fit is left out whole. */
    CHECK(fsdpc_trace_tail(trace, 3, small, sizeof small) == 1);
    CHECK_NOTE(strcmp(small + strlen(small) - 4, " ago") == 0, "%s", small);
    fsdpc_trace_destroy(trace);
}

static void test_clock(void)
{
    int64_t now = 17;
    fsdpc_trace *trace;
    CHECK_OK(fsdpc_trace_create(4, &trace));
    fsdpc_trace_set_clock(trace, &now);
    fsdpc_trace_add(trace, FSDPC_TRACE_GATHER, 0, 0, 0, 0);
    now = 19;
    fsdpc_trace_add(trace, FSDPC_TRACE_GATHER, 1, 0, 0, 0);
    CHECK(fsdpc_trace_at(trace, 0)->ns == 17 && fsdpc_trace_at(trace, 1)->ns == 19);
    fsdpc_trace_destroy(trace);
}

static void test_profile(void)
{
    fsdpc_trace *trace;
    CHECK_OK(fsdpc_trace_create(2, &trace));
    fsdpc_trace_wait(trace, "gather", 0); /* not noted: no profile is taken */
    fsdpc_trace_wait_end(trace, 0);
    CHECK(fsdpc_trace_length(trace) == 0);
    for (int i = 0; i < 3; i++)
        fsdpc_trace_add(trace, FSDPC_TRACE_GATHER, i, 0, 0, 0);
    CHECK_OK(fsdpc_trace_resize(trace, 5, true));
    CHECK(fsdpc_trace_capacity(trace) == 5 && fsdpc_trace_length(trace) == 2);
    CHECK(fsdpc_trace_at(trace, 0)->unit == 1 && fsdpc_trace_at(trace, 0)->what == NULL);
    fsdpc_trace_wait(trace, "gather", 7);
    fsdpc_trace_wait_end(trace, 7);
    const fsdpc_trace_event *wait = fsdpc_trace_at(trace, 2), *end = fsdpc_trace_at(trace, 3);
    CHECK(wait && wait->kind == FSDPC_TRACE_WAIT && wait->unit == 7);
    CHECK(wait && strcmp(wait->what, "gather") == 0);
    CHECK(end && end->kind == FSDPC_TRACE_WAIT_END && end->unit == 7 && end->what == NULL);
    CHECK_OK(fsdpc_trace_resize(trace, 3, false));
    CHECK(fsdpc_trace_length(trace) == 3 && fsdpc_trace_at(trace, 0)->unit == 2);
    fsdpc_trace_wait(trace, "gather", 8);
    fsdpc_trace_add(trace, FSDPC_TRACE_GATHER, 9, 0, 0, 0);
    CHECK(fsdpc_trace_length(trace) == 3 && fsdpc_trace_at(trace, 2)->unit == 9);
    CHECK(fsdpc_trace_at(trace, 0)->unit == 7);
    CHECK_FAILS(fsdpc_trace_resize(trace, SIZE_MAX / 8, false), FSDPC_ERR_VALUE, "does not fit");
    CHECK(fsdpc_trace_length(trace) == 3);
    CHECK_OK(fsdpc_trace_resize(trace, 0, false));
    fsdpc_trace_add(trace, FSDPC_TRACE_GATHER, 9, 0, 0, 0);
    CHECK(fsdpc_trace_length(trace) == 0);
    fsdpc_trace_destroy(trace);
}

int main(void)
{
    test_ring();
    test_profile();
    test_clock();
    test_tail();
    test_edges();
    return check_report("trace");
}
