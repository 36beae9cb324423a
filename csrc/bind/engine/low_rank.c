/* The tuple is checked by Python's PowerSGD; here it only must fit. */
#include "bind/engine/low_rank.h"

int fsdpc_py_low_rank_parse(PyObject *object, fsdpc_low_rank_options *out)
{
    unsigned long long start_step, seed;
    int warm_start, error_feedback;
    fsdpc_low_rank_options options = {0};
    if (object && object != Py_None) {
        if (!PyTuple_Check(object)) {
            PyErr_Format(PyExc_TypeError, "low_rank is None or a tuple, got %.100s",
                         Py_TYPE(object)->tp_name);
            return -1;
        }
        if (!PyArg_ParseTuple(object, "iKppdK", &options.rank, &start_step, &warm_start,
                              &error_feedback, &options.min_rate, &seed))
            return -1;
        options.start_step = start_step;
        options.warm_start = warm_start;
        options.error_feedback = error_feedback;
        options.seed = seed;
    }
    *out = options;
    return 0;
}

PyObject *fsdpc_py_low_rank_new(const fsdpc_low_rank_options *options)
{
    if (options->rank == 0)
        Py_RETURN_NONE;
    return Py_BuildValue("iKOOdK", options->rank, (unsigned long long)options->start_step,
                         options->warm_start ? Py_True : Py_False,
                         options->error_feedback ? Py_True : Py_False, options->min_rate,
                         (unsigned long long)options->seed);
}
