/* What the memory of this machine allows p processes to do at once, for `memory_ceiling.py`: each rank is pinned to the
 * first core of its share, c/p of them.
 *
 *     memory_ceiling RANKS        prints lines of: what, bytes, microseconds of one rank (the median of rounds, of the slowest rank)
 *
 * | what | a rank |
 * |---|---|
 * | meet | waits for all others: what any collective takes at least |
 * | copy | copies its own array, cached: reads it and writes another |
 * | copy_past | the same past the cache |
 * | stage | copies its own array into a tile of shared memory, again and again: tiles that another rank has just read |
 * | fetch | copies a tile that another rank has just written |
 * | add_up | adds up its slice of the tiles that all ranks have just written |
 * | pull | copies an array of another process by process_vm_readv |
 * | all_reduce | stages, adds up its slice, fetches the slices of others: in tiles of 256 KiB, three phases of successive tiles in turn. No interpreter, no
 *                checks, no sleeping, in place: what a program written by hand for this one case takes |
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

enum { ROUNDS = 9, SLOTS = 4, TILE = 256 << 10, ARRAY = 16 << 20 };

typedef struct {
    Word come[MOST], entered[MOST], added[MOST], left[MOST];
    double microseconds[MOST];
    pid_t process[MOST];
    char *array[MOST];
} Shared;

static Shared *shared;
static char *staging; /* by rank, SLOTS tiles with their sums */
static char *own, *other;

static void meet(void) { meet_at(shared->come); }

static char *tile_of(int of, uint64_t number) { return staging + (size_t)(of * SLOTS + number % SLOTS) * (2 * TILE); }
static char *sum_of(int of, uint64_t number) { return tile_of(of, number) + TILE; }

static void copy_past(char *to, const char *from, size_t bytes)
{
#if defined(__x86_64__)
    for (size_t i = 0; i < bytes; i += 16)
        _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(from + i)));
    _mm_sfence();
#else
    memcpy(to, from, bytes);
#endif
}

static void add_up(char *to, uint64_t number, size_t skip, size_t bytes)
{
    typedef float Line __attribute__((vector_size(64)));
    const char *from[MOST];
    for (int peer = 0; peer < ranks; peer++)
        from[peer] = tile_of(peer, number) + skip;
    for (size_t i = 0; i < bytes; i += sizeof(Line)) {
        Line total = *(const Line *)(from[0] + i);
        for (int peer = 1; peer < ranks; peer++)
            total += *(const Line *)(from[peer] + i);
        *(Line *)(to + i) = total;
    }
}

/* Sizes are multiples of a line for each rank. Tiles of all calls are counted through. */
static void all_reduce(char *array, size_t bytes)
{
    static uint64_t before;
    uint64_t tiles = (bytes + TILE - 1) / TILE;
    for (uint64_t turn = 0; turn < tiles + 2; turn++) {
        for (int phase = 0; phase < 3; phase++) {
            uint64_t tile = turn - phase, number = before + tile;
            if (turn < (uint64_t)phase || tile >= tiles)
                continue;
            size_t first = tile * TILE, size = bytes - first < TILE ? bytes - first : TILE, part = size / ranks;
            if (phase == 0) {
                if (number >= SLOTS)
                    await_all(shared->left, number - SLOTS + 1);
                memcpy(tile_of(rank, number), array + first, size);
                say(shared->entered, number + 1);
            } else if (phase == 1) {
                await_all(shared->entered, number + 1);
                add_up(sum_of(rank, number), number, rank * part, part);
                say(shared->added, number + 1);
            } else {
                for (int k = 0; k < ranks; k++) {
                    int peer = (rank + k) % ranks;
                    await(shared->added, peer, number + 1);
                    memcpy(array + first + peer * part, sum_of(peer, number), part);
                }
                say(shared->left, number + 1);
            }
        }
    }
    before += tiles;
}

static int ascending(const void *one, const void *two)
{
    return *(double *)one < *(double *)two ? -1 : *(double *)one > *(double *)two;
}

static void report(const char *what, size_t bytes, int calls, double *rounds)
{
    qsort(rounds, ROUNDS, sizeof *rounds, ascending);
    shared->microseconds[rank] = rounds[ROUNDS / 2] / calls;
    meet();
    double slowest = 0;
    for (int peer = 0; peer < ranks; peer++)
        slowest = shared->microseconds[peer] > slowest ? shared->microseconds[peer] : slowest;
    if (rank == 0)
        printf("%s %zu %.2f\n", what, bytes, slowest), fflush(stdout);
    meet();
}

#define MEASURE(WHAT, BYTES, CALLS, BEFORE, ...)       \
    do {                                               \
        double rounds[ROUNDS];                         \
        for (int round = 0; round < ROUNDS; round++) { \
            BEFORE;                                    \
            meet();                                    \
            double begin = now();                      \
            for (int call = 0; call < (CALLS); call++) \
                __VA_ARGS__;                           \
            rounds[round] = now() - begin;             \
            meet();                                    \
        }                                              \
        report(WHAT, BYTES, CALLS, rounds);            \
    } while (0)

static void pull(int peer)
{
    struct iovec here = {other, ARRAY}, there = {shared->array[peer], ARRAY};
    if (process_vm_readv(shared->process[peer], &here, 1, &there, 1, 0) != ARRAY)
        printf("# process_vm_readv is not allowed\n");
}

static void run(void)
{
    take_core(rank, ranks);
    own = array_of(4 * ARRAY, 0), other = array_of(ARRAY, 0);
    shared->array[rank] = own, shared->process[rank] = getpid();
    memset(tile_of(rank, 0), 0, SLOTS * 2 * TILE);
    int next = (rank + 1) % ranks;
    size_t part = TILE / ranks;
    MEASURE("meet", 0, 50, , meet());
    MEASURE("copy", ARRAY, 1, , memcpy(other, own, ARRAY));
    MEASURE("copy_past", ARRAY, 1, , copy_past(other, own, ARRAY));
    MEASURE("stage", TILE, 1, (memset(tile_of(rank, 0), 1, TILE), meet(), memcpy(other, tile_of(next, 0), TILE)),
            memcpy(tile_of(rank, 0), own, TILE));
    MEASURE("fetch", TILE, 1, memset(tile_of(rank, 0), 1, TILE), memcpy(other, tile_of(next, 0), TILE));
    MEASURE("add_up", TILE, 1, memset(tile_of(rank, 0), 0, TILE), add_up(other, 0, rank * part, part));
    MEASURE("pull", ARRAY, 1, , pull(next));
    size_t sizes[] = {64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20};
    for (int k = 0; k < 5; k++) {
        int calls = (4 << 20) / sizes[k] < 1 ? 1 : (4 << 20) / sizes[k];
        MEASURE("all_reduce", sizes[k], calls, , all_reduce(own, sizes[k]));
    }
}

int main(int count, char **words)
{
    ranks = count > 1 ? atoi(words[1]) : 8;
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    staging = mmap(0, (size_t)ranks * SLOTS * 2 * TILE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t children[MOST];
    for (rank = 0; rank < ranks; rank++)
        if ((children[rank] = fork()) == 0) {
            run();
            _exit(0);
        }
    for (int k = 0; k < ranks; k++)
        waitpid(children[k], 0, 0);
    return 0;
}
