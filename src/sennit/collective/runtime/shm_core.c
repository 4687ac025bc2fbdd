/* The shared-memory machine: interprets `Code` (code.py) on a segment that all ranks of a host have mapped.
 *
 * One thread runs all blocks of its rank in turn, or of a strip of a large call, of which several threads run one each
 * (shm_strips.h): a block goes on until it waits for a flag that is too low. If no block can go on, the thread spins,
 * then yields the core, then sleeps on a futex. Nothing blocks for longer than `patience`: then the call returns WAITING
 * with its place kept, and the caller looks whether the peers live and the time is not over, and calls again
 * (shm_endpoint.py).
 *
 * Memory order. A flag is one cache line with one writer. A signal stores it with release, after the data that it
 * speaks of; a wait loads it with acquire. All who wait for a block look at the same line (code_lines.py). A sleeper
 * first says that it sleeps and then looks at its flags once more; who signals first stores the flag and then looks for
 * sleepers; a full fence stands between the two in both, so one of them sees the other.
 *
 * A call of n elements runs in tiles, SLOTS of which are under way at once: while the oldest waits for a peer, a
 * younger one goes on, so a rank that is late for a moment does not hold up the others. A tile is entered when all
 * peers have left the one that was SLOTS before it, and with it all that were earlier. Its place in staging is a slot,
 * used in turn, which that one had; what many read lies in the next place of a ring instead. Nobody is there any more:
 * a tile that is still under way is one of the SLOTS - 1 before; from the beginning of its place on, over the end of
 * the ring if need be, to the end of the new one, there are at most SLOTS places and what was too short for one at the
 * end of the ring; and the ring has more than SLOTS + 1 times the longest place (`Layout`). A line that many have read
 * a moment ago must be taken from all their caches before it is written; when the ring comes round, it has left them.
 * What peers touch lies in the segment: input and output are copied through staging where they are not there already. A
 * flag carries where its writer's input and output lie, and which call this is, so a rank that calls something else is
 * found by the first wait for it.
 *
 * In a *direct* call inputs are not staged: peers read them where the user has them, in the memory of the other process
 * (process_vm_readv), one copy instead of two, or add them up from there (shm_pull.h); an input that lies in the
 * segment is read where it is mapped. Scratch is in staging, and there is one tile if there is none. The kernel reads
 * what the owner wrote before the release of its gate's signal, since the reader asks after the acquire; and the call
 * returns only when all peers have read: when they have signalled that they have left; or when this rank's own blocks
 * are at their ends, where it is proved that they know as much by then (`early`). An output may lie over the input,
 * where it is proved that nothing is overwritten before it was read. code_direct.py has both proofs. In a call that is
 * EITHER each rank says so of its own input, in its gate's flag, and the others are staged: all go through tiles as if
 * all were.
 *
 * Reads of several peers at once (`get_row`): each is made after the acquire of its own flag, like one that is made
 * alone, and before the signal that comes after them in the code. Stores past the cache are fenced before a signal too
 * (`end_past_cache`), which a release alone does not order.
 */

#define _GNU_SOURCE
#include <string.h>

#include "shm_copy.h"
#include "shm_messages.h"
#include "shm_pull.h"
#include "shm_records.h"
#include "shm_reduce.h"
#include "shm_strips.h"
#include "shm_wait.h"

/* ---- the interpreter --------------------------------------------------------------------------------------------- */

/* Where input and output of a peer lie in a tile. */
static Place *places_of(const Group *group, const Tile *tile, int rank)
{
    return &group->peers[2 * (tile->epoch % SLOTS * group->ranks + rank)];
}

/* The first byte of chunks of a buffer, and how many bytes they have: see Geometry in code.py. */
static char *locate(const Group *group, const Call *call, const Tile *tile, int rank, int buffer, int64_t chunk,
                    int count, int64_t *bytes)
{
    int64_t stride = tile->stride * call->itemsize;
    if (buffer >= FIRST_SCRATCH) {
        char *scratch = tile->scratch + (rank - group->rank) * group->staging_step;
        *bytes = count * stride;
        return scratch + (call->scratch[buffer - FIRST_SCRATCH] + chunk) * stride;
    }
    int64_t part = (uint32_t)chunk / (uint32_t)call->chunks, first = chunk - part * call->chunks,
            all = tile->size * call->itemsize;
    int64_t start = first * stride < all ? first * stride : all;
    int64_t stop = (first + count) * stride < all ? (first + count) * stride : all;
    if (buffer == INPUT && chunk == call->kept && rank == group->rank && call->staged[INPUT]) {
        *bytes = stop - start;
        return call->source + (part * call->elements + tile->first) * call->itemsize + start;
    }
    const Place *place = rank == group->rank ? &tile->mine[buffer] : &places_of(group, tile, rank)[buffer];
    *bytes = stop - start;
    char *origin = !call->direct || buffer != INPUT ? group->base + place->offset
                   : place->offset < 0              ? group->base + ~place->offset
                                                    : (char *)place->offset;
    return origin + part * place->step + start;
}

/* Whether a place is read in the memory of another process: an input in a direct call, unless it lies in the segment.
 */
static int is_pulled(const Group *group, const Call *call, const Tile *tile, int rank, int buffer)
{
    return call->direct && buffer == INPUT && rank != group->rank && places_of(group, tile, rank)[INPUT].offset >= 0;
}

/* Whether a copy to this target goes past the cache. An output that is the input too was in a cache a moment before. */
static int goes_past(const Call *call, int target_buffer)
{
    int warm = call->source == call->target && call->staged[INPUT];
    return (warm ? call->vast : call->large) && target_buffer == OUTPUT && !call->staged[OUTPUT];
}

/* Reductions into this rank's target, of the operands of a step. In a direct call inputs of peers lie in their own
 * memory. False where that cannot be read: the step is tried again. */
static int reduce_operands(Group *group, const Call *call, Tile *tile, const Instruction *step, const Operand *operand,
                           int operands, int adds)
{
    const char *sources[operands + 1];
    int32_t owners[operands + 1];
    int64_t size, other;
    int count = 0, pulls = 0;
    char *target = locate(group, call, tile, group->rank, step->target_buffer, step->target_chunk, step->count, &size);
    if (adds)
        owners[count] = HERE, sources[count++] = target;
    for (int k = 0; k < operands; k++, operand++, count++) {
        sources[count] = locate(group, call, tile, operand->rank, operand->buffer, operand->chunk, step->count, &other);
        size = other < size ? other : size;
        if (call->direct) {
            int pulled = is_pulled(group, call, tile, operand->rank, operand->buffer);
            owners[count] = pulled ? operand->rank : HERE;
            pulls |= pulled;
        }
    }
    if (pulls)
        return reduce_pulled(group, call, target, sources, owners, count, size, &tile->reduced);
    reduce_all(call, target, sources, count, size / call->itemsize);
    return 1;
}

static int reduce_many(Group *group, const Call *call, Tile *tile, const Instruction *step)
{
    if (step->op == READ_REDUCE)
        return reduce_operands(group, call, tile, step, &(Operand){step->peer, step->source_buffer, step->source_chunk},
                               1, 1);
    int adds = step->op == MULTI_REDUCE && step->source_buffer != 1;
    return reduce_operands(group, call, tile, step, call->operands + step->argument, step->peer, adds);
}

/* From where, to where and how much a step with one source and one target moves. */
static Piece piece_of(const Group *group, const Call *call, const Tile *tile, const Instruction *step)
{
    int64_t size, other;
    int from = step->op == COPY || step->op == PUT ? group->rank : step->peer,
        to = step->op == PUT ? step->peer : group->rank;
    char *source = locate(group, call, tile, from, step->source_buffer, step->source_chunk, step->count, &size);
    char *target = locate(group, call, tile, to, step->target_buffer, step->target_chunk, step->count, &other);
    return (Piece){target, source, (size_t)(other < size ? other : size)};
}

/* False where a peer's memory cannot be read: the step is tried again. */
static int move_data(Group *group, const Call *call, Tile *tile, const Instruction *step)
{
    if (step->op == MULTI_REDUCE || step->op == SWITCH_REDUCE || step->op == READ_REDUCE)
        return reduce_many(group, call, tile, step);
    if (step->op == MULTICAST) {
        int64_t size, other;
        const Operand *operand = call->operands + step->argument;
        char *source =
            locate(group, call, tile, group->rank, step->source_buffer, step->source_chunk, step->count, &size);
        for (int k = 0; k < step->peer; k++, operand++) {
            char *to = locate(group, call, tile, operand->rank, operand->buffer, operand->chunk, step->count, &other);
            if (to != source)
                memcpy(to, source, other < size ? other : size);
        }
        return 1;
    }
    if (step->op == COPY && call->source == call->target && step->source_buffer == INPUT &&
        step->target_buffer == OUTPUT && step->source_chunk == step->target_chunk && !call->staged[OUTPUT])
        return 1; /* the user's input is the user's output: it is there */
    Piece piece = piece_of(group, call, tile, step);
    int pulled = step->op == GET && is_pulled(group, call, tile, step->peer, step->source_buffer);
    /* what is not staged lies there as a whole: all of a part, as far as the strip goes, with the first tile */
    if (call->apart && (pulled || step->op == COPY)) {
        if (tile->first != call->first)
            return 1;
        piece.bytes = (size_t)((call->stop - call->first) * call->itemsize);
    }
    if (pulled && call->bounced && step->target_buffer == OUTPUT)
        return pull_past_cache(group, step->peer, piece, tile->scratch, call->bounced);
    if (pulled)
        return pull(group, step->peer, piece.to, (char *)piece.from, piece.bytes);
    if (step->op == REDUCE) {
        const char *sources[2] = {piece.to, piece.from};
        reduce_all(call, piece.to, sources, 2, piece.bytes / call->itemsize);
    } else if (piece.to != piece.from) {
        copy_piece(&piece, goes_past(call, step->target_buffer));
    }
    return 1;
}

/* Flags are by slot. Who signals in a tile has entered it, so its peers have left the tile that was in the slot before:
 * what a gate's flag says of a tile is not overwritten before it is read. */
static Flag *flag_at(const Group *group, int rank, int64_t number, uint64_t epoch)
{
    return &group->flags[(rank * group->flags_per_rank + number) * SLOTS + epoch % SLOTS];
}

static int flag_is_up(const Group *group, const Instruction *step, int64_t flag_base, uint64_t epoch)
{
    Flag *flag = flag_at(group, step->peer, flag_base + step->argument, epoch);
    return atomic_load_explicit(&flag->value, memory_order_acquire) >= epoch * STRIDE + step->count;
}

/* A row of signals: one store, and one fence. Returns how many. */
static int signal_row(Group *group, const Call *call, const Tile *tile, const Instruction *step, int most)
{
    int count = 0;
    while (count < most && step[count].op == SIGNAL)
        count++;
    if (!count)
        return 0;
    Flag *flag = flag_at(group, group->rank, call->flag_base + step->argument, tile->epoch);
    flag->calls = group->history;
    flag->places[INPUT] = tile->mine[INPUT];
    flag->places[OUTPUT] = tile->mine[OUTPUT];
    flag->left = group->left;
    atomic_store_explicit(&flag->value, tile->epoch * STRIDE + step[count - 1].count, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    for (int k = 0; k < count; k++)
        wake(group, step[k].peer);
    return count;
}

/* A wait: 1: its flag is up; 0: it is not; -1: the peer runs another call, or ran one before. */
static int pass_wait(Group *group, const Call *call, const Tile *tile, const Instruction *step)
{
    if (!flag_is_up(group, step, call->flag_base, tile->epoch))
        return 0;
    if (step->source_buffer == 1) { /* of a gate: it lets this block in, and stays until this block has left */
        const Flag *flag = flag_at(group, step->peer, call->flag_base + step->argument, tile->epoch);
        if (flag->calls != group->history)
            return -1;
        if (flag->left > group->left_by[step->peer])
            group->left_by[step->peer] = flag->left;
        memcpy(places_of(group, tile, step->peer), flag->places, sizeof flag->places);
    }
    return 1;
}

static int overlaps(const Piece *one, const Piece *two)
{
    return one->to < two->to + two->bytes && two->to < one->to + one->bytes;
}

/* The reads from here on that can be made now, all at once; waits between them are passed where their flags are up.
 * They write to different places of this rank and read what others have written, so their order does not matter.
 * Returns how many steps were made. */
static int get_row(Group *group, const Call *call, const Tile *tile, const Instruction *step, int most)
{
    Piece pieces[STREAMS];
    int count = 0, made = 0, past = goes_past(call, step->target_buffer);
    for (int k = 0; k < most && count < STREAMS; k++) {
        if (step[k].op == WAIT && pass_wait(group, call, tile, &step[k]) == 1)
            continue;
        if (step[k].op != GET || is_pulled(group, call, tile, step[k].peer, step[k].source_buffer) ||
            goes_past(call, step[k].target_buffer) != past)
            break;
        pieces[count] = piece_of(group, call, tile, &step[k]);
        for (int other = 0; other < count; other++)
            if (overlaps(&pieces[count], &pieces[other]))
                goto full;
        count++, made = k + 1;
    }
full:
    copy_all(pieces, count, past);
    return made;
}

/* One block of a tile, as far as it goes. 1: something was done; 0: nothing; -1: the peer runs another call, or ran one
 * before. */
static int run_block(Group *group, Call *call, Tile *tile, int32_t *at, int32_t end)
{
    int32_t begin = *at;
    while (*at < end) {
        const Instruction *step = call->code + *at;
        if (step->op == WAIT) {
            int passed = pass_wait(group, call, tile, step);
            if (passed != 1) {
                group->waiting_for = step->peer;
                if (passed < 0)
                    return -1;
                break;
            }
        } else if (step->op == SIGNAL) {
            *at += signal_row(group, call, tile, step, end - *at);
            continue;
        } else if (step->op == GET && !is_pulled(group, call, tile, step->peer, step->source_buffer)) {
            *at += get_row(group, call, tile, step, end - *at);
            continue;
        } else if (!move_data(group, call, tile, step))
            break;
        ++*at;
    }
    return *at > begin;
}

/* The next place of the ring, in the staging of each rank: the same on all of them, since all run the same tiles. See
 * the top for why nobody is there any more. */
static int64_t next_place(Group *group, const Call *call)
{
    if (group->staging_at + call->place > group->staging_step)
        group->staging_at = SLOTS * group->slot_bytes;
    group->staging_at += call->place;
    return group->staging_at - call->place;
}

/* Into a tile: its size, where things lie, the input into staging, and the gate's signals: peers may read it from now
 * on. */
static void enter_tile(Group *group, Call *call, Tile *tile)
{
    int64_t left = call->stop - call->entered, item = call->itemsize, grain = (int64_t)call->chunks * call->alignment;
    tile->first = call->entered;
    tile->reduced = 0;
    tile->size = left < call->tile ? left : call->tile;
    tile->stride = tile->size ? (tile->size + grain - 1) / grain * call->alignment : call->alignment;
    tile->epoch = ++group->epoch;
    char *own = group->staging + group->rank * group->staging_step,
         *free = own + tile->epoch % SLOTS * group->slot_bytes;
    char *ring = call->ringed ? own + next_place(group, call) : free;
    tile->scratch = call->ringed == IN_RING_SCRATCH ? ring : free;
    if (call->ringed == IN_RING_INPUT)
        free = ring;
    else if (!call->ringed)
        free += (call->scratch[call->scratch_count] * tile->stride * item + LINE - 1) / LINE * LINE;
    char *user[2] = {call->source, call->target};
    int64_t length = tile->size * item;
    int small = call->parts[OUTPUT] < call->parts[INPUT] ? OUTPUT : INPUT,
        aliased = call->alias >= 0 && call->staged[INPUT];
    for (int buffer = INPUT; buffer <= OUTPUT; buffer++) {
        char *place = call->staged[buffer] ? free : user[buffer] + tile->first * item;
        int64_t offset = place - group->base, shared = 0 <= offset && offset < group->bytes;
        tile->mine[buffer].offset = !call->direct || buffer != INPUT ? offset : shared ? ~offset : (intptr_t)place;
        tile->mine[buffer].step = call->staged[buffer] ? length : call->elements * item;
        if (call->staged[buffer] && !(aliased && buffer == small))
            free += (call->parts[buffer] * length + LINE - 1) / LINE * LINE;
    }
    if (aliased) { /* in place the two are one in staging too: the smaller lies in the larger */
        tile->mine[small] = tile->mine[1 - small];
        tile->mine[small].offset += call->alias * length;
    }
    int64_t chunk = tile->stride * item, start = call->kept % call->chunks * chunk, stop = start + chunk;
    start = start < length ? start : length;
    stop = stop < length ? stop : length;
    for (int turn = 0; call->staged[INPUT] && turn < call->parts[INPUT]; turn++) {
        int part = call->in_turns ? (group->rank + 1 + turn) % call->parts[INPUT] : turn;
        char *to = group->base + (call->direct ? ~tile->mine[INPUT].offset : tile->mine[INPUT].offset) + part * length;
        const char *from = call->source + (part * call->elements + tile->first) * item;
        if (call->kept < 0 || call->kept / call->chunks != part) {
            memcpy(to, from, length);
        } else { /* a chunk that no peer reads */
            memcpy(to, from, start);
            memcpy(to + stop, from + stop, length - stop);
        }
    }
    call->entered += tile->size;
    signal_row(group, call, tile, call->code + call->blocks[0], call->blocks[1] - call->blocks[0]);
}

/* May the next tile be entered: have all peers left the one that was in its slot? What they said when they entered
 * later ones saves a look at what they say of that one. */
static int slot_is_free(Group *group)
{
    Exit *exit = &group->exits[(group->epoch + 1) % SLOTS];
    while (exit->next < exit->end && (group->left_by[exit->next->peer] >= exit->epoch ||
                                      flag_is_up(group, exit->next, exit->flag_base, exit->epoch)))
        exit->next++;
    if (exit->next < exit->end)
        group->waiting_for = exit->next->peer;
    return exit->next == exit->end;
}

/* By block: the next instruction, of a tile. */
static int32_t *steps_of(const Call *call, int64_t number) { return call->at + number % SLOTS * call->block_count; }

/* All blocks to their beginnings; the gate has signalled already. */
static void begin_tile(const Call *call, int32_t *at)
{
    for (int block = 0; block < call->block_count; block++)
        at[block] = call->blocks[2 * block];
    while (at[0] < call->blocks[1] && call->code[at[0]].op == SIGNAL)
        at[0]++;
}

/* Out of a tile: the output out of staging, an average divided, the gate's waits put off where peers only read staging.
 */
static void leave_tile(Group *group, Call *call, const Tile *tile, const int32_t *at)
{
    int64_t item = call->itemsize, length = tile->size * item;
    for (int part = 0; call->target && part < call->parts[OUTPUT]; part++) {
        char *to = call->target + (part * call->elements + tile->first) * item;
        if (call->staged[OUTPUT])
            memcpy(to, group->base + tile->mine[OUTPUT].offset + part * length, length);
        if (call->divide > 1)
            divide(call->dtype, to, call->divide, tile->size);
    }
    group->left = tile->epoch;
    group->exits[tile->epoch % SLOTS] =
        (Exit){call->code + at[0], call->code + call->blocks[1], tile->epoch, call->flag_base};
}

/* Of a call that is EITHER, after its first tile: whether all inputs were offered. Then all has been read, and there
 * are no more tiles. Each rank reads from each, so all have seen the same. */
static int all_offered(const Group *group, const Call *call, const Tile *tile)
{
    int all = call->direct == EITHER && tile->mine[INPUT].offset >= 0;
    for (int rank = 0; all && rank < group->ranks; rank++)
        all = rank == group->rank || places_of(group, tile, rank)[INPUT].offset >= 0;
    return all;
}

/* The blocks of a tile are at their ends; with `put_off` the gate may stand at its waits. */
static int all_done(const Call *call, const int32_t *at, int put_off)
{
    for (int block = 0; block < call->block_count; block++)
        if (at[block] < call->blocks[2 * block + 1] && !(put_off && block == 0 && call->code[at[0]].op == WAIT))
            return 0;
    return 1;
}

/* Calls of this group. */
static uint64_t begun_by(const Group *group, int rank)
{
    ptrdiff_t away = (ptrdiff_t)(rank - group->rank) * STATUS_BYTES;
    return atomic_load_explicit((_Atomic uint64_t *)((char *)group->calls_begun + away), memory_order_relaxed);
}

/* Whether a rank began its last call on this core. */
static int is_near(const Group *group, int rank)
{
    return atomic_load_explicit(&group->doorbells[rank].core, memory_order_relaxed) == group->core;
}

/* Whether a block waits for a rank of this core, before it next signals itself. */
static int awaits_near(const Group *group, const Call *call, const Tile *tile, const int32_t *at, int block)
{
    const Instruction *step = call->code + at[block], *end = call->code + call->blocks[2 * block + 1];
    for (; step < end && step->op != SIGNAL; step++)
        if (step->op == WAIT && is_near(group, step->peer) && !flag_is_up(group, step, call->flag_base, tile->epoch))
            return 1;
    return 0;
}

/* Of a rank that takes turns: whether giving its core away brings nothing, since those who want it wait for ranks of
 * other cores as it does: they have begun this call, and what it awaits in the tiles under way comes from elsewhere. */
static int all_await_others(const Group *group, const Call *call, int put_off)
{
    for (int rank = 0; rank < group->ranks; rank++)
        if (rank != group->rank && is_near(group, rank) && begun_by(group, rank) < group->calls)
            return 0;
    for (int64_t number = call->left; number < call->begun; number++) {
        const Tile *tile = &call->tiles[number % SLOTS];
        const int32_t *at = steps_of(call, number);
        int gate = put_off && call->code[at[0]].op == WAIT; /* its waits hold up nothing */
        for (int block = gate; block < call->block_count; block++)
            if (awaits_near(group, call, tile, at, block))
                return 0;
    }
    return call->left < call->begun;
}

/* Into the next tile, if there is one and its slot is free; of those under way, at most so many with it. */
static int enter_next(Group *group, Call *call, int most)
{
    if ((call->begun && call->entered >= call->stop) || call->begun - call->left >= most || !slot_is_free(group))
        return 0;
    enter_tile(group, call, &call->tiles[call->begun % SLOTS]);
    begin_tile(call, steps_of(call, call->begun));
    call->begun++;
    return 1;
}

static int is_over(const Call *call) { return call->begun && call->left == call->begun && call->entered >= call->stop; }

/* Goes on with a call: enters tiles as long as there are slots, so that peers need not wait for them (one at a time, if
 * that is to stage its input), runs those under way, the oldest first, and leaves them in order. WAITING after so many
 * rounds in which nothing moved, all together. */
static int go_on(Group *group, Call *call, int rounds)
{
    Idle idle = {0};
    int put_off =
        call->only_read && (call->staged[INPUT] || !call->touched[INPUT] || call->early) && !call->touched[OUTPUT];
    int offers = call->direct == EITHER && !call->staged[INPUT];
    while (!is_over(call)) {
        int moved = 0, most = offers && !call->left ? 1 : SLOTS; /* who offers its input sees first whether all do */
        while (enter_next(group, call, most)) {
            moved = 1;
            if (call->staged[INPUT])
                break; /* that was work: what is under way comes first; else peers only wait for the signal */
        }
        for (int64_t number = call->left; number < call->begun; number++) {
            int32_t *at = steps_of(call, number);
            for (int block = 0; block < call->block_count; block++) {
                int result =
                    run_block(group, call, &call->tiles[number % SLOTS], &at[block], call->blocks[2 * block + 1]);
                if (result < 0) {
                    awake(group, &idle);
                    return OTHER_CALL;
                }
                moved |= result;
            }
        }
        while (call->left < call->begun && all_done(call, steps_of(call, call->left), put_off)) {
            Tile *tile = &call->tiles[call->left % SLOTS];
            if (!call->left && all_offered(group, call, tile))
                call->entered = call->stop;
            leave_tile(group, call, tile, steps_of(call, call->left));
            call->left++;
            moved = 1;
        }
        if (moved)
            went_on(group, &idle);
        else if (!group->spin_limit && all_await_others(group, call, put_off) && spin_for_others(&idle))
            continue;
        else if (rounds-- <= 0 || !idle_once(group, &idle)) {
            awake(group, &idle);
            return WAITING;
        }
    }
    awake(group, &idle);
    return DONE;
}

int sennit_run(Group *group, Call *call)
{
    return call->strips > 1 ? go_on_in_strips(group, call) : go_on(group, call, INT_MAX);
}

static int64_t bytes_of(const Call *call, int buffer) { return call->parts[buffer] * call->elements * call->itemsize; }

static int are_apart(const Call *call)
{
    const Piece input = {call->source, NULL, (size_t)bytes_of(call, INPUT)},
                output = {call->target, NULL, (size_t)bytes_of(call, OUTPUT)};
    return !overlaps(&input, &output);
}

/* Of a call that is EITHER: whether peers read the input where it is, and not in staging: it lies in huge pages, the
 * kernel reads it for others, and the output lies elsewhere. */
static int is_offered(const Group *group, const Call *call)
{
    int64_t bytes = bytes_of(call, INPUT);
    if (!call->touched[INPUT] || !call->apart)
        return 0;
    int huge = in_huge_pages(group->pagemap, call->source, bytes);
    return (huge < 0 ? group->huge : huge) && is_readable(group, call->source, bytes);
}

/* Whether peers read the input where it is, since it lies in the segment: the output lies elsewhere, or over it so that
 * nothing is overwritten before it was read. */
static int is_shared(const Group *group, const Call *call)
{
    int64_t offset = call->source - group->base, part = call->elements * call->itemsize;
    if (!call->shared || offset < 0 || offset + bytes_of(call, INPUT) > group->bytes)
        return 0;
    return are_apart(call) || (call->over != NOWHERE && call->target - call->source == call->over * part);
}

/* Where this rank runs, for those who take turns with it. */
static void say_core(Group *group)
{
    int core = sched_getcpu();
    if (core == group->core)
        return; /* the line stays with those who look at it */
    group->core = core;
    atomic_store_explicit(&group->doorbells[group->rank].core, core, memory_order_relaxed);
}

/* Begins a call: of `staged`, bit 0 stands for the input, bit 1 for the output. A closed group is none. UNREADABLE:
 * nothing was begun; the input is to be copied before. */
static int begin(Group *group, Call *call, char *source, char *target, int32_t staged)
{
    if (!group || !*group->owned || *group->broken)
        return UNUSABLE;
    call->source = source;
    call->target = target;
    call->apart = call->direct == EITHER && are_apart(call);
    call->staged[INPUT] = (staged & 1) && !is_shared(group, call) && !is_offered(group, call);
    call->staged[OUTPUT] = staged >> 1;
    if (call->direct == DIRECT && call->touched[INPUT] && !is_readable(group, source, bytes_of(call, INPUT)))
        return UNREADABLE;
    call->entered = call->first;
    call->begun = call->left = 0;
    CallNote *note = &group->notes[++group->calls % NOTES];
    note->number = group->calls;
    note->call = call->call;
    group->history = (group->history ^ call->call) * HISTORY;
    if (!group->spin_limit)
        say_core(group);
    memcpy(note->words, call->words, sizeof note->words);
    if (call->strips > 1) /* before it says that it has begun this call */
        atomic_store_explicit(begun_at(group, group->rank), nanoseconds(), memory_order_relaxed);
    atomic_store_explicit(group->calls_begun, group->calls, memory_order_release);
    begin_strips(group, call);
    return DONE;
}

int sennit_start(Group *group, Call *call, char *source, char *target, int32_t staged)
{
    int status = begin(group, call, source, target, staged);
    return status ? status : sennit_run(group, call);
}

/* For who may not wait for long: WAITING where `sennit_start` would wait for more than some microseconds, or at all
 * where others want this core. */
int sennit_start_briefly(Group *group, Call *call, char *source, char *target, int32_t staged)
{
    int spin = group ? atomic_load_explicit(&group->spin, memory_order_relaxed) : 0;
    int status = begin(group, call, source, target, staged);
    if (!status && call->strips > 1)
        return WAITING;
    return status ? status : go_on(group, call, spin < LEAST_SPIN ? spin : LEAST_SPIN);
}
