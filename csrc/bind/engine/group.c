/* Group and GroupWork: process groups for torch.distributed (comm/group.h).
 *
 * Methods accept addresses instead of tensors, since the tensors are torch's. Each returns a
 * GroupWork, which keeps the group and the caller's `keep` object (the tensors) alive. All calls
 * release the GIL.
 */
#include "bind/engine.h"

#include "comm/group.h"

typedef struct py_group {
    PyObject_HEAD fsdpc_group *group;
    bool closed;
    int users; /* calls that have released the GIL; the last one destroys a closed group */
} py_group;

typedef struct py_work {
    PyObject_HEAD fsdpc_group_work work;
    PyObject *group, *keep;
    fsdpc_coll_extent *extents;
    const uint64_t *counts; /* of an all_to_all over `size` ranks; NULL: another operation */
    int size;
    char what[64];
} py_work;

static fsdpc_group *group_of(PyObject *object)
{
    const py_group *self = (py_group *)object;
    if (self->closed)
        PyErr_SetString(PyExc_RuntimeError, "the process group was destroyed");
    return self->closed ? NULL : self->group;
}

static void destroy_if_unused(py_group *self)
{
    fsdpc_group *group = self->group;
    if (!self->closed || self->users > 0)
        return;
    self->group = NULL;
    FSDPC_PY_WITHOUT_GIL(fsdpc_group_destroy(group));
}

/* Runs a call on the group without the GIL. */
#define USING(object, ...)                                                                         \
    do {                                                                                           \
        py_group *user_ = (py_group *)(object);                                                    \
        user_->users++;                                                                            \
        FSDPC_PY_WITHOUT_GIL(__VA_ARGS__);                                                         \
        user_->users--;                                                                            \
        destroy_if_unused(user_);                                                                  \
    } while (0)

/* ---- Life ---- */

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "rank", "size", "address", "secret", "timeout_s");
    int rank, size;
    const char *address, *secret;
    double timeout_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iissd", names, &rank, &size, &address, &secret,
                                     &timeout_s))
        return NULL;
    fsdpc_py_state *state = fsdpc_py_state_of_type(type);
    const fsdpc_runtime *runtime = state ? fsdpc_py_state_runtime(state) : NULL;
    if (!runtime)
        return NULL;
    py_group *self = (py_group *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    const fsdpc_comm_config config = {.rank = rank,
                                      .size = size,
                                      .device = runtime->host ? runtime->host : runtime->device,
                                      .timeout_s = timeout_s,
                                      .notice_s = runtime->env.notice_s,
                                      .interrupt = {.fn = fsdpc_py_check_signals},
                                      .address = address,
                                      .secret = secret,
                                      .socket_fd = -1,
                                      .news_fd = -1,
                                      .spin = fsdpc_usable_cores() >= size};
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_group_create(&config, &self->group));
    if (status == FSDPC_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return fsdpc_py_raise(status);
}

static PyObject *group_part(PyObject *object, PyObject *args)
{
    fsdpc_group *whole = group_of(object);
    PyObject *list;
    unsigned long long id;
    if (!whole || !PyArg_ParseTuple(args, "O!K", &PyList_Type, &list, &id))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(list);
    int *members = fsdpc_py_array(n, sizeof *members);
    PyTypeObject *type = Py_TYPE(object);
    py_group *part = members ? (py_group *)type->tp_alloc(type, 0) : NULL;
    for (Py_ssize_t i = 0; part && i < n; i++)
        members[i] = (int)PyLong_AsLong(PyList_GET_ITEM(list, i));
    fsdpc_status status = FSDPC_OK;
    if (part && !PyErr_Occurred())
        USING(object, status = fsdpc_group_part(whole, members, (int)n, id, &part->group));
    PyMem_Free(members);
    if (part && !PyErr_Occurred() && status == FSDPC_OK)
        return (PyObject *)part;
    Py_XDECREF(part);
    return PyErr_Occurred() ? NULL : fsdpc_py_raise(status);
}

static PyObject *group_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    py_group *self = (py_group *)object;
    if (self->closed)
        Py_RETURN_NONE;
    self->closed = true;
    if (self->users > 0) {
        static const char reason[] = "a process group was destroyed while a thread used it";
        USING(object, fsdpc_group_abort(self->group, reason));
    }
    destroy_if_unused(self);
    Py_RETURN_NONE;
}

static void group_dealloc(PyObject *object)
{
    py_group *self = (py_group *)object;
    FSDPC_PY_WITHOUT_GIL(fsdpc_group_destroy(self->group));
    fsdpc_py_free(object);
}

static PyObject *group_abort(PyObject *object, PyObject *args)
{
    fsdpc_group *group = group_of(object);
    const char *reason;
    if (!group || !PyArg_ParseTuple(args, "s", &reason))
        return NULL;
    USING(object, fsdpc_group_abort(group, reason));
    Py_RETURN_NONE;
}

static PyObject *group_set_timeout(PyObject *object, PyObject *args)
{
    fsdpc_group *group = group_of(object);
    double timeout_s;
    if (!group || !PyArg_ParseTuple(args, "d", &timeout_s))
        return NULL;
    fsdpc_group_set_timeout(group, timeout_s);
    Py_RETURN_NONE;
}

/* ---- Posting ---- */

static py_work *work_new(PyObject *group, PyObject *keep)
{
    const fsdpc_py_state *state = fsdpc_py_state_of_type(Py_TYPE(group));
    PyTypeObject *type = state ? (PyTypeObject *)state->group_work_type : NULL;
    py_work *self = type ? (py_work *)type->tp_alloc(type, 0) : NULL;
    if (!self)
        return NULL;
    self->group = Py_NewRef(group);
    self->keep = Py_NewRef(keep);
    return self;
}

static PyObject *posted(py_work *self, fsdpc_status status)
{
    if (status == FSDPC_OK)
        return (PyObject *)self;
    Py_DECREF(self);
    return fsdpc_py_raise(status);
}

/* Posts an operation whose messages name `what`; takes ownership of `extents`. */
static PyObject *post(PyObject *object, PyObject *keep, const char *what, fsdpc_coll op,
                      fsdpc_coll_extent *extents)
{
    fsdpc_group *group = group_of(object);
    py_work *self = group ? work_new(object, keep) : NULL;
    if (!self) {
        PyMem_Free(extents);
        return NULL;
    }
    snprintf(self->what, sizeof self->what, "%s", what);
    self->extents = extents;
    self->counts = op.counts;
    self->size = fsdpc_group_comm(group)->size;
    op.unit = -1;
    op.what = self->what;
    op.extents = extents;
    fsdpc_status status;
    USING(object, status = fsdpc_group_post(group, &op, &self->work));
    return posted(self, status);
}

static void *at(unsigned long long address)
{
    return (void *)(uintptr_t)address;
}

static PyObject *group_all_reduce(PyObject *object, PyObject *args)
{
    PyObject *keep;
    unsigned long long send, recv;
    Py_ssize_t numel, first, part;
    const char *dtype, *red, *what;
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE};
    if (!PyArg_ParseTuple(args, "OKKnssnns", &keep, &send, &recv, &numel, &dtype, &red, &first,
                          &part, &what) ||
        fsdpc_py_parse_red(red, FSDPC_RED_COUNT, &op.op) < 0 ||
        fsdpc_py_check(fsdpc_dtype_parse(dtype, &op.dtype)) < 0)
        return NULL;
    op.send = at(send);
    op.recv = recv ? at(recv) : at(send); /* a rank without a part has nowhere to put it */
    op.numel = (size_t)numel;
    op.partial = part != numel;
    op.part_first = (size_t)first;
    op.part_numel = (size_t)part;
    return post(object, keep, what, op, NULL);
}

static PyObject *group_all_gather(PyObject *object, PyObject *args)
{
    PyObject *keep;
    unsigned long long send, recv;
    Py_ssize_t bytes;
    const char *what;
    if (!PyArg_ParseTuple(args, "OKKns", &keep, &send, &recv, &bytes, &what))
        return NULL;
    const fsdpc_coll op = {.kind = FSDPC_COLL_ALL_GATHER,
                           .dtype = FSDPC_U8,
                           .send = at(send),
                           .recv = at(recv),
                           .numel = (size_t)bytes};
    return post(object, keep, what, op, NULL);
}

static PyObject *group_broadcast(PyObject *object, PyObject *args)
{
    PyObject *keep;
    unsigned long long data;
    Py_ssize_t bytes;
    int root;
    const char *what;
    if (!PyArg_ParseTuple(args, "OKnis", &keep, &data, &bytes, &root, &what))
        return NULL;
    const fsdpc_coll op = {.kind = FSDPC_COLL_BROADCAST,
                           .dtype = FSDPC_U8,
                           .recv = at(data),
                           .numel = (size_t)bytes,
                           .root = root};
    return post(object, keep, what, op, NULL);
}

static fsdpc_coll_extent *parse_extents(PyObject *list, int size)
{
    if (PyList_GET_SIZE(list) != size)
        return PyErr_Format(PyExc_ValueError, "%zd extents for %d ranks", PyList_GET_SIZE(list),
                            size),
               NULL;
    fsdpc_coll_extent *extents = fsdpc_py_array(size, sizeof *extents);
    for (int p = 0; extents && p < size; p++) {
        Py_ssize_t from, numel, to;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, p), "nnn", &from, &numel, &to)) {
            PyMem_Free(extents);
            return NULL;
        }
        extents[p] = (fsdpc_coll_extent){(size_t)from, (size_t)numel, (size_t)to};
    }
    return extents;
}

static PyObject *group_exchange(PyObject *object, PyObject *args)
{
    PyObject *keep, *list;
    unsigned long long send, recv;
    Py_ssize_t bytes, most;
    int root;
    const char *what;
    const fsdpc_group *group = group_of(object);
    if (!group || !PyArg_ParseTuple(args, "OKnKnO!is", &keep, &send, &bytes, &recv, &most,
                                    &PyList_Type, &list, &root, &what))
        return NULL;
    fsdpc_coll_extent *extents = parse_extents(list, fsdpc_group_comm(group)->size);
    const fsdpc_coll op = {.kind = FSDPC_COLL_EXCHANGE,
                           .dtype = FSDPC_U8,
                           .send = at(send),
                           .recv = at(recv),
                           .numel = (size_t)bytes,
                           .most_sent = (size_t)most,
                           .root = root};
    return extents ? post(object, keep, what, op, extents) : NULL;
}

static int parse_counts(PyObject *list, int size, uint64_t *out)
{
    if (PyList_GET_SIZE(list) != size)
        return PyErr_Format(PyExc_ValueError, "%zd counts for %d ranks", PyList_GET_SIZE(list),
                            size),
               -1;
    for (int p = 0; p < size; p++)
        out[p] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, p));
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *group_all_to_all(PyObject *object, PyObject *args)
{
    PyObject *keep, *sends, *receives;
    unsigned long long send, recv;
    const char *what;
    const fsdpc_group *group = group_of(object);
    if (!group || !PyArg_ParseTuple(args, "OKKO!O!s", &keep, &send, &recv, &PyList_Type, &sends,
                                    &PyList_Type, &receives, &what))
        return NULL;
    int size = fsdpc_group_comm(group)->size, rank = fsdpc_group_comm(group)->rank;
    size_t n = (size_t)size, row = 2 * n; /* the counts follow the extents */
    fsdpc_coll_extent *extents = fsdpc_py_array(size, sizeof *extents + row * sizeof(uint64_t));
    if (!extents)
        return NULL;
    fsdpc_coll op = {.kind = FSDPC_COLL_EXCHANGE,
                     .dtype = FSDPC_U8,
                     .send = at(send),
                     .recv = at(recv),
                     .counts = (uint64_t *)(void *)(extents + n)};
    uint64_t *mine = op.counts + (size_t)rank * row;
    if (parse_counts(sends, size, mine) < 0 || parse_counts(receives, size, mine + n) < 0) {
        PyMem_Free(extents);
        return NULL;
    }
    for (size_t p = 0; p < n; p++)
        op.numel += (size_t)mine[p];
    return post(object, keep, what, op, extents);
}

static PyObject *group_barrier(PyObject *object, PyObject *args)
{
    const char *what;
    if (!PyArg_ParseTuple(args, "s", &what))
        return NULL;
    return post(object, Py_None, what, (fsdpc_coll){.kind = FSDPC_COLL_BARRIER}, NULL);
}

static PyObject *message(PyObject *object, PyObject *args, bool receives)
{
    PyObject *keep;
    unsigned long long data, tag;
    Py_ssize_t bytes;
    int peer;
    fsdpc_group *group = group_of(object);
    if (!group || !PyArg_ParseTuple(args, "OKniK", &keep, &data, &bytes, &peer, &tag))
        return NULL;
    py_work *self = work_new(object, keep);
    if (!self)
        return NULL;
    fsdpc_status status;
    USING(object,
          status = receives
                       ? fsdpc_group_recv(group, peer, tag, at(data), (size_t)bytes, &self->work)
                       : fsdpc_group_send(group, peer, tag, at(data), (size_t)bytes, &self->work));
    return posted(self, status);
}

static PyObject *group_send(PyObject *object, PyObject *args)
{
    return message(object, args, false);
}

static PyObject *group_recv(PyObject *object, PyObject *args)
{
    return message(object, args, true);
}

static PyMethodDef group_methods[] = {
    FSDPC_PY_METHOD(Group, part, group_part, METH_VARARGS),
    FSDPC_PY_METHOD(Group, all_reduce, group_all_reduce, METH_VARARGS),
    FSDPC_PY_METHOD(Group, all_gather, group_all_gather, METH_VARARGS),
    FSDPC_PY_METHOD(Group, broadcast, group_broadcast, METH_VARARGS),
    FSDPC_PY_METHOD(Group, exchange, group_exchange, METH_VARARGS),
    FSDPC_PY_METHOD(Group, all_to_all, group_all_to_all, METH_VARARGS),
    FSDPC_PY_METHOD(Group, barrier, group_barrier, METH_VARARGS),
    FSDPC_PY_METHOD(Group, send, group_send, METH_VARARGS),
    FSDPC_PY_METHOD(Group, recv, group_recv, METH_VARARGS),
    FSDPC_PY_METHOD(Group, set_timeout, group_set_timeout, METH_VARARGS),
    FSDPC_PY_METHOD(Group, abort, group_abort, METH_VARARGS),
    FSDPC_PY_METHOD(Group, close, group_close, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_new, group_new},
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_methods, group_methods},
    {Py_tp_doc, (void *)fsdpc_doc_Group},
    {0, NULL},
};

FSDPC_PY_TYPE(group, Group, py_group, 0, group_slots);

/* ---- Works ---- */

static void work_dealloc(PyObject *object)
{
    py_work *self = (py_work *)object;
    if (self->work.group && ((py_group *)self->group)->group)
        USING(self->group, fsdpc_group_drop(&self->work));
    PyMem_Free(self->extents);
    Py_XDECREF(self->keep);
    Py_XDECREF(self->group);
    fsdpc_py_free(object);
}

static PyObject *work_wait(PyObject *object, PyObject *Py_UNUSED(unused))
{
    py_work *self = (py_work *)object;
    if (self->work.group && !group_of(self->group))
        return NULL;
    fsdpc_status status;
    USING(self->group, status = fsdpc_group_wait(&self->work));
    return fsdpc_py_none(status);
}

static PyObject *work_test(PyObject *object, PyObject *Py_UNUSED(unused))
{
    py_work *self = (py_work *)object;
    if (self->work.group && !group_of(self->group))
        return NULL;
    fsdpc_status status;
    USING(self->group, status = fsdpc_group_test(&self->work));
    if (status < 0)
        return fsdpc_py_raise(status);
    return PyBool_FromLong(status == FSDPC_OK);
}

static PyObject *work_source(PyObject *object, void *Py_UNUSED(closure))
{
    const fsdpc_group_work *work = &((py_work *)object)->work;
    return PyLong_FromLong(work->is_message && work->message.receives ? work->message.peer : -1);
}

static PyObject *work_differ(PyObject *object, void *Py_UNUSED(closure))
{
    const py_work *self = (py_work *)object;
    size_t n = self->counts ? (size_t)self->size : 0;
    for (size_t p = 0; p < n; p++) {
        for (size_t q = 0; q < n; q++) {
            uint64_t sent = self->counts[2 * n * p + q], expected = self->counts[2 * n * q + n + p];
            if (sent != expected)
                return Py_BuildValue("(nnKK)", (Py_ssize_t)p, (Py_ssize_t)q,
                                     (unsigned long long)sent, (unsigned long long)expected);
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef work_methods[] = {
    FSDPC_PY_METHOD(GroupWork, wait, work_wait, METH_NOARGS),
    FSDPC_PY_METHOD(GroupWork, test, work_test, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef work_getset[] = {
    FSDPC_PY_ATTRIBUTE(GroupWork, differ, work_differ, NULL),
    FSDPC_PY_ATTRIBUTE(GroupWork, source, work_source, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot work_slots[] = {
    {Py_tp_dealloc, work_dealloc},
    {Py_tp_methods, work_methods},
    {Py_tp_getset, work_getset},
    {Py_tp_doc, (void *)fsdpc_doc_GroupWork},
    {0, NULL},
};

FSDPC_PY_TYPE(group_work, GroupWork, py_work, Py_TPFLAGS_DISALLOW_INSTANTIATION, work_slots);
