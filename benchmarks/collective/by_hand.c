/* Collectives written by hand for one machine, one size and one way each: what a program can reach here that has no interpreter, no checks and no sleep. For `by_hand.py`.
 *
 *     by_hand RANKS [0|1|-1 [COLLECTIVE|all [SOURCE TARGET]]]      1: more kinds of staging, -1: none; SOURCE, TARGET: bytes from a page's beginning to that of an array, like numpy's unless they are given; prints lines of: collective, bytes, way, microseconds of a call (the median of rounds, of the slowest rank)
 *
 * | way | is |
 * |---|---|
 * | staged T W | through memory that all map: a rank copies tiles of T KiB there, says so, and others copy (or add up) from there, while the next tile is staged. A rank's staging goes round in W KiB |
 * | ... past | the same, outputs written past the cache |
 * | mixed S | of a broadcast: of 8 tiles the root stages S, the others pull the rest into their own staging, in turns |
 * | pulled | by process_vm_readv out of the arrays of the other process, each rank begun at another place |
 * | pulled_small, pulled_huge | the same between arrays in pages of 4 KiB, and in huge ones where the system gives them. In all other ways arrays have the pages that numpy's have: huge ones from 4 MiB on |
 * | bounced | pulled into a buffer of 128 KiB that stays in the cache, and from there into the output |
 * | open | out of arrays that all ranks map: what no program can have whose users bring their own arrays. The ideal |
 *
 * Up to four tiles are under way (`SLOTS`). A tile's place in staging is used again only when all ranks have left it: a rank that enters tile k has seen everyone leave tile k - SLOTS, and a ring of staging
 * holds at least as many tiles. Sums are of f32, in the order of ranks.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "own_core.h"

enum { ROUNDS = 7, SLOTS = 4, LARGEST = 16 << 20, AREA = 32 << 20 };
typedef float Line __attribute__((vector_size(64), aligned(4), may_alias));
typedef struct {
    Word come[MOST], entered[MOST], added[MOST], left[MOST];
    double microseconds[MOST];
    pid_t process[MOST];
    char *array[MOST]; /* `own` of each */
} Shared;

static Shared *shared;
static char *staging, *open_arrays; /* by rank */
static char *own, *other;           /* private: source and target, of the size that is measured */
static char *in_huge[2], *in_small[2];
static size_t tile_bytes, width; /* of the way that is measured */
static int past, share, bounces, source_offset, target_offset;
static char *bounce;
static uint64_t tiles_before; /* of all calls: the same on all ranks */
static size_t ring_at;

static void meet(void) { meet_at(shared->come); }

/* ---- copies ----------------------------------------------------------------------------------------------------------- */

typedef struct { char *to; const char *from; } Stream;

#if defined(__AVX512F__)
#define PUT_PAST(TO, FROM) _mm512_stream_si512((void *)(TO), _mm512_loadu_si512((const void *)(FROM)))
#elif defined(__x86_64__)
#define PUT_PAST(TO, FROM)             \
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

/* Several of one length at once, two lines of each in turn, which are whole lines of the targets: lines of several cores are on their way together. Targets begin equally far from the beginning of a line. */
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
        char *between = bounce + (uintptr_t)(from + i) % 4096; /* as far from the beginning of a page, which the kernel likes */
        bounces = 0, pull(peer, between, from + i, some), bounces = 1;
        copy(to + i, between, some);
    }
    if (bounces)
        return;
    struct iovec here = {to, bytes}, there = {from, bytes};
    if (process_vm_readv(shared->process[peer], &here, 1, &there, 1, 0) != (ssize_t)bytes)
        printf("# process_vm_readv is not allowed\n"), _exit(1);
}

/* ---- tiles: a place in the ring of each, the same on all ranks ---------------------------------------------------------- */

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

typedef struct { char *source, *target; size_t part; } Arrays;

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

/* ---- ways without staging: all meet before, and after --------------------------------------------------------------------- */

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


static char *open_array(int of) { return open_arrays + (size_t)of * LARGEST; }

static void opened(int kind, size_t bytes)
{
    size_t part = bytes / ranks;
    Stream streams[MOST];
    char *from[MOST];
    meet();
    if (kind == SPREAD && rank)
        copy(own, open_array(0), bytes);
    if (kind == GATHER || kind == EXCHANGE) {
        for (int k = 0; k < ranks; k++) {
            int peer = (rank + k) % ranks;
            streams[k] = (Stream){other + peer * part, open_array(peer) + (kind == EXCHANGE ? rank * part : 0)};
        }
        copy_streams(streams, ranks, part);
    }
    if (kind == SUM || kind == SCATTER) {
        for (int peer = 0; peer < ranks; peer++)
            from[peer] = open_array(peer) + rank * part;
        add_up(kind == SUM ? from[rank] : other, from, part);
    }
    if (kind == SUM) {
        meet();
        for (int k = 1; k < ranks; k++) {
            int peer = (rank + k) % ranks;
            streams[k - 1] = (Stream){open_array(rank) + peer * part, open_array(peer) + peer * part};
        }
        copy_streams(streams, ranks - 1, part);
    }
    meet();
}

/* Staging for a tile of one rank. */
static size_t place_bytes(int kind)
{
    size_t tile = kind == SUM ? tile_bytes + tile_bytes / ranks : kind == EXCHANGE || kind == SCATTER ? tile_bytes * ranks : tile_bytes;
    return (tile + 63) / 64 * 64;
}

static void staged(int kind, size_t bytes)
{
    static void (*const phases[KINDS])(int, const Tile *, void *) = {gather_tile, exchange_tile, spread_tile, sum_tile, scatter_tile};
    int in_place = kind == SPREAD || kind == SUM;
    Arrays arrays = {own, in_place ? own : other, bytes / ranks};
    run_tiles(in_place ? bytes : bytes / ranks, kind == SUM ? 3 : 2, place_bytes(kind), phases[kind], &arrays);
}

/* ---- measuring -------------------------------------------------------------------------------------------------------- */

static int ascending(const void *one, const void *two) { return *(double *)one < *(double *)two ? -1 : *(double *)one > *(double *)two; }

static void measure(int kind, size_t bytes, const char *way, void (*call)(int, size_t))
{
    double rounds[ROUNDS];
    int calls = (16 << 20) / bytes > 100 ? 100 : (16 << 20) / bytes < 3 ? 3 : (16 << 20) / bytes;
    for (int round = 0; round < ROUNDS; round++) {
        call(kind, bytes);
        meet();
        double begin = now();
        for (int k = 0; k < calls; k++)
            call(kind, bytes);
        rounds[round] = (now() - begin) / calls;
        meet();
    }
    qsort(rounds, ROUNDS, sizeof *rounds, ascending);
    shared->microseconds[rank] = rounds[ROUNDS / 2];
    meet();
    double slowest = 0;
    for (int peer = 0; peer < ranks; peer++)
        slowest = shared->microseconds[peer] > slowest ? shared->microseconds[peer] : slowest;
    if (rank == 0)
        printf("%s %zu %s %.2f\n", names[kind], bytes, way, slowest), fflush(stdout);
    meet();
}

static void measure_staged(int kind, size_t bytes, size_t tile, size_t ring, int beyond, int from_root)
{
    char way[64];
    int divides = kind == EXCHANGE || kind == SCATTER;
    size_t whole = kind == SPREAD || kind == SUM ? bytes : bytes / ranks;
    tile_bytes = divides ? tile / ranks : tile;
    tile_bytes = tile_bytes > whole ? whole : tile_bytes;
    past = beyond, share = from_root, ring_at = 0;
    size_t least = SLOTS * place_bytes(kind);
    width = ring > least ? ring : least;
    int length = snprintf(way, sizeof way, "staged_%zu_%zu%s", tile >> 10, width >> 10, beyond ? "_past" : "");
    if (from_root < 8)
        snprintf(way + length, sizeof way - length, "_mixed_%d", from_root);
    measure(kind, bytes, way, staged);
    past = 0, share = 8;
}

static char *small_array_of(size_t bytes)
{
    char *found = aligned_alloc(4096, bytes);
    madvise(found, bytes, MADV_NOHUGEPAGE);
    memset(found, 0, bytes);
    return found;
}

static void take_arrays(int huge_source, int huge_target)
{
    meet();
    own = (huge_source ? in_huge[0] : in_small[0]) + source_offset, other = (huge_target ? in_huge[1] : in_small[1]) + target_offset;
    shared->array[rank] = own;
    meet();
}

static void run(int all, const char *only)
{
    take_core(rank, ranks);
    for (int k = 0; k < 2; k++)
        in_huge[k] = array_of(LARGEST + (2 << 20), 0), in_small[k] = small_array_of(LARGEST + 4096);
    bounce = array_of(2 << 20, 0), shared->process[rank] = getpid();
    memset(staging + (size_t)rank * AREA, 0, AREA), memset(open_array(rank), 0, LARGEST);
    share = 8;
    size_t sizes[] = {1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20};
    size_t rings[] = {0, 4 << 20, 8 << 20, 16 << 20, 32 << 20}, tiles[] = {64 << 10, 128 << 10, 256 << 10};
    for (int kind = 0; kind < KINDS; kind++)
        for (int k = 0; k < 6 && (!strcmp(only, "all") || !strcmp(only, names[kind])); k++) {
            size_t bytes = sizes[k], huge_from = 4 << 20;
            take_arrays((kind == GATHER ? bytes / ranks : bytes) >= huge_from, (kind == SCATTER ? bytes / ranks : bytes) >= huge_from);
            for (int ring = 0; ring < 5 && all >= 0; ring++)
                for (int tile = 0; tile < 3; tile++) {
                    if ((bytes < 512 << 10 && tile != 1) || (!all && ((ring != 0 && ring != 3) || tile == 0)))
                        continue;
                    for (int beyond = 0; beyond < (bytes >= 4 << 20 ? 2 : 1); beyond++)
                        measure_staged(kind, bytes, tiles[tile], rings[ring], beyond, 8);
                    if (kind == SPREAD && bytes >= 4 << 20)
                        for (int from_root = 1; from_root < 8; from_root += 2)
                            measure_staged(kind, bytes, tiles[tile], rings[ring], 1, from_root);
                }
            if (kind <= SPREAD && bytes >= 64 << 10)
                measure(kind, bytes, "pulled", pulled);
            for (past = 0; past < 2 && kind <= SPREAD && bytes >= 512 << 10; past++)
                bounces = 1, measure(kind, bytes, past ? "bounced_past" : "bounced", pulled), bounces = 0;
            past = 0;
            if (kind <= SPREAD && bytes >= 512 << 10)
                for (int huge = 0; huge < 2; huge++)
                    take_arrays(huge, huge), measure(kind, bytes, huge ? "pulled_huge" : "pulled_small", pulled);
            take_arrays((kind == GATHER ? bytes / ranks : bytes) >= huge_from, (kind == SCATTER ? bytes / ranks : bytes) >= huge_from);
            for (past = 0; past < (bytes >= 4 << 20 && kind != SCATTER ? 2 : 1); past++)
                measure(kind, bytes, past ? "open_past" : "open", opened);
            past = 0;
        }
}

int main(int count, char **words)
{
    ranks = count > 1 ? atoi(words[1]) : 8;
    int more = count > 2 ? atoi(words[2]) : 0;
    const char *only = count > 3 ? words[3] : "all";
    source_offset = count > 4 ? atoi(words[4]) : 0x10, target_offset = count > 5 ? atoi(words[5]) : 0x910;
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    staging = mmap(0, (size_t)ranks * AREA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    open_arrays = mmap(0, (size_t)ranks * LARGEST, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t children[MOST];
    for (rank = 0; rank < ranks; rank++)
        if ((children[rank] = fork()) == 0) {
            run(more, only);
            _exit(0);
        }
    for (int k = 0; k < ranks; k++)
        waitpid(children[k], 0, 0);
    return 0;
}
