// The loops of a convolution on a raster (tiles/raster.h), at level `amx`.
//
//   thread      a range of row blocks x a range of panels; a row block is 32 positions of an image's raster
//    chunk        row blocks whose raster stays in L2, a part of an image or several images; weights are read once a chunk
//     panel chunk   panels whose weights stay in L2 while all row blocks of the chunk pass, or a k block of one panel
//      row block, panel   the block's product; its sums wait for the next k block, or go to the epilogue between the
//                         products of the next panel
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
        raster(call.input, lines),
        image_blocks(ceil_div(raster.span(), Block::kRows)),
        blocks(call.images * image_blocks) {
    const int64_t l2 = l2_bytes();
    const int64_t image = image_blocks * Block::kRows + raster.reach();
    const int64_t positions = l2 / 2 / raster.position_bytes();
    chunk_blocks = positions >= image ? positions / image * image_blocks
                                      : maximum<int64_t>(1, (positions - raster.reach()) / Block::kRows);
    const int64_t k_tiles = raster.steps(Block::kTileK);
    k_blocks = ceil_div(k_tiles, maximum<int64_t>(1, l2 / 8 / (2 * kTileBytes)));
    k_block_tiles = ceil_div(k_tiles, k_blocks);
    chunk_panels = minimum<int64_t>(4, maximum<int64_t>(1, l2 / 8 / (k_block_tiles * 2 * kTileBytes)));
    if (call.tuning.chunk_panels > 0) chunk_panels = call.tuning.chunk_panels;
    if (call.tuning.chunk_rows == TunedRows::half) chunk_blocks = maximum<int64_t>(1, chunk_blocks / 2);
    fits = Block::kRows + raster.reach() <= positions;
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
  int64_t image_blocks, blocks, chunk_blocks, chunk_panels, k_blocks, k_block_tiles;
  bool fits;  // a row block's raster, in L2
};

// A thread's part of a product.
template <class Block>
class RasterThread {
  using Output = PanelOutput<typename Block::Acc, Raster::Outputs>;
  static constexpr int64_t kAccBytes = Block::kRows * kPanelColumns * 4;

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
    const typename Block::Scope scope;
    const int64_t chunks = ceil_div(blocks.size(), plan_.chunk_blocks);
    if (chunks == 0) return;
    const int64_t chunk_blocks = ceil_div(blocks.size(), chunks);
    // The last tile may reach beyond the last position.
    const int64_t images = (chunk_blocks - 1) / plan_.image_blocks + 2;
    const int64_t positions = (chunk_blocks + 1) * Block::kRows + images * raster_.reach();
    plane_bytes_ = positions * raster_.pitch();
    const Scratch planes(static_cast<size_t>(positions * raster_.position_bytes()));
    const Scratch acc(static_cast<size_t>((plan_.k_blocks > 1 ? chunk_blocks * plan_.chunk_panels : 2) * kAccBytes));
    const Scratch offsets(static_cast<size_t>(w_.k_tiles) * sizeof(int64_t));
    const Scratch columns(static_cast<size_t>(finishes_panels_ ? panels.size() * Output::kColumnBytes : 0));
    if (finishes_panels_) output_.begin(panels, columns.as<uint8_t>());
    planes_ = planes.as<uint8_t>();
    acc_ = acc.as<uint8_t>();
    offsets_ = offsets.as<int64_t>();
    raster_.set_offsets(Block::kTileK, plane_bytes_, offsets.as<int64_t>());
    for (int64_t block = blocks.begin; block < blocks.end; block += chunk_blocks) {
      blocks_ = {block, minimum(block + chunk_blocks, blocks.end)};
      copy_chunk();
      for (int64_t panel = panels.begin; panel < panels.end; panel += plan_.chunk_panels) {
        panel_chunk({panel, minimum(panel + plan_.chunk_panels, panels.end)}, weights_end);
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

  void copy_chunk() const {
    for (int64_t block = blocks_.begin; block < blocks_.end;) {
      const Place begin = place(block);
      const int64_t of_image = minimum(blocks_.end, (begin.image + 1) * plan_.image_blocks) - block;
      const int64_t end = minimum(begin.position + of_image * Block::kRows, raster_.span());
      raster_.template copy<Block>(begin.image, begin.position, end + raster_.reach(), plane_bytes_,
                                   place_in_plane(begin));
      block += of_image;
    }
    asm volatile("" : : : "memory");  // GCC does not know that tile loads read memory
  }

  void panel_chunk(Range panels, int64_t last_panel) {
    if (plan_.k_blocks > 1) finish_epilogue();  // of sums that are about to be overwritten
    for (int64_t k_block = 0; k_block < plan_.k_blocks; ++k_block) {
      for (int64_t block = blocks_.begin; block < blocks_.end; ++block) row_block(block, k_block, panels, last_panel);
    }
  }

  void row_block(int64_t block, int64_t k_block, Range panels, int64_t last_panel) {
    const Place at = place(block);
    const Raster::Outputs outputs(raster_, at.image, at.position);
    const int64_t k_tile = k_block * plan_.k_block_tiles;
    const bool last = k_block + 1 == plan_.k_blocks;
    BlockCall call;
    call.kept = &kept_;
    call.a = place_in_plane(at);
    call.a_stride = raster_.pitch();
    call.a_offsets = offsets_ + k_tile;
    call.k_tiles = minimum(plan_.k_block_tiles, w_.k_tiles - k_tile);
    call.accumulate = k_block > 0;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      call.b = weights(panel, k_tile);
      call.acc = sums(block, panel - panels.begin);
      call.backwards = w_.goes_backwards(panel);
      fetch_ahead(block, last ? panel + panels.size() : panel, last ? 0 : k_tile + call.k_tiles, last_panel, &call);
      background_.prefetches.clear();
      if (last && call.k_tiles > 0 && !finishes_panels_) {
        background_.prefetches.add_other(call_.epilogue, outputs.row(), rows(at), panel * kPanelColumns, call.k_tiles);
      }
      run_block(rows(at), call);
      if (last) finish_sums(outputs, rows(at), panel, panels, call);
    }
  }

  void run_block(int64_t rows, const BlockCall& call) {
    background_.begin_block();
    if (finishes_panels_) return output_.template run<Block>(rows, call, background_);
    Block::run(rows, call, background_);
  }

  const uint8_t* weights(int64_t panel, int64_t k_tile) const {
    return w_.panel_data + panel * w_.panel_bytes + k_tile * 2 * kTileBytes;
  }
  uint8_t* sums(int64_t block, int64_t panel_of_chunk) const {
    const int64_t waiting = (block - blocks_.begin) * plan_.chunk_panels + panel_of_chunk;
    return acc_ + (plan_.k_blocks > 1 ? waiting : turn_) * kAccBytes;
  }

  // The weights wanted after these, each row block its share.
  void fetch_ahead(int64_t block, int64_t panel, int64_t k_tile, int64_t last_panel, BlockCall* call) const {
    const int64_t lines = lines_ahead<Block>(blocks_.size());
    const int64_t done = (block - blocks_.begin) * lines * 64 * call->k_tiles;
    const bool more = panel < last_panel && done < call->k_tiles * 2 * kTileBytes;
    call->ahead = weights(panel, k_tile) + done;
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
  const int64_t* offsets_ = nullptr;
  int64_t plane_bytes_ = 0, turn_ = 0;
  Strips<Block> strips_;
  Range blocks_{};  // the chunk
};

template <class Block>
void conv_on_raster(const ConvCall& call, const RasterPlan<Block>& plan) {
  GemmCall first = product_call(call, 0);
  EpilogueFn* epilogue = select_epilogue<Block>(first);
  first.m = plan.blocks * Block::kRows;
  const GemmPlan<Block> grid(first);
  each_part(call, grid, [&](const GemmCall& gemm, int64_t product, Range blocks, Range panels, int64_t weights_end) {
    const Raster raster(product_input(call, product), plan.whole_lines);
    RasterThread<Block>(gemm, raster, plan, epilogue).compute(blocks, panels, weights_end);
  });
}

}  // namespace xopt::XOPT_ISA
#endif
