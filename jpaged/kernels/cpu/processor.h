// Features of the processor, up to a limit. Included by each operation's kernel.cc.

#pragma once

#include <atomic>
#include <cstdint>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace jpaged {

// Instruction sets in the order in which a limit excludes them, as in library.py.
enum class Isa : int64_t { kBaseline, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kDotprod, kI8mm };

// The last one that kernels use, whatever the processor has. One for the library.
inline std::atomic<Isa>& last_isa() {
  static std::atomic<Isa> last{Isa::kI8mm};
  return last;
}

// Use no instruction set after this one. In every library, whichever operations it has.
extern "C" [[gnu::used]] inline void jpaged_limit_isa(int64_t isa) { last_isa().store(static_cast<Isa>(isa)); }

namespace {

inline bool is_allowed(Isa isa) { return isa <= last_isa().load(std::memory_order_relaxed); }

#if defined(__x86_64__)
inline bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has && is_allowed(Isa::kAvx2);
}

// CPUID 7.1 EAX bit 4: not all compilers know its name.
inline bool has_avx_vnni() {
  static const bool has = [] {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(0), "c"(0));
    if (a < 7) return false;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    if (a < 1) return false;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
    return (a >> 4 & 1) != 0;
  }();
  return has && has_avx2() && is_allowed(Isa::kAvxVnni);
}

inline bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has && is_allowed(Isa::kAvx512);
}

inline bool has_avx512_vnni() {
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has && has_avx512() && is_allowed(Isa::kAvx512Vnni);
}

inline bool has_avx512_bf16() {
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has && has_avx512_vnni() && is_allowed(Isa::kAvx512Bf16);
}
#elif defined(__aarch64__)
#if defined(__linux__)
inline bool has_feature(unsigned long list, unsigned bit) { return (getauxval(list) >> bit & 1) != 0; }
inline bool finds_dotprod() { return has_feature(AT_HWCAP, 20); }
inline bool finds_i8mm() { return has_feature(AT_HWCAP2, 13); }
#elif defined(__APPLE__)
inline bool has_feature(const char* name) {
  int32_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
inline bool finds_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool finds_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
inline bool finds_dotprod() { return false; }
inline bool finds_i8mm() { return false; }
#endif

inline bool has_dotprod() {
  static const bool has = finds_dotprod();
  return has && is_allowed(Isa::kDotprod);
}

inline bool has_i8mm() {
  static const bool has = finds_i8mm();
  return has && has_dotprod() && is_allowed(Isa::kI8mm);
}
#endif

}  // namespace
}  // namespace jpaged
