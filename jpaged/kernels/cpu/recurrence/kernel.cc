// XLA custom call for the matrices of recurrent states: divides the work into tasks. core.cc contains the arithmetic.
//
//     head -> strips of columns -> rows, one after another -> tokens, one after another
//
// States are updated in place, in their slots; only those of rows in use are read. A task has a strip of all rows: it
// copies the strips of rows that read one slot and write another, before it writes the first one. A row that continues
// the row before it reads the slot that this one has written.

#include "core.h"

#include <algorithm>
#include <vector>

#include "processor.h"
#include "tasks.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::recurrence {

#if defined(__x86_64__)
extern const Core kRecurrenceAvx512, kRecurrenceAvx2;
#endif
extern const Core kRecurrenceBaseline;

namespace {

namespace ffi = xla::ffi;
using Floats32 = ffi::Buffer<ffi::F32>;
using Ints32 = ffi::Buffer<ffi::S32>;

constexpr int64_t kRowBefore = -2;  // source of a row that continues the row before it

// Minimum work of a thread in multiply-adds: less is done before another thread wakes up.
constexpr double kLeastShared = 4e5;

const Core& choose_core(int64_t width) {
#if defined(__x86_64__)
  if (has_avx512() && width >= kRecurrenceAvx512.width) return kRecurrenceAvx512;
  if (has_avx2() && width >= kRecurrenceAvx2.width) return kRecurrenceAvx2;
#endif
  return kRecurrenceBaseline;
}

struct Attributes {
  int64_t max_width, max_threads;
};

struct Operands {
  Floats32 q, k, x, decays, strengths;  // no strengths for Mamba-2
  Ints32 layer, starts, sources, slots;  // a source of -1 is a state of zeros
  Floats32 states;
};

template <class Dimensions>
bool are_equal(const Dimensions& a, const Dimensions& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Return why shapes are inconsistent, or null; calls by recurrence.py are always consistent.
const char* contradiction(const Operands& o, const Floats32& out, const Floats32& after) {
  const auto q = o.q.dimensions(), x = o.x.dimensions(), states = o.states.dimensions();
  if (q.size() != 3 || x.size() != 3 || states.size() != 5) return "an operand has another rank";
  if (!are_equal(o.k.dimensions(), q) || q[0] != x[0] || !are_equal(out.dimensions(), x)) return "queries, keys and values differ";
  if (q[1] < 1 || x[1] % q[1]) return "key heads do not divide value heads";
  if (states[2] != x[1] || states[3] != q[2] || states[4] != x[2]) return "values and states differ";
  if (!are_equal(after.dimensions(), states)) return "the result has another shape than the states";
  const int64_t num_numbers = x[0] * x[1];
  const int64_t num_decays = static_cast<int64_t>(o.decays.element_count());
  const bool is_wide = o.decays.dimensions().size() == 3;
  if (num_decays != num_numbers * (is_wide ? q[2] : 1)) return "decays are not of each token and head, or channel";
  const int64_t num_strengths = static_cast<int64_t>(o.strengths.element_count());
  if (num_strengths != 0 && num_strengths != num_numbers) return "strengths are not of each token and head";
  const size_t num_rows = o.slots.element_count();
  if (o.sources.element_count() != num_rows || o.starts.element_count() != num_rows + 1) return "rows differ in number";
  if (o.layer.element_count() != 1) return "the layer is no scalar";
  const int64_t layer = o.layer.typed_data()[0];
  return layer < 0 || layer >= states[0] ? "there is no such layer" : nullptr;
}

// Packed tokens [begin, end) of a row in use.
struct Row {
  int64_t begin, end, source, slot;
  bool copies;  // reads another slot than it writes, as it was before the step
};

std::vector<Row> rows_in_use(const Operands& o, int64_t num_tokens, int64_t num_slots) {
  const int32_t *starts = o.starts.typed_data(), *sources = o.sources.typed_data(), *slots = o.slots.typed_data();
  std::vector<Row> rows;
  for (int64_t r = 0; r < static_cast<int64_t>(o.slots.element_count()); ++r) {
    const int64_t begin = starts[r], end = starts[r + 1], source = sources[r], slot = slots[r];
    const bool is_valid = 0 <= begin && end <= num_tokens && source < num_slots && 0 <= slot && slot < num_slots;
    if (!is_valid || begin >= end) continue;
    if (source == kRowBefore) {
      rows.push_back({begin, end, rows.empty() ? -1 : rows.back().slot, slot, false});
    } else {
      rows.push_back({begin, end, source, slot, source >= 0 && source != slot});
    }
  }
  return rows;
}

ffi::Error recur(ffi::ThreadPool pool, Floats32 q, Floats32 k, Floats32 x, Floats32 decays, Floats32 strengths,
                 Ints32 layer, Ints32 starts, Ints32 sources, Ints32 slots, Floats32 states, ffi::Result<Floats32> out,
                 ffi::Result<Floats32> after, Attributes attributes) {
  const Operands o{q, k, x, decays, strengths, layer, starts, sources, slots, states};
  if (const char* reason = contradiction(o, *out, *after)) return ffi::Error::InvalidArgument(reason);
  const auto shape = after->dimensions();
  const int64_t num_slots = shape[1], num_heads = shape[2], depth = shape[3], width = shape[4];
  const int64_t num_tokens = x.dimensions()[0], num_key_heads = q.dimensions()[1];
  float* const memory = after->typed_data();
  if (memory != states.typed_data()) std::copy_n(states.typed_data(), states.element_count(), memory);
  float* const of_layer = memory + layer.typed_data()[0] * num_slots * num_heads * depth * width;
  const Core& core = choose_core(attributes.max_width);
  const std::vector<Row> rows = rows_in_use(o, num_tokens, num_slots);
  const Rule rule{strengths.element_count() != 0, decays.dimensions().size() == 3};
  const int64_t num_decays = rule.is_wide ? depth : 1;  // of a token and head
  const int64_t num_copies = std::count_if(rows.begin(), rows.end(), [](const Row& row) { return row.copies; });
  const int64_t columns = kVectors * core.width, num_strips = (width + columns - 1) / columns;
  double work = 0;
  for (const Row& row : rows) work += 3.0 * static_cast<double>((row.end - row.begin) * num_heads * depth * width);
  const int64_t num_threads = work > kLeastShared ? count_threads(pool, attributes.max_threads) : 1;
  run_tasks(pool, num_heads * num_strips, num_threads, [&](int64_t task) {
    const int64_t head = task / num_strips, column = task % num_strips * columns;
    const int64_t key_head = head / (num_heads / num_key_heads), count = std::min(columns, width - column);
    const auto state_at = [&](int64_t slot) { return of_layer + (slot * num_heads + head) * depth * width + column; };
    float* const scratch = scratch_floats((num_copies + 1) * depth * columns);
    float* copy = scratch + depth * columns;
    for (const Row& row : rows) {
      if (!row.copies) continue;
      for (int64_t d = 0; d < depth; ++d) std::copy_n(state_at(row.source) + d * width, count, copy + d * columns);
      copy += depth * columns;
    }
    copy = scratch + depth * columns;
    for (const Row& row : rows) {
      const int64_t key = (row.begin * num_key_heads + key_head) * depth, one = row.begin * num_heads + head;
      Strip strip{};
      strip.to = state_at(row.slot), strip.to_stride = width;
      strip.from = row.source < 0 ? nullptr : row.copies ? copy : state_at(row.source);
      strip.from_stride = row.copies ? columns : width;
      strip.depth = depth, strip.num_columns = count, strip.num_tokens = row.end - row.begin;
      strip.q = q.typed_data() + key, strip.k = k.typed_data() + key, strip.key_stride = num_key_heads * depth;
      strip.x = x.typed_data() + one * width + column, strip.o = out->typed_data() + one * width + column;
      strip.value_stride = num_heads * width;
      strip.decays = decays.typed_data() + one * num_decays, strip.decay_stride = num_heads * num_decays;
      strip.strengths = rule.is_delta ? strengths.typed_data() + one : nullptr, strip.strength_stride = num_heads;
      core.run(strip, scratch, rule);
      if (row.copies) copy += depth * columns;
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged::recurrence

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::recurrence::Attributes, xla::ffi::StructMember<int64_t>("max_width"),
                                      xla::ffi::StructMember<int64_t>("max_threads"));

namespace ffi = xla::ffi;
using jpaged::recurrence::Floats32;
using jpaged::recurrence::Ints32;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_recur, jpaged::recurrence::recur,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats32>()  // queries
                                  .Arg<Floats32>()  // keys
                                  .Arg<Floats32>()  // values
                                  .Arg<Floats32>()  // decays
                                  .Arg<Floats32>()  // strengths, or none
                                  .Arg<Ints32>()    // layer
                                  .Arg<Ints32>()    // first token of each row, and the end
                                  .Arg<Ints32>()    // slots that are read
                                  .Arg<Ints32>()    // slots that are written
                                  .Arg<Floats32>()  // states
                                  .Ret<Floats32>()
                                  .Ret<Floats32>()
                                  .Attrs<jpaged::recurrence::Attributes>());
