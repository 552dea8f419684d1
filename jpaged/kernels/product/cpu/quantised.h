// A matrix of 8 or 4 bits as packed.py leaves it, and rows as bytes multiply it.
//
//     W[k, n] = scale[k / group, n] * (number(code[k, n]) - zero[k / group, n])
//
//     int8      [N / 32, K / 4, 32, 4]     four of a column side by side
//     e4m3      [N / 32, K / 4, 32, 4]     k, k + 2, k + 1, k + 3: every other byte, widened, is a pair
//     4 bits    [N / 32, K / 8, 32, 4]     eight: the low halves are k to k + 3, the high halves k + 4 to k + 7
//     scales    [N / 32, groups, 32]       and zeros
//
// Where the processor multiplies bytes, rows become whole numbers of one to three digits, a power of two apart for each
// span of k:
//
//     x[k] = step[k / span] * (digit[0, k] + 256 digit[1, k] + 65536 digit[2, k])
//
// Two digits hold bfloat16 (of a span's numbers those down to 1 / 128 of the largest are exact), three hold float32 as
// well as its own sums do. Products of whole numbers are exact; each processor without them unpacks a span into a panel
// of floats, as does every one for numbers that are not whole.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace jpaged::product {

// In the order of CODES in packed.py.
enum class Code : int64_t { kInt8, kInt4, kE2M1, kE4M3 };

constexpr int64_t kMaxDigits = 3;
constexpr int64_t kMaxSpan = 128;        // numbers of a row with one step, and of a panel
constexpr int64_t kMaxWholeSpan = 65536;  // of rows of one digit: 255 * 128 * kMaxWholeSpan is below 2^31
constexpr int64_t kPanelRows = 96;       // that one panel is unpacked for

inline bool is_whole(Code code) { return code != Code::kE4M3; }
inline int64_t numbers_of_lane(Code code) { return code == Code::kInt8 || code == Code::kE4M3 ? 4 : 8; }
// Where a lane's number i begins, in bits.
constexpr int64_t shift_of(Code code, int64_t i) {
  return code == Code::kE4M3 ? 8 * (i % 2 * 2 + i / 2) : 8 * (i % 4) + 4 * (i / 4);
}

struct Quantised {
  Code code;
  Number number;  // of scales
  const uint8_t* values;
  const void* scales;
  const void* zeros;    // may be null
  Number zero_number;   // of zeros: kI8 where they are whole, else kF32
  int64_t depth;         // K, whole lanes: what is behind the rows' own is multiplied with zeros
  int64_t group, num_groups;
};

// Rows as digits. The arrays are [rows, ...] in a thread's scratch.
struct DigitRows {
  int64_t num_digits, stride;           // bytes from one digit of a row to the next
  int64_t span, spans_of_group, num_spans;
  int8_t* digits;                       // [num_digits, stride]
  int32_t* totals;                      // [num_digits, num_spans], of the digits
  float *steps, *sums;                  // [num_spans]; the sums of what the digits make
};

}  // namespace jpaged::product
