/* Detects which kernels this processor supports and how many cores this process may use.
 *
 * Each context reads the instruction set from cpuid once, so no global variable caches it. AMX
 * needs more than cpuid: the kernel must grant the process permission to use the 8 KiB of tile
 * state (arch_prctl). The kernel refuses if any thread's signal stack is too small; the next lower
 * path is then the best one.
 *
 * "auto" chooses the best path, with one exception. On AMD cores vdpbf16ps is worthwhile, because
 * its flop rate is twice that of fp32 FMA. Intel cores issue it at a quarter of the FMA rate, which
 * halves the flop rate. On Intel cores without tiles, the fp32 kernels need only 0.62 times the
 * time of vdpbf16ps for bf16 products, and 0.65 times for attention. (512 and 1024 cubed, T = 1024,
 * one core of a Xeon with AMX.) "auto" therefore means avx512 there. The choice is based on the
 * vendor instead of a measurement, which other processes would disturb.
 *
 * The core count is the smallest of the affinity mask's size and the CPU quotas of this process's
 * control groups (v2 and v1). The quotas of the process's own group and of all its visible
 * ancestors apply. A quota of 2.5 CPUs counts as 2: if spinning threads exceed a quota, the kernel
 * stops all of them at once.
 */
#include "base/cpu.h"

#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char *const names[] = {
#define X(name, text) [FSDPC_ISA_##name] = text,
    FSDPC_ISA_TABLE(X)
#undef X
};

#if defined(__x86_64__)

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

static bool has_amx_bf16(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1))
        return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

fsdpc_isa fsdpc_isa_best(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return FSDPC_ISA_PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return FSDPC_ISA_AVX2;
    if (!__builtin_cpu_supports("avx512bf16"))
        return FSDPC_ISA_AVX512;
    return has_amx_bf16() ? FSDPC_ISA_AMX : FSDPC_ISA_AVX512BF16;
}

/* Returns the path that "auto" selects. */
static fsdpc_isa fastest(fsdpc_isa best)
{
    if (best == FSDPC_ISA_AVX512BF16 && __builtin_cpu_is("intel"))
        return FSDPC_ISA_AVX512;
    return best;
}

#else

fsdpc_isa fsdpc_isa_best(void)
{
    return FSDPC_ISA_PORTABLE;
}

static fsdpc_isa fastest(fsdpc_isa best)
{
    return best;
}

#endif

const char *fsdpc_isa_name(fsdpc_isa isa)
{
    return (unsigned)isa < FSDPC_ISA_COUNT ? names[isa] : "unknown instruction set";
}

fsdpc_status fsdpc_isa_parse(const char *name, fsdpc_isa *out)
{
    fsdpc_isa best = fsdpc_isa_best();
    if (strcmp(name, "auto") == 0) {
        *out = fastest(best);
        return FSDPC_OK;
    }
    for (int i = 0; i < FSDPC_ISA_COUNT; i++) {
        if (strcmp(name, names[i]) != 0)
            continue;
        if (i > (int)best)
            return fsdpc_fail(FSDPC_ERR_VALUE,
                              "instruction set '%s' is more than this processor can do; the best "
                              "here is '%s' (or use 'auto')",
                              name, names[best]);
        *out = (fsdpc_isa)i;
        return FSDPC_OK;
    }
    return fsdpc_fail(FSDPC_ERR_VALUE,
                      "unknown instruction set '%s'; use auto, portable, avx2, avx512, avx512bf16 "
                      "or amx",
                      name);
}

/* Reads up to two numbers and returns how many it found, which is 0 for "max" or a missing file. */
static int read_numbers(const char *folder, const char *path, const char *file, long long out[2])
{
    char name[PATH_MAX];
    int length = snprintf(name, sizeof name, "%s%s/%s", folder, path, file);
    if (length < 0 || length >= (int)sizeof name)
        return 0;
    FILE *stream = fopen(name, "re");
    if (!stream)
        return 0;
    int count = fscanf(stream, "%lld %lld", &out[0], &out[1]);
    fclose(stream);
    return count > 0 ? count : 0;
}

static int quota_of(const char *folder, const char *path, bool v2)
{
    long long quota[2] = {0, 0}, period[2] = {0, 0};
    if (v2) {
        if (read_numbers(folder, path, "cpu.max", quota) != 2)
            return INT_MAX;
        period[0] = quota[1];
    } else if (read_numbers(folder, path, "cpu.cfs_quota_us", quota) != 1 ||
               read_numbers(folder, path, "cpu.cfs_period_us", period) != 1) {
        return INT_MAX;
    }
    if (quota[0] <= 0 || period[0] <= 0)
        return INT_MAX; /* -1: none */
    long long cores = quota[0] / period[0];
    return cores < 1 ? 1 : cores > INT_MAX ? INT_MAX : (int)cores;
}

/* Returns the tightest quota from `path` up to the hierarchy's root. Modifies `path`. */
static int tightest_quota(const char *folder, char *path, bool v2)
{
    int cores = INT_MAX;
    for (;;) {
        int here = quota_of(folder, path, v2);
        cores = here < cores ? here : cores;
        char *slash = strrchr(path, '/');
        if (!slash)
            return cores;
        *slash = '\0';
    }
}

static int cgroup_cores(void)
{
    FILE *stream = fopen("/proc/self/cgroup", "re");
    if (!stream)
        return INT_MAX;
    int cores = INT_MAX;
    char line[PATH_MAX + 256]; /* "4:cpu,cpuacct:/path", or "0::/path" for v2 */
    while (fgets(line, sizeof line, stream)) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *controllers++ = '\0';
        *path++ = '\0';
        bool v2 = controllers[0] == '\0', cpu = false;
        for (char *rest = controllers, *word; (word = strsep(&rest, ",")) != NULL;)
            cpu |= strcmp(word, "cpu") == 0;
        if (!v2 && !cpu)
            continue;
        int here = tightest_quota(v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu", path, v2);
        cores = here < cores ? here : cores;
    }
    fclose(stream);
    return cores;
}

static int affinity_cores(void)
{
    for (int possible = 1024; possible <= 1 << 20; possible *= 2) { /* until the mask fits */
        cpu_set_t *set = CPU_ALLOC((size_t)possible);
        if (!set)
            break;
        size_t bytes = CPU_ALLOC_SIZE((size_t)possible);
        int cores = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (cores > 0)
            return cores;
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

int fsdpc_usable_cores(void)
{
    int affinity = affinity_cores(), quota = cgroup_cores();
    return quota < affinity ? quota : affinity;
}
