// SPDX-License-Identifier: MIT
// What norms share: the scale of a row.
#pragma once

#include "chunk.h"
#include "reduce.h"

// offset + weight[i], or 1 where there is no weight.
template <typename wide, typename stored>
inline wide scale_at(device const stored* weight, long has_weight, float offset, long i) {
  return has_weight != 0 ? wide(weight[i]) + offset : wide(1.0f);
}
