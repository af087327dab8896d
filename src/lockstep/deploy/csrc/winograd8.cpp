// A 3x3 convolution of bytes, exact in integers, by Winograd's method F(2x2, 3x3), for processors with AVX2 and without VNNI.
//
// Such a processor multiplies bytes no faster than 16-bit numbers: two instructions for 32 products of bytes, or one each for 16 products of
// 16 bits. In 16 bits Winograd's transforms are exact: an input grows by 4, a weight (times 4, so that there are no halves) by 9. So 16 products take the
// place of 36, and the result is the same integer, times 4.
//
// Images and results are channels-last. Outputs come in tiles of 2x2; a block of tiles is transformed, multiplied and put together by one thread.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr int ROWS = 6;    // tiles that a micro-kernel takes at a time
constexpr int COLS = 16;   // output channels that it makes
constexpr int POSITIONS = 16; // of a transformed tile
constexpr int PANELS = 2;  // of COLS channels each, made while the inputs for them are near

struct Layer {
    int64_t batch, height, width, in_channels, out_channels, padding, zero, result_zero, lowest, highest, pool, threads;
};

struct Tiles {
    int64_t out_height, out_width, down, across, count;
    explicit Tiles(const Layer& layer)
        : out_height(layer.height + 2 * layer.padding - 2), out_width(layer.width + 2 * layer.padding - 2),
          down((out_height + 1) / 2), across((out_width + 1) / 2), count(layer.batch * down * across) {}
};

// What one thread needs; freed with it.
struct Scratch {
    int16_t* inputs = nullptr; // [position][tile][channel]
    int32_t* sums = nullptr;   // [panel][position][tile][COLS]
    Scratch(int64_t tiles, int64_t channels) {
        inputs = static_cast<int16_t*>(std::aligned_alloc(64, POSITIONS * tiles * channels * 2 + 64 - (POSITIONS * tiles * channels * 2) % 64));
        sums = static_cast<int32_t*>(std::aligned_alloc(64, PANELS * POSITIONS * tiles * COLS * 4));
    }
    ~Scratch() {
        std::free(inputs);
        std::free(sums);
    }
    bool good() const { return inputs && sums; }
};

// d0 - d2, d1 + d2, d2 - d1, d1 - d3
inline void transform(__m256i d[4]) {
    const __m256i a = _mm256_sub_epi16(d[0], d[2]), b = _mm256_add_epi16(d[1], d[2]);
    const __m256i c = _mm256_sub_epi16(d[2], d[1]), e = _mm256_sub_epi16(d[1], d[3]);
    d[0] = a, d[1] = b, d[2] = c, d[3] = e;
}

// One tile's 4x4 inputs, 16 channels at a time; what is beyond the image is zero, and so is a tile beyond the last.
void transform_inputs(const Layer& layer, const Tiles& tiles, const uint8_t* images, int64_t tile, int64_t position_stride, int16_t* to) {
    const bool real = tile < tiles.count;
    const int64_t image = tile / (tiles.down * tiles.across), rest = tile % (tiles.down * tiles.across);
    const int64_t top = rest / tiles.across * 2 - layer.padding, left = rest % tiles.across * 2 - layer.padding;
    const __m256i zero = _mm256_set1_epi16(static_cast<int16_t>(layer.zero));
    for (int64_t c = 0; c < layer.in_channels; c += 16) {
        __m256i d[4][4];
        for (int y = 0; y < 4; ++y)
            for (int x = 0; x < 4; ++x) {
                const int64_t row = top + y, col = left + x;
                d[y][x] = _mm256_setzero_si256();
                if (real && row >= 0 && row < layer.height && col >= 0 && col < layer.width) {
                    const uint8_t* at = images + ((image * layer.height + row) * layer.width + col) * layer.in_channels + c;
                    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
                    d[y][x] = _mm256_sub_epi16(_mm256_cvtepu8_epi16(bytes), zero);
                }
            }
        for (int y = 0; y < 4; ++y) transform(d[y]);
        for (int x = 0; x < 4; ++x) {
            __m256i column[4] = {d[0][x], d[1][x], d[2][x], d[3][x]};
            transform(column);
            for (int y = 0; y < 4; ++y)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (y * 4 + x) * position_stride + c), column[y]);
        }
    }
}

inline __m256i pair(const int16_t* two) {
    int32_t bits;
    __builtin_memcpy(&bits, two, 4);
    return _mm256_set1_epi32(bits);
}

// sums[ROWS][COLS] = inputs[ROWS][channels] x weights[channels / 2][COLS][2]
void multiply(const int16_t* inputs, const int16_t* weights, int64_t channels, int32_t* sums) {
    __m256i s[ROWS][2];
    for (auto& row : s) row[0] = row[1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < channels; k += 2) {
        const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights));
        const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights) + 1);
        weights += 2 * COLS;
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const __m256i a = pair(inputs + r * channels + k);
            s[r][0] = _mm256_add_epi32(s[r][0], _mm256_madd_epi16(a, low));
            s[r][1] = _mm256_add_epi32(s[r][1], _mm256_madd_epi16(a, high));
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half)
            _mm256_store_si256(reinterpret_cast<__m256i*>(sums + r * COLS) + half, s[r][half]);
}

// What makes bytes of sums: result = round(sum x factor + offset) + result_zero, within its ends.
struct Rounding {
    __m256 factor[2], offset[2];
    __m256i zero, lowest, highest;

    Rounding(const Layer& layer, const float* factors, const float* offsets, int64_t first)
        : zero(_mm256_set1_epi32(static_cast<int>(layer.result_zero))), lowest(_mm256_set1_epi32(static_cast<int>(layer.lowest))),
          highest(_mm256_set1_epi32(static_cast<int>(layer.highest))) {
        for (int half = 0; half < 2; ++half) {
            factor[half] = _mm256_loadu_ps(factors + first + 8 * half);
            offset[half] = _mm256_loadu_ps(offsets + first + 8 * half);
        }
    }

    __m256i apply(__m256i sums, int half) const {
        const __m256 value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), factor[half], offset[half]);
        const __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(value), zero);
        return _mm256_min_epi32(_mm256_max_epi32(whole, lowest), highest);
    }

    void store(__m256i low, __m256i high, uint8_t* to) const {
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(apply(low, 0), apply(high, 1)), 0xD8);
        const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    }
};

// The 2x2 outputs of one tile: rows m0 + m1 + m2 and m1 - m2 - m3, and the same across.
void finish(const Layer& layer, const Tiles& tiles, const int32_t* sums, int64_t position_stride, int64_t tile, int64_t first, const Rounding& rounding,
            uint8_t* results) {
    const int64_t image = tile / (tiles.down * tiles.across), rest = tile % (tiles.down * tiles.across);
    const int64_t top = rest / tiles.across * 2, left = rest % tiles.across * 2;
    __m256i out[2][2][2];
    for (int half = 0; half < 2; ++half) {
        __m256i t[2][4];
        for (int x = 0; x < 4; ++x) {
            __m256i m[4];
            for (int y = 0; y < 4; ++y)
                m[y] = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums + (y * 4 + x) * position_stride) + half);
            t[0][x] = _mm256_add_epi32(_mm256_add_epi32(m[0], m[1]), m[2]);
            t[1][x] = _mm256_sub_epi32(_mm256_sub_epi32(m[1], m[2]), m[3]);
        }
        for (int y = 0; y < 2; ++y) {
            out[y][0][half] = _mm256_add_epi32(_mm256_add_epi32(t[y][0], t[y][1]), t[y][2]);
            out[y][1][half] = _mm256_sub_epi32(_mm256_sub_epi32(t[y][1], t[y][2]), t[y][3]);
        }
    }
    if (layer.pool) { // the factor is positive, so the largest sum is the largest byte
        __m256i most[2];
        for (int half = 0; half < 2; ++half)
            most[half] = _mm256_max_epi32(_mm256_max_epi32(out[0][0][half], out[0][1][half]),
                                          _mm256_max_epi32(out[1][0][half], out[1][1][half]));
        rounding.store(most[0], most[1], results + tile * layer.out_channels + first);
        return;
    }
    for (int y = 0; y < 2; ++y)
        for (int x = 0; x < 2; ++x)
            if (top + y < tiles.out_height && left + x < tiles.out_width)
                rounding.store(out[y][x][0], out[y][x][1],
                               results + ((image * tiles.out_height + top + y) * tiles.out_width + left + x) * layer.out_channels + first);
}

// As many tiles as keep the transformed inputs within about 300 KB, and give every thread some.
int64_t block_size(const Layer& layer, int64_t tiles) {
    const int64_t fitting = std::min<int64_t>(60, 9600 / layer.in_channels), shared = (tiles + layer.threads - 1) / layer.threads;
    const int64_t wanted = std::max<int64_t>(1, std::min(fitting, shared));
    return (wanted + ROWS - 1) / ROWS * ROWS;
}

} // namespace

// weights: [out_channel / COLS][position][in_channel / 2][COLS][2], transformed and times 4. Returns 0, or 1 where there is no memory.
extern "C" __attribute__((visibility("default"))) int lockstep_winograd8(const int64_t* numbers, const uint8_t* images, const int16_t* weights,
                                                                          const float* factors, const float* offsets, uint8_t* results) {
    const Layer& layer = *reinterpret_cast<const Layer*>(numbers);
    const Tiles tiles(layer);
    const int64_t size = block_size(layer, tiles.count), blocks = (tiles.count + size - 1) / size;
    const int64_t in_stride = size * layer.in_channels, out_stride = size * COLS, panel = layer.in_channels * COLS;
    int failed = 0;
#pragma omp parallel num_threads(static_cast<int>(layer.threads)) reduction(| : failed)
    {
        const Scratch scratch(size, layer.in_channels);
        failed |= !scratch.good();
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < blocks; ++block) {
            if (failed) continue;
            const int64_t begin = block * size, here = std::min(size, tiles.count - begin);
            for (int64_t t = 0; t < (here + ROWS - 1) / ROWS * ROWS; ++t)
                transform_inputs(layer, tiles, images, begin + t, in_stride, scratch.inputs + t * layer.in_channels);
            for (int64_t first = 0; first < layer.out_channels; first += PANELS * COLS) {
                const int64_t panels = std::min<int64_t>(PANELS, (layer.out_channels - first) / COLS);
                const int16_t* all = weights + first / COLS * POSITIONS * panel;
                for (int position = 0; position < POSITIONS; ++position)
                    for (int64_t t = 0; t < here; t += ROWS)
                        for (int64_t p = 0; p < panels; ++p)
                            multiply(scratch.inputs + position * in_stride + t * layer.in_channels, all + (p * POSITIONS + position) * panel, layer.in_channels,
                                     scratch.sums + (p * POSITIONS + position) * out_stride + t * COLS);
                for (int64_t p = 0; p < panels; ++p) {
                    const Rounding rounding(layer, factors, offsets, first + p * COLS);
                    for (int64_t t = 0; t < here; ++t)
                        finish(layer, tiles, scratch.sums + p * POSITIONS * out_stride + t * COLS, out_stride, begin + t, first + p * COLS, rounding,
                               results);
                }
            }
        }
    }
    return failed;
}
