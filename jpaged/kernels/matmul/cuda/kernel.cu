// Products of groups of rows with a matrix each on NVIDIA GPUs since Ampere, in CUDA C++ without another package.
//
//     block   a tile of rows of one matrix   x   64 of its columns
//     warp    every eighth chunk of 32 of the depth; the sums of the eight are added in a fixed order
//
//     for each chunk    sums += X W          quantized matrices: sums += (X W) * scales of the chunk's group
//
// So the bits of a row's result depend on that row and its matrix alone: not on the other rows, nor on the tile. Weights
// are read once for each tile of rows, as they are stored, and become numbers of the tensor core in registers.
//
// Lane 4 i + j multiplies depths 8 j to 8 j + 7 of a chunk with columns 8 i to 8 i + 7 of the block: 8 tiles of the
// tensor core of 8 columns each, of which it holds column i. Of their sums it has 16 adjacent columns, from 16 j.
//
//     stored             read by a lane                                    then
//     16 or 32 bits      8 adjacent columns of each depth                  columns of two depths in a word
//     8 bits, by rows    8 adjacent columns of each depth                  bytes are transposed
//     8 bits, by depth   8 adjacent depths of each column
//     4 bits             8 adjacent columns of each depth, in a word       numbers of two depths in a word
//
// Compiled by nvcc (cuda_library.py). Tests compile it as C++ too, with emulated warps.

#include "device.h"

namespace jpaged {
namespace {

constexpr int kWarps = 8, kChunk = 32, kColumns = 64, kTileRows = 16, kColumnTiles = 8;
constexpr int kLaneNumbers = 8;  // depths, and columns, of a lane

// The order is that of `STORED` in grouped.py; plain numbers are of the rows' type.
enum class Stored : int64_t { kPlain, kI8, kF8, kI4, kF4 };

// Columns of the tiles; the order is that of `TileField` in form.py.
struct Tile {
  int32_t matrix, first_row, num_rows;
};

struct ProductCall {
  const char *rows, *values;
  const Tile* tiles;
  const float* scales;      // [X, G, N]; null without scales
  const int8_t* zeros;      // [X, G, N]; null without zeros
  const float* row_scales;  // [P, row_groups]; null without them
  float* out;               // [P, N]
  Number row_number;
  int64_t depth, num_columns, num_groups, row_groups, num_rows, num_matrices;
  bool depth_is_minor;
};

template <Stored kStored>
constexpr int kBits = kStored == Stored::kI8 || kStored == Stored::kF8 ? 8 : 4;

// A number from its bits, exactly and without conversions.
template <Stored kStored>
__device__ __forceinline__ float decode(uint32_t bits) {
  if constexpr (kStored == Stored::kI8) return decode_byte(Number::kI8, bits);
  if constexpr (kStored == Stored::kF8) return decode_byte(Number::kF8, bits);
  if constexpr (kStored == Stored::kI4) return as_float(0x4b000000 | (bits ^ 8)) - 8388616.0f;  // 2^23 + 8
  return as_float((bits & 8) << 28 | (bits & 7) << 22) * 0x1p126f;                             // E2M1
}

// Bytes `low` and `low + 1` of two words, as the bytes of one word in the order a, b, a, b.
__device__ __forceinline__ uint32_t join_bytes(uint32_t a, uint32_t b, int low) {
  const uint32_t x = a >> 8 * low, y = b >> 8 * low;
  return (x & 0xff) | (y & 0xff) << 8 | (x & 0xff00) << 8 | (y & 0xff00) << 16;
}

__device__ __forceinline__ uint32_t join_halves(uint32_t a, uint32_t b, bool is_upper) {
  return is_upper ? a >> 16 | (b & 0xffff0000) : (a & 0xffff) | b << 16;
}

// Transposes 8 rows of 8 bytes.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[kLaneNumbers][2]) {
  uint32_t found[kLaneNumbers][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of the rows: the words of a column
#pragma unroll
    for (int side = 0; side < 2; ++side) {  // of the columns
      const int row = 4 * half;
      uint32_t pairs[2][2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        pairs[k][0] = join_bytes(words[row + 2 * k][side], words[row + 2 * k + 1][side], 0);
        pairs[k][1] = join_bytes(words[row + 2 * k][side], words[row + 2 * k + 1][side], 2);
      }
#pragma unroll
      for (int column = 0; column < 4; ++column) {
        found[4 * side + column][half] = join_halves(pairs[0][column / 2], pairs[1][column / 2], column % 2);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) words[i][0] = found[i][0], words[i][1] = found[i][1];
}

// A lane's numbers of a chunk, as they are stored: 8 depths of 8 columns.
template <class C, Stored kStored>
struct Numbers {
  static constexpr int kWords = kStored == Stored::kPlain ? kLaneNumbers / C::kPerWord : kBits<kStored> / 4;
  uint32_t words[kLaneNumbers][kWords];

  // `depth` and `column` are the lane's first; a lane outside of the matrix has zeros.
  __device__ __forceinline__ void read(const ProductCall& call, int64_t matrix, int64_t depth, int64_t column) {
    constexpr int kBytes = kStored == Stored::kPlain ? 4 * kLaneNumbers / C::kPerWord : kBits<kStored>;
    const bool is_read = depth < call.depth && column < call.num_columns;
    const char* at = call.values;
    int64_t stride;  // bytes from one line of 8 numbers to the next
    if (kBits<kStored> == 8 && kStored != Stored::kPlain && call.depth_is_minor) {
      at += (matrix * call.num_columns + column) * call.depth + depth;
      stride = call.depth;
    } else {
      at += ((matrix * call.depth + depth) * call.num_columns + column) / kLaneNumbers * kBytes;
      stride = call.num_columns / kLaneNumbers * kBytes;
    }
#pragma unroll
    for (int line = 0; line < kLaneNumbers; ++line) {
      if (is_read) {
        read_words<kWords>(at + line * stride, words[line]);
      } else {
#pragma unroll
        for (int k = 0; k < kWords; ++k) words[line][k] = 0;
      }
    }
    if constexpr (kStored == Stored::kI8 || kStored == Stored::kF8) {
      if (!call.depth_is_minor) transpose_bytes(words);
    }
  }

  // The right matrix of the tensor core: depths kPerWord * 2 * step + ... of a column.
  __device__ __forceinline__ void right(int step, int column, float zero, uint32_t (&b)[2]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int depth = (2 * step + k) * C::kPerWord;
      if constexpr (kStored == Stored::kPlain && C::kPerWord == 1) {
        b[k] = words[depth][column];
      } else if constexpr (kStored == Stored::kPlain) {
        b[k] = join_halves(words[depth][column / 2], words[depth + 1][column / 2], column % 2);
      } else if constexpr (C::kPerWord == 1) {
        b[k] = as_bits(number(depth, column) - zero);
      } else {
        b[k] = C::pack(number(depth, column) - zero, number(depth + 1, column) - zero);
      }
    }
  }

 private:
  __device__ __forceinline__ float number(int depth, int column) const {
    if constexpr (kBits<kStored> == 8) return decode<kStored>(words[column][depth / 4] >> 8 * (depth % 4) & 0xff);
    return decode<kStored>(words[depth][0] >> 4 * column & 0xf);
  }
};

// Adds the sums of the block's warps to those of the first one: of 4 and 4 warps, of 2 and 2, of the last two.
template <int kRowTiles>
__device__ __forceinline__ void add_warps(float (&sums)[kRowTiles][kColumnTiles][4], int warp, int lane) {
  __shared__ float shared[kWarps / 2][kColumnTiles * 4][32];
#pragma unroll 1
  for (int half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      sync_block();
      if (warp >= half && warp < 2 * half) {
#pragma unroll
        for (int k = 0; k < kColumnTiles * 4; ++k) shared[warp - half][k][lane] = sums[tile][k / 4][k % 4];
      }
      sync_block();
      if (warp < half) {
#pragma unroll
        for (int k = 0; k < kColumnTiles * 4; ++k) sums[tile][k / 4][k % 4] += shared[warp][k][lane];
      }
    }
  }
}

template <class C, Stored kStored, int kRowTiles>
__global__ void __launch_bounds__(32 * kWarps) multiply_tile(const ProductCall call) {
  constexpr bool kIsQuantized = kStored != Stored::kPlain;
  constexpr int kSteps = kLaneNumbers / 2 / C::kPerWord;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane / 4, j = lane % 4;
  const Tile tile = call.tiles[blockIdx.y];
  const bool is_tile = tile.matrix >= 0 && tile.matrix < call.num_matrices && tile.first_row >= 0 &&
                       int64_t{tile.first_row} + tile.num_rows <= call.num_rows;
  if (!is_tile || tile.num_rows <= 0) return;
  const int64_t first_column = int64_t{blockIdx.x} * kColumns, column = first_column + kLaneNumbers * i;
  const int64_t sum_column = first_column + 2 * kLaneNumbers * j;  // of the sums
  const int64_t group_size = call.depth / call.num_groups;
  const int row_bytes = size_of(call.row_number);

  float sums[kRowTiles][kColumnTiles][4] = {};
  for (int64_t chunk = warp; chunk * kChunk < call.depth; chunk += kWarps) {
    const int64_t depth = chunk * kChunk + kLaneNumbers * j;
    Numbers<C, kStored> numbers;
    numbers.read(call, tile.matrix, depth, column);

    uint32_t left[kRowTiles][kSteps][4];
#pragma unroll
    for (int of = 0; of < kRowTiles; ++of) {
      uint32_t words[2][kLaneNumbers / C::kPerWord];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = kTileRows * of + 8 * half + i;
        const char* const at = call.rows + ((int64_t{tile.first_row} + row) * call.depth + depth) * row_bytes;
        read_numbers<C, kLaneNumbers, 0>(row < tile.num_rows && depth < call.depth ? at : nullptr, call.row_number,
                                         words[half]);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        left[of][step][0] = words[0][2 * step], left[of][step][1] = words[1][2 * step];
        left[of][step][2] = words[0][2 * step + 1], left[of][step][3] = words[1][2 * step + 1];
      }
    }

    const int64_t group = chunk * kChunk / group_size;
    const int64_t of_group = (tile.matrix * call.num_groups + group) * call.num_columns;
    float row_scales[kRowTiles][2];
    if constexpr (kIsQuantized) {
#pragma unroll
      for (int of = 0; of < kRowTiles; ++of) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = kTileRows * of + 8 * half + i;
          const int64_t at = (int64_t{tile.first_row} + row) * call.row_groups + (call.row_groups > 1 ? group : 0);
          row_scales[of][half] = call.row_scales && row < tile.num_rows ? call.row_scales[at] : 1;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      float zero = 0;
      if constexpr (kIsQuantized) {
        if (call.zeros && column < call.num_columns) zero = call.zeros[of_group + column + n];
      }
      float part[kRowTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t right[2];
        numbers.right(step, n, zero, right);
#pragma unroll
        for (int of = 0; of < kRowTiles; ++of) {
          multiply(C{}, kIsQuantized ? part[of] : sums[of][n], left[of][step], right);
        }
      }
      if constexpr (kIsQuantized) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int64_t at = sum_column + kLaneNumbers * k + n;
          const float scale = at < call.num_columns ? call.scales[of_group + at] : 0;
#pragma unroll
          for (int of = 0; of < kRowTiles; ++of) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& sum = sums[of][n][2 * half + k];
              sum = fmaf(part[of][2 * half + k], scale * row_scales[of][half], sum);
            }
          }
        }
      }
    }
  }

  add_warps<kRowTiles>(sums, warp, lane);
  if (warp > 0) return;
#pragma unroll
  for (int of = 0; of < kRowTiles; ++of) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = kTileRows * of + 8 * half + i;
      if (row >= tile.num_rows) continue;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int64_t at = sum_column + kLaneNumbers * k;
        if (at >= call.num_columns) continue;
        float found[kLaneNumbers];
#pragma unroll
        for (int n = 0; n < kLaneNumbers; ++n) found[n] = sums[of][n][2 * half + k];
        float* const to = call.out + (int64_t{tile.first_row} + row) * call.num_columns + at;
        write_numbers<F32>(reinterpret_cast<char*>(to), found);
      }
    }
  }
}

// --- the call --------------------------------------------------------------------------------------------------------

struct ProductAttributes {
  int64_t stored, depth_is_minor, tile_rows;
};

template <class C, Stored kStored>
void launch_stored(const ProductCall& call, int64_t num_tiles, int64_t tile_rows, Stream stream) {
  const dim3 grid((call.num_columns + kColumns - 1) / kColumns, num_tiles);
  if (tile_rows == kTileRows) return launch(multiply_tile<C, kStored, 1>, grid, 32 * kWarps, stream, call);
  launch(multiply_tile<C, kStored, 2>, grid, 32 * kWarps, stream, call);
}

template <class C>
void launch_type(const ProductCall& call, int64_t num_tiles, const ProductAttributes& attributes, Stream stream) {
  switch (static_cast<Stored>(attributes.stored)) {
    case Stored::kPlain: return launch_stored<C, Stored::kPlain>(call, num_tiles, attributes.tile_rows, stream);
    case Stored::kI8: return launch_stored<C, Stored::kI8>(call, num_tiles, attributes.tile_rows, stream);
    case Stored::kF8: return launch_stored<C, Stored::kF8>(call, num_tiles, attributes.tile_rows, stream);
    case Stored::kI4: return launch_stored<C, Stored::kI4>(call, num_tiles, attributes.tile_rows, stream);
    case Stored::kF4: return launch_stored<C, Stored::kF4>(call, num_tiles, attributes.tile_rows, stream);
  }
}

using Words32 = ffi::Buffer<ffi::S32>;
using Singles = ffi::Buffer<ffi::F32>;

ffi::Error multiply_groups(Stream stream, Words32 tiles, ffi::AnyBuffer rows, ffi::AnyBuffer values, Singles scales,
                           ffi::Buffer<ffi::S8> zeros, Singles row_scales, ffi::Result<Singles> out,
                           ProductAttributes attributes) {
  constexpr int64_t kTileFields = sizeof(Tile) / 4;
  const auto row_shape = rows.dimensions(), shape = values.dimensions(), scale_shape = scales.dimensions();
  const auto out_shape = out->dimensions();
  if (row_shape.size() != 2 || shape.size() != 3 || scale_shape.size() != 3 || out_shape.size() != 2 ||
      row_scales.dimensions().size() != 2) {
    return ffi::Error::InvalidArgument("rows, values, scales or results have another number of axes");
  }
  const auto type = rows.element_type();
  const auto stored = static_cast<Stored>(attributes.stored);
  const bool is_plain = stored == Stored::kPlain, is_nibble = stored == Stored::kI4 || stored == Stored::kF4;
  const bool is_byte = stored == Stored::kI8 || stored == Stored::kF8;
  ProductCall call{};
  switch (type) {
    case ffi::F32: call.row_number = Number::kF32; break;
    case ffi::BF16: call.row_number = Number::kBF16; break;
    case ffi::F16: call.row_number = Number::kF16; break;
    case ffi::S8: call.row_number = Number::kI8; break;
    case ffi::F8E4M3FN: call.row_number = Number::kF8; break;
    default: return ffi::Error::InvalidArgument("rows are not float32, bfloat16, float16, int8 or float8_e4m3fn");
  }
  call.num_rows = row_shape[0], call.depth = row_shape[1], call.num_columns = out_shape[1];
  call.num_matrices = shape[0], call.num_groups = scale_shape[1];
  call.row_groups = row_scales.dimensions()[1];
  call.depth_is_minor = attributes.depth_is_minor != 0;
  const int64_t wide = call.depth_is_minor ? call.depth : call.num_columns / (is_nibble ? 2 : 1);
  const int64_t num_tiles = static_cast<int64_t>(tiles.element_count()) / kTileFields;
  if (attributes.stored < 0 || attributes.stored > 4 || (call.depth_is_minor && !is_byte) ||
      (is_plain && (values.element_type() != type || size_of(call.row_number) == 1)) ||
      shape[1] != (call.depth_is_minor ? call.num_columns : call.depth) || shape[2] != wide ||
      call.depth % kLaneNumbers || call.num_columns % kLaneNumbers || out_shape[0] != call.num_rows ||
      static_cast<int64_t>(values.size_bytes()) !=
          shape[0] * shape[1] * shape[2] * (is_plain ? size_of(call.row_number) : 1) ||
      call.num_groups < 1 || call.depth % call.num_groups ||
      (call.num_groups > 1 && call.depth / call.num_groups % kChunk) ||
      (!is_plain && static_cast<int64_t>(scales.element_count()) != shape[0] * call.num_groups * call.num_columns) ||
      (zeros.element_count() && zeros.element_count() != scales.element_count()) ||
      (row_scales.element_count() && (row_scales.dimensions()[0] != call.num_rows ||
                                      (call.row_groups != 1 && call.row_groups != call.num_groups))) ||
      (attributes.tile_rows != kTileRows && attributes.tile_rows != 2 * kTileRows) || num_tiles < 1 ||
      num_tiles > 65535) {
    return ffi::Error::InvalidArgument("tiles, rows, values, scales and attributes do not fit");
  }
  call.rows = static_cast<const char*>(rows.untyped_data());
  call.values = static_cast<const char*>(values.untyped_data());
  call.tiles = reinterpret_cast<const Tile*>(tiles.typed_data());
  call.scales = is_plain ? nullptr : scales.typed_data();
  call.zeros = zeros.element_count() ? zeros.typed_data() : nullptr;
  call.row_scales = row_scales.element_count() ? row_scales.typed_data() : nullptr;
  call.out = out->typed_data();
  if (call.row_number == Number::kF32) {
    launch_type<F32>(call, num_tiles, attributes, stream);
  } else if (call.row_number == Number::kBF16) {
    launch_type<BF16>(call, num_tiles, attributes, stream);
  } else {  // 16 bits with a mantissa that has all numbers of 8 bits
    launch_type<F16>(call, num_tiles, attributes, stream);
  }
  if (const char* error = launch_error()) return ffi::Error::Internal(error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::ProductAttributes, xla::ffi::StructMember<int64_t>("stored"),
                                      xla::ffi::StructMember<int64_t>("depth_is_minor"),
                                      xla::ffi::StructMember<int64_t>("tile_rows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_cuda_multiply, jpaged::multiply_groups,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<jpaged::StreamContext>()
                                  .Arg<jpaged::Words32>()                     // tiles
                                  .Arg<xla::ffi::AnyBuffer>()                 // rows
                                  .Arg<xla::ffi::AnyBuffer>()                 // values
                                  .Arg<jpaged::Singles>()                     // scales
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()      // zeros
                                  .Arg<jpaged::Singles>()                     // scales of the rows
                                  .Ret<jpaged::Singles>()                     // sums
                                  .Attrs<jpaged::ProductAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
