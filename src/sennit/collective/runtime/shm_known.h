/* What the short way knows: the calls that were made before, by their keys, and the object that holds them. */

#ifndef SENNIT_SHM_KNOWN_H
#define SENNIT_SHM_KNOWN_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "shm_options.h"
#include "shm_turn.h"

#define WAYS 4    /* places that a call may have in the table */
#define SETS 128  /* a power of two */
#define LAYOUTS 8 /* types of options */

/* Calls of so few bytes, input and output, are begun with the interpreter's lock held, like any small function of C:
 * letting it go and taking it back takes as long as a tenth of them. They hold it no longer than they move bytes and
 * wait some microseconds; then it is let go, so that another thread, which may be what the call waits for, can run. */
#define BRIEF (32 << 10)

typedef int Start(void *group, void *call, char *source, char *target, int32_t staged);
typedef int Run(void *group, void *call);
enum { DONE, WAITING }; /* of what they return */

/* No field has padding after it: keys are compared as bytes. */
typedef struct {
    PyObject *kind, *dtype, *reduction; /* the last two are None for tensors */
    int64_t type;                       /* of a tensor's elements; 0 for arrays */
    int64_t root;                       /* or the rows of an exchange, or -1 */
    int64_t sizes[2];                   /* bytes of input and output, or elements of tensors */
} Key;

typedef struct {
    Key key;        /* its objects are held, so that no other has their addresses */
    PyObject *plan; /* NULL: an empty place */
    void *call;
    int64_t bytes[2];
    int32_t staged, one_array;
} Known;

typedef struct {
    uintptr_t source, target;
} Memory;

enum { ASYNC_OP, REDUCE_OP, ROOT_RANK, DTYPE, NAMES };
static const char *const spelled[NAMES] = {"asyncOp", "reduceOp", "rootRank", "dtype"};

/* what a call through c10d is, besides its kind */
enum { SUMS = 1, FROM_ROOT = 2, BY_ROWS = 4 };

/* What DLPack 1.3 lays down of a tensor, and of the interface that a type of tensors offers by its attribute
 * __dlpack_c_exchange_api__. */
typedef struct {
    void *data;
    int32_t device_type, device, dims;
    uint8_t code, bits; /* of an element */
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Described;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *from_object, *to_object;
    int (*describe)(void *object, Described *out);
} Exchange;

#define ON_CPU 1

typedef struct {
    PyObject_HEAD
    Turn *turn;                                    /* the lock that is held while a call runs, if it is one; */
    PyObject *acquire, *without_waiting, *release; /* and of any kind */
    PyObject *calls;                               /* those that wait for their turn, or None */
    PyObject *rest;
    PyObject *method_type, *turn_type;
    PyObject *tensor_type, *sum, *capsule; /* of torch, or NULL */
    const Exchange *exchange;
    PyObject *words, *word; /* a dict and a key: calls through c10d go the long way while that is True; or NULL */
    PyObject *names[NAMES];
    OptionsLayout layouts[LAYOUTS];
    int layout_count;
    int64_t sum_number; /* of `sum`, as options keep it */
    void *group;
    Start *start, *start_briefly;
    Run *run;
    unsigned replaced; /* places that were taken from others: whose comes next */
    Known known[SETS][WAYS];
} Shortcut;

static Known *places_for(Shortcut *self, const Key *key)
{
    const uint64_t *words = (const uint64_t *)key;
    uint64_t hash = 0;
    for (size_t k = 0; k < sizeof *key / sizeof *words; k++)
        hash = (hash ^ words[k]) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    return self->known[hash >> 40 & (SETS - 1)];
}

static Known *find(Shortcut *self, const Key *key)
{
    Known *place = places_for(self, key);
    for (int way = 0; way < WAYS; way++, place++)
        if (place->plan && !memcmp(&place->key, key, sizeof *key))
            return place;
    return NULL;
}

static void forget(Known *place)
{
    PyObject *held[] = {place->key.kind, place->key.dtype, place->key.reduction, place->plan};
    *place = (Known){0};
    for (int k = 0; k < 4; k++)
        Py_XDECREF(held[k]);
}

#endif
