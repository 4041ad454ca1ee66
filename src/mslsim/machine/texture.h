// SPDX-License-Identifier: MIT
// Textures: an array of texels of one level behind a header, in memory that is watched as a buffer
// is. Texels are kept as numpy has them, and converted as they are read and written.
#pragma once

namespace msl {
// Shared with Python, which puts it in front of the texels.
struct TextureHeader {
  unsigned width, height, depth, layers;
  unsigned channels;
  unsigned bytes;  // of one channel
  unsigned kind;   // of one channel: 0 unsigned, 1 signed, 2 real
  unsigned unused[9];
};
}  // namespace msl

namespace metal::msl_image {
// A channel as it is stored, to and from T: integers are normalised where T is real.
template <typename T>
inline T msl_texel_read(const char* p, unsigned bytes, unsigned kind) {
  if (kind == 2) return T(bytes == 4 ? *(const float*)p : float(*(const half*)p));
  const long value = kind == 0 ? (bytes == 1   ? long(*(const uchar*)p)
                                  : bytes == 2 ? long(*(const ushort*)p)
                                               : long(*(const uint*)p))
                               : (bytes == 1   ? long(*(const int8_t*)p)
                                  : bytes == 2 ? long(*(const short*)p)
                                               : long(*(const int*)p));
  if constexpr (__is_floating_point(T)) {
    const float most = float((1ul << (8 * bytes - (kind == 1))) - 1);
    return T(max(float(value) / most, -1.0f));
  } else {
    return T(value);
  }
}
template <typename T>
inline void msl_texel_write(char* p, unsigned bytes, unsigned kind, T value) {
  if (kind == 2) {
    if (bytes == 4)
      *(float*)p = float(value);
    else
      *(half*)p = half(float(value));
    return;
  }
  long number;
  if constexpr (__is_floating_point(T)) {
    const float most = float((1ul << (8 * bytes - (kind == 1))) - 1);
    const float x = float(value);
    number = long(rint((x == x ? clamp(x, kind == 1 ? -1.0f : 0.0f, 1.0f) : 0.0f) * most));
  } else {
    number = long(value);
  }
  if (bytes == 1)
    *(uchar*)p = uchar(number);
  else if (bytes == 2)
    *(ushort*)p = ushort(number);
  else
    *(uint*)p = uint(number);
}

// All kinds of textures: `DIMS` coordinates, then a layer if it is an array. A cube is an array of
// six faces.
template <typename T, access A, int DIMS, bool ARRAY, bool CUBE, bool DEPTH>
struct msl_texture {
  const msl::TextureHeader* header;
  char* texels;
  using value = conditional_t<DEPTH, T, vec<T, 4>>;
  struct place {
    int x, y, z, layer;
  };

  uint get_width(uint = 0) const { return header->width; }
  uint get_height(uint = 0) const { return header->height; }
  uint get_depth(uint = 0) const { return header->depth; }
  uint get_array_size() const { return CUBE ? header->layers / 6 : header->layers; }
  uint get_num_mip_levels() const { return 1; }
  uint get_num_samples() const { return header->layers; }
  void fence() const {}

  bool has(place p) const {
    return uint(p.x) < header->width && uint(p.y) < header->height && uint(p.z) < header->depth &&
           uint(p.layer) < header->layers;
  }
  char* at(place p) const {
    const ulong row = (ulong(p.layer) * header->depth + ulong(p.z)) * header->height + ulong(p.y);
    return texels + (row * header->width + ulong(p.x)) * header->channels * header->bytes;
  }
  // Missing channels are 0, and 1 for the fourth.
  value load(place p) const {
    const char* from = at(p);
    vec<T, 4> r(T(0), T(0), T(0), T(1));
    for (uint k = 0; k < header->channels && k < 4; ++k) {
      r.set(int(k), msl_texel_read<T>(from + k * header->bytes, header->bytes, header->kind));
    }
    if constexpr (DEPTH)
      return r.get(0);
    else
      return r;
  }
  value checked_load(place p) const {
    if (has(p)) return load(p);
    msl_texture_missed(texels, p.x, p.y, p.z + p.layer, 0);
    return value(T(0));
  }
  void store(value v, place p) const {
    if (!has(p)) {
      msl_texture_missed(texels, p.x, p.y, p.z + p.layer, 1);
      return;
    }
    char* to = at(p);
    for (uint k = 0; k < header->channels && k < 4; ++k) {
      T part;
      if constexpr (DEPTH)
        part = v;
      else
        part = v.get(int(k));
      msl_texel_write<T>(to + k * header->bytes, header->bytes, header->kind, part);
    }
  }

  template <typename C>
  static int axis(C c, int i) {
    if constexpr (msl_is_number<C>)
      return i == 0 ? int(c) : 0;
    else
      return i < vec_elements<C>::value ? int(c.get(i)) : 0;
  }
  // Coordinates, then the face of a cube, then the layer of an array, then perhaps a level.
  template <typename C, typename... R>
  static place placed(C c, R... rest) {
    const int more[] = {int(rest)..., 0, 0};
    const int layer = CUBE ? more[0] + (ARRAY ? 6 * more[1] : 0) : ARRAY ? more[0] : 0;
    return {axis(c, 0), axis(c, 1), axis(c, 2), layer};
  }
  template <typename C, typename... R>
  value read(C c, R... rest) const {
    static_assert(A != access::write, "a texture with access::write cannot be read");
    return checked_load(placed(c, rest...));
  }
  template <typename C, typename... R>
  void write(value v, C c, R... rest) const {
    static_assert(A == access::write || A == access::read_write,
                  "a texture without access::write cannot be written");
    store(v, placed(c, rest...));
  }

  // A texel for a sampler, which may be beyond the edge.
  value fetch(sampler s, int x, int y, int z, int layer) const {
    const place p{s.wrapped(x, int(header->width), 0),
                  DIMS > 1 ? s.wrapped(y, int(header->height), 1) : 0,
                  DIMS > 2 ? s.wrapped(z, int(header->depth), 2) : 0, layer};
    if (p.x >= 0 && p.y >= 0 && p.z >= 0) return load(p);
    const bool is_border = s.addresses[0] == int(address::clamp_to_border);
    const T colour = T(is_border && s.border == 2), alpha = T(is_border && s.border > 0);
    if constexpr (DEPTH)
      return colour;
    else
      return value(colour, colour, colour, alpha);
  }
  // Where a sampler reads along an axis: the first texel and the weight of the second.
  static void between(sampler s, float x, uint n, int offset, int& first, float& weight) {
    const float scaled = s.pixels ? x : x * float(n);
    const float from = s.is_linear ? scaled - 0.5f : scaled;
    const float whole = floor(from);
    first = int(whole) + offset;
    weight = s.is_linear ? from - whole : 0.0f;
  }
  template <typename F>
  value mixed(sampler s, float3 at, int3 offset, int layer, F f) const {
    int first[3] = {0, 0, 0};
    float weight[3] = {0, 0, 0};
    const uint size[3] = {header->width, header->height, header->depth};
    for (int i = 0; i < DIMS; ++i) {
      between(s, at.get(i), size[i], offset.get(i), first[i], weight[i]);
    }
    float4 sum(0.0f);
    value only{};
    for (int k = 0; k < (1 << DIMS); ++k) {
      float w = 1;
      for (int i = 0; i < DIMS; ++i) w *= k >> i & 1 ? weight[i] : 1 - weight[i];
      if (w == 0) continue;
      only = f(fetch(s, first[0] + (k & 1), first[1] + (k >> 1 & 1), first[2] + (k >> 2), layer));
      if constexpr (DEPTH)
        sum += float4(w * float(only));
      else if constexpr (__is_floating_point(T))
        sum += w * float4(only);
      else
        // integers are not mixed
        return only;
    }
    if constexpr (DEPTH)
      return T(sum.get(0));
    else
      return value(sum);
  }
  struct sample_place {
    float3 at;
    int3 offset;
    int layer;
  };
  template <typename C>
  static float real(C c, int i) {
    if constexpr (msl_is_number<C>)
      return i == 0 ? float(c) : 0.0f;
    else
      return i < vec_elements<C>::value ? float(c.get(i)) : 0.0f;
  }
  template <typename C>
  static sample_place direct(C c) {
    sample_place p{float3(real(c, 0), real(c, 1), real(c, 2)), int3(0), 0};
    if constexpr (CUBE) face(p);
    return p;
  }
  // The face of a cube that a direction meets, and where.
  static void face(sample_place& p) {
    const float3 d = p.at;
    const float3 a = abs(d);
    float s, t, m;
    if (a.x >= a.y && a.x >= a.z) {
      p.layer = d.x >= 0 ? 0 : 1, m = a.x, s = d.x >= 0 ? -d.z : d.z, t = -d.y;
    } else if (a.y >= a.z) {
      p.layer = d.y >= 0 ? 2 : 3, m = a.y, s = d.x, t = d.y >= 0 ? d.z : -d.z;
    } else {
      p.layer = d.z >= 0 ? 4 : 5, m = a.z, s = d.z >= 0 ? d.x : -d.x, t = -d.y;
    }
    p.at = float3((s / m + 1) / 2, (t / m + 1) / 2, 0.0f);
  }
  // Of what may follow the coordinates: a layer, an offset, a level or gradients.
  static void follow(sample_place& p, uint& numbers, uint n) {
    if (ARRAY && numbers++ == 0) p.layer += int(n) * (CUBE ? 6 : 1);
  }
  static void follow(sample_place& p, uint&, int2 o) { p.offset = int3(o.get(0), o.get(1), 0); }
  static void follow(sample_place& p, uint&, int3 o) { p.offset = o; }
  template <typename O>
  static auto follow(sample_place& p, uint& numbers, O o) -> enable_if_t<msl_is_number<O>> {
    follow(p, numbers, uint(o));
  }
  template <typename O>
  static auto follow(sample_place&, uint&, O) -> enable_if_t<__is_class(O) || __is_enum(O)> {}

  template <typename C, typename... R>
  value sample(sampler s, C c, R... rest) const {
    static_assert(A == access::sample, "only a texture with access::sample can be sampled");
    sample_place p = direct(c);
    uint numbers = 0;
    (follow(p, numbers, rest), ...);
    return mixed(s, p.at, p.offset, p.layer, [](value v) { return v; });
  }
  // The four texels around a point: those below, then those above, each from the right end of
  // gather's order in the specification.
  template <typename C, typename... R>
  vec<T, 4> gather(sampler s, C c, R... rest) const {
    sample_place p = direct(c);
    uint numbers = 0;
    component part = component::x;
    (follow(p, numbers, rest), ...);
    (take(part, rest), ...);
    sampler linear = s;
    linear.is_linear = 1;
    int x, y;
    float unused;
    between(linear, p.at.get(0), header->width, p.offset.get(0), x, unused);
    between(linear, p.at.get(1), header->height, p.offset.get(1), y, unused);
    const int columns[] = {0, 1, 1, 0}, rows[] = {1, 1, 0, 0};
    vec<T, 4> r{};
    for (int k = 0; k < 4; ++k) {
      const value v = fetch(s, x + columns[k], y + rows[k], 0, p.layer);
      if constexpr (DEPTH)
        r.set(k, v);
      else
        r.set(k, v.get(int(part)));
    }
    return r;
  }
  static void take(component& to, component from) { to = from; }
  template <typename O>
  static void take(component&, O) {}

  template <typename C, typename... R>
  T sample_compare(sampler s, C c, R... rest) const {
    static_assert(DEPTH, "sample_compare needs a depth texture");
    sample_place p = direct(c);
    // An array has its layer before the value to compare with.
    const float numbers[] = {number(rest)..., 0.0f, 0.0f};
    if (ARRAY) p.layer += int(numbers[0]) * (CUBE ? 6 : 1);
    const float reference = numbers[ARRAY ? 1 : 0];
    return mixed(s, p.at, p.offset, p.layer,
                 [&](value v) { return value(s.holds(reference, float(v)) ? 1 : 0); });
  }
  // For each texel of gather whether the comparison holds.
  template <typename C, typename... R>
  vec<T, 4> gather_compare(sampler s, C c, R... rest) const {
    static_assert(DEPTH, "gather_compare needs a depth texture");
    const float numbers[] = {number(rest)..., 0.0f, 0.0f};
    vec<T, 4> r = gather(s, c, rest...);
    for (int k = 0; k < 4; ++k) r.set(k, T(s.holds(numbers[ARRAY ? 1 : 0], float(r.get(k)))));
    return r;
  }
  template <typename O>
  static float number(O o) {
    if constexpr (msl_is_number<O>)
      return float(o);
    else
      return 0.0f;
  }
};

#define MSL_TEXTURE(name, dims, array, cube, depth)            \
  template <typename T = float, access A = access::sample>     \
  struct name : msl_texture<T, A, dims, array, cube, depth> {  \
    name() = default;                                          \
    name(const msl::TextureHeader* h, char* t)                 \
        : msl_texture<T, A, dims, array, cube, depth>{h, t} {} \
  };
MSL_TEXTURE(texture1d, 1, false, false, false)
MSL_TEXTURE(texture1d_array, 1, true, false, false)
MSL_TEXTURE(texture2d, 2, false, false, false)
MSL_TEXTURE(texture2d_array, 2, true, false, false)
MSL_TEXTURE(texture3d, 3, false, false, false)
MSL_TEXTURE(texturecube, 2, false, true, false)
MSL_TEXTURE(texturecube_array, 2, true, true, false)
MSL_TEXTURE(texture_buffer, 1, false, false, false)
// A sample takes the place of a layer.
MSL_TEXTURE(texture2d_ms, 2, true, false, false)
MSL_TEXTURE(depth2d_ms, 2, true, false, true)
MSL_TEXTURE(depth2d, 2, false, false, true)
MSL_TEXTURE(depth2d_array, 2, true, false, true)
MSL_TEXTURE(depthcube, 2, false, true, true)
MSL_TEXTURE(depthcube_array, 2, true, true, true)
#undef MSL_TEXTURE

// What is not given is an error before a kernel runs.
template <typename T, access A, int DIMS, bool ARRAY, bool CUBE, bool DEPTH>
inline bool is_null_texture(const msl_texture<T, A, DIMS, ARRAY, CUBE, DEPTH>&) {
  return false;
}
}  // namespace metal::msl_image

namespace msl {
// A texture parameter, behind the pointer of a buffer; a sampler is its own bytes.
template <typename T, metal::msl_image::access A,
          template <typename, metal::msl_image::access> class Texture>
struct TextureParameter {
  static Texture<T, A> get(void* p) {
    return Texture<T, A>(static_cast<const TextureHeader*>(p),
                         static_cast<char*>(p) + sizeof(TextureHeader));
  }
  static constexpr int size = 1;
  static constexpr int read_only =
      A == metal::msl_image::access::read || A == metal::msl_image::access::sample;
  static constexpr int is_reference = 0;
  static constexpr int number = 0;
};
template <typename T, metal::msl_image::access A,
          template <typename, metal::msl_image::access> class Texture>
struct Buffer<Texture<T, A>> : TextureParameter<T, A, Texture> {};
template <>
struct Buffer<metal::msl_image::sampler> {
  static metal::msl_image::sampler get(void* p) {
    return *static_cast<metal::msl_image::sampler*>(p);
  }
  static constexpr int size = sizeof(metal::msl_image::sampler);
  static constexpr int read_only = 1;
  static constexpr int is_reference = 0;
  static constexpr int number = 0;
};
}  // namespace msl
