// As much of CUDA's driver and runtime as the host code of Iris calls, on memory files: every process of a host can map them.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, GRANULARITY = 2 << 20 };
typedef unsigned long long Address;
typedef struct { int fd, users; size_t size; } Memory;  // a handle is its address; a mapping is a further user
typedef struct Mapping { Address at; size_t size; Memory *memory; struct Mapping *next; } Mapping;

static Mapping *mappings;
static int device, memories, ranges;

// What has not been given back: memory, mappings, and ranges of addresses.
int fake_in_use(void) {
  int count = memories + ranges;
  for (Mapping *one = mappings; one; one = one->next) count++;
  return count;
}

// The runtime.
int cudaGetDeviceCount(int *number) { *number = 8; return OK; }
int cudaSetDevice(int number) { device = number; return OK; }
int cudaGetDevice(int *number) { *number = device; return OK; }
int cudaDeviceSynchronize(void) { return OK; }
const char *cudaGetErrorString(int error) { (void)error; return "an error of the fake CUDA"; }
int cudaDeviceGetAttribute(int *value, int attribute, int number) {
  (void)number;
  *value = attribute == 16 ? 132 : attribute == 13 ? 1000000 : 0;  // processors, clock
  return OK;
}

// The driver.
int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuDeviceGet(int *number, int ordinal) { *number = ordinal; return ordinal < 8 ? OK : INVALID; }
int cuDevicePrimaryCtxRetain(void **context, int number) { (void)number; *context = &device; return OK; }
int cuCtxSetCurrent(void *context) { return context == &device ? OK : INVALID; }
int cuGetErrorName(int error, const char **name) {
  *name = error == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
  return OK;
}
int cuMemGetAllocationGranularity(size_t *size, const void *properties, int which) {
  (void)properties, (void)which;
  *size = GRANULARITY;
  return OK;
}

int cuMemAddressReserve(Address *address, size_t size, size_t alignment, Address wanted, unsigned long long flags) {
  (void)wanted, (void)flags;
  if (size % GRANULARITY || (alignment & (alignment - 1))) return INVALID;
  size_t extra = alignment > GRANULARITY ? alignment : GRANULARITY;
  char *room = mmap(NULL, size + extra, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return NO_MEMORY;
  *address = ((Address)room + extra - 1) & ~(Address)(extra - 1);
  ranges++;
  return OK;
}
// The addresses stay reserved, so that a late use of them faults.
int cuMemAddressFree(Address address, size_t size) { (void)address, (void)size; ranges--; return OK; }

static Memory *memory_of(int fd, size_t size) {
  Memory *memory = malloc(sizeof *memory);
  *memory = (Memory){fd, 1, size};
  memories++;
  return memory;
}
static void release(Memory *memory) {
  if (--memory->users) return;
  close(memory->fd);
  free(memory);
  memories--;
}

// FAKE_LIMIT is the most bytes of an allocation.
int cuMemCreate(Address *handle, size_t size, const void *properties, unsigned long long flags) {
  (void)properties, (void)flags;
  const char *limit = getenv("FAKE_LIMIT");
  if (size % GRANULARITY) return INVALID;
  if (limit && size > strtoull(limit, NULL, 10)) return NO_MEMORY;
  int fd = memfd_create("fake-cuda", 0);
  if (fd < 0 || ftruncate(fd, (off_t)size)) return NO_MEMORY;
  *handle = (Address)memory_of(fd, size);
  return OK;
}
int cuMemRelease(Address handle) { release((Memory *)handle); return OK; }

// Memory can be used once cuMemSetAccess has allowed it.
int cuMemMap(Address at, size_t size, size_t offset, Address handle, unsigned long long flags) {
  Memory *memory = (Memory *)handle;
  if (offset || flags || size > memory->size) return INVALID;
  for (Mapping *one = mappings; one; one = one->next)
    if (at < one->at + one->size && one->at < at + size) return INVALID;
  if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED) return INVALID;
  Mapping *mapping = malloc(sizeof *mapping);
  *mapping = (Mapping){at, size, memory, mappings};
  memory->users++;
  mappings = mapping;
  return OK;
}
int cuMemSetAccess(Address at, size_t size, const void *descriptors, size_t count) {
  (void)descriptors;
  return count == 1 && !mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? OK : INVALID;
}
int cuMemUnmap(Address at, size_t size) {
  for (Mapping **place = &mappings; *place; place = &(*place)->next)
    if ((*place)->at == at && (*place)->size == size) {
      Mapping *gone = *place;
      *place = gone->next;
      mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
      release(gone->memory);
      free(gone);
      return OK;
    }
  return INVALID;
}

// Handles between processes are file descriptors, which Iris passes through sockets.
int cuMemExportToShareableHandle(int *fd, Address handle, int type, unsigned long long flags) {
  (void)flags;
  *fd = type == 1 ? dup(((Memory *)handle)->fd) : -1;
  return *fd < 0 ? INVALID : OK;
}
int cuMemImportFromShareableHandle(Address *handle, void *from, int type) {
  int fd = type == 1 ? dup((int)(long)from) : -1;
  off_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
  if (size <= 0) return INVALID;
  *handle = (Address)memory_of(fd, (size_t)size);
  return OK;
}
static Mapping *mapping_of(Address address) {
  for (Mapping *one = mappings; one; one = one->next)
    if (address >= one->at && address < one->at + one->size) return one;
  return NULL;
}
int cuMemRetainAllocationHandle(Address *handle, void *address) {
  Mapping *one = mapping_of((Address)address);
  if (!one) return INVALID;
  one->memory->users++;
  *handle = (Address)one->memory;
  return OK;
}
int cuMemGetAddressRange(Address *base, size_t *size, Address address) {
  Mapping *one = mapping_of(address);
  if (!one) return INVALID;
  *base = one->at;
  *size = one->size;
  return OK;
}
int cuPointerGetAttribute(void *value, int attribute, Address address) {
  (void)value, (void)attribute, (void)address;
  return INVALID;
}
