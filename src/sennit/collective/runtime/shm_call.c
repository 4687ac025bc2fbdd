/* The short way from Python into the core: look at two arrays, find the plan of their call, and start it. One call of C
 * in place of a page of Python.
 *
 *     Turn()                                                             a lock: see shm_turn.h
 *     Shortcut(lock, calls, rest, group, starts, torch)
 *         .arrays(kind, array, out, dtype, reduction, root, context)     a call on numpy's arrays, or anything with a buffer
 *         .now(kind, what, output, input, root)                          on tensors: one that waits, and adds up
 *         .method(kind, what, long_way, done)                            something to call as c10d calls a backend's method: see `Method`
 *         .learn_arrays(plan, kind, array, out, dtype, reduction, root)  from now on calls like this run `plan`
 *         .learn_tensors(plan, kind, what, output, input, root)
 *         .give_way(words, word)                                         methods go the long way while words[word] is True
 *         .know_options(examples)                                        where the fields of such options lie: see shm_options.h
 *         .forget() .close()
 *
 * A call is known by its `Key`: kind, element type and reduction by identity, since these are singletons; sizes and
 * root by value. It is learned when the long way has made it once, which has checked it. What is unusual in any way
 * (not known, not contiguous, overlapping, another call under way) returns None, and Python goes
 * the long way: that is the oracle of this file, and serves alone where it was not built. Nothing raises here but what
 * the long way raises, called for the rest of a call that waits.
 *
 * A call returns True when it is done. `rest(plan, status, context)` is called, with the lock held, for one that was
 * begun and has not ended.
 *
 * Only the limited C interface of Python 3.11 is used. Tensors describe themselves by the C interface of DLPack 1.3,
 * which torch has from 2.11 on and which takes some 50 nanoseconds, where asking for six attributes takes 600; options
 * of c10d are read where they lie if that is known (shm_options.h), and asked for attributes otherwise, as Python
 * would.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "shm_arrays.h"
#include "shm_known.h"
#include "shm_tensors.h"

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* Lets the lock go, whatever was raised meanwhile. */
static int let_go(Shortcut *self)
{
    if (self->turn && !self->turn->waiting) {
        self->turn->taken = 0;
        return !PyErr_Occurred();
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *answer = PyObject_CallNoArgs(self->release);
    if (type)
        PyErr_Restore(type, value, trace);
    Py_XDECREF(answer);
    return answer && !type;
}

/* Memory that does not overlap, or is one array where that is allowed. */
static int is_simple(const Known *known, Memory at)
{
    if (at.source == at.target)
        return known->one_array;
    return at.source >= at.target + (uintptr_t)known->bytes[1] || at.target >= at.source + (uintptr_t)known->bytes[0];
}

/* What became of a call: it was made; it is not for this file; the rest of it raised. */
typedef enum { MADE, NOT_HERE, RAISED } Outcome;

/* MADE: the lock is held. */
static Outcome take_lock(Shortcut *self)
{
    if (self->turn)
        return take_turn(self->turn) ? MADE : NOT_HERE;
    PyObject *got = PyObject_Call(self->acquire, self->without_waiting, NULL);
    Py_XDECREF(got);
    return got == Py_True ? MADE : got ? NOT_HERE : RAISED;
}

/* The status of a call that was begun. */
static int start(const Shortcut *self, const Known *known, Memory at)
{
    void *call = known->call, *group = self->group; /* its place may be taken by another while this one runs */
    int32_t staged = known->staged;
    int status, brief = self->start_briefly && known->bytes[0] + known->bytes[1] <= BRIEF;
    if (brief) {
        status = self->start_briefly(group, call, (char *)at.source, (char *)at.target, staged);
        if (status != WAITING)
            return status;
    }
    PyThreadState *thread = PyEval_SaveThread();
    status = brief ? self->run(group, call) : self->start(group, call, (char *)at.source, (char *)at.target, staged);
    PyEval_RestoreThread(thread);
    return status;
}

static Outcome run(Shortcut *self, const Known *known, Memory at, PyObject *context)
{
    if (!known || !is_simple(known, at))
        return NOT_HERE;
    Outcome taken = take_lock(self);
    if (taken != MADE)
        return taken;
    Py_ssize_t before = self->calls == Py_None ? 0 : PyObject_Size(self->calls);
    if (before)
        return let_go(self) ? NOT_HERE : RAISED;
    PyObject *plan = Py_NewRef(known->plan);
    int status = start(self, known, at);
    if (status) {
        PyObject *answer = PyObject_CallFunction(self->rest, "OiO", plan, status, context);
        Py_XDECREF(answer);
    }
    Py_DECREF(plan);
    return let_go(self) ? MADE : RAISED;
}

/* True, None, or what was raised. */
static PyObject *in_python(Outcome outcome)
{
    return outcome == RAISED ? NULL : Py_NewRef(outcome == MADE ? Py_True : Py_None);
}

/* ---- numpy ------------------------------------------------------------------------------------------------------- */

static PyObject *arrays(Shortcut *self, PyObject *const *given, Py_ssize_t count)
{
    Key key;
    Memory at;
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "7 arguments, not %zd", count);
    if (!reads_arrays(self, given, &key, &at))
        Py_RETURN_NONE;
    const Known *known = find(self, &key);
    Py_DECREF(key.dtype);
    return in_python(run(self, known, at, given[6]));
}

/* ---- torch ------------------------------------------------------------------------------------------------------- */

static Outcome through_c10d(Shortcut *self, PyObject *kind, long what, PyObject *output, PyObject *input,
                            PyObject *opts)
{
    Key key;
    Memory at;
    if (opts == Py_None || !reads_tensors(self, kind, what, output, input, &key, &at) ||
        !reads_options(self, what, opts, &key.root))
        return NOT_HERE;
    return run(self, find(self, &key), at, opts);
}

/* A method of a backend, as c10d calls it: with a list of one tensor and options, with output, input and options, or
 * with two lists of sizes before the options, which are empty where all pieces are equal.
 *
 * It stands in the dict of the group, before the method of its class, which is the long way. It is no function of C for
 * Python: pybind11 takes those for its own, not for what overrides them. */
typedef PyObject *Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);

typedef struct {
    PyObject_HEAD
    Vectorcall *call;
    PyObject *shortcut, *kind, *long_way, *done; /* the last: what it returns for a call that was made here */
    long what;
} Method;

/* Of PEP 590: in the limited interface from 3.12 on, the same in 3.11. */
#define HAS_VECTORCALL (1UL << 11)
#define COUNT_OF(FLAGS) ((Py_ssize_t)((FLAGS) & (SIZE_MAX >> 1)))

static int is_empty(PyObject *list) { return PyList_CheckExact(list) && PyList_Size(list) == 0; }

static Outcome short_way(const Method *self, PyObject *const *given, Py_ssize_t count)
{
    Shortcut *shortcut = (Shortcut *)self->shortcut;
    if (shortcut->words && PyDict_GetItemWithError(shortcut->words, shortcut->word) == Py_True)
        return NOT_HERE;
    if (count == 3 && !(self->what & BY_ROWS))
        return through_c10d(shortcut, self->kind, self->what, given[0], given[1], given[2]);
    if (count == 5 && self->what & BY_ROWS && is_empty(given[2]) && is_empty(given[3]))
        return through_c10d(shortcut, self->kind, self->what, given[0], given[1], given[4]);
    if (count != 2 || !PyList_CheckExact(given[0]) || PyList_Size(given[0]) != 1)
        return NOT_HERE;
    PyObject *only = Py_NewRef(PyList_GetItem(given[0], 0));
    Outcome outcome = through_c10d(shortcut, self->kind, self->what, only, only, given[1]);
    Py_DECREF(only);
    return outcome;
}

static PyObject *go_the_long_way(const Method *self, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *words = PyTuple_New(count), *fields = named ? PyDict_New() : NULL, *answer = NULL;
    int failed = !words || (named && !fields);
    for (Py_ssize_t k = 0; !failed && k < count; k++)
        failed = PyTuple_SetItem(words, k, Py_NewRef(given[k]));
    for (Py_ssize_t k = 0; !failed && k < named; k++)
        failed = PyDict_SetItem(fields, PyTuple_GetItem(names, k), given[count + k]);
    if (!failed)
        answer = PyObject_Call(self->long_way, words, fields);
    Py_XDECREF(words);
    Py_XDECREF(fields);
    return answer;
}

static PyObject *call_method(PyObject *object, PyObject *const *given, size_t flags, PyObject *names)
{
    const Method *self = (Method *)object;
    Py_ssize_t count = COUNT_OF(flags);
    Outcome outcome = names ? NOT_HERE : short_way(self, given, count);
    if (outcome == NOT_HERE)
        return go_the_long_way(self, given, count, names);
    return outcome == MADE ? Py_NewRef(self->done) : NULL;
}

/* Nothing of c10d is asked: who calls this means it. */
static PyObject *now(Shortcut *self, PyObject *const *given, Py_ssize_t count)
{
    Key key;
    Memory at;
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "5 arguments, not %zd", count);
    long what = PyLong_AsLong(given[1]), root = PyLong_AsLong(given[4]);
    if (PyErr_Occurred())
        return NULL;
    if (!reads_tensors(self, given[0], what, given[2], given[3], &key, &at))
        Py_RETURN_NONE;
    if (what & FROM_ROOT)
        key.root = root;
    return in_python(run(self, find(self, &key), at, Py_None));
}

/* ---- learning ---------------------------------------------------------------------------------------------------- */

/* `facts` are the plan, the address of its record, what is staged, bytes of input and output, and whether the two may
 * be one array. The objects of the key are not held before this. */
static PyObject *learn(Shortcut *self, PyObject *facts, const Key *key)
{
    Known known = {.key = *key};
    unsigned long long call;
    long long input, output;
    if (!PyArg_ParseTuple(facts, "OKiLLi", &known.plan, &call, &known.staged, &input, &output, &known.one_array))
        return NULL;
    known.call = (void *)(uintptr_t)call;
    known.bytes[0] = input, known.bytes[1] = output;
    Known *place = find(self, key);
    if (!place) {
        int way = 0;
        place = places_for(self, key);
        while (way < WAYS && place[way].plan)
            way++;
        place += way < WAYS ? way : (int)(self->replaced++ % WAYS);
    }
    Known before = *place;
    PyObject *held[] = {key->kind, key->dtype, key->reduction, known.plan};
    for (int k = 0; k < 4; k++)
        Py_INCREF(held[k]);
    *place = known;
    forget(&before);
    Py_RETURN_NONE;
}

static PyObject *learn_arrays(Shortcut *self, PyObject *const *given, Py_ssize_t count)
{
    Key key;
    Memory at;
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "7 arguments, not %zd", count);
    if (!reads_arrays(self, given + 1, &key, &at))
        Py_RETURN_NONE;
    PyObject *answer = learn(self, given[0], &key);
    Py_DECREF(key.dtype);
    return answer;
}

static PyObject *learn_tensors(Shortcut *self, PyObject *const *given, Py_ssize_t count)
{
    Key key;
    Memory at;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "6 arguments, not %zd", count);
    long what = PyLong_AsLong(given[2]), root = PyLong_AsLong(given[5]);
    if (PyErr_Occurred())
        return NULL;
    if (!reads_tensors(self, given[1], what, given[3], given[4], &key, &at))
        Py_RETURN_NONE;
    if (what & FROM_ROOT)
        key.root = root;
    return learn(self, given[0], &key);
}

/* Of options of one type; whether places were found. */
static PyObject *know_options(Shortcut *self, PyObject *examples)
{
    if (!PyTuple_CheckExact(examples))
        return PyErr_Format(PyExc_TypeError, "a tuple of examples");
    int known = self->layout_count < LAYOUTS ? learn_layout(examples, &self->layouts[self->layout_count]) : 0;
    if (known < 0)
        return NULL;
    self->layout_count += known;
    return PyBool_FromLong(known);
}

static PyObject *give_way(Shortcut *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 2 || !PyDict_Check(given[0]) || !PyUnicode_Check(given[1]))
        return PyErr_Format(PyExc_TypeError, "2 arguments, a dict and a word");
    PyObject *before[] = {self->words, self->word};
    self->words = Py_NewRef(given[0]), self->word = Py_NewRef(given[1]);
    Py_XDECREF(before[0]), Py_XDECREF(before[1]);
    Py_RETURN_NONE;
}

/* ---- the objects ------------------------------------------------------------------------------------------------- */

static int traverse_method(PyObject *object, visitproc visit, void *arg)
{
    Method *self = (Method *)object;
    Py_VISIT((PyObject *)Py_TYPE(object));
    Py_VISIT(self->shortcut);
    Py_VISIT(self->long_way);
    Py_VISIT(self->done);
    return 0;
}

static int clear_method(PyObject *object)
{
    Method *self = (Method *)object;
    Py_CLEAR(self->long_way);
    return 0;
}

static void dealloc_method(PyObject *object)
{
    Method *self = (Method *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->shortcut), Py_XDECREF(self->kind), Py_XDECREF(self->long_way), Py_XDECREF(self->done);
    PyObject_GC_Del(object);
    Py_DECREF((PyObject *)type);
}

/* For who calls without PEP 590, such as code in C++. */
static PyObject *call_with_tuple(PyObject *object, PyObject *words, PyObject *fields)
{
    return PyObject_Call(((Method *)object)->long_way, words, fields);
}

static PyMemberDef method_members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, NULL},
                                       {0}};

static PyType_Slot method_slots[] = {
    {Py_tp_dealloc, (void *)dealloc_method}, {Py_tp_traverse, (void *)traverse_method},
    {Py_tp_clear, (void *)clear_method},     {Py_tp_call, (void *)call_with_tuple},
    {Py_tp_members, method_members},         {0},
};

static PyType_Spec method_shape = {
    "sennit.collective.runtime._shm_call.Method",
    sizeof(Method),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | HAS_VECTORCALL,
    method_slots,
};

static PyObject *method(Shortcut *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "4 arguments, not %zd", count);
    long what = PyLong_AsLong(given[1]);
    if (PyErr_Occurred())
        return NULL;
    Method *made = (Method *)PyType_GenericAlloc((PyTypeObject *)self->method_type, 0);
    if (!made)
        return NULL;
    made->call = call_method, made->what = what;
    made->shortcut = Py_NewRef((PyObject *)self), made->kind = Py_NewRef(given[0]);
    made->long_way = Py_NewRef(given[2]), made->done = Py_NewRef(given[3]);
    return (PyObject *)made;
}

static PyObject *forget_all(Shortcut *self, PyObject *nothing)
{
    (void)nothing;
    for (int set = 0; set < SETS; set++)
        for (int way = 0; way < WAYS; way++)
            forget(&self->known[set][way]);
    Py_RETURN_NONE;
}

static PyObject *close_group(Shortcut *self, PyObject *nothing)
{
    self->group = NULL;
    return forget_all(self, nothing);
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Shortcut *self = (Shortcut *)object;
    Py_VISIT((PyObject *)Py_TYPE(object));
    Py_VISIT((PyObject *)self->turn);
    Py_VISIT(self->acquire);
    Py_VISIT(self->release);
    Py_VISIT(self->calls);
    Py_VISIT(self->rest);
    Py_VISIT(self->words);
    for (int set = 0; set < SETS; set++)
        for (int way = 0; way < WAYS; way++)
            Py_VISIT(self->known[set][way].plan);
    return 0;
}

static int clear(PyObject *object)
{
    Shortcut *self = (Shortcut *)object;
    Py_XDECREF(forget_all(self, NULL));
    PyObject **held[] = {(PyObject **)&self->turn,
                         &self->acquire,
                         &self->without_waiting,
                         &self->release,
                         &self->calls,
                         &self->rest,
                         &self->method_type,
                         &self->turn_type,
                         &self->tensor_type,
                         &self->sum,
                         &self->capsule,
                         &self->words,
                         &self->word};
    for (size_t k = 0; k < sizeof held / sizeof *held; k++)
        Py_CLEAR(*held[k]);
    for (int name = 0; name < NAMES; name++)
        Py_CLEAR(self->names[name]);
    for (; self->layout_count > 0; self->layout_count--)
        Py_CLEAR(self->layouts[self->layout_count - 1].type);
    return 0;
}

static void dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    PyObject_GC_Del(object);
    Py_DECREF((PyObject *)type);
}

static PyObject *new(PyTypeObject *type, PyObject *given, PyObject *named)
{
    PyObject *lock, *calls, *rest, *torch;
    unsigned long long group, start, start_briefly, run;
    if (named && PyDict_Size(named))
        return PyErr_Format(PyExc_TypeError, "arguments without names, please");
    if (!PyArg_ParseTuple(given, "OOOK(KKK)O", &lock, &calls, &rest, &group, &start, &start_briefly, &run, &torch))
        return NULL;
    Shortcut *self = (Shortcut *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->calls = Py_NewRef(calls), self->rest = Py_NewRef(rest);
    PyObject *module = PyType_GetModule(type); /* borrowed */
    self->method_type = module ? PyObject_GetAttrString(module, "Method") : NULL;
    self->turn_type = module ? PyObject_GetAttrString(module, "Turn") : NULL;
    if (self->turn_type && (PyObject *)Py_TYPE(lock) == self->turn_type)
        self->turn = (Turn *)Py_NewRef(lock);
    self->group = (void *)(uintptr_t)group, self->start = (Start *)(uintptr_t)start;
    self->start_briefly = (Start *)(uintptr_t)start_briefly, self->run = (Run *)(uintptr_t)run;
    self->acquire = PyObject_GetAttrString(lock, "acquire"), self->release = PyObject_GetAttrString(lock, "release");
    self->without_waiting = Py_BuildValue("(O)", Py_False);
    for (int name = 0; name < NAMES; name++)
        self->names[name] = PyUnicode_InternFromString(spelled[name]);
    if (torch != Py_None && PyArg_ParseTuple(torch, "OOO", &self->tensor_type, &self->sum, &self->capsule)) {
        Py_INCREF(self->tensor_type), Py_INCREF(self->sum), Py_INCREF(self->capsule);
        PyObject *number = PyNumber_Long(self->sum);
        self->sum_number = number ? PyLong_AsLongLong(number) : 0;
        Py_XDECREF(number);
        const Exchange *found = PyCapsule_GetPointer(self->capsule, "dlpack_exchange_api");
        /* another major version has another layout */
        self->exchange = found && found->major == 1 && found->describe ? found : NULL;
    }
    if (PyErr_Occurred()) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

#define CALLED(FUNCTION) (PyCFunction)(void (*)(void)) FUNCTION

static PyMethodDef methods[] = {
    {"arrays", CALLED(arrays), METH_FASTCALL, "a call on two buffers"},
    {"now", CALLED(now), METH_FASTCALL, "a call on tensors, without options"},
    {"method", CALLED(method), METH_FASTCALL, "a method of a backend of c10d"},
    {"learn_arrays", CALLED(learn_arrays), METH_FASTCALL, "keep the plan of a call on two buffers"},
    {"learn_tensors", CALLED(learn_tensors), METH_FASTCALL, "keep the plan of a call on tensors"},
    {"give_way", CALLED(give_way), METH_FASTCALL, "while a word is True methods go the long way"},
    {"know_options", CALLED(know_options), METH_O, "where options of a type have their fields"},
    {"forget", CALLED(forget_all), METH_NOARGS, "all plans"},
    {"close", CALLED(close_group), METH_NOARGS, "the group is of no more use"},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)new},     {Py_tp_dealloc, (void *)dealloc}, {Py_tp_traverse, (void *)traverse},
    {Py_tp_clear, (void *)clear}, {Py_tp_methods, methods},         {0},
};

static PyType_Spec shape = {
    "sennit.collective.runtime._shm_call.Shortcut", sizeof(Shortcut), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

static int fill(PyObject *module)
{
    PyType_Spec *shapes[] = {&shape, &method_shape, &turn_shape};
    const char *names[] = {"Shortcut", "Method", "Turn"};
    int failed = 0;
    for (int k = 0; k < 3 && !failed; k++) {
        PyObject *type = PyType_FromModuleAndSpec(module, shapes[k], NULL);
        failed = type ? PyModule_AddObjectRef(module, names[k], type) : -1;
        Py_XDECREF(type);
    }
    return failed;
}

static PyModuleDef_Slot steps[] = {{Py_mod_exec, (void *)fill}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_shm_call", .m_slots = steps};

PyMODINIT_FUNC PyInit__shm_call(void) { return PyModuleDef_Init(&module); }
