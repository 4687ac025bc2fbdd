/* What `memory_ceiling.c`, `copy_variants.c` and `by_hand.c` have in common: a rank on a core of its own, and memory as numpy takes it. */

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* To the first core of the rank's share of those that are allowed. */
static void take_core(int rank, int ranks)
{
    cpu_set_t allowed, one;
    sched_getaffinity(0, sizeof allowed, &allowed);
    CPU_ZERO(&one);
    int cores = CPU_COUNT(&allowed), mine = rank * (cores > ranks ? cores / ranks : 1) % cores;
    for (int core = 0, seen = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed) && seen++ == mine)
            CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
}

/* In huge pages where there are such, and touched. */
static char *array_of(size_t bytes, int value)
{
    char *found = aligned_alloc(2 << 20, bytes);
    madvise(found, bytes, MADV_HUGEPAGE);
    memset(found, value, bytes);
    return found;
}
