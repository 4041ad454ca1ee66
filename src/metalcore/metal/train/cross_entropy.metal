// SPDX-License-Identifier: MIT
//   y = softcap * tanh(x / softcap), or x without CAP;  p = exp(y - lse)
//   loss = (1 - e) w_t (lse - y_t) + e / n * sum_j w_j (lse - y_j) + z w_t lse^2
//   dy_j = p_j * ((1 - e) w_t + e / n * sum(w) + 2 z w_t lse) - e / n * w_j - [j = t] (1 - e) w_t
//
// The grid is lanes x rows, one threadgroup per row, in chunks of WIDTH values. Its threads keep
// KEEP chunks each, or none of a long row, which they read again for the gradient. That may take
// the memory of the logits. For a mean, losses and gradients are divided by *divisor. A target that
// is no class makes them NaN. Without SMOOTH, e is 0.
// cross_entropy_divisor adds up the targets, cross_entropy_total the losses of all rows, in one
// threadgroup: the order of a sum depends on the number of rows alone.

#include "log_sum_exp.h"

// The logits of a row as the loss sees them.
template <bool CAP>
struct soft_cap {
  float cap;
  float per_cap;

  template <typename wide>
  wide capped(wide x) const thread {
    return CAP ? cap * precise::tanh(x * per_cap) : x;
  }
  // of y = capped(x) by x
  template <typename wide>
  wide slope(wide y) const thread {
    const wide t = y * per_cap;
    return 1.0f - t * t;
  }
};

// weight[i] where there is a weight, else 1.
template <bool WEIGHT, typename wide, typename stored>
inline wide weight_at(device const stored* weight, uint i) {
  return WEIGHT ? wide(weight[i]) : wide(1.0f);
}

// What one thread adds up along a row: sums over classes only where labels are smoothed.
template <bool SMOOTH>
struct row_sums {
  running_sum exps;
  float weighted;
  float weights;

  row_sums() : weighted(0.0f), weights(0.0f) {}

  template <typename wide>
  void smooth(wide y, wide w) thread {
    if (SMOOTH) {
      weighted += total(w * y);
      weights += total(w);
    }
  }
};

// Of a row: dx = p * mass - w * even, and at the target - nll.
template <bool CAP, bool SMOOTH>
struct row_gradient {
  soft_cap<CAP> cap;
  float lse;
  float mass;
  float even;
  float nll;

  // of logits x, whose weights are w
  template <typename wide>
  wide at(wide x, wide w) const thread {
    const wide y = cap.capped(x);
    wide d = power(y - lse) * mass;
    if (SMOOTH) {
      d -= w * even;
    }
    return CAP ? d * cap.slope(y) : d;
  }
  float at_target(float x, float w) const thread {
    return at(x, w) - (CAP ? nll * cap.slope(cap.capped(x)) : nll);
  }
};

template <
    typename T,
    int WIDTH,
    int KEEP,
    bool WEIGHT,
    bool MEAN,
    bool GRADIENT,
    bool SMOOTH,
    bool CAP>
[[max_total_threads_per_threadgroup(512)]] kernel void cross_entropy(
    device const typename chunk<T, WIDTH>::stored* logits [[buffer(0)]],
    device const T* values [[buffer(1)]],
    constant long* targets [[buffer(2)]],
    device const typename chunk<float, WIDTH>::stored* weight [[buffer(3)]],
    device const float* weights [[buffer(4)]],
    constant float* divisor [[buffer(5)]],
    device float* losses [[buffer(6)]],
    device float* lse_out [[buffer(7)]],
    device typename chunk<T, WIDTH>::stored* dlogits [[buffer(8)]],
    constant uint& n [[buffer(9)]],
    constant long& ignore_index [[buffer(10)]],
    constant float& smoothing [[buffer(11)]],
    constant float& z_loss [[buffer(12)]],
    constant float& softcap [[buffer(13)]],
    uint2 at [[thread_position_in_grid]],
    uint2 size [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  constexpr bool WEIGHS = SMOOTH && WEIGHT;
  threadgroup float scratch[128];
  const uint lane = at.x;
  const uint lanes = size.x;
  const uint row = at.y;
  logits += ulong(row) * n;
  dlogits += ulong(row) * n;
  values += ulong(row) * n * WIDTH;
  const long wanted = targets[row];

  if (wanted == ignore_index) {
    for (uint i = lane; GRADIENT && i < n; i += lanes) {
      dlogits[i] = stored(0.0f);
    }
    if (lane == 0) {
      losses[row] = 0.0f;
      lse_out[row] = 0.0f;
    }
    return;
  }
  const bool known = wanted >= 0 && wanted < long(n) * WIDTH;
  const uint target = known ? uint(wanted) : 0;
  const float w_target = !known ? NAN : (WEIGHT ? weights[target] : 1.0f);

  row_gradient<CAP, SMOOTH> gradient;
  gradient.cap = {softcap, CAP ? 1.0f / softcap : 0.0f};
  stored kept[KEEP > 0 ? KEEP : 1];
  row_sums<SMOOTH> sums;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint i = lane + k * lanes;
    if (i < n) {
      kept[k] = logits[i];
      const wide y = gradient.cap.capped(wide(kept[k]));
      sums.exps.add(y);
      sums.smooth(y, weight_at<WEIGHS, wide>(weight, i));
    }
  }
  uint i = lane + KEEP * lanes;
  for (; i + lanes < n; i += 2 * lanes) {
    const wide a = gradient.cap.capped(wide(logits[i]));
    const wide b = gradient.cap.capped(wide(logits[i + lanes]));
    sums.exps.add(a, b);
    sums.smooth(a, weight_at<WEIGHS, wide>(weight, i));
    sums.smooth(b, weight_at<WEIGHS, wide>(weight, i + lanes));
  }
  if (i < n) {
    const wide y = gradient.cap.capped(wide(logits[i]));
    sums.exps.add(y);
    sums.smooth(y, weight_at<WEIGHS, wide>(weight, i));
  }

  const float lse = threadgroup_log_sum_exp(sums.exps, scratch, lane, lanes);
  if (SMOOTH) {
    sums.weighted = threadgroup_sum(sums.weighted, scratch + 64, lane, lanes);
    sums.weights = threadgroup_sum(sums.weights, scratch + 96, lane, lanes);
  }
  const float part = MEAN ? 1.0f / *divisor : 1.0f;
  const float nll = SMOOTH ? (1.0f - smoothing) * w_target : w_target;
  const float even = SMOOTH ? smoothing / float(n * WIDTH) : 0.0f;
  const float x_target = float(values[target]);
  if (lane == 0) {
    float loss = nll * (lse - gradient.cap.capped(x_target)) + z_loss * w_target * lse * lse;
    if (SMOOTH) {
      loss += even * (sums.weights * lse - sums.weighted);
    }
    losses[row] = loss * part;
    lse_out[row] = lse;
  }
  if (!GRADIENT) {
    return;
  }
  gradient.lse = lse;
  gradient.mass = (nll + even * sums.weights + 2.0f * z_loss * w_target * lse) * part;
  gradient.even = even * part;
  gradient.nll = nll * part;
  // the logit of the target has been read, which the gradient may overwrite
  threadgroup_barrier(mem_flags::mem_device);
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const uint j = lane + k * lanes;
    if (j < n) {
      dlogits[j] = stored(gradient.at(wide(kept[k]), weight_at<WEIGHS, wide>(weight, j)));
    }
  }
  for (uint j = lane + KEEP * lanes; j < n; j += lanes) {
    dlogits[j] = stored(gradient.at(wide(logits[j]), weight_at<WEIGHS, wide>(weight, j)));
  }
  // all are written, the target as if it were another
  threadgroup_barrier(mem_flags::mem_device);
  if (lane == 0) {
    const float w = weight_at<WEIGHS, float>(weights, target);
    ((device T*)dlogits)[target] = T(gradient.at_target(x_target, w));
  }
}

// The number of targets that count, or the sum of their weights.
template <bool WEIGHT>
[[max_total_threads_per_threadgroup(512)]] kernel void cross_entropy_divisor(
    device const long* targets [[buffer(0)]],
    device const float* weights [[buffer(1)]],
    device float* divisor [[buffer(2)]],
    constant uint& rows [[buffer(3)]],
    constant long& classes [[buffer(4)]],
    constant long& ignore_index [[buffer(5)]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  float sum = 0.0f;
  for (uint row = lane; row < rows; row += lanes) {
    const long target = targets[row];
    if (target != ignore_index) {
      // one that is no class makes the loss NaN by itself
      sum += WEIGHT ? weights[min(max(target, long(0)), classes - 1)] : 1.0f;
    }
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    *divisor = sum;
  }
}

template <bool MEAN>
[[max_total_threads_per_threadgroup(512)]] kernel void cross_entropy_total(
    device const float* losses [[buffer(0)]],
    device const float* divisor [[buffer(1)]],
    device float* loss [[buffer(2)]],
    constant uint& rows [[buffer(3)]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  float sum = 0.0f;
  for (uint row = lane; row < rows; row += lanes) {
    sum += losses[row];
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    // the mean of nothing is NaN
    *loss = MEAN && *divisor == 0.0f ? NAN : sum;
  }
}
