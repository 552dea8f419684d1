// Sampling on CPUs as an XLA custom call: divides rows among threads. core.cc samples a row; feed.h exchanges masks and
// tokens with the host while the program runs.

#include <algorithm>

#include "core.h"
#include "feed.h"
#include "processor.h"
#include "tasks.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged {

#if defined(__x86_64__)
extern const SamplingCore kSamplingAvx512, kSamplingAvx2;
#endif
extern const SamplingCore kSamplingBaseline;

namespace {

namespace ffi = xla::ffi;
using Floats32 = ffi::Buffer<ffi::F32>;
using Ints32 = ffi::Buffer<ffi::S32>;

constexpr int64_t kLeastShared = 1 << 18;  // logits: fewer are done before another thread wakes up
constexpr int64_t kDrawCost = 4;           // cost of a randomly sampled row, in greedy rows
constexpr int64_t kTasksPerThread = 4;

const SamplingCore& choose_core(int64_t width) {
#if defined(__x86_64__)
  if (has_avx512() && width >= kSamplingAvx512.width) return kSamplingAvx512;
  if (has_avx2() && width >= kSamplingAvx2.width) return kSamplingAvx2;
#endif
  return kSamplingBaseline;
}

// The result of a row that is not in use, whatever its logits are.
void pad(const SamplingCall& call, int64_t r) {
  call.token_ids_r[r] = 0;
  call.is_sound_r[r] = true;
  if (!call.logprobs_r) return;
  call.logprobs_r[r] = 0;
  call.ranks_r[r] = 1;
  std::fill_n(call.top_ids_rk + r * call.num_top, call.num_top, 0);
  std::fill_n(call.top_logprobs_rk + r * call.num_top, call.num_top, 0.0f);
}

void run_sampling(ffi::ThreadPool& pool, const SamplingCall& call, int64_t num_rows, const int32_t* is_padding_r,
                  const SamplingCore& core, int64_t max_threads) {
  int64_t cost = 0;
  for (int64_t r = 0; r < num_rows; ++r) cost += is_padding_r[r] ? 0 : call.temperature_r[r] > 0 ? kDrawCost : 1;
  const int64_t num_threads = cost * call.vocab_size < kLeastShared ? 1 : count_threads(pool, max_threads);
  const int64_t num_tasks = std::min(num_rows, num_threads * kTasksPerThread);
  run_tasks(pool, num_tasks, num_threads, [&](int64_t task) {
    float* scratch = scratch_floats(core.num_scratch_floats(call));
    for (int64_t r = task * num_rows / num_tasks; r < (task + 1) * num_rows / num_tasks; ++r) {
      if (is_padding_r[r]) {
        pad(call, r);
      } else {
        core.sample(call, r, scratch);
      }
    }
  });
}

// Return why shapes are inconsistent, or null; calls by sample.py are always consistent.
const char* contradiction(int64_t num_rows, int64_t vocab_size, ffi::AnyBuffer::Dimensions logits,
                          std::initializer_list<int64_t> per_row, std::initializer_list<int64_t> if_wanted) {
  if (logits.size() != 2 || num_rows < 1 || vocab_size < 1) return "logits are not [R, V]";
  for (const int64_t count : per_row) {
    if (count != num_rows) return "the rows' arrays differ in length";
  }
  for (const int64_t count : if_wanted) {
    if (count != 0 && count != num_rows) return "the results differ in length";
  }
  return nullptr;
}

ffi::Error sample(ffi::ThreadPool pool, Floats32 logits, Floats32 temperatures, Ints32 top_ks, Floats32 top_ps,
                  Floats32 min_ps, ffi::Buffer<ffi::U32> seeds, Ints32 sequence_indices, Ints32 positions,
                  Ints32 banned_token_ids, Ints32 is_padding, Ints32 fed, ffi::Result<Ints32> token_ids,
                  ffi::Result<ffi::Buffer<ffi::PRED>> is_sound, ffi::Result<Floats32> logprobs,
                  ffi::Result<Ints32> ranks, ffi::Result<Ints32> top_ids, ffi::Result<Floats32> top_logprobs,
                  ffi::Result<Ints32> verdict, int64_t max_width, int64_t max_threads) {
  const auto shape = logits.dimensions(), banned = banned_token_ids.dimensions(), top = top_ids->dimensions();
  const int64_t num_rows = shape.size() == 2 ? shape[0] : 0, vocab_size = shape.size() == 2 ? shape[1] : 0;
  const auto count = [](const auto& buffer) { return static_cast<int64_t>(buffer.element_count()); };
  const char* reason = contradiction(
      num_rows, vocab_size, shape,
      {count(temperatures), count(top_ks), count(top_ps), count(min_ps), count(seeds) / 2, count(sequence_indices),
       count(positions), count(is_padding), banned.size() == 2 ? banned[0] : -1, count(*token_ids), count(*is_sound)},
      {count(*logprobs), count(*ranks)});
  if (reason) return ffi::Error::InvalidArgument(reason);
  if (top.size() != 2 || count(*logprobs) != count(*ranks) || count(*top_ids) != count(*top_logprobs) || top[1] < 0 ||
      top[1] > vocab_size || (top[1] && (top[0] != num_rows || !count(*logprobs)))) {
    return ffi::Error::InvalidArgument("top log-probabilities are not [R, K], or there are no log-probabilities");
  }
  if (count(fed) != 2 || count(*verdict) != 1) return ffi::Error::InvalidArgument("the feed must have two numbers");
  const int32_t number = fed.typed_data()[0], step = fed.typed_data()[1];
  const std::shared_ptr<Feed> feed = number ? feeds().find(number) : nullptr;
  if (number && !feed) {  // it was closed: the result is not read
    std::fill_n(token_ids->typed_data(), num_rows, 0);
    std::fill_n(is_sound->typed_data(), num_rows, true);
    *verdict->typed_data() = kStepIsVoid;
    return ffi::Error::Success();
  }
  const bool has_masks = feed && feed->num_words();
  if (has_masks && (feed->num_rows() != num_rows || feed->num_words() * 32 < vocab_size)) {
    return ffi::Error::InvalidArgument("the masks of the feed have other rows or tokens");
  }
  if (has_masks && feed->is_host() && !feed->has_given(step)) {
    return ffi::Error::Internal("the program runs on the thread that sends its masks, and would wait for itself");
  }
  const int32_t* mask_rw = nullptr;
  *verdict->typed_data() =
      has_masks ? feed->await(step, &mask_rw) : feed ? feed->next(step) : kStepIsOneOfMore;
  if (*verdict->typed_data() == kStepIsVoid) mask_rw = nullptr;
  const bool has_logprobs = count(*logprobs) > 0;
  const SamplingCall call{
      logits.typed_data(),      vocab_size,
      temperatures.typed_data(), top_ps.typed_data(),
      min_ps.typed_data(),      top_ks.typed_data(),
      sequence_indices.typed_data(), positions.typed_data(),
      banned_token_ids.typed_data(), seeds.typed_data(),
      banned[1],                token_ids->typed_data(),
      is_sound->typed_data(),   has_logprobs ? logprobs->typed_data() : nullptr,
      has_logprobs ? ranks->typed_data() : nullptr,
      top_ids->typed_data(),    top_logprobs->typed_data(),
      top[1],                   mask_rw,
      feed ? feed->num_words() : 0,
  };
  run_sampling(pool, call, num_rows, is_padding.typed_data(), choose_core(max_width), max_threads);
  if (mask_rw) feed->post(step, call.token_ids_r, call.is_sound_r);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_sample, jpaged::sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<jpaged::Floats32>()       // logits [R, V]
                                  .Arg<jpaged::Floats32>()       // temperatures [R]
                                  .Arg<jpaged::Ints32>()         // top_k [R]
                                  .Arg<jpaged::Floats32>()       // top_p [R]
                                  .Arg<jpaged::Floats32>()       // min_p [R]
                                  .Arg<ffi::Buffer<ffi::U32>>()  // seeds [R, 2]
                                  .Arg<jpaged::Ints32>()         // sequence indices [R]
                                  .Arg<jpaged::Ints32>()         // positions [R]
                                  .Arg<jpaged::Ints32>()         // banned token ids [R, X]
                                  .Arg<jpaged::Ints32>()         // rows of padding [R]
                                  .Arg<jpaged::Ints32>()         // feed, or 0; step of the program
                                  .Ret<jpaged::Ints32>()         // token ids [R]
                                  .Ret<ffi::Buffer<ffi::PRED>>() // rows with finite logits [R]
                                  .Ret<jpaged::Floats32>()       // log-probabilities [R] or [0]
                                  .Ret<jpaged::Ints32>()         // ranks [R] or [0]
                                  .Ret<jpaged::Ints32>()         // top ids [R, K]
                                  .Ret<jpaged::Floats32>()       // top log-probabilities [R, K]
                                  .Ret<jpaged::Ints32>()         // verdict of the step, from the feed [1]
                                  .Attr<int64_t>("max_width")
                                  .Attr<int64_t>("max_threads"));
