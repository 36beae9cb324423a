/* Link: what carries bytes between hosts, as Python sees it.
 *
 * A relay's messages are carried by two Python threads: one takes what is to be sent, one delivers
 * what came.  Both leave the GIL while they wait or copy, and each has a room of its own here, of
 * which it sees views.  Other links are a plugin's and carry their own.  A communicator of several
 * hosts takes the link over; the object of a relay stays for the carriers.
 */
#include "py/py_link.h"

#include "plugin/plugin.h"

typedef struct py_link {
    PyObject_HEAD fsdpc_link *link;
    bool relay;
    bool given;               /* to a communicator */
    fsdpc_message sent, came; /* in the carriers' hands */
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
    py_link *self = (py_link *)object;
    if (self->relay || !self->given)
        fsdpc_link_destroy(self->link);
    fsdpc_message_free(&self->sent);
    fsdpc_message_free(&self->came);
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

static PyObject *view_of(const fsdpc_message *message)
{
    return PyMemoryView_FromMemory((char *)message->data, (Py_ssize_t)message->bytes, PyBUF_WRITE);
}

static PyObject *link_take(PyObject *object, PyObject *arg)
{
    fsdpc_link *link = relay_of(object);
    double seconds = PyFloat_AsDouble(arg);
    if (!link || (seconds == -1 && PyErr_Occurred()))
        return NULL;
    fsdpc_message *message = &((py_link *)object)->sent;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_link_relay_take(link, (int64_t)(seconds * 1e9), message));
    if (status == FSDPC_IN_PROGRESS)
        Py_RETURN_NONE;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return Py_BuildValue("iIN", message->peer, (unsigned)message->tag, view_of(message));
}

static PyObject *link_room(PyObject *object, PyObject *arg)
{
    fsdpc_link *link = relay_of(object);
    size_t bytes = PyLong_AsSize_t(arg);
    if (!link || (bytes == (size_t)-1 && PyErr_Occurred()))
        return NULL;
    fsdpc_message *message = &((py_link *)object)->came;
    fsdpc_status status = fsdpc_message_reserve(message, bytes);
    message->bytes = status == FSDPC_OK ? bytes : 0;
    return status == FSDPC_OK ? view_of(message) : fsdpc_py_raise(status);
}

static PyObject *link_deliver(PyObject *object, PyObject *args)
{
    fsdpc_link *link = relay_of(object);
    fsdpc_message *message = &((py_link *)object)->came;
    bool goes_on;
    if (!link || !PyArg_ParseTuple(args, "iI", &message->peer, &message->tag))
        return NULL;
    FSDPC_PY_WITHOUT_GIL(goes_on = fsdpc_link_relay_deliver(link, message));
    message->bytes = 0; /* until there is room for another */
    return PyBool_FromLong(goes_on);
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
     "take(seconds) -> (peer, tag, memoryview): the next message to carry, until the next call; "
     "None: there is none yet. Raises PeerError at the end."},
    {"room", link_room, METH_O,
     "room(size) -> memoryview: where the next message is to come, until it is delivered."},
    {"deliver", link_deliver, METH_VARARGS,
     "deliver(peer, tag) -> bool: what is in the room has come; False: no other will."},
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
