// Activations of feed-forward layers, and their gradients from the inputs, in one pass over memory.
// kernels/activation.py has the reference.

#include "parallel.h"
#include "values.h"

namespace sansgpu {
namespace {

constexpr int64_t GRAIN = 1 << 15;  // values per unit of work
constexpr int64_t CHUNK = 1 << 10;  // values that stay in L1 cache between conversion, computation and rounding

// The functions of x, or of x and y for SwiGLU, as kernels/activation.py numbers them.
enum Kind { SWIGLU, GELU_TANH, GELU, RELU2 };

// The value of a function, or its derivatives.
struct Pair {
  float x, y;
};

// Computes erf(x) with absolute error 1.5e-7 (Abramowitz and Stegun, 7.1.26), given exp(-x^2).
inline float error_function(float x, float power) {
  const float t = 1.0f / (1.0f + 0.3275911f * std::fabs(x));
  const float sum = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return std::copysign(1.0f - sum * power, x);
}

template <Kind kind>
inline float value(float x, float y) {
  if constexpr (kind == SWIGLU) return x * sigmoid(x) * y;
  if constexpr (kind == GELU_TANH) return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
  if constexpr (kind == GELU)
    return 0.5f * x * (1.0f + error_function(0.7071067812f * x, exp2_nonpositive(-0.5f * LOG2E * x * x)));
  const float positive = x > 0.0f ? x : 0.0f;
  return positive * positive;
}

template <Kind kind>
inline Pair derivatives(float x, float y) {
  if constexpr (kind == SWIGLU) {
    const float s = sigmoid(x);
    return {s * (1.0f + x * (1.0f - s)) * y, x * s};
  }
  if constexpr (kind == GELU_TANH) {
    const float s = sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    return {s + x * s * (1.0f - s) * 1.5957691216f * (1.0f + 0.134145f * x * x), 0.0f};
  }
  if constexpr (kind == GELU) {
    const float power = exp2_nonpositive(-0.5f * LOG2E * x * x);
    return {0.5f * (1.0f + error_function(0.7071067812f * x, power)) + x * 0.3989422804f * power, 0.0f};
  }
  return {x > 0.0f ? 2.0f * x : 0.0f, 0.0f};
}

// Calls work(start, count, scratch) for chunks of N values; `scratch` has room for 5 chunks.
template <typename F>
void each_chunk(int64_t N, const F& work) {
  parallel_units(divide_up(N, GRAIN), [&](Units& units) {
    alignas(64) float scratch[5 * CHUNK];
    for (int64_t unit; units.draw(unit);)
      for (int64_t start = unit * GRAIN; start < std::min(N, (unit + 1) * GRAIN); start += CHUNK)
        work(start, std::min(CHUNK, N - start), scratch);
  });
}

template <Kind kind>
void forward(Input x, Input y, Output out, int64_t N) {
  each_chunk(N, [=](int64_t start, int64_t count, float* scratch) {
    const float* a = x.read(start, count, scratch);
    const float* b = kind == SWIGLU ? y.read(start, count, scratch + CHUNK) : a;
    float* __restrict to = out.place(start, scratch + 2 * CHUNK);
    for (int64_t i = 0; i < count; ++i) to[i] = value<kind>(a[i], b[i]);
    out.write(start, count, to);
  });
}

template <Kind kind>
void backward(Input grad, Input x, Input y, Output x_grad, Output y_grad, int64_t N) {
  each_chunk(N, [=](int64_t start, int64_t count, float* scratch) {
    const float* g = grad.read(start, count, scratch);
    const float* a = x.read(start, count, scratch + CHUNK);
    const float* b = kind == SWIGLU ? y.read(start, count, scratch + 2 * CHUNK) : a;
    float* __restrict to_x = x_grad.place(start, scratch + 3 * CHUNK);
    float* __restrict to_y = kind == SWIGLU ? y_grad.place(start, scratch + 4 * CHUNK) : nullptr;
    for (int64_t i = 0; i < count; ++i) {
      const Pair slope = derivatives<kind>(a[i], b[i]);
      to_x[i] = g[i] * slope.x;
      if constexpr (kind == SWIGLU) to_y[i] = g[i] * slope.y;
    }
    x_grad.write(start, count, to_x);
    if constexpr (kind == SWIGLU) y_grad.write(start, count, to_y);
  });
}

}  // namespace

// Computes an activation of N values in the dtype of its inputs; y is null but for SwiGLU.
SANSGPU_KERNEL void activation(int64_t kind, int64_t narrow, const void* x, const void* y, void* out, int64_t N) {
  constexpr decltype(&forward<GELU>) FUNCTIONS[] = {forward<SWIGLU>, forward<GELU_TANH>, forward<GELU>, forward<RELU2>};
  FUNCTIONS[kind]({x, narrow}, {y, narrow}, {out, narrow}, N);
}

// Computes the gradients of its inputs.
SANSGPU_KERNEL void activation_gradient(int64_t kind, int64_t narrow, const void* grad, const void* x, const void* y,
                                        void* x_grad, void* y_grad, int64_t N) {
  constexpr decltype(&backward<GELU>) FUNCTIONS[] = {backward<SWIGLU>, backward<GELU_TANH>, backward<GELU>,
                                                     backward<RELU2>};
  FUNCTIONS[kind]({grad, narrow}, {x, narrow}, {y, narrow}, {x_grad, narrow}, {y_grad, narrow}, N);
}

}  // namespace sansgpu
