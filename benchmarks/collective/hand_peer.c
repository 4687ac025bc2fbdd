/* The collectives of `by_hand.h` as a library, for the ranks of `peers.py`, which bring their own arrays.
 *
 *     hand_bytes(ranks)                               of the memory that all ranks map
 *     hand_join(memory, rank, ranks)                  all ranks have mapped it; it was all zeros
 *     hand_choose(kind, bytes, source, target, name)  the ways of this collective are timed in turns on these arrays; calls go the fastest from now on: its name
 *     hand_calls(count)                               so many of them
 *     hand_call()                                     one
 *     hand_meet()                                     all ranks are here
 *
 * All ranks call the same functions in the same order. The ways are those that were the fastest at some size on 16
 * x86_64 cores (`by_hand.py`). */
#include "by_hand.h"

enum { TRIES = 3, WAYS = 12 };
static Collective *chosen;
static int chosen_kind;
static size_t chosen_bytes;

size_t hand_bytes(int count) { return sizeof(Shared) + (size_t)count * AREA; }

void hand_join(char *memory, int which, int count)
{
    rank = which, ranks = count, staging = memory, shared = (Shared *)(memory + (size_t)count * AREA);
    enter();
    meet();
}

void hand_meet(void) { meet(); }

static int ways_of(int kind, size_t bytes, Way *ways)
{
    int count = 0, large = bytes >= 4 << 20;
    for (int beyond = 0; beyond <= large; beyond++) {
        ways[count++] = (Way){128, 0, beyond, 8, 0};
        if (bytes >= 512 << 10)
            ways[count++] = (Way){256, 0, beyond, 8, 0}, ways[count++] = (Way){256, 16 << 10, beyond, 8, 0};
    }
    if (kind == SPREAD && large)
        ways[count++] = (Way){128, 0, 1, 5, 0}, ways[count++] = (Way){256, 0, 1, 7, 0};
    if (kind <= SPREAD && bytes >= 64 << 10)
        ways[count++] = (Way){.tile = 0};
    if (kind <= SPREAD && large)
        ways[count++] = (Way){.past = 1, .bounces = 1};
    for (int piece = 64; piece <= 128 && kind == SCATTER && bytes >= 256 << 10; piece *= 2)
        ways[count++] = (Way){.piece = piece};
    for (int piece = 64; piece <= 128 && kind == SUM && bytes >= 512 << 10; piece *= 2)
        for (int beyond = 0; beyond <= large; beyond++)
            ways[count++] = (Way){.piece = piece, .tile = piece * ranks, .ring = 8 << 10, .past = beyond};
    return count;
}

double hand_choose(int kind, size_t bytes, char *source, char *target, char *name, int length)
{
    Way ways[WAYS];
    double times[WAYS][TRIES];
    int count = ways_of(kind, bytes, ways), best = 0,
        calls = (8 << 20) / bytes > 50  ? 50
                : (8 << 20) / bytes < 2 ? 2
                                        : (8 << 20) / bytes;
    bring(source, target);
    for (int try = 0; try < TRIES && count > 1; try++)
        for (int k = 0; k < count; k++)
            times[k][try] = timed(take_way(kind, bytes, ways[k], name, length), kind, bytes, calls);
    double least = 0;
    for (int k = 0; k < count && count > 1; k++) {
        double time = slowest_of(times[k], TRIES);
        if (k == 0 || time < least)
            best = k, least = time;
    }
    chosen = take_way(kind, bytes, ways[best], name, length), chosen_kind = kind, chosen_bytes = bytes;
    meet();
    return least;
}

void hand_call(void) { chosen(chosen_kind, chosen_bytes); }

void hand_calls(int count)
{
    while (count--)
        hand_call();
}
