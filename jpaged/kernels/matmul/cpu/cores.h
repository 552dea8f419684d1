// The cores of products, and the choice of one. Included by each kernel.cc that multiplies.

#pragma once

#include "core.h"
#include "processor.h"

namespace jpaged::product {

#if defined(__x86_64__)
extern const Core kProductAvx512Bf16, kProductAvx512Vnni, kProductAvx512, kProductAvx2;
#if defined(JPAGED_HAS_AVXVNNI)  // not all compilers have it
extern const Core kProductAvxVnni;
#endif
#elif defined(__aarch64__)
extern const Core kProductI8mm, kProductDotprod;
#endif
extern const Core kProductBaseline;

namespace {

// The best core of this processor with vectors of up to `width` floats. Products of float32
// rows with matrices that are not quantized have neither bytes nor bfloat16.
inline const Core& choose_core([[maybe_unused]] int64_t width, [[maybe_unused]] bool has_bytes_or_bf16) {
#if defined(__x86_64__)
  if (has_avx512_bf16() && has_bytes_or_bf16 && width >= kProductAvx512Bf16.width) return kProductAvx512Bf16;
  if (has_avx512_vnni() && has_bytes_or_bf16 && width >= kProductAvx512Vnni.width) return kProductAvx512Vnni;
  if (has_avx512() && width >= kProductAvx512.width) return kProductAvx512;
#if defined(JPAGED_HAS_AVXVNNI)
  if (has_avx_vnni() && width >= kProductAvxVnni.width) return kProductAvxVnni;
#endif
  if (has_avx2() && width >= kProductAvx2.width) return kProductAvx2;
#elif defined(__aarch64__)
  if (has_i8mm() && has_bytes_or_bf16) return kProductI8mm;
  if (has_dotprod() && has_bytes_or_bf16) return kProductDotprod;
#endif
  return kProductBaseline;
}

}  // namespace
}  // namespace jpaged::product
