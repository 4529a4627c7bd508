// Forward pass of the gated delta rule; see delta_rule.h.

#include "delta_rule.h"

namespace sansgpu {
namespace {

template <typename T>
class Forward {
 public:
  Forward(const DeltaRule& p, float scale, int64_t heads)
      : p_(p), keys_(p, scale), values_(p), states_(heads * p.d * p.e), scaled_(p.d * CHUNK), sums_(CHUNK * p.e) {}

  void run(const HeadRange& heads, const float* initial, T* out, float* last) {
    const int64_t state = p_.d * p_.e, count = (heads.end - heads.first) * state;
    const int64_t place = (heads.sequence * p_.H + heads.first) * state, end = p_.starts[heads.sequence + 1];
    if (initial)
      std::copy_n(initial + place, count, static_cast<float*>(states_));
    else
      std::fill_n(static_cast<float*>(states_), count, 0.0f);
    for (int64_t start = p_.starts[heads.sequence]; start < end; start += CHUNK) {
      const int64_t rows = std::min(CHUNK, end - start);
      keys_.load(start, rows, heads.key_head);
      for (int64_t h = heads.first; h < heads.end; ++h)
        compute(start, rows, h, states_ + (h - heads.first) * state, out);
    }
    if (last) std::copy_n(static_cast<float*>(states_), count, last + place);
  }

 private:
  void compute(int64_t start, int64_t rows, int64_t head, float* state, T* out) {
    const int64_t d = p_.d, e = p_.e;
    values_.load(keys_, start, rows, head, state);
    product<float>(rows, e, d, keys_.q, d, state, e, sums_, e, false);
    scale_rows(rows, e, values_.since, sums_, sums_);
    product<float>(rows, e, rows, values_.scores, CHUNK, values_.x, e, sums_, e, true);
    for (int64_t i = 0; i < rows; ++i) store_row(out + ((start + i) * p_.H + head) * e, sums_ + i * e, e);
    update_state(p_, keys_, values_, rows, scaled_, state);
  }

  const DeltaRule& p_;
  ChunkKeys<T> keys_;
  ChunkValues<T> values_;
  Buffer<float> states_, scaled_, sums_;
};

template <typename T>
void forward(const DeltaRule& p, float scale, const float* initial, void* out, float* last) {
  const DeltaUnits all(p);
  parallel_units(all.count(), [&](Units& units) {
    Forward<T> pass(p, scale, all.most_heads());
    for (int64_t unit; units.draw(unit);) pass.run(all.of(unit), initial, static_cast<T*>(out), last);
  });
}

}  // namespace

// Computes `out` (N, H, e) and, if `last` is not null, the states (S, H, d, e) after each sequence. `initial`, the
// states before them, may be null.
SANSGPU_KERNEL void delta_rule_forward(const DeltaRule* inputs, double scale, const float* initial, void* out,
                                       float* last) {
  const auto run = inputs->narrow ? forward<bf16> : forward<float>;
  run(*inputs, static_cast<float>(scale), initial, out, last);
}

}  // namespace sansgpu
