// Texts that arguments are written in: their parts and numbers.
#pragma once

#include <charconv>
#include <string_view>
#include <system_error>

namespace xopt::ops {

// What stands before the next separator, which is taken off as well.
inline std::string_view take(std::string_view* text, char separator) {
  const size_t end = text->find(separator);
  const std::string_view taken = text->substr(0, end);
  *text = end == std::string_view::npos ? std::string_view() : text->substr(end + 1);
  return taken;
}

// False where the text is no such number, or more than one. By std::from_chars, to which the locale is nothing.
template <class Number>
bool read(std::string_view text, Number* value) {
  const char* begin = text.data();
  const char* end = begin + text.size();
  const std::from_chars_result found = std::from_chars(begin, end, *value);
  return found.ec == std::errc() && found.ptr == end;
}

}  // namespace xopt::ops
