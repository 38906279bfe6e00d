// Parts of a call that threads share: each begins with its own, and then takes over pieces of what others have left.
//
// Threads are seldom equally fast. Where another process has the other hyperthread of one of two cores, that core's tile
// products take twice the time, and an equal share would keep the other core waiting for a third of it.
#pragma once

#include <cstdint>

#include "runtime/arena.h"

namespace xopt {

class SharedParts {
 public:
  // No piece has fewer units than `least`, unless its part has.
  SharedParts(int64_t parts, int64_t least);

  // Before any thread takes a piece: the units of a part, or of all of them, dealt out evenly.
  void set(int64_t part, int64_t begin, int64_t end);
  void deal(int64_t units);

  // Calls body(part, begin, end) for piece after piece until no part has any left. To be called by each of `threads`
  // threads.
  template <class Body>
  void each(int thread, int threads, const Body& body) {
    const int64_t first = parts_ * thread / threads;
    for (int64_t i = 0; i < parts_; ++i) {
      const int64_t part = first + i < parts_ ? first + i : first + i - parts_;
      int64_t begin = 0, end = 0;
      while (take(part, threads, &begin, &end)) body(part, begin, end);
    }
  }

 private:
  struct Part;
  // The next units of a part: half of what is left, so that the last pieces, which others may have to wait for, are small.
  bool take(int64_t part, int threads, int64_t* begin, int64_t* end);

  const int64_t parts_, least_;
  const Scratch memory_;
};

}  // namespace xopt
