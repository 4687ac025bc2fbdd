/* The shared-memory machine: interprets `Code` (code.py) on a segment that all ranks of a host have mapped.
 *
 * One thread runs all blocks of its rank in turn: a block goes on until it waits for a flag that is too low. If no block can go on, the
 * rank spins, then yields the core, then sleeps on a futex. Nothing blocks for longer than `patience`: then the call returns WAITING with its
 * place kept, and the caller looks whether the peers live and the time is not over, and calls again (shm_group.py).
 *
 * Memory order. A flag is one cache line with one writer. A signal stores it with release, after the data that it speaks of; a wait loads it with
 * acquire. A sleeper first says that it sleeps and then looks at its flags once more; who signals first stores the flag and then looks for
 * sleepers; a full fence stands between the two in both, so one of them sees the other.
 *
 * A call of n elements runs in tiles that fit a slot of staging memory. There are two slots, used in turn; a slot is used again when all peers
 * have left the tile that was in it before. What peers touch lies in the segment: input and output are copied through staging where they are
 * not there already. A flag carries where its writer's input and output lie, and which call this is, so a rank that calls something else is
 * found by the first wait for it.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- what Python fills in: the same fields stand in shm_abi.py ------------------------------------------------------- */

enum { COPY, REDUCE, PUT, GET, READ_REDUCE, MULTI_REDUCE, MULTICAST, SWITCH_REDUCE, SIGNAL, WAIT };
enum { INPUT, OUTPUT, FIRST_SCRATCH };
enum { DONE, WAITING, OTHER_CALL, UNEXPECTED };
#define STRIDE (1 << 20)
#define LINE 64

typedef struct {
    int32_t op, peer, source_buffer, source_chunk, target_buffer, target_chunk, count, argument;
} Instruction;

typedef struct {
    int32_t rank, buffer, chunk;
} Operand;

typedef struct {
    int64_t offset, step; /* where part 0 begins in the segment, and the bytes from one part to the next */
} Place;

typedef struct {
    _Atomic uint64_t value; /* epoch * STRIDE + count */
    uint64_t call;          /* what its writer runs */
    Place places[2];        /* its input and output */
    char rest[LINE - 48];
} Flag;

typedef struct {
    _Atomic uint32_t bell, sleepers; /* of a rank */
    char rest[LINE - 8];
} Doorbell;

typedef struct {
    _Atomic uint64_t bytes;
    char rest[LINE - 8];
} Counter;

typedef struct {
    const Instruction *next, *end;
    uint64_t epoch;
    int64_t flag_base;
} Exit; /* waits of a gate that are put off until its slot is used again */

#define NOTES 64

typedef struct {
    uint64_t number, call;
    char words[112];
} CallNote;

typedef struct {
    char *base;
    Doorbell *doorbells; /* by rank */
    Flag *flags;         /* by rank, by slot, flags_per_slot each */
    char *staging;       /* by rank, two slots each */
    char *rings;         /* by set, sender, receiver */
    Place *peers;        /* by rank, two each: where their input and output lie, as their flags said */
    CallNote *notes;     /* the last calls of this rank, in the segment: for messages when ranks differ */
    _Atomic uint64_t *calls_begun; /* of this rank, in the segment */
    int64_t flags_per_slot, staging_step, slot_bytes, ring_bytes;
    int32_t rank, ranks;
    int32_t spin_limit, yields;
    int64_t patience; /* nanoseconds */
    uint64_t epoch, calls;
    _Atomic int32_t spin; /* how long to spin before the first yield; adapts */
    int32_t waiting_for;  /* out: the rank whose signal is awaited, or that runs another call */
    Exit exits[2];
} Group;

typedef struct {
    int64_t first, size, stride; /* elements: before it, in it, in a chunk of it; of each part */
    uint64_t epoch;
    Place mine[2];
    char *slot;
} Tile;

typedef struct {
    const Instruction *code;
    const Operand *operands;
    const int32_t *blocks;  /* of this rank: first and last instruction of each */
    const int64_t *scratch; /* by buffer: chunks before it; the total last */
    int32_t *at;            /* by block: the next instruction */
    int64_t flag_base;
    int32_t block_count, scratch_count;
    int32_t chunks, alignment; /* of a part; in elements */
    int32_t parts[2], touched[2]; /* of input and output: how many parts, and whether peers touch it */
    int32_t only_read;            /* peers only read here: a gate may be left before they are done */
    int32_t alias; /* in place: the part of the larger buffer at which the smaller begins; else -1 */
    int32_t dtype, reduction, itemsize, divide;
    int64_t elements, tile; /* of a part: in all, and at a time */
    char *source, *target;
    int32_t staged[2]; /* whether input and output are copied through staging */
    uint64_t call;     /* what is called, as a number, */
    const char *words; /* and in 112 bytes of words */
    int32_t phase, ahead; /* progress; whether `next` has been entered */
    int64_t entered;      /* elements of all tiles entered */
    Tile here, next;
} Call;

typedef struct {
    char *data;
    int64_t bytes, done;
    uint64_t tag, found_tag;
    int64_t found_bytes;
    int32_t peer, sends, stage, rest;
} Transfer;

/* ---- reductions ------------------------------------------------------------------------------------------------------ */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define LOOP _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)
#define STRIP 4096 /* bytes: the target stays in the first-level cache while operands are added */

typedef void Kernel(void *to, const void *left, const void *right, size_t n);

#define KERNEL(NAME, TYPE, RESULT)                                                  \
    CLONES static void NAME(void *to, const void *left, const void *right, size_t n) \
    {                                                                               \
        TYPE *t = to;                                                               \
        const TYPE *l = left, *r = right;                                           \
        LOOP { TYPE a = l[i], b = r[i]; t[i] = (TYPE)(RESULT); }                    \
    }
/* a number that is none wins over all others, on either side */
#define ARITHMETIC(NAME, TYPE)                            \
    KERNEL(NAME##_sum, TYPE, a + b)                       \
    KERNEL(NAME##_prod, TYPE, a *b)                       \
    KERNEL(NAME##_min, TYPE, (a < b || a != a) ? a : b)   \
    KERNEL(NAME##_max, TYPE, (a > b || a != a) ? a : b)
#define BITWISE(NAME, TYPE)            \
    KERNEL(NAME##_band, TYPE, a &b)    \
    KERNEL(NAME##_bor, TYPE, a | b)    \
    KERNEL(NAME##_bxor, TYPE, a ^ b)

ARITHMETIC(f64, double)
ARITHMETIC(f32, float)
ARITHMETIC(i64, int64_t)
ARITHMETIC(i32, int32_t)
ARITHMETIC(i16, int16_t)
ARITHMETIC(i8, int8_t)
ARITHMETIC(u8, uint8_t)
BITWISE(i64, int64_t)
BITWISE(i32, int32_t)
BITWISE(i16, int16_t)
BITWISE(i8, int8_t)
#define u8_band i8_band
#define u8_bor i8_bor
#define u8_bxor i8_bxor

/* in the order of DTYPES and REDUCTIONS of shm_abi.py; halves are computed in f32, a bool's sum is "or" */
enum { F64, F32, BF16, F16, I64, I32, I16, I8, U8, BOOL };
#define FLOATING(NAME) {NAME##_sum, NAME##_prod, NAME##_min, NAME##_max, 0, 0, 0}
#define INTEGER(NAME) {NAME##_sum, NAME##_prod, NAME##_min, NAME##_max, NAME##_band, NAME##_bor, NAME##_bxor}
static Kernel *const kernels[][7] = {
    FLOATING(f64), FLOATING(f32), FLOATING(f32), FLOATING(f32), INTEGER(i64), INTEGER(i32), INTEGER(i16),
    INTEGER(i8), INTEGER(u8), {u8_bor, u8_band, u8_band, u8_bor, u8_band, u8_bor, u8_bxor},
};

CLONES static void widen_bf16(float *to, const uint16_t *from, size_t n)
{
    LOOP { uint32_t bits = (uint32_t)from[i] << 16; memcpy(to + i, &bits, 4); }
}

CLONES static void narrow_bf16(uint16_t *to, const float *from, size_t n)
{
    LOOP {
        uint32_t bits;
        memcpy(&bits, from + i, 4);
        uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : even);
    }
}

/* f16 has an exponent that is 112 less; a product with 2^112 moves it, and brings numbers without a leading one in order too */
CLONES static void widen_f16(float *to, const uint16_t *from, size_t n)
{
    LOOP {
        uint32_t half = from[i], bits = (half & 0x7fff) << 13, infinite = bits >= 0x0f800000;
        float number, scale = 0x1p112f;
        memcpy(&number, &bits, 4);
        number *= scale;
        memcpy(&bits, &number, 4);
        bits = (infinite ? bits | 0x7f800000 : bits) | (half & 0x8000) << 16;
        memcpy(to + i, &bits, 4);
    }
}

CLONES static void narrow_f16(uint16_t *to, const float *from, size_t n)
{
    LOOP {
        uint32_t bits, sign, even, tiny;
        memcpy(&bits, from + i, 4);
        sign = bits >> 16 & 0x8000;
        bits &= 0x7fffffff;
        even = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13; /* round to nearest even, carry into the exponent */
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f; /* below 2^-14: the adder rounds at 2^-24 */
        memcpy(&tiny, &small, 4);
        tiny -= 0x3f000000;
        even = bits < 0x38800000 ? tiny : even;
        even = bits >= 0x477ff000 ? 0x7c00 : even;
        even = bits > 0x7f800000 ? 0x7e00 | (bits >> 13 & 0x3ff) : even;
        to[i] = (uint16_t)(sign | even);
    }
}

static void widen(int dtype, float *to, const void *from, size_t n)
{
    dtype == F16 ? widen_f16(to, from, n) : widen_bf16(to, from, n);
}

static void narrow(int dtype, void *to, const float *from, size_t n)
{
    dtype == F16 ? narrow_f16(to, from, n) : narrow_bf16(to, from, n);
}

/* target = the reduction of all sources, in their order. The target may be a source. */
static void reduce_all(const Call *call, char *target, const char **sources, int count, size_t elements)
{
    Kernel *kernel = kernels[call->dtype][call->reduction];
    size_t item = call->itemsize, strip = STRIP / item;
    float total[STRIP / 2], term[STRIP / 2];
    if (count == 1 && sources[0] != target)
        memcpy(target, sources[0], elements * item);
    for (size_t done = 0; count > 1 && done < elements; done += strip) {
        size_t n = elements - done < strip ? elements - done : strip, skip = done * item;
        if (call->dtype == BF16 || call->dtype == F16) {
            widen(call->dtype, total, sources[0] + skip, n);
            for (int k = 1; k < count; k++) {
                widen(call->dtype, term, sources[k] + skip, n);
                kernel(total, total, term, n);
            }
            narrow(call->dtype, target + skip, total, n);
            continue;
        }
        kernel(target + skip, sources[0] + skip, sources[1] + skip, n);
        for (int k = 2; k < count; k++)
            kernel(target + skip, target + skip, sources[k] + skip, n);
    }
}

/* sennit_reduce: the same for tests, and for callers that hold all operands */
void sennit_reduce(const Call *call, char *target, const char **sources, int32_t count, int64_t elements)
{
    reduce_all(call, target, sources, count, (size_t)elements);
}

#define DIVIDE(DTYPE, TYPE) case DTYPE: { TYPE *t = (TYPE *)data; LOOP t[i] = (TYPE)(t[i] / (TYPE)by); break; }
static void divide(int dtype, char *data, int by, size_t n)
{
    float strip[STRIP / 2];
    switch (dtype) {
        DIVIDE(F64, double)
        DIVIDE(F32, float)
        DIVIDE(I64, int64_t)
        DIVIDE(I32, int32_t)
        DIVIDE(I16, int16_t)
        DIVIDE(I8, int8_t)
        DIVIDE(U8, uint8_t)
    case BF16:
    case F16:
        for (size_t done = 0; done < n; done += STRIP / 2) {
            size_t some = n - done < STRIP / 2 ? n - done : STRIP / 2;
            widen(dtype, strip, data + 2 * done, some);
            for (size_t i = 0; i < some; i++)
                strip[i] /= (float)by;
            narrow(dtype, data + 2 * done, strip, some);
        }
    }
}

/* ---- waiting --------------------------------------------------------------------------------------------------------- */

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

typedef struct {
    int rounds, asleep;
    uint32_t bell;
    int64_t since;
} Idle;

static void awake(Group *group, Idle *idle)
{
    if (idle->asleep)
        atomic_fetch_sub(&group->doorbells[group->rank].sleepers, 1);
    idle->asleep = 0;
}

/* Called when nothing can go on, again and again. False when patience is over. */
static int idle_once(Group *group, Idle *idle)
{
    Doorbell *door = &group->doorbells[group->rank];
    int spin = atomic_load_explicit(&group->spin, memory_order_relaxed);
    if (idle->rounds++ < spin) {
        relax();
        return 1;
    }
    int64_t now = nanoseconds();
    if (!idle->since)
        idle->since = now;
    if (idle->rounds < spin + group->yields) {
        sched_yield();
        /* a yield that took long let others run: there are fewer cores than ranks, and spinning takes their time */
        if (nanoseconds() - now > 3000 && spin)
            atomic_store_explicit(&group->spin, spin / 2, memory_order_relaxed);
        return 1;
    }
    if (!idle->asleep) { /* say so first, then look once more */
        atomic_fetch_add(&door->sleepers, 1);
        idle->asleep = 1;
        idle->bell = atomic_load(&door->bell);
        return 1;
    }
    int64_t left = idle->since + group->patience - now;
    if (left <= 0)
        return 0;
    struct timespec timeout = {left / 1000000000, left % 1000000000};
    syscall(SYS_futex, &door->bell, FUTEX_WAIT, idle->bell, &timeout, 0, 0);
    awake(group, idle);
    return nanoseconds() - idle->since < group->patience;
}

/* Something went on: the next wait starts anew. If spinning was enough, it may spin longer next time. */
static void went_on(Group *group, Idle *idle)
{
    int spin = atomic_load_explicit(&group->spin, memory_order_relaxed);
    if (idle->rounds && idle->rounds <= spin && spin < group->spin_limit)
        atomic_store_explicit(&group->spin, spin * 2 < group->spin_limit ? spin * 2 : group->spin_limit, memory_order_relaxed);
    awake(group, idle);
    *idle = (Idle){0};
}

/* After stores that the rank may wait for, and a full fence. */
static void wake(Group *group, int rank)
{
    Doorbell *door = &group->doorbells[rank];
    if (atomic_load_explicit(&door->sleepers, memory_order_relaxed)) {
        atomic_fetch_add(&door->bell, 1);
        syscall(SYS_futex, &door->bell, FUTEX_WAKE, INT_MAX, 0, 0, 0);
    }
}

/* ---- the interpreter ------------------------------------------------------------------------------------------------- */

/* The first byte of chunks of a buffer, and how many bytes they have: see Geometry in code.py. */
static char *locate(const Group *group, const Call *call, int rank, int buffer, int64_t chunk, int count, int64_t *bytes)
{
    int64_t stride = call->here.stride * call->itemsize;
    if (buffer >= FIRST_SCRATCH) {
        char *slot = call->here.slot + (rank - group->rank) * group->staging_step;
        *bytes = count * stride;
        return slot + (call->scratch[buffer - FIRST_SCRATCH] + chunk) * stride;
    }
    int64_t part = chunk / call->chunks, first = chunk % call->chunks, all = call->here.size * call->itemsize;
    int64_t start = first * stride < all ? first * stride : all;
    int64_t stop = (first + count) * stride < all ? (first + count) * stride : all;
    const Place *place = rank == group->rank ? &call->here.mine[buffer] : &group->peers[2 * rank + buffer];
    *bytes = stop - start;
    return group->base + place->offset + part * place->step + start;
}

static void move_data(const Group *group, const Call *call, const Instruction *step)
{
    int64_t size, other;
    if (step->op == MULTI_REDUCE || step->op == SWITCH_REDUCE) {
        const char *sources[step->peer + 1];
        const Operand *operand = call->operands + step->argument;
        int count = 0;
        char *target = locate(group, call, group->rank, step->target_buffer, step->target_chunk, step->count, &size);
        if (step->op == MULTI_REDUCE && step->source_buffer != 1)
            sources[count++] = target;
        for (int k = 0; k < step->peer; k++, operand++) {
            sources[count++] = locate(group, call, operand->rank, operand->buffer, operand->chunk, step->count, &other);
            size = other < size ? other : size;
        }
        reduce_all(call, target, sources, count, size / call->itemsize);
        return;
    }
    int from = step->op == COPY || step->op == PUT || step->op == MULTICAST ? group->rank : step->peer;
    char *source = locate(group, call, from, step->source_buffer, step->source_chunk, step->count, &size);
    if (step->op == MULTICAST) {
        const Operand *operand = call->operands + step->argument;
        for (int k = 0; k < step->peer; k++, operand++) {
            char *to = locate(group, call, operand->rank, operand->buffer, operand->chunk, step->count, &other);
            memcpy(to, source, other < size ? other : size);
        }
        return;
    }
    if (step->op == COPY && call->source == call->target && step->source_buffer == INPUT && step->target_buffer == OUTPUT &&
        step->source_chunk == step->target_chunk && !call->staged[OUTPUT])
        return; /* the user's input is the user's output: it is there */
    int to = step->op == PUT ? step->peer : group->rank;
    char *target = locate(group, call, to, step->target_buffer, step->target_chunk, step->count, &other);
    size = other < size ? other : size;
    if (step->op == REDUCE || step->op == READ_REDUCE) {
        const char *sources[2] = {target, source};
        reduce_all(call, target, sources, 2, size / call->itemsize);
    } else if (target != source) {
        memcpy(target, source, size);
    }
}

/* Flags are by slot: a rank may be one tile ahead of its peers, not two, so no flag is overwritten before it is read. */
static Flag *flag_at(const Group *group, int rank, int64_t number, uint64_t epoch)
{
    return &group->flags[(2 * rank + (epoch & 1)) * group->flags_per_slot + number];
}

static void signal_flag(Group *group, const Call *call, const Tile *tile, const Instruction *step)
{
    Flag *flag = flag_at(group, step->peer, call->flag_base + step->argument, tile->epoch);
    flag->call = call->call;
    flag->places[INPUT] = tile->mine[INPUT];
    flag->places[OUTPUT] = tile->mine[OUTPUT];
    atomic_store_explicit(&flag->value, tile->epoch * STRIDE + step->count, memory_order_release);
}

static int flag_is_up(Group *group, const Instruction *step, int64_t flag_base, uint64_t epoch)
{
    Flag *flag = flag_at(group, group->rank, flag_base + step->argument, epoch);
    return atomic_load_explicit(&flag->value, memory_order_acquire) >= epoch * STRIDE + step->count;
}

/* A row of signals, and one fence for all of them. Returns how many. */
static int signal_row(Group *group, const Call *call, const Tile *tile, const Instruction *step, int most)
{
    int count = 0;
    while (count < most && step[count].op == SIGNAL)
        signal_flag(group, call, tile, step + count++);
    atomic_thread_fence(memory_order_seq_cst);
    for (int k = 0; k < count; k++)
        wake(group, step[k].peer);
    return count;
}

/* One block, as far as it goes. 1: something was done; 0: nothing; -1: the peer runs another call. */
static int run_block(Group *group, Call *call, int block)
{
    int32_t *at = &call->at[block], end = call->blocks[2 * block + 1], begin = *at;
    while (*at < end) {
        const Instruction *step = call->code + *at;
        if (step->op == WAIT) {
            if (!flag_is_up(group, step, call->flag_base, call->here.epoch)) {
                group->waiting_for = step->peer;
                break;
            }
            if (step->source_buffer == 1) { /* of a gate: it lets this block in, and stays until this block has left */
                const Flag *flag = flag_at(group, group->rank, call->flag_base + step->argument, call->here.epoch);
                if (flag->call != call->call) {
                    group->waiting_for = step->peer;
                    return -1;
                }
                group->peers[2 * step->peer + INPUT] = flag->places[INPUT];
                group->peers[2 * step->peer + OUTPUT] = flag->places[OUTPUT];
            }
        } else if (step->op == SIGNAL) {
            *at += signal_row(group, call, &call->here, step, end - *at);
            continue;
        } else {
            move_data(group, call, step);
        }
        ++*at;
    }
    return *at > begin;
}

/* Into a tile: its size, where things lie, the input into staging, and the gate's signals: peers may read it from now on. */
static void enter_tile(Group *group, Call *call, Tile *tile)
{
    int64_t left = call->elements - call->entered, item = call->itemsize, grain = (int64_t)call->chunks * call->alignment;
    tile->first = call->entered;
    tile->size = left < call->tile ? left : call->tile;
    tile->stride = tile->size ? (tile->size + grain - 1) / grain * call->alignment : call->alignment;
    tile->epoch = ++group->epoch;
    tile->slot = group->staging + group->rank * group->staging_step + (tile->epoch & 1) * group->slot_bytes;
    char *free = tile->slot + (call->scratch[call->scratch_count] * tile->stride * item + LINE - 1) / LINE * LINE;
    char *user[2] = {call->source, call->target};
    int64_t length = tile->size * item;
    int small = call->parts[OUTPUT] < call->parts[INPUT] ? OUTPUT : INPUT, aliased = call->alias >= 0 && call->staged[INPUT];
    for (int buffer = INPUT; buffer <= OUTPUT; buffer++) {
        char *place = call->staged[buffer] ? free : user[buffer] + tile->first * item;
        tile->mine[buffer].offset = place - group->base;
        tile->mine[buffer].step = call->staged[buffer] ? length : call->elements * item;
        if (call->staged[buffer] && !(aliased && buffer == small))
            free += (call->parts[buffer] * length + LINE - 1) / LINE * LINE;
    }
    if (aliased) { /* in place the two are one in staging too: the smaller lies in the larger */
        tile->mine[small] = tile->mine[1 - small];
        tile->mine[small].offset += call->alias * length;
    }
    for (int part = 0; call->staged[INPUT] && part < call->parts[INPUT]; part++)
        memcpy(group->base + tile->mine[INPUT].offset + part * length,
               call->source + (part * call->elements + tile->first) * item, length);
    call->entered += tile->size;
    signal_row(group, call, tile, call->code + call->blocks[0], call->blocks[1] - call->blocks[0]);
}

/* May the next tile be entered: have all peers left the one that was in its slot? */
static int slot_is_free(Group *group)
{
    Exit *exit = &group->exits[(group->epoch + 1) & 1];
    while (exit->next < exit->end && flag_is_up(group, exit->next, exit->flag_base, exit->epoch))
        exit->next++;
    if (exit->next < exit->end)
        group->waiting_for = exit->next->peer;
    return exit->next == exit->end;
}

/* All blocks to their beginnings; the gate has signalled already. */
static void begin_tile(Call *call)
{
    for (int block = 0; block < call->block_count; block++)
        call->at[block] = call->blocks[2 * block];
    while (call->at[0] < call->blocks[1] && call->code[call->at[0]].op == SIGNAL)
        call->at[0]++;
}

/* Out of a tile: the output out of staging, an average divided, the gate's waits put off where peers only read staging. */
static void leave_tile(Group *group, Call *call)
{
    Tile *tile = &call->here;
    int64_t item = call->itemsize, length = tile->size * item;
    for (int part = 0; call->target && part < call->parts[OUTPUT]; part++) {
        char *to = call->target + (part * call->elements + tile->first) * item;
        if (call->staged[OUTPUT])
            memcpy(to, group->base + tile->mine[OUTPUT].offset + part * length, length);
        if (call->divide > 1)
            divide(call->dtype, to, call->divide, tile->size);
    }
    group->exits[tile->epoch & 1] =
        (Exit){call->code + call->at[0], call->code + call->blocks[1], tile->epoch, call->flag_base};
}

/* The call's blocks are at their ends; with `put_off` the gate may stand at its waits. */
static int all_done(const Call *call, int put_off)
{
    for (int block = 0; block < call->block_count; block++)
        if (call->at[block] < call->blocks[2 * block + 1] && !(put_off && block == 0 && call->code[call->at[0]].op == WAIT))
            return 0;
    return 1;
}

/* Goes on with a call. Phase 0: into the first tile. 1: runs one, and enters the next as soon as its slot is free, so that peers need not wait for
 * it. 2: done. */
int sennit_run(Group *group, Call *call)
{
    Idle idle = {0};
    int put_off = call->only_read && (call->staged[INPUT] || !call->touched[INPUT]) && !call->touched[OUTPUT];
    while (call->phase < 2) {
        int moved = 0;
        if ((call->phase == 0 || (!call->ahead && call->entered < call->elements)) && slot_is_free(group)) {
            enter_tile(group, call, call->phase ? &call->next : &call->here);
            call->ahead = call->phase;
            if (call->phase == 0)
                begin_tile(call);
            call->phase = 1;
            moved = 1;
        }
        for (int block = 0; call->phase == 1 && block < call->block_count; block++) {
            int result = run_block(group, call, block);
            if (result < 0) {
                awake(group, &idle);
                return OTHER_CALL;
            }
            moved |= result;
        }
        if (call->phase == 1 && all_done(call, put_off)) {
            leave_tile(group, call);
            call->phase = call->ahead ? 1 : call->entered < call->elements ? 0 : 2;
            if (call->ahead) {
                call->here = call->next;
                call->ahead = 0;
                begin_tile(call);
            }
            moved = 1;
        }
        if (moved)
            went_on(group, &idle);
        else if (!idle_once(group, &idle))
            break;
    }
    awake(group, &idle);
    return call->phase == 2 ? DONE : WAITING;
}

/* Begins a call: of `staged`, bit 0 stands for the input, bit 1 for the output. */
int sennit_start(Group *group, Call *call, char *source, char *target, int32_t staged)
{
    call->source = source;
    call->target = target;
    call->staged[INPUT] = staged & 1;
    call->staged[OUTPUT] = staged >> 1;
    call->phase = call->ahead = 0;
    call->entered = 0;
    CallNote *note = &group->notes[++group->calls % NOTES];
    note->number = group->calls;
    note->call = call->call;
    memcpy(note->words, call->words, sizeof note->words);
    atomic_store_explicit(group->calls_begun, group->calls, memory_order_release);
    return sennit_run(group, call);
}

/* ---- messages: a ring of bytes for each ordered pair of ranks ---------------------------------------------------------- */

#define HEADER 16 /* tag and size; payloads are filled up to as many bytes, so no header wraps round */

typedef struct {
    Counter written, read;
    char data[];
} Ring;

static Ring *ring_of(const Group *group, int set, int sender, int receiver)
{
    int64_t number = ((int64_t)set * group->ranks + sender) * group->ranks + receiver;
    return (Ring *)(group->rings + number * ((int64_t)sizeof(Ring) + group->ring_bytes));
}

static void ring_copy(const Group *group, Ring *ring, uint64_t position, char *data, int64_t bytes, int into)
{
    int64_t at = position % group->ring_bytes, first = group->ring_bytes - at < bytes ? group->ring_bytes - at : bytes;
    if (into) {
        memcpy(ring->data + at, data, first);
        memcpy(ring->data, data + first, bytes - first);
    } else {
        memcpy(data, ring->data + at, first);
        memcpy(data + first, ring->data, bytes - first);
    }
}

/* As much of a transfer as the ring allows. 1: something moved; 0: nothing; -1: another message is first in the ring. */
static int advance(Group *group, int set, Transfer *transfer)
{
    int sends = transfer->sends;
    Ring *ring = sends ? ring_of(group, set, group->rank, transfer->peer) : ring_of(group, set, transfer->peer, group->rank);
    Counter *own = sends ? &ring->written : &ring->read, *theirs = sends ? &ring->read : &ring->written;
    uint64_t mine = atomic_load_explicit(&own->bytes, memory_order_relaxed);
    int64_t room = (int64_t)(atomic_load_explicit(&theirs->bytes, memory_order_acquire) - mine) + (sends ? group->ring_bytes : 0);
    uint64_t start = mine;
    if (transfer->stage == 0) {
        uint64_t header[2] = {transfer->tag, (uint64_t)transfer->bytes};
        if (room < HEADER)
            return 0;
        ring_copy(group, ring, mine, (char *)header, HEADER, sends);
        if (!sends && (header[0] != transfer->tag || header[1] != (uint64_t)transfer->bytes)) {
            transfer->found_tag = header[0];
            transfer->found_bytes = (int64_t)header[1];
            return -1;
        }
        transfer->stage = 1;
        mine += HEADER;
        room -= HEADER;
    }
    int64_t left = transfer->bytes - transfer->done, most = group->ring_bytes / 4; /* so that the other side may begin */
    int64_t some = left < room ? left : room;
    some = some < most ? some : most;
    ring_copy(group, ring, mine, transfer->data + transfer->done, some, sends);
    transfer->done += some;
    mine += some;
    if (transfer->done == transfer->bytes) { /* filling exists in the ring whenever the payload does: sizes are multiples of it */
        transfer->stage = 2;
        mine += (HEADER - transfer->bytes % HEADER) % HEADER;
    }
    if (mine == start)
        return 0;
    atomic_store_explicit(&own->bytes, mine, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    wake(group, transfer->peer);
    return 1;
}

/* All transfers, in any order. Goes on where it stood if it is called again. */
int sennit_exchange(Group *group, int32_t set, Transfer *transfers, int32_t count)
{
    Idle idle = {0};
    for (;;) {
        int moved = 0, open = 0;
        for (int k = 0; k < count; k++) {
            if (transfers[k].stage == 2)
                continue;
            int result = advance(group, set, &transfers[k]);
            if (result < 0) {
                awake(group, &idle);
                return UNEXPECTED;
            }
            moved |= result;
            open += transfers[k].stage != 2;
        }
        if (!open) {
            awake(group, &idle);
            return DONE;
        }
        if (moved)
            went_on(group, &idle);
        else if (!idle_once(group, &idle)) {
            awake(group, &idle);
            return WAITING;
        }
    }
}

/* ---- posts: words that say where data lies in memory that its writer owns (shm_posts.py) -------------------------------- */

typedef struct {
    Counter *counter;
    uint64_t least;
} Watch;

/* The data that the word speaks of is written; who waits at the door is woken. */
void sennit_post(Counter *counter, uint64_t value, Doorbell *door)
{
    atomic_store_explicit(&counter->bytes, value, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    Group visitor = {.doorbells = door};
    wake(&visitor, 0);
}

uint64_t sennit_look(Counter *counter)
{
    return atomic_load_explicit(&counter->bytes, memory_order_acquire);
}

/* Until one of the words is as high as it should be: DONE; WAITING when patience is over. */
int sennit_await(Group *group, const Watch *watches, int32_t count)
{
    Idle idle = {0};
    for (;;) {
        for (int k = 0; k < count; k++)
            if (sennit_look(watches[k].counter) >= watches[k].least) {
                went_on(group, &idle);
                return DONE;
            }
        if (!idle_once(group, &idle)) {
            awake(group, &idle);
            return WAITING;
        }
    }
}
