/* Link: the Python object that carries bytes between hosts.
 *
 * Python threads carry a relay's messages: one takes outgoing messages, others deliver incoming
 * ones.  They release the GIL while they wait or copy.  They work on views of this object's
 * buffers.  Each direction has several buffers, so several messages can be in flight; a carrier
 * passes the index of its buffer.  Other links belong to a plugin and carry their own messages.  A
 * multi-host communicator takes over the link; the relay's object remains for the carriers.
 */
#include "bind/engine/link.h"

#include "plugin/plugin.h"

enum { ROOMS = 4 };

typedef struct py_link {
    PyObject_HEAD fsdpc_link *link;
    bool relay;
    bool given;                             /* to a communicator */
    fsdpc_message sent[ROOMS], came[ROOMS]; /* with the carriers */
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
    FSDPC_PY_KEYWORDS(names, "rank", "size", "plugin");
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
    py_link *self = (py_link *)object;
    if (self->relay || !self->given)
        fsdpc_link_destroy(self->link);
    for (int i = 0; i < ROOMS; i++) {
        fsdpc_message_free(&self->sent[i]);
        fsdpc_message_free(&self->came[i]);
    }
    fsdpc_py_free(object);
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

/* Returns the link, if the caller carries its messages. */
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

/* Returns the buffer with this index; NULL if there is none. */
static fsdpc_message *room_of(fsdpc_message *rooms, int number)
{
    if (number >= 0 && number < ROOMS)
        return &rooms[number];
    PyErr_Format(PyExc_IndexError, "room %d of %d", number, ROOMS);
    return NULL;
}

static PyObject *link_take(PyObject *object, PyObject *args)
{
    fsdpc_link *link = relay_of(object);
    double seconds;
    int number;
    if (!link || !PyArg_ParseTuple(args, "id", &number, &seconds))
        return NULL;
    fsdpc_message *message = room_of(((py_link *)object)->sent, number);
    if (!message)
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_link_relay_take(link, (int64_t)(seconds * 1e9), message));
    if (status == FSDPC_IN_PROGRESS)
        Py_RETURN_NONE;
    if (status != FSDPC_OK)
        return fsdpc_py_raise(status);
    return Py_BuildValue("iIN", message->peer, (unsigned)message->tag, view_of(message));
}

static PyObject *link_room(PyObject *object, PyObject *args)
{
    int number;
    Py_ssize_t bytes;
    if (!relay_of(object) || !PyArg_ParseTuple(args, "in", &number, &bytes))
        return NULL;
    fsdpc_message *message = room_of(((py_link *)object)->came, number);
    if (!message)
        return NULL;
    if (bytes < 0)
        return PyErr_Format(PyExc_ValueError, "a message of %zd bytes", bytes);
    fsdpc_status status = fsdpc_message_reserve(message, (size_t)bytes);
    message->bytes = status == FSDPC_OK ? (size_t)bytes : 0;
    return status == FSDPC_OK ? view_of(message) : fsdpc_py_raise(status);
}

static PyObject *link_deliver(PyObject *object, PyObject *args)
{
    fsdpc_link *link = relay_of(object);
    int number, peer;
    unsigned tag;
    if (!link || !PyArg_ParseTuple(args, "iiI", &number, &peer, &tag))
        return NULL;
    fsdpc_message *message = room_of(((py_link *)object)->came, number);
    if (!message)
        return NULL;
    if (peer < 0 || peer >= link->size)
        return PyErr_Format(PyExc_ValueError, "rank %d on a link of %d", peer, link->size);
    message->peer = peer;
    message->tag = tag;
    bool goes_on;
    FSDPC_PY_WITHOUT_GIL(goes_on = fsdpc_link_relay_deliver(link, message));
    message->bytes = 0; /* until there is room for another message */
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

FSDPC_PY_GETTER(get_sent_bytes, PyLong_FromUnsignedLongLong(((py_link *)object)->link->sent_bytes))
FSDPC_PY_GETTER(get_failed,
                PyBool_FromLong(fsdpc_link_health(((py_link *)object)->link) != FSDPC_OK))
FSDPC_PY_GETTER(get_rooms, PyLong_FromLong(ROOMS))
FSDPC_PY_GETTER(get_rank, PyLong_FromLong(((py_link *)object)->link->rank))
FSDPC_PY_GETTER(get_tags, PyLong_FromUnsignedLong(((py_link *)object)->link->tags))

static PyMethodDef link_methods[] = {
    FSDPC_PY_METHOD(Link, take, link_take, METH_VARARGS),
    FSDPC_PY_METHOD(Link, room, link_room, METH_VARARGS),
    FSDPC_PY_METHOD(Link, deliver, link_deliver, METH_VARARGS),
    FSDPC_PY_METHOD(Link, abort, link_abort, METH_O),
    FSDPC_PY_METHOD(Link, close, link_close, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef link_getset[] = {
    FSDPC_PY_ATTRIBUTE(Link, sent_bytes, get_sent_bytes, NULL),
    FSDPC_PY_ATTRIBUTE(Link, rank, get_rank, NULL),
    FSDPC_PY_ATTRIBUTE(Link, rooms, get_rooms, NULL),
    FSDPC_PY_ATTRIBUTE(Link, tags, get_tags, NULL),
    FSDPC_PY_ATTRIBUTE(Link, failed, get_failed, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot link_slots[] = {
    {Py_tp_new, link_new},       {Py_tp_dealloc, link_dealloc},       {Py_tp_methods, link_methods},
    {Py_tp_getset, link_getset}, {Py_tp_doc, (void *)fsdpc_doc_Link}, {0, NULL},
};

FSDPC_PY_TYPE(link, Link, py_link, 0, link_slots);
