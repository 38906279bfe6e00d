// See conv_bands.h.
#include "ops/conv_bands.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "runtime/arena.h"
#include "runtime/cpu.h"
#include "runtime/parallel.h"
#include "runtime/shared_parts.h"

namespace xopt::ops {
namespace {

thread_local PlannedConvs* standing = nullptr;

void set_data(ReadyConv* conv, const void* data) { conv->call.input.data = conv->rows.data = data; }

// Lines of an image.
struct Lines {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

int64_t line_positions(const PatchesView& view) { return view.out[0] * view.out[2]; }

// Bytes of an output line.
int64_t line_bytes(const ReadyConv& conv) {
  const Epilogue& e = conv.call.epilogue;
  return line_positions(conv.call.input) * e.out_row_stride * dtype_size(e.out_dtype);
}

int64_t output_bytes(const ReadyConv& conv) { return conv.call.images * conv.call.input.out[1] * line_bytes(conv); }

int64_t line_products(const ReadyConv& conv) {
  const ConvCall& call = conv.call;
  const PatchesView& v = call.input;
  const int64_t channels = conv.depthwise || conv.is_max_pool ? 1 : v.channels;
  const int64_t columns = call.products * call.product_columns + conv.rest_groups * call.group_out;
  return line_positions(v) * columns * channels * v.kernel[1] * v.kernel[2];
}

// The input lines under some output lines.
Lines lines_under(const PatchesView& v, Lines out) {
  const int64_t first = out.begin * v.stride[1] - v.padding[1];
  const int64_t last = (out.end - 1) * v.stride[1] - v.padding[1] + (v.kernel[1] - 1) * v.dilation[1];
  return {std::max<int64_t>(0, first), std::min(v.in[1], last + 1)};
}

// Whether some lines of the output can be computed from the lines under them: there are some under each.
bool has_lines(const ReadyConv& conv) {
  const PatchesView& v = conv.call.input;
  const bool is_flat = v.in[0] == 1 && v.kernel[0] == 1 && v.padding[0] == 0 && v.out[0] == 1;
  const bool meets_input =
      v.padding[1] <= (v.kernel[1] - 1) * v.dilation[1] && (v.out[1] - 1) * v.stride[1] - v.padding[1] < v.in[1];
  // Short lines could be products of a few rows.
  const bool rows_in_order =
      !conv.is_product || (v.in[2] >= kLeastRowsOfMany && conv.rows.inner_rows == conv.call.images * v.in[1] * v.in[2]);
  return is_flat && meets_input && rows_in_order && (conv.call.weight.k_tiles > 0 || conv.is_max_pool);
}

// How images are cut into bands of the last convolution's output lines.
class Bands {
 public:
  Bands(const ReadyConv* convs, size_t count, int64_t threads)
      : convs_(convs),
        count_(count),
        threads_(threads),
        images_(convs->call.images),
        lines_(convs[count - 1].call.input.out[1]) {}

  // Whether it pays.
  bool plan() {
    const int64_t l2 = l2_bytes();
    int64_t between = 0, weights = 0, products = 0, read_again = 0;
    for (size_t i = 0; i < count_; ++i) {
      if (!has_lines(convs_[i])) return false;
      const ConvCall& call = convs_[i].call;
      weights += call.weight.panels * call.weight.panel_bytes;
      products += images_ * call.input.out[1] * line_products(convs_[i]);
      if (i + 1 < count_) between += output_bytes(convs_[i]);
      if (adds_input(convs_[i])) read_again += output_bytes(convs_[i]);
    }
    // What stays in L2 anyway gains nothing; little is gained where the first reads and the last writes far more; and
    // weights are read again for each band.
    if (between / threads_ < l2 / 2 || between * 2 + read_again < outer_bytes() || weights > l2 * 3 / 8) return false;
    for (int64_t lines = lines_; lines > 0; lines -= ceil_div(lines, int64_t{8})) {
      bands_ = ceil_div(lines_, lines);
      while (!shares_evenly()) ++bands_;
      if (bands_ > lines_) return false;
      measure();
      if (scratch_bytes() + (read_again > 0 ? most_input_bytes_ : 0) > l2 * 3 / 8) continue;
      // Where threads share an image, each begins with lines that another computes as well.
      const int64_t twice = images_ % threads_ == 0 ? 0 : threads_ * start_products_;
      return twice <= products / 8 && products / (images_ * bands_) >= kLeastProducts;
    }
    return false;
  }

  void run() const {
    // Threads take over whole images from each other where equal threads would come out even, and else bands: a piece
    // that does not go on where the thread's last one ended begins with lines computed before.
    const bool by_images = images_ >= 8 * threads_ || (images_ >= 2 * threads_ && images_ % threads_ == 0);
    const int64_t unit = by_images ? bands_ : 1, units = images_ * bands_ / unit;
    const int64_t parts = std::min(threads_, units);
    SharedParts shared(parts, 1);
    shared.deal(units);
    parallel_for_some(static_cast<int>(parts), [&](int thread, int count) {
      const Scratch between(static_cast<size_t>(scratch_bytes()));
      ImageLines held{};
      int64_t next = -1;
      shared.each(thread, count, [&](int64_t, int64_t begin, int64_t end) {
        for (int64_t band = begin * unit; band < end * unit; ++band) {
          if (band != next || band % bands_ == 0) held = {};
          run_band(band / bands_, band % bands_, between.as<uint8_t>(), &held);
          next = band + 1;
        }
      });
    });
  }

 private:
  static constexpr int64_t kLeastProducts = 500'000;  // of a band: what is looked up for each call takes a microsecond

  using ImageLines = std::array<Lines, PlannedConvs::kTogether>;  // of an image, for each convolution

  bool shares_evenly() const { return images_ * bands_ % threads_ == 0 || images_ * bands_ >= 8 * threads_; }

  // Whether it adds what the first one reads to its result (a bottleneck of a residual net): that is still in L2 then.
  bool adds_input(const ReadyConv& conv) const { return conv.call.epilogue.other == convs_->call.input.data; }

  // What is read and written in bands as otherwise: input, output, and what else is added to results.
  int64_t outer_bytes() const {
    const PatchesView& v = convs_->call.input;
    int64_t bytes = images_ * v.in[1] * v.in[2] * v.channels * dtype_size(v.dtype) + output_bytes(convs_[count_ - 1]);
    for (size_t i = 0; i < count_; ++i) {
      const bool adds = convs_[i].call.epilogue.other != nullptr && !adds_input(convs_[i]);
      bytes += adds ? output_bytes(convs_[i]) : 0;
    }
    return bytes;
  }

  // The output lines of each convolution that a band needs.
  ImageLines lines_of(int64_t band) const {
    ImageLines lines{};
    lines[count_ - 1] = {lines_ * band / bands_, lines_ * (band + 1) / bands_};
    for (size_t i = count_ - 1; i > 0; --i) lines[i - 1] = lines_under(convs_[i].call.input, lines[i]);
    return lines;
  }

  void measure() {
    const PatchesView& v = convs_->call.input;
    most_lines_.fill(0);
    most_input_bytes_ = 0;
    for (int64_t band = 0; band < bands_; ++band) {
      const ImageLines lines = lines_of(band);
      const int64_t pixels = lines_under(v, lines[0]).count() * v.in[2];
      most_input_bytes_ = std::max(most_input_bytes_, pixels * v.channels * dtype_size(v.dtype));
      for (size_t i = 0; i < count_; ++i) most_lines_[i] = std::max(most_lines_[i], lines[i].count());
    }
    start_products_ = 0;
    for (size_t i = 0; i < count_; ++i) {
      const int64_t shared = most_lines_[i] - convs_[i].call.input.out[1] / bands_;
      start_products_ += std::max<int64_t>(0, shared) * line_products(convs_[i]);
    }
  }

  // Of a thread: what each convolution but the last writes in a band.
  int64_t scratch_bytes() const {
    int64_t bytes = 0;
    for (size_t i = 0; i + 1 < count_; ++i) bytes += scratch_bytes_of(i);
    return bytes;
  }
  int64_t scratch_bytes_of(size_t i) const { return round_up(most_lines_[i] * line_bytes(convs_[i]), int64_t{64}); }

  // `held`: the lines that the band before has left in scratch. Those that this one needs too move to the front.
  void run_band(int64_t image, int64_t band, uint8_t* scratch, ImageLines* held) const {
    const ImageLines lines = lines_of(band);
    const uint8_t* input = nullptr;  // lines of the convolution before
    for (size_t i = 0; i < count_; ++i) {
      Lines wanted = lines[i];
      const bool is_last = i + 1 == count_;
      if (!is_last) {
        const Lines& before = (*held)[i];
        const int64_t kept = std::max<int64_t>(0, before.end - wanted.begin), bytes = line_bytes(convs_[i]);
        if (kept > 0) {
          std::memmove(scratch, scratch + (wanted.begin - before.begin) * bytes, static_cast<size_t>(kept * bytes));
          wanted.begin = before.end;
        }
        (*held)[i] = lines[i];
      }
      if (wanted.count() > 0) {
        ReadyConv part = part_of(convs_[i], image, wanted);
        if (input != nullptr) {
          const PatchesView& v = convs_[i].call.input;
          const int64_t line = lines_under(v, wanted).begin - lines[i - 1].begin;
          set_data(&part, input + line * v.in_stride[1] * dtype_size(v.dtype));
        }
        if (!is_last) {
          part.call.epilogue.out = scratch + (wanted.begin - lines[i].begin) * line_bytes(convs_[i]);
        }
        run_ready(part);
      }
      input = scratch;
      if (!is_last) scratch += scratch_bytes_of(i);
    }
  }

  // Some output lines of an image.
  static ReadyConv part_of(const ReadyConv& whole, int64_t image, Lines lines) {
    ReadyConv part = whole;
    PatchesView& v = part.call.input;
    const Lines under = lines_under(v, lines);
    const int64_t start = image * v.image_stride + under.begin * v.in_stride[1];
    set_data(&part, static_cast<const uint8_t*>(v.data) + start * dtype_size(v.dtype));
    part.call.images = 1;
    v.padding[1] -= lines.begin * v.stride[1] - under.begin;
    v.in[1] = under.count();
    v.out[1] = lines.count();
    Epilogue& e = part.call.epilogue;
    const int64_t row = (image * whole.call.input.out[1] + lines.begin) * v.out[2];
    e.out = static_cast<uint8_t*>(e.out) + row * e.out_row_stride * dtype_size(e.out_dtype);
    if (e.other != nullptr) {
      e.other = static_cast<const uint8_t*>(e.other) + row * e.other_row_stride * dtype_size(e.other_dtype);
    }
    part.rows.inner_rows = v.in[1] * v.in[2];
    return part;
  }

  const ReadyConv* const convs_;
  const size_t count_;
  const int64_t threads_;
  const int64_t images_, lines_;  // lines of an image of the last output
  int64_t bands_ = 1;             // of an image
  int64_t start_products_ = 0;    // multiply-adds that a band repeats where the one before it is another thread's
  std::array<int64_t, PlannedConvs::kTogether> most_lines_{};
  int64_t most_input_bytes_ = 0;  // under a band
};

}  // namespace

PlannedConvs::PlannedConvs(int64_t threads) : outer_(standing), threads_(threads) {
  convs_.reserve(kMost);
  standing = this;
}
PlannedConvs::~PlannedConvs() { standing = outer_; }
PlannedConvs* PlannedConvs::current() { return standing; }

// Results have their channels last, so that no convolution reads a copy of the one before's, which would be of nothing.
void PlannedConvs::add(const ReadyConv& conv) {
  if (!convs_.empty() && conv.call.input.data != convs_.back().call.epilogue.out) {
    throw std::logic_error("xopt: a planned convolution does not read the one before it");
  }
  convs_.push_back(conv);
}

bool PlannedConvs::may_go_on() const {
  const int64_t most = static_cast<int64_t>(kMost) * output_bytes(convs_.back());
  return convs_.size() < kMost && most / threads_ >= l2_bytes() / 2;
}

// All in bands or, where that does not pay, those before and behind the smallest result.
void PlannedConvs::find_parts(size_t begin, size_t end, std::vector<size_t>* ends) const {
  const size_t count = end - begin;
  const bool together = count <= kTogether && Bands(convs_.data() + begin, count, threads_).plan();
  if (count == 1 || together) return ends->push_back(end);
  size_t middle = begin + 1;
  for (size_t i = middle + 1; i < end; ++i) {
    if (output_bytes(convs_[i - 1]) < output_bytes(convs_[middle - 1])) middle = i;
  }
  find_parts(begin, middle, ends);
  find_parts(middle, end, ends);
}

std::vector<size_t> PlannedConvs::parts() const {
  std::vector<size_t> ends;
  if (!convs_.empty()) find_parts(0, convs_.size(), &ends);
  return ends;
}

bool PlannedConvs::run() const {
  Bands bands(convs_.data(), convs_.size(), threads_);
  if (!bands.plan()) return false;
  bands.run();
  return true;
}

}  // namespace xopt::ops
