/* The card, its memory, and what tests ask of it. */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

pthread_mutex_t state_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
struct counts counts;

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

/* Figures of NVIDIA's tables ("Technical Specifications per Compute Capability"), multiprocessors and L2 of one card
   of each: RTX 3090, RTX 4090, H100, RTX 5090. */
static const struct card cards[] = {
    {80, 108, 2048, 167936, 166912, 41943040},
    {86, 82, 1536, 102400, 101376, 6291456},
    {89, 128, 1536, 102400, 101376, 75497472},
    {90, 132, 2048, 233472, 232448, 52428800},
    {120, 170, 1536, 102400, 101376, 100663296},
};

const struct card *card(void) {
    static const struct card *chosen;
    if (chosen == NULL) {
        int capability = setting("FAKECUDA_CC", 90);
        for (size_t i = 0; i < sizeof cards / sizeof *cards; i++)
            if (cards[i].capability == capability) chosen = &cards[i];
        if (chosen == NULL) {
            fprintf(stderr, "FAKECUDA_CC=%d: known are 80, 86, 89, 90 and 120\n", capability);
            abort();
        }
    }
    return chosen;
}

size_t card_memory(void) { return (size_t)setting("FAKECUDA_MEM_MB", 24 << 10) << 20; }

void note(const char *format, ...) {
    static int wanted = -1;
    if (wanted < 0) wanted = setting("FAKECUDA_LOG", 0);
    if (!wanted) return;
    va_list arguments;
    va_start(arguments, format);
    fputs("[made-up device] ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

struct range {
    char *start;
    size_t bytes;
    enum place place;
};
static struct range *ranges; /* in order of their addresses */
static size_t count, room;
static size_t taken;

static size_t first_beyond(const char *address) { /* the first that begins after it */
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= address) low = middle + 1; else high = middle;
    }
    return low;
}

void know_range(void *address, size_t bytes, enum place place) {
    LOCKED;
    if (count == room) ranges = realloc(ranges, (room = room ? 2 * room : 256) * sizeof *ranges);
    size_t at = first_beyond(address);
    memmove(ranges + at + 1, ranges + at, (count++ - at) * sizeof *ranges);
    ranges[at] = (struct range){address, bytes, place};
}

static size_t drop_range(void *address) {
    LOCKED;
    size_t at = first_beyond(address);
    if (at == 0 || ranges[at - 1].start != address) return 0;
    size_t bytes = ranges[at - 1].bytes;
    memmove(ranges + at - 1, ranges + at, (count-- - at) * sizeof *ranges);
    return bytes;
}

bool forget_range(void *address) { return drop_range(address) != 0; }

enum place place_of(const void *address) {
    LOCKED;
    size_t at = first_beyond(address);
    if (at && (const char *)address < ranges[at - 1].start + ranges[at - 1].bytes) return ranges[at - 1].place;
    return PAGEABLE;
}

void *map_range(size_t bytes, enum place place) {
    if (bytes == 0) bytes = 1;
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return NULL;
    know_range(address, bytes, place);
    return address;
}

bool unmap_range(void *address) {
    size_t bytes = drop_range(address);
    if (bytes) munmap(address, bytes);
    return bytes != 0;
}

bool take_memory(size_t bytes) {
    LOCKED;
    if (taken + bytes > card_memory()) return false;
    taken += bytes;
    return true;
}

void give_memory(size_t bytes) {
    LOCKED;
    taken -= bytes;
}

size_t memory_taken(void) { return taken; }

static double kernel_microseconds;
double launch_microseconds(void) { return kernel_microseconds; }

/* For tests, called through ctypes. */
EXPORT void fakecuda_counts(struct counts *out) {
    LOCKED;
    *out = counts;
}

EXPORT void fakecuda_launches_take(double microseconds) { kernel_microseconds = microseconds; }

static struct {
    char function[64];
    int calls_before, calls, error;
} planned;

EXPORT void fakecuda_fail(const char *function, int calls_before, int calls, int error) {
    LOCKED;
    snprintf(planned.function, sizeof planned.function, "%s", function);
    planned.calls_before = calls_before;
    planned.calls = calls;
    planned.error = error;
}

int planned_error(const char *function) {
    LOCKED;
    if (strcmp(function, planned.function) || planned.calls_before-- > 0) return 0;
    return planned.calls-- > 0 ? planned.error : 0;
}
