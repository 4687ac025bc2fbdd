// The interpreter of collectives on a GPU: one launch walks the programs of all ranks that it serves.
//
//   grid     one thread block (CTA) for each member of each worker; all of them must be resident at once, since they wait for each other
//   worker   a block of a rank's program: pages, one after another
//   page     a run of steps and the places they name; it is brought to shared memory at once, so that no step waits for its own text
//   step     8 words:
//              MOVE    sources, targets, first place, chunks, clip     every target = the sources combined, in the order of the list
//              PAIRS   pairs, pairs, first place, chunks, clip         each target = its own source, all at once
//              SIGNAL  value, run, flag, its address                   the flag = epoch * FLAG_STRIDE + value
//              WAIT    value, run, flag, its address                   until the flag has reached that
//            `run` is how many steps of the same kind follow, this one counted: they are done at once, by as many threads
//   place    the address of the first element of a chunk
//
// The host has put all addresses in: buffers and flags of this rank and of others look alike here.
//
// A worker is a *team* of CTAs. A member takes the same share of every chunk, from the first step to the last, so
// members never touch each other's data and need no barrier among them: each has flags of its own, member m's m words
// after the address of the first. A worker that moves nothing is one CTA, which signals and waits for all members of
// the others.
//
// Chunk c of a part holds elements [c * stride, (c + 1) * stride), cut at n. `clip` is one more than the largest chunk
// that a MOVE names in a part, 0 where it names scratch only; with it the length of all its places is known at once.
//
// Order. All threads of a CTA meet before a signal, then one thread stores the flag with release; the waiting thread
// loads with acquire, then its CTA meets. So what stands before a signal is seen after the wait, in this scope: the
// GPU, or the system where ranks are in several processes. The order in which sources are combined is the order of the
// list: results do not depend on timing.
//
// The epoch lies in device memory and the last CTA to end raises it: so nothing is reset between calls, and a launch
// may be captured in a CUDA graph and replayed.
//
// A wait ends at the deadline. It then says where in `status`, all CTAs leave, and the host raises.
//
// Compiled by NVRTC with ELEMENT, REDUCTION, THREADS, RESIDENT, FLAG_STRIDE and SYSTEM_SCOPE defined; and as C++
// (SENNIT_HOST) for tests, where a CTA is one thread of the host. No header is used, so that none has to be found.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define F32 0
#define F16 1
#define BF16 2
#define F64 3
#define I32 4
#define I64 5
#define I16 6
#define I8 7
#define U8 8
#define SUM 0
#define PROD 1
#define MIN 2
#define MAX 3

#define MOVE 0
#define SIGNAL 1
#define WAIT 2
#define PAIRS 3

#define PAGE_STEPS 32
#define PAGE_PLACES 128

struct alignas(32) Step {
    int kind, a, b, c, d, e;
    u64 address;
};
struct alignas(16) Page {
    int step, steps, place, places;
};
struct alignas(32) Worker {
    int rank, block, page, pages;  // of the pages after the first
    Page first;
};
struct alignas(16) Vector {
    u32 word[4];
};

// ---- the machine: what differs between a GPU and a host that stands in for it ---------------------------------------

#ifdef SENNIT_HOST
#include "gpu_host.h"
#else

#define DEVICE __device__ __forceinline__
#define APART __device__ __noinline__

#ifndef LOAD_HINT  // other hints can be tried from outside
#define LOAD_HINT ".L1::no_allocate"
#endif
#ifndef STORE_HINT
#define STORE_HINT ""
#endif

DEVICE void meet() { __syncthreads(); }

// Data is read once: it is kept out of the first-level cache. It may have been written by others during the launch, so
// it is never read through the read-only path.
DEVICE Vector load(const Vector *from) {
    Vector v;
    asm volatile("ld.global" LOAD_HINT ".v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from));
    return v;
}

DEVICE void store(Vector *to, const Vector &v) {
    asm volatile("st.global" STORE_HINT ".v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

#if SYSTEM_SCOPE
#define SCOPE "sys"
#else
#define SCOPE "gpu"
#endif

DEVICE u64 acquire(const u64 *flag) {
    u64 value;
    asm volatile("ld.acquire." SCOPE ".global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

DEVICE void release(u64 *flag, u64 value) {
    asm volatile("st.release." SCOPE ".global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

DEVICE u64 nanoseconds() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

DEVICE u64 take_ticket(u64 *counter) { return atomicAdd(counter, 1ull); }

DEVICE bool first_to_fail(u64 *status) { return atomicCAS(status, 0ull, 1ull) == 0ull; }

DEVICE float f16_to_f32(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE unsigned short f32_to_f16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE unsigned short f32_to_bf16(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE float bf16_to_f32(unsigned short bits) { return __uint_as_float((u32)bits << 16); }

#endif

// ---- elements: how they are widened, combined and narrowed ----------------------------------------------------------

#if ELEMENT == F32
typedef float Element;
typedef float Total;
#elif ELEMENT == F16 || ELEMENT == BF16
typedef unsigned short Element;
typedef float Total;  // sums of several sources are rounded once, at their end
#elif ELEMENT == F64
typedef double Element;
typedef double Total;
#elif ELEMENT == I32
typedef int Element;
typedef int Total;
#elif ELEMENT == I64
typedef i64 Element;
typedef i64 Total;
#elif ELEMENT == I16
typedef short Element;
typedef int Total;
#elif ELEMENT == I8
typedef signed char Element;
typedef int Total;
#elif ELEMENT == U8
typedef unsigned char Element;
typedef int Total;
#endif

#define WIDTH ((int)(16 / sizeof(Element)))  // elements of a vector

union Lanes {
    Vector vector;
    Element element[16 / sizeof(Element)];
};

DEVICE Total widen(Element e) {
#if ELEMENT == F16
    return f16_to_f32(e);
#elif ELEMENT == BF16
    return bf16_to_f32(e);
#else
    return (Total)e;
#endif
}

DEVICE Element narrow(Total t) {
#if ELEMENT == F16
    return f32_to_f16(t);
#elif ELEMENT == BF16
    return f32_to_bf16(t);
#else
    return (Element)t;
#endif
}

#if ELEMENT <= F64
#define IS_NAN(x) ((x) != (x))  // a NaN wins in min and max, as in numpy and torch
#else
#define IS_NAN(x) false
#endif

DEVICE Total combine(Total a, Total b) {
#if REDUCTION == SUM
    return a + b;
#elif REDUCTION == PROD
    return a * b;
#elif REDUCTION == MIN
    return (a < b || IS_NAN(a)) ? a : b;
#else
    return (a > b || IS_NAN(a)) ? a : b;
#endif
}

// ---- moving elements: every target = the sources combined -----------------------------------------------------------

// A share is what a member takes of a chunk: every `team`-th tile, a tile being a vector for each thread. So the CTAs
// of a team sweep through a chunk together, and few pages of memory are in use at a time.
struct Share {
    int member, team;
};

// By elements: where an address is not that of a vector.
APART void move_elements(const u64 *at, int sources, int targets, i64 shift, i64 elements, Share share) {
    const i64 tile = THREADS * WIDTH;
    for (i64 first = share.member * tile; first < elements; first += share.team * tile) {
        i64 last = first + tile < elements ? first + tile : elements;
        for (i64 i = first + threadIdx.x; i < last; i += THREADS) {
            Element value = ((const Element *)at[0])[shift + i];
            if (sources > 1) {
                Total total = widen(value);
                for (int s = 1; s < sources; ++s) total = combine(total, widen(((const Element *)at[s])[shift + i]));
                value = narrow(total);
            }
            for (int t = 0; t < targets; ++t) ((Element *)at[sources + t])[shift + i] = value;
        }
    }
}

// One round: WAYS vectors of each source are on their way at once, `step` apart. The last round of a move may be a part
// of one.
template <int SOURCES, int WAYS, bool WHOLE>
DEVICE void move_round(const u64 *at, int targets, i64 shift, i64 i, i64 step, i64 vectors) {
    Lanes loaded[WAYS][SOURCES];
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) {
        const Vector *from = (const Vector *)((const Element *)at[s] + shift) + i;
#pragma unroll
        for (int w = 0; w < WAYS; ++w)
            loaded[w][s].vector = WHOLE || i + w * step < vectors ? load(from + w * step) : Vector{};
    }
    if (SOURCES > 1) {
#pragma unroll
        for (int w = 0; w < WAYS; ++w)
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                Total total = widen(loaded[w][0].element[e]);
#pragma unroll
                for (int s = 1; s < SOURCES; ++s) total = combine(total, widen(loaded[w][s].element[e]));
                loaded[w][0].element[e] = narrow(total);
            }
    }
#pragma unroll 4
    for (int t = 0; t < targets; ++t) {
        Vector *to = (Vector *)((Element *)at[SOURCES + t] + shift) + i;
#pragma unroll
        for (int w = 0; w < WAYS; ++w)
            if (WHOLE || i + w * step < vectors) store(to + w * step, loaded[w][0].vector);
    }
}

// Not inlined: the versions would keep each other's addresses in registers.
template <int SOURCES, int WAYS>
APART void move_vectors(const u64 *at, int targets, i64 shift, i64 vectors, Share share) {
    const i64 step = (i64)share.team * THREADS;
    i64 tile = (i64)share.member * THREADS;  // the same for all threads of the CTA
    for (; tile + (WAYS - 1) * step + THREADS <= vectors; tile += WAYS * step)
        move_round<SOURCES, WAYS, true>(at, targets, shift, tile + threadIdx.x, step, vectors);
    if (tile < vectors) move_round<SOURCES, WAYS, false>(at, targets, shift, tile + threadIdx.x, step, vectors);
}

// Numbers of sources that there is no version for: four loads on their way, the total kept.
APART void move_many(const u64 *at, int sources, int targets, i64 shift, i64 vectors, Share share) {
    const i64 step = (i64)share.team * THREADS;
    for (i64 i = (i64)share.member * THREADS + threadIdx.x; i < vectors; i += step) {
        Lanes value;
        value.vector = load((const Vector *)((const Element *)at[0] + shift) + i);
        Total total[16 / sizeof(Element)];
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) total[e] = widen(value.element[e]);
        for (int s = 1; s < sources; s += 4) {
            Lanes loaded[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                loaded[k].vector = s + k < sources ? load((const Vector *)((const Element *)at[s + k] + shift) + i) : Vector{};
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (s + k < sources)
#pragma unroll
                    for (int e = 0; e < WIDTH; ++e) total[e] = combine(total[e], widen(loaded[k].element[e]));
        }
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) value.element[e] = narrow(total[e]);
        for (int t = 0; t < targets; ++t) store((Vector *)((Element *)at[sources + t] + shift) + i, value.vector);
    }
}

// Copies between pairs of places, eight at a time: their loads are on their way together.
APART void move_pairs(const u64 *at, int pairs, i64 shift, i64 vectors, Share share) {
    const i64 step = (i64)share.team * THREADS;
    for (int first = 0; first < pairs; first += 8)
        for (i64 i = (i64)share.member * THREADS + threadIdx.x; i < vectors; i += step) {
            Vector loaded[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const Vector *from = (const Vector *)((const Element *)at[first + k < pairs ? first + k : first] + shift);
                loaded[k] = first + k < pairs ? load(from + i) : Vector{};
            }
#pragma unroll
            for (int k = 0; k < 8; ++k)
                if (first + k < pairs) store((Vector *)((Element *)at[pairs + first + k] + shift) + i, loaded[k]);
        }
}

DEVICE void copy_share(const u64 *at, int pairs, i64 shift, i64 elements, Share share) {
    u64 bits = 0;
    for (int p = 0; p < 2 * pairs; ++p) bits |= at[p] + (u64)shift * sizeof(Element);
    i64 vectors = bits & 15 ? 0 : elements / WIDTH;
    move_pairs(at, pairs, shift, vectors, share);
    i64 whole = vectors * WIDTH;
    bool rest = whole < elements && (whole == 0 || vectors / THREADS % share.team == share.member);
    for (int p = 0; rest && p < pairs; ++p) {
        u64 pair[2] = {at[p], at[pairs + p]};
        move_elements(pair, 1, 1, shift + whole, elements - whole, whole ? Share{0, 1} : share);
    }
}

DEVICE void move_share(const u64 *at, int sources, int targets, i64 shift, i64 elements, Share share) {
    u64 bits = 0;
    for (int p = 0; p < sources + targets; ++p) bits |= at[p] + (u64)shift * sizeof(Element);
    if (bits & 15) {
        move_elements(at, sources, targets, shift, elements, share);
        return;
    }
    i64 vectors = elements / WIDTH;
    switch (sources) {  // about eight loads a thread on their way
        case 1: move_vectors<1, 8>(at, targets, shift, vectors, share); break;
        case 2: move_vectors<2, 4>(at, targets, shift, vectors, share); break;
        case 3: move_vectors<3, 2>(at, targets, shift, vectors, share); break;
        case 4: move_vectors<4, 2>(at, targets, shift, vectors, share); break;
        case 8: move_vectors<8, 1>(at, targets, shift, vectors, share); break;
        default: move_many(at, sources, targets, shift, vectors, share);
    }
    // the elements after the last vector belong to the member whose tile they are in
    i64 whole = vectors * WIDTH;
    if (whole < elements && vectors / THREADS % share.team == share.member)
        move_elements(at, sources, targets, shift + whole, elements - whole, Share{0, 1});
}

// ---- the walk -------------------------------------------------------------------------------------------------------

struct Shared {
    Step steps[PAGE_STEPS];
    u64 at[PAGE_PLACES];
    u64 base;  // of the values of this call's signals
    int failed;
};

struct Call {
    const Worker *workers;
    const Page *pages;
    const Step *steps;
    const u64 *places;
    u64 *status;   // 0, or where a wait ended at the deadline: 1, rank, block, step, flag, wanted, found
    u64 *epoch;    // how many calls there were, this one counted; and how many CTAs of this one have ended
    u64 patience;  // nanoseconds
    i64 n;         // elements of a part
    i64 stride;    // elements of a chunk
    int team;      // members of a worker
    int wide;      // workers that are teams; those after them are one CTA
    int flagged;   // whether there are signals and waits
    int spare;
};

DEVICE void turn_page(const Call &call, const Page &page, Shared &shared) {
    const Vector *from = (const Vector *)(call.steps + page.step);
    for (int i = threadIdx.x; i < page.steps * 2; i += THREADS) ((Vector *)shared.steps)[i] = from[i];
    for (int i = threadIdx.x; i < page.places; i += THREADS) shared.at[i] = call.places[page.place + i];
}

DEVICE void send_signals(u64 base, const Step *steps, int run, int member, int members) {
    for (int i = threadIdx.x; i < run * members; i += THREADS) {
        const Step &step = steps[i / members];
        release((u64 *)step.address + member + i % members, base + (u64)step.a);
    }
}

DEVICE void report(const Call &call, const Step &step, const Worker &worker, int at, u64 wanted, u64 found) {
    if (!first_to_fail(call.status)) return;
    call.status[1] = worker.rank, call.status[2] = worker.block, call.status[3] = at;
    call.status[4] = step.c, call.status[5] = wanted, call.status[6] = found;
}

DEVICE void await_signals(const Call &call, const Step *steps, int run, int member, int members, const Worker &worker,
                          int at, Shared &shared) {
    for (int i = threadIdx.x; i < run * members; i += THREADS) {
        const Step &step = steps[i / members];
        const u64 *flag = (const u64 *)step.address + member + i % members;
        u64 wanted = shared.base + (u64)step.a, found, deadline = 0;
        for (int polls = 0; (found = acquire(flag)) < wanted; ++polls) {
            if (polls % 256 != 255) continue;
            if (acquire(call.status) == 0) {
                u64 now = nanoseconds();
                if (deadline == 0) deadline = now + call.patience;
                if (now < deadline) continue;
                report(call, step, worker, at + i / members, wanted, found);
            }
            shared.failed = 1;
            return;
        }
    }
}

DEVICE void move_chunks(const Call &call, const Step &step, const u64 *at, int member) {
    for (int c = 0; c < step.d; ++c) {
        i64 length = call.stride;
        if (step.e) {
            i64 left = call.n - (i64)(step.e - 1 + c) * call.stride;
            length = left < 0 ? 0 : left < length ? left : length;
        }
        if (!length) continue;
        if (step.kind == PAIRS) copy_share(at, step.a, c * call.stride, length, Share{member, call.team});
        else move_share(at, step.a, step.b, c * call.stride, length, Share{member, call.team});
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) interpret(Call call) {
    __shared__ Shared shared;
    // neighbours in the grid are of different ranks: what one multiprocessor gets is then much like what another gets
    int teams = call.wide * call.team, cta = blockIdx.x;
    bool solo = cta >= teams;
    int index = solo ? call.wide + cta - teams : cta % call.wide;
    int member = solo ? 0 : cta / call.wide, members = solo ? call.team : 1;
    Worker worker = call.workers[index];
    if (threadIdx.x == 0) shared.failed = 0, shared.base = call.flagged ? call.epoch[0] * FLAG_STRIDE : 0;
    Page page = worker.first;
    for (int p = 0, done = 0;; ++p) {
        turn_page(call, page, shared);
        meet();
        for (int at = 0, run = 1, moved = 0; at < page.steps; at += run) {
            const Step &step = shared.steps[at];
            run = 1;
            bool moves = step.kind == MOVE || step.kind == PAIRS;
            if (moves) {
                if (moved) meet();  // it may read what other threads of this CTA have just written
                move_chunks(call, step, shared.at + step.c, member);
            } else if (step.kind == SIGNAL) {
                run = step.b;
                meet();
                send_signals(shared.base, &step, run, member, members);
            } else {
                run = step.b;
                await_signals(call, &step, run, member, members, worker, done + at, shared);
                meet();
                if (shared.failed) return;
            }
            moved = moves;
        }
        if (p == worker.pages) break;
        done += page.steps;
        page = call.pages[worker.page + p];
        meet();  // all have left the page
    }
    if (!call.flagged) return;
    meet();  // all have read the epoch
    if (threadIdx.x == 0 && take_ticket(call.epoch + 1) == gridDim.x - 1) {
        call.epoch[1] = 0;
        call.epoch[0] += 1;
    }
}
