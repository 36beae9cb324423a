/* Link: what carries bytes between hosts, as Python sees it.
 *
 * A relay's messages are carried by Python threads: they take what is to be sent, and deliver what
 * came.  Both leave the GIL while they wait or copy.  Other links are a plugin's and carry their
 * own.  A communicator of several hosts takes the link over; the object of a relay stays for the
 * carriers.
 */
#include "py/py_link.h"

#include <string.h>

#include "plugin/plugin.h"

typedef struct py_link {
    PyObject_HEAD fsdpc_link *link;
    bool relay;
    bool given; /* to a communicator */
} py_link;

static fsdpc_status create(const char *path, int rank, int size, fsdpc_link **out)
{
    const fsdpc_plugin *plugin;
    if (!path)
        return fsdpc_link_relay_create(rank, size, out);
    FSDPC_TRY(fsdpc_plugin_load(path, &plugin));
    if (!plugin->link_create)
        return fsdpc_fail(FSDPC_ERR_UNSUPPORTED, "plugin '%s' has no link", plugin->name);
    return plugin->link_create(rank, size, out);
}

static PyObject *link_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank", "size", "plugin", NULL};
    const char *path = NULL;
    int rank, size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii|z", names, &rank, &size, &path))
        return NULL;
    if (size < 1 || rank < 0 || rank >= size)
        return PyErr_Format(PyExc_ValueError, "rank %d of a link of %d", rank, size);
    py_link *self = (py_link *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    fsdpc_status status;
    self->relay = !path;
    FSDPC_PY_WITHOUT_GIL(status = create(path, rank, size, &self->link));
    if (status != FSDPC_OK) {
        Py_DECREF(self);
        return fsdpc_py_raise(status);
    }
    return (PyObject *)self;
}

static void link_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    const py_link *self = (py_link *)object;
    if (self->relay || !self->given)
        fsdpc_link_destroy(self->link);
    type->tp_free(object);
    Py_DECREF(type);
}

fsdpc_link *fsdpc_py_link_give(PyObject *module, PyObject *object)
{
    const fsdpc_py_state *state = PyModule_GetState(module);
    if (!Py_IS_TYPE(object, (PyTypeObject *)state->link_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Link, got %.100s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    py_link *self = (py_link *)object;
    if (self->given) {
        PyErr_SetString(PyExc_RuntimeError, "a link belongs to one communicator");
        return NULL;
    }
    self->given = true;
    if (self->relay)
        fsdpc_link_relay_retain(self->link);
    return self->link;
}

/* The link, if its messages are the caller's to carry. */
static fsdpc_link *relay_of(PyObject *object)
{
    const py_link *self = (py_link *)object;
    if (!self->relay)
        PyErr_SetString(PyExc_TypeError, "this link carries its messages itself");
    return self->relay ? self->link : NULL;
}

static PyObject *link_take(PyObject *object, PyObject *arg)
{
    fsdpc_link *link = relay_of(object);
    double seconds = PyFloat_AsDouble(arg);
    if (!link || (seconds == -1 && PyErr_Occurred()))
        return NULL;
    fsdpc_message *message;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_link_relay_take(link, (int64_t)(seconds * 1e9), &message));
    if (status == FSDPC_IN_PROGRESS)
        Py_RETURN_NONE;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    PyObject *data = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)message->bytes);
    if (data) {
        char *to = PyByteArray_AS_STRING(data);
        Py_BEGIN_ALLOW_THREADS;
        memcpy(to, message->data, message->bytes);
        Py_END_ALLOW_THREADS;
    }
    PyObject *result =
        data ? Py_BuildValue("iIN", message->peer, (unsigned)message->tag, data) : NULL;
    fsdpc_message_free(message);
    return result;
}

static PyObject *link_deliver(PyObject *object, PyObject *args)
{
    fsdpc_link *link = relay_of(object);
    int peer;
    unsigned tag;
    Py_buffer view;
    if (!link || !PyArg_ParseTuple(args, "iIy*", &peer, &tag, &view))
        return NULL;
    fsdpc_message *message;
    fsdpc_status status;
    bool goes_on = false;
    Py_BEGIN_ALLOW_THREADS;
    status = fsdpc_message_create(peer, tag, (size_t)view.len, &message);
    if (status == FSDPC_OK) {
        memcpy(message->data, view.buf, (size_t)view.len);
        goes_on = fsdpc_link_relay_deliver(link, message);
    }
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&view);
    return status == FSDPC_OK ? PyBool_FromLong(goes_on) : fsdpc_py_raise(status);
}

static PyObject *link_abort(PyObject *object, PyObject *arg)
{
    const char *reason = PyUnicode_AsUTF8(arg);
    if (!reason)
        return NULL;
    fsdpc_link_abort(((py_link *)object)->link, reason);
    Py_RETURN_NONE;
}

static PyObject *link_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    fsdpc_link *link = relay_of(object);
    if (!link)
        return NULL;
    fsdpc_link_relay_close(link);
    Py_RETURN_NONE;
}

static PyObject *get_sent_bytes(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLongLong(((py_link *)object)->link->sent_bytes);
}

static PyObject *get_failed(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(fsdpc_link_health(((py_link *)object)->link) != FSDPC_OK);
}

static PyMethodDef link_methods[] = {
    {"take", link_take, METH_O,
     "take(seconds) -> (peer, tag, bytearray): the next message to carry; None: there is none yet. "
     "Raises PeerError at the end."},
    {"deliver", link_deliver, METH_VARARGS,
     "deliver(peer, tag, data) -> bool: this message has come; False: no other will."},
    {"abort", link_abort, METH_O, "abort(reason): every operation fails with it."},
    {"close", link_close, METH_NOARGS, "No more is sent."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef link_getset[] = {
    {"sent_bytes", get_sent_bytes, NULL, "Bytes sent to other hosts so far.", NULL},
    {"failed", get_failed, NULL, "Whether it was aborted, by this rank or another.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot link_slots[] = {
    {Py_tp_new, link_new},
    {Py_tp_dealloc, link_dealloc},
    {Py_tp_methods, link_methods},
    {Py_tp_getset, link_getset},
    {Py_tp_doc, "Link(rank, size, plugin=None): messages between hosts, carried by the caller's "
                "threads, or by "
                "the plugin at that path."},
    {0, NULL},
};

PyType_Spec fsdpc_py_link_spec = {
    .name = "fsdpc._core.Link",
    .basicsize = sizeof(py_link),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = link_slots,
};
