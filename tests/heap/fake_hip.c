// As much of the HIP runtime as the host code of Iris calls, on memory files: every process of a host can map them.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_FOUND = 900, PAGE = 2 << 20, MOST = 1024 };

typedef struct { char *base; size_t size; int fd; } Allocation;
static Allocation allocations[MOST];
static int count, device;

static Allocation *found(const char *address) {
  for (int i = 0; i < count; i++)
    if (address >= allocations[i].base && address < allocations[i].base + allocations[i].size) return &allocations[i];
  return NULL;
}

int hipGetDeviceCount(int *number) { *number = 8; return OK; }
int hipSetDevice(int number) { device = number; return OK; }
int hipGetDevice(int *number) { *number = device; return OK; }
int hipDeviceSynchronize(void) { return OK; }
const char *hipGetErrorString(int error) { return error == NO_MEMORY ? "out of memory" : error == INVALID ? "invalid argument" : "not found"; }

int hipDeviceGetAttribute(int *value, int attribute, int number) {
  (void)number;
  *value = attribute == 63 ? 304 : attribute == 10018 ? 8 : attribute == 10017 ? 100000 : 0;  // processors, dies, clock
  return OK;
}

// At whole pages of 2 MiB. FAKE_LIMIT is the most bytes of an allocation.
int hipMalloc(void **address, size_t wanted) {
  size_t size = (wanted + PAGE - 1) & ~(size_t)(PAGE - 1);
  const char *limit = getenv("FAKE_LIMIT");
  if ((limit && size > strtoull(limit, NULL, 10)) || count == MOST) return NO_MEMORY;
  int fd = memfd_create("fake-hip", 0);
  if (fd < 0 || ftruncate(fd, (off_t)size)) return NO_MEMORY;
  char *room = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return NO_MEMORY;
  char *start = (char *)(((size_t)room + PAGE - 1) & ~(size_t)(PAGE - 1));
  if (mmap(start, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return NO_MEMORY;
  allocations[count++] = (Allocation){start, size, fd};
  *address = start;
  return OK;
}
int hipExtMallocWithFlags(void **address, size_t size, unsigned flags) { (void)flags; return hipMalloc(address, size); }
int hipFree(void *address) { (void)address; return OK; }

int hipMemGetAddressRange(void **base, size_t *size, void *address) {
  Allocation *one = found(address);
  if (!one) return NOT_FOUND;
  *base = one->base;
  *size = one->size;
  return OK;
}

// Inter-process handles.
typedef struct { pid_t pid; int fd; size_t size; char rest[64 - sizeof(pid_t) - sizeof(int) - sizeof(size_t)]; } Handle;

int hipIpcGetMemHandle(Handle *handle, void *address) {
  Allocation *one = found(address);
  if (!one) return INVALID;
  memset(handle, 0, sizeof *handle);
  handle->pid = getpid();
  handle->fd = one->fd;
  handle->size = one->size;
  return OK;
}

static void *mapped(int fd, size_t size, size_t offset) {
  void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
  return address == MAP_FAILED ? NULL : address;
}

int hipIpcOpenMemHandle(void **address, Handle handle, unsigned flags) {
  (void)flags;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)handle.pid, handle.fd);
  int fd = open(path, O_RDWR);
  if (fd < 0) return INVALID;
  *address = mapped(fd, handle.size, 0);
  close(fd);
  return *address ? OK : NO_MEMORY;
}
int hipIpcCloseMemHandle(void *address) { (void)address; return OK; }

// DMA buffers, whose file descriptors Iris passes through sockets.
typedef struct { int fd; char *address; size_t size; } External;
typedef struct { int type, padding; union { int fd; void *words[2]; } handle; unsigned long long size; unsigned flags; } ExternalOf;
typedef struct { unsigned long long offset, size; unsigned flags; } BufferOf;

int hipMemGetHandleForAddressRange(int *fd, void *address, size_t size, int type, unsigned long long flags) {
  (void)flags;
  Allocation *one = found(address);
  if (!one || (char *)address + size > one->base + one->size || type != 1) return INVALID;
  *fd = dup(one->fd);
  return *fd < 0 ? INVALID : OK;
}

int hipImportExternalMemory(External **external, const ExternalOf *of) {
  if (of->type != 1) return INVALID;
  *external = calloc(1, sizeof **external);
  (*external)->fd = dup(of->handle.fd);
  return OK;
}

int hipExternalMemoryGetMappedBuffer(void **address, External *external, const BufferOf *of) {
  *address = mapped(external->fd, of->size, of->offset);
  if (!*address) return NO_MEMORY;
  external->address = *address;
  external->size = of->size;
  return OK;
}

// Nothing else gets the addresses, so that a late use of them faults.
int hipDestroyExternalMemory(External *external) {
  if (external->address) {
    munmap(external->address, external->size);
    mmap(external->address, external->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  }
  close(external->fd);
  free(external);
  return OK;
}
