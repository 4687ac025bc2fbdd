/* Calls of the core, made in a loop of C: what is left of a collective when nobody but the core is asked. For
 * `core_loop.py`. */
#include <stdint.h>
#include <time.h>

enum { DONE, WAITING };
typedef int Start(void *group, void *call, char *source, char *target, int32_t staged);
typedef int Run(void *group, void *call);

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

/* Microseconds of a call, of so many; -1 where one failed. */
double calls_in_a_loop(Start *start, Run *run, void *group, void *call, char *source, char *target, int32_t staged,
                       int32_t count)
{
    double begin = now();
    for (int k = 0; k < count; k++) {
        int status = start(group, call, source, target, staged);
        while (status == WAITING)
            status = run(group, call);
        if (status != DONE)
            return -1;
    }
    return (now() - begin) / count;
}
