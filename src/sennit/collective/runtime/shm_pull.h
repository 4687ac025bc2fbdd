/* The memory of other processes: what is read there, and sums of it.
 *
 * The kernel copies whole pages at a time, so pages of source and target begin at the same places. What passes through
 * memory that is used again at once stays in the cache of this core: lines cross from one core to another once, where
 * staging makes them cross twice. */

#ifndef SENNIT_SHM_PULL_H
#define SENNIT_SHM_PULL_H

#include <sys/uio.h>

#include "shm_copy.h"
#include "shm_pages.h"
#include "shm_records.h"
#include "shm_reduce.h"

/* From the memory of another process. False where that is not possible now: it has ended, or its memory is gone;
 * `waiting_for` says which. */
static int pull(Group *group, int rank, char *to, char *from, int64_t bytes)
{
    while (bytes > 0) {
        struct iovec local = {to, (size_t)bytes}, remote = {from, (size_t)bytes};
        ssize_t got = process_vm_readv(group->pids[rank], &local, 1, &remote, 1, 0);
        if (got <= 0) {
            group->waiting_for = rank;
            return 0;
        }
        to += got, from += got, bytes -= got;
    }
    return 1;
}

/* Whether the kernel reads this memory of this process for others. Not all that a process may read it does: what a
 * driver has mapped may be closed to it, and pages that may only be written are. The first byte and the last one stand
 * for an array. */
static int is_readable(const Group *group, char *from, int64_t bytes)
{
    char ends[2];
    struct iovec local = {ends, 2}, remote[2] = {{from, 1}, {from + bytes - 1, 1}};
    return bytes <= 0 || process_vm_readv(group->pids[group->rank], &local, 1, remote, 2, 0) == 2;
}

/* `pull`, some at a time through `between`, and from there past the cache: the kernel's own copy would fetch what it
 * overwrites. */
static int pull_past_cache(Group *group, int rank, Piece piece, char *between, size_t most)
{
    while (piece.bytes > 0) {
        char *here = between + (uintptr_t)piece.from % PAGE;
        Piece some = {piece.to, here, piece.bytes < most ? piece.bytes : most};
        if (!pull(group, rank, here, (char *)piece.from, some.bytes))
            return 0;
        copy_piece(&some, 1);
        piece = (Piece){piece.to + some.bytes, piece.from + some.bytes, piece.bytes - some.bytes};
    }
    return 1;
}

enum { HERE = -1 }; /* the owner of what is mapped here, or is this rank's own */

/* The reduction of all terms, in their order, from byte `*done` on: `call->piece` bytes of each at a time, those that
 * lie in the memory of another rank, their owner, read into the workspace, each rank begun with another one. An element
 * is reduced by one call of `reduce_all`, so it is rounded as if all were here. False where a peer's memory cannot be
 * read: then `*done` says how much of the target has its result, which is not touched again when the step is tried
 * again, since the target may be a term, or lie in the same place as one. */
static int reduce_pulled(Group *group, const Call *call, char *target, const char *const *terms, const int32_t *owners,
                         int count, int64_t bytes, int64_t *done)
{
    const char *sources[count];
    int first = 0;
    while (first < count && owners[first] <= group->rank)
        first++;
    while (*done < bytes) {
        int64_t some = bytes - *done < call->piece ? bytes - *done : call->piece;
        char *free = group->workspace;
        for (int turn = 0; turn < count; turn++) {
            int k = (first + turn) % count;
            sources[k] = terms[k] + *done;
            if (owners[k] == HERE)
                continue;
            char *here = free + (uintptr_t)sources[k] % PAGE;
            if (!pull(group, owners[k], here, (char *)sources[k], some))
                return 0;
            sources[k] = here;
            free += call->piece + PAGE;
        }
        reduce_all(call, target + *done, sources, count, some / call->itemsize);
        *done += some;
    }
    *done = 0;
    return 1;
}

/* sennit_peek: reading for who wants to know whether it is allowed */
int sennit_peek(int32_t process, char *to, char *from, int64_t bytes)
{
    Group only = {.pids = &process};
    return pull(&only, 0, to, from, bytes);
}

#endif
