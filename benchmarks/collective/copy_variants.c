/* Ways to copy between processes of one host, with all ranks at once: which of them should shm_core.c use?
 *
 *     cc -O3 -march=native -o /tmp/copy_variants benchmarks/collective/copy_variants.c && /tmp/copy_variants 8
 *
 * Each rank has a staging area that all map. A round: every rank *stages* what the others read (memcpy, or a variant),
 * all meet, every rank *fetches* what it gets into an array of its own, all meet. Microseconds of a phase, median of
 * the rounds, of the slowest rank. Patterns are those of collectives of n bytes:
 *
 *     gather      stage n/p; fetch n/p of each of the others
 *     exchange    stage n (p-1)/p; fetch n/p of each of the others, each time another place
 *     spread      rank 0 stages n; all others fetch n
 *     spread pull nobody stages: each pulls its n/p of rank 0's array by process_vm_readv into its own staging, all meet, and then fetch as in a gather
 *
 * | fetch | is |
 * |---|---|
 * | memcpy | one source after another, begun with the next rank |
 * | ahead N | the same, by lines, with a prefetch N bytes ahead |
 * | at once N | all sources at once, N lines of each in turn; of a spread, 8 places of the one source |
 * | past | of `memcpy` and `at once`: stores past the cache |
 * | demoting, flushing, unkept, owning | the reader lets go of the lines that it has read (cldemote, clflushopt, prefetchnta), or takes them from their writer (prefetchw) |
 */
#define _GNU_SOURCE
#include <immintrin.h>
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

enum { ROUNDS = 11, AREA = 16 << 20, TILE = 384 << 10 };
typedef struct {
    Word come[MOST];
    double stage[MOST], fetch[MOST];
    pid_t process[MOST];
    char *array[MOST];
} Shared;
typedef struct {
    char *to;
    const char *from;
    size_t bytes;
} Piece;

static Shared *shared;
static char *staging, *own, *other;
static int few, has_whole_lines;

static void meet(void) { meet_at(shared->come); }

#define LOAD(AT) _mm512_loadu_si512((const void *)(AT))
#define PUT(AT, V) _mm512_storeu_si512((void *)(AT), V)
#define PUT_PAST(AT, V) _mm512_stream_si512((void *)(AT), V)

static void one_by_one(const Piece *p, int n)
{
    for (int k = 0; k < n; k++)
        memcpy(p[k].to, p[k].from, p[k].bytes);
}
static void one_by_one_past(const Piece *p, int n)
{
    for (int k = 0; k < n; k++)
        for (size_t i = 0; i < p[k].bytes; i += 64)
            PUT_PAST(p[k].to + i, LOAD(p[k].from + i));
    _mm_sfence();
}
static void lines(const Piece *p, int n)
{
    for (int k = 0; k < n; k++)
        for (size_t i = 0; i < p[k].bytes; i += 64)
            PUT(p[k].to + i, LOAD(p[k].from + i));
}
#define AHEAD(NAME, N, STORE)                                 \
    static void NAME(const Piece *p, int n)                   \
    {                                                         \
        for (int k = 0; k < n; k++)                           \
            for (size_t i = 0; i < p[k].bytes; i += 64) {     \
                _mm_prefetch(p[k].from + i + N, _MM_HINT_T0); \
                STORE(p[k].to + i, LOAD(p[k].from + i));      \
            }                                                 \
        _mm_sfence();                                         \
    }
AHEAD(ahead_512, 512, PUT)
AHEAD(ahead_1k, 1024, PUT)
AHEAD(ahead_2k, 2048, PUT)
AHEAD(ahead_4k, 4096, PUT)
AHEAD(ahead_1k_past, 1024, PUT_PAST)
AHEAD(ahead_4k_past, 4096, PUT_PAST)
#define AT_ONCE(NAME, N, STORE)                                                \
    static void NAME(const Piece *p, int n)                                    \
    {                                                                          \
        for (size_t i = 0; i < p[0].bytes; i += 64 * N)                        \
            for (int k = 0; k < n; k++)                                        \
                for (int j = 0; j < N; j++)                                    \
                    STORE(p[k].to + i + 64 * j, LOAD(p[k].from + i + 64 * j)); \
        _mm_sfence();                                                          \
    }
AT_ONCE(at_once_1, 1, PUT)
AT_ONCE(at_once_2, 2, PUT)
AT_ONCE(at_once_4, 4, PUT)
AT_ONCE(at_once_16, 16, PUT)
AT_ONCE(at_once_1_past, 1, PUT_PAST)
AT_ONCE(at_once_2_past, 2, PUT_PAST)
AT_ONCE(at_once_4_past, 4, PUT_PAST)
AT_ONCE(at_once_16_past, 16, PUT_PAST)

/* What a core has read stays in its cache, shared, and who writes there again must take it away. These let go of it at
 * once. */
static void demoting(const Piece *p, int n)
{
    for (int k = 0; k < n; k++) {
        memcpy(p[k].to, p[k].from, p[k].bytes);
        for (size_t i = 0; i < p[k].bytes; i += 64)
            __asm__ volatile(".byte 0x0f, 0x1c, 0x00" ::"a"(p[k].from + i) : "memory");
    }
}
static void flushing(const Piece *p, int n)
{
    for (int k = 0; k < n; k++) {
        memcpy(p[k].to, p[k].from, p[k].bytes);
        for (size_t i = 0; i < p[k].bytes; i += 64)
            _mm_clflushopt((void *)(p[k].from + i));
    }
    _mm_sfence();
}
static void unkept(const Piece *p, int n) /* fetched so that they are the first to go */
{
    for (int k = 0; k < n; k++)
        for (size_t i = 0; i < p[k].bytes; i += 64) {
            _mm_prefetch(p[k].from + i + 1024, _MM_HINT_NTA);
            PUT(p[k].to + i, LOAD(p[k].from + i));
        }
}
static void owning(const Piece *p, int n) /* taken away from the writer */
{
    for (int k = 0; k < n; k++)
        for (size_t i = 0; i < p[k].bytes; i += 64) {
            __builtin_prefetch(p[k].from + i + 1024, 1);
            PUT(p[k].to + i, LOAD(p[k].from + i));
        }
}

typedef void Way(const Piece *, int);
static const struct {
    const char *name;
    Way *way;
} fetches[] = {
    {"memcpy", one_by_one},
    {"lines", lines},
    {"ahead 512", ahead_512},
    {"ahead 1K", ahead_1k},
    {"ahead 2K", ahead_2k},
    {"ahead 4K", ahead_4k},
    {"at once 1", at_once_1},
    {"at once 2", at_once_2},
    {"at once 4", at_once_4},
    {"at once 16", at_once_16},
    {"past", one_by_one_past},
    {"ahead 1K past", ahead_1k_past},
    {"ahead 4K past", ahead_4k_past},
    {"at once 1 past", at_once_1_past},
    {"at once 2 past", at_once_2_past},
    {"at once 4 past", at_once_4_past},
    {"at once 16 past", at_once_16_past},
    {"demoting", demoting},
    {"flushing", flushing},
    {"unkept", unkept},
    {"owning", owning},
};
static void own_ahead(const Piece *p, int n) /* asks for the lines that are written */
{
    for (int k = 0; k < n; k++)
        for (size_t i = 0; i < p[k].bytes; i += 64) {
            __builtin_prefetch(p[k].to + i + 1024, 1);
            PUT(p[k].to + i, LOAD(p[k].from + i));
        }
}
/* and out of this core's cache at once (cldemote, a hint: nothing where it is not known) */
static void demoted(const Piece *p, int n)
{
    for (int k = 0; k < n; k++) {
        memcpy(p[k].to, p[k].from, p[k].bytes);
        for (size_t i = 0; i < p[k].bytes; i += 64) {
            const char *line = p[k].to + i;
            __asm__ volatile(".byte 0x0f, 0x1c, 0x00" ::"a"(line) : "memory");
        }
    }
}
static void as_string(const Piece *p, int n)
{
    for (int k = 0; k < n; k++) {
        char *to = p[k].to;
        const char *from = p[k].from;
        size_t left = p[k].bytes;
        __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(left)::"memory");
    }
}
static void whole_lines(const Piece *p, int n) /* movdir64b: a line at a time, past the cache */
{
    for (int k = 0; k < n; k++)
        for (size_t i = 0; i < p[k].bytes; i += 64) {
            char *to = p[k].to + i;
            const char *from = p[k].from + i;
            __asm__ volatile(".byte 0x66, 0x0f, 0x38, 0xf8, 0x02" ::"a"(to), "d"(from) : "memory");
        }
    _mm_sfence();
}
static const struct {
    const char *name;
    Way *way;
} stages[] = {
    {"memcpy", one_by_one}, {"owned ahead", own_ahead}, {"demoted", demoted},
    {"string", as_string},  {"past", one_by_one_past},  {"whole lines", whole_lines},
};

static char *area(int of) { return staging + (size_t)of * AREA; }
static int ascending(const void *a, const void *b)
{
    return *(double *)a < *(double *)b ? -1 : *(double *)a > *(double *)b;
}

enum { GATHER, EXCHANGE, SPREAD, SPREAD_PULL };
static const char *const patterns[] = {"gather", "exchange", "spread", "spread pull"};

/* One phase after another; what is larger than a tile goes tile by tile, as in the core, with all of them counted
 * together. */
static void measure(int pattern, size_t bytes, const char *name, Way *stage, const char *stage_name, Way *fetch)
{
    double in[ROUNDS], out[ROUNDS];
    size_t part = bytes / ranks, tile = pattern == SPREAD        ? TILE
                                        : pattern == EXCHANGE    ? (1 << 20) / ranks
                                        : pattern == SPREAD_PULL ? TILE / 4
                                                                 : TILE;
    size_t whole = pattern == SPREAD ? bytes : part;
    for (int round = 0; round < ROUNDS; round++) {
        in[round] = out[round] = 0;
        for (size_t done = 0, number = 0; done < whole; done += tile, number++) {
            size_t size = whole - done < tile ? whole - done : tile;
            char *mine = area(rank) + number % 4 * (1 << 20);
            Piece pieces[MOST];
            int count = 0;
            if (pattern == GATHER)
                pieces[count++] = (Piece){mine, own + done, size};
            if (pattern == SPREAD && rank == 0)
                pieces[count++] = (Piece){mine, own + done, size};
            if (pattern == EXCHANGE)
                for (int k = 1; k < ranks; k++)
                    pieces[count++] = (Piece){mine + k * size, own + k * part + done, size};
            meet();
            double begin = now();
            if (pattern == SPREAD_PULL) {
                struct iovec here = {mine, size}, there = {shared->array[0] + rank * part + done, size};
                if (process_vm_readv(shared->process[0], &here, 1, &there, 1, 0) < 0)
                    printf("# process_vm_readv is not allowed\n");
            } else if (count)
                stage(pieces, count);
            in[round] += now() - begin;
            count = 0;
            if (pattern == SPREAD && rank)
                for (int k = 0; k < 8; k++)
                    pieces[count++] = (Piece){other + done + k * (size / 8),
                                              area(0) + number % 4 * (1 << 20) + k * (size / 8), size / 8};
            if (pattern == GATHER || pattern == SPREAD_PULL)
                for (int k = 1; k < ranks; k++)
                    pieces[count++] = (Piece){other + (rank + k) % ranks * part + done,
                                              area((rank + k) % ranks) + number % 4 * (1 << 20), size};
            if (pattern == EXCHANGE)
                for (int k = 1; k < ranks; k++)
                    pieces[count++] = (Piece){other + (rank + k) % ranks * part + done,
                                              area((rank + k) % ranks) + number % 4 * (1 << 20) + k * size, size};
            meet();
            begin = now();
            if (count)
                fetch(pieces, count);
            out[round] += now() - begin;
        }
    }
    qsort(in, ROUNDS, sizeof *in, ascending), qsort(out, ROUNDS, sizeof *out, ascending);
    shared->stage[rank] = in[ROUNDS / 2], shared->fetch[rank] = out[ROUNDS / 2];
    meet();
    double slow_in = 0, slow_out = 0;
    for (int peer = 0; peer < ranks; peer++) {
        slow_in = shared->stage[peer] > slow_in ? shared->stage[peer] : slow_in;
        slow_out = shared->fetch[peer] > slow_out ? shared->fetch[peer] : slow_out;
    }
    if (rank == 0)
        printf("%-12s %6zu KiB  stage %-12s %9.1f  fetch %-16s %9.1f  sum %9.1f\n", patterns[pattern], bytes >> 10,
               stage_name, slow_in, name, slow_out, slow_in + slow_out),
            fflush(stdout);
    meet();
}

static void run(void)
{
    take_core(rank, ranks);
    own = array_of(AREA, 1), other = array_of(AREA, 1);
    shared->array[rank] = own, shared->process[rank] = getpid();
    memset(area(rank), 0, 4 << 20);
    size_t sizes[] = {64 << 10, 512 << 10, 4 << 20, 16 << 20};
    for (int pattern = GATHER; pattern <= SPREAD_PULL; pattern++)
        for (int k = 0; k < 4; k++) {
            if (pattern == SPREAD_PULL && k == 0)
                continue;
            for (size_t way = 0; way < sizeof fetches / sizeof *fetches; way++)
                if ((k >= 2 || way < 10 || way > 16) && (!few || way == 0 || way == 7 || way == 14 || way > 16))
                    measure(pattern, sizes[k], fetches[way].name, one_by_one, "memcpy", fetches[way].way);
            for (size_t way = few ? 3 : 1; way < 5 + has_whole_lines && pattern != SPREAD_PULL; way++)
                measure(pattern, sizes[k], "memcpy", stages[way].way, stages[way].name, one_by_one);
        }
}

int main(int count, char **words)
{
    ranks = count > 1 ? atoi(words[1]) : 8;
    few = count > 2; /* any other word: the main ones only */
    has_whole_lines = system("grep -qw movdir64b /proc/cpuinfo") == 0;
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    staging = mmap(0, (size_t)ranks * AREA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
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
