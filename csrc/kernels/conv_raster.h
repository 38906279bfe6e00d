// The loops of a convolution on a raster (tiles/raster.h), at level `amx`.
//
//   thread      a range of row blocks x a range of panels; a row block is 32 positions of an image's raster
//    chunk        row blocks whose raster stays in L2, a part of an image or several images; weights are read once a chunk
//     strip         panels whose sums stay in L2 until all groups have passed; all panels where there is one group
//      group          channels of the raster, as many as weights of all places of the kernel should stay in L2 for
//       panel chunk     panels whose weights for the group stay in L2 while all row blocks of the chunk pass
//        row block, panel   the block's product; its sums wait for the next group, or go to the epilogue between the
//                           products of the next panel
//
// Against copies of patches, which a tile kernel would spend more time on than on the products where output channels are
// few: an image is copied once, not once for each place of the kernel, and neighbouring places find in L1 what they
// share.
#pragma once

#include "kernels/column_values.h"
#include "kernels/conv_loop.h"
#include "kernels/gemm_background.h"
#include "kernels/panel_output.h"
#include "tiles/block_amx.h"
#include "tiles/raster.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

template <class Block>
struct RasterPlan {
  explicit RasterPlan(const ConvCall& call, bool lines = false)
      : whole_lines(lines),
        raster(call.input, lines, most_channels(call)),
        image_blocks(ceil_div(raster.span(), Block::kRows)),
        blocks(call.images * image_blocks),
        tiles_of_place(ceil_div(raster.channels(), Block::kTileK)),
        group_tiles(ceil_div(raster.most_channels(), Block::kTileK)),
        groups(ceil_div(tiles_of_place, maximum<int64_t>(1, group_tiles))) {
    const int64_t eighth = l2_bytes() / 8 / maximum<int64_t>(1, slice_bytes());
    chunk_panels = groups > 1 ? 1 : minimum<int64_t>(4, maximum<int64_t>(1, eighth));
    if (call.tuning.chunk_panels > 0) chunk_panels = call.tuning.chunk_panels;
    halves_chunks = call.tuning.chunk_rows == TunedRows::half;
    fits = Block::kRows + raster.reach() <= most_positions();
  }

  // What a thread takes of its row blocks and panels at a time.
  struct Cut {
    int64_t blocks, panels;
  };
  Cut cut(int64_t row_blocks, const PackedWeight& w, int64_t panels) const {
    Cut best = groups > 1 ? of_groups(row_blocks, w.panel_bytes, panels) : Cut{whole_images(row_blocks), panels};
    if (halves_chunks) best.blocks = maximum<int64_t>(1, best.blocks / 2);
    return {ceil_div(row_blocks, ceil_div(row_blocks, best.blocks)), best.panels};
  }

  // Of so many row blocks' raster. The last tile may reach beyond the last position.
  int64_t positions(int64_t row_blocks) const {
    const int64_t images = (row_blocks - 1) / image_blocks + 2;
    return (row_blocks + 1) * Block::kRows + images * raster.reach();
  }

  bool chosen(const ConvCall& call, int64_t panels) const {
    if (!fits || call.input.channels == 0 || call.input.channels % Block::kTileK != 0) return false;
    if (call.input.channel_stride != 1) return false;
    if (call.weight.zero_point != nullptr) return false;  // which want the sums of rows, and no row is by itself here
    return call.tuning.path == TunedPath::automatic ? pays(call, panels) : call.tuning.path == TunedPath::raster;
  }

  // Rows of products that are no outputs cost as much as others. Patches would have none, but hold a pixel as often as the
  // kernel meets it: where that is nine times, a step takes about twice as long (1280 x 8 x 8 to 1280 through patches 1.03
  // to 1.6 ms, 512 x 4 x 4, of whose rows every second is none, 1.25 times as long), where it is once, no longer.
  bool pays(const ConvCall& call, int64_t panels) const {
    const PatchesView& v = call.input;
    const int64_t patches = ceil_div(call.images * output_positions(v), Block::kRows);
    const int64_t places = v.kernel[0] * v.kernel[1] * v.kernel[2], apart = v.stride[0] * v.stride[1] * v.stride[2];
    const int64_t few = places >= 2 * apart ? maximum<int64_t>(1, panels / 4) : 0;
    return blocks * panels <= patches * (panels + (places >= 4 * apart ? panels : few));
  }

  const bool whole_lines;  // of the kernel are positions of the raster
  const Raster raster;
  int64_t image_blocks, blocks, chunk_panels;
  int64_t tiles_of_place, group_tiles, groups;  // of channels
  bool halves_chunks, fits;                     // fits: a row block's raster, in L2

  static constexpr int64_t kAccBytes = Block::kRows * kPanelColumns * 4;

 private:
  // One group where an eighth of L2 holds a panel's weights for it. Else equal ones of half of that, so that L1 holds more of
  // a row block's raster, unless few row blocks share what it takes to begin a group.
  static int64_t most_channels(const ConvCall& call) {
    constexpr int64_t kFewRowBlocks = 8;
    const PatchesView& v = call.input;
    const int64_t tiles = ceil_div(v.channels, Block::kTileK), places = v.kernel[0] * v.kernel[1] * v.kernel[2];
    const int64_t longest = l2_bytes() / 8 / (2 * kTileBytes) / places;
    const bool few = call.images * output_positions(v) < kFewRowBlocks * Block::kRows;
    const int64_t most = tiles <= longest || few ? longest : longest / 2;
    const int64_t groups = maximum<int64_t>(1, ceil_div(tiles, maximum<int64_t>(1, most)));
    return maximum<int64_t>(1, ceil_div(tiles, groups)) * Block::kTileK;
  }
  // The fewest bytes that come in: the weights for each chunk, the image for each strip. L2 has room for a chunk's raster, a
  // strip's sums, and weights of which the next are on their way.
  Cut of_groups(int64_t row_blocks, int64_t panel_bytes, int64_t panels) const {
    const int64_t l2 = l2_bytes(), image = groups * row_blocks * Block::kRows * raster.position_bytes();
    Cut best{1, 1};
    int64_t least = INT64_MAX;
    for (int64_t chunks = 1; chunks <= row_blocks && chunks * panels * panel_bytes < least; ++chunks) {
      const int64_t chunk = ceil_div(row_blocks, chunks), bytes = positions(chunk) * raster.position_bytes();
      const int64_t most = (l2 * 3 / 4 - bytes - minimum(2 * slice_bytes(), l2 / 4)) / (chunk * kAccBytes);
      if (bytes > l2 / 2 || most < 1) continue;
      const int64_t strips = ceil_div(panels, most), cost = chunks * panels * panel_bytes + strips * image;
      if (cost >= least) continue;
      least = cost;
      best = {chunk, ceil_div(panels, strips)};
    }
    return best;
  }

  // A panel's weights for a group.
  int64_t slice_bytes() const { return raster.places() * group_tiles * 2 * kTileBytes; }
  int64_t most_positions() const { return l2_bytes() / 2 / raster.position_bytes(); }
  int64_t whole_images(int64_t row_blocks) const {
    const int64_t most = most_positions(), image = image_blocks * Block::kRows + raster.reach();
    const int64_t chunk =
        most >= image ? most / image * image_blocks : maximum<int64_t>(1, (most - raster.reach()) / Block::kRows);
    return minimum(chunk, row_blocks);
  }
};

// A thread's part of a product.
template <class Block>
class RasterThread {
  using Output = PanelOutput<typename Block::Acc, Raster::Outputs>;
  static constexpr int64_t kAccBytes = RasterPlan<Block>::kAccBytes;

 public:
  RasterThread(const GemmCall& call, const Raster& raster, const RasterPlan<Block>& plan, EpilogueFn* epilogue)
      : call_(call),
        w_(call.weight),
        raster_(raster),
        plan_(plan),
        background_(epilogue),
        finishes_panels_(Output::finishes(call)),
        output_(call) {}

  void compute(Range blocks, Range panels, int64_t weights_end) {
    if (blocks.size() == 0) return;
    const typename Block::Scope scope;
    const typename RasterPlan<Block>::Cut cut = plan_.cut(blocks.size(), w_, panels.size());
    const int64_t positions = plan_.positions(cut.blocks);
    plane_bytes_ = positions * raster_.pitch();
    const Scratch planes(static_cast<size_t>(positions * raster_.position_bytes()));
    const Scratch acc(static_cast<size_t>((plan_.groups > 1 ? cut.blocks * cut.panels : 2) * kAccBytes));
    const Scratch places(static_cast<size_t>(raster_.places()) * sizeof(int64_t));
    const Scratch columns(static_cast<size_t>(finishes_panels_ ? panels.size() * Output::kColumnBytes : 0));
    if (finishes_panels_) output_.begin(panels, columns.as<uint8_t>());
    planes_ = planes.as<uint8_t>();
    acc_ = acc.as<uint8_t>();
    places_ = places.as<int64_t>();
    raster_.set_places(plane_bytes_, places_);
    weights_end_ = weights_end;
    for (int64_t block = blocks.begin; block < blocks.end; block += cut.blocks) {
      blocks_ = {block, minimum(block + cut.blocks, blocks.end)};
      for (int64_t panel = panels.begin; panel < panels.end; panel += cut.panels) {
        strip({panel, minimum(panel + cut.panels, panels.end)});
      }
    }
    finish_epilogue();
  }

 private:
  // A row block: where in which image it begins.
  struct Place {
    int64_t image, position;
  };
  Place place(int64_t block) const { return {block / plan_.image_blocks, block % plan_.image_blocks * Block::kRows}; }
  int64_t rows(Place place) const { return minimum(Block::kRows, raster_.span() - place.position); }

  // Where the row block's first position lies in a plane: after the images before it in the chunk.
  uint8_t* place_in_plane(Place place) const {
    const Place first = this->place(blocks_.begin);
    int64_t position = place.position - first.position;
    if (place.image > first.image) {
      const int64_t image = raster_.span() + raster_.reach();
      position = (place.image - first.image) * image - first.position + place.position;
    }
    return planes_ + position * raster_.pitch();
  }

  void strip(Range panels) {
    strip_ = panels;
    if (plan_.groups > 1) finish_epilogue();  // of sums that are about to be overwritten
    for (group_ = 0; group_ < plan_.groups; ++group_) {
      begin_group();
      for (int64_t panel = panels.begin; panel < panels.end; panel += plan_.chunk_panels) {
        const Range chunk{panel, minimum(panel + plan_.chunk_panels, panels.end)};
        for (int64_t block = blocks_.begin; block < blocks_.end; ++block) row_block(block, chunk);
      }
    }
  }

  // The group's channels of the chunk's raster.
  void begin_group() {
    const int64_t tiles = minimum(plan_.group_tiles, plan_.tiles_of_place - group_ * plan_.group_tiles);
    const int64_t first = group_ * plan_.group_tiles * Block::kTileK;
    const Raster::Channels channels{first, minimum(tiles * Block::kTileK, raster_.channels() - first)};
    steps_of_place_ = tiles;
    for (int64_t block = blocks_.begin; block < blocks_.end;) {
      const Place begin = place(block);
      const int64_t of_image = minimum(blocks_.end, (begin.image + 1) * plan_.image_blocks) - block;
      const int64_t end = minimum(begin.position + of_image * Block::kRows, raster_.span());
      raster_.template copy<Block>(channels, begin.image, begin.position, end + raster_.reach(), plane_bytes_,
                                   place_in_plane(begin));
      block += of_image;
    }
    asm volatile("" : : : "memory");  // GCC does not know that tile loads read memory
  }

  void row_block(int64_t block, Range panels) {
    const Place at = place(block);
    const Raster::Outputs outputs(raster_, at.image, at.position);
    const bool last = group_ + 1 == plan_.groups;
    BlockCall call;
    call.kept = &kept_;
    call.a = place_in_plane(at);
    call.a_stride = raster_.pitch();
    call.places = places_;
    call.steps_of_place = steps_of_place_;
    call.weights_of_place = plan_.tiles_of_place * 2 * kTileBytes;
    call.k_tiles = raster_.places() * steps_of_place_;
    call.accumulate = group_ > 0;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      call.b = weights(panel, group_);
      call.acc = sums(block, panel);
      call.backwards = w_.goes_backwards(panel);
      fetch_ahead(block, panel, panels, &call);
      background_.prefetches.clear();
      if (last && !finishes_panels_) {
        background_.prefetches.add_other(call_.epilogue, outputs.row(), rows(at), panel * kPanelColumns, call.k_tiles);
      }
      run_block(rows(at), call);
      if (last) finish_sums(outputs, rows(at), panel, panels, call);
    }
  }

  void run_block(int64_t rows, const BlockCall& call) {
    background_.begin_block();
    if (finishes_panels_) return output_.template run<Block>(rows, call, background_);
    Block::run_places(rows, call, background_);
  }

  uint8_t* sums(int64_t block, int64_t panel) const {
    const int64_t waiting = (panel - strip_.begin) * blocks_.size() + block - blocks_.begin;
    return acc_ + (plan_.groups > 1 ? waiting : turn_) * kAccBytes;
  }

  const uint8_t* weights(int64_t panel, int64_t group) const {
    return w_.panel_data + panel * w_.panel_bytes + group * plan_.group_tiles * 2 * kTileBytes;
  }

  // The weights wanted after these, each row block its share: of the group for the next panels, or the next group's.
  void fetch_ahead(int64_t block, int64_t panel, Range panels, BlockCall* call) const {
    const int64_t lines = lines_ahead(blocks_.size()), done = (block - blocks_.begin) * lines * 64;
    int64_t next = panel + panels.size(), group = group_;
    if (next >= strip_.end && group + 1 < plan_.groups) {
      next = strip_.begin;
      ++group;
    } else if (next >= strip_.end) {
      group = 0;
    }
    const bool more = next < weights_end_ && done < 2 * kTileBytes;
    call->ahead = weights(next, group) + done;
    call->ahead_lines = more ? lines : 0;
  }

  void finish_sums(const Raster::Outputs& outputs, int64_t rows, int64_t panel, Range panels, const BlockCall& call) {
    turn_ ^= 1;
    if (finishes_panels_) return output_.defer(call.acc, outputs, rows, panel, next_panel(panel, panels));
    const EpilogueStrip done = strips_.next(call_.epilogue, w_, {panel, panel + 1}, call.acc);
    background_.defer_epilogue(&call_, done, rows, call.k_tiles, outputs);
  }
  // Of the next row block not all positions may be outputs.
  NextPanel next_panel(int64_t panel, Range panels) const {
    if (panel + 1 < panels.end) return output_.next(0, 1, false);
    return output_.next(Block::kRows, panels.begin - panel, false);
  }
  void finish_epilogue() {
    Block::store(kept_);
    background_.finish_epilogue();
    output_.finish();
  }

  const GemmCall& call_;
  const PackedWeight& w_;
  const Raster& raster_;
  const RasterPlan<Block>& plan_;
  Background<NothingToCopy, Raster::Outputs> background_;
  const bool finishes_panels_;  // a panel at a time, by themselves
  Output output_;

  uint8_t *planes_ = nullptr, *acc_ = nullptr;  // acc: sums of the chunk, or of two blocks in turns
  KeptSums kept_;
  int64_t* places_ = nullptr;
  int64_t group_ = 0, steps_of_place_ = 0, plane_bytes_ = 0, turn_ = 0, weights_end_ = 0;
  Strips<Block> strips_;
  Range blocks_{}, strip_{};  // the chunk, the strip
};

template <class Block>
void conv_on_raster(const ConvCall& call, const RasterPlan<Block>& plan) {
  GemmCall first = product_call(call, 0);
  EpilogueFn* epilogue = select_epilogue<Block>(first);
  first.m = plan.blocks * Block::kRows;
  const GemmPlan<Block> grid(first);
  each_part(call, grid, [&](const GemmCall& gemm, int64_t product, Range blocks, Range panels, int64_t weights_end) {
    const Raster raster(product_input(call, product), plan.whole_lines, plan.raster.most_channels());
    RasterThread<Block>(gemm, raster, plan, epilogue).compute(blocks, panels, weights_end);
  });
}

}  // namespace xopt::XOPT_ISA
#endif
