/* The collectives of `by_hand.h`, each in a loop of its own, its arrays in the cache if they fit there. For
 * `by_hand.py`.
 *
 *     by_hand RANKS [0|1|-1 [COLLECTIVE|all [SOURCE TARGET]]]      1: more kinds of staging, -1: none; SOURCE, TARGET: bytes from a page's beginning to that of an array, like numpy's unless they are given; prints lines of: collective, bytes, way, microseconds of a call (the median of rounds, of the slowest rank)
 *
 * | way, besides those of by_hand.h | is |
 * |---|---|
 * | pulled_small, pulled_huge | pulled between arrays in pages of 4 KiB, and in huge ones where the system gives them. In all other ways arrays have the pages that numpy's have: huge ones from 4 MiB on |
 * | open | out of arrays that all ranks map: what no program can have whose users bring their own arrays. The ideal |
 */
#include "by_hand.h"
#include <sys/wait.h>

enum { ROUNDS = 7, LARGEST = 16 << 20 };
static char *open_arrays; /* by rank */
static char *in_huge[2], *in_small[2];
static int source_offset, target_offset;

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

static void measure(int kind, size_t bytes, const char *way, Collective *call)
{
    double rounds[ROUNDS];
    int calls = (16 << 20) / bytes > 100 ? 100 : (16 << 20) / bytes < 3 ? 3 : (16 << 20) / bytes;
    for (int round = 0; round < ROUNDS; round++) {
        rounds[round] = timed(call, kind, bytes, calls);
        meet();
    }
    double slowest = slowest_of(rounds, ROUNDS);
    if (rank == 0)
        printf("%s %zu %s %.2f\n", names[kind], bytes, way, slowest), fflush(stdout);
    meet();
}

static void measure_way(int kind, size_t bytes, Way way)
{
    char name[64];
    measure(kind, bytes, name, take_way(kind, bytes, way, name, sizeof name));
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
    bring((huge_source ? in_huge[0] : in_small[0]) + source_offset,
          (huge_target ? in_huge[1] : in_small[1]) + target_offset);
}

static void run(int all, const char *only)
{
    take_core(rank, ranks);
    for (int k = 0; k < 2; k++)
        in_huge[k] = array_of(LARGEST + (2 << 20), 0), in_small[k] = small_array_of(LARGEST + 4096);
    memset(open_array(rank), 0, LARGEST), enter();
    size_t sizes[] = {1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20};
    int rings[] = {0, 4 << 10, 8 << 10, 16 << 10, 32 << 10}, tiles[] = {64, 128, 256};
    for (int kind = 0; kind < KINDS; kind++)
        for (int k = 0; k < 6 && (!strcmp(only, "all") || !strcmp(only, names[kind])); k++) {
            size_t bytes = sizes[k], huge_from = 4 << 20;
            take_arrays((kind == GATHER ? bytes / ranks : bytes) >= huge_from,
                        (kind == SCATTER ? bytes / ranks : bytes) >= huge_from);
            for (int ring = 0; ring < 5 && all >= 0; ring++)
                for (int tile = 0; tile < 3; tile++) {
                    if ((bytes < 512 << 10 && tile != 1) || (!all && ((ring != 0 && ring != 3) || tile == 0)))
                        continue;
                    for (int beyond = 0; beyond < (bytes >= 4 << 20 ? 2 : 1); beyond++)
                        measure_way(kind, bytes, (Way){tiles[tile], rings[ring], beyond, 8, 0});
                    if (kind == SPREAD && bytes >= 4 << 20)
                        for (int from_root = 1; from_root < 8; from_root += 2)
                            measure_way(kind, bytes, (Way){tiles[tile], rings[ring], 1, from_root, 0});
                }
            if (kind <= SPREAD && bytes >= 64 << 10)
                measure_way(kind, bytes, (Way){.tile = 0});
            for (int beyond = 0; beyond < 2 && kind <= SPREAD && bytes >= 512 << 10; beyond++)
                measure_way(kind, bytes, (Way){.past = beyond, .bounces = 1});
            for (int piece = 16; piece <= 128 && kind == SCATTER && bytes >= 512 << 10; piece *= 2)
                measure_way(kind, bytes, (Way){.piece = piece});
            for (int piece = 16; piece <= 128 && kind == SUM && bytes >= 512 << 10; piece *= 2)
                for (int ring = 0; ring <= 8 << 10; ring += 8 << 10)
                    for (int beyond = 0; beyond < (bytes >= 4 << 20 ? 2 : 1); beyond++)
                        measure_way(kind, bytes,
                                    (Way){.piece = piece, .tile = piece * ranks, .ring = ring, .past = beyond});
            past = bounces = 0;
            if (kind <= SPREAD && bytes >= 512 << 10)
                for (int huge = 0; huge < 2; huge++)
                    take_arrays(huge, huge), measure(kind, bytes, huge ? "pulled_huge" : "pulled_small", pulled);
            take_arrays((kind == GATHER ? bytes / ranks : bytes) >= huge_from,
                        (kind == SCATTER ? bytes / ranks : bytes) >= huge_from);
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
