/* Copies within this machine: one piece past the cache, or several pieces at once.
 *
 * Lines that other cores have written come from their caches, one after another if one stream of them is read. Several
 * streams wait for as many lines at a time, as in shm_reduce.h. So large pieces that a rank reads from its peers are
 * walked together, some lines of each in turn. With 8 ranks on 16 x86_64 cores (benchmarks/collective/copy_variants.c)
 * pieces of 64 KiB took 27 instead of 32 microseconds, and pieces of 512 KiB that are written past the cache 405
 * instead of 443; pieces of 8 KiB took longer, and one piece that was walked at several places as long. An all_gather
 * of 4 MiB took 615 instead of 718, one of 16 MiB 2281 instead of 2397 (shm_variants.py). Results are those of one copy
 * after another: pieces do not overlap. */

#ifndef SENNIT_SHM_COPY_H
#define SENNIT_SHM_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "shm_records.h"
#include "shm_reduce.h"

#define STREAMS 8             /* pieces that are walked together */
#define TURN (2 * LINE)       /* bytes of each in turn */
#ifndef LEAST_WALK            /* a build with another one is compared by shm_variants.py --only-chosen */
#define LEAST_WALK (16 << 10) /* bytes of each: shorter ones are copied one after another */
#endif

typedef struct {
    char *to;
    const char *from;
    size_t bytes;
} Piece;

/* Bytes before the first whole line of what is written. A store that goes over two lines takes both: users' arrays
 * mostly begin inside of a line, and all-reduces of them took 7% longer on 16 x86_64 cores. Past the cache, a line that
 * is written in two parts, with others between them, goes to memory twice, and each time is read first (13 times as
 * slow). */
static size_t unaligned(const Piece *piece)
{
    size_t head = -(uintptr_t)piece->to % LINE;
    return head < piece->bytes ? head : piece->bytes;
}

#if defined(__x86_64__)
static void store_line_past_cache(char *to, const char *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* Past the cache: what is written is not fetched before, and does not push out what is still needed. For outputs larger
 * than the cache of a core; or, of those that are the input too, which was read into a cache a moment before, larger
 * than the cache of all. */
static void copy_past_cache(const Piece *piece)
{
    size_t i = unaligned(piece);
    memcpy(piece->to, piece->from, i);
    for (; i + LINE <= piece->bytes; i += LINE)
        store_line_past_cache(piece->to + i, piece->from + i);
    memcpy(piece->to + i, piece->from + i, piece->bytes - i);
}

static void walk_past_cache(const Piece *pieces, int count, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += TURN)
        for (int k = 0; k < count; k++)
            for (size_t j = i; j < i + TURN; j += LINE)
                store_line_past_cache(pieces[k].to + j, pieces[k].from + j);
}

static void end_past_cache(void) { _mm_sfence(); }
#else
static void copy_past_cache(const Piece *piece) { memcpy(piece->to, piece->from, piece->bytes); }
#define walk_past_cache walk
static void end_past_cache(void) {}
#endif

/* So many bytes of each, a multiple of TURN. */
CLONES static void walk(const Piece *pieces, int count, size_t bytes)
{
    typedef char Vector __attribute__((vector_size(LINE), aligned(1), may_alias));
    for (size_t i = 0; i < bytes; i += TURN)
        for (int k = 0; k < count; k++)
            for (size_t j = i; j < i + TURN; j += LINE)
                *(Vector *)(pieces[k].to + j) = *(const Vector *)(pieces[k].from + j);
}

static void copy_piece(const Piece *piece, int past)
{
    if (past)
        copy_past_cache(piece), end_past_cache();
    else
        memcpy(piece->to, piece->from, piece->bytes);
}

/* At most STREAMS pieces, which it changes. */
static void copy_all(Piece *pieces, int count, int past)
{
    size_t shortest = SIZE_MAX, walked;
    for (int k = 0; k < count; k++)
        shortest = pieces[k].bytes < shortest ? pieces[k].bytes : shortest;
    if (count > 1 && shortest >= LEAST_WALK) {
        for (int k = 0; k < count; k++) {
            size_t head = unaligned(&pieces[k]);
            memcpy(pieces[k].to, pieces[k].from, head);
            pieces[k] = (Piece){pieces[k].to + head, pieces[k].from + head, pieces[k].bytes - head};
        }
        walked = (shortest - LINE) / TURN * TURN; /* no head is longer than a line */
        (past ? walk_past_cache : walk)(pieces, count, walked);
        for (int k = 0; k < count; k++)
            pieces[k] = (Piece){pieces[k].to + walked, pieces[k].from + walked, pieces[k].bytes - walked};
    }
    for (int k = 0; k < count; k++)
        copy_piece(&pieces[k], past);
}

/* sennit_copy: the same for tests */
void sennit_copy(Piece *pieces, int32_t count, int32_t past) { copy_all(pieces, count, past); }

#endif
