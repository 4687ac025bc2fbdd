/* What the core shares with Python, which fills in the same records (shm_abi.py), and with the other ranks: flags,
 * doorbells, notes. */

#ifndef SENNIT_SHM_RECORDS_H
#define SENNIT_SHM_RECORDS_H

#include <stdatomic.h>
#include <stdint.h>

enum { COPY, REDUCE, PUT, GET, READ_REDUCE, MULTI_REDUCE, MULTICAST, SWITCH_REDUCE, SIGNAL, WAIT };
enum { INPUT, OUTPUT, FIRST_SCRATCH };
enum { DONE, WAITING, OTHER_CALL, UNEXPECTED, UNUSABLE, UNREADABLE };
#define STRIDE (1 << 20)
#define LINE 64
#define NOWHERE INT32_MIN
#define SLOTS 4 /* tiles of a group that may be under way; a power of two */

typedef struct {
    int32_t op, peer, source_buffer, source_chunk, target_buffer, target_chunk, count, argument;
} Instruction;

typedef struct {
    int32_t rank, buffer, chunk;
} Operand;

typedef struct {
    /* where part 0 begins in the segment, and the bytes from one part to the next. An input where peers may read it in
     * its owner's memory: its address, or ~offset if it lies in the segment */
    int64_t offset, step;
} Place;

typedef struct {
    _Atomic uint64_t value; /* epoch * STRIDE + count */
    uint64_t calls;         /* all that its writer has begun, as one number */
    Place places[2];        /* its input and output */
    uint64_t left;          /* the last tile that its writer has left, with all before it */
    /* processors fetch lines in pairs: who looks at one of a pair would take the other from its writer */
    char rest[2 * LINE - 56];
} Flag;

typedef struct {
    _Atomic uint32_t bell, sleepers; /* of a rank */
    /* that it was on when it began its last call, of one that takes turns with others; else 0 */
    _Atomic int32_t core;
    char rest[LINE - 12];
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

enum { IN_RING_SCRATCH = 1, IN_RING_INPUT = 2 };
/* where peers read inputs: in staging, in the memory of their owner, or where each owner says, by the pages that its
 * input lies in */
enum { STAGED, DIRECT, EITHER };

#define NOTES 64
#define STATUS_BYTES 4096
#define HISTORY UINT64_C(0x9e3779b97f4a7c15) /* odd, so that nothing is forgotten */

typedef struct {
    uint64_t number, call;
    char words[112];
} CallNote;

typedef struct {
    char *base;
    Doorbell *doorbells; /* by rank */
    Flag *flags;         /* by rank, flags_per_rank each, by slot: the rank's own blocks write them */
    char *staging;       /* by rank, staging_step bytes each: SLOTS slots, then a ring */
    char *rings;         /* by set, sender, receiver */
    Place *peers;        /* by slot, by rank, two each: where their input and output lie, as their flags said */
    const int32_t *pids; /* by rank: the processes, for direct calls */
    char *workspace;     /* private, begun with a page: what of other processes is reduced passes through it */
    CallNote *notes;     /* the last calls of this rank, in the segment: for messages when ranks differ */
    _Atomic uint64_t *calls_begun; /* of this rank, in the segment; those of others are STATUS_BYTES apart */
    const volatile char *owned;    /* not 0 in the process that made the group; a page that a fork wipes */
    const volatile char *broken;   /* not 0 when a rank has declared a failure */
    int64_t bytes;                 /* of the segment */
    int64_t flags_per_rank, staging_step, slot_bytes, ring_bytes;
    int64_t staging_at; /* of its ring: where the next place begins; the same on all ranks */
    int32_t rank, ranks;
    int32_t pagemap; /* the kernel's account of this process's pages, or -1, */
    int32_t huge;    /* and whether large arrays are taken to lie in huge pages where it does not say */
    int32_t spin_limit, yields;
    /* nanoseconds: until it looks around; that a rank stays awake, at least, with a core of its own or in turns with
     * other ranks */
    int64_t patience, linger;
    uint64_t epoch, calls;
    uint64_t history;     /* of the calls that were begun, in order: ranks of the same calls have the same */
    _Atomic int32_t spin; /* how long to spin before the first yield; adapts */
    int32_t waiting_for;  /* out: the rank whose signal is awaited, or that runs another call */
    uint64_t left;        /* the last tile that this rank has left */
    uint64_t *left_by;    /* by rank: one that it has left, and all before it, as far as its flags have told */
    Exit exits[SLOTS];
    int32_t core; /* this rank's */
    struct Strips *others;
} Group;

typedef struct {
    int64_t first, size, stride; /* elements: before it, in it, in a chunk of it; of each part */
    uint64_t epoch;
    Place mine[2];
    char *scratch;
    int64_t reduced; /* bytes of a reduction that is tried again that have their result */
} Tile;

enum { ALONE, HELPED, WAYS_TO_RUN };

/* What is known of a call that was made before: whether helpers make it faster. See shm_strips.h. */
typedef struct {
    int64_t took[WAYS_TO_RUN]; /* nanoseconds, or 0 */
    int32_t made, due, gap; /* calls; the one that is made the other way next; and how many lie between two of them */
    int32_t way;            /* of the call under way */
} Trials;

typedef struct Call {
    const Instruction *code;
    const Operand *operands;
    const int32_t *blocks;  /* of this rank: first and last instruction of each */
    const int64_t *scratch; /* by buffer: chunks before it; the total last */
    int32_t *at;            /* by slot, by block: the next instruction */
    int64_t flag_base;
    int32_t block_count, scratch_count;
    int32_t chunks, alignment;    /* of a part; in elements */
    int32_t parts[2], touched[2]; /* of input and output: how many parts, and whether peers touch it */
    int32_t only_read;            /* peers only read here: a gate may be left before they are done */
    /* the chunk of the input that only this rank reads, which is not staged but read where the user has it; or -1 */
    int32_t kept;
    int32_t alias; /* in place: the part of the larger buffer at which the smaller begins; else -1 */
    /* whether peers read an input that lies in the segment where it is, and not in staging; */
    int32_t shared;
    /* and the part of it at which the output may begin if it lies over it: before it, if the number is negative; or
     * NOWHERE */
    int32_t over;
    int32_t dtype, reduction, itemsize, divide;
    int32_t large;  /* the output does not fit the cache of a core, */
    int32_t vast;   /* or those of all ranks the cache of all */
    int32_t direct; /* STAGED, DIRECT or EITHER */
    int32_t apart;  /* of a call that is EITHER: this rank's input and output do not overlap */
    /* of one that is DIRECT: what is read goes through a slot of staging into the output, past the cache: so many bytes
     * at a time; or 0 */
    int32_t bounced;
    int32_t early;          /* at the end of its steps a rank knows that its peers have read its input */
    int32_t piece;          /* of each operand that is reduced out of another process: bytes at a time */
    int64_t elements, tile; /* of a part: in all, and at a time */
    /* bytes of the ring that a tile takes, on whichever rank it takes most; 0: all of it lies in a slot */
    int64_t place;
    int32_t ringed;   /* what lies in the ring: IN_RING_SCRATCH or IN_RING_INPUT, or nothing */
    int32_t in_turns; /* each rank stages another part first */
    char *source, *target;
    int32_t staged[2];            /* whether input and output are copied through staging */
    uint64_t call;                /* what is called, as a number, */
    const char *words;            /* and in 112 bytes of words */
    int64_t first, stop;          /* the elements of each part that this strip has */
    int64_t entered, begun, left; /* where the next tile begins; tiles entered, and left */
    Tile tiles[SLOTS];
    int32_t strips;      /* that the call is cut into; */
    int32_t rouses;      /* whether helpers that sleep are woken for them; */
    struct Call *others; /* those after the first */
    Trials trials;
} Call;

/* A range of the elements of a call, and the thread that helps with it: see shm_strips.h. */
typedef struct Strip {
    _Atomic uint32_t state, bell, sleepers, ends; /* the last: the helper is to end */
    Group *group;                                 /* that this strip runs in */
    Call *call;
    int32_t status, started; /* of the call; whether there is a helper */
    uint64_t thread;
    char rest[2 * LINE - 48];
} Strip;

/* Of a rank: the strips after the first. */
typedef struct Strips {
    Strip *strips;
    int64_t ended; /* nanoseconds: when the last call was over */
} Strips;

typedef struct {
    char *data;
    int64_t bytes, done;
    uint64_t tag, found_tag;
    int64_t found_bytes;
    int32_t peer, sends, stage, rest;
} Transfer;

#endif
