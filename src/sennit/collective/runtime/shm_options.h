/* Options of c10d, read where they lie.
 *
 * Asked for `opts.reduceOp`, torch makes an object, writes down that it must not outlive the options, and compares it
 * by trying one overload after another: 0.6 microseconds, and 2.5 on slower cores, of a call that takes 5. What is
 * asked for are a byte or two of a struct of C++ that the object points to: pybind11 keeps the pointer right behind the
 * head of the object. Where in the struct they lie is not written down here, since it is torch's affair, but found out
 * once in each process, from examples: options made by torch with all values that the fields may have. A place is known
 * if it, and no other one, holds the value of each example. Where that is not so, and for objects of any other type,
 * attributes are asked, as Python would: this is the oracle, and tests compare the two.
 */

#ifndef SENNIT_SHM_OPTIONS_H
#define SENNIT_SHM_OPTIONS_H

#include <Python.h>
#include <malloc.h>
#include <stdint.h>
#include <string.h>

enum { ASYNCHRONOUS, REDUCTION, ROOT, FIELDS };
#define EXAMPLES 64
#define UNKNOWN_PLACE -1

/* Of one type of options: bytes from the beginning of the struct; UNKNOWN_PLACE of a field that they do not have. */
typedef struct {
    PyObject *type; /* held */
    int32_t places[FIELDS];
} OptionsLayout;

static const size_t field_bytes[FIELDS] = {sizeof(uint8_t), sizeof(uint8_t), sizeof(int64_t)};

/* What pybind11 keeps for an object: the address of its value in C++. */
static const char *value_of(PyObject *object)
{
    return *(const char *const *)((const char *)object + sizeof(PyObject));
}

static int64_t read_field(const char *value, int32_t place, int field)
{
    int64_t number = 0;
    memcpy(&number, value + place, field_bytes[field]);
    return number;
}

/* The one place, among the first so many bytes, that holds the number of every example. */
static int32_t place_of(const char *const *values, const int64_t *numbers, int count, size_t bytes, int field)
{
    int32_t found = UNKNOWN_PLACE;
    size_t width = field_bytes[field];
    for (size_t place = 0; place + width <= bytes; place += width) {
        int k = 0;
        while (k < count && read_field(values[k], (int32_t)place, field) == numbers[k])
            k++;
        if (k == count && found != UNKNOWN_PLACE)
            return UNKNOWN_PLACE;
        found = k == count ? (int32_t)place : found;
    }
    return found;
}

/* `examples`: a tuple of (options, asyncOp, reduceOp or None, rootRank or None), all of one type and with the same
 * fields, numbers for all. 1: their places are known; 0: they are not; -1: something was raised. */
static int learn_layout(PyObject *examples, OptionsLayout *layout)
{
    const char *values[EXAMPLES];
    int64_t numbers[FIELDS][EXAMPLES];
    int has[FIELDS] = {0};
    size_t bytes = SIZE_MAX;
    Py_ssize_t count = PyTuple_Size(examples);
    if (count < 2 || count > EXAMPLES)
        return count < 0 ? -1 : 0;
    PyTypeObject *type = NULL;
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *options, *fields[FIELDS];
        if (!PyArg_ParseTuple(PyTuple_GetItem(examples, k), "OOOO", &options, &fields[0], &fields[1], &fields[2]))
            return -1;
        if ((type && Py_TYPE(options) != type) || !value_of(options))
            return 0;
        type = Py_TYPE(options), values[k] = value_of(options);
        size_t usable = malloc_usable_size((void *)values[k]);
        bytes = usable < bytes ? usable : bytes;
        for (int field = 0; field < FIELDS; field++) {
            has[field] = fields[field] != Py_None;
            numbers[field][k] = has[field] ? PyLong_AsLongLong(fields[field]) : 0;
        }
        if (PyErr_Occurred())
            return -1;
    }
    for (int field = 0; field < FIELDS; field++) {
        layout->places[field] = has[field] ? place_of(values, numbers[field], (int)count, bytes, field) : UNKNOWN_PLACE;
        if (has[field] && layout->places[field] == UNKNOWN_PLACE)
            return 0;
    }
    layout->type = Py_NewRef((PyObject *)type);
    return 1;
}

#endif
