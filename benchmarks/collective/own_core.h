/* What `memory_ceiling.c`, `copy_variants.c` and `by_hand.h` have in common: a rank on a core of its own if there are
 * as many, memory as numpy takes it, and words by which ranks wait for each other. */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

enum {
    MOST = 64 /* ranks */,
    OWN_CORE = 1 << 14 /* looks, some hundreds of microseconds: who waits longer may have no core of its own */
};

/* One for each rank, which alone writes it, in a cache line of its own. */
typedef struct {
    _Atomic uint64_t value;
    char rest[56];
} Word;

static int ranks, rank;
static int crowded; /* there are fewer cores than ranks: who waits gives its core away at once */

static inline double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

static inline void say(Word *word, uint64_t value)
{
    atomic_store_explicit(&word[rank].value, value, memory_order_release);
}

static inline void await(Word *word, int peer, uint64_t value)
{
    for (int looks = 0; atomic_load_explicit(&word[peer].value, memory_order_acquire) < value; looks++)
        if (looks < OWN_CORE && !crowded)
            PAUSE();
        else
            sched_yield();
}

static inline void await_all(Word *word, uint64_t value)
{
    for (int peer = 0; peer < ranks; peer++)
        await(word, peer, value);
}

/* All ranks are here. */
static inline void meet_at(Word *come)
{
    static uint64_t count;
    say(come, ++count);
    await_all(come, count);
}

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
