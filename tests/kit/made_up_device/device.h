/* A made-up CUDA device: what the runtime, the driver and cuBLAS share. See __init__.py for what is real and what not. */
#pragma once

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if CUDART_VERSION < 13000
#error "the layout of the runtime's structs is written for CUDA 13"
#endif

#define EXPORT __attribute__((visibility("default")))

/* Held for the rest of the block it stands in. */
extern pthread_mutex_t state_lock;
static inline void release_state(pthread_mutex_t **lock) { pthread_mutex_unlock(*lock); }
#define LOCKED                                                                               \
    __attribute__((cleanup(release_state), unused)) pthread_mutex_t *held_lock = &state_lock; \
    pthread_mutex_lock(held_lock)

/* What Python reads through ctypes (`Counts` in __init__.py); all since the process began. */
struct counts {
    unsigned long launches;      /* kernels: torch's, Triton's, cuBLAS's; outside of graphs */
    unsigned long captured;      /* the same, recorded by a capture */
    unsigned long graph_launches;
    unsigned long waits;         /* calls in which a real device makes the host wait for it */
    unsigned long to_device, to_host; /* copies across, in calls */
    unsigned long modules;       /* cubins loaded */
};
extern struct counts counts;

struct card {
    int capability, multiprocessors, threads_per_multiprocessor;
    int shared_per_multiprocessor, shared_per_block; /* bytes; the latter as kernels may ask for it */
    int l2;                                          /* bytes */
};
const struct card *card(void);
size_t card_memory(void);
#define CLOCK_KHZ 1000000

/* What a test has planned to happen to this call of a function; 0 where it succeeds. */
int planned_error(const char *function);

/* Of the driver's API, by its plain name; NULL where there is none. */
void *driver_function(const char *name);

void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Memory: address ranges that are the device's, or the host's pinned. Pages are made when somebody writes to them. */
enum place { DEVICE, PINNED, PAGEABLE, OF_GRAPH /* taken within a capture by cudaMallocAsync */ };
void *map_range(size_t bytes, enum place place);
bool unmap_range(void *address);
void know_range(void *address, size_t bytes, enum place place);
bool forget_range(void *address);
enum place place_of(const void *address);
bool take_memory(size_t bytes); /* false where the card has not so much left */
void give_memory(size_t bytes);
size_t memory_taken(void);

/* Work: a kernel or a copy on a stream, which is run, or recorded where the stream is being captured. */
struct copy {
    void *to;
    const void *from; /* NULL: set to `value` */
    int value;
    size_t bytes;
};
void launch(void *stream, double microseconds);
double launch_microseconds(void); /* what the next kernel takes, as a test has set it */
