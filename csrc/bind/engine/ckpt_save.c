/* Save: the Python object for one running save; a thin layer over csrc/ckpt/save.c.
 *
 * The object lays out the files. It copies paths and keeps alive the tensors whose memory is saved
 * and the strings that are written to the files. run() saves on the calling thread, without the
 * GIL. start() copies the shards, in the file's dtype, into a staging buffer from the runtime's
 * counted memory, which the next save reuses. It then hands them to a thread that never takes the
 * GIL (except for a test's hook). wait() joins the thread and raises its error; after Ctrl-C, the
 * save continues. Shards of a remote device were copied to the host when the object was created,
 * and are not copied again.
 *
 * Python splits off a communicator for each background save, and only the save's thread uses it.
 * The communicator's interrupt callback and trace are removed, because they belong to the main
 * thread.
 */
#include "bind/engine/ckpt.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/thread.h"
#include "ckpt/save.h"
#include "ckpt/staging.h"

typedef struct py_save {
    PyObject_HEAD fsdpc_ckpt_plan plan;
    PyObject *comm, *keep, *hook; /* strong; keep: tensors, and the layout's strings */
    fsdpc_runtime *runtime;
    void *staging;
    fsdpc_py_ckpt_host host; /* holds the shards if the device is remote */
    pthread_t thread;
    bool started, joined;
    _Atomic int done;
    fsdpc_status status;
    char text[512];
} py_save;

static fsdpc_status gather(void *arg, const void *send, size_t bytes, void *recv)
{
    fsdpc_comm *comm = ((fsdpc_py_comm *)arg)->comm;
    if (comm->size == 1) {
        memcpy(recv, send, bytes);
        return FSDPC_OK;
    }
    fsdpc_coll op = {.kind = FSDPC_COLL_ALL_GATHER,
                     .unit = -1,
                     .what = "checkpoint",
                     .dtype = FSDPC_U8,
                     .send = send,
                     .recv = recv,
                     .numel = bytes};
    return fsdpc_comm_run(comm, &op);
}

/* ---- making ---- */

static int copy_text(PyObject *object, char **out)
{
    PyObject *bytes = NULL;
    if (!PyUnicode_FSConverter(object, &bytes))
        return -1;
    *out = strdup(PyBytes_AS_STRING(bytes));
    Py_DECREF(bytes);
    if (*out)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static int read_tensors(py_save *self, PyObject *model, PyObject *optimizer)
{
    fsdpc_ckpt_layout *layout = &self->plan.layout;
    Py_ssize_t n_model = PyList_GET_SIZE(model), n = n_model + PyList_GET_SIZE(optimizer);
    layout->tensors = fsdpc_py_array(n, sizeof *layout->tensors);
    layout->n_model = (size_t)n_model;
    layout->n_tensors = (size_t)n;
    return layout->tensors && fsdpc_py_ckpt_tensors(model, layout->tensors) == 0
               ? fsdpc_py_ckpt_tensors(optimizer, layout->tensors + n_model)
               : -1;
}

/* Reads a dict of strings, which are borrowed. */
static int read_pairs(PyObject *dict, fsdpc_st_pair **out, size_t *n_out)
{
    PyObject *key, *value;
    fsdpc_st_pair *pair = *out = fsdpc_py_array(PyDict_GET_SIZE(dict), sizeof *pair);
    *n_out = (size_t)PyDict_GET_SIZE(dict);
    for (Py_ssize_t at = 0; pair && PyDict_Next(dict, &at, &key, &value); pair++)
        if (!PyArg_Parse(key, "s", &pair->key) || !PyArg_Parse(value, "s", &pair->value))
            return -1;
    return *out ? 0 : -1;
}

static int read_shards(py_save *self, PyObject *list)
{
    Py_ssize_t n = PyList_GET_SIZE(list);
    self->plan.shards = fsdpc_py_array(n, sizeof *self->plan.shards);
    if (!self->plan.shards)
        return -1;
    self->plan.n_shards = (size_t)n;
    for (Py_ssize_t i = 0; i < n; i++)
        if (fsdpc_py_ckpt_shard(PyList_GET_ITEM(list, i), self->plan.layout.n_tensors,
                                &self->plan.shards[i]) < 0)
            return -1;
    return 0;
}

/* Replaces the shards with copies if the host cannot read the originals. */
static int fetch_shards(py_save *self)
{
    fsdpc_ckpt_plan *plan = &self->plan;
    if (!self->runtime->device->remote)
        return 0;
    fsdpc_ckpt_shard *mirrored = fsdpc_py_array((Py_ssize_t)plan->n_shards, sizeof *mirrored);
    if (!mirrored)
        return -1;
    fsdpc_status status = fsdpc_py_ckpt_mirror(self->runtime, plan->shards, plan->n_shards, true,
                                               mirrored, &self->host);
    if (status == FSDPC_OK)
        status = fsdpc_py_ckpt_copy(self->runtime, mirrored, plan->shards, plan->n_shards);
    PyMem_Free(plan->shards);
    plan->shards = mirrored;
    return fsdpc_py_check(status);
}

static PyObject *save_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    FSDPC_PY_KEYWORDS(names, "comm", "paths", "model", "optimizer", "shards", "members", "files",
                      "max_file_bytes", "hook", "overwrite");
    PyObject *comm, *paths[4], *model, *optimizer, *shards, *members, *files, *hook = NULL;
    double max_file_bytes;
    int overwrite = 0;
    fsdpc_py_state *state = fsdpc_py_state_of_type(type);
    if (!state ||
        !PyArg_ParseTupleAndKeywords(
            args, kwargs, "O(OOOO)O!O!O!O!O!d|Op", names, &comm, &paths[0], &paths[1], &paths[2],
            &paths[3], &PyList_Type, &model, &PyList_Type, &optimizer, &PyList_Type, &shards,
            &PyDict_Type, &members, &PyDict_Type, &files, &max_file_bytes, &hook, &overwrite))
        return NULL;
    if (!Py_IS_TYPE(comm, (PyTypeObject *)state->comm_type))
        return PyErr_Format(PyExc_TypeError, "a save needs a Comm");
    fsdpc_runtime *runtime = fsdpc_py_state_runtime(state);
    fsdpc_comm *open = runtime ? fsdpc_py_comm_of(comm) : NULL;
    py_save *self = open ? (py_save *)type->tp_alloc(type, 0) : NULL;
    if (!self)
        return NULL;
    self->runtime = runtime;
    self->comm = Py_NewRef(comm);
    self->keep = Py_BuildValue("(OOOO)", model, optimizer, shards, members);
    self->hook = Py_NewRef(hook ? hook : Py_None);
    self->plan.rank = open->rank;
    self->plan.size = open->size;
    self->plan.gather = gather;
    self->plan.gather_arg = comm;
    self->plan.fs = fsdpc_py_fs(hook);
    self->plan.overwrite = overwrite;
    fsdpc_ckpt_layout *layout = &self->plan.layout;
    layout->max_file_bytes = max_file_bytes;
    if (!self->keep || copy_text(paths[0], &self->plan.parent) < 0 ||
        copy_text(paths[1], &self->plan.temp) < 0 || copy_text(paths[2], &self->plan.folder) < 0 ||
        copy_text(paths[3], &self->plan.manifest_path) < 0 ||
        read_tensors(self, model, optimizer) < 0 ||
        read_pairs(members, &layout->members, &layout->n_members) < 0 ||
        read_pairs(files, &layout->others, &layout->n_others) < 0 ||
        read_shards(self, shards) < 0 ||
        fsdpc_py_check(fsdpc_ckpt_lay_out(layout, self->plan.temp, self->plan.shards,
                                          self->plan.n_shards)) < 0 ||
        fetch_shards(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* ---- running ---- */

/* Returns -1 with KeyboardInterrupt or another exception that a signal handler raised; the thread
 * keeps running. */
static int join(py_save *self)
{
    enum { LOOK_NS = 100000000, SECOND_NS = 1000000000 }; /* how often waits check for Ctrl-C */
    if (!self->started || self->joined)
        return 0;
    for (int result = ETIMEDOUT; result == ETIMEDOUT;) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += (until.tv_nsec + LOOK_NS) / SECOND_NS;
        until.tv_nsec = (until.tv_nsec + LOOK_NS) % SECOND_NS;
        FSDPC_PY_WITHOUT_GIL(result = pthread_timedjoin_np(self->thread, NULL, &until));
        if (result == ETIMEDOUT && PyErr_CheckSignals() < 0)
            return -1;
    }
    self->joined = true;
    fsdpc_mem_free(self->runtime->mem, self->staging);
    self->staging = NULL;
    fsdpc_py_ckpt_unmirror(self->runtime, &self->host);
    Py_CLEAR(self->keep);
    return 0;
}

static PyObject *save_run(PyObject *object, PyObject *Py_UNUSED(unused))
{
    py_save *self = (py_save *)object;
    if (self->started || self->done)
        return PyErr_Format(PyExc_RuntimeError, "this save was run before");
    self->done = 1;
    if (!fsdpc_py_comm_of(self->comm))
        return NULL;
    fsdpc_status status;
    FSDPC_PY_WITHOUT_GIL(status = fsdpc_ckpt_save(&self->plan));
    return fsdpc_py_none(status);
}

static void *write_apart(void *arg)
{
    py_save *self = arg;
    fsdpc_status status = self->status; /* staging's status; its message is per thread */
    if (status != FSDPC_OK)
        fsdpc_fail(status, "%s", self->text);
    status = fsdpc_ckpt_agree(&self->plan, status);
    if (status == FSDPC_OK)
        status = fsdpc_ckpt_save(&self->plan);
    if (status != FSDPC_OK)
        snprintf(self->text, sizeof self->text, "%s", fsdpc_last_error());
    self->status = status;
    /* release: status and message are written before it; acquired in save_done and by joining. */
    atomic_store_explicit(&self->done, 1, memory_order_release);
    return NULL;
}

static fsdpc_status stage(py_save *self)
{
    fsdpc_ckpt_plan *plan = &self->plan;
    size_t bytes;
    if (self->host.memory)
        return FSDPC_OK;
    FSDPC_TRY(fsdpc_ckpt_staging_bytes(plan->shards, plan->n_shards, &bytes));
    FSDPC_TRY(fsdpc_mem_alloc(self->runtime->mem, FSDPC_MEM_OTHER, bytes, &self->staging));
    fsdpc_ckpt_staging(plan->shards, plan->n_shards, self->staging);
    return FSDPC_OK;
}

static PyObject *save_start(PyObject *object, PyObject *Py_UNUSED(unused))
{
    py_save *self = (py_save *)object;
    if (self->started || self->done)
        return PyErr_Format(PyExc_RuntimeError, "this save was run before");
    fsdpc_comm *comm = fsdpc_py_comm_of(self->comm);
    if (!comm)
        return NULL;
    fsdpc_comm_set_apart(comm);
    Py_BEGIN_ALLOW_THREADS;
    /* If a rank cannot make its staging copy, its thread reports that to the others like any other
     * failure. */
    self->status = stage(self);
    if (self->status != FSDPC_OK)
        snprintf(self->text, sizeof self->text, "%s", fsdpc_last_error());
    if (fsdpc_thread_start("fsdpc-ckpt", write_apart, self, &self->thread) == FSDPC_OK)
        self->started = true;
    else
        write_apart(self); /* other ranks' threads wait for this rank: save on this thread */
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *save_wait(PyObject *object, PyObject *Py_UNUSED(unused))
{
    py_save *self = (py_save *)object;
    if (join(self) < 0)
        return NULL;
    if (self->status == FSDPC_OK)
        Py_RETURN_NONE;
    fsdpc_fail(self->status, "%s", self->text);
    return fsdpc_py_raise(self->status);
}

FSDPC_PY_GETTER(save_done, PyBool_FromLong(atomic_load_explicit(&((py_save *)object)->done,
                                                                memory_order_acquire) != 0))

static void save_dealloc(PyObject *object)
{
    py_save *self = (py_save *)object;
    if (self->started && !self->joined) { /* the thread uses memory that is freed below */
        Py_BEGIN_ALLOW_THREADS;
        pthread_join(self->thread, NULL);
        Py_END_ALLOW_THREADS;
    }
    if (self->runtime) {
        fsdpc_mem_free(self->runtime->mem, self->staging);
        fsdpc_py_ckpt_unmirror(self->runtime, &self->host);
    }
    fsdpc_ckpt_layout_fini(&self->plan.layout);
    PyMem_Free(self->plan.layout.tensors);
    PyMem_Free(self->plan.layout.members);
    PyMem_Free(self->plan.layout.others);
    PyMem_Free(self->plan.shards);
    free(self->plan.parent);
    free(self->plan.temp);
    free(self->plan.folder);
    free(self->plan.manifest_path);
    Py_XDECREF(self->keep);
    Py_XDECREF(self->hook);
    Py_XDECREF(self->comm);
    fsdpc_py_free(object);
}

static PyMethodDef save_methods[] = {
    FSDPC_PY_METHOD(Save, run, save_run, METH_NOARGS),
    FSDPC_PY_METHOD(Save, start, save_start, METH_NOARGS),
    FSDPC_PY_METHOD(Save, wait, save_wait, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef save_getset[] = {
    FSDPC_PY_ATTRIBUTE(Save, done, save_done, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot save_slots[] = {
    {Py_tp_new, save_new},       {Py_tp_dealloc, save_dealloc},       {Py_tp_methods, save_methods},
    {Py_tp_getset, save_getset}, {Py_tp_doc, (void *)fsdpc_doc_Save}, {0, NULL},
};

FSDPC_PY_TYPE(save, Save, py_save, 0, save_slots);
