/* A libnvidia-ml.so.1 without a GPU behind it, for the tests of the NVML reader. It has the
 * functions that are called and behaves as STUB says: healthy, lost, silent, refused, old, parts.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
typedef struct { unsigned gpu, memory; } utilization_t;

static const unsigned long long MIB = 1ULL << 20;
/* Devices 0 and 1 are GPUs, 8 is a part of the first. */
static char devices[16];

static int is(const char *mode) {
    const char *stub = getenv("STUB");
    return stub && strcmp(stub, mode) == 0;
}

static int place(void *device) { return (int)((char *)device - devices); }

int nvmlInit_v2(void) {
    if (is("silent")) sleep(600);
    return is("refused") ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "570.86.15");
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 12080;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (is("lost") && index == 0) return GPU_IS_LOST;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    (void)device;
    snprintf(text, length, "NVIDIA H200");
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    snprintf(text, length, place(device) == 8 ? "MIG-%d" : "GPU-%d", place(device));
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_t *memory) {
    if (is("old")) return NOT_SUPPORTED;
    if (memory->version != (sizeof(memory_t) | 2U << 24)) return INVALID_ARGUMENT;
    unsigned long long total = place(device) == 8 ? 18000 : 143771;
    memory->total = total * MIB;
    memory->reserved = 700 * MIB;
    memory->used = 1000 * MIB;
    memory->free = (total - 1700) * MIB;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    (void)device;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) {
    if (place(device) == 1) return NOT_SUPPORTED;
    rates->gpu = 37;
    rates->memory = 5;
    return SUCCESS;
}

int nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending) {
    (void)device;
    *current = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    *current = *pending = is("parts") && place(device) == 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    (void)device;
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
    (void)device;
    if (index != 2) return NOT_FOUND;
    *part = &devices[8];
    return SUCCESS;
}

static int list(const process_t *all, unsigned have, unsigned *count, process_t *out) {
    unsigned room = *count;
    *count = have;
    if (room < have) return INSUFFICIENT_SIZE;
    memcpy(out, all, have * sizeof *all);
    return SUCCESS;
}

/* 4711 computes; 4712 computes and draws; 4713 draws, and its memory is not told. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
    const process_t all[] = {{4711, 600 * 1048576ULL, ~0U, ~0U}, {4712, 5242880, ~0U, ~0U}};
    if (place(device) == 1) return NO_PERMISSION;
    return list(all, 2, count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
    const process_t all[] = {{4712, 5242880, ~0U, ~0U}, {4713, ~0ULL, ~0U, ~0U}};
    if (place(device) == 1) return NO_PERMISSION;
    return list(all, 2, count, out);
}

int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned length) {
    if (pid != 4711) return NO_PERMISSION;
    snprintf(text, length, "/usr/bin/python3");
    return SUCCESS;
}
