// Deliberate errors, compiled into the sanitized libxopt_core.so only. run_canary.py makes each of them and expects the
// sanitizer to end the process: a sanitizer run that could not have failed proves nothing.
#include <climits>
#include <cstdlib>

extern "C" {

int xopt_canary_heap_overflow(int index) {
  int* volatile values = static_cast<int*>(std::malloc(4 * sizeof(int)));  // its size is unknown to UBSan
  values[0] = 1;
  const int value = values[index];
  std::free(values);
  return value;
}

int xopt_canary_signed_overflow(int addend) { return INT_MAX + addend; }
}
