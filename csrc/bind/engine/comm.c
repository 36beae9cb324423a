/* Comm: the Python object for a communicator.
 *
 * fsdpc.distributed creates one for the world, and split() one for a row or column of a mesh.
 * Collectives accept tensors and work in place wherever PyTorch's do. Every call that may wait
 * releases the GIL; the interrupt callback reacquires it briefly, at least every 100 ms, to let
 * Ctrl-C through.
 *
 * With several ranks on GPUs, a communicator over host memory is created first, and the plugin
 * builds its communicator on it.
 *
 * close() leaves the group without waiting for peers. Every call on a closed communicator raises
 * an error.
 */
#include "bind/engine.h"

#include "base/size.h"
#include "comm/coll_math.h"
#include "comm/comm_hosts.h"
#include "comm/rendezvous.h"
#include "bind/engine/transport.h"
#include "plugin/plugin.h"

fsdpc_status fsdpc_py_check_signals(void *Py_UNUSED(arg))
{
    PyGILState_STATE gil = PyGILState_Ensure();
    bool interrupted = !PyErr_Occurred() && PyErr_CheckSignals() != 0;
    if (interrupted)
        PyErr_Clear(); /* bind/error.c raises it again from the status */
    PyGILState_Release(gil);
    if (interrupted)
        return fsdpc_fail(FSDPC_ERR_INTERRUPT, "interrupted while waiting for other ranks");
    return FSDPC_OK;
}

static void write_notice(void *Py_UNUSED(arg), const char *text)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PySys_WriteStderr("fsdpc: %.900s\n", text);
    PyGILState_Release(gil);
}

fsdpc_comm *fsdpc_py_comm_of(PyObject *object)
{
    fsdpc_py_comm *self = (fsdpc_py_comm *)object;
    if (self->closed) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the communicator is closed: fsdpc.shutdown() was called");
        return NULL;
    }
    return self->comm;
}

static fsdpc_status create(const fsdpc_runtime *runtime, fsdpc_comm_config *config,
                           fsdpc_transport *transport, const char *library, fsdpc_py_comm *self)
{
    bool by_plugin = runtime->plugin && config->size > 1;
    if (!config->address)
        return fsdpc_comm_world_create(config, self->hosts, NULL, &self->comm);
    if (by_plugin && !runtime->plugin->comm_create) {
        fsdpc_transport_destroy(transport);
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED,
                          "a world of several ranks on device '%s': the plugin has no communicator",
                          runtime->plugin->name);
    }
    config->device = by_plugin ? runtime->host : runtime->device;
    fsdpc_comm *control;
    FSDPC_TRY(fsdpc_comm_world_create(config, self->hosts, transport, &control));
    self->over = transport ? control : NULL;
    self->comm = by_plugin ? NULL : control;
    if (!by_plugin)
        return FSDPC_OK;
    const fsdpc_plugin_option options[] = {{"library", library}, {NULL, NULL}};
    config->device = runtime->device;
    fsdpc_status status = runtime->plugin->comm_create(config, control, options, &self->comm);
    if (status != FSDPC_OK) {
        self->over = NULL;
        fsdpc_comm_leave(control);
        fsdpc_comm_destroy(control);
    }
    return status;
}

/* Returns a multi-host world's transport. Returns NULL if there is only one host, or with an
 * exception set on failure. */
static fsdpc_transport *transport_of(PyTypeObject *type, PyObject *object, int size, int hosts,
                                     bool pretended)
{
    if (hosts < 1 || size % hosts)
        PyErr_Format(PyExc_ValueError, "%d ranks on %d hosts: every host must have as many", size,
                     hosts);
    else if (hosts > 1 && object == Py_None && !pretended)
        PyErr_Format(PyExc_ValueError, "ranks on %d hosts need a transport between them", hosts);
    return !PyErr_Occurred() && hosts > 1 && !pretended
               ? fsdpc_py_transport_give(PyType_GetModule(type), object)
               : NULL;
}

static int parse_ranks(PyObject *list, int size, int *out)
{
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != size || size > FSDPC_COLL_MAX_RANKS) {
        PyErr_Format(PyExc_ValueError, "ranks is a list of %d numbers, up to %d", size,
                     FSDPC_COLL_MAX_RANKS);
        return -1;
    }
    for (int i = 0; i < size; i++)
        out[i] = (int)PyLong_AsLong(PyList_GET_ITEM(list, i));
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "rank", "size", "address", "socket_fd", "news_fd", "local_rank",
                      "library", "secret", "hosts", "transport", "ranks");
    int rank, size, socket_fd = -1, news_fd = -1, local_rank = 0, hosts = 1;
    const char *address, *library = NULL, *secret = NULL;
    PyObject *transport_object = Py_None, *ranks_object = Py_None;
    int ranks[FSDPC_COLL_MAX_RANKS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiz|iiizziOO", names, &rank, &size, &address,
                                     &socket_fd, &news_fd, &local_rank, &library, &secret, &hosts,
                                     &transport_object, &ranks_object) ||
        (ranks_object != Py_None && parse_ranks(ranks_object, size, ranks) < 0))
        return NULL;
    fsdpc_py_state *state = fsdpc_py_state_of_type(type);
    if (state && !state->runtime.ready)
        state->runtime.local_rank = local_rank;
    fsdpc_runtime *runtime = state ? fsdpc_py_state_runtime(state) : NULL;
    if (!runtime)
        return NULL;
    fsdpc_transport *transport = transport_of(type, transport_object, size, hosts, !address);
    if (PyErr_Occurred())
        return NULL;
    fsdpc_py_comm *self = (fsdpc_py_comm *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->hosts = hosts;
    self->interrupt.fn = fsdpc_py_check_signals;
    fsdpc_comm_config config = {.rank = rank,
                                .size = size,
                                .device = runtime->device,
                                .trace = runtime->trace,
                                .timeout_s = runtime->env.timeout_s,
                                .notice_s = runtime->env.notice_s,
                                .interrupt = self->interrupt,
                                .notice = runtime->env.log > 0 ? write_notice : NULL,
                                .log = {.level = (fsdpc_log_level)runtime->env.log},
                                .address = address,
                                .secret = secret,
                                .socket_fd = socket_fd,
                                .news_fd = news_fd,
                                .ranks = ranks_object == Py_None ? NULL : ranks,
                                .spin = fsdpc_usable_cores() >= size / hosts,
                                .lazy = runtime->played,
                                .orders = runtime->orders};
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = create(runtime, &config, transport, library, self));
    if (status != FSDPC_OK) {
        Py_DECREF(self);
        return fsdpc_py_raise(status);
    }
    return (PyObject *)self;
}

static PyObject *listen_for_rank(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *address;
    int rank, fd;
    if (!PyArg_ParseTuple(args, "si:listen_for_rank", &address, &rank))
        return NULL;
    fsdpc_status status = fsdpc_rendezvous_listen(address, rank, &fd);
    return status == FSDPC_OK ? PyLong_FromLong(fd) : fsdpc_py_raise(status);
}

static int parse_peer(PyObject *item, fsdpc_host_watch_peer *out)
{
    const char *host;
    if (!PyArg_ParseTuple(item, "iiis", &out->fd, &out->first_rank, &out->n_ranks, &host))
        return -1;
    snprintf(out->host, sizeof out->host, "%s", host);
    return 0;
}

static PyObject *comm_watch(PyObject *object, PyObject *args)
{
    const fsdpc_py_comm *self = (fsdpc_py_comm *)object;
    const fsdpc_comm *comm = fsdpc_py_comm_of(object);
    const fsdpc_runtime *runtime = comm ? fsdpc_py_runtime_of_type(Py_TYPE(object)) : NULL;
    PyObject *list;
    const char *host;
    if (!runtime || !PyArg_ParseTuple(args, "O!s", &PyList_Type, &list, &host))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(list);
    fsdpc_host_watch_peer *peers = fsdpc_py_array(n, sizeof *peers);
    if (!peers)
        return NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (parse_peer(PyList_GET_ITEM(list, i), &peers[i]) < 0) {
            PyMem_Free(peers);
            return NULL;
        }
    }
    fsdpc_host_watch_config config = {
        .silence_s = runtime->env.watch_s, .n_peers = (int)n, .peers = peers};
    snprintf(config.host, sizeof config.host, "%s", host);
    fsdpc_status status = fsdpc_comm_hosts_watch(self->over, &config);
    PyMem_Free(peers);
    return fsdpc_py_none(status);
}

static PyObject *comm_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_comm *self = (fsdpc_py_comm *)object;
    self->closed = true;
    if (self->comm)
        FSDPC_PY_WITHOUT_GIL(fsdpc_comm_leave(self->comm));
    if (self->users > 0)
        Py_RETURN_NONE; /* units use its memory: the last one to be freed destroys it */
    fsdpc_comm *comm = self->comm;
    self->comm = NULL;
    Py_BEGIN_ALLOW_THREADS;
    fsdpc_comm_destroy(comm);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static void comm_dealloc(PyObject *object)
{
    fsdpc_py_comm *self = (fsdpc_py_comm *)object;
    FSDPC_PY_WITHOUT_GIL(fsdpc_comm_destroy(self->comm)); /* peers may need this rank's threads */
    Py_XDECREF(self->parent);
    fsdpc_py_free(object);
}

/* Runs an operation on a tensor's elements, in place unless `recv` is set; `t` is NULL if the
 * operation uses no tensor. */
static PyObject *run_op(fsdpc_comm *comm, fsdpc_coll op, const fsdpc_tensor *t)
{
    op.unit = -1;
    if (t) {
        op.dtype = t->dtype;
        op.send = t->data;
        op.recv = op.recv ? op.recv : t->data;
        op.numel = t->numel;
    }
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_comm_run(comm, &op));
    return fsdpc_py_none(status);
}

int fsdpc_py_parse_red(const char *name, int n_known, fsdpc_red *out)
{
    static const char *const names[] = {
#define X(red, text) text,
        FSDPC_RED_TABLE(X)
#undef X
    };
    for (int i = 0; i < n_known; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (fsdpc_red)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 n_known == FSDPC_RED_COUNT ? "unknown reduction '%s'"
                                            : "op must be sum, max or min, got '%s'",
                 name);
    return -1;
}

static PyObject *comm_all_reduce(PyObject *object, PyObject *args)
{
    fsdpc_comm *comm = fsdpc_py_comm_of(object);
    PyObject *value;
    const char *name = "sum";
    fsdpc_red red;
    if (!comm || !PyArg_ParseTuple(args, "O|s", &value, &name) ||
        fsdpc_py_parse_red(name, FSDPC_RED_MIN + 1, &red) < 0)
        return NULL;
    const fsdpc_tensor *t = fsdpc_py_tensor_of(value);
    const fsdpc_coll op = {.kind = FSDPC_COLL_ALL_REDUCE, .what = "all_reduce", .op = red};
    return t ? run_op(comm, op, t) : NULL;
}

static PyObject *comm_broadcast(PyObject *object, PyObject *args)
{
    fsdpc_comm *comm = fsdpc_py_comm_of(object);
    PyObject *value;
    int root = 0;
    if (!comm || !PyArg_ParseTuple(args, "O|i", &value, &root))
        return NULL;
    const fsdpc_tensor *t = fsdpc_py_tensor_of(value);
    const fsdpc_coll op = {.kind = FSDPC_COLL_BROADCAST, .what = "broadcast", .root = root};
    return t ? run_op(comm, op, t) : NULL;
}

static PyObject *comm_all_gather(PyObject *object, PyObject *value)
{
    fsdpc_comm *comm = fsdpc_py_comm_of(object);
    fsdpc_tensor *t = comm ? fsdpc_py_tensor_of(value) : NULL;
    fsdpc_runtime *runtime = t ? fsdpc_py_runtime_of_type(Py_TYPE(object)) : NULL;
    if (!runtime)
        return NULL;
    if (t->ndim == FSDPC_MAX_DIMS) {
        PyErr_SetString(PyExc_ValueError, "all_gather adds a dimension; the tensor has 8 already");
        return NULL;
    }
    size_t shape[FSDPC_MAX_DIMS] = {(size_t)comm->size};
    memcpy(shape + 1, t->shape, (size_t)t->ndim * sizeof *shape);
    fsdpc_tensor *all;
    fsdpc_status status = fsdpc_tensor_create(runtime->device, t->dtype, t->ndim + 1, shape, &all);
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    const fsdpc_coll op = {.kind = FSDPC_COLL_ALL_GATHER, .what = "all_gather", .recv = all->data};
    PyObject *done = run_op(comm, op, t);
    if (!done) {
        fsdpc_tensor_release(all);
        return NULL;
    }
    Py_DECREF(done);
    return fsdpc_py_tensor_wrap(PyType_GetModule(Py_TYPE(object)), all);
}

static PyObject *comm_barrier(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_comm *comm = fsdpc_py_comm_of(object);
    const fsdpc_coll op = {.kind = FSDPC_COLL_BARRIER, .what = "barrier"};
    return comm ? run_op(comm, op, NULL) : NULL;
}

static PyObject *comm_split(PyObject *object, PyObject *args)
{
    fsdpc_comm *comm = fsdpc_py_comm_of(object);
    int color, key;
    if (!comm || !PyArg_ParseTuple(args, "ii", &color, &key))
        return NULL;
    PyTypeObject *type = Py_TYPE(object);
    fsdpc_py_comm *child = (fsdpc_py_comm *)type->tp_alloc(type, 0);
    if (!child)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_comm_split(comm, color, key, &child->comm));
    if (status != FSDPC_OK) {
        Py_DECREF(child);
        return fsdpc_py_raise(status);
    }
    child->parent = Py_NewRef(object);
    return (PyObject *)child;
}

static PyObject *comm_abort(PyObject *object, PyObject *args)
{
    fsdpc_comm *comm = fsdpc_py_comm_of(object);
    const char *reason;
    if (!comm || !PyArg_ParseTuple(args, "s", &reason))
        return NULL;
    FSDPC_PY_WITHOUT_GIL(fsdpc_comm_abort(comm, reason));
    Py_RETURN_NONE;
}

#define OF_OPEN(name, value)                                                                       \
    static PyObject *comm_get_##name(PyObject *object, void *Py_UNUSED(unused))                    \
    {                                                                                              \
        const fsdpc_comm *comm = fsdpc_py_comm_of(object);                                         \
        return comm ? (value) : NULL;                                                              \
    }
OF_OPEN(rank, PyLong_FromLong(comm->rank))
OF_OPEN(world_rank, PyLong_FromLong(comm->world_rank))
OF_OPEN(size, PyLong_FromLong(comm->size))
OF_OPEN(waited_ns, PyLong_FromLongLong(comm->waited_ns))
OF_OPEN(transport, PyUnicode_FromString(comm->ops->name))
#undef OF_OPEN
FSDPC_PY_GETTER(comm_get_hosts, PyLong_FromLong(((fsdpc_py_comm *)object)->hosts))

static PyMethodDef comm_methods[] = {
    FSDPC_PY_METHOD(Comm, all_reduce, comm_all_reduce, METH_VARARGS),
    FSDPC_PY_METHOD(Comm, all_gather, comm_all_gather, METH_O),
    FSDPC_PY_METHOD(Comm, broadcast, comm_broadcast, METH_VARARGS),
    FSDPC_PY_METHOD(Comm, barrier, comm_barrier, METH_NOARGS),
    FSDPC_PY_METHOD(Comm, split, comm_split, METH_VARARGS),
    FSDPC_PY_METHOD(Comm, watch, comm_watch, METH_VARARGS),
    FSDPC_PY_METHOD(Comm, abort, comm_abort, METH_VARARGS),
    FSDPC_PY_METHOD(Comm, close, comm_close, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef comm_getset[] = {
    FSDPC_PY_ATTRIBUTE(Comm, rank, comm_get_rank, NULL),
    FSDPC_PY_ATTRIBUTE(Comm, world_rank, comm_get_world_rank, NULL),
    FSDPC_PY_ATTRIBUTE(Comm, size, comm_get_size, NULL),
    FSDPC_PY_ATTRIBUTE(Comm, hosts, comm_get_hosts, NULL),
    FSDPC_PY_ATTRIBUTE(Comm, waited_ns, comm_get_waited_ns, NULL),
    FSDPC_PY_ATTRIBUTE(Comm, transport, comm_get_transport, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot comm_slots[] = {
    {Py_tp_new, comm_new},       {Py_tp_dealloc, comm_dealloc},       {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_getset}, {Py_tp_doc, (void *)fsdpc_doc_Comm}, {0, NULL},
};

FSDPC_PY_TYPE(comm, Comm, fsdpc_py_comm, 0, comm_slots);

PyMethodDef fsdpc_py_comm_functions[] = {
    FSDPC_PY_FUNCTION(listen_for_rank, listen_for_rank, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};
