// SPDX-License-Identifier: MIT
// Runs a launch again: with its threads in another order, or with other values in memory that
// nobody wrote. Included by checked.h, once.
#pragma once

namespace msl {
namespace {

struct Copies {
  char* of[kBuffers];
  void take() {
    for (unsigned i = 0; i < kBuffers; ++i) {
      const Region& r = memory().regions[i];
      of[i] = nullptr;
      if (!r.bound || r.read_only || !r.bytes) continue;
      of[i] = static_cast<char*>(lazy_zeros(r.bytes));
      memcpy(of[i], r.address, r.bytes);
    }
  }
  void put_back() const {
    for (unsigned i = 0; i < kBuffers; ++i) {
      if (of[i]) memcpy(memory().regions[i].address, of[i], memory().regions[i].bytes);
    }
  }
  void drop() {
    for (unsigned i = 0; i < kBuffers; ++i) {
      if (of[i]) free_bytes(of[i], memory().regions[i].bytes);
    }
  }
};

// Sums of floats in another order may differ by rounding.
bool differs(const Region& r, const char* before, uint64_t at) {
  if (r.address[at] == before[at]) return false;
  if (!r.float_atomics) return true;
  float a, b;
  memcpy(&a, r.address + at / 4 * 4, 4);
  memcpy(&b, before + at / 4 * 4, 4);
  const float size = __builtin_fabsf(a) + __builtin_fabsf(b);
  return !(__builtin_fabsf(a - b) <= 1e-4f * size + 1e-5f);
}

bool found_harm() {
  const Session& s = *memory().session;
  for (uint32_t i = 0; i < s.found_count; ++i) {
    if (!s.found[i].harmless) return true;
  }
  return false;
}

bool found_unwritten() {
  const Session& s = *memory().session;
  for (uint32_t i = 0; i < s.found_count; ++i) {
    if (s.found[i].kind == kUninitialized) return true;
  }
  return false;
}

// Which bytes of the buffers had a value when the launch began; null where all had.
struct Marks {
  uint8_t* before[kBuffers];
  void take() {
    for (unsigned i = 0; i < kBuffers; ++i) {
      const Region& r = memory().regions[i];
      before[i] = nullptr;
      if (!r.written_offset || !r.bytes) continue;
      before[i] = static_cast<uint8_t*>(lazy_zeros(r.bytes));
      void* known = shared_bytes(r.written_offset, r.bytes);
      memcpy(before[i], known, r.bytes);
      free_bytes(known, r.bytes);
    }
  }
  void poison(int value) const {
    for (unsigned i = 0; i < kBuffers; ++i) {
      const Region& r = memory().regions[i];
      for (uint64_t b = 0; before[i] && b < r.bytes; ++b) {
        if (!before[i][b]) r.address[b] = static_cast<char>(value);
      }
    }
  }
  void drop() {
    for (unsigned i = 0; i < kBuffers; ++i) {
      if (before[i]) free_bytes(before[i], memory().regions[i].bytes);
    }
  }
};

// Whether a region holds `wanted`, wherever something was written.
bool holds(const Region& r, const char* wanted) {
  if (!memcmp(r.address, wanted, r.bytes)) return true;
  if (!r.written_offset) return false;
  const uint8_t* written = static_cast<uint8_t*>(shared_bytes(r.written_offset, r.bytes));
  bool same = true;
  for (uint64_t b = 0; same && b < r.bytes; ++b) same = !written[b] || r.address[b] == wanted[b];
  free_bytes(const_cast<uint8_t*>(written), r.bytes);
  return same;
}

// Runs again with other values in memory that nobody wrote: reads of it are harmless where no
// result is another. Zero, a large number and its negative would show in a sum, a maximum, a
// comparison.
void weigh_unwritten(Launch& launch, const Copies& inputs, const Marks& marks) {
  Copies result;
  result.take();
  bool same = true;
  const int values[] = {0x00, 0x7e, 0xfe};
  for (int value : values) {
    if (!same) break;
    inputs.put_back();
    marks.poison(value);
    g_poison = value;
    same = run_guarded(launch, false);
    for (unsigned i = 0; same && i < kBuffers; ++i) {
      if (result.of[i]) same = holds(memory().regions[i], result.of[i]);
    }
  }
  g_poison = 0xff;
  Session& s = *memory().session;
  for (uint32_t i = 0; same && i < s.found_count; ++i) {
    s.found[i].harmless = s.found[i].kind == kUninitialized;
  }
  result.put_back();
  result.drop();
}

void compare_schedules(Launch& launch, const Copies& inputs, int first_order) {
  Copies result;
  result.take();
  const int orders[] = {kAscending, kDescending, kRandom};
  for (int order : orders) {
    // Another process may see to one of them.
    if (order == first_order || order == memory().session->order || found_harm()) continue;
    inputs.put_back();
    launch.order = order;
    launch.seed = 12345;
    if (!run_guarded(launch, false)) break;
    for (unsigned i = 0; i < kBuffers; ++i) {
      const Region& r = memory().regions[i];
      if (!result.of[i] || !memcmp(r.address, result.of[i], r.bytes)) continue;
      uint64_t at = 0;
      while (at < r.bytes && !differs(r, result.of[i], at)) ++at;
      if (at == r.bytes) continue;
      Found f{};
      f.kind = kScheduleDependence;
      f.thread = f.other_thread = f.group = f.other_group = kNone;
      f.region = i;
      f.size = static_cast<uint32_t>(order);
      f.offset = static_cast<int64_t>(at);
      record(f);
    }
  }
  result.put_back();
  result.drop();
}

}  // namespace
}  // namespace msl
