// SPDX-License-Identifier: MIT
// What norms share: the scale of a row.
#pragma once

#include "chunk.h"
#include "reduce.h"

// offset + weight[i], or 1 where there is no weight.
template <typename wide, bool WEIGHT, typename stored>
inline wide scale_at(device const stored* weight, float offset, uint i) {
  return WEIGHT ? wide(weight[i]) + offset : wide(1.0f);
}
