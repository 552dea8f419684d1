// Declarations shared by kernel.cc, which divides rows among threads, and core.cc, which samples a row on CPUs.

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
  float* logprobs_r;       // null if not requested, like the ranks
  int32_t* ranks_r;
  int32_t* top_ids_rk;
  float* top_logprobs_rk;
  int64_t num_top;         // K; 0 if not requested

  const int32_t* mask_rw;  // one bit per token, set if the row may sample it; or null
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
