// The cores of products, and the choice of one. Included by each kernel.cc that multiplies.

#pragma once

#include "core.h"
#include "processor.h"

namespace jpaged::product {

#if defined(__x86_64__)
extern const Core kProductAvx512Bf16, kProductAvx512Vnni, kProductAvx512, kProductAvx2;
#endif
extern const Core kProductBaseline;

namespace {

// The best core of this processor with vectors of up to `width` floats. Products of float32
// rows with matrices that are not quantized have neither bytes nor bfloat16.
inline const Core& choose_core(int64_t width, bool has_bytes_or_bf16) {
#if defined(__x86_64__)
  if (has_avx512_bf16() && has_bytes_or_bf16 && width >= kProductAvx512Bf16.width) return kProductAvx512Bf16;
  if (has_avx512_vnni() && has_bytes_or_bf16 && width >= kProductAvx512Vnni.width) return kProductAvx512Vnni;
  if (has_avx512() && width >= kProductAvx512.width) return kProductAvx512;
  if (has_avx2() && width >= kProductAvx2.width) return kProductAvx2;
#endif
  return kProductBaseline;
}

}  // namespace
}  // namespace jpaged::product
