// How many calls of kernels chains have made again without asking their operators: tests prove by it that they were.
#pragma once

#include <cstdint>

namespace xopt {

void count_replayed_calls(int64_t count);
int64_t replayed_calls();

}  // namespace xopt
