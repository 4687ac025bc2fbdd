/* Turn: a lock of Python whose state C looks at. Its methods are those of `threading.Lock`; C takes and gives it back
 * without a call.
 *
 * Whoever touches a Turn holds the interpreter's lock, so its state is plain numbers. Who must wait sleeps at `door`, a
 * lock of Python that is shut but for moments: who gives the turn back while others wait leaves it taken and opens the
 * door once, and one of them comes through and has it. */

#ifndef SENNIT_SHM_TURN_H
#define SENNIT_SHM_TURN_H

#include <Python.h>

typedef struct {
    PyObject_HEAD
    PyObject *door;
    int taken, waiting;
} Turn;

/* False where another has it. */
static int take_turn(Turn *turn)
{
    int free = !turn->taken;
    turn->taken = 1;
    return free;
}

/* False where opening the door raised. */
static int give_turn(Turn *turn)
{
    if (!turn->waiting) {
        turn->taken = 0;
        return 1;
    }
    turn->waiting--;
    PyObject *answer = PyObject_CallMethod(turn->door, "release", NULL);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* Asleep until somebody leaves the turn to this thread. An error, such as Ctrl-C, may come when somebody just has: then
 * it goes to the next. */
static int await_turn(Turn *turn)
{
    turn->waiting++;
    PyObject *answer = PyObject_CallMethod(turn->door, "acquire", NULL);
    Py_XDECREF(answer);
    if (answer)
        return 1;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *open = PyObject_CallMethod(turn->door, "acquire", "O", Py_False);
    if (open == Py_True)
        give_turn(turn);
    else
        turn->waiting--;
    Py_XDECREF(open);
    PyErr_Restore(type, value, trace);
    return 0;
}

static PyObject *acquire_turn(PyObject *object, PyObject *given, PyObject *named)
{
    static char *names[] = {"blocking", NULL};
    int blocking = 1;
    if (!PyArg_ParseTupleAndKeywords(given, named, "|p", names, &blocking))
        return NULL;
    Turn *turn = (Turn *)object;
    int mine = take_turn(turn);
    if (!mine && blocking) {
        if (!await_turn(turn))
            return NULL;
        mine = 1;
    }
    return PyBool_FromLong(mine);
}

static PyObject *release_turn(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (!((Turn *)object)->taken)
        return PyErr_Format(PyExc_RuntimeError, "release unlocked lock");
    return give_turn((Turn *)object) ? Py_NewRef(Py_None) : NULL;
}

static PyObject *enter_turn(PyObject *object, PyObject *unused)
{
    (void)unused;
    return take_turn((Turn *)object) || await_turn((Turn *)object) ? Py_NewRef(Py_True) : NULL;
}

static PyObject *leave_turn(PyObject *object, PyObject *unused) { return release_turn(object, unused); }

static PyObject *turn_is_taken(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(((Turn *)object)->taken);
}

static PyObject *new_turn(PyTypeObject *type, PyObject *given, PyObject *named)
{
    if (PyTuple_Size(given) || (named && PyDict_Size(named)))
        return PyErr_Format(PyExc_TypeError, "a Turn takes no arguments");
    PyObject *threads = PyImport_ImportModule("_thread");
    PyObject *door = threads ? PyObject_CallMethod(threads, "allocate_lock", NULL) : NULL;
    PyObject *shut = door ? PyObject_CallMethod(door, "acquire", NULL) : NULL;
    Turn *turn = shut ? (Turn *)PyType_GenericAlloc(type, 0) : NULL;
    Py_XDECREF(threads), Py_XDECREF(shut);
    if (!turn) {
        Py_XDECREF(door);
        return NULL;
    }
    turn->door = door;
    return (PyObject *)turn;
}

static void dealloc_turn(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((Turn *)object)->door);
    PyObject_Free(object);
    Py_DECREF((PyObject *)type);
}

static PyMethodDef turn_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))acquire_turn, METH_VARARGS | METH_KEYWORDS,
     "take it, and wait for it unless blocking is False; whether it is taken"},
    {"release", release_turn, METH_NOARGS, "give it back"},
    {"locked", turn_is_taken, METH_NOARGS, "whether somebody has it"},
    {"__enter__", enter_turn, METH_NOARGS, NULL},
    {"__exit__", leave_turn, METH_VARARGS, NULL},
    {0},
};

static PyType_Slot turn_slots[] = {
    {Py_tp_new, (void *)new_turn},
    {Py_tp_dealloc, (void *)dealloc_turn},
    {Py_tp_methods, turn_methods},
    {0},
};

static PyType_Spec turn_shape = {
    "sennit.collective.runtime._shm_call.Turn", sizeof(Turn), 0, Py_TPFLAGS_DEFAULT, turn_slots,
};

#endif
