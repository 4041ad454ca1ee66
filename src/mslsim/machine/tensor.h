// SPDX-License-Identifier: MIT
// Tensors of Metal 4: memory with extents and strides, of which the first is the innermost. They
// are in msl_tensor, which <metal_tensor> makes part of metal.
#pragma once

namespace metal {
inline namespace msl_tensor_constants {
constexpr ulong msl_any_extent = ~0ul;
}
namespace msl_tensor {
constexpr ulong dynamic_extent = msl_any_extent;
template <typename T>
constexpr T dynamic_length_v = T(-1);

template <typename I, ulong... E>
struct extents {
  using index_type = I;
  using size_type = ulong;
  static constexpr ulong fixed[sizeof...(E)] = {E...};
  I sizes[sizeof...(E)];
  constexpr extents() : sizes{I(E == msl_any_extent ? 0 : E)...} {}
  // All of them, or only those that are dynamic.
  template <typename... U, enable_if_t<(sizeof...(U) > 0), int> = 0>
  constexpr extents(U... given) : extents() {
    const I values[] = {I(given)...};
    unsigned next = 0;
    for (unsigned i = 0; i < sizeof...(E); ++i) {
      const bool dynamic = fixed[i] == msl_any_extent;
      if (sizeof...(U) == sizeof...(E)) {
        sizes[i] = values[i];
      } else if (dynamic && next < sizeof...(U)) {
        sizes[i] = values[next++];
      }
    }
  }
  static constexpr ulong rank() { return sizeof...(E); }
  static constexpr ulong static_extent(ulong i) { return fixed[i]; }
  constexpr I extent(ulong i) const { return sizes[i]; }
};
template <typename I, ulong R, ulong... E>
struct msl_dextents : msl_dextents<I, R - 1, msl_any_extent, E...> {};
template <typename I, ulong... E>
struct msl_dextents<I, 0, E...> {
  using type = extents<I, E...>;
};
template <typename I, ulong R>
using dextents = typename msl_dextents<I, R>::type;

struct tensor_handle {};
struct tensor_offset {};
struct tensor_inline {};

template <typename T, typename E, typename D = tensor_handle, typename... Tags>
struct tensor {
  using element_type = T;
  using value_type = remove_cv_t<T>;
  using extents_type = E;
  using index_type = typename E::index_type;
  static constexpr ulong kRank = E::rank();
  T* data = nullptr;
  E size;
  long stride[kRank] = {};

  tensor() = default;
  tensor(T* p, E e) : data(p), size(e) {
    stride[0] = 1;
    for (ulong i = 1; i < kRank; ++i) stride[i] = stride[i - 1] * long(e.extent(i - 1));
  }
  template <typename S>
  tensor(T* p, E e, const S& strides) : data(p), size(e) {
    for (ulong i = 0; i < kRank; ++i) stride[i] = long(strides[i]);
  }
  static constexpr ulong get_rank() { return kRank; }
  static constexpr ulong rank() { return kRank; }
  E get_extents() const { return size; }
  E extents() const { return size; }
  index_type get_extent(ulong i) const { return size.extent(i); }
  template <int I>
  index_type get_extent() const {
    return size.extent(I);
  }
  index_type get_stride(ulong i) const { return index_type(stride[i]); }
  template <int I>
  index_type get_stride() const {
    return index_type(stride[I]);
  }
  T* data_pointer() const { return data; }
  template <typename... I>
  T& at(I... index) const {
    const long place[] = {long(index)...};
    long offset = 0;
    for (ulong i = 0; i < sizeof...(I); ++i) offset += place[i] * stride[i];
    return data[offset];
  }
  template <typename... I>
  T& operator()(I... index) const {
    return at(index...);
  }
  template <typename I, ulong N>
  T& operator[](const array<I, N>& index) const {
    long offset = 0;
    for (ulong i = 0; i < N; ++i) offset += long(index[i]) * stride[i];
    return data[offset];
  }
  // The part from these offsets on: to the end, or of so many elements.
  template <ulong... S, typename... I>
  auto slice(I... offsets) const {
    static_assert(sizeof...(I) == kRank, "slice needs an offset for each dimension");
    const long from[] = {long(offsets)...};
    if constexpr (sizeof...(S) == 0) {
      return part<typename msl_dextents<index_type, kRank>::type>(from, nullptr);
    } else {
      static_assert(sizeof...(S) == kRank, "slice needs an extent for each dimension");
      const ulong lengths[] = {S...};
      return part<metal::msl_tensor::extents<index_type, S...>>(from, lengths);
    }
  }

  template <typename F>
  tensor<T, F, tensor_offset> part(const long* from, const ulong* lengths) const {
    tensor<T, F, tensor_offset> r;
    r.data = data;
    for (ulong i = 0; i < kRank; ++i) {
      r.data += from[i] * stride[i];
      r.stride[i] = stride[i];
      const long left = long(size.extent(i)) - from[i];
      const bool open = !lengths || lengths[i] == msl_any_extent;
      r.size.sizes[i] = index_type(open ? left : long(lengths[i]));
    }
    return r;
  }
};
template <typename T, typename E>
tensor(T*, E) -> tensor<T, E, tensor_inline>;
template <typename T, typename E, typename S>
tensor(T*, E, S) -> tensor<T, E, tensor_inline>;

template <int N>
struct execution_threads {
  static constexpr int threads = N;
};
template <int N>
struct execution_simdgroups {
  static constexpr int threads = 32 * N;
};
using execution_thread = execution_threads<1>;
using execution_simdgroup = execution_simdgroups<1>;

// Where a thread of a scope has the elements of a matrix: in blocks of 16 x 16, eight in each lane,
// two times four side by side. Blocks go row by row, and in turn to the simdgroups of the scope.
template <int Rows, int Columns, int Threads>
struct msl_layout {
  static constexpr int kDown = (Rows + 15) / 16, kAcross = (Columns + 15) / 16;
  static constexpr int kSimdgroups = Threads < 32 ? 1 : Threads / 32;
  static constexpr int kBlocks = (kDown * kAcross + kSimdgroups - 1) / kSimdgroups;
  // A scope of one thread holds all of it.
  static constexpr int capacity = Threads < 32 ? Rows * Columns : kBlocks * 8;
  int row, column;
  msl_layout(uint thread, int i) {
    if constexpr (Threads < 32) {
      row = i / Columns;
      column = i % Columns;
    } else {
      const int lane = int(thread % 32), simdgroup = int(thread / 32) % kSimdgroups;
      const int block = i / 8 * kSimdgroups + simdgroup, at = i % 8;
      const bool exists = block < kDown * kAcross;
      row = exists ? block / kAcross * 16 + (lane / 4 & 4) + lane / 2 % 4 + at / 4 * 8 : Rows;
      column = block % kAcross * 16 + ((lane / 4 & 2) + lane % 2) * 4 + at % 4;
    }
  }
  bool exists() const { return row < Rows && column < Columns; }
};

// A matrix that the threads of a scope hold together, each its own elements.
template <typename T, int Rows, int Columns, int Threads>
struct cooperative_tensor {
  using element_type = T;
  using value_type = T;
  using layout = msl_layout<Rows, Columns, Threads>;
  static constexpr int kRows = Rows, kColumns = Columns;
  T elements[layout::capacity];

  static constexpr ushort get_capacity() { return ushort(layout::capacity); }
  static constexpr ushort capacity() { return ushort(layout::capacity); }
  template <typename I>
  T& operator[](I i) {
    return elements[i];
  }
  template <typename I>
  const T& operator[](I i) const {
    return elements[i];
  }
  static layout place(int i) { return layout(msl_thread(), i); }
  static bool is_valid_element(int i) { return place(i).exists(); }
  static bool get_mask(int i) { return is_valid_element(i); }
  static array<int, 2> get_multidimensional_index(int i) {
    const layout at = place(i);
    return array<int, 2>{at.column, at.row};
  }
  struct iterator {
    cooperative_tensor* of;
    int at;
    T& operator*() const { return of->elements[at]; }
    iterator& operator++() {
      ++at;
      return *this;
    }
    bool operator!=(const iterator& o) const { return at != o.at; }
    bool operator==(const iterator& o) const { return at == o.at; }
    array<int, 2> get_multidimensional_index() const {
      return cooperative_tensor::get_multidimensional_index(at);
    }
    bool is_valid_element() const { return cooperative_tensor::is_valid_element(at); }
  };
  iterator begin() { return {this, 0}; }
  iterator end() { return {this, layout::capacity}; }

  template <typename M>
  void load(const M& memory) {
    for (int i = 0; i < layout::capacity; ++i) {
      const layout at = place(i);
      elements[i] = at.exists() && msl_has(memory, at) ? T(memory.at(at.column, at.row)) : T(0);
    }
  }
  template <typename M>
  void store(const M& memory) const {
    for (int i = 0; i < layout::capacity; ++i) {
      const layout at = place(i);
      if (!at.exists() || !msl_has(memory, at)) continue;
      memory.at(at.column, at.row) = typename M::value_type(elements[i]);
    }
  }
  template <typename M>
  static bool msl_has(const M& memory, const layout& at) {
    return at.column < memory.get_extent(0) && at.row < memory.get_extent(1);
  }
};

template <typename T>
constexpr bool is_tensor_v = false;
template <typename T, typename E, typename D, typename... Tags>
constexpr bool is_tensor_v<tensor<T, E, D, Tags...>> = true;
template <typename T>
constexpr bool is_cooperative_tensor_v = false;
template <typename T, int R, int C, int N>
constexpr bool is_cooperative_tensor_v<cooperative_tensor<T, R, C, N>> = true;
}  // namespace msl_tensor
}  // namespace metal

namespace msl {
// A tensor that the host passes: this, in the memory of a buffer. Shared with Python.
struct TensorHeader {
  void* data;
  long size[16];
  long stride[16];
};
template <typename T, typename E, typename D, typename... Tags>
struct Buffer<metal::msl_tensor::tensor<T, E, D, Tags...>> {
  using tensor = metal::msl_tensor::tensor<T, E, D, Tags...>;
  static tensor get(void* p) {
    const TensorHeader& given = *static_cast<const TensorHeader*>(p);
    tensor r;
    r.data = static_cast<T*>(given.data);
    for (unsigned i = 0; i < E::rank(); ++i) {
      r.size.sizes[i] = typename E::index_type(given.size[i]);
      r.stride[i] = given.stride[i];
    }
    return r;
  }
  static constexpr int size = sizeof(T);
  static constexpr int read_only = 1;
  static constexpr int is_reference = 0;
  static constexpr int number = 16 + int(E::rank());
};
}  // namespace msl
