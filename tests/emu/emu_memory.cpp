/* Memory of the emulated device: what CUDA hands out, and pages behind the emu_gate.
 *
 * Memory that is given back is somebody else's at once: its contents go before the call returns,
 * and nothing waits for work that still uses it.
 */
#include "emu_gate.h"

#include <iterator>
#include <stdint.h>
#include <string.h>

#include "cuda_runtime_api.h"
#include "emu_capture.h"

static std::atomic<unsigned long long> allocations;

memory_gate &emu_gate = *new memory_gate; /* streams may wait at it when the process ends */

namespace
{
struct region {
    size_t bytes;
    cudaMemoryType type;
    bool mapped; /* by the driver, onto memory that counts by itself */
};
std::mutex regions_lock;
std::map<uintptr_t, region> regions;
size_t driver_bytes; /* of the driver's memory, mapped or not */

/* What cudaMalloc and the driver can give together: $EMU_MEMORY_BYTES, else plenty. */
size_t device_bytes()
{
    const char *text = getenv("EMU_MEMORY_BYTES");
    return text ? strtoull(text, nullptr, 10) : (size_t)1 << 34;
}

size_t device_bytes_held()
{
    std::lock_guard<std::mutex> guard(regions_lock);
    size_t sum = driver_bytes;
    for (const auto &[address, it] : regions)
        sum += it.type == cudaMemoryTypeDevice && !it.mapped ? it.bytes : 0;
    return sum;
}

size_t whole_pages(size_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

/* Memory that is not ordered by a stream. */
cudaError_t region_add(void **pointer, size_t bytes, cudaMemoryType type)
{
    cudaError_t error = emu_check_unsafe();
    if (error != cudaSuccess)
        return error;
    allocations++;
    if (type == cudaMemoryTypeDevice && device_bytes_held() + bytes > device_bytes())
        return cudaErrorMemoryAllocation;
    size_t whole = (bytes + 511) / 512 * 512 + 512;
    bool gated = emu_gate.closed && type == cudaMemoryTypeDevice;
    void *made = gated ? emu_gate.take(whole_pages(whole)) : aligned_alloc(512, whole);
    if (!made)
        return cudaErrorMemoryAllocation;
    {
        host_inside here;
        memset(made, 0xa5, bytes);
    }
    std::lock_guard<std::mutex> guard(regions_lock);
    regions[(uintptr_t)made] = {bytes, type, false};
    *pointer = made;
    emu_trace("allocate %zu at %p\n", bytes, made);
    return cudaSuccess;
}

cudaError_t region_drop(void *pointer)
{
    cudaError_t error = emu_check_unsafe();
    if (error != cudaSuccess)
        return error;
    emu_trace("free %p\n", pointer);
    allocations++;
    std::lock_guard<std::mutex> guard(regions_lock);
    if (!pointer)
        return cudaSuccess;
    auto found = regions.find((uintptr_t)pointer);
    if (found == regions.end() || found->second.mapped)
        return cudaErrorInvalidValue;
    size_t bytes = found->second.bytes;
    regions.erase(found);
    if ((char *)pointer >= emu_gate.begin && (char *)pointer < emu_gate.begin + emu_gate.used) {
        madvise(pointer, whole_pages(bytes), MADV_DONTNEED);
    } else {
        memset(pointer, 0xdb, bytes);
        free(pointer);
    }
    return cudaSuccess;
}
} // namespace

bool emu_is_device_memory(uintptr_t address)
{
    struct cudaPointerAttributes attributes;
    cudaPointerGetAttributes(&attributes, (const void *)address);
    return attributes.type == cudaMemoryTypeDevice;
}

extern "C" {

int emu_take_memory(size_t bytes)
{
    if (bytes > device_bytes() || device_bytes_held() > device_bytes() - bytes)
        return -1;
    std::lock_guard<std::mutex> guard(regions_lock);
    driver_bytes += bytes;
    return 0;
}

void emu_give_memory(size_t bytes)
{
    std::lock_guard<std::mutex> guard(regions_lock);
    driver_bytes -= bytes;
}

int emu_map(void *address, size_t bytes, int file, int writable)
{
    std::lock_guard<std::mutex> guard(emu_gate.lock);
    int open = PROT_READ | (writable ? PROT_WRITE : 0);
    int access = emu_gate.closed && emu_gate.inside == 0 ? PROT_NONE : open;
    if (mmap(address, bytes, access, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
        return -1;
    emu_gate.mapped[static_cast<char *>(address)] = {bytes, writable != 0};
    std::lock_guard<std::mutex> also(regions_lock);
    regions[(uintptr_t)address] = {bytes, cudaMemoryTypeDevice, true};
    return 0;
}

void emu_unmap(void *address, size_t bytes)
{
    std::lock_guard<std::mutex> guard(emu_gate.lock);
    emu_gate.mapped.erase(static_cast<char *>(address));
    std::lock_guard<std::mutex> also(regions_lock);
    regions.erase((uintptr_t)address);
    if (mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
             0) == MAP_FAILED) {
        perror("emu: mmap");
        abort();
    }
}

void emu_gate_memory(void)
{
    if (emu_gate.closed)
        return;
    void *made =
        mmap(NULL, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) {
        perror("emu: addresses for device memory");
        abort();
    }
    emu_gate.begin = static_cast<char *>(made);
    emu_gate.closed = true;
}

void emu_stall(int yes)
{
    std::lock_guard<std::mutex> guard(emu_gate.lock);
    emu_gate.stalled = yes;
    emu_gate.changed.notify_all();
}

unsigned long long emu_allocations(void)
{
    return allocations;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *total = device_bytes();
    *free_bytes = *total - device_bytes_held();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    return region_add(pointer, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaFree(void *pointer)
{
    return region_drop(pointer);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned)
{
    return region_add(pointer, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaFreeHost(void *pointer)
{
    return region_drop(pointer);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    std::lock_guard<std::mutex> guard(regions_lock);
    *attributes = cudaPointerAttributes{};
    auto after = regions.upper_bound((uintptr_t)pointer);
    if (after == regions.begin())
        return cudaSuccess;
    auto found = std::prev(after);
    if ((uintptr_t)pointer - found->first < found->second.bytes)
        attributes->type = found->second.type;
    return cudaSuccess;
}

} // extern "C"
