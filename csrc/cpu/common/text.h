// SPDX-License-Identifier: MIT
// Arguments of ops that are text.
#pragma once

#include <string>

#include "tensor.h"

namespace metalcore::cpu {

// The text of an argument, which is freed. A kernel that declares std::string gets the same from
// torch 2.10 to 2.13, but each call then leaves a copy in memory for good.
inline std::string taken(StringHandle argument) {
  size_t length;
  const char* data;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(argument, &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(argument, &data));
  std::string text(data, length);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(argument));
  return text;
}

}  // namespace metalcore::cpu
