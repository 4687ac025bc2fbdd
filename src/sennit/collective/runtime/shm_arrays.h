/* What a call on numpy's arrays is, or on anything with a buffer. */

#ifndef SENNIT_SHM_ARRAYS_H
#define SENNIT_SHM_ARRAYS_H

#include "shm_known.h"

/* The address and bytes of contiguous memory, or 0: then the long way says what is wrong with it. */
static uintptr_t look_at(PyObject *array, int flags, int64_t *bytes)
{
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, flags)) {
        PyErr_Clear();
        return 0;
    }
    uintptr_t address = view.len ? (uintptr_t)view.buf : 0;
    *bytes = view.len;
    PyBuffer_Release(&view); /* the caller holds the array */
    return address;
}

/* 1: a call like this may be known, with the key; its element type is held. `words` are kind, array, out, dtype,
 * reduction, root. */
static int reads_arrays(const Shortcut *self, PyObject *const *words, Key *key, Memory *at)
{
    PyObject *array = words[1], *out = words[2];
    if (array == Py_None || out == Py_None)
        return 0;
    *key = (Key){.kind = words[0], .reduction = words[4], .root = words[5] == Py_None ? -1 : PyLong_AsLong(words[5])};
    if (key->root < 0 && PyErr_Occurred()) { /* no number: the long way says so */
        PyErr_Clear();
        return 0;
    }
    at->target = look_at(out, PyBUF_WRITABLE, &key->sizes[1]);
    if (array == out)
        at->source = at->target, key->sizes[0] = key->sizes[1];
    else
        at->source = look_at(array, PyBUF_SIMPLE, &key->sizes[0]);
    if (!at->source || !at->target)
        return 0;
    key->dtype = words[3] == Py_None ? PyObject_GetAttr(array, self->names[DTYPE]) : Py_NewRef(words[3]);
    if (!key->dtype)
        PyErr_Clear(); /* something else than an array: the same */
    return key->dtype != NULL;
}

#endif
