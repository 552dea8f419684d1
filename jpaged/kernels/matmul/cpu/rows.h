// Rows in the form in which a core multiplies them by a quantized matrix. Included by each kernel.cc that multiplies.

#pragma once

#include <algorithm>
#include <vector>

#include "core.h"

namespace jpaged::product {
namespace {

// Stride of an odd number of cache lines that holds `depth` numbers: rows of a tile then use different cache sets.
inline int64_t spread_stride(int64_t depth, int64_t item_bytes) {
  constexpr int64_t kLineBytes = 64;
  const int64_t lines = (depth * item_bytes + kLineBytes - 1) / kLineBytes;
  return (lines | 1) * kLineBytes / item_bytes;
}

// Rows as numbers, as digits, or rounded to int8 by spans; their memory belongs to the caller.
class QuantisedRows {
 public:
  QuantisedRows(const Core& core, const Before& before, const Quantised& q, int64_t num_rows)
      : core_(&core), before_(before), num_rows_(num_rows), depth_(q.depth) {
    if (before.rounding == Rounding::kSpans) {
      form_ = Form::kRounded;
      const int64_t span = rounded_span(q.group), spans_of_group = (q.group + span - 1) / span;
      rounded_ = {nullptr, spread_stride(q.num_groups * spans_of_group * (span + kSpanBytes), 1), span, spans_of_group};
    } else if (core.has_digits && is_whole(q.code)) {
      form_ = Form::kDigits;
      plan_digits(q);
    } else {
      item_bytes_ = before.number == Number::kBF16 && core.takes_bf16 ? 2 : 4;
      stride_ = spread_stride(depth_, item_bytes_);
    }
  }

  bool has_numbers() const { return form_ == Form::kNumbers; }

  // Rows that `multiply` takes at once.
  int64_t rows_of_tile() const { return form_ == Form::kDigits ? kMaxRows / digits_.num_digits : kPanelRows; }

  // Memory of the rows, in floats.
  int64_t num_floats() const {
    if (form_ == Form::kRounded) return num_rows_ * rounded_.row_bytes / 4;
    if (form_ == Form::kNumbers) return num_rows_ * stride_ * item_bytes_ / 4;
    return num_rows_ * digits_.num_digits * digits_.stride / 4 + (2 + digits_.num_digits) * num_rows_ * digits_.num_spans;
  }

  // Set the memory: `num_floats` floats, aligned to a cache line.
  void place(float* at) {
    if (form_ == Form::kRounded) {
      rounded_.records = reinterpret_cast<int8_t*>(at);
    } else if (form_ == Form::kNumbers) {
      numbers_ = reinterpret_cast<char*>(at);
    } else {
      const int64_t num_steps = num_rows_ * digits_.num_spans;
      digits_.digits = reinterpret_cast<int8_t*>(at);
      digits_.steps = at + num_rows_ * digits_.num_digits * digits_.stride / 4;
      digits_.sums = digits_.steps + num_steps;
      digits_.totals = reinterpret_cast<int32_t*>(digits_.sums + num_steps);
    }
  }

  // Convert a row, with its norm. `scratch` holds twice `q.depth` floats in whole vectors of kMaxWidth.
  void prepare(const Quantised& q, const void* x, float* scratch, int64_t row) const {
    if (form_ == Form::kRounded) return core_->round(before_, x, scratch, q, rounded_, row);
    if (form_ == Form::kDigits) return core_->split(before_, x, scratch, q, digits_, row);
    core_->prepare(before_, x, scratch, numbers_ + row * stride_ * item_bytes_, depth_);
  }

  // sums[i, 32] of rows first + row + i, i below `count`, times one block of a matrix of the same form. All rows from
  // `first` on are multiplied by this block, one tile after the other.
  void multiply(const Quantised& q, int64_t block, int64_t first, int64_t row, int64_t count, float* sums) const {
    if (form_ == Form::kRounded) {
      static thread_local std::vector<uint8_t> bytes;
      if (static_cast<int64_t>(bytes.size()) < q.depth * kColumns) bytes.resize(q.depth * kColumns);
      RoundedRows rows = rounded_;
      rows.records += first * rows.row_bytes;
      core_->multiply_rounded(q, block, rows, row, count, bytes.data(), sums);
    } else if (form_ == Form::kDigits) {
      core_->multiply_digits(q, block, digits_, first + row, count, sums);
    } else {
      const char* x = numbers_ + (first + row) * stride_ * item_bytes_;
      core_->multiply_panels(q, block, x, stride_, before_.number, count, sums);
    }
  }

 private:
  enum class Form { kNumbers, kDigits, kRounded };

  void plan_digits(const Quantised& q) {
    const bool has_step = before_.rounding == Rounding::kRow;
    digits_.num_digits = has_step ? 1 : before_.number == Number::kBF16 ? 2 : kMaxDigits;
    digits_.span = std::min(q.group, has_step ? kMaxWholeSpan : kMaxSpan);
    digits_.spans_of_group = (q.group + digits_.span - 1) / digits_.span;
    digits_.num_spans = q.num_groups * digits_.spans_of_group;
    digits_.stride = spread_stride(q.depth, 1);
  }

  const Core* core_;
  Before before_;
  int64_t num_rows_, depth_;
  Form form_ = Form::kNumbers;
  RoundedRows rounded_{};
  DigitRows digits_{};
  char* numbers_ = nullptr;
  int64_t stride_ = 0, item_bytes_ = 4;
};

}  // namespace
}  // namespace jpaged::product
