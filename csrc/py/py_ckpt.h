/* What the files that join csrc/ckpt to Python share. */
#ifndef FSDPC_PY_PY_CKPT_H
#define FSDPC_PY_PY_CKPT_H

#include "py/py_engine.h"

#include "ckpt/fs.h"
#include "ckpt/safetensors.h"

int fsdpc_py_ckpt_setup(PyObject *module);       /* py_ckpt.c */
int fsdpc_py_save_setup(PyObject *module);       /* py_ckpt_save.c */
int fsdpc_py_ckpt_state_setup(PyObject *module); /* py_ckpt_state.c */

/* A Python callable (call, path) as a hook, or none for None; borrows it.  What it raises becomes
 * the call's failure. */
fsdpc_fs fsdpc_py_fs(PyObject *hook);

#endif
