// Samples one row. Compiled once for each width of vectors, under its own JPAGED_CORE.
//
//     row.h      one pass over the logits: the maximum of each group of columns, and whether all are below infinity
//                greedy: the first column with the maximum, searched in one block
//     floors.h   sampled: the tokens that temperature, min_p, top_k and top_p leave
//     noise.h             and the maximum of logit + noise among them

#include "core.h"

#include <math.h>

#include "floors.h"
#include "noise.h"
#include "row.h"

namespace jpaged {
namespace {

struct Scratch {
  float *allowed, *groups, *blocks, *ids, *values, *weights;

  static int64_t padded(int64_t n) { return (n + 2 * kBlock - 1) / kBlock * kBlock; }
  static int64_t num_floats(int64_t size) { return 6 * padded(size); }
  Scratch(float* memory, int64_t size) : allowed(memory) {
    for (float** part : {&groups, &blocks, &ids, &values, &weights}) *part = memory += padded(size);
  }
};

// Set the tokens that the mask forbids to minus infinity; return false if a logit is not below infinity.
bool mask(const SamplingCall& call, int64_t r, Row& row, float* allowed) {
  const Floats infinity = all(kInfinity);
  Ints is_below = Ints{} - 1;
  for (int64_t word = 0; word * kMaskBits < row.size; ++word) {
    const Ints bits = Ints{} + call.mask_rw[r * call.num_mask_words + word];
    for (int64_t at = word * kMaskBits; at < (word + 1) * kMaskBits && at < row.size; at += kWidth) {
      const Floats x = load_until(row.x, at, row.size);
      is_below &= x < infinity;
      const Ints is_allowed = (bits >> (kLanes + static_cast<int32_t>(at % kMaskBits))) & 1;
      store(allowed + at, is_allowed != 0 ? x : all(-kInfinity));
    }
  }
  row.x = allowed;
  return !any(~is_below);
}

// Copy the row without its banned tokens; return false if it has none.
bool ban(const SamplingCall& call, int64_t r, Row& row, float* allowed) {
  const int32_t* ids = call.banned_token_ids_rx + r * call.num_banned;
  bool has_any = false;
  for (int64_t i = 0; i < call.num_banned; ++i) {
    if (ids[i] < 0 || ids[i] >= row.size) continue;
    if (row.x != allowed) {
      __builtin_memcpy(allowed, row.x, row.size * sizeof(float));
      row.x = allowed;
    }
    allowed[ids[i]] = -kInfinity;
    has_any = true;
  }
  return has_any;
}

bool is_below_where_banned(const SamplingCall& call, int64_t r, const float* logits, int64_t size) {
  const int32_t* ids = call.banned_token_ids_rx + r * call.num_banned;
  for (int64_t i = 0; i < call.num_banned; ++i) {
    if (ids[i] >= 0 && ids[i] < size && !(logits[ids[i]] < kInfinity)) return false;
  }
  return true;
}

int64_t choose(const SamplingCall& call, int64_t r, const Row& row, const Scratch& scratch) {
  if (!(call.temperature_r[r] > 0)) return first_largest(row);
  const float temperature = call.temperature_r[r] > kSmallest ? call.temperature_r[r] : kSmallest;
  const auto words = threefry<uint32_t>(call.seeds_r2[2 * r], call.seeds_r2[2 * r + 1],
                                        static_cast<uint32_t>(call.sequence_indices_r[r]),
                                        static_cast<uint32_t>(call.positions_r[r]));
  const Key key{words.x, words.y};
  Kept kept{reinterpret_cast<int32_t*>(scratch.ids), scratch.values, scratch.weights};
  if (truncate(call, r, row, temperature, kept)) return draw_of_kept(row, temperature, key, kept);
  return draw_of_all(row, temperature, key, scratch.blocks);
}

// The top tokens in order; of equal ones, the lower id is first.
void tell_top(const SamplingCall& call, int64_t r, const Row& row, float log_total, Kept& kept) {
  int32_t* ids = call.top_ids_rk + r * call.num_top;
  float* values = call.top_logprobs_rk + r * call.num_top;
  gather(row, 1, bound_of_largest(row, call.num_top), kept);
  int64_t num = 0;
  for (int64_t i = 0; i < kept.size; ++i) {
    if (num == call.num_top && !(kept.values[i] > values[num - 1])) continue;
    int64_t place = num < call.num_top ? num++ : num - 1;
    for (; place > 0 && values[place - 1] < kept.values[i]; --place) {
      ids[place] = ids[place - 1];
      values[place] = values[place - 1];
    }
    ids[place] = kept.ids[i];
    values[place] = kept.values[i];
  }
  for (int64_t i = 0; i < num; ++i) values[i] -= log_total;
  for (int64_t i = num; i < call.num_top; ++i) {  // for rows whose logits are not finite
    ids[i] = 0;
    values[i] = -kInfinity;
  }
}

// Log-probabilities of the model's distribution, over all logits.
void tell(const SamplingCall& call, int64_t r, const Row& row, float chosen, const Scratch& scratch) {
  const float log_total = row.largest + logf(sum_of_exponentials(row, 1, row.largest));
  Ints num_larger{};
  for (int64_t at = 0; at < row.size; at += kWidth) num_larger -= load_until(row.x, at, row.size) > chosen;
  call.logprobs_r[r] = chosen - log_total;
  call.ranks_r[r] = 1 + sum_lanes(num_larger);
  Kept kept{reinterpret_cast<int32_t*>(scratch.ids), scratch.values, scratch.weights};
  if (call.num_top) tell_top(call, r, row, log_total, kept);
}

void sample(const SamplingCall& call, int64_t r, float* memory) {
  const Scratch scratch(memory, call.vocab_size);
  const float* logits = call.logits_rv + r * call.vocab_size;
  Row row{logits, call.vocab_size, scratch.groups, 0, true};
  bool is_below = !call.mask_rw || mask(call, r, row, scratch.allowed);
  const bool has_banned = ban(call, r, row, scratch.allowed);
  scan(row);
  is_below &= row.is_below && (!has_banned || is_below_where_banned(call, r, logits, row.size));
  const int64_t token_id = is_below ? choose(call, r, row, scratch) : first_largest(row);
  const float chosen = row.x[token_id];
  call.token_ids_r[r] = static_cast<int32_t>(token_id);
  call.is_sound_r[r] = is_below && chosen > -kInfinity;
  if (!call.logprobs_r) return;
  if (row.x != logits) {
    row.x = logits;
    scan(row);
  }
  tell(call, r, row, chosen, scratch);
}

int64_t num_scratch_floats(const SamplingCall& call) { return Scratch::num_floats(call.vocab_size); }

}  // namespace

extern const SamplingCore JPAGED_CORE;
const SamplingCore JPAGED_CORE = {JPAGED_NAME, kWidth, num_scratch_floats, sample};

}  // namespace jpaged
