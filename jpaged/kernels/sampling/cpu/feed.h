// Masks from the host for a running program: before each sample, the program waits for the masks of allowed tokens;
// after it, the host waits for the sampled tokens.
//
//     program   forward ─ await(0) ─ sample ─ post(0) ─ forward ─ await(1) ─ ...
//     host          give(0) ┘                  └ wait(0) ─ masks ─ give(1) ┘
//
// A feed without masks, of 0 words, only ends a program early: its steps wait for nothing.
//
//     program   forward ─ next(0) ─ sample ─ forward ─ next(1) ─ sample      step 1 is the last
//     host                                      interrupt
//
// Included only by kernel.cc.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jpaged {
namespace {

constexpr int32_t kStepIsVoid = 0;  // `jpaged.engine.executor.verbs.StepDirective`
constexpr int32_t kStepIsLast = 1;
constexpr int32_t kStepIsOneOfMore = 2;

class Feed {
 public:
  Feed(int64_t num_rows, int64_t num_words)
      : host_(std::this_thread::get_id()), num_words_(num_words), drawn_(2 * num_rows) {}

  int64_t num_rows() const { return static_cast<int64_t>(drawn_.size()) / 2; }
  int64_t num_words() const { return num_words_; }

  // Return true on the thread that sends masks: a program that XLA runs on it, as it does small ones, would wait for
  // itself.
  bool is_host() const { return std::this_thread::get_id() == host_; }

  // --- called by the program ---

  // Wait for the masks of a step. They do not change until the step's tokens are posted.
  int32_t await(int64_t step, const int32_t** mask_rw) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return num_given_ > step || is_closed_; });
    *mask_rw = masks_.data();
    return num_given_ > step ? verdict_ : kStepIsVoid;
  }

  void post(int64_t step, const int32_t* token_ids_r, const bool* is_sound_r) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t r = 0; r < num_rows(); ++r) {
      drawn_[r] = token_ids_r[r];
      drawn_[num_rows() + r] = is_sound_r[r];
    }
    num_posted_ = step + 1;
    changed_.notify_all();
  }

  // Count a step without masks, and return its directive.
  int32_t next(int64_t step) {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_posted_ = step + 1;
    return is_interrupted_ ? kStepIsLast : kStepIsOneOfMore;
  }

  bool has_given(int64_t step) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_given_ > step || is_closed_;
  }

  // --- called by the host ---

  void give(const int32_t* mask_rw, int32_t verdict) {
    const std::lock_guard<std::mutex> lock(mutex_);
    masks_.assign(mask_rw, mask_rw + num_rows() * num_words_);
    verdict_ = verdict;
    ++num_given_;
    changed_.notify_all();
  }

  // Wait for the tokens of the last step: [2, R], tokens and whether their logits were finite. Return false on a
  // timeout.
  bool wait(int32_t* drawn, int64_t timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto are_there = [&] { return num_posted_ == num_given_; };
    if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), are_there)) return false;
    std::copy(drawn_.begin(), drawn_.end(), drawn);
    return true;
  }

  // Let the current step be the last; called by any thread.
  void interrupt() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_interrupted_ = true;
  }

  int64_t num_steps() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_posted_;
  }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::thread::id host_;
  const int64_t num_words_;
  std::vector<int32_t> masks_, drawn_;
  int64_t num_given_ = 0, num_posted_ = 0;
  int32_t verdict_ = kStepIsVoid;
  bool is_closed_ = false, is_interrupted_ = false;
};

// The open feeds by number. A program may still wait for a feed that was just closed.
class Feeds {
 public:
  int32_t open(int64_t num_rows, int64_t num_words) {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_ = last_ == INT32_MAX ? 1 : last_ + 1;
    open_[last_] = std::make_shared<Feed>(num_rows, num_words);
    return last_;
  }

  std::shared_ptr<Feed> find(int32_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = open_.find(number);
    return found == open_.end() ? nullptr : found->second;
  }

  void close(int32_t number) {
    const std::shared_ptr<Feed> feed = find(number);
    if (!feed) return;
    feed->close();
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::map<int32_t, std::shared_ptr<Feed>> open_;
  int32_t last_ = 0;
};

Feeds& feeds() {
  static Feeds all;
  return all;
}

}  // namespace
}  // namespace jpaged

extern "C" {

int32_t jpaged_feed_open(int64_t num_rows, int64_t num_words) { return jpaged::feeds().open(num_rows, num_words); }

// Return false if the feed does not exist, like the functions below.
bool jpaged_feed_give(int32_t number, const int32_t* mask_rw, int32_t verdict) {
  const auto feed = jpaged::feeds().find(number);
  if (feed) feed->give(mask_rw, verdict);
  return feed != nullptr;
}

bool jpaged_feed_wait(int32_t number, int32_t* drawn, int64_t timeout_ms) {
  const auto feed = jpaged::feeds().find(number);
  return feed && feed->wait(drawn, timeout_ms);
}

bool jpaged_feed_interrupt(int32_t number) {
  const auto feed = jpaged::feeds().find(number);
  if (feed) feed->interrupt();
  return feed != nullptr;
}

// Return the number of steps that have begun to sample; 0 if the feed does not exist.
int64_t jpaged_feed_num_steps(int32_t number) {
  const auto feed = jpaged::feeds().find(number);
  return feed ? feed->num_steps() : 0;
}

void jpaged_feed_close(int32_t number) { jpaged::feeds().close(number); }

}  // extern "C"
