// What the two halves of sampling on CPUs share: kernel.cc says which thread samples which rows, core.cc samples one.

#pragma once

#include <cstdint>

namespace jpaged {

struct SamplingCall {
  const float* logits_rv;
  int64_t vocab_size;

  // How each row is sampled: fields of `jpaged.engine.executor.ROW_FIELDS`.
  const float *temperature_r, *top_p_r, *min_p_r;
  const int32_t *top_k_r, *sequence_indices_r, *positions_r, *banned_token_ids_rx;
  const uint32_t* seeds_r2;
  int64_t num_banned;  // X

  int32_t* token_ids_r;
  bool* is_sound_r;
  float* logprobs_r;       // null where not wanted, as the ranks are then
  int32_t* ranks_r;
  int32_t* top_ids_rk;
  float* top_logprobs_rk;
  int64_t num_top;         // K; 0 where not wanted

  const int32_t* mask_rw;  // a bit a token, set for those that a row may have, or null
  int64_t num_mask_words;  // W
};

// Sampling compiled for one kind of processor.
struct SamplingCore {
  const char* name;
  int64_t width;  // floats of a vector
  int64_t (*num_scratch_floats)(const SamplingCall&);
  void (*sample)(const SamplingCall&, int64_t row, float* scratch);
};

}  // namespace jpaged
