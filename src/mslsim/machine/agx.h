// SPDX-License-Identifier: MIT
// What the machine offers to kernels, by functions of OpenCL: for Mesa's compiler, which tells what
// a kernel takes of a GPU. Nothing is run, so a function need only cost what the real one does.
// msl_agx_* take the place of collectives, by their operation, the elements and how many there are.
#pragma once

#define MSL_AGX extern "C" inline __attribute__((always_inline, used))

unsigned long get_local_id(unsigned);
unsigned long get_group_id(unsigned);
unsigned get_sub_group_local_id();
__attribute__((convergent)) void barrier(unsigned);
__attribute__((convergent)) void sub_group_barrier(unsigned);
__attribute__((convergent)) float sub_group_shuffle(float, unsigned);
__attribute__((convergent)) int sub_group_shuffle(int, unsigned);
__attribute__((convergent)) float sub_group_reduce_add(float);
__attribute__((convergent)) int sub_group_reduce_add(int);
__attribute__((convergent)) float sub_group_scan_inclusive_add(float);
__attribute__((convergent)) int sub_group_scan_inclusive_add(int);
float native_exp2(float);
float native_log2(float);
float native_sqrt(float);
float native_sin(float);
float native_cos(float);

MSL_AGX unsigned msl_lane() { return get_sub_group_local_id(); }
MSL_AGX void msl_fence(int, int) {}
MSL_AGX void msl_atomic(const volatile void*, unsigned, int) {}
MSL_AGX void msl_assertion_failed() {}
MSL_AGX void msl_texture_missed(const void*, int, int, int, int) {}
MSL_AGX void msl_threadgroup_barrier(int) { barrier(1); }
MSL_AGX void msl_agx_nothing(void*, int) {}
MSL_AGX void msl_agx_simd_barrier(void*, int) { sub_group_barrier(1); }
MSL_AGX void msl_agx_ballot(void* p, int) {
  int* vote = static_cast<int*>(p);
  vote[1] = sub_group_reduce_add(vote[0] ? 1 << get_sub_group_local_id() : 0);
  vote[2] = sub_group_reduce_add(1 << get_sub_group_local_id());
}

#define MSL_AGX_COLLECTIVES(name, T, W, N)                                                    \
  MSL_AGX void msl_agx_reduce_##name##N(void* p, int) {                                       \
    for (int i = 0; i < N; ++i)                                                               \
      static_cast<T*>(p)[i] = T(sub_group_reduce_add(W(static_cast<T*>(p)[i])));              \
  }                                                                                           \
  MSL_AGX void msl_agx_scan_##name##N(void* p, int) {                                         \
    for (int i = 0; i < N; ++i)                                                               \
      static_cast<T*>(p)[i] = T(sub_group_scan_inclusive_add(W(static_cast<T*>(p)[i])));      \
  }                                                                                           \
  MSL_AGX void msl_agx_shuffle_##name##N(void* p, int lane) {                                 \
    for (int i = 0; i < N; ++i)                                                               \
      static_cast<T*>(p)[i] = T(sub_group_shuffle(W(static_cast<T*>(p)[i]), unsigned(lane))); \
  }
#define MSL_AGX_ELEMENTS(N)                  \
  MSL_AGX_COLLECTIVES(f, float, float, N)    \
  MSL_AGX_COLLECTIVES(h, _Float16, float, N) \
  MSL_AGX_COLLECTIVES(i, int, int, N)        \
  MSL_AGX_COLLECTIVES(s, short, int, N)      \
  MSL_AGX_COLLECTIVES(c, char, int, N)
MSL_AGX_ELEMENTS(1)
MSL_AGX_ELEMENTS(2)
MSL_AGX_ELEMENTS(3)
MSL_AGX_ELEMENTS(4)

// An 8x8 product has no instruction in Mesa: as many products as a lane has.
#define MSL_AGX_MULTIPLY(name, D, A, B)                            \
  MSL_AGX void msl_agx_multiply_##name(void* p, int) {             \
    void** at = static_cast<void**>(p);                            \
    for (int j = 0; j < 2; ++j) {                                  \
      const float a = float(static_cast<A*>(at[1])[j]);            \
      const float b = float(static_cast<B*>(at[2])[j]);            \
      float sum = at[3] ? float(static_cast<D*>(at[3])[j]) : 0.0f; \
      for (int k = 0; k < 8; ++k) sum = __builtin_fmaf(a, b, sum); \
      static_cast<D*>(at[0])[j] = D(sum);                          \
    }                                                              \
  }
MSL_AGX_MULTIPLY(ff, float, float, float)
MSL_AGX_MULTIPLY(fh, float, _Float16, _Float16)
MSL_AGX_MULTIPLY(hh, _Float16, _Float16, _Float16)

// The precise functions of Metal take a few steps more.
MSL_AGX float msl_agx_exp2(float x) { return native_exp2(x); }
MSL_AGX float msl_agx_exp(float x) { return native_exp2(x * 1.44269504f); }
MSL_AGX float msl_agx_log2(float x) { return native_log2(x); }
MSL_AGX float msl_agx_log(float x) { return native_log2(x) * 0.69314718f; }
MSL_AGX float msl_agx_log10(float x) { return native_log2(x) * 0.30103f; }
MSL_AGX float msl_agx_sqrt(float x) { return native_sqrt(x); }
MSL_AGX float msl_agx_sin(float x) { return native_sin(x); }
MSL_AGX float msl_agx_cos(float x) { return native_cos(x); }
MSL_AGX float tanf(float x) { return native_sin(x) / native_cos(x); }
MSL_AGX float tanhf(float x) { return 1.0f - 2.0f / (1.0f + native_exp2(x * 2.88539008f)); }
MSL_AGX float sinhf(float x) { return 0.5f * (msl_agx_exp(x) - msl_agx_exp(-x)); }
MSL_AGX float coshf(float x) { return 0.5f * (msl_agx_exp(x) + msl_agx_exp(-x)); }
MSL_AGX float powf(float x, float y) { return native_exp2(y * native_log2(x)); }
MSL_AGX float fmodf(float x, float y) { return x - y * __builtin_truncf(x / y); }
MSL_AGX float ldexpf(float x, int k) { return x * __builtin_bit_cast(float, (k + 127) << 23); }
MSL_AGX float frexpf(float x, int* e) {
  const int bits = __builtin_bit_cast(int, x);
  *e = (bits >> 23 & 255) - 126;
  return __builtin_bit_cast(float, (bits & int(0x807fffff)) | 0x3f000000);
}
