/* The CUDA runtime: streams, events, captures and copies by their rules; kernels take time at most. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#undef cudaGetDeviceProperties

struct graph {
    double microseconds;
    size_t nodes, copies, room;
    struct copy *copied; /* done again by each launch, as a real graph would */
};

struct capture {
    unsigned long long id;
    struct stream *origin;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    bool invalid;
    struct graph *graph;
    struct capture *next;
};

struct stream {
    struct capture *capture;
    /* Numbers of pieces of captured work: the last one here, and the last that another stream has waited for. */
    unsigned long long last, waited_for;
    double free_at; /* microseconds of `now` */
    struct stream *next;
};

struct event {
    bool has_time, recorded;
    unsigned long long capture, work;
    struct stream *stream;
    double at;
};

static struct stream legacy;
static struct stream *streams = &legacy;
static struct capture *captures;
static unsigned long long capture_ids, work_numbers;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static __thread cudaError_t last_error;

static cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

static struct stream *stream_of(void *handle) {
    /* 0, 1 and 2 name the default streams. */
    return (uintptr_t)handle <= 2 ? &legacy : handle;
}

static cudaError_t planned_failure(const char *function) { return failed(planned_error(function)); }
#define MAY_FAIL                                              \
    do {                                                      \
        cudaError_t planned = planned_failure(__func__);      \
        if (planned) return planned;                          \
    } while (0)

/* Time. Work begins once it is queued and what is before it on the stream is done; hosts that wait do sleep. */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

static void wait_until(double moment) {
    counts.waits++;
    for (double left; (left = moment - now()) > 0;) {
        struct timespec time = {(time_t)(left / 1e6), (long)(left * 1e3) % 1000000000};
        nanosleep(&time, NULL);
    }
}

static bool is_done(double moment) { return moment <= now(); }

static void do_copy(const struct copy *copy) {
    if (copy->from) memmove(copy->to, copy->from, copy->bytes);
    else memset(copy->to, copy->value, copy->bytes);
}

static void queue_work(struct stream *stream, double microseconds, const struct copy *copy) {
    if (stream->capture) {
        struct graph *graph = stream->capture->graph;
        graph->nodes++;
        graph->microseconds += microseconds;
        stream->last = ++work_numbers;
        if (copy) {
            if (graph->copies == graph->room)
                graph->copied = realloc(graph->copied, (graph->room = 2 * graph->room + 8) * sizeof *copy);
            graph->copied[graph->copies++] = *copy;
        }
        return;
    }
    double start = now();
    stream->free_at = (start > stream->free_at ? start : stream->free_at) + microseconds;
    if (copy) do_copy(copy);
}

void launch(void *handle, double microseconds) {
    LOCKED;
    struct stream *stream = stream_of(handle);
    *(stream->capture ? &counts.captured : &counts.launches) += 1;
    queue_work(stream, microseconds, NULL);
}

/* What a capture forbids: CUDA Runtime API, "Stream Management", cudaThreadExchangeStreamCaptureMode. */

static cudaError_t unsafe(const char *what) {
    LOCKED;
    cudaError_t error = cudaSuccess;
    if (thread_mode == cudaStreamCaptureModeRelaxed) return error;
    for (struct capture *capture = captures; capture; capture = capture->next) {
        bool is_here = pthread_equal(capture->thread, pthread_self());
        bool forbids = is_here ? capture->mode != cudaStreamCaptureModeRelaxed
                               : thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
        if (!forbids) continue;
        note("%s spoils capture %llu", what, capture->id);
        capture->invalid = true;
        error = failed(cudaErrorStreamCaptureUnsupported);
    }
    return error;
}
#define FORBIDDEN_IN_CAPTURES                         \
    do {                                              \
        cudaError_t capture_error = unsafe(__func__); \
        if (capture_error) return capture_error;      \
    } while (0)

/* Devices */

EXPORT cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
    note("a context for device %d", device);
    return device ? failed(cudaErrorInvalidDevice) : cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
};

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].text;
    return "another error";
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].name;
    return "cudaErrorUnknown";
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const struct card *known = card();
    *properties = (struct cudaDeviceProp){
        .name = "made-up device (no GPU)",
        .totalGlobalMem = card_memory(),
        .sharedMemPerBlock = 49152,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .memPitch = 2147483647,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .totalConstMem = 65536,
        .major = known->capability / 10,
        .minor = known->capability % 10,
        .textureAlignment = 512,
        .multiProcessorCount = known->multiprocessors,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .unifiedAddressing = 1,
        .memoryBusWidth = 384,
        .l2CacheSize = known->l2,
        .maxThreadsPerMultiProcessor = known->threads_per_multiprocessor,
        .streamPrioritiesSupported = 1,
        .sharedMemPerMultiprocessor = known->shared_per_multiprocessor,
        .regsPerMultiprocessor = 65536,
        .managedMemory = 1,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = known->shared_per_block,
        .maxBlocksPerMultiProcessor = 32,
        .memoryPoolsSupported = 1,
        .reservedSharedMemPerBlock = 1024,
    };
    return device ? failed(cudaErrorInvalidDevice) : cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    /* The runtime's numbers are the driver's. */
    return cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device) ? failed(cudaErrorInvalidValue) : cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    return snprintf(text, length, "0000:00:01.0"), cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return failed(cudaErrorInvalidDevice); }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    MAY_FAIL;
    FORBIDDEN_IN_CAPTURES;
    double last = 0;
    {
        LOCKED;
        for (struct stream *stream = streams; stream; stream = stream->next)
            if (stream->free_at > last) last = stream->free_at;
    }
    wait_until(last);
    return cudaSuccess;
}

/* Memory */

struct segment {
    void *address;
    size_t bytes;
    struct segment *next;
};
static struct segment *segments;

static cudaError_t allocate(void **address, size_t bytes) {
    LOCKED;
    if (!take_memory(bytes)) return failed(cudaErrorMemoryAllocation);
    *address = map_range(bytes, DEVICE);
    struct segment *segment = malloc(sizeof *segment);
    *segment = (struct segment){*address, bytes, segments};
    segments = segment;
    note("%zu bytes taken, %zu in all", bytes, memory_taken());
    return cudaSuccess;
}

static cudaError_t release(void *address) {
    LOCKED;
    for (struct segment **at = &segments; *at; at = &(*at)->next) {
        struct segment *segment = *at;
        if (segment->address != address) continue;
        give_memory(segment->bytes);
        unmap_range(address);
        *at = segment->next;
        free(segment);
        note("%zu bytes left taken", memory_taken());
        return cudaSuccess;
    }
    return address ? failed(cudaErrorInvalidValue) : cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes) {
    MAY_FAIL;
    FORBIDDEN_IN_CAPTURES;
    return allocate(address, bytes);
}
EXPORT cudaError_t cudaFree(void *address) {
    if (address) FORBIDDEN_IN_CAPTURES;
    return release(address);
}
EXPORT cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) {
    MAY_FAIL;
    struct capture *capture = stream_of(stream)->capture;
    if (capture && capture->invalid) return failed(cudaErrorStreamCaptureInvalidated);
    if (capture) return *address = map_range(bytes, OF_GRAPH), cudaSuccess;
    return allocate(address, bytes);
}
EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    if (place_of(address) != OF_GRAPH) return release(address);
    struct capture *capture = stream_of(stream)->capture; /* where this fails, torch ends the process */
    if (capture && !capture->invalid) return cudaSuccess;
    return failed(capture ? cudaErrorStreamCaptureInvalidated : cudaErrorInvalidValue);
}
EXPORT cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    return *all = card_memory(), *left = *all - memory_taken(), cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    FORBIDDEN_IN_CAPTURES;
    return *address = map_range(bytes, PINNED), cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void *address) { return unmap_range(address), cudaSuccess; }
EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    FORBIDDEN_IN_CAPTURES;
    return know_range(address, bytes, PINNED), cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void *address) {
    return forget_range(address) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    static const enum cudaMemoryType types[] = {cudaMemoryTypeDevice, cudaMemoryTypeHost, cudaMemoryTypeUnregistered,
                                          cudaMemoryTypeDevice};
    *attributes = (struct cudaPointerAttributes){
        .type = types[place_of(address)], .devicePointer = (void *)address, .hostPointer = (void *)address};
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    return *pool = (cudaMemPool_t)&legacy, cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = attribute == cudaMemPoolAttrReleaseThreshold ? 0 : memory_taken();
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t count) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return cudaSuccess; }
EXPORT cudaError_t cudaIpcCloseMemHandle(void *address) { return cudaSuccess; }

/* Copies: of values that the host has written, so that what travels by copies alone is right. */

static void count_copy(const void *to, const void *from) {
    bool is_there = place_of(to) == DEVICE, was_there = place_of(from) == DEVICE;
    counts.to_device += is_there && !was_there;
    counts.to_host += was_there && !is_there;
}

static void copy_on(struct stream *stream, struct copy copy) {
    LOCKED;
    queue_work(stream, 0, &copy);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t handle) {
    struct stream *stream = stream_of(handle);
    count_copy(to, from);
    copy_on(stream, (struct copy){to, from, 0, bytes});
    /* Into memory that is not pinned, the driver copies while the host waits. */
    if (!stream->capture && place_of(from) == DEVICE && place_of(to) == PAGEABLE) wait_until(stream->free_at);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    FORBIDDEN_IN_CAPTURES;
    count_copy(to, from);
    wait_until(legacy.free_at);
    do_copy(&(struct copy){to, from, 0, bytes});
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t handle) {
    count_copy(to, from);
    for (size_t row = 0; row < height; row++)
        copy_on(stream_of(handle),
                (struct copy){(char *)to + row * to_pitch, (const char *)from + row * from_pitch, 0, width});
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t handle) {
    return copy_on(stream_of(handle), (struct copy){to, from, 0, bytes}), cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    FORBIDDEN_IN_CAPTURES;
    return copy_on(&legacy, (struct copy){to, NULL, value, bytes}), cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t handle) {
    return copy_on(stream_of(handle), (struct copy){to, NULL, value, bytes}), cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                                      enum cudaMemcpyKind kind) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    return *address = map_range(4096, DEVICE), cudaSuccess;
}

/* Streams */

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    LOCKED;
    struct stream *stream = calloc(1, sizeof *stream);
    stream->next = streams;
    streams = stream;
    return *handle = (cudaStream_t)stream, cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) { return *priority = 0, cudaSuccess; }

static cudaError_t forbidden_on(struct stream *stream) {
    if (!stream->capture) return cudaSuccess;
    stream->capture->invalid = true;
    return failed(cudaErrorStreamCaptureUnsupported);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    struct stream *stream = stream_of(handle);
    if (forbidden_on(stream)) return last_error;
    FORBIDDEN_IN_CAPTURES;
    return is_done(stream->free_at) ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    MAY_FAIL;
    struct stream *stream = stream_of(handle);
    if (forbidden_on(stream)) return last_error;
    FORBIDDEN_IN_CAPTURES;
    wait_until(stream->free_at);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited_for, unsigned flags) {
    LOCKED;
    struct stream *stream = stream_of(handle);
    struct event *event = (struct event *)waited_for;
    if (!event->recorded) return cudaSuccess;
    struct capture *capture = captures;
    while (capture && capture->id != event->capture) capture = capture->next;
    if (capture) {
        if (stream->capture && stream->capture != capture) {
            capture->invalid = stream->capture->invalid = true;
            return failed(cudaErrorStreamCaptureMerge);
        }
        stream->capture = capture;
        if (stream != event->stream && event->work > event->stream->waited_for) event->stream->waited_for = event->work;
        if (stream != event->stream) stream->last = ++work_numbers; /* so that what was waited for is waited for here */
        return cudaSuccess;
    }
    if (stream->capture) {
        stream->capture->invalid = true;
        return failed(cudaErrorStreamCaptureIsolation);
    }
    if (event->at > stream->free_at) stream->free_at = event->at;
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) {
    LOCKED;
    struct stream *stream = stream_of(handle);
    queue_work(stream, 0, NULL);
    if (!stream->capture) function(data);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void *data, unsigned flags) {
    if (forbidden_on(stream_of(handle))) return last_error;
    return function(handle, cudaSuccess, data), cudaSuccess;
}

/* Events */

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    struct event *event = calloc(1, sizeof *event);
    event->has_time = !(flags & cudaEventDisableTiming);
    return *handle = (cudaEvent_t)event, cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) { return free(handle), cudaSuccess; }

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
    LOCKED;
    struct event *event = (struct event *)handle;
    struct stream *stream = stream_of(stream_handle);
    double moment = now();
    event->recorded = true;
    event->stream = stream;
    event->capture = stream->capture ? stream->capture->id : 0;
    event->work = stream->last;
    event->at = moment > stream->free_at ? moment : stream->free_at;
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    return cudaEventRecordWithFlags(handle, stream, 0);
}

static cudaError_t forbidden_for(struct event *event) {
    LOCKED;
    for (struct capture *capture = captures; capture; capture = capture->next)
        if (event->capture == capture->id) return capture->invalid = true, failed(cudaErrorCapturedEvent);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
    struct event *event = (struct event *)handle;
    if (forbidden_for(event)) return last_error;
    FORBIDDEN_IN_CAPTURES;
    return is_done(event->at) ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    struct event *event = (struct event *)handle;
    if (forbidden_for(event)) return last_error;
    FORBIDDEN_IN_CAPTURES;
    wait_until(event->at);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
    struct event *one = (struct event *)first, *other = (struct event *)second;
    if (!one->has_time || !other->has_time || !one->recorded || !other->recorded)
        return failed(cudaErrorInvalidResourceHandle);
    if (!is_done(one->at) || !is_done(other->at)) return failed(cudaErrorNotReady);
    return *milliseconds = (float)((other->at - one->at) / 1e3), cudaSuccess;
}

/* Captures and graphs */

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    MAY_FAIL;
    LOCKED;
    struct stream *stream = stream_of(handle);
    if (stream == &legacy) return failed(cudaErrorStreamCaptureUnsupported);
    if (stream->capture) return failed(cudaErrorIllegalState);
    struct capture *capture = calloc(1, sizeof *capture);
    *capture = (struct capture){++capture_ids, stream, mode, pthread_self(), false, calloc(1, sizeof(struct graph)), captures};
    captures = capture;
    stream->capture = capture;
    note("capture %llu begins, mode %d", capture->id, mode);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    LOCKED;
    struct stream *stream = stream_of(handle);
    struct capture *capture = stream->capture;
    *graph = NULL;
    if (!capture || capture->origin != stream) return failed(cudaErrorIllegalState);
    cudaError_t error = capture->invalid ? cudaErrorStreamCaptureInvalidated : planned_failure(__func__);
    for (struct stream *other = streams; other; other = other->next) {
        if (other->capture != capture) continue;
        if (!error && other != stream && other->last > other->waited_for) error = cudaErrorStreamCaptureUnjoined;
        other->capture = NULL;
    }
    for (struct capture **at = &captures; *at; at = &(*at)->next)
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    note("capture %llu ends with %zu nodes: %s", capture->id, capture->graph->nodes, cudaGetErrorString(error));
    if (error) {
        free(capture->graph->copied);
        free(capture->graph);
    } else *graph = (cudaGraph_t)capture->graph;
    free(capture);
    return failed(error);
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    struct capture *capture = stream_of(handle)->capture;
    *status = !capture           ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
    struct capture *capture = stream_of(handle)->capture;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? (cudaGraph_t)capture->graph : NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaStreamIsCapturing(handle, status);
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    return *mode = before, cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t handle, unsigned long long flags) {
    MAY_FAIL;
    FORBIDDEN_IN_CAPTURES;
    struct graph *graph = (struct graph *)handle, *copy = malloc(sizeof *copy);
    *copy = *graph;
    copy->copied = malloc(graph->copies * sizeof *graph->copied + 1);
    memcpy(copy->copied, graph->copied, graph->copies * sizeof *graph->copied);
    return *made = (cudaGraphExec_t)copy, cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    MAY_FAIL;
    LOCKED;
    struct graph *graph = (struct graph *)handle;
    counts.graph_launches++;
    queue_work(stream_of(stream), graph->microseconds, NULL);
    for (size_t i = 0; i < graph->copies; i++) do_copy(&graph->copied[i]);
    return cudaSuccess;
}

static cudaError_t free_graph(struct graph *graph) { return free(graph->copied), free(graph), cudaSuccess; }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free_graph((struct graph *)graph); }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return free_graph((struct graph *)graph); }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return *count = ((struct graph *)graph)->nodes, cudaSuccess;
}
EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes, cudaGraphEdgeData *edges,
                                                size_t *count) {
    return *count = 0, cudaSuccess;
}
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) { return cudaSuccess; }

/* Kernels of torch's own libraries. nvcc's code registers them by address and name, and launches them by address. */

static const void *spinning; /* behind torch.cuda._sleep, whose kernel does take its time */

EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int is_extern, size_t bytes,
                              int is_constant, int is_global) {}
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads, void *tid,
                                   void *bid, void *block, void *grid, int *warp) {
    if (name && strstr(name, "spin_kernel")) spinning = host;
}

struct dimensions {
    unsigned x, y, z;
};
static __thread struct {
    struct dimensions grid, block;
    size_t shared;
    void *stream;
} configured;

EXPORT unsigned __cudaPushCallConfiguration(struct dimensions grid, struct dimensions block, size_t shared, void *stream) {
    configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(struct dimensions *grid, struct dimensions *block, size_t *shared, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared;
    return *(void **)stream = configured.stream, cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, cudaSuccess; }

static cudaError_t launch_kernel(const void *function, void **arguments, void *stream) {
    double microseconds = launch_microseconds();
    if (function == spinning && arguments) microseconds = *(int64_t *)arguments[0] * 1e3 / CLOCK_KHZ;
    return launch(stream, microseconds), cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(void *kernel, struct dimensions grid, struct dimensions block, void **arguments,
                                      size_t shared, void *stream) {
    return launch_kernel(kernel, arguments, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    return launch_kernel(function, arguments, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) {
    return launch_kernel(function, arguments, how->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    int capability = card()->capability;
    *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024,
                                              .numRegs = 32,
                                              .ptxVersion = capability,
                                              .binaryVersion = capability,
                                              .maxDynamicSharedSizeBytes = 49152};
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int threads,
                                                                          size_t shared, unsigned flags) {
    return *count = 2, cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
    *function = driver_function(name);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
