// Merges of a SentencePiece vocabulary: every pair of tokens that forms a token.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace jpaged {
namespace {

// A polynomial modulo 2^64 of a text's bytes: the hash of a part follows from two prefixes, so that a token of n bytes
// takes n steps, not n^2.
constexpr uint64_t kBase = 0x9e3779b97f4a7c15;

// Spread the low bits, which alone do not depend on all bytes.
inline uint64_t spread(uint64_t hash) {
  hash ^= hash >> 32;
  hash *= 0xd6e8feb86659fd93;
  return hash ^ hash >> 32;
}

class Vocabulary {
 public:
  // The bytes of token i end at ends[i], where those of token i + 1 begin.
  Vocabulary(const char* text, const int64_t* ends, int64_t num_tokens) : text_(text), ends_(ends) {
    size_t size = 16;
    while (size < static_cast<size_t>(2 * num_tokens)) size *= 2;
    slots_.assign(size, {0, -1});
    for (int64_t i = 0; i < num_tokens; ++i) {
      uint64_t hash = 0;
      for (const char* at = begin(i); at < end(i); ++at) hash = hash * kBase + static_cast<uint8_t>(*at) + 1;
      slots_[slot(hash, begin(i), end(i) - begin(i))] = {hash, static_cast<int32_t>(i)};  // the last of equal tokens
    }
  }

  const char* begin(int64_t i) const { return text_ + (i == 0 ? 0 : ends_[i - 1]); }
  const char* end(int64_t i) const { return text_ + ends_[i]; }

  // The token with these bytes, or -1.
  int32_t find(uint64_t hash, const char* bytes, int64_t count) const { return slots_[slot(hash, bytes, count)].token; }

 private:
  struct Slot {
    uint64_t hash;
    int32_t token;
  };

  size_t slot(uint64_t hash, const char* bytes, int64_t count) const {
    const size_t mask = slots_.size() - 1;
    size_t at = spread(hash) & mask;
    for (; slots_[at].token >= 0; at = (at + 1) & mask) {
      const int64_t token = slots_[at].token;
      if (slots_[at].hash != hash || end(token) - begin(token) != count) continue;
      if (std::memcmp(begin(token), bytes, count) == 0) break;
    }
    return at;
  }

  const char* text_;
  const int64_t* ends_;
  std::vector<Slot> slots_;
};

}  // namespace
}  // namespace jpaged

// Write for each token of `order` the pairs of tokens that form it, by their ids; return the number of pairs.
//
//   text, ends   UTF-8 of all tokens, and the end of each
//   pairs        room for a pair for each character
extern "C" int64_t jpaged_find_merges(const char* text, const int64_t* ends, int64_t num_tokens, const int64_t* order,
                                      int64_t num_ordered, int32_t* pairs) {
  const jpaged::Vocabulary vocabulary(text, ends, num_tokens);
  std::vector<uint64_t> hashes, powers{1};
  std::vector<std::pair<int32_t, int32_t>> found;
  int64_t num_pairs = 0;
  for (int64_t i = 0; i < num_ordered; ++i) {
    const char* bytes = vocabulary.begin(order[i]);
    const int64_t count = vocabulary.end(order[i]) - bytes;
    hashes.assign(1, 0);
    for (int64_t at = 0; at < count; ++at) {
      hashes.push_back(hashes.back() * jpaged::kBase + static_cast<uint8_t>(bytes[at]) + 1);
    }
    while (static_cast<int64_t>(powers.size()) <= count) powers.push_back(powers.back() * jpaged::kBase);
    found.clear();
    for (int64_t at = 1; at < count; ++at) {
      if ((bytes[at] & 0xc0) == 0x80) continue;  // inside a character
      const int32_t left = vocabulary.find(hashes[at], bytes, at);
      if (left < 0) continue;
      const uint64_t rest = hashes[count] - hashes[at] * powers[count - at];
      const int32_t right = vocabulary.find(rest, bytes + at, count - at);
      if (right >= 0) found.emplace_back(left, right);
    }
    std::sort(found.begin(), found.end());
    for (const auto& [left, right] : found) {
      pairs[2 * num_pairs] = left;
      pairs[2 * num_pairs + 1] = right;
      ++num_pairs;
    }
  }
  return num_pairs;
}
