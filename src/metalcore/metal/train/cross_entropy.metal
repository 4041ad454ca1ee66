// SPDX-License-Identifier: MIT
//   y = softcap * tanh(x / softcap), or x where softcap is 0;  p = exp(y - lse)
//   loss = (1 - e) w_t (lse - y_t) + e / n * sum_j w_j (lse - y_j) + z w_t lse^2
//   dy_j = p_j * ((1 - e) w_t + e / n * sum(w) + 2 z w_t lse) - e / n * w_j - [j = t] (1 - e) w_t
//
// One threadgroup per row, in chunks of WIDTH values. Its threads keep KEEP chunks each and read
// the rest again for the gradient, which may take the memory of the logits. For a mean, losses and
// gradients are divided by *divisor. A target that is no class makes them NaN.
// cross_entropy_divisor adds up the targets, cross_entropy_total the losses of all rows, in one
// threadgroup: the order of a sum depends on the number of rows alone.

#include "log_sum_exp.h"

inline float capped(float x, float softcap) {
  return softcap > 0.0f ? softcap * precise::tanh(x / softcap) : x;
}
inline float4 capped(float4 x, float softcap) {
  return softcap > 0.0f ? softcap * precise::tanh(x / softcap) : x;
}

// 1 at the place of the target in chunk i, else 0.
inline float one_at(float, long i, long target) { return i == target ? 1.0f : 0.0f; }
inline float4 one_at(float4, long i, long target) {
  const long first = 4 * i;
  return float4(first == target, first + 1 == target, first + 2 == target, first + 3 == target);
}

// What one thread adds up along a row; sums over classes only where labels are smoothed.
struct row_sums {
  running_sum exps;
  float weighted;
  float weights;

  row_sums() : weighted(0.0f), weights(0.0f) {}

  template <typename wide>
  void add(wide y, wide w, bool smooths) thread {
    exps.add(y);
    if (smooths) {
      weighted += total(w * y);
      weights += total(w);
    }
  }
};

struct row_gradient {
  float lse;
  float nll;
  float even;
  float mass;
  float softcap;
  float divisor;
  long target;

  // of chunk i, whose logits are x and whose weights are w
  template <typename wide>
  wide at(wide x, wide w, long i) const thread {
    const wide y = capped(x, softcap);
    wide d = precise::exp(y - lse) * mass - w * even - one_at(x, i, target) * nll;
    if (softcap > 0.0f) {
      const wide t = y / softcap;
      d *= 1.0f - t * t;
    }
    return d / divisor;
  }
};

// weight[i] where it counts, else 1.
template <typename wide, typename stored>
inline wide weight_at(device const stored* weight, bool counts, long i) {
  return counts ? wide(weight[i]) : wide(1.0f);
}

template <typename T, int WIDTH, int KEEP, bool WEIGHT, bool MEAN, bool GRADIENT>
[[max_total_threads_per_threadgroup(1024)]] kernel void cross_entropy(
    device const typename chunk<T, WIDTH>::stored* logits [[buffer(0)]],
    device const T* values [[buffer(1)]],
    constant long* targets [[buffer(2)]],
    device const typename chunk<float, WIDTH>::stored* weight [[buffer(3)]],
    device const float* weights [[buffer(4)]],
    constant float* divisor [[buffer(5)]],
    device float* losses [[buffer(6)]],
    device float* lse_out [[buffer(7)]],
    device typename chunk<T, WIDTH>::stored* dlogits [[buffer(8)]],
    constant long& n [[buffer(9)]],
    constant long& ignore_index [[buffer(10)]],
    constant float& smoothing [[buffer(11)]],
    constant float& z_loss [[buffer(12)]],
    constant float& softcap [[buffer(13)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  typedef typename chunk<T, WIDTH>::stored stored;
  typedef typename chunk<T, WIDTH>::wide wide;
  threadgroup float scratch[128];
  logits += row * n;
  dlogits += row * n;
  const long classes = n * WIDTH;
  const long target = targets[row];

  if (target == ignore_index) {
    for (long i = lane; GRADIENT && i < n; i += lanes) {
      dlogits[i] = stored(0.0f);
    }
    if (lane == 0) {
      losses[row] = 0.0f;
      lse_out[row] = 0.0f;
    }
    return;
  }
  const bool known = target >= 0 && target < classes;
  const float w_target = !known ? NAN : (WEIGHT ? weights[target] : 1.0f);

  const bool smooths = smoothing > 0.0f;
  const bool weighs = smooths && WEIGHT;

  stored kept[KEEP];
  row_sums sums;
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    if (i < n) {
      kept[k] = logits[i];
      sums.add(capped(wide(kept[k]), softcap), weight_at<wide>(weight, weighs, i), smooths);
    }
  }
  for (long i = lane + KEEP * lanes; i < n; i += lanes) {
    sums.add(capped(wide(logits[i]), softcap), weight_at<wide>(weight, weighs, i), smooths);
  }

  row_gradient gradient;
  gradient.lse = threadgroup_log_sum_exp(sums.exps, scratch, lane, lanes);
  gradient.nll = (1.0f - smoothing) * w_target;
  gradient.even = smoothing / float(classes);
  gradient.softcap = softcap;
  gradient.divisor = MEAN ? *divisor : 1.0f;
  gradient.target = target;
  if (smooths) {
    sums.weighted = threadgroup_sum(sums.weighted, scratch + 64, lane, lanes);
    sums.weights = threadgroup_sum(sums.weights, scratch + 96, lane, lanes);
  }
  const float lse = gradient.lse;
  gradient.mass = gradient.nll + gradient.even * sums.weights + 2.0f * z_loss * w_target * lse;

  if (lane == 0) {
    const float x_target = known ? float(values[row * classes + target]) : NAN;
    const float loss = gradient.nll * (lse - capped(x_target, softcap)) +
                       gradient.even * (sums.weights * lse - sums.weighted) +
                       z_loss * w_target * lse * lse;
    losses[row] = loss / gradient.divisor;
    lse_out[row] = lse;
  }
  if (!GRADIENT) {
    return;
  }
  // the logit of the target has been read, which the gradient may overwrite
  threadgroup_barrier(mem_flags::mem_device);
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    const long i = lane + k * lanes;
    if (i < n) {
      dlogits[i] = stored(gradient.at(wide(kept[k]), weight_at<wide>(weight, weighs, i), i));
    }
  }
  for (long i = lane + KEEP * lanes; i < n; i += lanes) {
    dlogits[i] = stored(gradient.at(wide(logits[i]), weight_at<wide>(weight, weighs, i), i));
  }
}

// The number of targets that count, or the sum of their weights.
template <bool WEIGHT>
[[max_total_threads_per_threadgroup(1024)]] kernel void cross_entropy_divisor(
    device const long* targets [[buffer(0)]],
    device const float* weights [[buffer(1)]],
    device float* divisor [[buffer(2)]],
    constant long& rows [[buffer(3)]],
    constant long& classes [[buffer(4)]],
    constant long& ignore_index [[buffer(5)]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  float sum = 0.0f;
  for (long row = lane; row < rows; row += lanes) {
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
[[max_total_threads_per_threadgroup(1024)]] kernel void cross_entropy_total(
    device const float* losses [[buffer(0)]],
    device const float* divisor [[buffer(1)]],
    device float* loss [[buffer(2)]],
    constant long& rows [[buffer(3)]],
    uint lane [[thread_position_in_threadgroup]],
    uint lanes [[threads_per_threadgroup]]) {
  threadgroup float scratch[32];
  float sum = 0.0f;
  for (long row = lane; row < rows; row += lanes) {
    sum += losses[row];
  }
  sum = threadgroup_sum(sum, scratch, lane, lanes);
  if (lane == 0) {
    // the mean of nothing is NaN
    *loss = MEAN && *divisor == 0.0f ? NAN : sum;
  }
}
