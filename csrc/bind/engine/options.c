/* Options are read by the fields of fsdpc_hyper, so a new one needs no code here. */
#include "bind/engine/options.h"

#include <math.h>

/* Reads an option into its field; returns -1 with an exception if it is not a number or out of its
 * range. */
static int read_option(const fsdpc_hyper_range *field, PyObject *value, fsdpc_hyper *out)
{
    unsigned char *to = (unsigned char *)out + field->offset;
    if (field->flag) {
        int flag = PyObject_IsTrue(value);
        *(bool *)to = flag > 0;
        return flag < 0 ? -1 : 0;
    }
    double number = PyFloat_AsDouble(value);
    if (number == -1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "%s must be a number, got %R", field->name, value);
        return -1;
    }
    if (!isfinite(number) || number < field->lowest || number >= field->below) {
        PyErr_Format(PyExc_ValueError, "%s is out of range: %R", field->name, value);
        return -1;
    }
    *(double *)to = number;
    return 0;
}

/* Reads the pair (beta1, beta2). */
static int read_betas(PyObject *value, fsdpc_hyper *out)
{
    PyObject *pair = PySequence_Tuple(value);
    int status = pair && PyTuple_GET_SIZE(pair) == 2 ? 0 : -1;
    for (int i = 0; status == 0 && i < 2; i++)
        status = read_option(fsdpc_hyper_find(i == 0 ? "beta1" : "beta2"),
                             PyTuple_GET_ITEM(pair, i), out);
    Py_XDECREF(pair);
    if (status == 0)
        return 0;
    bool range = PyErr_ExceptionMatches(PyExc_ValueError);
    PyErr_Clear();
    PyErr_Format(range ? PyExc_ValueError : PyExc_TypeError,
                 range ? "betas is out of range: %R" : "betas must be two numbers, got %R", value);
    return -1;
}

/* Reads `rule`, the row of the table by which the group steps; the default is `own`. */
static int read_kind(PyObject *options, fsdpc_optim_kind own, fsdpc_optim_kind *out)
{
    PyObject *rule = options ? PyDict_GetItemString(options, "rule") : NULL;
    const char *name = rule ? PyUnicode_AsUTF8(rule) : fsdpc_optim_kind_name(own);
    int kind = name ? fsdpc_optim_find(name) : FSDPC_OPTIM_KINDS;
    *out = (fsdpc_optim_kind)kind;
    if (name && kind == FSDPC_OPTIM_KINDS)
        PyErr_Format(PyExc_ValueError, "no optimizer is named '%s'", name);
    return kind == FSDPC_OPTIM_KINDS ? -1 : 0;
}

int fsdpc_py_read_options(PyObject *options, fsdpc_optim_kind own, bool coded, fsdpc_hyper *out,
                          fsdpc_optim_kind *kind)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    char why[160] = "";
    if (read_kind(options, own, kind) < 0)
        return -1;
    while (options && PyDict_Next(options, &at, &key, &value)) {
        const char *name = PyUnicode_AsUTF8(key);
        if (!name)
            return -1;
        bool betas = strcmp(name, "betas") == 0;
        if (strcmp(name, "rule") == 0)
            continue;
        if (!fsdpc_optim_reads(*kind, betas ? "beta1" : name)) {
            PyErr_Format(PyExc_TypeError, "%s has no option '%s'", fsdpc_optim_kind_name(*kind),
                         name);
            return -1;
        }
        if ((betas ? read_betas(value, out) : read_option(fsdpc_hyper_find(name), value, out)) < 0)
            return -1;
    }
    const fsdpc_optim_row *row = &fsdpc_optim_table[*kind];
    if (row->refuse)
        row->refuse(out, why, sizeof why);
    if (!why[0] && coded && !fsdpc_rule_takes_codes(row->rule(out)))
        snprintf(why, sizeof why, "%s with %s cannot have int8 states: take float32 or bfloat16",
                 row->name, out->amsgrad ? "amsgrad" : "centered");
    if (why[0])
        PyErr_SetString(PyExc_ValueError, why);
    return why[0] ? -1 : 0;
}
