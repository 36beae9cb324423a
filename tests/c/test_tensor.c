/* nn/tensor: counts, views, foreign memory, guards, versions. */
#include "check.h"

#include "nn/tensor.h"
#include "ops/flat_ops.h"

static fsdpc_device *device;
static fsdpc_mem *mem;
static int released;

static size_t bytes_now(void)
{
    fsdpc_mem_stats stats;
    fsdpc_mem_stats_read(mem, &stats);
    return stats.now_bytes[FSDPC_MEM_ACTIVATION];
}

static void test_create(void)
{
    size_t start = bytes_now(), shape[] = {3, 5};
    fsdpc_tensor *t;
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_BF16, 2, shape, &t));
    CHECK(t->numel == 15 && fsdpc_tensor_bytes(t) == 30 && t->dtype == FSDPC_BF16);
    CHECK(bytes_now() > start && (uintptr_t)t->data % 64 == 0);
    CHECK(fsdpc_tensor_is_exclusive(t));
    CHECK(fsdpc_tensor_acquire(t) == t && !fsdpc_tensor_is_exclusive(t));
    fsdpc_tensor_release(t);
    CHECK(fsdpc_tensor_is_exclusive(t));
    fsdpc_tensor_release(t);
    CHECK(bytes_now() == start);
    fsdpc_tensor_release(NULL);

    size_t nothing[] = {0, 7};
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_F32, 2, nothing, &t));
    CHECK(t->numel == 0 && t->data && fsdpc_tensor_check(t) == FSDPC_OK);
    fsdpc_tensor_release(t);
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_F64, 0, NULL, &t));
    CHECK(t->numel == 1 && fsdpc_tensor_bytes(t) == 8);
    fsdpc_tensor_release(t);

    size_t huge[] = {SIZE_MAX / 2, 3};
    CHECK_FAILS(fsdpc_tensor_create(device, FSDPC_F32, 2, huge, &t), FSDPC_ERR_VALUE, "memory");
    CHECK_FAILS(fsdpc_tensor_create(device, FSDPC_F32, 9, huge, &t), FSDPC_ERR_SHAPE, "not 9");
    CHECK(bytes_now() == start);
}

static void test_views(void)
{
    size_t start = bytes_now(), shape[] = {4, 6}, rows[] = {2, 6};
    fsdpc_tensor *t, *view, *leaf;
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_F32, 2, shape, &t));
    CHECK_OK(fsdpc_tensor_view(t, 2, rows, (float *)t->data + 6, &view));
    CHECK(view->storage == t->storage && !fsdpc_tensor_is_exclusive(t));
    void *data = t->data;
    fsdpc_tensor_release(t);
    CHECK(bytes_now() > start && (char *)view->data == (char *)data + 24);
    view->requires_grad = true;
    CHECK_OK(fsdpc_tensor_detach(view, &leaf));
    CHECK(!leaf->requires_grad && leaf->data == view->data && fsdpc_shape_equal(leaf, view));
    fsdpc_tensor_release(view);
    fsdpc_tensor_release(leaf);
    CHECK(bytes_now() == start);
}

static void count_release(fsdpc_storage *storage)
{
    released++;
    CHECK(storage->owner == &released);
}

static void test_foreign_memory(void)
{
    float values[6] = {0};
    size_t shape[] = {6}, two[] = {2};
    fsdpc_tensor *t, *view;
    CHECK_OK(fsdpc_tensor_wrap(device, FSDPC_F32, 1, shape, values, count_release, &released, &t));
    CHECK_OK(fsdpc_tensor_view(t, 1, two, values + 4, &view));
    fsdpc_tensor_release(t);
    CHECK(released == 0);
    fsdpc_tensor_release(view);
    CHECK(released == 1);
}

static void test_deferred_and_bind(void)
{
    size_t start = bytes_now(), shape[] = {1u << 20, 1u << 20};
    fsdpc_tensor *t, *backing, *made;
    CHECK_OK(fsdpc_tensor_create_deferred(FSDPC_F32, 2, shape, &t));
    CHECK(bytes_now() == start && !t->data);
    CHECK_FAILS(fsdpc_tensor_check(t), FSDPC_ERR_STATE, "(1048576, 1048576)");
    CHECK(!fsdpc_tensor_is_exclusive(t));
    fsdpc_tensor_release(t);

    size_t small[] = {3};
    CHECK_OK(fsdpc_tensor_create_deferred(FSDPC_F32, 1, small, &t));
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_BF16, 1, small, &backing));
    CHECK_OK(fsdpc_tensor_bind(t, FSDPC_BF16, backing->storage, backing->data));
    CHECK(t->dtype == FSDPC_BF16 && t->data == backing->data);
    CHECK_OK(fsdpc_tensor_check(t));
    /* onto itself: the storage must survive */
    fsdpc_tensor_release(backing);
    CHECK_OK(fsdpc_tensor_bind(t, FSDPC_BF16, t->storage, t->data));
    CHECK(bytes_now() > start);
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_BF16, 1, small, &made));
    made->node = (fsdpc_node *)&released; /* stands for some node */
    CHECK_FAILS(fsdpc_tensor_bind(made, FSDPC_BF16, t->storage, t->data), FSDPC_ERR_STATE, "leaf");
    made->node = NULL;
    fsdpc_tensor_release(made);
    fsdpc_tensor_release(t);
    CHECK(bytes_now() == start);
}

static fsdpc_status guard(void *arg)
{
    return *(bool *)arg ? FSDPC_OK : fsdpc_fail(FSDPC_ERR_STATE, "'w' of unit 'u' is not gathered");
}

static void test_guards_and_versions(void)
{
    bool valid = true;
    size_t shape[] = {2};
    fsdpc_tensor *t, *view;
    CHECK_OK(fsdpc_tensor_create(device, FSDPC_F32, 1, shape, &t));
    t->guard = (fsdpc_guard){guard, &valid};
    CHECK_OK(fsdpc_tensor_view(t, 1, shape, t->data, &view));
    CHECK_OK(fsdpc_tensor_check(view));
    valid = false;
    CHECK_FAILS(fsdpc_tensor_check(t), FSDPC_ERR_STATE, "'w' of unit 'u'");
    CHECK_FAILS(fsdpc_tensor_check(view), FSDPC_ERR_STATE, "'w' of unit 'u'");
    CHECK_FAILS(fsdpc_tensor_check_write(view), FSDPC_ERR_STATE, "'w' of unit 'u'");
    valid = true;
    uint32_t version = t->storage->version;
    CHECK_OK(fsdpc_tensor_check_write(view));
    CHECK(t->storage->version == version + 1);
    t->storage->readonly = true;
    CHECK_FAILS(fsdpc_tensor_check_write(t), FSDPC_ERR_STATE, "read-only");
    CHECK(t->storage->version == version + 1);
    fsdpc_tensor_release(view);
    fsdpc_tensor_release(t);
}

static void test_shape_text(void)
{
    char text[FSDPC_SHAPE_TEXT];
    size_t shape[FSDPC_MAX_DIMS] = {2, 3, 4};
    CHECK(strcmp(fsdpc_shape_text(0, shape, text), "()") == 0);
    CHECK(strcmp(fsdpc_shape_text(1, shape, text), "(2,)") == 0);
    CHECK(strcmp(fsdpc_shape_text(3, shape, text), "(2, 3, 4)") == 0);
    for (int i = 0; i < FSDPC_MAX_DIMS; i++)
        shape[i] = SIZE_MAX;
    fsdpc_shape_text(FSDPC_MAX_DIMS, shape, text);
    CHECK(strlen(text) < FSDPC_SHAPE_TEXT && text[strlen(text) - 1] == ')');
}

int main(void)
{
    CHECK_OK(fsdpc_mem_create(&mem));
    CHECK_OK(fsdpc_device_cpu_create(mem, NULL, FSDPC_ISA_PORTABLE, 0, &device));
    test_create();
    test_views();
    test_foreign_memory();
    test_deferred_and_bind();
    test_guards_and_versions();
    test_shape_text();
    fsdpc_device_destroy(device);
    fsdpc_mem_destroy(mem);
    return check_report("tensor");
}
