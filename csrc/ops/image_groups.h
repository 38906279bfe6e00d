// Convolutions of many images that are made again (ops/replay.h), some images at a time: what one of them computes is still
// in the caches when the next reads it. Bands (conv_bands.h) do so for two or three whose results nobody else reads, as far
// as L2 goes; here it is whatever lies between two other operators, residual sums included, and the cache beyond. Whether it
// pays is found by trying (ImagesChoice).
#pragma once

#include "ops/replay.h"

namespace xopt::ops {

// Those of a recording's steps that are worth it, in order. Called while results have no place in the block yet.
std::vector<ImageGroup> image_groups(const std::vector<RecordedStep>& steps, int64_t threads);

// A step of such a group for images [first, first + count).
void replay_images(const RecordedStep& step, int64_t threads, const Addresses& at, int64_t first, int64_t count);

}  // namespace xopt::ops
