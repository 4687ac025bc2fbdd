/* Calls of the core, made in a loop of C: what is left of a collective when nobody but the core is asked. For `core_loop.py`. */
#include <stdint.h>
#include <time.h>

typedef int Start(void *group, void *call, char *source, char *target, int32_t staged);

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

/* Microseconds of a call, of so many; -1 where one did not end by itself. */
double calls_in_a_loop(Start *start, void *group, void *call, char *source, char *target, int32_t staged, int32_t count)
{
    double begin = now();
    for (int k = 0; k < count; k++)
        if (start(group, call, source, target, staged))
            return -1;
    return (now() - begin) / count;
}
