// Features of the processor. Included by each operation's kernel.cc.

#pragma once

namespace jpaged {
namespace {

#if defined(__x86_64__)
inline bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}

inline bool has_avx512_vnni() {
  static const bool has = has_avx512() && __builtin_cpu_supports("avx512vnni");
  return has;
}

inline bool has_avx512_bf16() {
  static const bool has = has_avx512_vnni() && __builtin_cpu_supports("avx512bf16");
  return has;
}

inline bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
}
#endif

}  // namespace
}  // namespace jpaged
