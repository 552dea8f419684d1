// CUDA on a CPU: each lane of a warp is a fiber, blocks and warps run in order. Warps may share memory of their block
// before and after `sync_block`, at which each one waits for the others.
//
// Operations of a whole warp are points where all lanes meet: each stores its operands and lets the next lane run, so
// all operands are there when a lane continues. A lane that arrives at another operation than the lane before it, or
// ends before it, aborts the process.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#include "numbers.h"
#include "xla/ffi/api/ffi.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct dim3 {
  unsigned x, y;
  explicit dim3(int64_t x, int64_t y = 1) : x(static_cast<unsigned>(x)), y(static_cast<unsigned>(y)) {}
};

struct alignas(8) uint2 {
  uint32_t x, y;
};

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline thread_local dim3 blockIdx(0), threadIdx(0);

namespace jpaged {

using Stream = xla::ffi::ThreadPool;
using StreamContext = xla::ffi::ThreadPool;

inline const char* launch_error() { return nullptr; }

class Warp {
 public:
  static constexpr int kLanes = 32, kStackBytes = 1 << 18, kOperandBytes = 64;

  static Warp& current() { return *active(); }

  void begin(unsigned first_thread, const std::function<void()>& body) {
    first_thread_ = first_thread;
    body_ = &body;
    num_ended_ = 0;
    for (Lane& lane : lanes_) lane = {std::move(lane.stack), {}, false, 0, {}};
  }

  // Runs all lanes to their end, or to the next `wait_for_block`; returns true at their end.
  bool run() {
    active() = this;
    lane_ = 0;
    if (_setjmp(caller_) == 0) enter();
    return num_ended_ == kLanes;
  }

  void wait_for_block(int operation) {
    meet(operation, 0);
    if (_setjmp(lanes_[lane_].at) != 0) return;
    if (lane_ == kLanes - 1) _longjmp(caller_, 1);
    switch_to_next();
  }

  [[noreturn]] static void fail(const char* what = "the lanes of a warp diverge") {
    std::fprintf(stderr, "emulated CUDA: %s\n", what);
    std::abort();
  }

  // Lets all lanes pass the same point. Returns the operands of lane 0, those of the others follow.
  template <class T>
  const char* meet(int operation, const T& operand) {
    static_assert(sizeof(T) <= kOperandBytes);
    Lane& mine = lanes_[lane_];
    const int turn = mine.num_met++ % 2;
    std::memcpy(operands_[turn][lane_], &operand, sizeof(T));
    if (lane_ == 0) {
      operations_[turn] = operation;
    } else if (operations_[turn] != operation || lanes_[0].num_met < mine.num_met) {
      fail();
    }
    next();
    return operands_[turn][0];
  }

 private:
  struct Lane {
    std::unique_ptr<char[]> stack;
    jmp_buf at;
    bool has_begun;
    int num_met;
    ucontext_t start;
  };

  static Warp*& active() {
    static thread_local Warp* warp = nullptr;
    return warp;
  }

  static void start() {
    Warp& warp = current();
    (*warp.body_)();
    if (++warp.num_ended_ == kLanes) _longjmp(warp.caller_, 1);
    warp.switch_to_next();
  }

  // Runs the other lanes until each has come as far as this one.
  void next() {
    if (num_ended_ != 0) fail();
    if (_setjmp(lanes_[lane_].at) == 0) switch_to_next();
  }

  [[noreturn]] void switch_to_next() {
    lane_ = (lane_ + 1) % kLanes;
    enter();
  }

  [[noreturn]] void enter() {
    threadIdx.x = first_thread_ + static_cast<unsigned>(lane_);
    Lane& lane = lanes_[lane_];
    if (lane.has_begun) _longjmp(lane.at, 1);
    lane.has_begun = true;
    if (!lane.stack) lane.stack.reset(new char[kStackBytes]);
    getcontext(&lane.start);
    lane.start.uc_stack.ss_sp = lane.stack.get();
    lane.start.uc_stack.ss_size = kStackBytes;
    lane.start.uc_link = nullptr;
    makecontext(&lane.start, &Warp::start, 0);
    setcontext(&lane.start);
    std::abort();
  }

  Lane lanes_[kLanes];
  jmp_buf caller_;
  const std::function<void()>* body_;
  unsigned first_thread_;
  int lane_, num_ended_;
  int operations_[2];
  char operands_[2][kLanes][kOperandBytes];
};

constexpr int kMaxWarps = 8;  // of a block

template <class Kernel, class Call>
void launch(Kernel kernel, dim3 grid, int num_threads, Stream, const Call& call) {
  static thread_local Warp warps[kMaxWarps];
  const int num_warps = num_threads / Warp::kLanes;
  if (num_warps > kMaxWarps) Warp::fail("a block has too many warps");
  const std::function<void()> body = [&] { kernel(call); };
  // XLA's threads flush subnormal numbers to zero, and GPUs do not.
  std::fenv_t environment;
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
      for (int warp = 0; warp < num_warps; ++warp) warps[warp].begin(warp * Warp::kLanes, body);
      for (int num_ended = 0; num_ended < num_warps;) {
        for (int warp = 0; warp < num_warps; ++warp) num_ended += warps[warp].run();
        if (num_ended % num_warps != 0) Warp::fail("the warps of a block diverge");
      }
    }
  }
  std::fesetenv(&environment);
}

enum WarpOperation { kShuffle, kShuffleXor, kAny, kSyncBlock, kMultiply };

template <class T>
T operand_of(const char* operands, int lane) {
  T x;
  std::memcpy(&x, operands + lane * Warp::kOperandBytes, sizeof(T));
  return x;
}

template <class T>
T shuffle(T x, int lane) {
  return operand_of<T>(Warp::current().meet(kShuffle, x), lane % Warp::kLanes);
}

template <class T>
T shuffle_xor(T x, int mask) {
  const int lane = threadIdx.x % Warp::kLanes;
  return operand_of<T>(Warp::current().meet(kShuffleXor, x), lane ^ mask);
}

inline bool any(bool x) {
  const char* const operands = Warp::current().meet(kAny, x);
  bool found = false;
  for (int lane = 0; lane < Warp::kLanes; ++lane) found |= operand_of<bool>(operands, lane);
  return found;
}

inline void sync_block() { Warp::current().wait_for_block(kSyncBlock); }

// The layouts of PTX's mma instructions with 16 rows, 8 columns and 32-bit sums.
inline void multiply_on_tensor_core(const char* type, float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Operands {
    uint32_t a[4], b[2];
  } mine;
  std::memcpy(mine.a, a, sizeof(a));
  std::memcpy(mine.b, b, sizeof(b));
  const int lane = threadIdx.x % Warp::kLanes;
  const char* const operands = Warp::current().meet(kMultiply + type[0], mine);
  const bool is_tf32 = type[0] == 't', is_bf16 = type[0] == 'b';
  const auto number = [&](uint32_t word, int half) {
    if (is_tf32) return float_of(word & 0xffffe000);
    const uint16_t stored = static_cast<uint16_t>(word >> 16 * half);
    return is_bf16 ? decode_bf16(stored) : decode_f16(stored);
  };
  for (int k = 0; k < 4; ++k) {
    const int row = lane / 4 + k / 2 * 8, column = lane % 4 * 2 + k % 2;
    double total = sum[k];
    for (int word = 0; word < 8; ++word) {
      const auto left = operand_of<Operands>(operands, row % 8 * 4 + word % 4);
      const auto right = operand_of<Operands>(operands, column * 4 + word % 4);
      for (int half = 0; half < (is_tf32 ? 1 : 2); ++half) {
        const float x = number(left.a[word / 4 * 2 + row / 8], half), y = number(right.b[word / 4], half);
        total += static_cast<double>(x) * y;
      }
    }
    sum[k] = static_cast<float>(total);
  }
}

#define JPAGED_MMA(shape, type) multiply_on_tensor_core(type, sum, a, b)

}  // namespace jpaged
