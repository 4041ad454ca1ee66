# SPDX-License-Identifier: MIT
"""Every function of Metal's library once for each type it exists for, against numpy."""

import numpy as np
import pytest

import mslsim

N = 64
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
BITS = {"char": 8, "uchar": 8, "short": 16, "ushort": 16, "int": 32, "uint": 32,
        "long": 64, "ulong": 64}  # fmt: skip
NUMPY = {name: np.dtype(f"{'u' * name.startswith('u')}int{bits}") for name, bits in BITS.items()}
NUMPY |= {"float": np.dtype("float32"), "half": np.dtype("float16")}


def run(kind, expressions, inputs, before=""):
    """Row k is what expression k gives for each element; it sees a, b, c of type `kind`."""
    lines = "".join(f"    o[{k * N} + i] = {e};\n" for k, e in enumerate(expressions))
    source = f"""{HEAD}{before}
kernel void k(device const {kind}* x [[buffer(0)]], device {kind}* o [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {{
    const {kind} a = x[i], b = x[{N} + i], c = x[{2 * N} + i];
    const vec<{kind}, 3> a3(a, b, c), b3(b, c, a), c3(c, a, b);
{lines}}}"""
    x = np.concatenate(inputs)
    out = np.zeros((len(expressions), N), x.dtype)
    mslsim.compile_shader(source, "none").k(x, out, threads=N, group_size=N)
    return out


def on_vectors(expression):
    """The same of a vector, of which the first element is taken."""
    return f"({expression.replace('(a', '(a3').replace(', b', ', b3').replace(', c', ', c3')}).x"


def sign(x):
    return np.where(x > 0, 1.0, np.where(x < 0, -1.0, 0.0))


def smooth(a, b, c):
    t = np.clip((c - a) / (b - a), 0, 1)
    return t * t * (3 - 2 * t)


# expression: what it is in float64
REAL = {
    "abs(a)": lambda a, b, c: np.abs(a),
    "fabs(a)": lambda a, b, c: np.abs(a),
    "acos(a)": lambda a, b, c: np.arccos(a),
    "asin(a)": lambda a, b, c: np.arcsin(a),
    "asinh(a)": lambda a, b, c: np.arcsinh(a),
    "atan(a)": lambda a, b, c: np.arctan(a),
    "atan2(a, b)": lambda a, b, c: np.arctan2(a, b),
    "atanh(a)": lambda a, b, c: np.arctanh(a),
    "ceil(a)": lambda a, b, c: np.ceil(a),
    "clamp(a, b, c)": lambda a, b, c: np.minimum(np.maximum(a, b), c),
    "copysign(a, b)": lambda a, b, c: np.copysign(a, b),
    "cos(a)": lambda a, b, c: np.cos(a),
    "cosh(a)": lambda a, b, c: np.cosh(a),
    "cospi(a)": lambda a, b, c: np.cos(np.pi * a),
    "divide(a, b)": lambda a, b, c: a / b,
    "exp(a)": lambda a, b, c: np.exp(a),
    "exp10(a)": lambda a, b, c: 10.0**a,
    "exp2(a)": lambda a, b, c: np.exp2(a),
    "fdim(a, b)": lambda a, b, c: np.maximum(a - b, 0),
    "floor(a)": lambda a, b, c: np.floor(a),
    "fma(a, b, c)": lambda a, b, c: a * b + c,
    "fmax(a, b)": lambda a, b, c: np.fmax(a, b),
    "fmax3(a, b, c)": lambda a, b, c: np.fmax(a, np.fmax(b, c)),
    "fmedian3(a, b, c)": lambda a, b, c: np.median([a, b, c], axis=0),
    "fmin(a, b)": lambda a, b, c: np.fmin(a, b),
    "fmin3(a, b, c)": lambda a, b, c: np.fmin(a, np.fmin(b, c)),
    "fmod(a, b)": lambda a, b, c: np.fmod(a, b),
    "fract(a)": lambda a, b, c: a - np.floor(a),
    "log(a)": lambda a, b, c: np.log(a),
    "log10(a)": lambda a, b, c: np.log10(a),
    "log2(a)": lambda a, b, c: np.log2(a),
    "max(a, b)": lambda a, b, c: np.maximum(a, b),
    "max3(a, b, c)": lambda a, b, c: np.maximum(a, np.maximum(b, c)),
    "median3(a, b, c)": lambda a, b, c: np.median([a, b, c], axis=0),
    "min(a, b)": lambda a, b, c: np.minimum(a, b),
    "min3(a, b, c)": lambda a, b, c: np.minimum(a, np.minimum(b, c)),
    "mix(a, b, c)": lambda a, b, c: a + (b - a) * c,
    "pow(a, b)": lambda a, b, c: a**b,
    "powr(a, b)": lambda a, b, c: a**b,
    "rint(a)": lambda a, b, c: np.rint(a),
    "round(a)": lambda a, b, c: np.copysign(np.floor(np.abs(a) + 0.5), a),
    "rsqrt(a)": lambda a, b, c: 1 / np.sqrt(a),
    "saturate(a)": lambda a, b, c: np.clip(a, 0, 1),
    "sign(a)": lambda a, b, c: sign(a),
    "sin(a)": lambda a, b, c: np.sin(a),
    "sinh(a)": lambda a, b, c: np.sinh(a),
    "sinpi(a)": lambda a, b, c: np.sin(np.pi * a),
    "smoothstep(a, b, c)": smooth,
    "sqrt(a)": lambda a, b, c: np.sqrt(a),
    "step(a, b)": lambda a, b, c: (b >= a) * 1.0,
    "tan(a)": lambda a, b, c: np.tan(a),
    "tanh(a)": lambda a, b, c: np.tanh(a),
    "tanpi(a)": lambda a, b, c: np.tan(np.pi * a),
    "trunc(a)": lambda a, b, c: np.trunc(a),
}
# Only of a number, or only of a vector.
SCALAR_REAL = {
    "acosh(T(1) + abs(a))": lambda a, b, c: np.arccosh(1 + np.abs(a)),
    "select(a, b, a < c)": lambda a, b, c: np.where(a < c, b, a),
    "ldexp(a, 3)": lambda a, b, c: a * 8,
    "nextafter(a, a)": lambda a, b, c: a,
    "T(ilogb(a))": lambda a, b, c: np.floor(np.log2(np.abs(a))),
    "T(isnan(a) + isinf(a) + 2 * isfinite(a) + 4 * signbit(a) + 8 * isnormal(a))": (
        lambda a, b, c: 10 + 4.0 * (a < 0)
    ),
    "first_of_frexp(a)": lambda a, b, c: np.frexp(a)[0],
    "second_of_frexp(a)": lambda a, b, c: np.frexp(a)[1] * 1.0,
    "first_of_modf(a)": lambda a, b, c: np.modf(a)[0],
    "second_of_modf(a)": lambda a, b, c: np.modf(a)[1],
    "first_of_sincos(a)": lambda a, b, c: np.sin(a),
    "second_of_sincos(a)": lambda a, b, c: np.cos(a),
    "dot(a3, b3)": lambda a, b, c: a * b + b * c + c * a,
    "dot(a3, 2)": lambda a, b, c: 2 * (a + b + c),
    "length_squared(a3)": lambda a, b, c: a * a + b * b + c * c,
    "length(a3)": lambda a, b, c: np.sqrt(a * a + b * b + c * c),
    "distance(a3, b3)": lambda a, b, c: np.sqrt((a - b) ** 2 + (b - c) ** 2 + (c - a) ** 2),
    "distance_squared(a3, b3)": lambda a, b, c: (a - b) ** 2 + (b - c) ** 2 + (c - a) ** 2,
    "normalize(a3).z": lambda a, b, c: c / np.sqrt(a * a + b * b + c * c),
    "cross(a3, b3).x": lambda a, b, c: b * a - c * c,
    "reflect(a3, b3).x": lambda a, b, c: a - 2 * (a * b + b * c + c * a) * b,
    "faceforward(a3, b3, c3).x": lambda a, b, c: np.where(a * b + b * c + c * a < 0, a, -a),
    "smoothstep(T(0), T(1), a3).x": lambda a, b, c: smooth(0, 1, a),
    "mix(a3, b3, T(0.25)).x": lambda a, b, c: a + (b - a) / 4,
    "clamp(a3, T(-0.25), T(0.25)).x": lambda a, b, c: np.clip(a, -0.25, 0.25),
    "determinant(matrix<T, 2, 2>(a, b, c, a))": lambda a, b, c: a * a - b * c,
    "determinant(matrix<T, 3, 3>(a3, b3, c3))": (
        lambda a, b, c: 3 * a * b * c - a**3 - b**3 - c**3
    ),
    "T(any(a3 > b3) + 2 * all(a3 > b3))": (
        lambda a, b, c: ((a > b) | (b > c) | (c > a)) + 2.0 * ((a > b) & (b > c) & (c > a))
    ),
}  # fmt: skip
SECOND = """
inline T first_of_frexp(T x) { int e; return frexp(x, e); }
inline T second_of_frexp(T x) { int e; frexp(x, e); return T(e); }
inline T first_of_modf(T x) { T o; return modf(x, o); }
inline T second_of_modf(T x) { T o; modf(x, o); return o; }
inline T first_of_sincos(T x) { T o; return sincos(x, o); }
inline T second_of_sincos(T x) { T o; sincos(x, o); return o; }
"""


def reals(dtype):
    """Numbers in (-1, 1) for most functions; the first is positive, for roots and logarithms."""
    rng = np.random.default_rng(0)
    a, b, c = rng.uniform(-0.95, 0.95, (3, N)).astype(dtype)
    return [a, b, c]


def check_reals(kind, table, out):
    """Half is computed in float and rounded once; float is as good as the C library's."""
    given = [x.astype(np.float64) for x in reals(NUMPY[kind])]
    eps = np.finfo(NUMPY[kind]).eps
    for (expression, function), row in zip(table.items(), out, strict=True):
        with np.errstate(all="ignore"):
            wanted = function(*given)
        # dot products and the like round in each step
        np.testing.assert_allclose(
            row.astype(np.float64), wanted, rtol=8 * eps, atol=8 * eps, err_msg=expression
        )


@pytest.mark.parametrize("kind", ["float", "half"])
def test_functions_of_reals(kind):
    both = REAL | {on_vectors(e): f for e, f in REAL.items()}
    out = run(kind, list(both), reals(NUMPY[kind]))
    check_reals(kind, both, out)


@pytest.mark.parametrize("kind", ["float", "half"])
def test_functions_of_numbers_or_vectors_alone(kind):
    out = run(kind, list(SCALAR_REAL), reals(NUMPY[kind]), f"#define T {kind}\n{SECOND}")
    check_reals(kind, SCALAR_REAL, out)


def test_functions_of_bfloat_give_float():
    """Metal has none for bfloat: it converts to float."""
    lines = "".join(f"    o[{k * N} + i] = {e};\n" for k, e in enumerate(REAL))
    source = f"""{HEAD}
kernel void k(device const bfloat* x [[buffer(0)]], device float* o [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {{
    const bfloat a = x[i], b = x[{N} + i], c = x[{2 * N} + i];
{lines}}}"""
    a, b, c = (x.view(np.uint32) & 0xFFFF0000 for x in reals(np.float32))
    x = (np.concatenate([a, b, c]) >> 16).astype(np.uint16)
    out = np.zeros((len(REAL), N), np.float32)
    mslsim.compile_shader(source, "none").k(x, out, threads=N, group_size=N)
    given = [v.view(np.float32).astype(np.float64) for v in (a, b, c)]
    for (expression, function), row in zip(REAL.items(), out, strict=True):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(row, function(*given), 1e-6, 1e-6, err_msg=expression)


def test_fma_of_half_rounds_once():
    """2048 x 2049 products near a tie of half, which two roundings would break the wrong way."""
    rng = np.random.default_rng(1)
    x = [rng.standard_normal(N).astype(np.float16) for _ in range(2)]
    x.append((rng.standard_normal(N) * 2.0**-11).astype(np.float16))
    out = run("half", ["fma(a, b, c)"], x)[0]
    exact = x[0].astype(np.float64) * x[1] + x[2].astype(np.float64)
    np.testing.assert_array_equal(out, exact.astype(np.float16))


def wrap(value, kind):
    bits = BITS[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if not kind.startswith("u") and value >> (bits - 1) else value


def raw(value, kind):
    return value & ((1 << BITS[kind]) - 1)


def limits(kind):
    info = np.iinfo(NUMPY[kind])
    return int(info.min), int(info.max)


def rotate(a, b, kind):
    bits = BITS[kind]
    k = b % bits
    return raw(a, kind) << k | raw(a, kind) >> (bits - k)


def insert(a, b, kind, offset, bits):
    mask = (1 << bits) - 1
    return (a & ~(mask << offset)) | ((b & mask) << offset)


# expression: what it is for Python's integers, before it wraps around
INTEGER = {
    "abs(a)": lambda a, b, c, t: abs(a),
    "absdiff(a, b)": lambda a, b, c, t: abs(a - b),
    "addsat(a, b)": lambda a, b, c, t: min(max(a + b, limits(t)[0]), limits(t)[1]),
    "clamp(a, min(b, c), max(b, c))": lambda a, b, c, t: sorted([a, b, c])[1],
    "clz(a)": lambda a, b, c, t: BITS[t] - raw(a, t).bit_length(),
    "ctz(a)": lambda a, b, c, t: BITS[t] if a == 0 else (a & -a).bit_length() - 1,
    "extract_bits(a, 2u, 5u)": (
        lambda a, b, c, t: (raw(a, t) >> 2 & 31) - (32 if a >> 6 & 1 and t[0] != "u" else 0)
    ),
    "hadd(a, b)": lambda a, b, c, t: (a + b) >> 1,
    "insert_bits(a, b, 1u, 4u)": lambda a, b, c, t: insert(a, b, t, 1, 4),
    "madhi(a, b, c)": lambda a, b, c, t: (a * b >> BITS[t]) + c,
    "madsat(a, b, c)": lambda a, b, c, t: min(max(a * b + c, limits(t)[0]), limits(t)[1]),
    "max(a, b)": lambda a, b, c, t: max(a, b),
    "max3(a, b, c)": lambda a, b, c, t: max(a, b, c),
    "median3(a, b, c)": lambda a, b, c, t: sorted([a, b, c])[1],
    "min(a, b)": lambda a, b, c, t: min(a, b),
    "min3(a, b, c)": lambda a, b, c, t: min(a, b, c),
    "mulhi(a, b)": lambda a, b, c, t: a * b >> BITS[t],
    "popcount(a)": lambda a, b, c, t: raw(a, t).bit_count(),
    "reverse_bits(a)": lambda a, b, c, t: int(f"{raw(a, t):0{BITS[t]}b}"[::-1], 2),
    "rhadd(a, b)": lambda a, b, c, t: (a + b + 1) >> 1,
    "rotate(a, b)": lambda a, b, c, t: rotate(a, b, t),
    "subsat(a, b)": lambda a, b, c, t: min(max(a - b, limits(t)[0]), limits(t)[1]),
    "select(a, b, a < c)": lambda a, b, c, t: b if a < c else a,
}  # fmt: skip
ON_VECTORS = ["abs(a)", "addsat(a, b)", "clz(a)", "ctz(a)", "hadd(a, b)", "madhi(a, b, c)",
              "madsat(a, b, c)", "max(a, b)", "max3(a, b, c)", "median3(a, b, c)", "min(a, b)",
              "min3(a, b, c)", "mulhi(a, b)", "popcount(a)", "reverse_bits(a)", "rhadd(a, b)",
              "rotate(a, b)", "subsat(a, b)", "absdiff(a, b)"]  # fmt: skip


@pytest.mark.parametrize("kind", BITS)
def test_functions_of_integers(kind):
    both = INTEGER | {on_vectors(e): INTEGER[e] for e in ON_VECTORS}
    rng = np.random.default_rng(2)
    low, high = limits(kind)
    given = [rng.integers(low, high, N, NUMPY[kind], endpoint=True) for _ in range(3)]
    given[0][:3], given[1][:3] = (0, high, low), (low, high, low)
    out = run(kind, list(both), given)
    numbers = [[int(v) for v in x] for x in given]
    for (expression, function), row in zip(both.items(), out, strict=True):
        wanted = [wrap(function(*v, kind), kind) for v in zip(*numbers, strict=True)]
        assert row.tolist() == wanted, expression


def test_products_of_24_bits():
    given = [np.array([5, 1 << 25, 0xFFFFFF, 7] * 16, np.uint32)] * 3
    out = run("uint", ["mul24(a, b)", "mad24(a, b, c)"], given)
    low = [int(v) & 0xFFFFFF for v in given[0]]
    assert out[0].tolist() == [v * v & 0xFFFFFFFF for v in low]
    whole = [int(v) for v in given[2]]
    assert out[1].tolist() == [(v * v + w) & 0xFFFFFFFF for v, w in zip(low, whole, strict=True)]


@pytest.mark.parametrize(
    "name,bits,lanes,signed",
    [("unorm4x8", 8, 4, False), ("snorm4x8", 8, 4, True), ("unorm2x16", 16, 2, False),
     ("snorm2x16", 16, 2, True)],
)  # fmt: skip
def test_packing(name, bits, lanes, signed):
    source = f"""{HEAD}
kernel void k(device const uint* x [[buffer(0)]], device float* o [[buffer(1)]],
              device uint* y [[buffer(2)]], uint i [[thread_position_in_grid]]) {{
  const float{lanes} v = unpack_{name}_to_float(x[i]);
  for (int k = 0; k < {lanes}; ++k) o[i * {lanes} + k] = v[k];
  y[i] = pack_float_to_{name}(v);
}}"""
    x = np.random.default_rng(3).integers(0, 2**32, N, np.uint32)
    out, back = np.zeros((N, lanes), np.float32), np.zeros(N, np.uint32)
    mslsim.compile_shader(source, "none").k(x, out, back, threads=N, group_size=N)
    parts = x.view(f"{'i' if signed else 'u'}{bits // 8}").reshape(N, lanes).astype(np.float64)
    most = 2 ** (bits - signed) - 1
    np.testing.assert_allclose(out, np.maximum(parts / most, -1), rtol=1e-6)
    least = -(most + 1)
    same = (parts != least).all(1) if signed else np.ones(N, bool)
    np.testing.assert_array_equal(back[same], x[same])


def quad(v, i):
    """The values of the lanes of i's quad."""
    return v[i // 4 * 4 : i // 4 * 4 + 4]


LANES = {
    "simd_sum(v)": lambda v, i: v.sum(),
    "simd_max(v)": lambda v, i: v.max(),
    "simd_min(v)": lambda v, i: v.min(),
    "simd_product(v)": lambda v, i: np.prod(v),
    "simd_prefix_inclusive_sum(v)": lambda v, i: v[: i + 1].sum(),
    "simd_prefix_exclusive_sum(v)": lambda v, i: v[:i].sum(),
    "simd_prefix_inclusive_product(v)": lambda v, i: np.prod(v[: i + 1]),
    "simd_prefix_exclusive_product(v)": lambda v, i: np.prod(v[:i]),
    "simd_broadcast(v, 5)": lambda v, i: v[5],
    "simd_broadcast_first(v)": lambda v, i: v[0],
    "simd_shuffle(v, (i * 7) % 32)": lambda v, i: v[i * 7 % 32],
    "simd_shuffle_xor(v, 9)": lambda v, i: v[i ^ 9],
    "simd_shuffle_rotate_up(v, 3)": lambda v, i: v[(i - 3) % 32],
    "simd_shuffle_rotate_down(v, 3)": lambda v, i: v[(i + 3) % 32],
    "simd_shuffle_and_fill_up(v, w, 2)": lambda v, i: v[i - 2] if i >= 2 else v[30 + i],
    "simd_shuffle_and_fill_down(v, w, 2)": lambda v, i: v[i + 2] if i < 30 else v[i - 30],
    "simd_shuffle_down(v, 2 * (i < 30))": lambda v, i: v[i + 2 * (i < 30)],
    "simd_shuffle_up(v, 2 * (i > 1))": lambda v, i: v[i - 2 * (i > 1)],
    "simd_is_first() + 2 * simd_all(v > 0) + 4 * simd_any(v == 0)": lambda v, i: 4 + (i == 0),
    "popcount(uint(ulong(simd_ballot(v > 1)))) + simd_ballot(true).all()": (
        lambda v, i: (v > 1).sum() + 1
    ),
    "quad_sum(v)": lambda v, i: quad(v, i).sum(),
    "quad_product(v)": lambda v, i: np.prod(quad(v, i)),
    "quad_max(v)": lambda v, i: quad(v, i).max(),
    "quad_min(v)": lambda v, i: quad(v, i).min(),
    "quad_prefix_inclusive_sum(v)": lambda v, i: quad(v, i)[: i % 4 + 1].sum(),
    "quad_prefix_exclusive_sum(v)": lambda v, i: quad(v, i)[: i % 4].sum(),
    "quad_prefix_inclusive_product(v)": lambda v, i: np.prod(quad(v, i)[: i % 4 + 1]),
    "quad_prefix_exclusive_product(v)": lambda v, i: np.prod(quad(v, i)[: i % 4]),
    "quad_broadcast(v, 2)": lambda v, i: quad(v, i)[2],
    "quad_broadcast_first(v)": lambda v, i: quad(v, i)[0],
    "quad_shuffle(v, i * 3 % 4)": lambda v, i: quad(v, i)[i * 3 % 4],
    "quad_shuffle_xor(v, 1)": lambda v, i: v[i ^ 1],
    "quad_shuffle_down(v, i % 4 < 3)": lambda v, i: v[i + (i % 4 < 3)],
    "quad_shuffle_up(v, i % 4 > 0)": lambda v, i: v[i - (i % 4 > 0)],
    "quad_shuffle_rotate_down(v, 3)": lambda v, i: quad(v, i)[(i + 3) % 4],
    "quad_shuffle_rotate_up(v, 3)": lambda v, i: quad(v, i)[(i - 3) % 4],
    "quad_shuffle_and_fill_down(v, w, 1)": lambda v, i: quad(v, i)[(i + 1) % 4],
    "quad_shuffle_and_fill_up(v, w, 1)": lambda v, i: quad(v, i)[(i - 1) % 4],
    "quad_is_first() + 2 * quad_all(v > 1) + 4 * quad_any(v > 1)": (
        lambda v, i: (i % 4 == 0) + 2 * (quad(v, i) > 1).all() + 4 * (quad(v, i) > 1).any()
    ),
    "uint(quad_ballot(v > 1))": lambda v, i: sum(int(b) << n for n, b in enumerate(quad(v, i) > 1)),
}
BITWISE = {
    "simd_and(v)": lambda v, i: np.bitwise_and.reduce(v),
    "simd_or(v)": lambda v, i: np.bitwise_or.reduce(v),
    "simd_xor(v)": lambda v, i: np.bitwise_xor.reduce(v),
    "quad_and(v)": lambda v, i: np.bitwise_and.reduce(quad(v, i)),
    "quad_or(v)": lambda v, i: np.bitwise_or.reduce(quad(v, i)),
    "quad_xor(v)": lambda v, i: np.bitwise_xor.reduce(quad(v, i)),
}


@pytest.mark.parametrize(
    "kind", ["char", "uchar", "short", "ushort", "int", "uint", "half", "float"]
)
def test_functions_of_lanes(kind):
    table = LANES | ({} if kind in ("half", "float") else BITWISE)
    lines = "".join(f"  o[{k * 32} + i] = {e};\n" for k, e in enumerate(table))
    source = f"""{HEAD}
kernel void k(device const {kind}* x [[buffer(0)]], device {kind}* o [[buffer(1)]],
              ushort i [[thread_index_in_simdgroup]]) {{
  const {kind} v = x[i], w = v;
{lines}}}"""
    # few enough that sums and products are exact in each type
    x = np.array([1, 2, 1, 1] + [1] * 24 + [2, 1, 0, 1], NUMPY[kind])
    out = np.zeros((len(table), 32), NUMPY[kind])
    mslsim.compile_shader(source, "none").k(x, out, threads=32, group_size=32)
    for (expression, function), row in zip(table.items(), out, strict=True):
        assert row.tolist() == [function(x, i) for i in range(32)], expression
