/* Takes pieces of an array out of the memory of other devices: the tables of `pull.py`, interpreted.
 *
 * Three functions that XLA calls on each CPU device of a process, by its foreign function interface. Between them stand
 * two small collectives of XLA, which also do all waiting, so that no function here waits for another device:
 *
 *     where  x -> address                    collective: every device of a group learns all addresses
 *     take   x, addresses, me -> y, token    collective: nobody goes on before all of the group have taken
 *     keep   y, token, x -> y                x must live until here; y is passed on in place
 *
 * Order of memory: a device writes x before its address enters the first collective, others read x after it, and x is
 * freed or written again only after the second. Both collectives synchronise the group.
 *
 * The interface of XLA is one of C structs, version 0: within it fields are only added, at the end. What is used of it
 * is declared here, so that no header of JAX is needed to build this.
 */

#include <stdint.h>
#include <string.h>

/* ---- XLA's interface --------------------------------------------------------------------------------------------- */

typedef struct Extension {
    size_t size;
    int type;
    struct Extension *next;
} Extension;
typedef struct {
    size_t size;
    Extension *extension;
    int major, minor;
} Version;
typedef struct {
    size_t size;
    Version version;
    uint32_t traits;
} Metadata;
typedef struct {
    Extension head;
    Metadata *metadata;
} MetadataExtension;
typedef struct {
    size_t size;
    Extension *extension;
    const char *message;
    int code;
} ErrorArguments;
typedef struct {
    size_t size;
    Extension *extension;
    Version version;
    const void *internal;
    void *(*error)(ErrorArguments *);
} Api;
typedef struct {
    size_t size;
    Extension *extension;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} Buffer;
typedef struct {
    size_t size;
    Extension *extension;
    int64_t count;
    int *types;
    void **values;
} Values;
typedef struct {
    size_t size;
    Extension *extension;
    int64_t count;
    int *types;
    void *names;
    void **values;
} Attributes;
typedef struct {
    int dtype;
    size_t size;
    void *data;
} Array;
typedef struct {
    size_t size;
    Extension *extension;
    const Api *api;
    void *context;
    int stage;
    Values arguments, results;
    Attributes attributes;
} Call;

enum { METADATA = 1, MAJOR = 0, MINOR = 1, FAILED = 13 };

/* XLA asks for the version before the first call. */
static int is_question(Call *call)
{
    Extension *extension = call->extension;
    if (extension == NULL || extension->type != METADATA)
        return 0;
    Metadata *metadata = ((MetadataExtension *)extension)->metadata;
    metadata->version.major = MAJOR;
    metadata->version.minor = MINOR;
    metadata->traits = 0;
    return 1;
}

static void *failure(Call *call, const char *message)
{
    ErrorArguments arguments = {sizeof arguments, NULL, message, FAILED};
    return call->api->error(&arguments);
}

static void *argument(Call *call, int number) { return ((Buffer *)call->arguments.values[number])->data; }
static void *result(Call *call, int number) { return ((Buffer *)call->results.values[number])->data; }

/* ---- copies ------------------------------------------------------------------------------------------------------ */

enum { RANK = 16, DEVICES = 64, LISTED = 512, CACHED = 2048 };

typedef struct {
    int64_t holder, from, to, bytes;
} Run;

typedef struct {
    int rank, level;
    const int64_t *have, *want; /* strides in bytes */
    const int64_t *cuts[RANK];  /* count, then length and offset of each */
    const int64_t *holders;
    char *const *pieces;
} Plan;

/* Rows of runs: `rows` times all runs, which begin `away` from where they are listed, the source one `have` further
 * each time, the
 *   result one `want`. In blocks of rows that stay in the first cache, run by run, so that every line of the result is written while
 *   it is there. */
#define COPY(SIZE)                                                                  \
    for (int64_t row = 0; row < rows; row += block)                                 \
        for (int64_t number = 0; number < count; number++) {                        \
            const char *from = (const char *)runs[number].from + away + row * have; \
            char *to = result + runs[number].to + row * want;                       \
            int64_t left = rows - row < block ? rows - row : block;                 \
            for (; left > 0; left--, from += have, to += want)                      \
                memcpy(to, from, SIZE);                                             \
        }

static void copy_rows(char *result, const Run *runs, int64_t count, int64_t away, int64_t rows, int64_t have,
                      int64_t want)
{
    int64_t bytes = runs[0].bytes, block = want < CACHED ? CACHED / want : 1;
    if (count == 1 && bytes == have && bytes == want) {
        memcpy(result + runs[0].to, (const char *)runs[0].from + away, bytes * rows);
        return;
    }
    for (int64_t number = 1; number < count; number++)
        if (runs[number].bytes != bytes)
            bytes = 0;
    switch (bytes) {
    case 1:
        COPY(1) break;
    case 2:
        COPY(2) break;
    case 4:
        COPY(4) break;
    case 8:
        COPY(8) break;
    case 12:
        COPY(12) break;
    case 16:
        COPY(16) break;
    case 20:
        COPY(20) break;
    case 24:
        COPY(24) break;
    case 32:
        COPY(32) break;
    case 48:
        COPY(48) break;
    case 64:
        COPY(64) break;
    default:
        COPY(runs[number].bytes)
    }
}

/* All runs of the dims behind the level, for one product of cuts of the dims before. */
static int64_t list_runs(const Plan *plan, int64_t holder, int64_t from, Run *runs)
{
    Run other[LISTED], *now = runs, *next = other;
    int64_t count = 1;
    now[0] = (Run){holder, from, 0, 0};
    for (int dim = plan->level + 1; dim < plan->rank; dim++) {
        const int64_t *cuts = plan->cuts[dim];
        int64_t made = 0, last = dim == plan->rank - 1;
        for (int64_t number = 0; number < count; number++) {
            int64_t to = now[number].to;
            for (int64_t cut = 0; cut < cuts[0]; cut++) {
                int64_t length = cuts[1 + 2 * cut], offset = now[number].from + cuts[2 + 2 * cut];
                int64_t box = now[number].holder * cuts[0] + cut;
                if (last) {
                    next[made++] = (Run){box, offset, to, length};
                    to += length;
                } else {
                    for (int64_t index = 0; index < length; index++, to += plan->want[dim])
                        next[made++] = (Run){box, offset + index * plan->have[dim], to, 0};
                }
            }
        }
        Run *swap = now;
        now = next, next = swap, count = made;
    }
    for (int64_t number = 0; number < count; number++) {
        runs[number] = now[number];
        runs[number].from = (int64_t)(intptr_t)(plan->pieces[plan->holders[now[number].holder]] + now[number].from);
    }
    return count;
}

/* One product of cuts: for every index of the dims before the level, the rows of the level's dim. */
static void copy_box(const Plan *plan, const int64_t *lengths, char *result, const Run *runs, int64_t count)
{
    int64_t index[RANK] = {0}, away = 0;
    int level = plan->level, dim;
    do {
        copy_rows(result, runs, count, away, lengths[level], plan->have[level], plan->want[level]);
        for (dim = level - 1; dim >= 0; dim--) {
            int64_t last = lengths[dim] - 1, move = index[dim] < last ? 1 : -last;
            index[dim] += move;
            result += move * plan->want[dim];
            away += move * plan->have[dim];
            if (move == 1)
                break;
        }
    } while (dim >= 0);
}

static void copy_all(const Plan *plan, int dim, int64_t holder, int64_t from, int64_t *lengths, char *result)
{
    const int64_t *cuts = plan->cuts[dim];
    for (int64_t cut = 0; cut < cuts[0]; cut++) {
        int64_t box = holder * cuts[0] + cut, offset = from + cuts[2 + 2 * cut];
        lengths[dim] = cuts[1 + 2 * cut];
        if (dim == plan->level) {
            Run runs[LISTED];
            int64_t count = list_runs(plan, box, offset, runs);
            copy_box(plan, lengths, result, runs, count);
        } else {
            copy_all(plan, dim + 1, box, offset, lengths, result);
        }
        result += lengths[dim] * plan->want[dim];
    }
}

/* The pull of device `me`, which begins with its number in its group; NULL where the table does not fit. */
static const int64_t *pull_of(const int64_t *table, int64_t me)
{
    if (table[0] < 2 || table[0] > RANK || table[3] > DEVICES || me < 0 || me >= table[2])
        return NULL;
    return table + table[4 + 2 * table[0] + me];
}

/* `pieces` are those of the group of device `me`, whose new piece is written to `result`. */
int sennit_pull(const int64_t *table, int64_t me, char *const *pieces, char *result)
{
    const int64_t *body = pull_of(table, me);
    if (body == NULL)
        return -1;
    Plan plan = {.rank = (int)table[0], .level = (int)table[1], .pieces = pieces};
    plan.have = table + 4;
    plan.want = plan.have + plan.rank;
    body++;
    for (int dim = 0; dim < plan.rank; dim++) {
        plan.cuts[dim] = body;
        body += 1 + 2 * body[0];
    }
    plan.holders = body;
    int64_t lengths[RANK];
    copy_all(&plan, 0, 0, 0, lengths, result);
    return 0;
}

/* ---- what XLA calls ---------------------------------------------------------------------------------------------- */

void *sennit_where(Call *call)
{
    if (is_question(call))
        return NULL;
    uint64_t address = (uint64_t)(uintptr_t)argument(call, 0);
    memcpy(result(call, 0), &address, sizeof address);
    return NULL;
}

void *sennit_take(Call *call)
{
    if (is_question(call))
        return NULL;
    const int64_t *table = ((Array *)call->attributes.values[0])->data;
    const uint64_t *addresses = argument(call, 1);
    int32_t me = *(int32_t *)argument(call, 2);
    const int64_t *body = pull_of(table, me);
    if (body == NULL)
        return failure(call, "sennit: a table that does not fit the core; install sennit anew");
    char *pieces[DEVICES];
    for (int64_t member = 0; member < table[3]; member++)
        pieces[member] = (char *)(uintptr_t)addresses[member];
    if (pieces[body[0]] != argument(call, 0))
        return failure(call,
                       "sennit: XLA has moved an array between two calls; use Resharder(direct=False) and report this");
    sennit_pull(table, me, pieces, result(call, 0));
    memset(result(call, 1), 0, sizeof(uint32_t));
    return NULL;
}

void *sennit_keep(Call *call)
{
    is_question(call);
    return NULL;
}
