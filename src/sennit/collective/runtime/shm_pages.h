/* Which pages an array lies in, as the kernel says.
 *
 * How fast a process reads in another one depends on it: the kernel looks up each page, and one of 2 MiB is one of 512
 * times as few. Whether there are such pages, only their owner can ask (PAGEMAP_SCAN, Linux 6.7). */

#ifndef SENNIT_SHM_PAGES_H
#define SENNIT_SHM_PAGES_H

#include <stdint.h>
#include <sys/ioctl.h>

#define PAGE 4096

/* As in linux/fs.h from 6.7 on, which need not be here where the core is built. */
typedef struct {
    uint64_t start, end, categories;
} PageRegion;

typedef struct {
    uint64_t size, flags, start, end, walk_end, regions, region_count, most_pages, inverted, all_of, any_of, told;
} PageScan;

#define SCAN_PAGES _IOWR('f', 16, PageScan)
#define IN_HUGE_PAGE (1 << 6)

/* 1: this byte lies in a huge page; 0: it does not; -1: the kernel does not say. */
static int page_is_huge(int pagemap, const char *byte)
{
    PageRegion found;
    uint64_t page = (uintptr_t)byte / PAGE * PAGE;
    PageScan scan = {.size = sizeof scan,
                     .start = page,
                     .end = page + PAGE,
                     .regions = (uintptr_t)&found,
                     .region_count = 1,
                     .all_of = IN_HUGE_PAGE,
                     .told = IN_HUGE_PAGE};
    return ioctl(pagemap, SCAN_PAGES, &scan);
}

/* Whether an array lies in huge pages, by three places of it that are not at its ends, where it may share a page. -1
 * where the kernel does not say. */
static int in_huge_pages(int pagemap, const char *array, int64_t bytes)
{
    int huge = 1;
    for (int quarter = 1; quarter < 4 && huge == 1; quarter++)
        huge = page_is_huge(pagemap, array + bytes / 4 * quarter);
    return huge;
}

/* sennit_huge: for who wants to know */
int sennit_huge(int32_t pagemap, const char *array, int64_t bytes) { return in_huge_pages(pagemap, array, bytes); }

#endif
