/* cuBLAS: every product is one kernel on the handle's stream. Its headers are left out, since arguments do not matter. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

struct handle {
    void *stream;
};

EXPORT int cublasCreate_v2(struct handle **handle) { return *handle = calloc(1, sizeof **handle), 0; }
EXPORT int cublasDestroy_v2(struct handle *handle) { return free(handle), 0; }
EXPORT int cublasSetStream_v2(struct handle *handle, void *stream) { return handle->stream = stream, 0; }
EXPORT int cublasSetWorkspace_v2(struct handle *handle, void *workspace, size_t bytes) { return 0; }
EXPORT int cublasGetMathMode(struct handle *handle, int *mode) { return *mode = 0, 0; }
EXPORT int cublasSetMathMode(struct handle *handle, int mode) { return 0; }
EXPORT int cublasGetPointerMode_v2(struct handle *handle, int *mode) { return *mode = 0, 0; }
EXPORT int cublasSetPointerMode_v2(struct handle *handle, int mode) { return 0; }

#define KERNEL(name) \
    EXPORT int cublas##name(struct handle *handle) { return launch(handle->stream, launch_microseconds()), 0; }
#define KERNELS(name) KERNEL(S##name) KERNEL(D##name) KERNEL(C##name) KERNEL(Z##name)

KERNELS(gemm_v2) KERNELS(gemmStridedBatched) KERNELS(gemv_v2) KERNELS(trsm_v2) KERNELS(trsmBatched)
KERNELS(gelsBatched) KERNELS(geqrfBatched) KERNELS(getrfBatched) KERNELS(getrsBatched)
KERNEL(Sdot_v2) KERNEL(Ddot_v2) KERNEL(Cdotc_v2) KERNEL(Cdotu_v2) KERNEL(Zdotc_v2) KERNEL(Zdotu_v2)
KERNEL(DotEx) KERNEL(GemmEx) KERNEL(SgemmEx) KERNEL(GemmStridedBatchedEx)

EXPORT size_t cublasLtGetVersion(void) { return 130000; }

EXPORT int cublasLtMatmul(void *handle, void *description, const void *alpha, const void *a, void *of_a, const void *b,
                          void *of_b, const void *beta, const void *c, void *of_c, void *d, void *of_d, const void *algorithm,
                          void *workspace, size_t bytes, void *stream) {
    return launch(stream, launch_microseconds()), 0;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                          void *preference, int wanted, void *results, int *count) {
    /* One algorithm, without a workspace: cublasLtMatmulHeuristicResult_t has 96 bytes. */
    memset(results, 0, 96);
    return *count = 1, 0;
}

#define NOTHING(name) EXPORT int cublasLt##name(void) { return 0; }
NOTHING(MatmulDescCreate) NOTHING(MatmulDescDestroy) NOTHING(MatmulDescSetAttribute) NOTHING(MatmulPreferenceCreate)
NOTHING(MatmulPreferenceDestroy) NOTHING(MatmulPreferenceSetAttribute) NOTHING(MatrixLayoutCreate)
NOTHING(MatrixLayoutDestroy) NOTHING(MatrixLayoutSetAttribute)
