/* A fake libnvidia-ml.so.1, so that the real bindings can be led through what real drivers do.
 *
 * FAKE_NVML_STATE names a text file that is read anew at each call; a line is `name value`:
 *   init N, count N, handle N              results of these calls (0 is success), number of GPUs
 *   SYMBOL N                               result of any other call, such as `nvmlDeviceGetPowerUsage 3`
 *   SYMBOL@ID N                            the same for one GPU (its index) or slice (100 + its place)
 *   graphics PID BYTES                     a process that draws, perhaps one that computes, too
 *   total/free/used/reserved B, util P, power MW, temp C, clock MHZ, ecc N
 *   proc PID BYTES                         a process; BYTES - is "not available"
 *   mig N                                  N slices
 *   hang N                                 the N-th call from now on does not return
 *   xid N                                  one Xid event
 * Each call is noted in FAKE_NVML_CALLS, a byte per call.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
enum { OK = 0, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
static u64 calls;
static u64 told_xid;

static int find(const char *name, u64 *value) {
    char line[200], key[120], text[80];
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    int found = 0;
    if (!file) return 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%119s %79s", key, text) == 2 && !strcmp(key, name)) {
            *value = strtoull(text, NULL, 10);
            found = 1;
        }
    fclose(file);
    return found;
}

static u64 get(const char *name, u64 fallback) {
    u64 value = fallback;
    find(name, &value);
    return value;
}

static int begin(const char *symbol) {
    const char *path = getenv("FAKE_NVML_CALLS");
    FILE *file = path ? fopen(path, "a") : NULL;
    u64 limit, all;
    if (file) { fputc('.', file); fclose(file); }
    calls++;
    if (find("hang", &limit) && calls >= limit) for (;;) pause();
    if (find("all", &all) && all) return (int)all;
    return (int)get(symbol, OK);
}

/* A GPU's handle is its index + 1; a slice's is 100 + its place. */
static int begin_on(const char *symbol, const void *device) {
    char key[120];
    u64 code, id = (u64)(size_t)device;
    int result = begin(symbol);
    snprintf(key, sizeof key, "%s@%llu", symbol, id >= 100 ? id : id - 1);
    return !result && find(key, &code) ? (int)code : result;
}

#define CALL(symbol) int result = begin(symbol); if (result) return result
#define CALL_ON(symbol, device) int result = begin_on(symbol, device); if (result) return result

int nvmlInitWithFlags(u32 flags) { (void)flags; return begin("init"); }
int nvmlInit_v2(void) { return begin("init"); }
int nvmlShutdown(void) { return begin("shutdown"); }
const char *nvmlErrorString(int result) {
    switch (result) {
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}
int nvmlDeviceGetCount_v2(u32 *count) { CALL("nvmlDeviceGetCount_v2"); *count = (u32)get("count", 1); return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    CALL_ON("handle", (void *)(size_t)(index + 1));
    if (index >= get("count", 1)) return NOT_FOUND;
    *device = (void *)(size_t)(index + 1);
    return OK;
}
int nvmlDeviceGetUUID(void *device, char *uuid, u32 length) {
    CALL_ON("nvmlDeviceGetUUID", device);
    size_t id = (size_t)device;
    snprintf(uuid, length, id >= 100 ? "MIG-%zu" : "GPU-%zu", id >= 100 ? id - 100 : id - 1);
    return OK;
}
int nvmlDeviceGetName(void *device, char *name, u32 length) {
    CALL_ON("nvmlDeviceGetName", device); snprintf(name, length, "Fake GPU"); return OK;
}
struct memory { u64 total, free, used; };
struct memory2 { u32 version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo(void *device, struct memory *m) {
    CALL_ON("nvmlDeviceGetMemoryInfo", device);
    m->total = get("total", 80000); m->used = get("used", 30000) + get("reserved", 600); m->free = m->total - m->used;
    return OK;
}
#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory2 *m) {
    CALL_ON("nvmlDeviceGetMemoryInfo_v2", device);
    m->total = get("total", 80000); m->used = get("used", 30000); m->reserved = get("reserved", 600);
    m->free = m->total - m->used - m->reserved;
    return OK;
}
#endif
struct utilization { u32 gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *u) {
    CALL_ON("nvmlDeviceGetUtilizationRates", device); u->gpu = (u32)get("util", 50); u->memory = 1; return OK;
}
int nvmlDeviceGetPowerUsage(void *device, u32 *mw) {
    CALL_ON("nvmlDeviceGetPowerUsage", device); *mw = (u32)get("power", 100000); return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, u32 *mw) {
    CALL_ON("nvmlDeviceGetEnforcedPowerLimit", device); *mw = 700000; return OK;
}
int nvmlDeviceGetTemperature(void *device, u32 sensor, u32 *value) {
    CALL_ON("nvmlDeviceGetTemperature", device); (void)sensor; *value = (u32)get("temp", 40); return OK;
}
int nvmlDeviceGetClockInfo(void *device, u32 type, u32 *value) {
    CALL_ON("nvmlDeviceGetClockInfo", device); (void)type; *value = (u32)get("clock", 1980); return OK;
}
int nvmlDeviceGetTotalEccErrors(void *device, u32 type, u32 counter, u64 *value) {
    CALL_ON("nvmlDeviceGetTotalEccErrors", device); (void)type; (void)counter; *value = get("ecc", 0); return OK;
}
struct process { u32 pid; u64 used; u32 instance, compute; };
static int list_processes(const char *kind, u32 *count, struct process *list) {
    char line[200], key[40], pid[40], used[40];
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    u32 n = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%39s %39s %39s", key, pid, used) == 3 && !strcmp(key, kind)) {
            if (list && n < *count) {
                memset(&list[n], 0, sizeof list[n]);
                list[n].pid = (u32)strtoul(pid, NULL, 10);
                list[n].used = used[0] == '-' ? ~0ULL : strtoull(used, NULL, 10);
            }
            n++;
        }
    if (file) fclose(file);
    int small = !list || n > *count;
    *count = n;
    return n && small ? INSUFFICIENT_SIZE : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, struct process *list) {
    CALL_ON("nvmlDeviceGetComputeRunningProcesses_v3", device);
    return list_processes("proc", count, list);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, u32 *count, struct process *list) {
    CALL_ON("nvmlDeviceGetGraphicsRunningProcesses_v3", device);
    return list_processes("graphics", count, list);
}
int nvmlDeviceGetMigMode(void *device, u32 *current, u32 *pending) {
    CALL_ON("nvmlDeviceGetMigMode", device); *current = *pending = get("mig", 0) > 0; return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, u32 *count) {
    CALL_ON("nvmlDeviceGetMaxMigDeviceCount", device); *count = 7; return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, u32 index, void **slice) {
    CALL_ON("nvmlDeviceGetMigDeviceHandleByIndex", device);
    if (index >= get("mig", 0)) return NOT_FOUND;
    *slice = (void *)(size_t)(100 + index);
    return OK;
}
int nvmlEventSetCreate(void **set) { CALL("nvmlEventSetCreate"); *set = (void *)1; return OK; }
int nvmlEventSetFree(void *set) { CALL("nvmlEventSetFree"); (void)set; return OK; }
int nvmlDeviceRegisterEvents(void *device, u64 types, void *set) {
    CALL_ON("nvmlDeviceRegisterEvents", device); (void)types; (void)set; return OK;
}
struct event { void *device; u64 type, data; u32 instance, compute; };
int nvmlEventSetWait_v2(void *set, struct event *e, u32 ms) {
    CALL("nvmlEventSetWait_v2"); (void)set; (void)ms;
    u64 xid = get("xid", 0);
    if (!xid || xid == told_xid) return TIMEOUT;
    told_xid = xid;
    e->device = (void *)1; e->type = 8; e->data = xid;
    return OK;
}
