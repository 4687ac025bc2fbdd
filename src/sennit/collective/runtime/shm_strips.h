/* Strips: a large call is cut into ranges of elements, and threads of the same rank move one each, where a rank has
 * more than one core. One core cannot have as many lines on their way as memory and the caches of others could send.
 *
 * Strip k of a rank meets strip k of its peers and no other: it has flags, doorbells, staging and tiles of its own, a
 * Group in itself, in which the call's code runs on elements `first` to `stop` of each part. So threads of a rank write
 * nothing in common. Reductions go element by element, so all bits are those of the uncut call.
 *
 * **Who runs what.** The thread that calls posts all strips, runs the first, and then, in order, each that nobody has
 * taken yet. Helper k takes strip k if it comes before. So nothing depends on helpers: they may sleep, wait for a core
 * behind threads that compute, or not have been started at all. All ranks begin the same strips, and every rank reaches
 * strip k once its strips before k are at their ends, or sooner; so by induction on k no strip waits for ever.
 *
 * The caller leaves when all strips have: then no thread touches the user's arrays any more. A strip in which nothing
 * moves for `patience` comes back as WAITING, as a call that is not cut does, and is posted again by the next
 * `sennit_run`.
 *
 * A helper that has nothing to do looks for AWAKE nanoseconds, giving its core to whoever wants it, and sleeps. It is
 * woken for calls that take much longer than waking (`rouses`), and for shorter ones if they follow each other closely.
 *
 * **Whether they help.** Mostly they do. But a core that seemed free may be wanted: by threads of the program, by other
 * programs, or by the host of a virtual machine, which may run two of its cores in turns for milliseconds after one was
 * woken. Then the caller, its helpers or its peers lose their cores in the middle of a call. So each call is timed, from
 * when the last rank began it, with helpers and now and then without, all ranks at the same calls; the way that took
 * less time on the average of the last ones is taken, and the other one tried again, less and less often as long as it
 * does not win.
 */

#ifndef SENNIT_SHM_STRIPS_H
#define SENNIT_SHM_STRIPS_H

#include <pthread.h>
#include <signal.h>

#include "shm_records.h"
#include "shm_wait.h"

enum { FREE, POSTED, TAKEN, MINE }; /* TAKEN: by whoever runs it; MINE: it is the caller's, who runs it later */

/* Nanoseconds that a helper looks for more before it sleeps, and that lie between calls of which the next is soon. */
#define AWAKE 50000
#define LOOKS 256 /* of a caller that waits for a helper, before it yields; as many yields follow before it sleeps */

/* Calls of which the ways are laid down; between two that are made the other way, at first and at most; of a mean, the
 * part of a new time in it; a time that is longer than so many means counts as so many. */
#define FIRST_TRIALS 5
#define FIRST_GAP 16
#define LAST_GAP 1024
#define RECENT 4
#define OUTLIER 8

static int go_on(Group *group, Call *call, int rounds);
static int is_over(const Call *call);
static uint64_t begun_by(const Group *group, int rank);

/* In the segment, beside how many calls a rank has begun: when it began its last call in strips, in nanoseconds. */
static _Atomic int64_t *begun_at(const Group *group, int rank)
{
    ptrdiff_t away = (ptrdiff_t)(rank - group->rank) * STATUS_BYTES;
    return (_Atomic int64_t *)((char *)group->calls_begun + away) + 1;
}

static int take(Strip *strip)
{
    uint32_t posted = POSTED;
    return atomic_compare_exchange_strong(&strip->state, &posted, TAKEN);
}

static void ring(Strip *strip, int rouse)
{
    atomic_fetch_add(&strip->bell, 1);
    if (rouse && atomic_load(&strip->sleepers))
        syscall(SYS_futex, &strip->bell, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

/* Until the bell rings, unless it has rung since it was read. */
static void sleep_until(Strip *strip, uint32_t bell)
{
    atomic_fetch_add(&strip->sleepers, 1);
    syscall(SYS_futex, &strip->bell, FUTEX_WAIT_PRIVATE, bell, 0, 0, 0);
    atomic_fetch_sub(&strip->sleepers, 1);
}

/* A strip that this thread has taken, as far as it goes. */
static void run_strip(Strip *strip)
{
    strip->status = go_on(strip->group, strip->call, INT_MAX);
    atomic_store(&strip->state, FREE);
}

static void *help(void *given)
{
    Strip *strip = given;
    int64_t since = nanoseconds();
    pthread_setname_np(pthread_self(), "sennit-strip");
    for (;;) {
        uint32_t bell = atomic_load(&strip->bell);
        if (atomic_load(&strip->ends))
            return NULL;
        if (take(strip)) {
            run_strip(strip);
            ring(strip, 1);
        } else if (nanoseconds() - since < AWAKE) {
            /* the core may be half of the caller's: pauses, and no more of the clock than it needs */
            for (int looks = 0; looks < 32 && atomic_load_explicit(&strip->bell, memory_order_relaxed) == bell; looks++)
                relax();
            if (nanoseconds() - since > AWAKE / 4)
                sched_yield();
            continue;
        } else {
            sleep_until(strip, bell);
        }
        since = nanoseconds();
    }
}

/* The way that a call is made: the first is cold and says nothing, two are the first alone, and two with helpers. */
static void choose_way(Trials *trials)
{
    int better = trials->took[ALONE] && trials->took[HELPED] > trials->took[ALONE] ? ALONE : HELPED;
    trials->made++;
    if (trials->made > FIRST_TRIALS)
        trials->way = trials->made >= trials->due ? 1 - better : better;
    else
        trials->way = trials->made == 2 || trials->made == 3 ? ALONE : HELPED, trials->gap = FIRST_GAP,
        trials->due = FIRST_TRIALS + FIRST_GAP;
}

static void learn_of_call(Trials *trials, int64_t time)
{
    int64_t *mean = &trials->took[trials->way];
    if (trials->made == 1 || time <= 0)
        return;
    if (trials->made <= FIRST_TRIALS) {
        *mean = *mean && *mean < time ? *mean : time;
        return;
    }
    int won = trials->took[HELPED] > trials->took[ALONE];
    time = time < OUTLIER * *mean ? time : OUTLIER * *mean;
    *mean += (time - *mean) / RECENT;
    if (trials->made >= trials->due) {
        int wins = trials->took[HELPED] > trials->took[ALONE];
        trials->gap = wins != won ? FIRST_GAP : trials->gap < LAST_GAP ? 2 * trials->gap : LAST_GAP;
        trials->due = trials->made + trials->gap;
    }
}

static void post_strips(Strips *others, Call *call, int64_t now)
{
    int helped = call->trials.way == HELPED, rouse = call->rouses || now - others->ended < AWAKE;
    for (int k = 0; k < call->strips - 1; k++) {
        Strip *strip = &others->strips[k];
        strip->status = DONE;
        strip->call = &call->others[k];
        if (is_over(strip->call))
            continue;
        atomic_store(&strip->state, helped ? POSTED : MINE);
        if (helped)
            ring(strip, rouse);
    }
}

/* What became of a strip: by this thread, where no helper has taken it. */
static int end_strip(Strip *strip)
{
    if (atomic_load(&strip->state) == MINE || take(strip)) {
        run_strip(strip);
        return strip->status;
    }
    for (int looks = 0; atomic_load(&strip->state) == TAKEN; looks++) {
        if (looks < LOOKS)
            relax();
        else if (looks < 2 * LOOKS)
            sched_yield();
        else {
            uint32_t bell = atomic_load(&strip->bell);
            if (atomic_load(&strip->state) == TAKEN)
                sleep_until(strip, bell);
        }
    }
    return strip->status;
}

/* When the last of the ranks did so that have begun this call, and none after it. */
static int64_t all_begun_at(const Group *group)
{
    int64_t last = atomic_load_explicit(begun_at(group, group->rank), memory_order_relaxed);
    for (int rank = 0; rank < group->ranks; rank++) {
        int64_t at = atomic_load_explicit(begun_at(group, rank), memory_order_acquire);
        if (at > last && begun_by(group, rank) == group->calls)
            last = at;
    }
    return last;
}

/* Goes on with all strips of a call. What is worst of them is what it returns. */
static int go_on_in_strips(Group *group, Call *call)
{
    Strips *others = group->others;
    post_strips(others, call, nanoseconds());
    int status = go_on(group, call, INT_MAX);
    for (int k = 0; k < call->strips - 1; k++) {
        int found = end_strip(&others->strips[k]);
        if (found > status)
            status = found, group->waiting_for = others->strips[k].group->waiting_for;
    }
    others->ended = nanoseconds();
    if (status == DONE)
        learn_of_call(&call->trials, others->ended - all_begun_at(group));
    return status;
}

/* The strips of a call that the first one has begun. */
static void begin_strips(const Group *group, Call *call)
{
    if (call->strips <= 1)
        return;
    choose_way(&call->trials);
    for (int k = 0; k < call->strips - 1; k++) {
        Group *own = group->others->strips[k].group;
        Call *strip = &call->others[k];
        own->calls = group->calls, own->history = group->history;
        strip->source = call->source, strip->target = call->target, strip->apart = call->apart;
        memcpy(strip->staged, call->staged, sizeof strip->staged);
        strip->entered = strip->first;
        strip->begun = strip->left = 0;
    }
}

/* sennit_help: starts helpers, in threads that take no signals of the process. A thread that cannot be had is done
 * without. */
void sennit_help(Strip *strips, int32_t count)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int k = 0; k < count; k++) {
        pthread_t thread;
        strips[k].started = !pthread_create(&thread, NULL, help, &strips[k]);
        strips[k].thread = strips[k].started ? (uint64_t)thread : 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* sennit_dismiss: ends them, and returns when they have. */
void sennit_dismiss(Strip *strips, int32_t count)
{
    for (int k = 0; k < count; k++)
        atomic_store(&strips[k].ends, 1), ring(&strips[k], 1);
    for (int k = 0; k < count; k++)
        if (strips[k].started)
            pthread_join((pthread_t)strips[k].thread, NULL), strips[k].started = 0;
}

#endif
