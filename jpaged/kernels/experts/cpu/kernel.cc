// A mixture of packed experts as an XLA custom call: divides the work into tasks.
//
//     routes -> rows sorted by expert -> gates and ups -> act -> downs -> each row's weighted sum, in the order of its routes
//
// A task has some blocks of columns of some experts. Blocks of experts without rows are not read. A row's results do
// not depend on other rows.

#include "core.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../../matmul/cpu/core.h"
#include "processor.h"
#include "tasks.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::product {

#if defined(__x86_64__)
extern const Core kProductAvx512Bf16, kProductAvx512, kProductAvx2;
#endif
extern const Core kProductBaseline;

}  // namespace jpaged::product

namespace jpaged::experts {

#if defined(__x86_64__)
extern const Core kExpertsAvx512, kExpertsAvx2;
#endif
extern const Core kExpertsBaseline;

namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Floats32 = ffi::Buffer<ffi::F32>;
using Ints32 = ffi::Buffer<ffi::S32>;
using product::kColumns;

// Minimum work of a thread in multiply-adds: less is done before another thread wakes up.
constexpr double kLeastShared = 4e5;
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kLine = 64;

struct Cores {
  const product::Core& product;
  const Core& own;
};

Cores choose_cores(int64_t width, bool is_bf16) {
#if defined(__x86_64__)
  if (has_avx512_bf16() && is_bf16 && width >= product::kProductAvx512Bf16.width) {
    return {product::kProductAvx512Bf16, kExpertsAvx512};
  }
  if (has_avx512() && width >= kExpertsAvx512.width) return {product::kProductAvx512, kExpertsAvx512};
  if (has_avx2() && width >= kExpertsAvx2.width) return {product::kProductAvx2, kExpertsAvx2};
#endif
  return {product::kProductBaseline, kExpertsBaseline};
}

Number number_of(ffi::DataType type) {
  return type == ffi::F32 ? Number::kF32 : type == ffi::BF16 ? Number::kBF16 : Number::kF16;
}
int64_t count_of(const AnyBuffer& x) { return static_cast<int64_t>(x.element_count()); }
int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

struct Attributes {
  int64_t num_experts, inner;  // F
  int64_t is_clamped;
  float alpha, limit;
  int64_t max_width, max_threads;
};

struct Operands {
  AnyBuffer x;
  Ints32 ids;
  Floats32 weights;
  AnyBuffer gate, up, down, gate_bias, up_bias;
  int64_t num_experts, inner;
};

// The matrices of the experts in the order in which cores read them.
struct Blocks {
  const char* begin;
  int64_t num_blocks, block_bytes, depth;  // of one expert; depth as passed to a core

  const void* at(int64_t expert, int64_t block) const { return begin + (expert * num_blocks + block) * block_bytes; }
};

Blocks blocks_of(const AnyBuffer& packed, int64_t num_experts, int64_t depth, Number number) {
  const int64_t even_depth = number == Number::kBF16 ? depth + depth % 2 : depth;
  return {static_cast<const char*>(packed.untyped_data()), packed.dimensions()[0] / num_experts,
          even_depth * kColumns * bytes_of(number), even_depth};
}

// Rows in the form that a core multiplies.
struct Rows {
  char* begin;
  int64_t stride, row_bytes, num_rows;
};

// A range of rows of one expert.
struct Run {
  int64_t expert, begin, end;
};

// Rows sorted by expert: each row once for each of its experts.
struct Sorted {
  std::vector<Run> runs;
  std::vector<int64_t> tokens, places;  // token of each sorted row; sorted row of each route, or -1
};

Sorted sort_routes(const int32_t* ids, int64_t num_routes, int64_t top_k, int64_t num_experts) {
  std::vector<int64_t> begins(num_experts + 1, 0);
  const auto is_sent = [&](int64_t i) { return ids[i] >= 0 && ids[i] < num_experts; };
  for (int64_t i = 0; i < num_routes; ++i) begins[is_sent(i) ? ids[i] + 1 : 0] += is_sent(i);
  for (int64_t expert = 0; expert < num_experts; ++expert) begins[expert + 1] += begins[expert];
  Sorted sorted;
  sorted.tokens.resize(begins[num_experts]);
  sorted.places.assign(num_routes, -1);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    if (begins[expert] < begins[expert + 1]) sorted.runs.push_back({expert, begins[expert], begins[expert + 1]});
  }
  for (int64_t i = 0; i < num_routes; ++i) {
    if (!is_sent(i)) continue;
    const int64_t place = begins[ids[i]]++;
    sorted.tokens[place] = i / top_k;
    sorted.places[i] = place;
  }
  return sorted;
}

// Stride of an odd number of cache lines that holds `depth` numbers: rows of a tile then use different cache sets.
int64_t spread_stride(int64_t depth, int64_t item_bytes) {
  return (rounded_up(depth * item_bytes, kLine) / kLine | 1) * kLine / item_bytes;
}

const char* matrix_contradiction(const AnyBuffer& packed, const Operands& o, int64_t depth, int64_t num_columns) {
  const auto shape = packed.dimensions();
  const bool is_bf16 = o.x.element_type() == ffi::BF16;
  if (packed.element_type() != o.x.element_type()) return "rows and matrices differ in type";
  if (shape.size() != (is_bf16 ? 4 : 3) || shape[2] != kColumns) return "blocks have another shape";
  if (shape[1] != (is_bf16 ? (depth + 1) / 2 : depth)) return "rows and matrices differ in depth";
  if (shape[0] != o.num_experts * rounded_up(num_columns, kColumns) / kColumns) return "matrices differ in columns";
  return nullptr;
}

// Return why shapes are inconsistent, or null; calls by experts.py are always consistent.
const char* contradiction(const Operands& o, const Floats32& y) {
  const auto x = o.x.dimensions(), ids = o.ids.dimensions(), out = y.dimensions();
  const ffi::DataType type = o.x.element_type();
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16) return "rows are not float32, bfloat16 or float16";
  if (x.size() != 2 || ids.size() != 2 || out.size() != 2) return "an operand has another rank";
  if (ids[0] != x[0] || o.weights.element_count() != o.ids.element_count()) return "rows and routes differ in number";
  if (out[0] != x[0] || out[1] != x[1]) return "rows and results differ in shape";
  if (o.num_experts < 1 || o.inner < 1) return "there are no experts";
  if (const char* reason = matrix_contradiction(o.gate, o, x[1], o.inner)) return reason;
  if (const char* reason = matrix_contradiction(o.up, o, x[1], o.inner)) return reason;
  if (const char* reason = matrix_contradiction(o.down, o, o.inner, x[1])) return reason;
  for (const AnyBuffer& bias : {o.gate_bias, o.up_bias}) {
    if (count_of(bias) && (count_of(bias) != o.num_experts * o.inner || bias.element_type() != o.x.element_type())) {
      return "a bias does not fit the experts";
    }
  }
  return nullptr;
}

// The parts of one call, all of which have the same rows.
class Call {
 public:
  Call(ffi::ThreadPool& pool, const Operands& o, const Attributes& a, float* y)
      : pool_(pool), o_(o), number_(number_of(o.x.element_type())),
        cores_(choose_cores(a.max_width, number_ == Number::kBF16)),
        gate_{a.is_clamped != 0, a.alpha, a.limit}, num_tokens_(o.x.dimensions()[0]), width_(o.x.dimensions()[1]),
        top_k_(o.ids.dimensions()[1]),
        sorted_(sort_routes(o.ids.typed_data(), num_tokens_ * top_k_, top_k_, o.num_experts)), y_(y) {
    const double work = 3.0 * static_cast<double>(num_rows()) * static_cast<double>(width_ * o.inner);
    num_threads_ = work > kLeastShared ? count_threads(pool, a.max_threads) : 1;
  }

  void run() {
    std::memset(y_, 0, num_tokens_ * width_ * 4);
    if (!num_rows()) return;
    const Rows x = plan_rows(width_), inner = plan_rows(o_.inner);
    const int64_t x_bytes = rounded_up(x.row_bytes * num_rows(), kLine);
    const int64_t inner_bytes = rounded_up(inner.row_bytes * num_rows(), kLine);
    const int64_t stored_bytes = rounded_up(o_.inner * item_bytes() * num_rows(), kLine);
    const int64_t sums_bytes = num_rows() * width_ * 4;
    char* memory = reinterpret_cast<char*>(scratch_floats((x_bytes + inner_bytes + stored_bytes + sums_bytes) / 4));
    char* stored = memory + x_bytes + inner_bytes;
    float* sums = reinterpret_cast<float*>(stored + stored_bytes);
    const char* tokens = static_cast<const char*>(o_.x.untyped_data());
    prepare({memory, x.stride, x.row_bytes, num_rows()}, width_,
            [&](int64_t row) { return tokens + sorted_.tokens[row] * width_ * item_bytes(); });
    activate({memory, x.stride, x.row_bytes, num_rows()}, stored);
    const Rows ready{memory + x_bytes, inner.stride, inner.row_bytes, num_rows()};
    prepare(ready, o_.inner, [&](int64_t row) { return stored + row * o_.inner * item_bytes(); });
    project(ready, sums);
    sum(sums);
  }

 private:
  int64_t num_rows() const { return static_cast<int64_t>(sorted_.tokens.size()); }
  int64_t item_bytes() const { return bytes_of(number_); }

  Rows plan_rows(int64_t depth) const {
    const int64_t bytes = number_ == Number::kBF16 && cores_.product.takes_bf16 ? 2 : 4;
    const int64_t stride = spread_stride(depth + depth % 2, bytes);
    return {nullptr, stride, stride * bytes, num_rows()};
  }

  // Convert rows of x's type to the form that a core multiplies.
  template <class From>
  void prepare(const Rows& rows, int64_t depth, const From& from) {
    product::Before before{};
    before.number = number_;
    before.depth = depth;
    constexpr int64_t kRowsOfTask = 16;
    const int64_t num_tasks = (rows.num_rows + kRowsOfTask - 1) / kRowsOfTask;
    run_tasks(pool_, num_tasks, num_tasks > 2 ? num_threads_ : 1, [&](int64_t task) {
      static thread_local std::vector<float> row;
      const size_t room = rounded_up(depth, product::kMaxWidth);
      if (row.size() < room) row.resize(room);
      for (int64_t r = task * kRowsOfTask; r < std::min(rows.num_rows, (task + 1) * kRowsOfTask); ++r) {
        cores_.product.prepare(before, from(r), row.data(), rows.begin + r * rows.row_bytes, depth + depth % 2);
      }
    });
  }

  // Call tile(run, block) for every block of columns of every expert that has rows.
  template <class Tile>
  void for_blocks(int64_t num_blocks, const Tile& tile) {
    const int64_t total = num_blocks * static_cast<int64_t>(sorted_.runs.size());
    const int64_t step = num_threads_ > 1 ? std::max<int64_t>(total / (kTasksPerThread * num_threads_), 1) : total;
    run_tasks(pool_, (total + step - 1) / step, num_threads_, [&](int64_t task) {
      for (int64_t i = task * step; i < std::min(total, (task + 1) * step); ++i) {
        tile(sorted_.runs[i / num_blocks], i % num_blocks);
      }
    });
  }

  void multiply(const Rows& rows, int64_t row, int64_t count, const Blocks& blocks, const void* block, float* sums) {
    const char* from = rows.begin + row * rows.row_bytes;
    if (number_ == Number::kBF16) {
      cores_.product.multiply_bf16(from, rows.stride, count, blocks.depth, static_cast<const uint16_t*>(block), sums);
    } else if (number_ == Number::kF16) {
      cores_.product.multiply_f16(reinterpret_cast<const float*>(from), rows.stride, count, blocks.depth,
                                  static_cast<const uint16_t*>(block), sums);
    } else {
      cores_.product.multiply_f32(reinterpret_cast<const float*>(from), rows.stride, count, blocks.depth,
                                  static_cast<const float*>(block), sums);
    }
  }

  void activate(const Rows& x, char* stored) {
    const Blocks gates = blocks_of(o_.gate, o_.num_experts, width_, number_);
    const Blocks ups = blocks_of(o_.up, o_.num_experts, width_, number_);
    const auto bias_of = [&](const AnyBuffer& bias, int64_t expert) -> const void* {
      if (!count_of(bias)) return nullptr;
      return static_cast<const char*>(bias.untyped_data()) + expert * o_.inner * item_bytes();
    };
    for_blocks(gates.num_blocks, [&](const Run& run, int64_t block) {
      alignas(kLine) float gate_sums[product::kMaxRows * kColumns], up_sums[product::kMaxRows * kColumns];
      for (int64_t row = run.begin; row < run.end; row += cores_.product.max_rows) {
        const int64_t count = std::min(cores_.product.max_rows, run.end - row);
        multiply(x, row, count, gates, gates.at(run.expert, block), gate_sums);
        multiply(x, row, count, ups, ups.at(run.expert, block), up_sums);
        const Tile tile{gate_sums, up_sums, bias_of(o_.gate_bias, run.expert), bias_of(o_.up_bias, run.expert),
                        number_, count, block * kColumns, o_.inner};
        cores_.own.activate(gate_, tile, number_, stored + row * o_.inner * item_bytes());
      }
    });
  }

  void project(const Rows& inner, float* sums) {
    const Blocks downs = blocks_of(o_.down, o_.num_experts, o_.inner, number_);
    for_blocks(downs.num_blocks, [&](const Run& run, int64_t block) {
      alignas(kLine) float tile[product::kMaxRows * kColumns];
      const int64_t column = block * kColumns, num_columns = std::min(kColumns, width_ - column);
      for (int64_t row = run.begin; row < run.end; row += cores_.product.max_rows) {
        const int64_t count = std::min(cores_.product.max_rows, run.end - row);
        multiply(inner, row, count, downs, downs.at(run.expert, block), tile);
        for (int64_t r = 0; r < count; ++r) {
          std::memcpy(sums + (row + r) * width_ + column, tile + r * kColumns, 4 * num_columns);
        }
      }
    });
  }

  void sum(const float* sums) {
    constexpr int64_t kRowsOfTask = 16;
    const int64_t num_tasks = (num_tokens_ + kRowsOfTask - 1) / kRowsOfTask;
    run_tasks(pool_, num_tasks, num_tasks > 2 ? num_threads_ : 1, [&](int64_t task) {
      const int64_t end = std::min(num_tokens_, (task + 1) * kRowsOfTask) * top_k_;
      for (int64_t i = task * kRowsOfTask * top_k_; i < end; ++i) {
        if (sorted_.places[i] < 0) continue;
        const float* from = sums + sorted_.places[i] * width_;
        cores_.own.add(from, o_.weights.typed_data()[i], width_, y_ + i / top_k_ * width_);
      }
    });
  }

  ffi::ThreadPool& pool_;
  const Operands& o_;
  const Number number_;
  const Cores cores_;
  const Gate gate_;
  const int64_t num_tokens_, width_, top_k_;
  const Sorted sorted_;
  float* const y_;
  int64_t num_threads_;
};

ffi::Error apply(ffi::ThreadPool pool, AnyBuffer x, Ints32 ids, Floats32 weights, AnyBuffer gate, AnyBuffer up,
                 AnyBuffer down, AnyBuffer gate_bias, AnyBuffer up_bias, ffi::Result<Floats32> y, Attributes a) {
  const Operands o{x, ids, weights, gate, up, down, gate_bias, up_bias, a.num_experts, a.inner};
  if (const char* reason = contradiction(o, *y)) return ffi::Error::InvalidArgument(reason);
  Call(pool, o, a, y->typed_data()).run();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged::experts

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::experts::Attributes, xla::ffi::StructMember<int64_t>("num_experts"),
                                      xla::ffi::StructMember<int64_t>("inner"),
                                      xla::ffi::StructMember<int64_t>("is_clamped"),
                                      xla::ffi::StructMember<float>("alpha"), xla::ffi::StructMember<float>("limit"),
                                      xla::ffi::StructMember<int64_t>("max_width"),
                                      xla::ffi::StructMember<int64_t>("max_threads"));

namespace ffi = xla::ffi;
using ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_experts, jpaged::experts::apply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()                  // rows
                                  .Arg<jpaged::experts::Ints32>()    // experts of each row
                                  .Arg<jpaged::experts::Floats32>()  // their weights
                                  .Arg<AnyBuffer>()                  // packed gates
                                  .Arg<AnyBuffer>()                  // packed ups
                                  .Arg<AnyBuffer>()                  // packed downs
                                  .Arg<AnyBuffer>()                  // bias of the gates
                                  .Arg<AnyBuffer>()                  // bias of the ups
                                  .Ret<jpaged::experts::Floats32>()
                                  .Attrs<jpaged::experts::Attributes>());
