/* What a call on tensors is: their memory, as they describe themselves by DLPack's interface, and the options that c10d
 * passes along. */

#ifndef SENNIT_SHM_TENSORS_H
#define SENNIT_SHM_TENSORS_H

#include "shm_known.h"

typedef struct {
    uintptr_t address;
    int64_t elements, rows, type;
} Plain;

/* 1: a plain contiguous tensor of this machine's memory; 0: something else, which the long way looks at. */
static int is_plain(const Shortcut *self, PyObject *tensor, Plain *plain)
{
    Described found;
    if ((PyObject *)Py_TYPE(tensor) != self->tensor_type)
        return 0;
    if (self->exchange->describe(tensor, &found)) {
        PyErr_Clear();
        return 0;
    }
    int64_t dense = 1;
    for (int dim = found.dims - 1; dim >= 0; dim--) {
        if (found.shape[dim] != 1 && found.strides[dim] != dense)
            return 0;
        dense *= found.shape[dim];
    }
    plain->address = (uintptr_t)found.data + found.offset;
    plain->elements = dense;
    plain->rows = found.dims ? found.shape[0] : 0;
    plain->type = (int64_t)found.code << 32 | (int64_t)found.bits << 16 | found.lanes;
    return dense > 0 && found.device_type == ON_CPU;
}

/* 1: a call like this may be known, with its key, but for the root. */
static int reads_tensors(const Shortcut *self, PyObject *kind, long what, PyObject *output, PyObject *input, Key *key,
                         Memory *at)
{
    Plain in, out;
    if (!self->exchange || !is_plain(self, output, &out))
        return 0;
    if (output == input)
        in = out;
    else if (!is_plain(self, input, &in))
        return 0;
    if (in.type != out.type || (what & BY_ROWS && (in.rows != out.rows || in.elements != out.elements)))
        return 0;
    *key = (Key){kind, Py_None, Py_None, in.type, what & BY_ROWS ? in.rows : -1, {in.elements, out.elements}};
    *at = (Memory){in.address, out.address};
    return 1;
}

/* An attribute of the options of a call, held. What cannot be asked is not understood, and goes the long way. */
static PyObject *option(const Shortcut *self, PyObject *opts, int name)
{
    PyObject *found = PyObject_GetAttr(opts, self->names[name]);
    if (!found)
        PyErr_Clear();
    return found;
}

/* The same as below, by attributes. */
static int asks_options(const Shortcut *self, long what, PyObject *opts, int64_t *root)
{
    PyObject *asynchronous = option(self, opts, ASYNC_OP);
    int yes = asynchronous == Py_False;
    Py_XDECREF(asynchronous);
    if (yes && what & SUMS) {
        PyObject *reduction = option(self, opts, REDUCE_OP);
        yes = reduction && PyObject_RichCompareBool(reduction, self->sum, Py_EQ) == 1;
        Py_XDECREF(reduction);
    }
    if (yes && what & FROM_ROOT) {
        PyObject *rank = option(self, opts, ROOT_RANK);
        *root = rank ? PyLong_AsLong(rank) : -1;
        Py_XDECREF(rank);
        yes = *root >= 0;
    }
    if (PyErr_Occurred())
        PyErr_Clear();
    return yes;
}

/* Does the call wait for its end, and add up where it reduces? The root, where it has one. */
static int reads_options(const Shortcut *self, long what, PyObject *opts, int64_t *root)
{
    for (int k = 0; k < self->layout_count; k++) {
        const int32_t *places = self->layouts[k].places;
        if ((PyObject *)Py_TYPE(opts) != self->layouts[k].type)
            continue;
        const char *value = value_of(opts);
        if (!value || (what & SUMS && places[REDUCTION] == UNKNOWN_PLACE) ||
            (what & FROM_ROOT && places[ROOT] == UNKNOWN_PLACE))
            break;
        if (what & FROM_ROOT)
            *root = read_field(value, places[ROOT], ROOT);
        return !read_field(value, places[ASYNCHRONOUS], ASYNCHRONOUS) &&
               (!(what & SUMS) || read_field(value, places[REDUCTION], REDUCTION) == self->sum_number) &&
               (!(what & FROM_ROOT) || *root >= 0);
    }
    return asks_options(self, what, opts, root);
}

#endif
