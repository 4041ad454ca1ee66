// SPDX-License-Identifier: MIT
// Put in front of every rewritten kernel source. Later headers need the earlier ones.
#pragma once

// clang-format off
#include "abi.h"
#include "types.h"
#include "limits.h"
#include "vector.h"
#include "math.h"
#include "integer.h"
#include "pack.h"
#include "simdgroup.h"
#include "simdgroup_matrix.h"
#include "atomic.h"
#include "builtins.h"
#include "logging.h"
#include "kernel.h"
#include "wide_vector.h"
#include "air.h"
#include "tensor.h"
#include "matmul.h"
#include "sampler.h"
#include "texture.h"
#include "fragment.h"
#include "unsimulated.h"
// clang-format on
