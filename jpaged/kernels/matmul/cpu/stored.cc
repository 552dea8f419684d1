// Rows of blocks as GGUF files store them -> columns of a packed matrix, in one pass over the bytes.
//
// The arithmetic is that of jpaged/checkpoints/gguf/blocks.py, operation by operation: the results have the same bits.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace jpaged::product {
namespace {

constexpr int64_t kColumns = 32;
constexpr int64_t kMaxGroups = 16;  // of a block

// In the order of BLOCK_TYPES in blocks.py.
enum class Type : uint8_t { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };

struct Form {
  int64_t size, bytes, group;  // numbers and bytes of a block, numbers of a group
  int middle;                  // the number that stands for 0
  bool has_least;              // numbers begin with 0, and a group's minimum is added
};

constexpr Form kForms[] = {{32, 34, 32, 128, false}, {32, 18, 32, 8, false},    {32, 20, 32, 8, true},
                           {32, 22, 32, 16, false},  {32, 24, 32, 16, true},    {256, 144, 32, 8, true},
                           {256, 176, 32, 16, true}, {256, 210, 16, 32, false}};

uint16_t read_half(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return half;
}

bool is_finite(const uint8_t* bytes) { return (read_half(bytes) & 0x7c00) != 0x7c00; }

// Finite halves only.
float to_float(const uint8_t* bytes) {
  const uint16_t half = read_half(bytes);
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 0) {
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return half & 0x8000 ? -small : small;
  }
  const uint32_t bits = (half & 0x8000u) << 16 | (exponent + 112) << 23 | fraction << 13;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// 2 count numbers from count bytes: the low halves, then the high ones.
void halves(const uint8_t* bytes, int64_t count, uint8_t* numbers) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = bytes[i] & 15;
  for (int64_t i = 0; i < count; ++i) numbers[count + i] = bytes[i] >> 4;
}

void add_fifth_bits(const uint8_t* bytes, uint8_t* numbers) {
  uint32_t bits;
  std::memcpy(&bits, bytes, 4);
  for (int64_t i = 0; i < 32; ++i) numbers[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
}

// Eight scales and minima of Q4_K and Q5_K; four have high bits in the others' bytes.
void scales_and_leasts(const uint8_t* block, float* scales, float* leasts) {
  const float scale = to_float(block), least = to_float(block + 2);
  const uint8_t *first = block + 4, *second = block + 8, *low = block + 12;
  for (int64_t i = 0; i < 4; ++i) {
    scales[i] = static_cast<float>(first[i] & 63) * scale;
    scales[4 + i] = static_cast<float>((low[i] & 15) | (first[i] >> 2 & 48)) * scale;
    leasts[i] = -(static_cast<float>(second[i] & 63) * least);
    leasts[4 + i] = -(static_cast<float>(low[i] >> 4 | (second[i] >> 2 & 48)) * least);
  }
}

// The numbers of a block, from 0, with the scales and minima of its groups. Return false if a scale is not finite.
bool unpack(Type type, const uint8_t* block, uint8_t* numbers, float* scales, float* leasts) {
  const bool has_two = type == Type::kQ4_1 || type == Type::kQ5_1 || type == Type::kQ4_K || type == Type::kQ5_K;
  if (!is_finite(type == Type::kQ6_K ? block + 208 : block) || (has_two && !is_finite(block + 2))) return false;
  switch (type) {
    case Type::kQ8_0:
      scales[0] = to_float(block);
      for (int64_t i = 0; i < 32; ++i) numbers[i] = block[2 + i] ^ 128;
      break;
    case Type::kQ4_0:
      scales[0] = to_float(block);
      halves(block + 2, 16, numbers);
      break;
    case Type::kQ4_1:
      scales[0] = to_float(block);
      leasts[0] = to_float(block + 2);
      halves(block + 4, 16, numbers);
      break;
    case Type::kQ5_0:
      scales[0] = to_float(block);
      halves(block + 6, 16, numbers);
      add_fifth_bits(block + 2, numbers);
      break;
    case Type::kQ5_1:
      scales[0] = to_float(block);
      leasts[0] = to_float(block + 2);
      halves(block + 8, 16, numbers);
      add_fifth_bits(block + 4, numbers);
      break;
    case Type::kQ4_K:
      scales_and_leasts(block, scales, leasts);
      for (int64_t i = 0; i < 4; ++i) halves(block + 16 + 32 * i, 32, numbers + 64 * i);
      break;
    case Type::kQ5_K:
      scales_and_leasts(block, scales, leasts);
      for (int64_t i = 0; i < 4; ++i) halves(block + 48 + 32 * i, 32, numbers + 64 * i);
      for (int64_t i = 0; i < 256; ++i) numbers[i] |= static_cast<uint8_t>((block[16 + i % 32] >> (i / 32) & 1) << 4);
      break;
    case Type::kQ6_K: {
      const float scale = to_float(block + 208);
      for (int64_t i = 0; i < 16; ++i) scales[i] = static_cast<float>(static_cast<int8_t>(block[192 + i])) * scale;
      for (int64_t i = 0; i < 2; ++i) {
        uint8_t* half = numbers + 128 * i;
        halves(block + 64 * i, 64, half);
        for (int64_t j = 0; j < 128; ++j) {
          half[j] |= static_cast<uint8_t>((block[128 + 32 * i + j % 32] >> (j / 32 * 2) & 3) << 4);
        }
      }
      break;
    }
  }
  return true;
}

}  // namespace
}  // namespace jpaged::product

// Pack columns, given as stored rows, into consecutive blocks of 32 columns; padding is 0. Return -1, or the first column
// with a scale that is not finite.
//
//   rows, types   address and type of each column's row
//   depth         numbers of a row
//   bits          of a code: 8, or 4 to 6 if no type has more
//   group         numbers that share a scale: a divisor of every type's
//   blocks        [ceil(N / 32), lanes, 32, 4], as quantised.h describes them
//   scales        [ceil(N / 32), depth / group, 32], or their halves, if all types' scales are halves; the other is null
//   zeros         likewise, or null
extern "C" int64_t jpaged_pack_stored(const uint8_t* const* rows, const uint8_t* types, int64_t num_columns,
                                      int64_t depth, int64_t bits, int64_t group, uint8_t* blocks, float* scales,
                                      uint16_t* half_scales, float* zeros) {
  using namespace jpaged::product;
  const int64_t num_groups = depth / group, num_high = bits == 8 ? 0 : bits - 4;
  const int64_t chunk = bits == 8 ? 4 : num_high ? 32 / num_high : 8, lanes = num_high ? chunk / 8 + 1 : 1;
  std::vector<uint8_t> codes(kColumns * depth);
  std::vector<float> kept(half_scales != nullptr ? num_groups * kColumns : 0);
  if (half_scales != nullptr) scales = kept.data();
  for (int64_t first = 0; first < num_columns; first += kColumns) {
    const int64_t count = std::min(kColumns, num_columns - first);
    std::memset(scales, 0, 4 * num_groups * kColumns);
    if (zeros != nullptr) std::memset(zeros, 0, 4 * num_groups * kColumns);
    for (int64_t c = 0; c < count; ++c) {
      const Type type = static_cast<Type>(types[first + c]);
      const Form form = kForms[static_cast<int>(type)];
      const int bias = (1 << (bits - 1)) - form.middle;
      const int64_t repeats = form.group / group;
      const uint8_t* block = rows[first + c];
      uint8_t* to = codes.data() + c * depth;
      int64_t at = c;  // of a group's scale
      for (int64_t k = 0; k < depth; k += form.size, block += form.bytes, to += form.size) {
        float scale[kMaxGroups], least[kMaxGroups];
        if (!unpack(type, block, to, scale, least)) return first + c;
        for (int64_t g = 0; g < form.size / form.group; ++g) {
          float zero = 0;
          if (form.has_least) {
            // A group with a scale of 0 has a single value: one unit, of the size of the minimum.
            const bool is_one = scale[g] == 0;
            zero = is_one ? 1.0f : -least[g] / scale[g] - static_cast<float>(form.middle);
            if (is_one) {
              scale[g] = -least[g];
              std::memset(to + g * form.group, form.middle, form.group);
            }
          }
          for (int64_t i = 0; i < repeats; ++i, at += kColumns) {
            scales[at] = scale[g];
            if (zeros != nullptr) zeros[at] = zero;
          }
        }
        for (int64_t i = 0; i < form.size; ++i) to[i] = static_cast<uint8_t>(to[i] + bias);
      }
    }
    for (int64_t k = 0; k < depth; k += chunk, blocks += 4 * kColumns * lanes) {
      if (count < kColumns) std::memset(blocks, 0, 4 * kColumns * lanes);
      for (int64_t c = 0; c < count; ++c) {
        const uint8_t* from = codes.data() + c * depth + k;
        uint32_t fifth = 0;
        for (int64_t i = 0; i < chunk; i += 8, from += 8) {
          uint32_t first, second = 0;
          std::memcpy(&first, from, 4);
          if (chunk > 4) std::memcpy(&second, from + 4, 4);
          if (num_high) {
            constexpr uint32_t kLow = 0x0f0f0f0f;
            fifth |= (first >> 4 & kLow) << num_high * (i / 4) | (second >> 4 & kLow) << num_high * (i / 4 + 1);
            first &= kLow;
            second &= kLow;
          }
          first |= second << 4;
          std::memcpy(blocks + 4 * (i / 8 * kColumns + c), &first, 4);
        }
        if (num_high) std::memcpy(blocks + 4 * ((lanes - 1) * kColumns + c), &fifth, 4);
      }
    }
    if (half_scales != nullptr) {
      for (int64_t i = 0; i < num_groups * kColumns; ++i) half_scales[i] = jpaged::encode_f16(scales[i]);
      half_scales += num_groups * kColumns;
    } else {
      scales += num_groups * kColumns;
    }
    if (zeros != nullptr) zeros += num_groups * kColumns;
  }
  return -1;
}
