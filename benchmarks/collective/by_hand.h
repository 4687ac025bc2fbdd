/* Collectives written by hand for one machine, one size and one way each: what a program can reach here that has no
 * interpreter, no checks and no sleep.
 *
 * `by_hand.c` runs them alone, `hand_peer.c` beside other libraries.
 *
 * | way | is |
 * |---|---|
 * | staged T W | through memory that all map: a rank copies tiles of T KiB there, says so, and others copy (or add up) from there, while the next tile is staged. A rank's staging goes round in W KiB |
 * | ... past | the same, outputs written past the cache |
 * | mixed S | of a broadcast: of 8 tiles the root stages S, the others pull the rest into their own staging, in turns |
 * | pulled | by process_vm_readv out of the arrays of the other process, each rank begun at another place |
 * | bounced | pulled into a buffer of 128 KiB that stays in the cache, and from there into the output |
 * | summed B | of a reduce_scatter: the same, B KiB of each rank, which are added up from there |
 * | summed B T | of an all_reduce: the same, of tiles of T KiB, whose sums are staged |
 *
 * Up to four tiles are under way (`SLOTS`). A tile's place in staging is used again only when all ranks have left it: a
 * rank that enters tile k has seen everyone leave tile k - SLOTS, and a ring of staging holds at least as many tiles.
 * Sums are of f32, in the order of ranks.
 */

#ifndef BY_HAND_H
#define BY_HAND_H

#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "own_core.h"

enum { SLOTS = 4, AREA = 32 << 20 };
typedef float Line __attribute__((vector_size(64), aligned(4), may_alias));
typedef struct {
    Word come[MOST], entered[MOST], added[MOST], left[MOST];
    double microseconds[MOST];
    pid_t process[MOST];
    char *array[MOST]; /* `own` of each */
} Shared;

static Shared *shared;
static char *staging;            /* by rank */
static char *own, *other;        /* private: source and target, of the size that is measured */
static size_t tile_bytes, width; /* of the way that is measured */
static int past, share, bounces;
static size_t piece_bytes; /* of one rank, that is pulled at a time and added up */
static char *bounce;
static uint64_t tiles_before; /* of all calls: the same on all ranks */
static size_t ring_at;

static void meet(void) { meet_at(shared->come); }

/* ---- copies ------------------------------------------------------------------------------------------------------ */

typedef struct {
    char *to;
    const char *from;
} Stream;

#if defined(__AVX512F__)
#define PUT_PAST(TO, FROM) _mm512_stream_si512((void *)(TO), _mm512_loadu_si512((const void *)(FROM)))
#elif defined(__x86_64__)
#define PUT_PAST(TO, FROM)                    \
    for (int part = 0; part < 64; part += 16) \
    _mm_stream_si128((__m128i *)((TO) + part), _mm_loadu_si128((const __m128i *)((FROM) + part)))
#else
#define PUT_PAST(TO, FROM) memcpy(TO, FROM, 64)
#endif

static void end_past(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static void copy(char *to, const char *from, size_t bytes)
{
    size_t head = -(uintptr_t)to % 64;
    if (!past || bytes < 128) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    for (; head + 64 <= bytes; head += 64)
        PUT_PAST(to + head, from + head);
    memcpy(to + head, from + head, bytes - head);
    end_past();
}

/* Several of one length at once, two lines of each in turn, which are whole lines of the targets: lines of several
 * cores are on their way together. Targets begin equally far from the beginning of a line. */
static void copy_streams(const Stream *streams, int count, size_t bytes)
{
    size_t head = -(uintptr_t)streams[0].to % 64, i = head;
    if (bytes < 16 << 10 || count == 1) {
        for (int k = 0; k < count; k++)
            copy(streams[k].to, streams[k].from, bytes);
        return;
    }
    for (; i + 128 <= bytes; i += 128)
        for (int k = 0; k < count; k++)
            for (size_t j = i; j < i + 128; j += 64)
                if (past) {
                    PUT_PAST(streams[k].to + j, streams[k].from + j);
                } else
                    *(Line *)(streams[k].to + j) = *(const Line *)(streams[k].from + j);
    for (int k = 0; k < count; k++) {
        memcpy(streams[k].to, streams[k].from, head);
        memcpy(streams[k].to + i, streams[k].from + i, bytes - i);
    }
    end_past();
}

static void add_up(char *to, char *const *from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += sizeof(Line)) {
        Line total = *(const Line *)(from[0] + i);
        for (int peer = 1; peer < ranks; peer++)
            total += *(const Line *)(from[peer] + i);
        *(Line *)(to + i) = total;
    }
}

static void pull(int peer, char *to, char *from, size_t bytes)
{
    enum { SOME = 128 << 10 };
    for (size_t i = 0; bounces && i < bytes; i += SOME) {
        size_t some = bytes - i < SOME ? bytes - i : SOME;
        /* as far from the beginning of a page, which the kernel likes */
        char *between = bounce + (uintptr_t)(from + i) % 4096;
        bounces = 0, pull(peer, between, from + i, some), bounces = 1;
        copy(to + i, between, some);
    }
    if (bounces)
        return;
    struct iovec here = {to, bytes}, there = {from, bytes};
    if (process_vm_readv(shared->process[peer], &here, 1, &there, 1, 0) != (ssize_t)bytes)
        printf("# process_vm_readv is not allowed\n"), _exit(1);
}

/* ---- tiles: a place in the ring of each, the same on all ranks --------------------------------------------------- */

typedef struct {
    uint64_t number;
    size_t first, size, place;
} Tile;

static size_t place_of(size_t bytes)
{
    if (ring_at + bytes > width)
        ring_at = 0;
    size_t found = ring_at;
    ring_at += bytes;
    return found;
}
static char *at(int of, const Tile *tile) { return staging + (size_t)of * AREA + tile->place; }

/* Phase after phase of successive tiles, in turns; `place`: bytes of staging for a tile. */
static void run_tiles(size_t bytes, int phases, size_t place, void (*phase)(int, const Tile *, void *), void *context)
{
    Tile tiles[SLOTS];
    uint64_t count = (bytes + tile_bytes - 1) / tile_bytes;
    for (uint64_t turn = 0; turn < count + phases - 1; turn++)
        for (int which = 0; which < phases; which++) {
            uint64_t index = turn - which;
            if (turn < (uint64_t)which || index >= count)
                continue;
            Tile *tile = &tiles[index % SLOTS];
            if (which == 0) {
                size_t first = index * tile_bytes, size = bytes - first < tile_bytes ? bytes - first : tile_bytes;
                *tile = (Tile){tiles_before + index, first, size, place_of(place)};
                if (tile->number >= SLOTS)
                    await_all(shared->left, tile->number - SLOTS + 1);
            }
            phase(which, tile, context);
        }
    tiles_before += count;
}

typedef struct {
    char *source, *target;
    size_t part;
} Arrays;

static void gather_tile(int which, const Tile *tile, void *given)
{
    Arrays *a = given;
    if (which == 0) {
        memcpy(at(rank, tile), a->source + tile->first, tile->size);
        say(shared->entered, tile->number + 1);
        return;
    }
    Stream streams[MOST];
    copy(a->target + rank * a->part + tile->first, a->source + tile->first, tile->size);
    for (int k = 1; k < ranks; k++) {
        int peer = (rank + k) % ranks;
        await(shared->entered, peer, tile->number + 1);
        streams[k - 1] = (Stream){a->target + peer * a->part + tile->first, at(peer, tile)};
    }
    copy_streams(streams, ranks - 1, tile->size);
    say(shared->left, tile->number + 1);
}

static void exchange_tile(int which, const Tile *tile, void *given)
{
    Arrays *a = given;
    Stream streams[MOST];
    for (int k = 1; k < ranks; k++) {
        int peer = (rank + k) % ranks;
        if (which == 0)
            memcpy(at(rank, tile) + peer * tile->size, a->source + peer * a->part + tile->first, tile->size);
        else {
            await(shared->entered, peer, tile->number + 1);
            streams[k - 1] = (Stream){a->target + peer * a->part + tile->first, at(peer, tile) + rank * tile->size};
        }
    }
    if (which) {
        copy(a->target + rank * a->part + tile->first, a->source + rank * a->part + tile->first, tile->size);
        copy_streams(streams, ranks - 1, tile->size);
    }
    say(which ? shared->left : shared->entered, tile->number + 1);
}

static void spread_tile(int which, const Tile *tile, void *given)
{
    Arrays *a = given;
    int turn = tile->number % 8, writer = turn < share ? 0 : 1 + tile->number / 8 * (8 - share) % (ranks - 1);
    writer = turn < share ? 0 : 1 + (writer - 1 + turn - share) % (ranks - 1);
    if (which == 0) {
        if (rank == writer && rank == 0)
            memcpy(at(0, tile), a->source + tile->first, tile->size);
        else if (rank == writer)
            pull(0, at(rank, tile), shared->array[0] + tile->first, tile->size);
        say(shared->entered, tile->number + 1);
        return;
    }
    if (rank) {
        await(shared->entered, writer, tile->number + 1);
        copy(a->target + tile->first, at(writer, tile), tile->size);
    }
    say(shared->left, tile->number + 1);
}

/* Staging of a tile: the tile, and after it the sums of this rank's part. */
static void sum_tile(int which, const Tile *tile, void *given)
{
    Arrays *a = given;
    size_t part = tile->size / ranks;
    if (which == 0) {
        memcpy(at(rank, tile), a->source + tile->first, tile->size);
        say(shared->entered, tile->number + 1);
    } else if (which == 1) {
        char *from[MOST];
        await_all(shared->entered, tile->number + 1);
        for (int peer = 0; peer < ranks; peer++)
            from[peer] = at(peer, tile) + rank * part;
        add_up(at(rank, tile) + tile_bytes, from, part);
        say(shared->added, tile->number + 1);
    } else {
        Stream streams[MOST];
        for (int k = 0; k < ranks; k++) {
            int peer = (rank + k) % ranks;
            await(shared->added, peer, tile->number + 1);
            streams[k] = (Stream){a->target + tile->first + peer * part, at(peer, tile) + tile_bytes};
        }
        copy_streams(streams, ranks, part);
        say(shared->left, tile->number + 1);
    }
}

/* A tile is of a part here: staging holds one for each rank. */
static void scatter_tile(int which, const Tile *tile, void *given)
{
    Arrays *a = given;
    char *from[MOST];
    if (which == 0) {
        for (int k = 1; k < ranks; k++) {
            int peer = (rank + k) % ranks;
            memcpy(at(rank, tile) + peer * tile->size, a->source + peer * a->part + tile->first, tile->size);
        }
        say(shared->entered, tile->number + 1);
        return;
    }
    await_all(shared->entered, tile->number + 1);
    for (int peer = 0; peer < ranks; peer++)
        from[peer] = peer == rank ? a->source + rank * a->part + tile->first : at(peer, tile) + rank * tile->size;
    add_up(a->target + tile->first, from, tile->size);
    say(shared->left, tile->number + 1);
}

/* ---- ways without staging: all meet before, and after ------------------------------------------------------------ */

enum { GATHER, EXCHANGE, SPREAD, SUM, SCATTER, KINDS };
static const char *const names[KINDS] = {"all_gather", "all_to_all", "broadcast", "all_reduce", "reduce_scatter"};

static void pulled(int kind, size_t bytes)
{
    size_t part = bytes / ranks;
    meet();
    if (kind == SPREAD && rank)
        for (int k = 0; k < ranks; k++) /* each begins at another place */
            pull(0, own + (rank + k) % ranks * part, shared->array[0] + (rank + k) % ranks * part, part);
    for (int k = 1; k < ranks && kind != SPREAD; k++) {
        int peer = (rank + k) % ranks;
        pull(peer, other + peer * part, shared->array[peer] + (kind == EXCHANGE ? rank * part : 0), part);
    }
    if (kind != SPREAD)
        memcpy(other + rank * part, own + (kind == EXCHANGE ? rank * part : 0), part);
    meet();
}

/* Sums of what lies `first` bytes from the beginning of all arrays, out of the other processes. */
static void pull_sums(char *to, size_t first, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += piece_bytes) {
        size_t some = bytes - i < piece_bytes ? bytes - i : piece_bytes;
        char *from[MOST];
        for (int k = 1; k < ranks; k++) {
            int peer = (rank + k) % ranks;
            char *there = shared->array[peer] + first + i;
            from[peer] = bounce + (k - 1) * (piece_bytes + 4096) + (uintptr_t)there % 4096;
            pull(peer, from[peer], there, some);
        }
        from[rank] = own + first + i;
        add_up(to + i, from, some);
    }
}

static void summed(int kind, size_t bytes)
{
    (void)kind;
    meet();
    pull_sums(other, rank * (bytes / ranks), bytes / ranks);
    meet();
}

/* Who writes a peer's part of the sums to its own array knows that this peer has read that part of it. */
static void summed_tile(int which, const Tile *tile, void *given)
{
    Arrays *a = given;
    size_t part = tile->size / ranks;
    if (which == 0) {
        pull_sums(at(rank, tile), tile->first + rank * part, part);
        say(shared->added, tile->number + 1);
        return;
    }
    Stream streams[MOST];
    for (int k = 0; k < ranks; k++) {
        int peer = (rank + k) % ranks;
        await(shared->added, peer, tile->number + 1);
        streams[k] = (Stream){a->target + tile->first + peer * part, at(peer, tile)};
    }
    copy_streams(streams, ranks, part);
    say(shared->left, tile->number + 1);
}

static void summed_in_tiles(int kind, size_t bytes)
{
    (void)kind;
    Arrays arrays = {own, own, bytes / ranks};
    meet();
    run_tiles(bytes, 2, (tile_bytes / ranks + 63) / 64 * 64, summed_tile, &arrays);
}

/* Staging for a tile of one rank. */
static size_t place_bytes(int kind)
{
    size_t tile = kind == SUM                           ? tile_bytes + tile_bytes / ranks
                  : kind == EXCHANGE || kind == SCATTER ? tile_bytes * ranks
                                                        : tile_bytes;
    return (tile + 63) / 64 * 64;
}

static void staged(int kind, size_t bytes)
{
    static void (*const phases[KINDS])(int, const Tile *, void *) = {gather_tile, exchange_tile, spread_tile, sum_tile,
                                                                     scatter_tile};
    int in_place = kind == SPREAD || kind == SUM;
    Arrays arrays = {own, in_place ? own : other, bytes / ranks};
    run_tiles(in_place ? bytes : bytes / ranks, kind == SUM ? 3 : 2, place_bytes(kind), phases[kind], &arrays);
    if (kind == SPREAD && share < 8 && rank == 0)
        await_all(shared->entered, tiles_before); /* they have pulled what they pull out of this rank's array */
}

/* ---- ways -------------------------------------------------------------------------------------------------------- */

/* KiB of a tile and of a ring, where 0 is as many as there must be; no tile: pulled. */
typedef struct {
    int tile, ring, past, share, bounces, piece;
} Way;
typedef void Collective(int kind, size_t bytes);

/* From now on calls of this kind and size go this way: what to call, and the name of the way. */
static Collective *take_way(int kind, size_t bytes, Way way, char *name, size_t length)
{
    meet(); /* nobody is in staging any more */
    past = way.past, bounces = way.bounces;
    if (way.piece) {
        piece_bytes = (size_t)way.piece << 10;
        tile_bytes = (size_t)way.tile << 10;
        tile_bytes = tile_bytes > bytes ? bytes : tile_bytes;
        width = (size_t)way.ring << 10, ring_at = 0;
        width = width > SLOTS * tile_bytes / ranks ? width : SLOTS * tile_bytes / ranks;
        int written = snprintf(name, length, "summed_%d", way.piece);
        if (kind == SUM)
            snprintf(name + written, length - written, "_%d_%zu%s", way.tile, width >> 10, past ? "_past" : "");
        return kind == SUM ? summed_in_tiles : summed;
    }
    if (!way.tile) {
        snprintf(name, length, "%s%s", bounces ? "bounced" : "pulled", past ? "_past" : "");
        return pulled;
    }
    int divides = kind == EXCHANGE || kind == SCATTER;
    size_t tile = (size_t)way.tile << 10, ring = (size_t)way.ring << 10,
           whole = kind == SPREAD || kind == SUM ? bytes : bytes / ranks;
    tile_bytes = divides ? tile / ranks : tile;
    tile_bytes = tile_bytes > whole ? whole : tile_bytes;
    share = way.share, ring_at = 0;
    size_t least = SLOTS * place_bytes(kind);
    width = ring > least ? ring : least;
    int written = snprintf(name, length, "staged_%d_%zu%s", way.tile, width >> 10, past ? "_past" : "");
    if (share < 8)
        snprintf(name + written, length - written, "_mixed_%d", share);
    return staged;
}

/* What a rank needs, besides arrays. */
static void enter(void)
{
    crowded = ranks > sysconf(_SC_NPROCESSORS_ONLN);
    bounce = array_of(2 << 20, 0), shared->process[rank] = getpid();
    memset(staging + (size_t)rank * AREA, 0, AREA);
}

/* The arrays of the calls from now on, of all ranks. */
static void bring(char *source, char *target)
{
    meet();
    own = source, other = target, shared->array[rank] = source;
    meet();
}

/* So many calls: microseconds of one. */
static double timed(Collective *call, int kind, size_t bytes, int calls)
{
    call(kind, bytes);
    meet();
    double begin = now();
    for (int k = 0; k < calls; k++)
        call(kind, bytes);
    return (now() - begin) / calls;
}

static int ascending(const void *one, const void *two)
{
    return *(double *)one < *(double *)two ? -1 : *(double *)one > *(double *)two;
}

/* The median of rounds, of the rank where it is longest: the same on all. */
static double slowest_of(double *rounds, int count)
{
    qsort(rounds, count, sizeof *rounds, ascending);
    meet();
    shared->microseconds[rank] = rounds[count / 2];
    meet();
    double slowest = 0;
    for (int peer = 0; peer < ranks; peer++)
        slowest = shared->microseconds[peer] > slowest ? shared->microseconds[peer] : slowest;
    return slowest;
}

#endif
