// Products of rows with a packed matrix as an XLA custom call: divides the work into tasks. core.cc contains the
// arithmetic.
//
//     rows in use -> prepared once (norm, type) -> a task for some blocks of columns -> tiles of up to 12 rows
//
// Results of unused rows are zeros, whatever the rows contain, or undefined on request.

#include <algorithm>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "core.h"
#include "cores.h"
#include "rows.h"
#include "tasks.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged::product {

namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Ints32 = ffi::Buffer<ffi::S32>;

// Minimum work of a thread in multiply-adds: less is done before another thread wakes up.
constexpr double kLeastShared = 4e5;
// Tasks per thread, so that no thread is idle for long if another is delayed.
constexpr int64_t kTasksPerThread = 4;
// Rows at multiples of this distance in bytes use the same sets of the L1 cache.
constexpr int64_t kConflict = 4096;
constexpr int64_t kLine = 64;
// Bytes of rows that are multiplied with one block after the other, and of those blocks.
constexpr int64_t kSpanBytes = 512 << 10, kBlocksBytes = 4 << 20;

bool is_number(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16; }
Number number_of(ffi::DataType type) {
  return type == ffi::F32 ? Number::kF32 : type == ffi::BF16 ? Number::kBF16 : Number::kF16;
}
const void* or_null(const AnyBuffer& x) { return x.element_count() ? x.untyped_data() : nullptr; }
int64_t count_of(const AnyBuffer& x) { return static_cast<int64_t>(x.element_count()); }

// The rows of a call in the form that a core multiplies.
struct Rows {
  const char* x;
  int64_t stride;      // numbers
  int64_t row_bytes;
};

// Call run(r, scratch for twice `depth` floats in whole vectors) for each row.
template <class Run>
void for_each_row(ffi::ThreadPool& pool, int64_t num_rows, int64_t depth, int64_t num_threads, const Run& run) {
  constexpr int64_t kRowsOfTask = 16;
  const int64_t num_tasks = (num_rows + kRowsOfTask - 1) / kRowsOfTask;
  const int64_t row_floats = 2 * ((depth + kMaxWidth - 1) / kMaxWidth * kMaxWidth);
  run_tasks(pool, num_tasks, num_tasks > 2 ? num_threads : 1, [&](int64_t task) {
    static thread_local std::vector<float> row;
    if (static_cast<int64_t>(row.size()) < row_floats) row.resize(row_floats);
    for (int64_t r = task * kRowsOfTask; r < std::min(num_rows, (task + 1) * kRowsOfTask); ++r) run(r, row.data());
  });
}

// Rows padded with zeros to `padded` numbers.
Rows prepare_rows(ffi::ThreadPool& pool, const Core& core, const Before& before, const void* x, int64_t num_rows,
                  int64_t padded, int64_t num_threads) {
  const int64_t depth = before.depth, stored_bytes = depth * bytes_of(before.number);
  const bool is_half = before.number != Number::kF32;
  const bool keeps_halves = before.number == Number::kBF16 && core.takes_bf16;
  const bool is_same = before.norm == Norm::kNone && before.rounding == Rounding::kNone && !before.order;
  const bool is_as_it_is = is_same && is_half == keeps_halves && padded == depth &&
                           !(num_rows > 1 && stored_bytes % kConflict == 0);
  if (is_as_it_is) return {static_cast<const char*>(x), depth, stored_bytes};
  const int64_t item_bytes = keeps_halves ? 2 : 4;
  const int64_t stride = spread_stride(padded, item_bytes), row_bytes = stride * item_bytes;
  char* to = reinterpret_cast<char*>(scratch_floats(num_rows * row_bytes / 4));
  for_each_row(pool, num_rows, padded, num_threads, [&](int64_t r, float* row) {
    core.prepare(before, static_cast<const char*>(x) + r * stored_bytes, row, to + r * row_bytes, padded);
  });
  return {to, stride, row_bytes};
}

struct Attributes {
  float eps;
  int64_t norm, gate, max_width, max_threads;
  int64_t code;      // of a quantized matrix; kPlain if it is not quantized
  int64_t group;     // numbers of a column that share a scale; may exceed the depth
  int64_t rounding;  // of rows to int8
  int64_t clears;    // results of rows that are not in use become zeros; otherwise they are undefined
  int64_t activation;  // of sums, without gates
};

constexpr int64_t kPlain = -1;

struct Operands {
  AnyBuffer x, matrix;
  Ints32 num_rows;
  AnyBuffer scale, norm_bias, bias, residual;
  AnyBuffer scales, zeros, order, step;  // of a quantized matrix
  AnyBuffer delta;                       // added to the sums of rows with an adapter
  Ints32 adapters;
  AnyBuffer vectors;  // of adapters: scales and shifts of the sums
};

Quantised quantised_of(const Operands& o, const Attributes& a) {
  const Code code = static_cast<Code>(a.code);
  const int64_t depth = o.matrix.dimensions()[1] / chunk_of(code).lanes * chunk_of(code).numbers;
  const int64_t group = a.group < o.x.dimensions()[1] ? a.group : depth;
  return {code,
          number_of(o.scales.element_type()),
          static_cast<const uint8_t*>(o.matrix.untyped_data()),
          o.scales.untyped_data(),
          or_null(o.zeros),
          o.zeros.element_type() == ffi::F32 ? Number::kF32 : Number::kI8,
          depth,
          group,
          (depth + group - 1) / group};
}

// Like `contradiction`, for the arguments of quantized matrices.
const char* quantised_contradiction(const Operands& o, const Attributes& a) {
  const auto x = o.x.dimensions(), matrix = o.matrix.dimensions();
  if (a.code < 0 || a.code > static_cast<int64_t>(kLastCode)) return "no such code";
  const Chunk chunk = chunk_of(static_cast<Code>(a.code));
  if (o.matrix.element_type() != ffi::U8 || matrix.size() != 4 || matrix[2] != kColumns || matrix[3] != 4) {
    return "the values are no blocks of bytes";
  }
  if (matrix[1] != (x[1] + chunk.numbers - 1) / chunk.numbers * chunk.lanes) return "rows and matrix differ in depth";
  if (a.group < 1 || (a.group < x[1] && a.group % chunk.numbers)) return "groups are no whole chunks of lanes";
  const int64_t num_scales = matrix[0] * quantised_of(o, a).num_groups * kColumns;
  if (!is_number(o.scales.element_type()) || count_of(o.scales) != num_scales) return "the scales do not fit the matrix";
  const bool is_zero = o.zeros.element_type() == ffi::S8 || o.zeros.element_type() == ffi::F32;
  if (count_of(o.zeros) && (!is_zero || count_of(o.zeros) != num_scales || !is_whole(static_cast<Code>(a.code)))) {
    return "the zeros do not fit the matrix";
  }
  if (count_of(o.order) && (o.order.element_type() != ffi::S32 || count_of(o.order) != x[1])) {
    return "the order does not fit the rows";
  }
  if (a.rounding < 0 || a.rounding > static_cast<int64_t>(Rounding::kSpans)) return "no such rounding";
  const Rounding rounding = static_cast<Rounding>(a.rounding);
  if (count_of(o.step) && (o.step.element_type() != ffi::F32 || rounding != Rounding::kRow)) return "rows have no step";
  if (rounding != Rounding::kNone && !is_whole(static_cast<Code>(a.code))) return "rows of int8 want whole numbers";
  return nullptr;
}

const char* plain_contradiction(const Operands& o) {
  const auto x = o.x.dimensions(), matrix = o.matrix.dimensions();
  if (o.matrix.element_type() != o.x.element_type()) return "rows and matrix differ in type";
  const bool is_bf16 = o.x.element_type() == ffi::BF16;
  if (matrix.size() != (is_bf16 ? 4 : 3)) return "an operand has another rank";
  if (matrix[2] != kColumns || (is_bf16 && matrix[3] != 2)) return "rows or blocks differ in shape";
  return matrix[1] != (is_bf16 ? (x[1] + 1) / 2 : x[1]) ? "rows and matrix differ in depth" : nullptr;
}

// Return why shapes are inconsistent, or null; calls by multiply.py are always consistent.
const char* contradiction(const Operands& o, const AnyBuffer& y, const Attributes& a) {
  const auto x = o.x.dimensions(), matrix = o.matrix.dimensions(), out = y.dimensions();
  if (!is_number(o.x.element_type()) || !is_number(y.element_type())) return "rows are not float32, bfloat16 or float16";
  if (x.size() != 2 || out.size() != 2) return "an operand has another rank";
  if (x[0] != out[0]) return "rows or blocks differ in shape";
  if (const char* reason = a.code == kPlain ? plain_contradiction(o) : quantised_contradiction(o, a)) return reason;
  for (const int64_t activation : {a.gate, a.activation}) {
    if (activation < 0 || activation > static_cast<int64_t>(Gate::kErfGelu)) return "no such gate";
  }
  const int64_t parts = a.gate ? 2 : 1;
  if (matrix[0] != parts * ((out[1] + kColumns - 1) / kColumns)) return "matrix and result differ in columns";
  if (o.num_rows.element_count() != 1) return "the number of rows is no scalar";
  if (a.norm < 0 || a.norm > static_cast<int64_t>(Norm::kLayer)) return "no such norm";
  for (const AnyBuffer& per_depth : {o.scale, o.norm_bias}) {
    if (count_of(per_depth) && (count_of(per_depth) != x[1] || per_depth.element_type() != o.x.element_type())) {
      return "scale or bias of the norm do not fit the rows";
    }
  }
  if (a.norm == static_cast<int64_t>(Norm::kRms) && !count_of(o.scale)) return "the norm has no scale";
  if (count_of(o.bias) && (count_of(o.bias) != parts * out[1] || !is_number(o.bias.element_type()))) {
    return "the bias does not fit the result";
  }
  if (count_of(o.residual) && (count_of(o.residual) != out[0] * out[1] || o.residual.element_type() != y.element_type())) {
    return "what is added does not fit the result";
  }
  if (count_of(o.delta) && (count_of(o.delta) != x[0] * parts * out[1] || o.delta.element_type() != ffi::F32 ||
                            static_cast<int64_t>(o.adapters.element_count()) != x[0])) {
    return "what adapters add does not fit the rows";
  }
  const int64_t num_sums = parts * out[1];
  if (count_of(o.vectors) && (!count_of(o.delta) || o.vectors.element_type() != ffi::F32 ||
                              o.vectors.dimensions().size() != 3 || o.vectors.dimensions()[1] != 2 ||
                              o.vectors.dimensions()[2] != num_sums)) {
    return "scales and shifts of adapters do not fit the sums";
  }
  return nullptr;
}

// Deltas of adapters, added to the sums first, or null: [T, N], with adjacent parts. Vectors, or null: for each slot N
// scales less 1, by which the sums are multiplied before that, and N shifts.
struct Delta {
  const float* sums;
  const int32_t* adapters;  // of each row; 0 is none
  int64_t num_columns, num_parts;
  const float* vectors;
  int64_t num_slots;

  void add(int64_t row, int64_t count, int64_t part, int64_t column, float* tile) const {
    if (!sums) return;
    const int64_t width = std::min(kColumns, num_columns - column);
    for (int64_t r = 0; r < count; ++r) {
      const int32_t slot = adapters[row + r];
      if (slot <= 0) continue;
      const float* from = sums + ((row + r) * num_parts + part) * num_columns + column;
      float* to = tile + r * kColumns;
      if (vectors && slot <= num_slots) {
        const float* scales = vectors + (2 * (slot - 1) * num_parts + part) * num_columns + column;
        const float* shifts = scales + num_parts * num_columns;
        for (int64_t c = 0; c < width; ++c) to[c] += to[c] * scales[c] + shifts[c];
      }
      for (int64_t c = 0; c < width; ++c) to[c] += from[c];
    }
  }
};

// A call's product: prepared rows, and how a core multiplies some of them with a block of columns.
struct Tiles {
  int64_t num_rows, num_blocks, num_threads;
  int64_t rows_of_tile;  // rows multiplied at once
  Delta delta;
  int64_t row_bytes = 0, block_bytes = 0;  // that a tile reads; 0: rows are not divided

  // Rows whose tiles follow each other for a block of columns: they stay in a core's L2 cache.
  int64_t rows_of_span() const {
    if (!row_bytes) return num_rows;
    return std::max<int64_t>(kSpanBytes / row_bytes / rows_of_tile, 1) * rows_of_tile;
  }
  // Blocks that are read again for each span: they stay in the last cache.
  int64_t blocks_of_span() const {
    return block_bytes ? std::max<int64_t>(kBlocksBytes / block_bytes, 1) : num_blocks;
  }
};

// Prefetch the cache lines of a tile's results and residuals, which are a row apart: `finish` would wait for each.
void prefetch_results(const After& after, int64_t row, int64_t count, int64_t column) {
  const int64_t item_bytes = bytes_of(after.number);
  for (int64_t r = row; r < row + count; ++r) {
    const int64_t at = (r * after.num_columns + column) * item_bytes;
    __builtin_prefetch(static_cast<const char*>(after.y) + at, 1, 2);
    if (after.residual) __builtin_prefetch(static_cast<const char*>(after.residual) + at, 0, 2);
  }
}

// Call sums_of(block, first row, number of rows, sums [rows, 32]) for each tile, and finish it.
template <class SumsOf>
void multiply_tiles(ffi::ThreadPool& pool, const Core& core, const After& after, const Tiles& tiles,
                    const SumsOf& sums_of) {
  const int64_t num_blocks = tiles.num_blocks, num_threads = tiles.num_threads;
  const int64_t step = num_threads > 1 ? std::max<int64_t>(num_blocks / (kTasksPerThread * num_threads), 1) : num_blocks;
  run_tasks(pool, (num_blocks + step - 1) / step, num_threads, [&](int64_t task) {
    alignas(kLine) float sums[kPanelRows * kColumns], ups[kPanelRows * kColumns];
    const auto multiply_span = [&](int64_t block, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row += tiles.rows_of_tile) {
        const int64_t count = std::min(tiles.rows_of_tile, end - row);
        if (count > kMaxRows) prefetch_results(after, row, count, block * kColumns);
        sums_of(block, row, count, sums);
        tiles.delta.add(row, count, 0, block * kColumns, sums);
        if (after.gate != Gate::kNone) {
          sums_of(num_blocks + block, row, count, ups);
          tiles.delta.add(row, count, 1, block * kColumns, ups);
        }
        core.finish(after, {row, count, block * kColumns}, sums, ups);
      }
    };
    const int64_t end_block = std::min(num_blocks, (task + 1) * step), num_rows = tiles.num_rows;
    const int64_t blocks_of_span = tiles.blocks_of_span(), rows_of_span = tiles.rows_of_span();
    for (int64_t first = task * step; first < end_block; first += blocks_of_span) {
      for (int64_t row = 0; row < num_rows; row += rows_of_span) {
        for (int64_t block = first; block < std::min(first + blocks_of_span, end_block); ++block) {
          multiply_span(block, row, std::min(row + rows_of_span, num_rows));
        }
      }
    }
  });
}

void multiply_plain(ffi::ThreadPool& pool, const Core& core, const Before& before, const After& after, Tiles tiles,
                    const Operands& o) {
  const bool is_bf16 = before.number == Number::kBF16;
  const int64_t depth = is_bf16 ? before.depth + before.depth % 2 : before.depth;
  const Rows rows = prepare_rows(pool, core, before, o.x.untyped_data(), tiles.num_rows, depth, tiles.num_threads);
  const int64_t block_bytes = depth * kColumns * bytes_of(before.number);
  const char* blocks = static_cast<const char*>(o.matrix.untyped_data());
  tiles.rows_of_tile = core.max_rows;
  tiles.row_bytes = rows.row_bytes;
  tiles.block_bytes = block_bytes;
  multiply_tiles(pool, core, after, tiles, [&](int64_t block, int64_t row, int64_t count, float* sums) {
    const char *from = rows.x + row * rows.row_bytes, *columns = blocks + block * block_bytes;
    if (is_bf16) {
      core.multiply_bf16(from, rows.stride, count, depth, reinterpret_cast<const uint16_t*>(columns), sums);
    } else if (before.number == Number::kF16) {
      core.multiply_f16(reinterpret_cast<const float*>(from), rows.stride, count, depth,
                        reinterpret_cast<const uint16_t*>(columns), sums);
    } else {
      core.multiply_f32(reinterpret_cast<const float*>(from), rows.stride, count, depth,
                        reinterpret_cast<const float*>(columns), sums);
    }
  });
}

void multiply_quantised(ffi::ThreadPool& pool, const Core& core, const Before& before, const After& after, Tiles tiles,
                        const Quantised& q, const void* x) {
  QuantisedRows rows(core, before, q, tiles.num_rows);
  tiles.rows_of_tile = rows.rows_of_tile();
  if (rows.has_numbers()) {
    const Rows numbers = prepare_rows(pool, core, before, x, tiles.num_rows, q.depth, tiles.num_threads);
    multiply_tiles(pool, core, after, tiles, [&](int64_t block, int64_t row, int64_t count, float* sums) {
      core.multiply_panels(q, block, numbers.x + row * numbers.row_bytes, numbers.stride, before.number, count, sums);
    });
    return;
  }
  rows.place(scratch_floats(rows.num_floats()));
  const int64_t stored_bytes = before.depth * bytes_of(before.number);
  for_each_row(pool, tiles.num_rows, q.depth, tiles.num_threads, [&](int64_t r, float* row) {
    rows.prepare(q, static_cast<const char*>(x) + r * stored_bytes, row, r);
  });
  multiply_tiles(pool, core, after, tiles, [&](int64_t block, int64_t row, int64_t count, float* sums) {
    rows.multiply(q, block, 0, row, count, sums);
  });
}

ffi::Error multiply(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer matrix, Ints32 num_rows, AnyBuffer scale,
                    AnyBuffer norm_bias, AnyBuffer bias, AnyBuffer residual, AnyBuffer scales, AnyBuffer zeros,
                    AnyBuffer order, AnyBuffer step, AnyBuffer delta, Ints32 adapters, AnyBuffer vectors,
                    ffi::Result<AnyBuffer> y, Attributes a) {
  const Operands o{x, matrix, num_rows, scale, norm_bias, bias, residual, scales, zeros, order, step, delta, adapters, vectors};
  if (const char* reason = contradiction(o, *y, a)) return ffi::Error::InvalidArgument(reason);
  const int64_t num_tokens = x.dimensions()[0], depth = x.dimensions()[1], num_columns = y->dimensions()[1];
  const int64_t rows_in_use = std::clamp<int64_t>(num_rows.typed_data()[0], 0, num_tokens);
  const bool is_quantised = a.code != kPlain;
  const Core& core = choose_core(a.max_width, is_quantised || x.element_type() == ffi::BF16);
  const After after{or_null(bias), or_null(residual), y->untyped_data(), number_of(bias.element_type()),
                    number_of(y->element_type()), num_columns, static_cast<Gate>(a.gate),
                    static_cast<Gate>(a.activation)};
  const int64_t y_row_bytes = num_columns * bytes_of(after.number);
  if (a.clears) {
    std::memset(static_cast<char*>(after.y) + rows_in_use * y_row_bytes, 0, (num_tokens - rows_in_use) * y_row_bytes);
  }
  if (!rows_in_use) return ffi::Error::Success();

  const int64_t num_blocks = (num_columns + kColumns - 1) / kColumns, parts = a.gate ? 2 : 1;
  const double work = 1.0 * rows_in_use * depth * num_blocks * kColumns * parts;
  const Before before{static_cast<Norm>(a.norm), a.eps, or_null(scale), or_null(norm_bias), number_of(x.element_type()),
                      depth, static_cast<Rounding>(a.rounding), static_cast<const float*>(or_null(step)),
                      static_cast<const int32_t*>(or_null(order))};
  const Tiles tiles{rows_in_use, num_blocks, work > kLeastShared ? count_threads(pool, a.max_threads) : 1, 0,
                    {static_cast<const float*>(or_null(delta)), adapters.typed_data(), num_columns, parts,
                     static_cast<const float*>(or_null(vectors)), count_of(vectors) ? vectors.dimensions()[0] : 0}};
  if (is_quantised) {
    multiply_quantised(pool, core, before, after, tiles, quantised_of(o, a), x.untyped_data());
  } else {
    multiply_plain(pool, core, before, after, tiles, o);
  }
  return ffi::Error::Success();
}

// --- norms only --------------------------------------------------------------------------------------------------

ffi::Error normalise(ffi::ThreadPool pool, AnyBuffer x, Ints32 num_rows, AnyBuffer scale, AnyBuffer norm_bias,
                     ffi::Result<AnyBuffer> y, Attributes a) {
  const auto shape = x.dimensions();
  if (!is_number(x.element_type()) || shape.size() != 2) return ffi::Error::InvalidArgument("rows are not a matrix of numbers");
  if (a.norm < 1 || a.norm > static_cast<int64_t>(Norm::kLayer)) return ffi::Error::InvalidArgument("no such norm");
  for (const AnyBuffer& per_depth : {scale, norm_bias}) {
    if (count_of(per_depth) && (count_of(per_depth) != shape[1] || per_depth.element_type() != x.element_type())) {
      return ffi::Error::InvalidArgument("scale or bias of the norm do not fit the rows");
    }
  }
  const int64_t depth = shape[1], rows_in_use = std::clamp<int64_t>(num_rows.typed_data()[0], 0, shape[0]);
  const Before before{static_cast<Norm>(a.norm), a.eps, or_null(scale), or_null(norm_bias), number_of(x.element_type()),
                      depth, Rounding::kNone, nullptr, nullptr};
  const int64_t row_bytes = depth * bytes_of(before.number);
  char* out = static_cast<char*>(y->untyped_data());
  std::memset(out + rows_in_use * row_bytes, 0, (shape[0] - rows_in_use) * row_bytes);
  if (!rows_in_use) return ffi::Error::Success();
  const Core& core = choose_core(a.max_width, before.number == Number::kBF16);
  const int64_t num_threads = count_threads(pool, a.max_threads);
  if (before.number == Number::kF32) {
    for_each_row(pool, rows_in_use, depth, num_threads, [&](int64_t r, float* row) {
      core.prepare(before, static_cast<const char*>(x.untyped_data()) + r * row_bytes, row, out + r * row_bytes, depth);
    });
    return ffi::Error::Success();
  }
  const Rows rows = prepare_rows(pool, core, before, x.untyped_data(), rows_in_use, depth + depth % 2,
                                 num_threads);
  const bool is_bf16 = before.number == Number::kBF16;
  const bool is_widened = is_bf16 ? !core.takes_bf16 : before.number == Number::kF16;
  for (int64_t r = 0; r < rows_in_use; ++r) {
    const char* row = rows.x + r * rows.row_bytes;
    if (!is_widened) {
      std::memcpy(out + r * row_bytes, row, row_bytes);
      continue;
    }
    for (int64_t i = 0; i < depth; ++i) {
      const float x = reinterpret_cast<const float*>(row)[i];
      reinterpret_cast<uint16_t*>(out)[r * depth + i] = is_bf16 ? encode_bf16(x) : encode_f16(x);
    }
  }
  return ffi::Error::Success();
}

// --- heads -------------------------------------------------------------------------------------------------------

struct HeadAttributes {
  float eps;
  int64_t max_width, max_threads;
};

const char* heads_contradiction(const AnyBuffer& qkv, const AnyBuffer& cos, const AnyBuffer& sin,
                                const AnyBuffer& q_scale, const AnyBuffer& k_scale, const Ints32& num_rows) {
  const auto shape = qkv.dimensions(), angles = cos.dimensions();
  if (shape.size() != 4 || angles.size() != 2 || !is_number(qkv.element_type())) return "an operand has another rank";
  if (shape[2] < 3 || shape[3] % 2 || shape[3] > 1024) return "heads are odd, too wide or none";
  if (angles[0] != shape[0] || 2 * angles[1] != shape[3] || cos.element_type() != ffi::F32) return "angles do not fit";
  if (sin.element_count() != cos.element_count() || sin.element_type() != ffi::F32) return "angles do not fit";
  for (const AnyBuffer& scale : {q_scale, k_scale}) {
    if (count_of(scale) && (count_of(scale) != shape[3] || scale.element_type() != qkv.element_type())) {
      return "the scale of a norm does not fit the heads";
    }
  }
  return num_rows.element_count() == 1 ? nullptr : "the number of rows is no scalar";
}

ffi::Error rotate(ffi::ThreadPool pool, AnyBuffer qkv, AnyBuffer cos, AnyBuffer sin, AnyBuffer q_scale,
                  AnyBuffer k_scale, Ints32 num_rows, ffi::Result<AnyBuffer> q, ffi::Result<AnyBuffer> k,
                  ffi::Result<AnyBuffer> v, HeadAttributes a) {
  if (const char* reason = heads_contradiction(qkv, cos, sin, q_scale, k_scale, num_rows)) {
    return ffi::Error::InvalidArgument(reason);
  }
  const auto shape = qkv.dimensions();
  const int64_t num_tokens = shape[0], rows_in_use = std::clamp<int64_t>(num_rows.typed_data()[0], 0, num_tokens);
  const Heads heads{number_of(qkv.element_type()), shape[1], shape[2] - 2, shape[3], a.eps, or_null(q_scale),
                    or_null(k_scale), qkv.untyped_data(), cos.typed_data<float>(), sin.typed_data<float>(),
                    q->untyped_data(), k->untyped_data(), v->untyped_data()};
  const Core& core = choose_core(a.max_width, true);
  for (ffi::Result<AnyBuffer>* out : {&q, &k, &v}) {
    const int64_t row_bytes = static_cast<int64_t>((*out)->size_bytes()) / std::max<int64_t>(num_tokens, 1);
    std::memset(static_cast<char*>((*out)->untyped_data()) + rows_in_use * row_bytes, 0,
                (num_tokens - rows_in_use) * row_bytes);
  }
  constexpr int64_t kRowsOfTask = 16;
  const int64_t num_tasks = (rows_in_use + kRowsOfTask - 1) / kRowsOfTask;
  run_tasks(pool, num_tasks, num_tasks > 2 ? count_threads(pool, a.max_threads) : 1, [&](int64_t task) {
    for (int64_t t = task * kRowsOfTask; t < std::min(rows_in_use, (task + 1) * kRowsOfTask); ++t) core.rotate(heads, t);
  });
  return ffi::Error::Success();
}

// --- packing -----------------------------------------------------------------------------------------------------

// Write four words of four columns, which begin `stride` bytes apart, as `to` [4, 32].
inline void transpose_words(const char* columns, int64_t stride, uint32_t* to) {
#ifdef __SSE2__
  const auto load = [&](int64_t c) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(columns + c * stride)); };
  const auto store = [&](int64_t k, __m128i words) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k * kColumns), words);
  };
  const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
  const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  store(0, _mm_unpacklo_epi64(ab, cd));
  store(1, _mm_unpackhi_epi64(ab, cd));
  const __m128i last_ab = _mm_unpackhi_epi32(a, b), last_cd = _mm_unpackhi_epi32(c, d);
  store(2, _mm_unpacklo_epi64(last_ab, last_cd));
  store(3, _mm_unpackhi_epi64(last_ab, last_cd));
#else
  for (int64_t c = 0; c < 4; ++c) {
    for (int64_t k = 0; k < 4; ++k) std::memcpy(to + k * kColumns + c, columns + c * stride + 4 * k, 4);
  }
#endif
}

// One block of columns that are `num_bytes` of memory each: words of 4 bytes change places, a cache line at a time.
void pack_words(const char* columns, int64_t stride, int64_t num_bytes, uint32_t* block) {
  const int64_t num_words = num_bytes / 4;
  for (int64_t begin = 0; begin < num_words; begin += kLine / 4) {
    const int64_t end = std::min(num_words, begin + kLine / 4);
    for (int64_t c = 0; c < kColumns; c += 4) {
      const char* from = columns + c * stride;
      int64_t k = begin;
      for (; k + 4 <= end; k += 4) transpose_words(from + 4 * k, stride, block + k * kColumns + c);
      for (; k < end; ++k) {
        for (int64_t i = 0; i < 4; ++i) std::memcpy(block + k * kColumns + c + i, from + i * stride + 4 * k, 4);
      }
    }
  }
}

// Number (k, n) of the matrix is at k * k_step + n * n_step; `deep` numbers of a column are side by side in a block.
template <int64_t deep, class T>
void pack(const T* matrix, int64_t depth, int64_t num_columns, int64_t k_step, int64_t n_step, T* blocks) {
  const int64_t even_depth = (depth + deep - 1) / deep * deep;
  for (int64_t first = 0; first < num_columns; first += kColumns, blocks += even_depth * kColumns) {
    const int64_t count = std::min(kColumns, num_columns - first);
    const bool is_whole = count == kColumns && even_depth == depth;
    if (is_whole && k_step == 1 && deep * sizeof(T) == 4) {
      const int64_t size = sizeof(T);
      const char* columns = reinterpret_cast<const char*>(matrix + first * n_step);
      pack_words(columns, n_step * size, depth * size, reinterpret_cast<uint32_t*>(blocks));
      continue;
    }
    if (is_whole && n_step == 1) {
      for (int64_t k = 0; k < depth; k += deep) {
        const T* from = matrix + k * k_step + first;
        T* to = blocks + k * kColumns;
        for (int64_t c = 0; c < kColumns; ++c) {
          for (int64_t i = 0; i < deep; ++i) to[c * deep + i] = from[i * k_step + c];
        }
      }
      continue;
    }
    for (int64_t k = 0; k < even_depth; ++k) {
      T* to = blocks + (k / deep * deep) * kColumns + k % deep;
      const T* from = matrix + k * k_step + first * n_step;
      for (int64_t c = 0; c < kColumns; ++c) to[c * deep] = k < depth && c < count ? from[c * n_step] : T{};
    }
  }
}

// One code per number, each in its own byte, at k * k_step + n * n_step.
void pack_codes(const uint8_t* codes, int64_t depth, int64_t num_columns, int64_t k_step, int64_t n_step, Code code,
                uint8_t* blocks) {
  const Chunk chunk = chunk_of(code);
  const int64_t num_high = num_high_bits(code), num_low = num_high ? 4 : 8;
  for (int64_t first = 0; first < num_columns; first += kColumns) {
    const int64_t columns = std::min(kColumns, num_columns - first);
    for (int64_t at = 0; at < depth; at += chunk.numbers, blocks += 4 * kColumns * chunk.lanes) {
      std::memset(blocks, 0, 4 * kColumns * chunk.lanes);
      for (int64_t i = 0; i < std::min(chunk.numbers, depth - at); ++i) {
        const uint8_t* from = codes + (at + i) * k_step + first * n_step;
        const int64_t shift = shift_of(code, i), high_shift = high_shift_of(code, i);
        uint8_t* low = blocks + (num_high ? i / 8 : 0) * 4 * kColumns + shift / 8;
        uint8_t* high = blocks + (chunk.lanes - 1) * 4 * kColumns + high_shift / 8;
        for (int64_t c = 0; c < columns; ++c) {
          const uint8_t number = from[c * n_step];
          low[4 * c] |= static_cast<uint8_t>((number & ((1 << num_low) - 1)) << shift % 8);
          if (num_high) high[4 * c] |= static_cast<uint8_t>(number >> 4 << high_shift % 8);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jpaged::product

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::product::Attributes, xla::ffi::StructMember<float>("eps"),
                                      xla::ffi::StructMember<int64_t>("norm"),
                                      xla::ffi::StructMember<int64_t>("gate"),
                                      xla::ffi::StructMember<int64_t>("max_width"),
                                      xla::ffi::StructMember<int64_t>("max_threads"),
                                      xla::ffi::StructMember<int64_t>("code"), xla::ffi::StructMember<int64_t>("group"),
                                      xla::ffi::StructMember<int64_t>("rounding"),
                                      xla::ffi::StructMember<int64_t>("clears"),
                                      xla::ffi::StructMember<int64_t>("activation"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::product::HeadAttributes, xla::ffi::StructMember<float>("eps"),
                                      xla::ffi::StructMember<int64_t>("max_width"),
                                      xla::ffi::StructMember<int64_t>("max_threads"));

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using jpaged::product::Ints32;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_multiply, jpaged::product::multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()  // rows
                                  .Arg<AnyBuffer>()  // packed matrix
                                  .Arg<Ints32>()     // number of rows
                                  .Arg<AnyBuffer>()  // scale of the norm
                                  .Arg<AnyBuffer>()  // its bias
                                  .Arg<AnyBuffer>()  // bias of the product
                                  .Arg<AnyBuffer>()  // residual
                                  .Arg<AnyBuffer>()  // scales of a quantized matrix
                                  .Arg<AnyBuffer>()  // its zeros
                                  .Arg<AnyBuffer>()  // order of its depth
                                  .Arg<AnyBuffer>()  // step of its rows
                                  .Arg<AnyBuffer>()  // deltas of adapters
                                  .Arg<Ints32>()     // adapter of each row
                                  .Arg<AnyBuffer>()  // scales and shifts of adapters
                                  .Ret<AnyBuffer>()
                                  .Attrs<jpaged::product::Attributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_normalise, jpaged::product::normalise,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()  // rows
                                  .Arg<Ints32>()     // number of rows
                                  .Arg<AnyBuffer>()  // scale of the norm
                                  .Arg<AnyBuffer>()  // its bias
                                  .Ret<AnyBuffer>()
                                  .Attrs<jpaged::product::Attributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_rotate, jpaged::product::rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()  // queries, keys and values
                                  .Arg<AnyBuffer>()  // cosines
                                  .Arg<AnyBuffer>()  // sines
                                  .Arg<AnyBuffer>()  // scale of the queries' norm
                                  .Arg<AnyBuffer>()  // scale of the keys' norm
                                  .Arg<Ints32>()     // number of rows
                                  .Ret<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Ret<AnyBuffer>()
                                  .Attrs<jpaged::product::HeadAttributes>());

extern "C" void jpaged_pack(const void* matrix, int64_t depth, int64_t num_columns, int64_t k_step, int64_t n_step,
                            int64_t item_bytes, void* blocks) {
  if (item_bytes == 4) {
    jpaged::product::pack<1>(static_cast<const float*>(matrix), depth, num_columns, k_step, n_step,
                             static_cast<float*>(blocks));
  } else {
    jpaged::product::pack<2>(static_cast<const uint16_t*>(matrix), depth, num_columns, k_step, n_step,
                             static_cast<uint16_t*>(blocks));
  }
}

extern "C" void jpaged_pack_f16(const void* matrix, int64_t depth, int64_t num_columns, int64_t k_step, int64_t n_step,
                                void* blocks) {
  jpaged::product::pack<1>(static_cast<const uint16_t*>(matrix), depth, num_columns, k_step, n_step,
                           static_cast<uint16_t*>(blocks));
}

extern "C" void jpaged_pack_codes(const void* codes, int64_t depth, int64_t num_columns, int64_t k_step, int64_t n_step,
                                  int64_t code, void* blocks) {
  jpaged::product::pack_codes(static_cast<const uint8_t*>(codes), depth, num_columns, k_step, n_step,
                              static_cast<jpaged::product::Code>(code), static_cast<uint8_t*>(blocks));
}

extern "C" const char* jpaged_product_core() {
  return jpaged::product::choose_core(jpaged::product::kMaxWidth, true).name;
}
