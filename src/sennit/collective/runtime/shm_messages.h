/* Messages between two ranks, and posts: the core's flags and waits without a collective. */

#ifndef SENNIT_SHM_MESSAGES_H
#define SENNIT_SHM_MESSAGES_H

#include <string.h>

#include "shm_records.h"
#include "shm_wait.h"

/* ---- messages: a ring of bytes for each ordered pair of ranks ---------------------------------------------------- */

#define HEADER 16 /* tag and size; payloads are filled up to as many bytes, so no header wraps round */

typedef struct {
    Counter written, read;
    char data[];
} Ring;

static Ring *ring_of(const Group *group, int set, int sender, int receiver)
{
    int64_t number = ((int64_t)set * group->ranks + sender) * group->ranks + receiver;
    return (Ring *)(group->rings + number * ((int64_t)sizeof(Ring) + group->ring_bytes));
}

static void ring_copy(const Group *group, Ring *ring, uint64_t position, char *data, int64_t bytes, int into)
{
    int64_t at = position % group->ring_bytes, first = group->ring_bytes - at < bytes ? group->ring_bytes - at : bytes;
    if (into) {
        memcpy(ring->data + at, data, first);
        memcpy(ring->data, data + first, bytes - first);
    } else {
        memcpy(data, ring->data + at, first);
        memcpy(data + first, ring->data, bytes - first);
    }
}

/* As much of a transfer as the ring allows. 1: something moved; 0: nothing; -1: another message is first in the ring.
 */
static int advance(Group *group, int set, Transfer *transfer)
{
    int sends = transfer->sends;
    Ring *ring =
        sends ? ring_of(group, set, group->rank, transfer->peer) : ring_of(group, set, transfer->peer, group->rank);
    Counter *own = sends ? &ring->written : &ring->read, *theirs = sends ? &ring->read : &ring->written;
    uint64_t mine = atomic_load_explicit(&own->bytes, memory_order_relaxed);
    int64_t room =
        (int64_t)(atomic_load_explicit(&theirs->bytes, memory_order_acquire) - mine) + (sends ? group->ring_bytes : 0);
    uint64_t start = mine;
    if (transfer->stage == 0) {
        uint64_t header[2] = {transfer->tag, (uint64_t)transfer->bytes};
        if (room < HEADER)
            return 0;
        ring_copy(group, ring, mine, (char *)header, HEADER, sends);
        if (!sends && (header[0] != transfer->tag || header[1] != (uint64_t)transfer->bytes)) {
            transfer->found_tag = header[0];
            transfer->found_bytes = (int64_t)header[1];
            return -1;
        }
        transfer->stage = 1;
        mine += HEADER;
        room -= HEADER;
    }
    /* so that the other side may begin */
    int64_t left = transfer->bytes - transfer->done, most = group->ring_bytes / 4;
    int64_t some = left < room ? left : room;
    some = some < most ? some : most;
    ring_copy(group, ring, mine, transfer->data + transfer->done, some, sends);
    transfer->done += some;
    mine += some;
    /* filling exists in the ring whenever the payload does: sizes are multiples of it */
    if (transfer->done == transfer->bytes) {
        transfer->stage = 2;
        mine += (HEADER - transfer->bytes % HEADER) % HEADER;
    }
    if (mine == start)
        return 0;
    atomic_store_explicit(&own->bytes, mine, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    wake(group, transfer->peer);
    return 1;
}

/* All transfers, in any order. Goes on where it stood if it is called again. */
int sennit_exchange(Group *group, int32_t set, Transfer *transfers, int32_t count)
{
    Idle idle = {0};
    for (;;) {
        int moved = 0, open = 0;
        for (int k = 0; k < count; k++) {
            if (transfers[k].stage == 2)
                continue;
            int result = advance(group, set, &transfers[k]);
            if (result < 0) {
                awake(group, &idle);
                return UNEXPECTED;
            }
            moved |= result;
            open += transfers[k].stage != 2;
        }
        if (!open) {
            awake(group, &idle);
            return DONE;
        }
        if (moved)
            went_on(group, &idle);
        else if (!idle_once(group, &idle)) {
            awake(group, &idle);
            return WAITING;
        }
    }
}

/* ---- posts: words that say where data lies in memory that its writer owns (shm_posts.py) ------------------------- */

typedef struct {
    Counter *counter;
    uint64_t least;
} Watch;

/* The data that the word speaks of is written; who waits at the door is woken. */
void sennit_post(Counter *counter, uint64_t value, Doorbell *door)
{
    atomic_store_explicit(&counter->bytes, value, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    Group visitor = {.doorbells = door};
    wake(&visitor, 0);
}

uint64_t sennit_look(Counter *counter) { return atomic_load_explicit(&counter->bytes, memory_order_acquire); }

/* Until one of the words is as high as it should be: DONE; WAITING when patience is over. */
int sennit_await(Group *group, const Watch *watches, int32_t count)
{
    Idle idle = {0};
    for (;;) {
        for (int k = 0; k < count; k++)
            if (sennit_look(watches[k].counter) >= watches[k].least) {
                went_on(group, &idle);
                return DONE;
            }
        if (!idle_once(group, &idle)) {
            awake(group, &idle);
            return WAITING;
        }
    }
}

#endif
