// Matmuls of linear layers with a LoRA adapter for kernels/frozen_linear.py.

#include "quantized_rows.h"

namespace sansgpu {
namespace {

// Adds a row of H (., R) times a panel (R, COLUMNS) of a matrix to a row of a full tile of C.
template <typename T>
void add_low_rank(const T* h, int64_t R, const float* panel, float* sums) {
  float own[COLUMNS];  // kept in registers
  std::memcpy(own, sums, sizeof(own));
  for (int64_t k = 0; k < R; ++k, panel += COLUMNS) {
    const float factor = load(h + k);
    for (int64_t j = 0; j < COLUMNS; ++j) own[j] += factor * panel[j];
  }
  std::memcpy(sums, own, sizeof(own));
}

// Stores rows of C after adding the bias and the low-rank product of H (M, R) and a matrix (R, N).
template <typename T>
struct StoreWithAdapter {
  T* to;
  int64_t ld;
  const float* bias;  // may be null
  const T* h;
  int64_t R;
  const float* table;  // in panels of COLUMNS columns

  void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
    if (bias != nullptr)
      for (int64_t j = 0; j < count; ++j) sums[j] += bias[column + j];
    for (int64_t done = 0; done < count;) {
      const int64_t start = (column + done) % COLUMNS, width = std::min(COLUMNS - start, count - done);
      const float* panel = table + (column + done - start) * R + start;
      if (width == COLUMNS)
        add_low_rank(h + row * R, R, panel, sums + done);
      else
        for (int64_t k = 0; k < R; ++k)
          for (int64_t j = 0; j < width; ++j) sums[done + j] += load(h + row * R + k) * panel[k * COLUMNS + j];
      done += width;
    }
    store_row(to + row * ld + column, sums, count);
  }
};

// Stores rows of C, multiplied by a factor.
template <typename T>
struct StoreScaled {
  T* to;
  int64_t ld;
  float factor;

  void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
    for (int64_t j = 0; j < count; ++j) sums[j] *= factor;
    store_row(to + row * ld + column, sums, count);
  }
};

// Computes C = factor * A (M, K) B (K, N).
template <typename T>
void multiply(int64_t M, int64_t N, int64_t K, Operand<T> a, Operand<T> b, T* c, float factor = 1.0f) {
  Multiplication<T, StoreScaled<T>>({M, N, K, a, b}, {c, N, factor}).run();
}

// Converts a matrix (R, N) to fp32 and packs it into panels of COLUMNS columns.
template <typename T>
void pack_table(const Operand<T>& table, int64_t R, int64_t N, float* to) {
  constexpr int64_t PANELS = 8;  // per unit of work
  parallel_each(divide_up(N, PANELS * COLUMNS), [&](int64_t unit) {
    for (int64_t column = unit * PANELS * COLUMNS; column < std::min(N, (unit + 1) * PANELS * COLUMNS); ++column)
      for (int64_t k = 0; k < R; ++k)
        to[(column / COLUMNS * R + k) * COLUMNS + column % COLUMNS] = load(table.from(k, column).at);
  });
}

// Computes C = A (M, K) B (K, N) + H (M, R) D (R, N) + bias (N,), where A, H and C are row-major. A and B are packed as
// values of type P.
template <typename P, typename T, typename Right>
void multiply_with_adapter(int64_t M, int64_t N, int64_t K, int64_t R, const T* a, const Right& b, const T* h,
                           Operand<T> d, const float* bias, T* c) {
  Buffer<float> table(R * round_up(N, COLUMNS));
  pack_table(d, R, N, table);
  multiply_rows<P>(M, N, K, a, b, StoreWithAdapter<T>{c, N, bias, h, R, table});
}

// N rows, I inputs, O outputs, R rank. W (O, I) is the weight, which may be quantized; `first` is LoRA's A (R, I), and
// `second` is LoRA's B (O, R).
template <typename T, typename P, typename Weight>
struct Layer {
  int64_t N, I, O, R;
  Weight weight;
  const T *first, *second;
  float scale;

  // Computes h = scale source A^T (N, R) and y = x W^T + bias + h B^T (N, O). `source` is x after the adapter's
  // dropout.
  void forward(const T* x, const T* source, const float* bias, T* h, T* y) const {
    multiply<T>(N, R, I, {source, I, false}, {first, I, true}, h, scale);
    multiply_with_adapter<P, T>(N, O, I, R, x, weight.turned(), h, {second, R, true}, bias, y);
  }

  // Gradients that are null are not computed. If `source_grad` is null, `x_grad` includes the gradient of the source.
  void backward(const T* grad, const T* source, const T* h, T* x_grad, T* source_grad, T* first_grad,
                T* second_grad) const {
    Buffer<T> h_grad(N * R);
    multiply<T>(N, R, O, {grad, O, false}, {second, R, false}, h_grad, scale);
    if (source_grad != nullptr) {
      multiply<T>(N, I, R, {h_grad, R, false}, {first, I, false}, source_grad);
      if (x_grad != nullptr) multiply_rows<P>(N, I, O, grad, weight, StoreWithBias<T>{x_grad, I, nullptr});
    } else if (x_grad != nullptr) {
      multiply_with_adapter<P, T>(N, I, O, R, grad, weight, h_grad, {first, I, false}, nullptr, x_grad);
    }
    multiply<T>(R, I, N, {h_grad, R, true}, {source, I, false}, first_grad);
    multiply<T>(O, R, N, {grad, O, true}, {h, R, false}, second_grad);
  }
};

// Calls run(layer) with a layer that multiplies in a precision. The weight may be NOT_QUANTIZED.
template <typename Run>
void with_layer(int64_t precision, int64_t format, const LoraSizes& s, const void* weight, const void* first,
                const void* second, double scale, const Run& run) {
  with_precision(precision, [&]<typename T, typename P>(T, P) {
    with_matrix<T, Dequantized<T, P>>(format, weight, s.I, [&]<typename Weight>(const Weight& matrix) {
      run(Layer<T, P, Weight>{s.N, s.I, s.O, s.R, matrix, static_cast<const T*>(first), static_cast<const T*>(second),
                           static_cast<float>(scale)});
    });
  });
}

}  // namespace

// All tensors have the same dtype, except the bias (fp32) and a quantized weight. See Layer.
SANSGPU_KERNEL void lora_forward(int64_t precision, int64_t format, const LoraSizes* sizes, const void* weight,
                                 const void* first, const void* second, double scale, const void* x,
                                 const void* source, const float* bias, void* h, void* y) {
  const auto run = [&]<typename T, typename P, typename Weight>(const Layer<T, P, Weight>& layer) {
    layer.forward(static_cast<const T*>(x), static_cast<const T*>(source), bias, static_cast<T*>(h),
                  static_cast<T*>(y));
  };
  with_layer(precision, format, *sizes, weight, first, second, scale, run);
}

SANSGPU_KERNEL void lora_backward(int64_t precision, int64_t format, const LoraSizes* sizes, const void* weight,
                                  const void* first, const void* second, double scale, const void* grad,
                                  const void* source, const void* h, void* x_grad, void* source_grad,
                                  void* first_grad, void* second_grad) {
  const auto run = [&]<typename T, typename P, typename Weight>(const Layer<T, P, Weight>& layer) {
    layer.backward(static_cast<const T*>(grad), static_cast<const T*>(source), static_cast<const T*>(h),
                   static_cast<T*>(x_grad), static_cast<T*>(source_grad), static_cast<T*>(first_grad),
                   static_cast<T*>(second_grad));
  };
  with_layer(precision, format, *sizes, weight, first, second, scale, run);
}

}  // namespace sansgpu
