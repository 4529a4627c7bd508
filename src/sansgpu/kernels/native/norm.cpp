// Residual additions with dropout, fused with LayerNorm or RMSNorm; kernels/norm.py has the reference.
//
// N rows, D width. Every kernel is one pass over memory.

#include "norm.h"
#include "parallel.h"
#include "values.h"

namespace sansgpu {
namespace {

constexpr int64_t GRAIN = 1 << 14, MIN_ROWS = 8;  // minimum values and rows per unit of work

// Writes y after dropout, plus `base` if it is not null. Drops the same values as `dropout` in update.cpp; `start` is
// the index of y's first value in its tensor.
inline void add_dropped(const float* base, const float* y, int64_t start, int64_t count, Dropout drop,
                        float* __restrict to) {
  const auto term = [=](int64_t i) { return base == nullptr ? 0.0f : base[i]; };
  if (drop.threshold == 0)
    for (int64_t i = 0; i < count; ++i) to[i] = term(i) + y[i];
  else
    for (int64_t done = 0; done < count;) {
      const int64_t place = (start + done) % Dropout::BLOCK, end = std::min(count, done + Dropout::BLOCK - place);
      const uint32_t row = drop.row((start + done) / Dropout::BLOCK, 0);
      for (int64_t i = done; i < end; ++i) to[i] = term(i) + y[i] * drop.factor(row, place + i - done);
      done = end;
    }
}

// N rows of D values, divided into units of work.
struct RowUnits {
  int64_t N, D;
  int64_t rows() const { return std::max(MIN_ROWS, GRAIN / std::max<int64_t>(D, 1)); }
  int64_t count() const { return divide_up(N, rows()); }

  // Calls work(unit, first, end, scratch, room) for the rows [first, end) of each unit, on all threads. `scratch` has
  // `buffers` buffers of `room` values each.
  template <typename F>
  void each(int64_t buffers, const F& work) const {
    parallel_units(count(), [&](Units& units) {
      const int64_t room = round_up(D, 16);
      Buffer<float> scratch(buffers * room);
      for (int64_t unit; units.draw(unit);) work(unit, unit * rows(), std::min(N, (unit + 1) * rows()), scratch, room);
    });
  }
};

}  // namespace

// Computes sum = x + dropout(y).
SANSGPU_KERNEL void residual(const float* x, const void* y, int64_t y_narrow, float* sum, int64_t N, int64_t D, double p,
                             int64_t seed) {
  const Dropout drop(p, seed);
  const Input added(y, y_narrow);
  const RowUnits units{N, D};
  units.each(1, [=](int64_t, int64_t first, int64_t end, float* scratch, int64_t) {
    for (int64_t start = first * D; start < end * D; start += D)
      add_dropped(x + start, added.read(start, D, scratch), start, D, drop, sum + start);
  });
}

// Computes the gradient of y from that of the sum.
SANSGPU_KERNEL void residual_gradient(const float* grad, void* y_grad, int64_t y_narrow, int64_t N, int64_t D, double p,
                                      int64_t seed) {
  const Dropout drop(p, seed);
  const Output to(y_grad, y_narrow);
  const RowUnits units{N, D};
  units.each(1, [=](int64_t, int64_t first, int64_t end, float* scratch, int64_t) {
    for (int64_t start = first * D; start < end * D; start += D) {
      float* row = to.place(start, scratch);
      add_dropped(nullptr, grad + start, start, D, drop, row);
      to.write(start, D, row);
    }
  });
}

// Normalizes x or, unless y is null, sum = x + dropout(y) with x in fp32.
SANSGPU_KERNEL void norm(const void* x, int64_t x_narrow, const void* y, int64_t y_narrow, float* sum,
                         const float* weight, const float* bias, void* out, int64_t out_narrow, int64_t N, int64_t D,
                         double eps, int64_t centered, double p, int64_t seed) {
  const NormOptions options(eps, centered);
  const Dropout drop(p, seed);
  const Input from(x, x_narrow), added(y, y_narrow);
  const Output to(out, out_narrow);
  const RowUnits units{N, D};
  units.each(3, [=](int64_t, int64_t first, int64_t end, float* scratch, int64_t room) {
    for (int64_t start = first * D; start < end * D; start += D) {
      const float* row = from.read(start, D, scratch);
      if (y != nullptr) {
        add_dropped(row, added.read(start, D, scratch + room), start, D, drop, sum + start);
        row = sum + start;
      }
      float* normalized = to.place(start, scratch + 2 * room);
      normalize(row, weight, bias, D, options, normalized);
      to.write(start, D, normalized);
    }
  });
}

// Computes the gradients of `norm`'s inputs. x is the normalized input (the sum, if there is a y), and sum_grad is the
// gradient of the sum or null. Gradients whose pointer is null are not computed.
SANSGPU_KERNEL void norm_gradient(const void* grad, int64_t grad_narrow, const float* sum_grad, const void* x,
                                  int64_t x_narrow, const float* weight, void* x_grad, void* y_grad, int64_t y_narrow,
                                  float* weight_grad, float* bias_grad, int64_t N, int64_t D, double eps,
                                  int64_t centered, double p, int64_t seed) {
  const NormOptions options(eps, centered);
  const Dropout drop(p, seed);
  const Input from(x, x_narrow), out_grad(grad, grad_narrow);
  const Output to(x_grad, x_narrow), to_y(y_grad, y_narrow);
  const RowUnits units{N, D};
  const UnitSums weight_sums(units.count(), D, weight_grad != nullptr), bias_sums(units.count(), D, bias_grad != nullptr);
  units.each(4, [&](int64_t unit, int64_t first, int64_t end, float* scratch, int64_t room) {
    float *weight_sum = weight_sums.of(unit), *bias_sum = bias_sums.of(unit);
    for (int64_t start = first * D; start < end * D; start += D) {
      const float* row = from.read(start, D, scratch);
      const float* g = out_grad.read(start, D, scratch + room);
      float* gradient = to.place(start, scratch + 2 * room);
      normalize_gradient(g, row, weight, sum_grad == nullptr ? nullptr : sum_grad + start, D, options, gradient,
                         weight_sum, bias_sum);
      to.write(start, D, gradient);
      if (y_grad != nullptr) {
        float* dropped = to_y.place(start, scratch + 3 * room);
        add_dropped(nullptr, gradient, start, D, drop, dropped);
        to_y.write(start, D, dropped);
      }
    }
  });
  weight_sums.total(weight_grad);
  bias_sums.total(bias_grad);
}

}  // namespace sansgpu
