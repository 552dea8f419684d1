// A matrix of 8 or 4 bits as packed.py stores it, and rows as digits for byte products.
//
//     W[k, n] = scale[k / group, n] * (number(code[k, n]) - zero[k / group, n])
//
//     int8      [N / 32, K / 4, 32, 4]     four adjacent numbers of a column
//     e4m3      [N / 32, K / 4, 32, 4]     k, k + 2, k + 1, k + 3: every other byte, widened, is a pair
//     4 bits    [N / 32, K / 8, 32, 4]     eight: the low halves are k to k + 3, the high halves k + 4 to k + 7
//     5 bits    [N / 32, 5 K / 32, 32, 4]  32: four lanes with the low bits, as of 4 bits, and one with the fifth bits of
//                                          all: number i has bit i / 4 of byte i % 4
//     6 bits    [N / 32, 3 K / 16, 32, 4]  16: two lanes likewise, and one with bits 2 (i / 4) and the next of byte i % 4
//     scales    [N / 32, groups, 32]       and zeros
//
// With AVX512-VNNI, rows become integers of one to three digits, with a power of two as the step of each span of k:
//
//     x[k] = step[k / span] * (digit[0, k] + 256 digit[1, k] + 65536 digit[2, k])
//
// Two digits represent bfloat16 (numbers down to 1 / 128 of a span's largest are exact), three represent float32 as
// precisely as its own sums. Integer products are exact. Other processors unpack a span into a panel of floats, and all
// processors do so for numbers that are not integers.
//
// With int8 activations, rows become integers of one digit on all processors, with a step for each span of up to 64
// numbers: the largest magnitude is 127 steps.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace jpaged::product {

// In the order of CODES in packed.py.
enum class Code : int64_t { kInt8, kInt4, kE2M1, kE4M3, kInt5, kInt6 };
constexpr Code kLastCode = Code::kInt6;

constexpr int64_t kMaxDigits = 3;
constexpr int64_t kMaxSpan = 128;         // numbers of a row that share a step; numbers of a panel
constexpr int64_t kMaxRoundedSpan = 64;   // the same of rows that are rounded to int8 by spans
constexpr int64_t kMaxWholeSpan = 65536;  // for rows with one step: 255 * 128 * kMaxWholeSpan is below 2^31
constexpr int64_t kPanelRows = 96;        // rows for which one panel or block is unpacked

// Numbers that share a step if rows are rounded by spans: none extends into another group of the matrix.
constexpr int64_t rounded_span(int64_t group) { return group < kMaxRoundedSpan ? group : kMaxRoundedSpan; }

inline bool is_whole(Code code) { return code != Code::kE4M3; }
// Adjacent lanes of a column, which have adjacent numbers.
struct Chunk {
  int64_t numbers, lanes;
};
constexpr Chunk chunk_of(Code code) {
  return code == Code::kInt5                           ? Chunk{32, 5}
         : code == Code::kInt6                         ? Chunk{16, 3}
         : code == Code::kInt8 || code == Code::kE4M3 ? Chunk{4, 1}
                                                       : Chunk{8, 1};
}
// Bit offset of number i in its lane; of its low four bits if the code has 5 or 6.
constexpr int64_t shift_of(Code code, int64_t i) {
  return code == Code::kE4M3 ? 8 * (i % 2 * 2 + i / 2) : 8 * (i % 4) + 4 * (i / 4 % 2);
}
// Bits of a number in the last lane of its chunk, and their offset there.
constexpr int64_t num_high_bits(Code code) { return code == Code::kInt5 ? 1 : code == Code::kInt6 ? 2 : 0; }
constexpr int64_t high_shift_of(Code code, int64_t i) { return 8 * (i % 4) + num_high_bits(code) * (i / 4); }
// The code of the number 0, doubled for kE2M1.
constexpr int32_t offset_of(Code code) {
  return code == Code::kInt8   ? 128
         : code == Code::kInt4 ? 8
         : code == Code::kInt5 ? 16
         : code == Code::kInt6 ? 32
                               : 12;
}

struct Quantised {
  Code code;
  Number number;  // of scales
  const uint8_t* values;
  const void* scales;
  const void* zeros;    // may be null
  Number zero_number;   // of zeros: kI8 if they are integers, else kF32
  int64_t depth;         // K in whole chunks: numbers after the rows' own are multiplied with zeros
  int64_t group, num_groups;
};

// Rows as digits. The arrays are [rows, ...] in a thread's scratch.
struct DigitRows {
  int64_t num_digits, stride;           // bytes from one digit of a row to the next
  int64_t span, spans_of_group, num_spans;
  int8_t* digits;                       // [num_digits, stride]
  int32_t* totals;                      // [num_digits, num_spans], of the digits
  float *steps, *sums;                  // [num_spans]; sums of the numbers that the digits represent
};

constexpr int64_t kSpanBytes = 12;  // of a span's step and sums, after its numbers

// Rows of int8 with a step per span, as rounded.h stores them, in a thread's scratch.
struct RoundedRows {
  int8_t* records;
  int64_t row_bytes;
  int64_t span, spans_of_group;  // numbers of a span; spans of a group, the last of which may be shorter
};

}  // namespace jpaged::product
