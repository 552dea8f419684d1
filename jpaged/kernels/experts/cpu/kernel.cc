// A mixture of packed experts as an XLA custom call: divides the work into tasks.
//
//     routes -> rows sorted by expert -> gates and ups -> act -> downs -> each row's weighted sum, in the order of its routes
//
// A task has some blocks of columns of some experts. Blocks of experts without rows are not read. A row's results do
// not depend on other rows. Rows are prepared for quantized matrices as in dense layers: each row by itself.

#include "core.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "../../matmul/cpu/cores.h"
#include "../../matmul/cpu/rows.h"
#include "tasks.h"
#include "xla/ffi/api/ffi.h"

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

const Core& choose_core([[maybe_unused]] int64_t width) {
#if defined(__x86_64__)
  if (has_avx512() && width >= kExpertsAvx512.width) return kExpertsAvx512;
  if (has_avx2() && width >= kExpertsAvx2.width) return kExpertsAvx2;
#endif
  return kExpertsBaseline;
}

Number number_of(ffi::DataType type) {
  return type == ffi::F32 ? Number::kF32 : type == ffi::BF16 ? Number::kBF16 : Number::kF16;
}
int64_t count_of(const AnyBuffer& x) { return static_cast<int64_t>(x.element_count()); }
int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

constexpr int64_t kPlain = -1;

// The form of a matrix of each expert: of its codes, or kPlain.
struct Form {
  int64_t code, group, rounding;

  bool is_plain() const { return code == kPlain; }
  bool operator==(const Form& other) const {
    return code == other.code && group == other.group && rounding == other.rounding;
  }
};

struct Attributes {
  int64_t num_experts, inner;  // F
  int64_t gate_kind;
  float alpha, limit;
  int64_t max_width, max_threads;
  int64_t gate_code, gate_group, gate_rounding, up_code, up_group, up_rounding, down_code, down_group, down_rounding;
};

// A matrix of each expert, packed, with the scales and zeros of codes.
struct Matrix {
  AnyBuffer blocks, scales, zeros;
  Form form;
};

struct Operands {
  AnyBuffer x;
  Ints32 ids;
  Floats32 weights;
  Matrix gate, up, down;
  AnyBuffer gate_bias, up_bias;
  int64_t num_experts, inner;
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

product::Quantised quantised_of(const Matrix& m, int64_t depth) {
  const product::Code code = static_cast<product::Code>(m.form.code);
  const int64_t whole = rounded_up(depth, product::chunk_of(code).numbers);
  const int64_t group = m.form.group < depth ? m.form.group : whole;
  return {code,
          m.scales.element_type() == ffi::BF16 ? Number::kBF16 : Number::kF32,
          static_cast<const uint8_t*>(m.blocks.untyped_data()),
          m.scales.untyped_data(),
          count_of(m.zeros) ? m.zeros.untyped_data() : nullptr,
          m.zeros.element_type() == ffi::F32 ? Number::kF32 : Number::kI8,
          whole,
          group,
          (whole + group - 1) / group};
}

const char* quantised_contradiction(const Matrix& m, int64_t depth) {
  const auto shape = m.blocks.dimensions();
  if (m.form.code < 0 || m.form.code > static_cast<int64_t>(product::Code::kE4M3)) return "no such code";
  const product::Code code = static_cast<product::Code>(m.form.code);
  const int64_t lane = product::chunk_of(code).numbers;
  if (m.blocks.element_type() != ffi::U8 || shape.size() != 4 || shape[2] != kColumns || shape[3] != 4) {
    return "the values are no blocks of bytes";
  }
  if (shape[1] != (depth + lane - 1) / lane) return "rows and matrices differ in depth";
  if (m.form.group < 1 || (m.form.group < depth && m.form.group % lane)) return "groups are no whole lanes";
  const int64_t num_scales = shape[0] * quantised_of(m, depth).num_groups * kColumns;
  const ffi::DataType type = m.scales.element_type();
  if ((type != ffi::F32 && type != ffi::BF16) || count_of(m.scales) != num_scales) return "the scales do not fit the matrices";
  const bool is_zero = m.zeros.element_type() == ffi::S8 || m.zeros.element_type() == ffi::F32;
  if (count_of(m.zeros) && (!is_zero || count_of(m.zeros) != num_scales || !is_whole(code))) {
    return "the zeros do not fit the matrices";
  }
  if (m.form.rounding < 0 || m.form.rounding > static_cast<int64_t>(product::Rounding::kSpans)) return "no such rounding";
  const product::Rounding rounding = static_cast<product::Rounding>(m.form.rounding);
  return rounding != product::Rounding::kNone && !is_whole(code) ? "rows of int8 require integers" : nullptr;
}

const char* matrix_contradiction(const Matrix& m, const Operands& o, int64_t depth, int64_t num_columns) {
  const auto shape = m.blocks.dimensions();
  const bool is_bf16 = o.x.element_type() == ffi::BF16;
  if (!m.form.is_plain()) {
    if (const char* reason = quantised_contradiction(m, depth)) return reason;
  } else {
    if (m.blocks.element_type() != o.x.element_type()) return "rows and matrices differ in type";
    if (shape.size() != (is_bf16 ? 4 : 3) || shape[2] != kColumns) return "blocks have another shape";
    if (shape[1] != (is_bf16 ? (depth + 1) / 2 : depth)) return "rows and matrices differ in depth";
  }
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

// A matrix of each expert, and rows in the form in which a core multiplies them by it.
class Product {
 public:
  Product(const Matrix& m, int64_t num_experts, int64_t depth, Number number, int64_t num_rows, int64_t max_width)
      : core_(product::choose_core(max_width, !m.form.is_plain() || number == Number::kBF16)), form_(m.form),
        num_rows_(num_rows), num_blocks_(m.blocks.dimensions()[0] / num_experts),
        blocks_(static_cast<const char*>(m.blocks.untyped_data())) {
    before_.number = number;
    before_.depth = depth;
    if (form_.is_plain()) {
      padded_ = number == Number::kBF16 ? depth + depth % 2 : depth;
      item_bytes_ = number == Number::kBF16 && core_.takes_bf16 ? 2 : 4;
      stride_ = product::spread_stride(padded_, item_bytes_);
    } else {
      before_.rounding = static_cast<product::Rounding>(form_.rounding);
      quantised_ = quantised_of(m, depth);
      padded_ = quantised_.depth;
      rows_.emplace(core_, before_, quantised_, num_rows);
    }
  }

  int64_t num_blocks() const { return num_blocks_; }
  // Rows that `multiply` takes at once.
  int64_t rows_of_tile() const { return rows_ ? rows_->rows_of_tile() : core_.max_rows; }
  // Numbers of a row, padded.
  int64_t padded() const { return padded_; }
  // True if the same rows can be multiplied by another matrix.
  bool has_form_of(const Product& other) const { return form_ == other.form_; }

  // Memory of the rows, in whole cache lines of floats.
  int64_t num_floats() const {
    return rounded_up(rows_ ? rows_->num_floats() : num_rows_ * stride_ * item_bytes_ / 4, kLine / 4);
  }

  void place(float* at) {
    if (rows_) return rows_->place(at);
    numbers_ = reinterpret_cast<char*>(at);
  }

  // Use the rows of a product of the same form.
  void share(const Product& other) {
    rows_ = other.rows_;
    numbers_ = other.numbers_;
  }

  // Convert a row. `scratch` holds twice `padded` floats in whole vectors.
  void prepare(const void* x, float* scratch, int64_t row) const {
    if (rows_) return rows_->prepare(quantised_, x, scratch, row);
    core_.prepare(before_, x, scratch, numbers_ + row * stride_ * item_bytes_, padded_);
  }

  // sums[i, 32] of a run's rows row + i, i below `count`, times one block of the run's expert.
  void multiply(const Run& run, int64_t block, int64_t row, int64_t count, float* sums) const {
    const int64_t at = run.expert * num_blocks_ + block;
    if (rows_) return rows_->multiply(quantised_, at, run.begin, row, count, sums);
    const char* x = numbers_ + (run.begin + row) * stride_ * item_bytes_;
    const char* numbers = blocks_ + at * padded_ * kColumns * bytes_of(before_.number);
    if (before_.number == Number::kBF16) {
      core_.multiply_bf16(x, stride_, count, padded_, reinterpret_cast<const uint16_t*>(numbers), sums);
    } else if (before_.number == Number::kF16) {
      core_.multiply_f16(reinterpret_cast<const float*>(x), stride_, count, padded_,
                         reinterpret_cast<const uint16_t*>(numbers), sums);
    } else {
      core_.multiply_f32(reinterpret_cast<const float*>(x), stride_, count, padded_,
                         reinterpret_cast<const float*>(numbers), sums);
    }
  }

 private:
  const product::Core& core_;
  const Form form_;
  const int64_t num_rows_, num_blocks_;
  const char* const blocks_;
  product::Before before_{};
  product::Quantised quantised_{};
  std::optional<product::QuantisedRows> rows_;  // of a quantized matrix
  char* numbers_ = nullptr;                     // of others
  int64_t padded_ = 0, stride_ = 0, item_bytes_ = 4;
};

// The parts of one call, all of which have the same rows.
class Call {
 public:
  Call(ffi::ThreadPool& pool, const Operands& o, const Attributes& a, float* y)
      : pool_(pool), o_(o), number_(number_of(o.x.element_type())),
        core_(choose_core(a.max_width)), gate_{static_cast<Gate::Kind>(a.gate_kind), a.alpha, a.limit}, num_tokens_(o.x.dimensions()[0]),
        width_(o.x.dimensions()[1]), top_k_(o.ids.dimensions()[1]),
        sorted_(sort_routes(o.ids.typed_data(), num_tokens_ * top_k_, top_k_, o.num_experts)), y_(y),
        gates_(product_of(o.gate, width_, a)), ups_(product_of(o.up, width_, a)), downs_(product_of(o.down, o.inner, a)) {
    const double work = 3.0 * static_cast<double>(num_rows()) * static_cast<double>(width_ * o.inner);
    num_threads_ = work > kLeastShared ? count_threads(pool, a.max_threads) : 1;
  }

  void run() {
    std::memset(y_, 0, num_tokens_ * width_ * 4);
    if (!num_rows()) return;
    const bool is_shared = ups_.has_form_of(gates_);
    const int64_t stored_floats = rounded_up(o_.inner * item_bytes() * num_rows(), kLine) / 4;
    float* memory = scratch_floats(gates_.num_floats() + (is_shared ? 0 : ups_.num_floats()) + downs_.num_floats() +
                                   stored_floats + num_rows() * width_);
    gates_.place(memory);
    memory += gates_.num_floats();
    if (is_shared) {
      ups_.share(gates_);
    } else {
      ups_.place(memory);
      memory += ups_.num_floats();
    }
    downs_.place(memory);
    memory += downs_.num_floats();
    char* stored = reinterpret_cast<char*>(memory);
    float* sums = memory + stored_floats;
    const char* tokens = static_cast<const char*>(o_.x.untyped_data());
    const auto token_of = [&](int64_t row) { return tokens + sorted_.tokens[row] * width_ * item_bytes(); };
    prepare(gates_, token_of);
    if (!is_shared) prepare(ups_, token_of);
    activate(stored);
    prepare(downs_, [&](int64_t row) { return stored + row * o_.inner * item_bytes(); });
    project(sums);
    sum(sums);
  }

 private:
  int64_t num_rows() const { return static_cast<int64_t>(sorted_.tokens.size()); }
  int64_t item_bytes() const { return bytes_of(number_); }

  Product product_of(const Matrix& matrix, int64_t depth, const Attributes& a) const {
    return {matrix, o_.num_experts, depth, number_, num_rows(), a.max_width};
  }

  // Convert rows of x's type.
  template <class From>
  void prepare(const Product& product, const From& from) {
    constexpr int64_t kRowsOfTask = 16;
    const int64_t num_tasks = (num_rows() + kRowsOfTask - 1) / kRowsOfTask;
    run_tasks(pool_, num_tasks, num_tasks > 2 ? num_threads_ : 1, [&](int64_t task) {
      static thread_local std::vector<float> row;
      const size_t room = 2 * rounded_up(product.padded(), product::kMaxWidth);
      if (row.size() < room) row.resize(room);
      for (int64_t r = task * kRowsOfTask; r < std::min(num_rows(), (task + 1) * kRowsOfTask); ++r) {
        product.prepare(from(r), row.data(), r);
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

  void activate(char* stored) {
    const auto bias_of = [&](const AnyBuffer& bias, int64_t expert) -> const void* {
      if (!count_of(bias)) return nullptr;
      return static_cast<const char*>(bias.untyped_data()) + expert * o_.inner * item_bytes();
    };
    const int64_t rows_of_tile = std::min(gates_.rows_of_tile(), ups_.rows_of_tile());
    const bool has_gates = gate_.kind != Gate::kSquaredRelu;  // without gates both matrices are the same
    for_blocks(gates_.num_blocks(), [&](const Run& run, int64_t block) {
      alignas(kLine) float gate_sums[product::kPanelRows * kColumns], up_sums[product::kPanelRows * kColumns];
      for (int64_t row = 0; row < run.end - run.begin; row += rows_of_tile) {
        const int64_t count = std::min(rows_of_tile, run.end - run.begin - row);
        gates_.multiply(run, block, row, count, gate_sums);
        if (has_gates) ups_.multiply(run, block, row, count, up_sums);
        const Tile tile{gate_sums, has_gates ? up_sums : gate_sums, bias_of(o_.gate_bias, run.expert), bias_of(o_.up_bias, run.expert),
                        number_, count, block * kColumns, o_.inner};
        core_.activate(gate_, tile, number_, stored + (run.begin + row) * o_.inner * item_bytes());
      }
    });
  }

  void project(float* sums) {
    for_blocks(downs_.num_blocks(), [&](const Run& run, int64_t block) {
      alignas(kLine) float tile[product::kPanelRows * kColumns];
      const int64_t column = block * kColumns, num_columns = std::min(kColumns, width_ - column);
      for (int64_t row = 0; row < run.end - run.begin; row += downs_.rows_of_tile()) {
        const int64_t count = std::min(downs_.rows_of_tile(), run.end - run.begin - row);
        downs_.multiply(run, block, row, count, tile);
        for (int64_t r = 0; r < count; ++r) {
          std::memcpy(sums + (run.begin + row + r) * width_ + column, tile + r * kColumns, 4 * num_columns);
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
        core_.add(from, o_.weights.typed_data()[i], width_, y_ + i / top_k_ * width_);
      }
    });
  }

  ffi::ThreadPool& pool_;
  const Operands& o_;
  const Number number_;
  const Core& core_;
  const Gate gate_;
  const int64_t num_tokens_, width_, top_k_;
  const Sorted sorted_;
  float* const y_;
  Product gates_, ups_, downs_;
  int64_t num_threads_;
};

ffi::Error apply(ffi::ThreadPool pool, AnyBuffer x, Ints32 ids, Floats32 weights, AnyBuffer gate, AnyBuffer gate_scales,
                 AnyBuffer gate_zeros, AnyBuffer up, AnyBuffer up_scales, AnyBuffer up_zeros, AnyBuffer down,
                 AnyBuffer down_scales, AnyBuffer down_zeros, AnyBuffer gate_bias, AnyBuffer up_bias,
                 ffi::Result<Floats32> y, Attributes a) {
  const Operands o{x, ids, weights,
                   {gate, gate_scales, gate_zeros, {a.gate_code, a.gate_group, a.gate_rounding}},
                   {up, up_scales, up_zeros, {a.up_code, a.up_group, a.up_rounding}},
                   {down, down_scales, down_zeros, {a.down_code, a.down_group, a.down_rounding}},
                   gate_bias, up_bias, a.num_experts, a.inner};
  if (const char* reason = contradiction(o, *y)) return ffi::Error::InvalidArgument(reason);
  Call(pool, o, a, y->typed_data()).run();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged::experts

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::experts::Attributes, xla::ffi::StructMember<int64_t>("num_experts"),
                                      xla::ffi::StructMember<int64_t>("inner"),
                                      xla::ffi::StructMember<int64_t>("gate_kind"),
                                      xla::ffi::StructMember<float>("alpha"), xla::ffi::StructMember<float>("limit"),
                                      xla::ffi::StructMember<int64_t>("max_width"),
                                      xla::ffi::StructMember<int64_t>("max_threads"),
                                      xla::ffi::StructMember<int64_t>("gate_code"),
                                      xla::ffi::StructMember<int64_t>("gate_group"),
                                      xla::ffi::StructMember<int64_t>("gate_rounding"),
                                      xla::ffi::StructMember<int64_t>("up_code"),
                                      xla::ffi::StructMember<int64_t>("up_group"),
                                      xla::ffi::StructMember<int64_t>("up_rounding"),
                                      xla::ffi::StructMember<int64_t>("down_code"),
                                      xla::ffi::StructMember<int64_t>("down_group"),
                                      xla::ffi::StructMember<int64_t>("down_rounding"));

namespace ffi = xla::ffi;
using ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_experts, jpaged::experts::apply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()                  // rows
                                  .Arg<jpaged::experts::Ints32>()    // experts of each row
                                  .Arg<jpaged::experts::Floats32>()  // their weights
                                  .Arg<AnyBuffer>()                  // packed gates
                                  .Arg<AnyBuffer>()                  // their scales, if they are quantized
                                  .Arg<AnyBuffer>()                  // their zeros
                                  .Arg<AnyBuffer>()                  // packed ups
                                  .Arg<AnyBuffer>()                  // their scales, if they are quantized
                                  .Arg<AnyBuffer>()                  // their zeros
                                  .Arg<AnyBuffer>()                  // packed downs
                                  .Arg<AnyBuffer>()                  // their scales, if they are quantized
                                  .Arg<AnyBuffer>()                  // their zeros
                                  .Arg<AnyBuffer>()                  // bias of the gates
                                  .Arg<AnyBuffer>()                  // bias of the ups
                                  .Ret<jpaged::experts::Floats32>()
                                  .Attrs<jpaged::experts::Attributes>());
