/* Transport: the Python object that carries bytes between hosts.
 *
 * Python threads carry a relay's messages: one takes outgoing messages, and others deliver incoming
 * ones. They release the GIL while they wait or copy. The threads work on views of this object's
 * buffers. Each direction has several buffers per peer, so several messages can be in flight, and
 * those of a slow peer leave room for those of the others; a carrier passes the index of its buffer.
 * Any other transport belongs to a plugin and carries its own messages. A multi-host communicator
 * takes ownership of the transport, but a relay's Python object remains for its carriers.
 */
#include "bind/engine/transport.h"

#include "plugin/plugin.h"

enum { BUFFERS = 4 }; /* per peer and direction */

/* A buffer of each direction, with the carriers. */
typedef struct py_buffers {
    fsdpc_message sent, came;
} py_buffers;

typedef struct py_transport {
    PyObject_HEAD fsdpc_transport *transport;
    bool relay;
    bool given; /* to a communicator */
    py_buffers *buffers;
    int n_buffers;
} py_transport;

static fsdpc_status create(const char *path, int rank, int size, fsdpc_transport **out)
{
    const fsdpc_plugin *plugin;
    if (!path)
        return fsdpc_transport_relay_create(rank, size, out);
    FSDPC_TRY(fsdpc_plugin_load(path, &plugin));
    if (!plugin->transport_create)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "plugin '%s' has no transport between hosts",
                          plugin->name);
    return plugin->transport_create(rank, size, out);
}

static PyObject *transport_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "rank", "size", "plugin", "peers");
    const char *path = NULL;
    int rank, size, peers = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii|zi", names, &rank, &size, &path, &peers))
        return NULL;
    if (size < 1 || rank < 0 || rank >= size)
        return PyErr_Format(PyExc_ValueError, "rank %d of a transport of %d", rank, size);
    if (peers < 1 || (peers >= size && peers > 1))
        return PyErr_Format(PyExc_ValueError, "%d peers on a transport of %d", peers, size);
    py_transport *self = (py_transport *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    fsdpc_status status;
    self->relay = !path;
    self->buffers = PyMem_Calloc((size_t)peers * BUFFERS, sizeof *self->buffers);
    if (!self->buffers) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->n_buffers = peers * BUFFERS;
    FSDPC_PY_WITHOUT_GIL(status = create(path, rank, size, &self->transport));
    if (status != FSDPC_OK) {
        Py_DECREF(self);
        return fsdpc_py_raise(status);
    }
    return (PyObject *)self;
}

static void transport_dealloc(PyObject *object)
{
    py_transport *self = (py_transport *)object;
    if (self->relay || !self->given)
        fsdpc_transport_destroy(self->transport);
    for (int i = 0; i < self->n_buffers; i++) {
        fsdpc_message_free(&self->buffers[i].sent);
        fsdpc_message_free(&self->buffers[i].came);
    }
    PyMem_Free(self->buffers);
    fsdpc_py_free(object);
}

fsdpc_transport *fsdpc_py_transport_give(PyObject *module, PyObject *object)
{
    const fsdpc_py_state *state = PyModule_GetState(module);
    if (!Py_IS_TYPE(object, (PyTypeObject *)state->transport_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Transport, got %.100s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    py_transport *self = (py_transport *)object;
    if (self->given) {
        PyErr_SetString(PyExc_RuntimeError, "a transport belongs to one communicator");
        return NULL;
    }
    self->given = true;
    if (self->relay)
        fsdpc_transport_relay_retain(self->transport);
    return self->transport;
}

/* Returns the transport if it is a relay, or NULL with TypeError. */
static fsdpc_transport *relay_of(PyObject *object)
{
    const py_transport *self = (py_transport *)object;
    if (!self->relay)
        PyErr_SetString(PyExc_TypeError, "this transport carries its messages itself");
    return self->relay ? self->transport : NULL;
}

static PyObject *view_of(const fsdpc_message *message)
{
    return PyMemoryView_FromMemory((char *)message->data, (Py_ssize_t)message->bytes, PyBUF_WRITE);
}

/* Returns the buffers with this index, or NULL if they do not exist. */
static py_buffers *buffers_of(PyObject *object, int number)
{
    const py_transport *self = (py_transport *)object;
    if (number >= 0 && number < self->n_buffers)
        return &self->buffers[number];
    PyErr_Format(PyExc_IndexError, "buffer %d of %d", number, self->n_buffers);
    return NULL;
}

static PyObject *transport_take(PyObject *object, PyObject *args)
{
    fsdpc_transport *transport = relay_of(object);
    double seconds;
    int number;
    if (!transport || !PyArg_ParseTuple(args, "id", &number, &seconds))
        return NULL;
    py_buffers *buffers = buffers_of(object, number);
    if (!buffers)
        return NULL;
    fsdpc_message *message = &buffers->sent;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(
        status = fsdpc_transport_relay_take(transport, (int64_t)(seconds * 1e9), message));
    if (status == FSDPC_IN_PROGRESS)
        Py_RETURN_NONE;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return Py_BuildValue("iIN", message->peer, (unsigned)message->tag, view_of(message));
}

static PyObject *transport_buffer(PyObject *object, PyObject *args)
{
    int number;
    Py_ssize_t bytes;
    if (!relay_of(object) || !PyArg_ParseTuple(args, "in", &number, &bytes))
        return NULL;
    py_buffers *buffers = buffers_of(object, number);
    if (!buffers)
        return NULL;
    fsdpc_message *message = &buffers->came;
    if (bytes < 0)
        return PyErr_Format(PyExc_ValueError, "a message of %zd bytes", bytes);
    fsdpc_status status = fsdpc_message_reserve(message, (size_t)bytes);
    message->bytes = status == FSDPC_OK ? (size_t)bytes : 0;
    return status == FSDPC_OK ? view_of(message) : fsdpc_py_raise(status);
}

static PyObject *transport_deliver(PyObject *object, PyObject *args)
{
    fsdpc_transport *transport = relay_of(object);
    int number, peer;
    unsigned tag;
    if (!transport || !PyArg_ParseTuple(args, "iiI", &number, &peer, &tag))
        return NULL;
    py_buffers *buffers = buffers_of(object, number);
    if (!buffers)
        return NULL;
    fsdpc_message *message = &buffers->came;
    if (peer < 0 || peer >= transport->size)
        return PyErr_Format(PyExc_ValueError, "rank %d on a transport of %d", peer,
                            transport->size);
    message->peer = peer;
    message->tag = tag;
    bool goes_on;
    FSDPC_PY_WITHOUT_GIL(goes_on = fsdpc_transport_relay_deliver(transport, message));
    message->bytes = 0; /* until there is room for another message */
    return PyBool_FromLong(goes_on);
}

static PyObject *transport_abort(PyObject *object, PyObject *arg)
{
    const char *reason = PyUnicode_AsUTF8(arg);
    if (!reason)
        return NULL;
    fsdpc_transport_abort(((py_transport *)object)->transport, reason);
    Py_RETURN_NONE;
}

static PyObject *transport_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_transport *transport = relay_of(object);
    if (!transport)
        return NULL;
    fsdpc_transport_relay_close(transport);
    Py_RETURN_NONE;
}

FSDPC_PY_GETTER(get_sent_bytes,
                PyLong_FromUnsignedLongLong(((py_transport *)object)->transport->sent_bytes))
FSDPC_PY_GETTER(get_failed,
                PyBool_FromLong(fsdpc_transport_health(((py_transport *)object)->transport) !=
                                FSDPC_OK))
FSDPC_PY_GETTER(get_buffers, PyLong_FromLong(((py_transport *)object)->n_buffers))
FSDPC_PY_GETTER(get_rank, PyLong_FromLong(((py_transport *)object)->transport->rank))
FSDPC_PY_GETTER(get_tags, PyLong_FromUnsignedLong(((py_transport *)object)->transport->tags))

static PyMethodDef transport_methods[] = {
    FSDPC_PY_METHOD(Transport, take, transport_take, METH_VARARGS),
    FSDPC_PY_METHOD(Transport, buffer, transport_buffer, METH_VARARGS),
    FSDPC_PY_METHOD(Transport, deliver, transport_deliver, METH_VARARGS),
    FSDPC_PY_METHOD(Transport, abort, transport_abort, METH_O),
    FSDPC_PY_METHOD(Transport, close, transport_close, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef transport_getset[] = {
    FSDPC_PY_ATTRIBUTE(Transport, sent_bytes, get_sent_bytes, NULL),
    FSDPC_PY_ATTRIBUTE(Transport, rank, get_rank, NULL),
    FSDPC_PY_ATTRIBUTE(Transport, buffers, get_buffers, NULL),
    FSDPC_PY_ATTRIBUTE(Transport, tags, get_tags, NULL),
    FSDPC_PY_ATTRIBUTE(Transport, failed, get_failed, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot transport_slots[] = {
    {Py_tp_new, transport_new},
    {Py_tp_dealloc, transport_dealloc},
    {Py_tp_methods, transport_methods},
    {Py_tp_getset, transport_getset},
    {Py_tp_doc, (void *)fsdpc_doc_Transport},
    {0, NULL},
};

FSDPC_PY_TYPE(transport, Transport, py_transport, 0, transport_slots);
