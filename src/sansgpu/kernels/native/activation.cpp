// Activations of feed-forward layers and their gradients, each in one pass over memory. The backward pass recomputes
// them from the inputs. kernels/pointwise.py has the reference.

#include "parallel.h"
#include "values.h"

namespace sansgpu {
namespace {

constexpr int64_t GRAIN = 1 << 15;  // values per unit of work
constexpr int64_t CHUNK = 1 << 10;  // values that stay in L1 cache between conversion, computation and rounding
static_assert(GRAIN % CHUNK == 0, "a chunk lies in one unit");

// The value of an activation and its derivatives with respect to x and y.
struct Slope {
  float value, x, y;
};

// Computes erf(x) with absolute error 1.5e-7 (Abramowitz and Stegun, 7.1.26), given exp(-x^2).
inline float error_function(float x, float power) {
  const float t = 1.0f / (1.0f + 0.3275911f * std::fabs(x));
  const float sum = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return std::copysign(1.0f - sum * power, x);
}

// Returns whether an activation of x is multiplied by y.
constexpr bool is_gated(int64_t kind) { return kind == SWIGLU || kind == GEGLU || kind == GEGLU_TANH; }

template <int64_t kind>
inline Slope slope(float x, float y) {
  if constexpr (kind == GEGLU || kind == GEGLU_TANH) {
    const Slope of_gate = slope<kind == GEGLU ? GELU : GELU_TANH>(x, 0.0f);
    return {of_gate.value * y, of_gate.x * y, of_gate.value};
  }
  if constexpr (kind == SWIGLU) {
    const float s = sigmoid(x);
    return {x * s * y, s * (1.0f + x * (1.0f - s)) * y, x * s};
  }
  if constexpr (kind == GELU_TANH) {
    const float s = sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    return {x * s, s + x * s * (1.0f - s) * 1.5957691216f * (1.0f + 0.134145f * x * x), 0.0f};
  }
  if constexpr (kind == GELU) {
    const float power = exp2_nonpositive(-0.5f * LOG2E * x * x);
    const float share = 0.5f * (1.0f + error_function(0.7071067812f * x, power));
    return {x * share, share + x * 0.3989422804f * power, 0.0f};
  }
  const float positive = x <= 0.0f ? 0.0f : x;  // NaN remains NaN
  if constexpr (kind == RELU_SQUARED) return {positive * positive, 2.0f * positive, 0.0f};
  return {positive, x <= 0.0f ? 0.0f : 1.0f, 0.0f};
}

using Activate = void (*)(const float* x, const float* y, float* values, int64_t count);
using Differentiate = void (*)(const float* grad, const float* x, const float* y, float* x_grad, float* y_grad,
                               float* values, int64_t count);

template <int64_t kind>
void activate(const float* __restrict x, const float* __restrict y, float* __restrict values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = slope<kind>(x[i], is_gated(kind) ? y[i] : 0.0f).value;
}

template <int64_t kind>
void differentiate(const float* __restrict grad, const float* __restrict x, const float* __restrict y,
                   float* __restrict x_grad, float* __restrict y_grad, float* __restrict values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Slope at = slope<kind>(x[i], is_gated(kind) ? y[i] : 0.0f);
    values[i] = at.value;
    x_grad[i] = grad[i] * at.x;
    if constexpr (is_gated(kind)) y_grad[i] = grad[i] * at.y;
  }
}

// N values in rows of `width`, which lie `stride` apart in the inputs and their gradients, and next to each other in
// the results.
struct Rows {
  int64_t N, width, stride;

  // Calls work(place, start, count, scratch) for chunks that each lie in one row, from index `place` of the inputs and
  // `start` of the results on; `scratch` has room for 6 chunks.
  template <typename F>
  void each_chunk(const F& work) const {
    parallel_units(divide_up(N, GRAIN), [&](Units& units) {
      alignas(64) float scratch[6 * CHUNK];
      for (int64_t unit; units.draw(unit);) {
        const int64_t end = std::min(N, (unit + 1) * GRAIN);
        for (int64_t start = unit * GRAIN, count; start < end; start += count) {
          const int64_t column = start % width;
          count = std::min({CHUNK, end - start, width - column});
          work(start / width * stride + column, start, count, scratch);
        }
      }
    });
  }
};

}  // namespace

// Computes an activation of N values in rows of `width`, in the dtype of its inputs, whose rows lie `stride` apart. y is
// null unless a gate is activated.
SANSGPU_KERNEL void activation(int64_t kind, int64_t narrow, const void* x, const void* y, void* out, int64_t N,
                               int64_t width, int64_t stride) {
  constexpr Activate FUNCTIONS[] = {activate<SWIGLU>, activate<GELU_TANH>, activate<GELU>, activate<RELU_SQUARED>,
                                    activate<RELU>, activate<GEGLU>, activate<GEGLU_TANH>};
  const Input first(x, narrow), second(y, narrow);
  const Output values(out, narrow);
  const Rows rows{N, width, stride};
  rows.each_chunk([=, function = FUNCTIONS[kind]](int64_t place, int64_t start, int64_t count, float* scratch) {
    const float* a = first.read(place, count, scratch);
    const float* b = is_gated(kind) ? second.read(place, count, scratch + CHUNK) : nullptr;
    float* to = values.place(start, scratch + 2 * CHUNK);
    function(a, b, to, count);
    values.write(start, count, to);
  });
}

// Computes the gradients of the activation's inputs and, unless `out` is null, the activation itself.
SANSGPU_KERNEL void activation_gradient(int64_t kind, int64_t narrow, const void* grad, const void* x, const void* y,
                                        void* x_grad, void* y_grad, void* out, int64_t N, int64_t width,
                                        int64_t stride) {
  constexpr Differentiate FUNCTIONS[] = {
      differentiate<SWIGLU>, differentiate<GELU_TANH>, differentiate<GELU>, differentiate<RELU_SQUARED>,
      differentiate<RELU>,   differentiate<GEGLU>,     differentiate<GEGLU_TANH>};
  const Input of_values(grad, narrow), first(x, narrow), second(y, narrow);
  const Output to_first(x_grad, narrow), to_second(y_grad, narrow), values(out, narrow);
  const Rows rows{N, width, stride};
  rows.each_chunk([=, function = FUNCTIONS[kind]](int64_t place, int64_t start, int64_t count, float* scratch) {
    const bool gated = is_gated(kind), again = values.data != nullptr;
    const float* g = of_values.read(start, count, scratch);
    const float* a = first.read(place, count, scratch + CHUNK);
    const float* b = gated ? second.read(place, count, scratch + 2 * CHUNK) : nullptr;
    float* to_x = to_first.place(place, scratch + 3 * CHUNK);
    float* to_y = gated ? to_second.place(place, scratch + 4 * CHUNK) : nullptr;
    float* to = again ? values.place(start, scratch + 5 * CHUNK) : scratch + 5 * CHUNK;
    function(g, a, b, to_x, to_y, to, count);
    to_first.write(place, count, to_x);
    if (gated) to_second.write(place, count, to_y);
    if (again) values.write(start, count, to);
  });
}

}  // namespace sansgpu
