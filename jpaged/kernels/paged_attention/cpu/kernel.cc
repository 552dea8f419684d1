// Paged attention on CPUs as an XLA custom call: divides the work into tasks. core.cc contains the arithmetic.
//
//     row of the batch -> tiles of up to 64 (query, head) pairs -> a task for each key/value head
//                                                                  and, if those are few, for each chunk of keys
//
// The caller and threads of XLA's pool take tasks from one counter (tasks.h).

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core.h"
#include "processor.h"
#include "tasks.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged {

#if defined(__x86_64__)
extern const Core kAttentionAvx512Bf16, kAttentionAvx512, kAttentionAvx2;
#endif
extern const Core kAttentionBaseline;

namespace {

namespace ffi = xla::ffi;
using Ints32 = ffi::Buffer<ffi::S32>;

// Minimum work of a thread in multiply-adds: less is done before another thread wakes up.
constexpr double kLeastShared = 4e5;
// Tasks per thread, so that no thread is idle for long if another has the longest task.
constexpr int64_t kTasksPerThread = 4;

// The widest vectors of this processor, up to `width`.
const Core& choose_core(int64_t width) {
#if defined(__x86_64__)
  if (has_avx512_bf16() && width >= kAttentionAvx512Bf16.width) return kAttentionAvx512Bf16;
  if (has_avx512() && width >= kAttentionAvx512.width) return kAttentionAvx512;
  if (has_avx2() && width >= kAttentionAvx2.width) return kAttentionAvx2;
#endif
  return kAttentionBaseline;
}

// --- tasks -------------------------------------------------------------------------------------------------------

struct Rows {
  const int32_t *query_starts_s1, *positions_s, *begins_s, *kv_lens_s, *tables_sm;
  int64_t num_rows, table_width;
};

// The tiles of the rows in use. Even with invalid arguments, a tile's queries are tokens of the call that belong to no
// earlier row, and its keys are within its table.
std::vector<Tile> make_tiles(const Call& call, const Rows& rows, const bool* is_done) {
  std::vector<Tile> tiles;
  const int64_t group = call.group(), table_len = rows.table_width * call.block_size;
  int64_t num_owned = 0;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const int64_t start = rows.query_starts_s1[row];
    const int64_t end = std::min<int64_t>(rows.query_starts_s1[row + 1], call.num_tokens);
    const int64_t owned_start = std::max(start, num_owned);
    if (owned_start >= end) continue;
    num_owned = end;
    if (is_done && is_done[row]) continue;
    const int64_t position = rows.positions_s[row] + owned_start - start;
    const int64_t num_pairs = (end - owned_start) * group;
    for (int64_t first = 0; first < num_pairs; first += kTileRows) {
      Tile tile{rows.tables_sm + row * rows.table_width, owned_start, position, first,
                std::min(kTileRows, num_pairs - first), std::max(rows.begins_s[row], 0), 0};
      const int64_t earliest = position + first / group, latest = position + (first + tile.num_rows - 1) / group;
      if (call.window) tile.begin = std::max(tile.begin, earliest - call.window + 1);
      tile.end = std::min({int64_t{rows.kv_lens_s[row]}, table_len, latest + 1});
      tiles.push_back(tile);
    }
  }
  return tiles;
}

// A whole tile and head, or one chunk of it.
struct Task {
  int64_t tile, kv_head;
  int64_t first_chunk, num_chunks;
  bool is_part;
};

void find_keys(const Call& call, const Piece& piece, Keys& keys) {
  const Tile& tile = *piece.tile;
  const int64_t head_size = call.head_stride() * bytes_of(call.kv_number), token_size = call.num_kv_heads * head_size;
  const int64_t first_key = piece.chunk * kChunk;
  const char* head = call.pool + piece.kv_head * head_size;
  keys = {};
  keys.begin = std::max<int64_t>(tile.begin - first_key, 0);
  keys.end = std::min(tile.end - first_key, kChunk);
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t index = (first_key + key) / call.block_size;
    const int64_t block_end = std::min((index + 1) * call.block_size - first_key, keys.end);
    const int64_t block = tile.table[index];
    if (block < 0 || block >= call.num_places) {
      key = block_end;
      continue;
    }
    const int64_t slot = (call.first_place + block) * call.block_size + (first_key + key) % call.block_size;
    for (const char* at = head + slot * token_size; key < block_end; ++key, at += token_size) keys.at[key] = at;
  }
}

// A tile and head whose chunks are separate tasks: the last one to finish merges all results.
struct Split {
  std::atomic<int64_t> num_left;
  std::unique_ptr<float[]> memory;
};

// One call's work.
class Work {
 public:
  Work(const Call& call, const Rows& rows, const Core& core, int64_t num_threads, const bool* is_done)
      : call_(call), core_(core), tiles_(make_tiles(call, rows, is_done)), splits_(tiles_.size() * call.num_kv_heads) {
    const int64_t num_whole = static_cast<int64_t>(splits_.size());
    const bool is_split = num_threads > 1 && num_whole < kTasksPerThread * num_threads;
    for (int64_t tile = 0; tile < static_cast<int64_t>(tiles_.size()); ++tile) {
      for (int64_t head = 0; head < call.num_kv_heads; ++head) add_tasks(tile, head, is_split);
    }
  }

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }

  double num_multiply_adds() const {
    double sum = 0;
    for (const Tile& tile : tiles_) sum += 2.0 * tile.num_rows * std::max<int64_t>(tile.end - tile.begin, 0);
    return sum * call_.num_kv_heads * (call_.head_dim + call_.value_dim) / 2;
  }

  // One task; `next` is the one that this thread runs after it, or none.
  void run(int64_t index, int64_t next) {
    const Task& task = tasks_[index];
    const Tile& tile = tiles_[task.tile];
    const int64_t size = part_size(tile);
    float* memory = scratch_floats(2 * size + core_.num_scratch_floats(call_.head_dim));
    const Partial whole = Partial::at(memory, tile.num_rows), part = Partial::at(memory + size, tile.num_rows);
    memory += 2 * size;
    core_.load(call_, tile, task.kv_head, memory);
    Keys keys[2];
    if (task.num_chunks) find_keys(call_, piece_of(task, 0), keys[0]);
    const auto attend = [&](int64_t i, Partial into) {
      const bool is_last = i + 1 == task.num_chunks, has_next = !is_last || (next != kNoTask && tasks_[next].num_chunks);
      Keys& later = keys[(i + 1) % 2];
      if (has_next) find_keys(call_, is_last ? piece_of(tasks_[next], 0) : piece_of(task, i + 1), later);
      core_.attend(call_, piece_of(task, i), keys[i % 2], has_next ? &later : nullptr, memory, into);
    };
    if (!task.is_part) {
      core_.clear(tile, call_.value_dim, whole);
      for (int64_t i = 0; i < task.num_chunks; ++i) {
        attend(i, part);
        core_.merge(tile, call_.value_dim, whole, part);
      }
      return core_.store(call_, tile, task.kv_head, whole);
    }
    Split& split = split_of(task.tile, task.kv_head);
    const auto part_of = [&](int64_t i) { return Partial::at(split.memory.get() + i * size, tile.num_rows); };
    attend(0, part_of(task.first_chunk - tile.first_chunk()));
    if (split.num_left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    core_.clear(tile, call_.value_dim, whole);
    for (int64_t i = 0; i < tile.num_chunks(); ++i) core_.merge(tile, call_.value_dim, whole, part_of(i));
    core_.store(call_, tile, task.kv_head, whole);
  }

 private:
  void add_tasks(int64_t tile, int64_t kv_head, bool is_split) {
    const int64_t first = tiles_[tile].first_chunk(), num_chunks = tiles_[tile].num_chunks();
    if (!is_split || num_chunks < 2) return tasks_.push_back({tile, kv_head, first, num_chunks, false});
    Split& split = split_of(tile, kv_head);
    split.num_left.store(num_chunks, std::memory_order_relaxed);
    split.memory.reset(new float[num_chunks * part_size(tiles_[tile])]);
    for (int64_t i = 0; i < num_chunks; ++i) tasks_.push_back({tile, kv_head, first + i, 1, true});
  }

  Piece piece_of(const Task& task, int64_t i) const { return {&tiles_[task.tile], task.kv_head, task.first_chunk + i}; }
  Split& split_of(int64_t tile, int64_t kv_head) { return splits_[tile * call_.num_kv_heads + kv_head]; }
  int64_t part_size(const Tile& tile) const { return Partial::num_floats(tile.num_rows, call_.value_dim); }

  const Call call_;
  const Core& core_;
  const std::vector<Tile> tiles_;
  std::vector<Split> splits_;
  std::vector<Task> tasks_;
};

// --- attention ---------------------------------------------------------------------------------------------------

// Output of tokens that belong to no row.
void clear_outputs(const Call& call) {
  std::memset(call.out, 0, call.num_tokens * call.num_heads * call.value_dim * bytes_of(call.q_number));
  std::fill_n(call.lse, call.num_tokens * call.num_heads, -INFINITY);
}

void run_attention(ffi::ThreadPool& pool, const Call& call, const Rows& rows, int64_t max_width, int64_t max_threads,
                   const bool* is_done = nullptr) {
  const int64_t num_threads = count_threads(pool, max_threads);
  if (!is_done) clear_outputs(call);
  Work work(call, rows, choose_core(max_width), num_threads, is_done);
  const bool is_shared = work.num_multiply_adds() > kLeastShared;
  run_tasks(pool, work.num_tasks(), is_shared ? num_threads : 1,
            [&](int64_t task, int64_t next) { work.run(task, next); });
}

// --- writing -----------------------------------------------------------------------------------------------------

float number_at(const void* from, Number number, int64_t i) {
  if (number == Number::kF32) return static_cast<const float*>(from)[i];
  const uint16_t stored = static_cast<const uint16_t*>(from)[i];
  return number == Number::kBF16 ? decode_bf16(stored) : decode_f16(stored);
}

void encode_row(const void* from, Number number, int64_t begin, int64_t count, Number kv_number, char* to) {
  if (number == kv_number) {
    std::memcpy(to, static_cast<const char*>(from) + begin * bytes_of(number), count * bytes_of(number));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float x = number_at(from, number, begin + i);
    switch (kv_number) {
      case Number::kF32: reinterpret_cast<float*>(to)[i] = x; break;
      case Number::kBF16: reinterpret_cast<uint16_t*>(to)[i] = encode_bf16(x); break;
      case Number::kF16: reinterpret_cast<uint16_t*>(to)[i] = encode_f16(x); break;
      case Number::kI8: reinterpret_cast<int8_t*>(to)[i] = encode_i8(x); break;
      case Number::kF8: reinterpret_cast<uint8_t*>(to)[i] = encode_f8(x); break;
    }
  }
}

// New keys and values of the packed tokens, or only latents; slots outside of the layer are dropped.
struct NewTokens {
  const void *k_tkd, *v_tkd;  // null without values
  Number number;
  const int32_t* slots_t;
};

void write_tokens(const Call& call, const NewTokens& tokens, char* pool) {
  const int64_t row_bytes = call.head_dim * bytes_of(call.kv_number), num_slots = call.num_places * call.block_size;
  for (int64_t t = 0; t < call.num_tokens; ++t) {
    const int64_t slot = tokens.slots_t[t];
    if (slot < 0 || slot >= num_slots) continue;
    const int64_t head_bytes = (tokens.v_tkd ? 2 : 1) * row_bytes;
    char* to = pool + (call.first_place * call.block_size + slot) * call.num_kv_heads * head_bytes;
    for (int64_t head = 0; head < call.num_kv_heads; ++head, to += head_bytes) {
      const int64_t begin = (t * call.num_kv_heads + head) * call.head_dim;
      encode_row(tokens.k_tkd, tokens.number, begin, call.head_dim, call.kv_number, to);
      if (!tokens.v_tkd) continue;
      encode_row(tokens.v_tkd, tokens.number, begin, call.head_dim, call.kv_number, to + row_bytes);
    }
  }
}

// --- whole prompts -----------------------------------------------------------------------------------------------

// Attend to the rows that are whole prompts whose tokens see each other, by the call's own keys. Returns whether each
// row is done; the rest is left to `run_attention`. Null if no row can be.
std::unique_ptr<bool[]> attend_prompts(ffi::ThreadPool& pool, const Call& call, const Rows& rows,
                                       const NewTokens& tokens, int64_t max_width, int64_t max_threads) {
  const Core& core = choose_core(max_width);
  const bool is_f32 = call.q_number == Number::kF32 && tokens.number == Number::kF32 && call.kv_number == Number::kF32;
  if (!is_f32 || !tokens.v_tkd || call.window || call.soft_cap > 0 || call.scales_k2 || call.head_dim % core.width) {
    return nullptr;
  }
  std::vector<Prompt> prompts;
  auto is_done = std::make_unique<bool[]>(std::max<int64_t>(rows.num_rows, 1));
  double work = 0;
  int64_t num_owned = 0;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const int64_t start = rows.query_starts_s1[row], end = rows.query_starts_s1[row + 1], count = end - start;
    if (start < num_owned || count < 2 || end > call.num_tokens) continue;
    num_owned = end;
    const bool is_whole = rows.kv_lens_s[row] == count && rows.begins_s[row] <= 0 && count <= kMaxPrompt;
    if (!is_whole || rows.positions_s[row] < count - 1) continue;
    is_done[row] = true;
    prompts.push_back({start, count, static_cast<const float*>(tokens.k_tkd), static_cast<const float*>(tokens.v_tkd)});
    work += 2.0 * count * count * call.num_heads * call.head_dim;
  }
  if (prompts.empty()) return nullptr;
  clear_outputs(call);
  const int64_t num_tasks = static_cast<int64_t>(prompts.size()) * call.num_kv_heads;
  run_tasks(pool, num_tasks, work > kLeastShared ? count_threads(pool, max_threads) : 1, [&](int64_t task) {
    const Prompt& prompt = prompts[task / call.num_kv_heads];
    float* memory = scratch_floats(core.num_prompt_floats(prompt.num_tokens, call.head_dim));
    core.attend_prompt(call, prompt, task % call.num_kv_heads, memory);
  });
  return is_done;
}

// --- the custom calls --------------------------------------------------------------------------------------------

// The static side of a call, as attributes.
struct Attributes {
  float scale, soft_cap;
  int64_t window, blocks_per_layer, kv_number, max_width, max_threads;
  int64_t value_dim;  // of latents; 0: values follow keys

  int64_t rows_of_head() const { return value_dim ? 1 : 2; }
};

struct Operands {
  ffi::AnyBuffer q, pool;
  Ints32 layer, query_starts, positions, begins, kv_lens, tables, num_rows;
  ffi::Buffer<ffi::F32> scales;
};

bool is_query_type(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16; }

Number query_number(ffi::DataType type) {
  return type == ffi::F32 ? Number::kF32 : type == ffi::BF16 ? Number::kBF16 : Number::kF16;
}

float decode(const void* numbers, Number number, int64_t i) {
  if (number == Number::kF32) return static_cast<const float*>(numbers)[i];
  const uint16_t stored = static_cast<const uint16_t*>(numbers)[i];
  return number == Number::kBF16 ? decode_bf16(stored) : decode_f16(stored);
}

void encode(void* numbers, Number number, int64_t i, float x) {
  if (number == Number::kF32) {
    static_cast<float*>(numbers)[i] = x;
  } else {
    static_cast<uint16_t*>(numbers)[i] = number == Number::kBF16 ? encode_bf16(x) : encode_f16(x);
  }
}

// Return why shapes are inconsistent, or null; calls by attention.py are always consistent.
const char* contradiction(const Operands& x, const Attributes& a) {
  const auto q = x.q.dimensions(), pool = x.pool.dimensions(), tables = x.tables.dimensions();
  if (q.size() != 3 || pool.size() != 4 || tables.size() != 2) return "queries, pool or block tables have another rank";
  if (!is_query_type(x.q.element_type())) return "queries are not float32, bfloat16 or float16";
  if (a.kv_number < 0 || a.kv_number > static_cast<int64_t>(Number::kF8)) return "no such type of numbers in the pool";
  if (static_cast<int64_t>(ffi::ByteWidth(x.pool.element_type())) != bytes_of(Number{a.kv_number})) {
    return "the pool's elements have another size";
  }
  const int64_t num_kv_heads = pool[2] / a.rows_of_head();
  if (num_kv_heads < 1 || pool[2] % a.rows_of_head() || q[1] % num_kv_heads || q[2] != pool[3]) {
    return "queries and pool differ in heads";
  }
  if (a.value_dim < 0 || a.value_dim > q[2]) return "values are longer than the latents that begin with them";
  if (pool[1] < 1 || a.blocks_per_layer < 1 || pool[0] % a.blocks_per_layer) return "the pool has no whole layers";
  const int64_t num_rows = tables[0];
  for (const Ints32* per_row : {&x.positions, &x.begins, &x.kv_lens}) {
    if (static_cast<int64_t>(per_row->element_count()) != num_rows) return "the rows' arrays differ in length";
  }
  if (static_cast<int64_t>(x.query_starts.element_count()) != num_rows + 1) return "query starts are not rows + 1";
  if (x.layer.element_count() != 1 || x.num_rows.element_count() != 1) return "layer or number of rows is no scalar";
  const int64_t num_scales = pool[0] / a.blocks_per_layer * 2 * num_kv_heads, given = x.scales.element_count();
  return given != 0 && given != num_scales ? "scales are not [L, K, 2]" : nullptr;
}

Call make_call(const Operands& x, const Attributes& a, void* out, float* lse) {
  const auto q = x.q.dimensions(), pool = x.pool.dimensions();
  const int64_t layer = x.layer.typed_data()[0], num_layers = pool[0] / a.blocks_per_layer;
  const bool has_layer = layer >= 0 && layer < num_layers;
  Call call{};
  call.q = x.q.untyped_data();
  call.q_number = query_number(x.q.element_type());
  call.out = out;
  call.lse = lse;
  call.pool = static_cast<const char*>(x.pool.untyped_data());
  call.kv_number = Number{a.kv_number};
  call.first_place = has_layer ? layer * a.blocks_per_layer : 0;
  call.num_places = has_layer ? a.blocks_per_layer : 0;
  call.num_tokens = q[0];
  call.num_heads = q[1];
  call.num_kv_heads = pool[2] / a.rows_of_head();
  call.scales_k2 =
      x.scales.element_count() && has_layer ? x.scales.typed_data() + layer * 2 * call.num_kv_heads : nullptr;
  call.head_dim = q[2];
  call.value_dim = a.value_dim ? a.value_dim : q[2];
  call.value_offset = a.value_dim ? 0 : q[2];
  call.block_size = pool[1];
  call.window = a.window;
  call.scale = a.scale;
  call.soft_cap = a.soft_cap;
  return call;
}

Rows make_rows(const Operands& x) {
  const auto tables = x.tables.dimensions();
  return {x.query_starts.typed_data(), x.positions.typed_data(), x.begins.typed_data(), x.kv_lens.typed_data(),
          x.tables.typed_data(), std::min<int64_t>(x.num_rows.typed_data()[0], tables[0]), tables[1]};
}

ffi::Error attend(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer pool, Ints32 layer, Ints32 query_starts,
                  Ints32 positions, Ints32 begins, Ints32 kv_lens, Ints32 tables, Ints32 num_rows,
                  ffi::Buffer<ffi::F32> scales, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::F32>> lse,
                  Attributes attributes) {
  const Operands x{q, pool, layer, query_starts, positions, begins, kv_lens, tables, num_rows, scales};
  if (const char* reason = contradiction(x, attributes)) return ffi::Error::InvalidArgument(reason);
  const Call call = make_call(x, attributes, out->untyped_data(), lse->typed_data());
  run_attention(threads, call, make_rows(x), attributes.max_width, attributes.max_threads);
  return ffi::Error::Success();
}

ffi::Error update(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Ints32 slots,
                  ffi::AnyBuffer pool, Ints32 layer, Ints32 query_starts, Ints32 positions, Ints32 begins,
                  Ints32 kv_lens, Ints32 tables, Ints32 num_rows, ffi::Buffer<ffi::F32> scales,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::Buffer<ffi::F32>> lse,
                  ffi::Result<ffi::AnyBuffer> new_pool, Attributes attributes) {
  const Operands x{q, pool, layer, query_starts, positions, begins, kv_lens, tables, num_rows, scales};
  if (const char* reason = contradiction(x, attributes)) return ffi::Error::InvalidArgument(reason);
  const Call call = make_call(x, attributes, out->untyped_data(), lse->typed_data());
  const int64_t num_numbers = call.num_tokens * call.num_kv_heads * call.head_dim;
  const int64_t num_values = attributes.value_dim ? 0 : num_numbers;
  if (k.element_type() != v.element_type() || !is_query_type(k.element_type()) ||
      static_cast<int64_t>(k.element_count()) != num_numbers ||
      static_cast<int64_t>(v.element_count()) != num_values ||
      static_cast<int64_t>(slots.element_count()) != call.num_tokens) {
    return ffi::Error::InvalidArgument("new keys, values or slots do not fit the queries");
  }
  if (new_pool->untyped_data() != pool.untyped_data()) return ffi::Error::Internal("the pool is not updated in place");
  const void* values = attributes.value_dim ? nullptr : v.untyped_data();
  const NewTokens tokens{k.untyped_data(), values, query_number(k.element_type()), slots.typed_data()};
  write_tokens(call, tokens, static_cast<char*>(new_pool->untyped_data()));
  const Rows rows = make_rows(x);
  const auto is_done = attend_prompts(threads, call, rows, tokens, attributes.max_width, attributes.max_threads);
  run_attention(threads, call, rows, attributes.max_width, attributes.max_threads, is_done.get());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::Attributes, xla::ffi::StructMember<float>("scale"),
                                      xla::ffi::StructMember<float>("soft_cap"),
                                      xla::ffi::StructMember<int64_t>("window"),
                                      xla::ffi::StructMember<int64_t>("blocks_per_layer"),
                                      xla::ffi::StructMember<int64_t>("kv_number"),
                                      xla::ffi::StructMember<int64_t>("max_width"),
                                      xla::ffi::StructMember<int64_t>("max_threads"),
                                      xla::ffi::StructMember<int64_t>("value_dim"));

namespace jpaged {

// Zero a new pool. On Linux, whole pages are returned to the operating system, which maps zeros on first use: a pool of
// gigabytes takes no time and no memory until blocks are written.
xla::ffi::Error blank(xla::ffi::Result<xla::ffi::AnyBuffer> pool) {
  char* const begin = static_cast<char*>(pool->untyped_data());
  char* const end = begin + pool->size_bytes();
#if defined(__linux__)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  char* const last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  if (first < last && madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED) == 0) {
    std::memset(begin, 0, static_cast<size_t>(first - begin));
    std::memset(last, 0, static_cast<size_t>(end - last));
    return xla::ffi::Error::Success();
  }
#endif
  std::memset(begin, 0, static_cast<size_t>(end - begin));
  return xla::ffi::Error::Success();
}

}  // namespace jpaged

namespace jpaged {

// Multiply every `block` numbers by a Hadamard matrix and block^-1/2, in float32; any float type in and out.
xla::ffi::Error hadamard(xla::ffi::AnyBuffer x, xla::ffi::Result<xla::ffi::AnyBuffer> out, int64_t block) {
  const int64_t count = static_cast<int64_t>(x.element_count());
  if (!is_query_type(x.element_type()) || !is_query_type(out->element_type()) ||
      static_cast<int64_t>(out->element_count()) != count) {
    return xla::ffi::Error::InvalidArgument("operand and result are not floats of one size");
  }
  if (block < 1 || (block & (block - 1)) || count % block) {
    return xla::ffi::Error::InvalidArgument("the block is no power of two that divides the numbers");
  }
  const Number from = query_number(x.element_type()), to = query_number(out->element_type());
  const float factor = 1.0f / std::sqrt(static_cast<float>(block));
  std::vector<float> memory(static_cast<size_t>(block));
  float* const numbers = memory.data();
  for (int64_t first = 0; first < count; first += block) {
    for (int64_t i = 0; i < block; ++i) numbers[i] = decode(x.untyped_data(), from, first + i);
    for (int64_t half = 1; half < block; half *= 2) {
      for (int64_t at = 0; at < block; at += 2 * half) {
        for (int64_t i = at; i < at + half; ++i) {
          const float a = numbers[i], b = numbers[i + half];
          numbers[i] = a + b;
          numbers[i + half] = a - b;
        }
      }
    }
    for (int64_t i = 0; i < block; ++i) encode(out->untyped_data(), to, first + i, numbers[i] * factor);
  }
  return xla::ffi::Error::Success();
}

}  // namespace jpaged

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using jpaged::Ints32;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_hadamard, jpaged::hadamard,
                              ffi::Ffi::Bind().Arg<AnyBuffer>().Ret<AnyBuffer>().Attr<int64_t>("block"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_blank, jpaged::blank, ffi::Ffi::Bind().Ret<AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_attend, jpaged::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()  // queries
                                  .Arg<AnyBuffer>()  // pool
                                  .Arg<Ints32>()     // layer
                                  .Arg<Ints32>()     // query starts
                                  .Arg<Ints32>()     // positions
                                  .Arg<Ints32>()     // begins
                                  .Arg<Ints32>()     // context lengths
                                  .Arg<Ints32>()     // block tables
                                  .Arg<Ints32>()     // number of rows
                                  .Arg<ffi::Buffer<ffi::F32>>()  // scales
                                  .Ret<AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attrs<jpaged::Attributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_update, jpaged::update,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<AnyBuffer>()  // queries
                                  .Arg<AnyBuffer>()  // keys
                                  .Arg<AnyBuffer>()  // values
                                  .Arg<Ints32>()     // slots
                                  .Arg<AnyBuffer>()  // pool; the rest as above
                                  .Arg<Ints32>()
                                  .Arg<Ints32>()
                                  .Arg<Ints32>()
                                  .Arg<Ints32>()
                                  .Arg<Ints32>()
                                  .Arg<Ints32>()
                                  .Arg<Ints32>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<AnyBuffer>()
                                  .Attrs<jpaged::Attributes>());

extern "C" const char* jpaged_vectors() { return jpaged::choose_core(jpaged::kMaxWidth).name; }
