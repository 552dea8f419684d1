// XLA custom call for the deltas of adapters: divides the work into tasks. core.cc contains the arithmetic.
//
//     rows -> those that have an adapter, by adapter -> tiles of up to 4 rows -> a, the rank's sums -> b, the delta
//
// Adapters without rows are not read. Results of rows without an adapter are undefined.

#include "core.h"

#include <algorithm>
#include <vector>

#include "processor.h"
#include "tasks.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::lora {

#if defined(__x86_64__)
extern const Core kLoraAvx512, kLoraAvx2;
#endif
extern const Core kLoraBaseline;

namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Floats32 = ffi::Buffer<ffi::F32>;
using Ints32 = ffi::Buffer<ffi::S32>;

// Minimum work of a thread in multiply-adds: less is done before another thread wakes up.
constexpr double kLeastShared = 4e5;
constexpr int64_t kRanksOfTask = 8, kColumnsOfTask = 1024;
constexpr int64_t kMaxParts = 3;

const Core& choose_core(int64_t width) {
#if defined(__x86_64__)
  if (has_avx512() && width >= kLoraAvx512.width) return kLoraAvx512;
  if (has_avx2() && width >= kLoraAvx2.width) return kLoraAvx2;
#endif
  return kLoraBaseline;
}

struct Attributes {
  int64_t num_groups;  // groups in which the columns of all parts are adjacent
  int64_t max_width, max_threads;
};

struct Operands {
  AnyBuffer x;
  Ints32 adapters, num_rows;
  AnyBuffer a;
  AnyBuffer b[kMaxParts];  // buffers of unused parts are empty

  int64_t num_parts() const {
    int64_t count = 0;
    while (count < kMaxParts && b[count].element_count()) ++count;
    return count;
  }
  int64_t rank() const { return b[0].dimensions()[1]; }
};

// Return why shapes are inconsistent, or null; calls by lora.py are always consistent.
const char* contradiction(const Operands& o, const Attributes& attributes, const Floats32& y) {
  const auto x = o.x.dimensions(), a = o.a.dimensions(), out = y.dimensions();
  const ffi::DataType type = o.x.element_type();
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16) return "rows are not float32, bfloat16 or float16";
  if (x.size() != 2 || a.size() != 3 || out.size() != 2) return "an operand has another rank";
  if (static_cast<int64_t>(o.adapters.element_count()) != x[0] || out[0] != x[0]) return "rows differ in number";
  if (o.num_rows.element_count() != 1) return "the number of rows is no scalar";
  if (o.a.element_type() != type || a[2] != x[1]) return "rows and a differ";
  const int64_t num_parts = o.num_parts();
  if (!num_parts || attributes.num_groups < 1) return "there are no columns";
  int64_t num_columns = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    const auto b = o.b[p].dimensions();
    if (o.b[p].element_type() != type || b.size() != 3 || b[0] != a[0]) return "a and b differ";
    if (b[1] * num_parts != a[1]) return "a and b differ in rank";
    if (b[2] % attributes.num_groups) return "columns are not in groups";
    num_columns += b[2];
  }
  return num_columns != out[1] ? "the result has another number of columns" : nullptr;
}

float round_to(Number number, float x) {
  return number == Number::kBF16 ? decode_bf16(encode_bf16(x)) : decode_f16(encode_f16(x));
}

// Columns [begin, begin + count) of a part's b, and their position in a result.
struct Columns {
  int64_t part, begin, count, at;
};

std::vector<Columns> columns_of(const Operands& o, int64_t num_groups) {
  std::vector<Columns> found;
  int64_t widths[kMaxParts] = {}, group_width = 0, offset = 0;
  const int64_t num_parts = o.num_parts();
  for (int64_t p = 0; p < num_parts; ++p) group_width += widths[p] = o.b[p].dimensions()[2] / num_groups;
  for (int64_t p = 0; p < num_parts; offset += widths[p++]) {
    for (int64_t group = 0; group < num_groups; ++group) {
      for (int64_t c = 0; c < widths[p]; c += kColumnsOfTask) {
        const int64_t count = std::min(kColumnsOfTask, widths[p] - c);
        found.push_back({p, group * widths[p] + c, count, group * group_width + offset + c});
      }
    }
  }
  return found;
}

// A range of rows that have an adapter, sorted by adapter.
struct Run {
  int64_t adapter, begin, end;
};

struct Sorted {
  std::vector<int64_t> rows;
  std::vector<Run> runs;
};

Sorted sort_rows(const int32_t* adapters, int64_t num_rows, int64_t num_slots) {
  std::vector<int64_t> begins(num_slots + 2, 0);
  const auto has_one = [&](int64_t r) { return adapters[r] > 0 && adapters[r] <= num_slots; };
  for (int64_t r = 0; r < num_rows; ++r) begins[has_one(r) ? adapters[r] + 1 : 0] += has_one(r);
  for (int64_t slot = 1; slot <= num_slots; ++slot) begins[slot + 1] += begins[slot];
  Sorted sorted;
  sorted.rows.resize(begins[num_slots + 1]);
  for (int64_t slot = 1; slot <= num_slots; ++slot) {
    if (begins[slot] < begins[slot + 1]) sorted.runs.push_back({slot - 1, begins[slot], begins[slot + 1]});
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    if (has_one(r)) sorted.rows[begins[adapters[r]]++] = r;
  }
  return sorted;
}

ffi::Error adapt(ffi::ThreadPool pool, AnyBuffer x, Ints32 adapters, Ints32 num_rows, AnyBuffer a, AnyBuffer b0,
                 AnyBuffer b1, AnyBuffer b2, ffi::Result<Floats32> y, Attributes attributes) {
  const Operands o{x, adapters, num_rows, a, {b0, b1, b2}};
  if (const char* reason = contradiction(o, attributes, *y)) return ffi::Error::InvalidArgument(reason);
  const Core& core = choose_core(attributes.max_width);
  const ffi::DataType type = x.element_type();
  const Number number = type == ffi::F32 ? Number::kF32 : type == ffi::BF16 ? Number::kBF16 : Number::kF16;
  const int64_t item_bytes = bytes_of(number), depth = x.dimensions()[1], num_slots = a.dimensions()[0];
  const int64_t rows_in_use = std::clamp<int64_t>(num_rows.typed_data()[0], 0, x.dimensions()[0]);
  const Sorted sorted = sort_rows(adapters.typed_data(), rows_in_use, num_slots);
  if (sorted.rows.empty()) return ffi::Error::Success();

  const int64_t rank = o.rank(), num_ranks = a.dimensions()[1], num_columns = y->dimensions()[1];
  const int64_t count = static_cast<int64_t>(sorted.rows.size()), num_runs = static_cast<int64_t>(sorted.runs.size());
  const double work = 1.0 * count * (num_ranks * depth + rank * num_columns);
  const int64_t num_threads = work > kLeastShared ? count_threads(pool, attributes.max_threads) : 1;
  float* ranks = scratch_floats(count * num_ranks);
  const char *rows = static_cast<const char*>(x.untyped_data()), *as = static_cast<const char*>(a.untyped_data());
  float* deltas = y->typed_data();
  // Call run(tile) for each tile of a run's rows, with its sums from a rank on and its result from a column on.
  const auto for_tiles = [&](const Run& run, int64_t first_rank, int64_t column, const auto& call) {
    for (int64_t begin = run.begin; begin < run.end; begin += kRows) {
      Tile tile{};
      tile.num_rows = std::min(kRows, run.end - begin);
      for (int64_t r = 0; r < tile.num_rows; ++r) {
        tile.rows[r] = rows + sorted.rows[begin + r] * depth * item_bytes;
        tile.ranks[r] = ranks + (begin + r) * num_ranks + first_rank;
        tile.deltas[r] = deltas + sorted.rows[begin + r] * num_columns + column;
      }
      call(tile);
    }
  };

  const int64_t chunks = (num_ranks + kRanksOfTask - 1) / kRanksOfTask;
  run_tasks(pool, num_runs * chunks, num_threads, [&](int64_t task) {
    const Run& run = sorted.runs[task / chunks];
    const int64_t first = task % chunks * kRanksOfTask, some = std::min(kRanksOfTask, num_ranks - first);
    const char* from = as + (run.adapter * num_ranks + first) * depth * item_bytes;
    for_tiles(run, first, 0, [&](const Tile& tile) {
      core.shrink(tile, from, number, depth, some);
      for (int64_t r = 0; number != Number::kF32 && r < tile.num_rows; ++r) {
        for (int64_t i = 0; i < some; ++i) tile.ranks[r][i] = round_to(number, tile.ranks[r][i]);
      }
    });
  });

  const std::vector<Columns> columns = columns_of(o, attributes.num_groups);
  const int64_t num_pieces = static_cast<int64_t>(columns.size());
  run_tasks(pool, num_runs * num_pieces, num_threads, [&](int64_t task) {
    const Run& run = sorted.runs[task / num_pieces];
    const Columns& piece = columns[task % num_pieces];
    const int64_t stride = o.b[piece.part].dimensions()[2];
    const char* from = static_cast<const char*>(o.b[piece.part].untyped_data()) +
                       (run.adapter * rank * stride + piece.begin) * item_bytes;
    for_tiles(run, piece.part * rank, piece.at,
              [&](const Tile& tile) { core.expand(tile, from, number, stride, rank, piece.count); });
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged::lora

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::lora::Attributes, xla::ffi::StructMember<int64_t>("num_groups"),
                                      xla::ffi::StructMember<int64_t>("max_width"),
                                      xla::ffi::StructMember<int64_t>("max_threads"));

namespace ffi = xla::ffi;
using ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_adapt, jpaged::lora::adapt,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()              // rows
                                  .Arg<jpaged::lora::Ints32>()   // adapter of each row
                                  .Arg<jpaged::lora::Ints32>()   // number of rows
                                  .Arg<AnyBuffer>()              // a
                                  .Arg<AnyBuffer>()              // b of each part
                                  .Arg<AnyBuffer>()
                                  .Arg<AnyBuffer>()
                                  .Ret<jpaged::lora::Floats32>()
                                  .Attrs<jpaged::lora::Attributes>());
