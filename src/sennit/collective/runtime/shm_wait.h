/* Waiting: a rank that can do nothing spins, then yields its core, then sleeps at its doorbell until a peer that has
 * signalled wakes it. `shm_core.c` says why none sleeps over a signal. */

#ifndef SENNIT_SHM_WAIT_H
#define SENNIT_SHM_WAIT_H

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm_records.h"

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* After so many nanoseconds others have the core whom yielding does not speed up: a sleeper that is woken comes before
 * them. A rank whose core nobody else wants has no reason to sleep so soon, and a good one not to: on virtual machines
 * it may take longer to wake it than ranks wait before they sleep, and then each who sleeps makes the others sleep,
 * call after call. It goes on yielding for `linger`. So does a rank that takes turns with others on a core, for as long
 * as such a round of turns may take. */
#define YIELD_LIMIT 300000

#define EAGER 32 /* rounds */

/* Of spinning, however many others want the core: a few microseconds, which is how far ranks that run at the same time
 * are apart. */
#define LEAST_SPIN 64

/* Nanoseconds that a rank which takes turns spins for ranks of other cores, when none on its own has anything to do: to
 * give the core away takes time and brings nothing. With 500 to 8000 small calls take as long (afar_2_cores.txt). */
#define AFAR_SPIN 2000

typedef struct {
    int rounds, asleep, crowded; /* the last: others wanted the core meanwhile */
    uint32_t bell;
    int64_t since, spun; /* the last: since when it spins for ranks of other cores */
    long switches;       /* of this thread, at `since` */
} Idle;

/* How often another thread has had this one's core in its place. */
static long switches(void)
{
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) ? 0 : used.ru_nvcsw + used.ru_nivcsw;
}

static void spin_less(Group *group, int spin)
{
    int least = group->spin_limit < LEAST_SPIN ? group->spin_limit : LEAST_SPIN;
    atomic_store_explicit(&group->spin, spin > least ? spin : least, memory_order_relaxed);
}

static void awake(Group *group, Idle *idle)
{
    if (idle->asleep)
        atomic_fetch_sub(&group->doorbells[group->rank].sleepers, 1);
    idle->asleep = 0;
}

/* Called in place of `idle_once` when nobody on this core has anything to do. False when it is time to yield. */
static int spin_for_others(Idle *idle)
{
    int64_t now = nanoseconds();
    if (!idle->spun)
        idle->spun = now;
    if (now - idle->spun >= AFAR_SPIN) {
        idle->spun = 0;
        return 0;
    }
    relax();
    return 1;
}

/* Called when nothing can go on, again and again. False when patience is over. */
static int idle_once(Group *group, Idle *idle)
{
    Doorbell *door = &group->doorbells[group->rank];
    int spin = atomic_load_explicit(&group->spin, memory_order_relaxed);
    if (idle->rounds < spin) {
        /* what comes soon is seen soon; later, looking less often leaves more to the other thread of this core, which
         * may be the rank that is awaited */
        int pauses = idle->rounds < EAGER ? 1 : 4;
        idle->rounds += pauses;
        while (pauses--)
            relax();
        return 1;
    }
    idle->rounds++;
    int64_t now = nanoseconds();
    /* a rank without a core of its own does not spin here, and need not ask the kernel what its yields let others do: a
     * sixth of a small call */
    int learns = group->spin_limit > 0;
    if (!idle->since)
        idle->since = now, idle->switches = learns ? switches() : 0;
    int lingers = (!learns || (spin > LEAST_SPIN && !idle->crowded)) && now - idle->since < group->linger;
    if (lingers || (idle->rounds < spin + group->yields && now - idle->since < YIELD_LIMIT)) {
        sched_yield();
        /* a yield that took long let others run, whose time spinning takes; or the host had taken the core, of which
         * the kernel knows nothing */
        if (learns && nanoseconds() - now > 3000 && switches() > idle->switches) {
            idle->crowded = 1;
            spin_less(group, spin / 2);
        }
        return 1;
    }
    if (!idle->asleep) { /* say so first, then look once more */
        atomic_fetch_add(&door->sleepers, 1);
        idle->asleep = 1;
        idle->bell = atomic_load(&door->bell);
        return 1;
    }
    int64_t left = idle->since + group->patience - now;
    if (left <= 0) {
        spin_less(group, 0); /* a wait that is long: it need not be quick when it is taken up again */
        return 0;
    }
    struct timespec timeout = {left / 1000000000, left % 1000000000};
    syscall(SYS_futex, &door->bell, FUTEX_WAIT, idle->bell, &timeout, 0, 0);
    awake(group, idle);
    return 1;
}

/* Something went on: the next wait starts anew. If nobody else wanted the core, it may spin longer next time. With more
 * ranks than cores the limit is none. */
static void went_on(Group *group, Idle *idle)
{
    int spin = atomic_load_explicit(&group->spin, memory_order_relaxed);
    if (idle->rounds && !idle->crowded && spin < group->spin_limit)
        atomic_store_explicit(&group->spin, spin * 2 < group->spin_limit ? spin * 2 : group->spin_limit,
                              memory_order_relaxed);
    awake(group, idle);
    *idle = (Idle){0};
}

/* After stores that the rank may wait for, and a full fence. */
static void wake(Group *group, int rank)
{
    Doorbell *door = &group->doorbells[rank];
    if (atomic_load_explicit(&door->sleepers, memory_order_relaxed)) {
        atomic_fetch_add(&door->bell, 1);
        syscall(SYS_futex, &door->bell, FUTEX_WAKE, INT_MAX, 0, 0, 0);
    }
}

#endif
