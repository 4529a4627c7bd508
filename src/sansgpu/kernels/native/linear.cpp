// The gradients of a linear layer's weight and bias, for kernels/linear.py.
//
// N tokens, O outputs, I inputs. AMX multiplies rows by pairs of rows, so both operands must be repacked, one of them
// transposed. oneDNN's matmul spends as long on that as on the arithmetic. This kernel transposes a strip of 256
// outputs and multiplies it with panels of 64 inputs while both are in L2 cache.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "product.h"

namespace sansgpu {
namespace {

constexpr int64_t STRIP = 256, PANEL = 64, BLOCK = 64;  // outputs and inputs per unit of work; outputs per matmul
constexpr int64_t TOKENS = 2048;                        // per pass; with more, a strip does not fit into L2
constexpr int64_t GAP = 32;                             // padding between rows of a strip, to avoid cache conflicts

// Transposes `count` columns of g into rows of `length` (even) tokens.
void gather_strip(const bf16* g, int64_t ld, int64_t tokens, int64_t length, int64_t count, bf16* strip, int64_t ld_strip) {
  for (int64_t n = 0; n < tokens; n += BLOCK)
    transpose(bits(g) + n * ld, ld, std::min(BLOCK, tokens - n), count, bits(strip) + n, ld_strip);
  if (length > tokens)
    for (int64_t row = 0; row < count; ++row) strip[row * ld_strip + tokens] = bf16(0);
}

// Computes the sum of each row of a strip, added to `sums` with `add`.
void add_rows(const bf16* strip, int64_t ld, int64_t rows, int64_t tokens, float* sums, bool add) {
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* from = strip + row * ld;
    const float sum = sum_of(tokens, [&](int64_t n) { return load(from + n); });
    sums[row] = add ? sums[row] + sum : sum;
  }
}

// Returns the gradients of the weight (O, I) bf16 and the bias (O,) fp32, or (0,) without a bias, from grad (N, O) and
// input (N, I), both bf16. Sums run in fp32, in an order that does not depend on the number of threads.
std::tuple<at::Tensor, at::Tensor> linear_gradients(const at::Tensor& grad, const at::Tensor& input, bool with_bias) {
  const at::Tensor g = grad.contiguous(), x = input.contiguous();
  const int64_t N = g.size(0), O = g.size(1), I = x.size(1);
  if (N == 0)  // no matmul would initialize the result
    return {at::zeros({O, I}, g.options()), at::zeros({with_bias ? O : 0}, g.options().dtype(at::kFloat))};
  at::Tensor out = at::empty({O, I}, g.options()), out_bias = at::empty({with_bias ? O : 0}, g.options().dtype(at::kFloat));
  const bf16 *from_g = g.data_ptr<bf16>(), *from_x = x.data_ptr<bf16>();
  bf16* to = out.data_ptr<bf16>();
  float* bias = out_bias.data_ptr<float>();
  const int64_t most = std::min(round_up(N, 2), TOKENS), panels = at::divup(I, PANEL), strips = at::divup(O, STRIP);
  const bool several = N > TOKENS;
  Buffer<bf16> packed(panels * most * PANEL);
  Buffer<float> sums(several ? O * I : 1);
  for (int64_t start = 0; start < N; start += TOKENS) {
    const int64_t tokens = std::min(TOKENS, N - start), length = round_up(tokens, 2), ld_strip = length + GAP;
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        pack(from_x + start * I + p * PANEL, I, tokens, length, std::min(PANEL, I - p * PANEL), packed + p * length * PANEL);
    });
    at::parallel_for(0, strips * panels, 1, [&](int64_t begin, int64_t end) {
      Buffer<bf16> strip(STRIP * ld_strip);
      Buffer<float> block(BLOCK * PANEL);
      for (int64_t unit = begin, held = -1; unit < end; ++unit) {
        const int64_t first = unit / panels * STRIP, p = unit % panels;
        const int64_t rows = std::min(STRIP, O - first), columns = std::min(PANEL, I - p * PANEL);
        if (held != first) gather_strip(from_g + start * O + first, O, tokens, length, rows, strip, ld_strip);
        held = first;
        if (with_bias && p == 0) add_rows(strip, ld_strip, rows, tokens, bias + first, start > 0);
        for (int64_t row = 0; row < rows; row += BLOCK) {
          const int64_t count = std::min(BLOCK, rows - row), at = (first + row) * I + p * PANEL, ld = several ? I : PANEL;
          float* sum = several ? sums + at : block;
          product<bf16>(count, columns, length, strip + row * ld_strip, ld_strip, packed + p * length * PANEL, columns, sum,
                        ld, start > 0);
          if (start + TOKENS >= N)
            for (int64_t i = 0; i < count; ++i) store_row(to + at + i * I, sum + i * ld, columns);
        }
      }
      at::native::cpublas::brgemm_release(true);
    });
  }
  return {out, out_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(sansgpu, CPU, library) { library.impl("linear_gradients", &linear_gradients); }

}  // namespace sansgpu
