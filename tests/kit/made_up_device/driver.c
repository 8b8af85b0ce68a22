/* The driver's API: what Triton launches its kernels with, and torch's allocator maps segments that can grow. */
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void *driver_function(const char *name) {
    /* Some are exported as their second version, to which the header renames them. */
    char second[80];
    snprintf(second, sizeof second, "%s_v2", name);
    void *found = dlsym(RTLD_DEFAULT, name);
    return found ? found : dlsym(RTLD_DEFAULT, second);
}

EXPORT CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) { return *version = CUDART_VERSION, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorName(CUresult error, const char **text) { return *text = "CUDA_ERROR", CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    return *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the driver", CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    const struct card *known = card();
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = known->capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = known->capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = known->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = known->threads_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = known->shared_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = known->shared_per_block; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = known->l2; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = CLOCK_KHZ; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = CLOCK_KHZ; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 384; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    default: *value = 0; /* whatever else there is, this card cannot do it */
    }
    return CUDA_SUCCESS;
}

static char context; /* there is one */
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
    note("a context for device %d", device);
    return *made = (CUcontext)&context, CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *current) { return *current = (CUcontext)&context, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext given) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent(CUcontext given) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent(CUcontext *current) { return *current = (CUcontext)&context, CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

/* Code: loaded, never run. A function's address is its module's. */

static CUresult load(CUmodule *module) {
    LOCKED;
    note("code loaded");
    counts.modules++;
    return *module = malloc(1), CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return load(module); }
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) { return load(module); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return load(module);
}
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return *function = (CUfunction)module, CUDA_SUCCESS;
}
EXPORT CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values, unsigned count,
                                  CUlibraryOption *more, void **more_values, unsigned more_count) {
    return load((CUmodule *)library);
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *how) {
    return *count = 1, CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads, size_t shared) {
    return *count = 2, CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                               void **more) {
    return launch(stream, launch_microseconds()), CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **more) {
    return launch(how->hStream, launch_microseconds()), CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                          CUstream stream, void **arguments) {
    return launch(stream, launch_microseconds()), CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) { return (CUresult)cudaStreamSynchronize(stream); }
EXPORT CUresult cuCtxSynchronize(void) { return (CUresult)cudaDeviceSynchronize(); }
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return (CUresult)cudaStreamIsCapturing(stream, (enum cudaStreamCaptureStatus *)status);
}
EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    enum place place = place_of((void *)address);
    if (place == PAGEABLE || place == OF_GRAPH) return CUDA_ERROR_INVALID_VALUE; /* Triton refuses such arguments */
    return *(CUdeviceptr *)value = address, CUDA_SUCCESS;
}

/* Memory in pieces: address space apart from what stands behind it. A handle is the number of bytes behind it. */

static const size_t granularity = 2 << 20;

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags flags) {
    return *bytes = granularity, CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
    void *space = map_range(bytes, DEVICE);
    return *address = (CUdeviceptr)space, space ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    return unmap_range((void *)address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    CUresult error = planned_error(__func__);
    if (error) return error;
    *handle = bytes;
    return take_memory(bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return give_memory(handle), CUDA_SUCCESS; }
EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *list, size_t count) {
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    return madvise((void *)address, bytes, MADV_DONTNEED), CUDA_SUCCESS;
}
EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                               CUmemAllocationHandleType type) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuLinkCreate(unsigned count, CUjit_option *options, void **values, CUlinkState *state) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuLinkAddData(CUlinkState state, CUjitInputType type, void *data, size_t bytes, const char *name,
                              unsigned count, CUjit_option *options, void **values) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT CUresult cuLinkComplete(CUlinkState state, void **image, size_t *bytes) { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORT CUresult cuLinkDestroy(CUlinkState state) { return CUDA_SUCCESS; }

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *result) {
    *function = driver_function(name);
    if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
