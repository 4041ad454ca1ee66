// SPDX-License-Identifier: MIT
// What becomes of accesses that miss their memory: the kernel goes on, a read gives zeros and a
// write is taken back. Included by checked.h, once.
#pragma once

namespace msl {
namespace {

constexpr size_t kStrayPages = 1024;
constexpr size_t kMaxStrayBytes = 4096;

// Pages of zeros that were put where nothing was, and the write that is to be taken back.
struct Stray {
  char* pages[kStrayPages];
  size_t page_count;
  char* written;
  uint32_t size;
  char before[kMaxStrayBytes];
};
Stray g_stray;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Takes back what a stray write has left.
MSL_INLINE void settle_stray() {
  if (__builtin_expect(g_stray.size != 0, 0)) {
    memcpy(g_stray.written, g_stray.before, g_stray.size);
    g_stray.size = 0;
  }
}

// The pages go with the launch.
void forget_strays() {
  settle_stray();
  for (size_t i = 0; i < g_stray.page_count; ++i) {
    mmap(g_stray.pages[i], page_bytes(), PROT_NONE, kLazyMemory | MAP_FIXED, -1, 0);
  }
  g_stray.page_count = 0;
}

bool is_mapped(const char* page, const Region& r, bool is_arena) {
  const size_t whole =
      is_arena ? kArenaBytes : (r.bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  if (page >= r.address && page < r.address + (r.bound || is_arena ? whole : 0)) return true;
  for (size_t i = 0; i < g_stray.page_count; ++i) {
    if (g_stray.pages[i] == page) return true;
  }
  return false;
}

// Makes the access possible; false when it is out of all proportion.
bool allow_stray(char* p, uint32_t size, uint32_t region, bool writes) {
  if (size > kMaxStrayBytes) return false;
  const Region& r = memory().regions[region];
  const size_t step = page_bytes();
  char* page = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) / step * step);
  for (; page < p + size; page += step) {
    if (is_mapped(page, r, region == kArenaRegion)) continue;
    if (g_stray.page_count == kStrayPages) return false;
    const int access = PROT_READ | PROT_WRITE;
    if (mmap(page, step, access, kLazyMemory | MAP_FIXED, -1, 0) == MAP_FAILED) return false;
    g_stray.pages[g_stray.page_count++] = page;
  }
  if (writes) {
    g_stray.written = p;
    g_stray.size = size;
    memcpy(g_stray.before, p, size);
  }
  return true;
}

// The element count in a type's name as the compiler writes it, 'float[4]'.
uint64_t elements_of(const char* type) {
  while (*type && *type != '[') ++type;
  uint64_t count = 0;
  if (*type) {
    for (++type; *type >= '0' && *type <= '9'; ++type) count = count * 10 + uint64_t(*type - '0');
  }
  return count;
}

// What the compiler knows of an index into an array.
struct IndexedArray {
  const char* file;
  uint32_t line, column;
  struct Type {
    uint16_t kind, info;
    char name[1];
  } const *array, *index;
};

void record_index(const IndexedArray& array, uint64_t index, uint32_t site) {
  const Worker& w = here();
  Found f{};
  f.kind = kThreadArrayBounds;
  f.site = site;
  f.thread = w.current;
  f.group = w.group_index;
  f.other_thread = f.other_group = f.region = kNone;
  const unsigned unused = 64 - (1u << (array.index->info >> 1));
  const int64_t widened = static_cast<int64_t>(index << unused);
  f.offset = array.index->info & 1 ? widened >> unused : static_cast<int64_t>(index);
  f.block_bytes = elements_of(array.array->name);
  record(f);
}

}  // namespace
}  // namespace msl
