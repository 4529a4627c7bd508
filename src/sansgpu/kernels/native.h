// Every C function of the compiled libraries, the structs that they take, and the constants that C++ and Python share.
// The C++ compiler checks the definitions against these declarations, and kernels/c_functions.py reads them. The
// definition of each function has its description.
//
// Parameters are pointers, int64_t or double; results are int64_t or void. Struct fields are pointers, int64_t, structs
// declared before, or arrays of these.
#pragma once

#include <stdint.h>

#ifdef _WIN32
#define SANSGPU_EXPORT __declspec(dllexport)
#else
#define SANSGPU_EXPORT __attribute__((visibility("default")))
#endif
#ifdef __cplusplus
#define SANSGPU_KERNEL extern "C" SANSGPU_EXPORT
#define SANSGPU_CONSTANT(name, value) constexpr int64_t name = value
namespace sansgpu {
#else
#define SANSGPU_KERNEL SANSGPU_EXPORT
#define SANSGPU_CONSTANT(name, value) enum { name = value }
#endif

struct bf16;  // native/tiles.h

// The number of each block format, and the values and bytes in a block. Matrices in fp32 or bf16 have the number
// NOT_QUANTIZED.
SANSGPU_CONSTANT(NOT_QUANTIZED, -1);
SANSGPU_CONSTANT(Q4_0_NUMBER, 0); SANSGPU_CONSTANT(Q4_0_VALUES, 32); SANSGPU_CONSTANT(Q4_0_BYTES, 18);
SANSGPU_CONSTANT(Q4_1_NUMBER, 1); SANSGPU_CONSTANT(Q4_1_VALUES, 32); SANSGPU_CONSTANT(Q4_1_BYTES, 20);
SANSGPU_CONSTANT(Q8_0_NUMBER, 2); SANSGPU_CONSTANT(Q8_0_VALUES, 32); SANSGPU_CONSTANT(Q8_0_BYTES, 34);
SANSGPU_CONSTANT(Q4_K_NUMBER, 3); SANSGPU_CONSTANT(Q4_K_VALUES, 256); SANSGPU_CONSTANT(Q4_K_BYTES, 144);
SANSGPU_CONSTANT(Q6_K_NUMBER, 4); SANSGPU_CONSTANT(Q6_K_VALUES, 256); SANSGPU_CONSTANT(Q6_K_BYTES, 210);
SANSGPU_CONSTANT(Q5_0_NUMBER, 5); SANSGPU_CONSTANT(Q5_0_VALUES, 32); SANSGPU_CONSTANT(Q5_0_BYTES, 22);
SANSGPU_CONSTANT(Q5_1_NUMBER, 6); SANSGPU_CONSTANT(Q5_1_VALUES, 32); SANSGPU_CONSTANT(Q5_1_BYTES, 24);
SANSGPU_CONSTANT(Q5_K_NUMBER, 7); SANSGPU_CONSTANT(Q5_K_VALUES, 256); SANSGPU_CONSTANT(Q5_K_BYTES, 176);
SANSGPU_CONSTANT(Q3_K_NUMBER, 8); SANSGPU_CONSTANT(Q3_K_VALUES, 256); SANSGPU_CONSTANT(Q3_K_BYTES, 110);
SANSGPU_CONSTANT(Q2_K_NUMBER, 9); SANSGPU_CONSTANT(Q2_K_VALUES, 256); SANSGPU_CONSTANT(Q2_K_BYTES, 84);
SANSGPU_CONSTANT(IQ4_NL_NUMBER, 10); SANSGPU_CONSTANT(IQ4_NL_VALUES, 32); SANSGPU_CONSTANT(IQ4_NL_BYTES, 18);
SANSGPU_CONSTANT(IQ4_XS_NUMBER, 11); SANSGPU_CONSTANT(IQ4_XS_VALUES, 256); SANSGPU_CONSTANT(IQ4_XS_BYTES, 136);

// native/product.cpp
SANSGPU_KERNEL void product(int64_t narrow, int64_t repeats, int64_t M, int64_t N, int64_t K, const void* A,
    int64_t lda, const void* B, int64_t ldb, float* C, int64_t ldc, int64_t add);

// native/matmul.cpp Precisions of matmuls: the dtype of their operands, or integers to which the operands are converted
// (native/block_floats.h). The operands are bf16 for BF16 and INT8_OF_BF16, otherwise fp32.
SANSGPU_CONSTANT(FP32, 0);
SANSGPU_CONSTANT(BF16, 1);
SANSGPU_CONSTANT(INT16, 2);
SANSGPU_CONSTANT(INT8, 3);
SANSGPU_CONSTANT(INT8_OF_BF16, 4);
// Stores C (M, N) = A (M, K) B (K, N) + bias (N,) in `out`, in the dtype of A and B. If `total` is not null, A B is
// also stored there in fp32 (or added to it, with `add`); `out` may then be null. `bias` and `row_sums` may be null;
// see Product in native/matmul.h.
struct Matmul {
  int64_t M, N, K;
  const void* a;
  int64_t lda, a_transposed;
  const void* b;
  int64_t ldb, b_transposed;
  const float* bias;
  void* out;
  float* total;
  int64_t add;
  float* row_sums;
};
SANSGPU_KERNEL void matmuls(int64_t precision, const struct Matmul* list, int64_t count);

// native/feed_forward.cpp
SANSGPU_KERNEL void feed_forward(int64_t precision, const struct Matmul* before, int64_t count_before,
    const struct Matmul* after, int64_t count_after, int64_t kind, const void* x, const void* y, void* activated,
    int64_t N);
SANSGPU_KERNEL void feed_forward_gradient(int64_t precision, const struct Matmul* before, int64_t count_before,
    const struct Matmul* after, int64_t count_after, int64_t kind, const void* grad, const void* x, const void* y,
    void* x_grad, void* y_grad, void* activated, int64_t N);

// native/activation.cpp
SANSGPU_CONSTANT(SWIGLU, 0);  // kinds of activations
SANSGPU_CONSTANT(GELU_TANH, 1);
SANSGPU_CONSTANT(GELU, 2);
SANSGPU_CONSTANT(RELU_SQUARED, 3);
SANSGPU_CONSTANT(RELU, 4);
SANSGPU_CONSTANT(GEGLU, 5);
SANSGPU_CONSTANT(GEGLU_TANH, 6);
SANSGPU_KERNEL void activation(int64_t kind, int64_t narrow, const void* x, const void* y, void* out, int64_t N,
    int64_t width, int64_t stride);
SANSGPU_KERNEL void activation_gradient(int64_t kind, int64_t narrow, const void* grad, const void* x, const void* y,
    void* x_grad, void* y_grad, void* out, int64_t N, int64_t width, int64_t stride);

// native/norm.cpp
SANSGPU_KERNEL void residual(const float* x, const void* y, int64_t y_narrow, float* sum, int64_t N, int64_t D,
    double p, int64_t seed);
SANSGPU_KERNEL void residual_gradient(const float* grad, void* y_grad, int64_t y_narrow, int64_t N, int64_t D,
    double p, int64_t seed);
SANSGPU_KERNEL void norm(const void* x, int64_t x_narrow, const void* y, int64_t y_narrow, float* sum,
    const float* weight, const float* bias, void* out, int64_t out_narrow, int64_t N, int64_t D, double eps,
    int64_t centered, double p, int64_t seed);
SANSGPU_KERNEL void norm_gradient(const void* grad, int64_t grad_narrow, const float* sum_grad, const void* x,
    int64_t x_narrow, const float* weight, void* x_grad, void* y_grad, int64_t y_narrow, float* weight_grad,
    float* bias_grad, int64_t N, int64_t D, double eps, int64_t centered, double p, int64_t seed);

// native/rotary.cpp
SANSGPU_KERNEL void rotary(int64_t narrow, const void* q, const void* k, const float* q_weight, const float* k_weight,
    const float* cos, const float* sin, void* q_out, void* k_out, int64_t N, int64_t periods, int64_t q_heads,
    int64_t k_heads, int64_t d, int64_t q_time, int64_t k_time, double eps);
SANSGPU_KERNEL void rotary_gradient(int64_t narrow, const void* q_grad, const void* k_grad, const void* q,
    const void* k, const float* q_weight, const float* k_weight, const float* cos, const float* sin, void* to_q,
    void* to_k, float* q_weight_grad, float* k_weight_grad, int64_t N, int64_t periods, int64_t q_heads,
    int64_t k_heads, int64_t d, int64_t q_time, int64_t k_time, double eps);

// native/embedding.cpp
SANSGPU_KERNEL void add_rows(int64_t narrow, int64_t N, int64_t D, int64_t V, const int64_t* indices,
    const void* rows, const float* factors, float* total);

// native/attention_forward.cpp
SANSGPU_CONSTANT(ATTENTION_OK, 0);  // results of attention_forward
SANSGPU_CONSTANT(WRONG_KEY, 1);
SANSGPU_CONSTANT(WRONG_NODE, 2);
SANSGPU_CONSTANT(WRONG_DISTANCE, 3);
SANSGPU_CONSTANT(MAX_ROOT, 524287);  // largest root and slot of a node (root, slot); the smallest are 0
SANSGPU_CONSTANT(MAX_SLOT, 4087);
struct AttentionSizes {
  int64_t B, T, S, H, K, d;
};
SANSGPU_KERNEL int64_t attention_forward(int64_t narrow, const struct AttentionSizes* sizes, void* q,
    const int64_t* q_strides, void* k, const int64_t* k_strides, void* v, const int64_t* v_strides,
    const int32_t* ranges, double dropout, const int64_t* seed, const int32_t* nodes, const float* table,
    int64_t entries, int64_t added, double softcap, void* out, const int64_t* out_strides, float* lse);

// native/attention_backward.cpp
SANSGPU_KERNEL void attention_backward(int64_t narrow, const struct AttentionSizes* sizes, void* grad_out,
    const int64_t* grad_out_strides, void* q, const int64_t* q_strides, void* k, const int64_t* k_strides, void* v,
    const int64_t* v_strides, void* out, const int64_t* out_strides, const float* lse, const int32_t* ranges,
    double dropout, const int64_t* seed, const int32_t* nodes, const float* table, int64_t entries, int64_t added,
    double softcap, void* q_grad, const int64_t* q_grad_strides, void* k_grad, const int64_t* k_grad_strides, void* v_grad,
    const int64_t* v_grad_strides, float* table_grad);

// native/delta_rule_forward.cpp
// N tokens of S sequences, H value heads, K key heads; d features of queries and keys, e of values. H is a multiple of K.
struct DeltaRule {
  int64_t N, S, H, K, d, e, narrow;
  int64_t normalized;      // whether to divide each query and key by its L2 norm
  const int64_t* starts;   // (S + 1,): the first token of each sequence, then N
  const void* q;           // (N, K, d), (N, K, d) and (N, H, e) in fp32 or, if `narrow`, bf16
  const void* k;
  const void* v;
  int64_t q_time, k_time, v_time;  // strides from a token to the next
  const float* decay;      // (N, H), in log, at most 0
  const float* beta;       // (N, H); null: no delta rule
};
SANSGPU_KERNEL void delta_rule_forward(const struct DeltaRule* inputs, double scale, const float* initial, void* out,
    float* last);

// native/delta_rule_backward.cpp
SANSGPU_KERNEL int64_t delta_rule_parts(const struct DeltaRule* inputs);
SANSGPU_KERNEL void delta_rule_backward(const struct DeltaRule* inputs, double scale, const void* grad_out,
    float* q_parts, float* k_parts, void* q_grad, void* k_grad, void* v_grad, float* decay_grad, float* beta_grad);

// native/short_convolution.cpp
// N tokens of S sequences, D channels, W weights per channel.
struct Convolution {
  int64_t N, S, D, W, narrow;
  int64_t silu;           // whether to apply SiLU to the sums
  const int64_t* starts;  // (S + 1,): the first token of each sequence, then N
  const void* x;          // (N, D) in fp32 or, if `narrow`, bf16
  int64_t x_time;         // stride from a token to the next
  const float* weight;    // (D, W)
  const float* bias;      // (D,), may be null
};
SANSGPU_KERNEL void short_convolution(const struct Convolution* inputs, void* out);
SANSGPU_KERNEL void short_convolution_gradient(const struct Convolution* inputs, const void* grad_out, void* x_grad,
    float* weight_grad, float* bias_grad);

// native/selective_scan.cpp
// N tokens of S sequences, D channels, M states per channel.
struct Scan {
  int64_t N, S, D, M, narrow;
  const int64_t* starts;  // (S + 1,): the first token of each sequence, then N
  const void* x;          // (N, D) in fp32 or, if `narrow`, bf16
  int64_t x_time;         // stride from a token to the next
  const float* steps;     // (N, D): at least 0
  const float* rates;     // (D, M): at most 0
  const float* in;        // (N, M)
  const float* out;       // (N, M)
  const float* skip;      // (D,)
};
SANSGPU_KERNEL int64_t selective_scan_blocks(const struct Scan* inputs);
SANSGPU_KERNEL void selective_scan(const struct Scan* inputs, const float* initial, void* y, float* last);
SANSGPU_KERNEL void selective_scan_gradient(const struct Scan* inputs, const void* y_grad, void* x_grad,
    float* steps_grad, float* rates_grad, float* in_parts, float* out_parts, float* skip_grad);

// native/cross_entropy.cpp
SANSGPU_KERNEL void cross_entropy_losses(int64_t precision, int64_t format, int64_t N, int64_t D, int64_t V,
    const void* hidden, const void* weight, const int64_t* targets, double smoothing, double z_loss, double softcap,
    void* exponentials, int64_t* above, float* losses, float* shares, float* at_target);
SANSGPU_KERNEL void head_logits_at(int64_t narrow, int64_t format, int64_t N, int64_t D, int64_t K,
    const void* hidden, const void* weight, const int64_t* places, double softcap, float* logits);
SANSGPU_KERNEL void pack_exponentials(int64_t N, int64_t V, float* exponentials, float* scales);
SANSGPU_KERNEL void cross_entropy_hidden(int64_t precision, int64_t format, int64_t N, int64_t D, int64_t V,
    const void* exponentials, const void* weight, const int64_t* targets, const float* shares, const float* at_target,
    void* to);
SANSGPU_KERNEL void cross_entropy_weight(int64_t N, int64_t D, int64_t V, const void* exponentials, const float* rows,
    int64_t add, float* to);

// native/quantized_linear.cpp
SANSGPU_KERNEL void quantized_forward(int64_t precision, int64_t format, int64_t N, int64_t I, int64_t O,
    const void* weight, const void* x, const float* bias, void* y);
SANSGPU_KERNEL void quantized_backward(int64_t precision, int64_t format, int64_t N, int64_t I, int64_t O,
    const void* weight, const void* grad, void* x_grad);
SANSGPU_KERNEL void dequantize_rows(int64_t narrow, int64_t format, int64_t O, int64_t I, const void* weight,
    void* values);

// native/block_quantization.cpp
SANSGPU_KERNEL void quantize_q4_k(int64_t blocks, const float* values, uint8_t* to);
SANSGPU_KERNEL void quantize_q6_k(int64_t blocks, const float* values, uint8_t* to);

// native/lora.cpp
struct LoraSizes {
  int64_t N, I, O, R;
};
SANSGPU_KERNEL void lora_forward(int64_t precision, int64_t format, const struct LoraSizes* sizes, const void* weight,
    const void* first, const void* second, double scale, const void* x, const void* source, const float* bias,
    void* h, void* y);
SANSGPU_KERNEL void lora_backward(int64_t precision, int64_t format, const struct LoraSizes* sizes, const void* weight,
    const void* first, const void* second, double scale, const void* grad, const void* source, const void* h,
    void* x_grad, void* source_grad, void* first_grad, void* second_grad);

// native/code_tiles.cpp
SANSGPU_CONSTANT(STEP_TILE, 64);    // outputs per tile of packed weights
SANSGPU_CONSTANT(CODE_TILES, 100);  // plus the number of a block format: the format of weights whose codes are packed
SANSGPU_KERNEL void pack_codes(int64_t format, const void* weight, int64_t N, int64_t terms, void* to);
SANSGPU_KERNEL int64_t code_bytes_per_tile(int64_t format, int64_t terms);
SANSGPU_KERNEL void code_product(int64_t narrow, int64_t format, int64_t parts, int64_t M, int64_t N, int64_t terms,
    const void* x, const void* tiles, const float* bias, void* y);

// native/decoder_step.cpp
SANSGPU_CONSTANT(CACHE_BLOCK, 64);  // tokens per block of a packed KV cache; its length is a multiple
SANSGPU_CONSTANT(INT8_TILES, -2);   // the format of weights that are packed as block floats of 8 bits
// `parts` is the number of 8-bit integers, 1 or 2, that represent a value which is multiplied with
// weights in INT8_TILES or CODE_TILES.
struct StepSizes {
  int64_t N, L, D, H, K, d, F, S, layers, parts;
};
// A linear layer with a weight matrix (N, terms): y = x W^T + bias. Packed matrices consist of tiles of STEP_TILE
// outputs.
struct StepWeight {
  const void* data;            // packed weights, or rows in a block format
  int64_t format, N;           // NOT_QUANTIZED, INT8_TILES or at least CODE_TILES if packed
  const float* bias;           // (N,), may be null
  int64_t rank;                // rank of the LoRA adapter, which must be even; 0 without an adapter
  const void* first;           // the adapter's packed matrix A (rank, terms)
  const void* second;          // the adapter's packed matrix B (N, rank)
};
struct StepLayer {
  const float* norm;
  struct StepWeight qkv[3];
  const float* q_norm;  // (d,); q_norm and k_norm are null without QK-norm
  const float* k_norm;
  struct StepWeight out;
  const float* second_norm;
  struct StepWeight gate_up[2], down;
  void* keys;  // packed KV caches (slots, K)
  void* values;
};
SANSGPU_KERNEL void decoder_step(int64_t narrow, const struct StepSizes* sizes, double eps,
    const struct StepLayer* layers, const float* last_norm, const struct StepWeight* head, float* x, const float* cos,
    const float* sin, const int64_t* slots, const int64_t* positions, const int64_t* chosen, void* logits);

// native/newton_schulz.cpp
SANSGPU_KERNEL void newton_schulz(int64_t narrow, int64_t by_gram, int64_t count, int64_t rows, int64_t columns,
    const float* matrices, void* out, const float* coefficients, int64_t steps);

// native/step_weights.cpp
SANSGPU_KERNEL void pack_step_weight(int64_t precision, const void* weight, int64_t N, int64_t terms, void* to);
SANSGPU_KERNEL int64_t int8_tile_bytes(int64_t terms);

// native/update.cpp
SANSGPU_CONSTANT(MOMENT_GROUP, 256);  // values of 8-bit moments that share a scale
SANSGPU_CONSTANT(MOMENT_DECADES, 7);  // orders of magnitude below the scale that the codes can represent
// A weight and the tensors that its update reads and writes. `working`, its bf16 copy, may be null. `moments` are two
// tensors, or four with 8-bit moments: codes and scales.
struct WeightUpdate {
  void* weight;
  const void* grad;
  struct bf16* working;
  void* moments[4];
  int64_t size, narrow_weight, narrow_grad, seed;
};
SANSGPU_KERNEL void dropout(int64_t narrow, const void* x, void* out, int64_t size, double p, const int64_t* seed);
SANSGPU_KERNEL void accumulate(float* sum, const void* addend, int64_t size);
SANSGPU_KERNEL void squared_norms(int64_t count, const void* const* arrays, const int64_t* sizes,
    const int64_t* narrow, double* totals);
SANSGPU_KERNEL void adamw(int64_t count, const struct WeightUpdate* weights, const double* decays, double lr,
    double beta1, double beta2, double eps, int64_t step, double scale);
SANSGPU_KERNEL void nesterov(int64_t count, const struct WeightUpdate* weights, double beta, double scale);
SANSGPU_KERNEL void descend(int64_t count, const struct WeightUpdate* weights, const double* decays, double lr,
    double scale);
SANSGPU_KERNEL void adamw8(int64_t count, const struct WeightUpdate* weights, const double* decays,
    const float* first_map, const float* second_map, double lr, double beta1, double beta2, double eps, int64_t step,
    double scale);

// native/parallel.cpp
SANSGPU_KERNEL void record(double* places, int64_t capacity);
SANSGPU_KERNEL int64_t recorded(void);

// allocator/memory.cpp
SANSGPU_KERNEL int64_t install(int64_t sizes_vary);
SANSGPU_KERNEL int64_t give_back(void);

#ifdef __cplusplus
}  // namespace sansgpu
#endif
