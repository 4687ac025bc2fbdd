// Hand-written kernels for f32, to measure the interpreter against: what one would write for a single algorithm, with
// nothing to interpret. RANKS, THREADS and INTERLEAVED are defined at compile time; a rank's array has n elements, n a
// multiple of 4 * RANKS.

typedef unsigned long long u64;
typedef long long i64;

struct Arrays {
    const float4 *input[RANKS];
    float4 *output[RANKS];
    u64 *flags;  // by rank and member
    u64 epoch;
    i64 vectors;  // of an array
    int team;
};

__device__ __forceinline__ float4 load(const float4 *from) {
    float4 v;
    asm volatile("ld.global.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
    return v;
}
__device__ __forceinline__ float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

__device__ __forceinline__ void raise_flag(u64 *flag, u64 value) {
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ void await_flag(const u64 *flag, u64 value) {
    if (threadIdx.x == 0) {
        u64 found;
        do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flag) : "memory");
        while (found < value);
    }
    __syncthreads();
}

// A copy of `vectors` from input[0] to output[0]: what memory can do.
extern "C" __global__ void __launch_bounds__(THREADS) copy_vectors(Arrays a) {
    i64 step = (i64)gridDim.x * THREADS, i = (i64)blockIdx.x * THREADS + threadIdx.x;
    for (; i + 3 * step < a.vectors; i += 4 * step) {
        float4 v[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) v[w] = load(a.input[0] + i + w * step);
#pragma unroll
        for (int w = 0; w < 4; ++w) a.output[0][i + w * step] = v[w];
    }
    for (; i < a.vectors; i += step) a.output[0][i] = load(a.input[0] + i);
}

// What a member of a team takes of a chunk: with INTERLEAVED every team-th run of THREADS vectors, else one range.
struct Share {
    i64 first, step, last;
};
__device__ __forceinline__ Share share_of(const Arrays &a, int chunk, int member) {
    i64 size = a.vectors / RANKS, start = chunk * size;
#if INTERLEAVED
    return {start + (i64)member * THREADS, (i64)a.team * THREADS, start + size};
#else
    i64 share = (size + a.team - 1) / a.team;
    i64 first = share * member < size ? share * member : size, last = first + share < size ? first + share : size;
    return {start + first, THREADS, start + last};
#endif
}

// Direct, in one pass: rank r sums chunk r of all inputs and writes it to all outputs.
extern "C" __global__ void __launch_bounds__(THREADS, 2) direct_all_reduce(Arrays a) {
    int rank = blockIdx.x % RANKS;
    Share s = share_of(a, rank, blockIdx.x / RANKS);
    for (i64 i = s.first + threadIdx.x; i < s.last; i += s.step) {
        float4 v[RANKS];
#pragma unroll
        for (int k = 0; k < RANKS; ++k) v[k] = load(a.input[(rank + k) % RANKS] + i);
#pragma unroll
        for (int k = 1; k < RANKS; ++k) v[0] = add(v[0], v[k]);
#pragma unroll
        for (int k = 0; k < RANKS; ++k) a.output[(rank + k) % RANKS][i] = v[0];
    }
}

// All pairs in two passes: the sum is written to the own output, then read again and written to each other one.
extern "C" __global__ void __launch_bounds__(THREADS, 2) two_pass_all_reduce(Arrays a) {
    int rank = blockIdx.x % RANKS;
    Share s = share_of(a, rank, blockIdx.x / RANKS);
    for (i64 i = s.first + threadIdx.x; i < s.last; i += s.step) {
        float4 v[RANKS];
#pragma unroll
        for (int k = 0; k < RANKS; ++k) v[k] = load(a.input[(rank + k) % RANKS] + i);
#pragma unroll
        for (int k = 1; k < RANKS; ++k) v[0] = add(v[0], v[k]);
        a.output[rank][i] = v[0];
    }
    for (int k = 1; k < RANKS; ++k) {
        float4 *to = a.output[(rank + k) % RANKS];
        i64 i = s.first + threadIdx.x;
        for (; i + 7 * s.step < s.last; i += 8 * s.step) {
            float4 v[8];
#pragma unroll
            for (int w = 0; w < 8; ++w) v[w] = load(a.output[rank] + i + w * s.step);
#pragma unroll
            for (int w = 0; w < 8; ++w) to[i + w * s.step] = v[w];
        }
        for (; i < s.last; i += s.step) to[i] = load(a.output[rank] + i);
    }
}

// A ring: RANKS - 1 steps that add, RANKS - 1 that pass on. Rank r reads the partial sum of rank r - 1 and, later, puts
// to rank r + 1.
extern "C" __global__ void __launch_bounds__(THREADS, 2) ring_all_reduce(Arrays a) {
    int rank = blockIdx.x % RANKS, member = blockIdx.x / RANKS, before = (rank + RANKS - 1) % RANKS, after = (rank + 1) % RANKS;
    u64 base = a.epoch * 4 * RANKS;
    for (int k = 1; k < RANKS; ++k) {
        Share s = share_of(a, (rank + RANKS - k) % RANKS, member);
        const float4 *from = k == 1 ? a.input[before] : a.output[before];
        if (k > 1) await_flag(a.flags + before * a.team + member, base + k - 1);
        i64 i = s.first + threadIdx.x;
        for (; i + 3 * s.step < s.last; i += 4 * s.step) {
            float4 v[4], w[4];
#pragma unroll
            for (int u = 0; u < 4; ++u) v[u] = load(a.input[rank] + i + u * s.step), w[u] = load(from + i + u * s.step);
#pragma unroll
            for (int u = 0; u < 4; ++u) a.output[rank][i + u * s.step] = add(v[u], w[u]);
        }
        for (; i < s.last; i += s.step) a.output[rank][i] = add(load(a.input[rank] + i), load(from + i));
        raise_flag(a.flags + rank * a.team + member, base + k);
    }
    // chunk c of rank r + 1 was read for the last time by rank r + 2 in its step before this one; rank r puts to it
    // after that
    for (int k = 0; k < RANKS - 1; ++k) {
        Share s = share_of(a, (rank + 1 + RANKS - k) % RANKS, member);
        if (k > 0) await_flag(a.flags + before * a.team + member, base + RANKS - 1 + k);
        int reader = (after + 1) % RANKS;
        await_flag(a.flags + reader * a.team + member, base + RANKS - 1);
        i64 i = s.first + threadIdx.x;
        for (; i + 7 * s.step < s.last; i += 8 * s.step) {
            float4 v[8];
#pragma unroll
            for (int w = 0; w < 8; ++w) v[w] = load(a.output[rank] + i + w * s.step);
#pragma unroll
            for (int w = 0; w < 8; ++w) a.output[after][i + w * s.step] = v[w];
        }
        for (; i < s.last; i += s.step) a.output[after][i] = load(a.output[rank] + i);
        raise_flag(a.flags + rank * a.team + member, base + RANKS + k);
    }
}
