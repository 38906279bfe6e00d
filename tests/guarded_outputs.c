// A posix_memalign for tests, loaded with LD_PRELOAD: while it is switched on, what the calling thread allocates ends
// right before a page that may not be touched, so a store past the end of an output ends the process. torch allocates
// its tensors by posix_memalign and frees them by free; pieces of ours are recognised by their address and never reused.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

enum { kPage = 4096, kMostPieces = 1 << 16 };

static __thread int switched_on;
static char* pieces[kMostPieces];
static int piece_count;
static int given_out;

void guarded_outputs_switch(int on) { switched_on = on; }
int guarded_outputs_given_out(void) { return given_out; }

static void* guarded(size_t size) {
  const size_t bytes = (size + kPage - 1) / kPage * kPage;
  char* base = mmap(NULL, bytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED || mprotect(base, bytes, PROT_READ | PROT_WRITE) != 0) return NULL;
  const int index = __atomic_fetch_add(&piece_count, 1, __ATOMIC_SEQ_CST);
  if (index >= kMostPieces) return NULL;
  char* data = base + bytes - size;
  pieces[index] = data;
  __atomic_fetch_add(&given_out, 1, __ATOMIC_SEQ_CST);
  return data;
}

int posix_memalign(void** out, size_t alignment, size_t size) {
  static int (*real)(void**, size_t, size_t);
  if (real == NULL) real = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  if (!switched_on || size == 0) return real(out, alignment, size);
  *out = guarded(size);
  return *out == NULL ? ENOMEM : 0;
}

void free(void* data) {
  static void (*real)(void*);
  if (real == NULL) real = (void (*)(void*))dlsym(RTLD_NEXT, "free");
  const int count = __atomic_load_n(&piece_count, __ATOMIC_SEQ_CST);
  for (int i = 0; i < count && i < kMostPieces; ++i) {
    if (pieces[i] == data && data != NULL) return;
  }
  real(data);
}
