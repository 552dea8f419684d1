// What all CUDA kernels share: operations of a warp, products of the tensor core, and numbers as arrays store them.
//
// mma.sync multiplies 16 x depth by depth x 8. Lane 4 i + j holds rows i and i + 8 of the left matrix and column i of
// the right one, at depths that depend on j; of the product, columns 2 j and 2 j + 1 of both rows. Any order of the
// depth is right if both matrices have the same. So each lane reads adjacent bytes.
//
//     type of the products    depth    left matrix, of each lane
//     bfloat16, float16       16       4 words of 2 numbers
//     float32                 8        4 numbers, as sums of 2 numbers of TF32: 3 products, precise to 21 bits
//
// Tests compile it as C++ too, with emulated warps (emulated.h).

#pragma once

#include <cmath>
#include <cstdint>

#include "numbers.h"
#include "xla/ffi/api/ffi.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "emulated.h"
#endif

namespace jpaged {
namespace {

namespace ffi = xla::ffi;

// --- CUDA ------------------------------------------------------------------------------------------------------------

#ifdef __CUDACC__

using Stream = cudaStream_t;
using StreamContext = ffi::PlatformStream<cudaStream_t>;

template <class Kernel, class Call>
void launch(Kernel kernel, dim3 grid, int num_threads, Stream stream, const Call& call) {
  kernel<<<grid, num_threads, 0, stream>>>(call);
}

const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class T>
__device__ __forceinline__ T shuffle(T x, int lane) {
  return __shfl_sync(0xffffffff, x, lane);
}

template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffff, x, mask);
}

__device__ __forceinline__ bool any(bool x) { return __any_sync(0xffffffff, x); }

// Waits for all warps of the block.
__device__ __forceinline__ void sync_block() { __syncthreads(); }

// sum += a b, one product of the tensor core.
#define JPAGED_MMA(shape, type)                                                       \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

#endif

// --- numbers ---------------------------------------------------------------------------------------------------------

__host__ __device__ constexpr int size_of(Number number) {
  return number == Number::kF32 ? 4 : number == Number::kBF16 || number == Number::kF16 ? 2 : 1;
}

__device__ __forceinline__ float as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return float_of(bits);
#endif
}

__device__ __forceinline__ uint32_t as_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return bits_of(x);
#endif
}

// Types of the products. `pack` makes a word of two numbers.
template <Number kOf>
struct Halves {
  static constexpr int kPerWord = 2;
  static constexpr Number kNumber = kOf;
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
#ifdef __CUDACC__
    if constexpr (kOf == Number::kBF16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __half2 pair = __floats2half2_rn(low, high);
      return reinterpret_cast<const uint32_t&>(pair);
    }
#else
    constexpr auto encode = kOf == Number::kBF16 ? encode_bf16 : encode_f16;
    return encode(low) | static_cast<uint32_t>(encode(high)) << 16;
#endif
  }
};

using BF16 = Halves<Number::kBF16>;
using F16 = Halves<Number::kF16>;

struct F32 {
  static constexpr int kPerWord = 1;
  static constexpr Number kNumber = Number::kF32;
};

// sum += a b, for one product of the tensor core.
__device__ __forceinline__ void multiply(BF16, float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  JPAGED_MMA("m16n8k16", "bf16");
}

__device__ __forceinline__ void multiply(F16, float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  JPAGED_MMA("m16n8k16", "f16");
}

// Of each word, the tensor core reads the upper 19 bits.
__device__ __forceinline__ void multiply_tf32(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  JPAGED_MMA("m16n8k8", "tf32");
}

__device__ __forceinline__ void multiply(F32, float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr uint32_t kUpper = 0xffffe000;
  uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
  for (int i = 0; i < 4; ++i) {
    a_high[i] = a[i] & kUpper;
    a_low[i] = as_bits(as_float(a[i]) - as_float(a_high[i]));
  }
  for (int i = 0; i < 2; ++i) {
    b_high[i] = b[i] & kUpper;
    b_low[i] = as_bits(as_float(b[i]) - as_float(b_high[i]));
  }
  multiply_tf32(sum, a_low, b_high);
  multiply_tf32(sum, a_high, b_low);
  multiply_tf32(sum, a_high, b_high);
}

// 2^x, exactly 1 of 0 and 0 of minus infinity.
__device__ __forceinline__ float power_of_two(float x) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return std::exp2(x);
#endif
}

__device__ __forceinline__ float divide(float x, float y) {
#ifdef __CUDA_ARCH__
  return __fdividef(x, y);  // 0 for y of 2^126 and more
#else
  return x / y;
#endif
}

// Exact without conversions, which have a quarter of the throughput.
__device__ __forceinline__ float decode_byte(Number number, uint32_t byte) {
  if (number == Number::kI8) return as_float(0x4b000000 | (byte ^ 0x80)) - 8388736.0f;  // 2^23 + 128
  return as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;                // E4M3
}

template <int kWords>
__device__ __forceinline__ void read_words(const char* at, uint32_t* words) {
  if constexpr (kWords % 4 == 0) {
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(at)[i / 4];
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else if constexpr (kWords == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(at);
    words[0] = two.x, words[1] = two.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(at);
  }
}

// Read kCount adjacent numbers of kBytes each (0: of any size), and convert them to words of type C; zeros if `at` is
// null. Numbers of 16 bits are of C's own type, except for F32.
template <class C, int kCount, int kBytes>
__device__ __forceinline__ void read_numbers(const char* at, Number number, uint32_t (&words)[kCount / C::kPerWord]) {
  constexpr int kWords = kCount / C::kPerWord;
  if (!at) {
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    return;
  }
  const int num_bytes = kBytes ? kBytes : size_of(number);
  if (num_bytes * C::kPerWord == 4) return read_words<kWords>(at, words);
  uint32_t stored[kCount / 2];
  if (num_bytes == 2) {
    if constexpr (C::kPerWord == 1) {
      read_words<kCount / 2>(at, stored);
      for (int i = 0; i < kCount; ++i) {
        const uint32_t half = stored[i / 2] >> 16 * (i % 2) & 0xffff;
#ifdef __CUDACC__
        words[i] = number == Number::kBF16 ? half << 16 : as_bits(__half2float(__ushort_as_half(half)));
#else
        words[i] = number == Number::kBF16 ? half << 16 : as_bits(decode_f16(half));
#endif
      }
    }
    return;
  }
  read_words<kCount / 4>(at, stored);
  const auto number_at = [&](int i) { return decode_byte(number, stored[i / 4] >> 8 * (i % 4) & 0xff); };
  for (int i = 0; i < kWords; ++i) {
    if constexpr (C::kPerWord == 1) {
      words[i] = as_bits(number_at(i));
    } else {
      words[i] = C::pack(number_at(2 * i), number_at(2 * i + 1));
    }
  }
}

template <int kWords>
__device__ __forceinline__ void write_words(char* to, const uint32_t (&words)[kWords]) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      reinterpret_cast<uint4*>(to)[i / 4] = uint4{words[i], words[i + 1], words[i + 2], words[i + 3]};
    }
  } else {
    static_assert(kWords == 2);
    *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
  }
}

// Write adjacent numbers, of the type of F32 or else two to a word.
template <class C, int kCount>
__device__ __forceinline__ void write_numbers(char* to, const float (&numbers)[kCount]) {
  uint32_t words[kCount / C::kPerWord];
#pragma unroll
  for (int i = 0; i < kCount / C::kPerWord; ++i) {
    if constexpr (C::kPerWord == 1) {
      words[i] = as_bits(numbers[i]);
    } else {
      words[i] = C::pack(numbers[2 * i], numbers[2 * i + 1]);
    }
  }
  write_words(to, words);
}

template <int kCount>
__device__ __forceinline__ void write_numbers(char* to, Number number, const float (&numbers)[kCount]) {
  if (number == Number::kF32) return write_numbers<F32>(to, numbers);
  if (number == Number::kBF16) return write_numbers<BF16>(to, numbers);
  write_numbers<F16>(to, numbers);
}

}  // namespace
}  // namespace jpaged
