// Convolutions with stride 1, and linear layers, of bytes: exact in integers, for processors with AVX512-VNNI, which add 64 products of bytes to 16
// sums in one instruction.
//
// Images and results are channels-last. An image is copied once, with its border and with channels up to a multiple of four; then eight outputs x 32
// channels at a time stay in registers while all taps and channels are added up. Bias, ReLU, rounding and a max-pool by two come before anything is
// written. A linear layer is a 1x1 convolution of one row of pixels: the batch.

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace {

constexpr int64_t LANES = 16, PANEL = 2 * LANES;  // output channels of a vector, and those that are made together
constexpr int64_t GROUP = 4;                      // input channels that one instruction adds up

struct Layer {
    int64_t batch, height, width, in_channels, out_channels, kernel, padding, zero, result_zero, lowest, highest, pool, floats, relu, threads;

    int64_t out_height() const { return height + 2 * padding - kernel + 1; }
    int64_t out_width() const { return width + 2 * padding - kernel + 1; }
    int64_t result_width() const { return pool ? out_width() / 2 : out_width(); }
    int64_t result_height() const { return pool ? out_height() / 2 : out_height(); }
    // Of the copy of an image.
    int64_t channels() const { return (in_channels + GROUP - 1) / GROUP * GROUP; }
    int64_t row() const { return (width + 2 * padding) * channels(); }
    int64_t size() const { return (height + 2 * padding) * row(); }
    int64_t panels() const { return (out_channels + PANEL - 1) / PANEL; }
    // Bytes of a vector of weights for all taps and input channels.
    int64_t depth() const { return kernel * kernel * channels() * LANES; }
};

struct Parameters {
    const int8_t* weights;                  // [panel][tap][channels / 4][vector][16][4]
    const int32_t* starts;                  // of each sum: what the input's zero point makes of the weights
    const float *factors, *offsets;         // result = sum x factor + offset
};

void copy_with_border(const Layer& layer, const uint8_t* image, uint8_t* to) {
    const int64_t channels = layer.channels();
    std::memset(to, static_cast<int>(layer.zero), static_cast<size_t>(layer.size()));
    for (int64_t y = 0; y < layer.height; ++y) {
        uint8_t* at = to + (y + layer.padding) * layer.row() + layer.padding * channels;
        const uint8_t* from = image + y * layer.width * layer.in_channels;
        if (channels == layer.in_channels) {
            std::memcpy(at, from, static_cast<size_t>(layer.width * channels));
        } else {
            for (int64_t x = 0; x < layer.width; ++x)  // few of them: a call of memcpy for each pixel would take longer
                for (int64_t c = 0; c < layer.in_channels; ++c) at[x * channels + c] = from[x * layer.in_channels + c];
        }
    }
}

inline __m512i four(const uint8_t* bytes) {
    int32_t bits;
    std::memcpy(&bits, bytes, 4);
    return _mm512_set1_epi32(bits);
}

// `OUTPUTS` outputs next to each other (with a pool: in two rows) of 16 x `VECTORS` channels from `first` on.
template <int OUTPUTS, int VECTORS, bool POOL>
void block(const Layer& layer, const Parameters& parameters, const uint8_t* image, int64_t first, void* result) {
    constexpr int ACROSS = POOL ? OUTPUTS / 2 : OUTPUTS;
    const int64_t channels = layer.channels(), row = layer.row();
    __m512i sums[OUTPUTS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < OUTPUTS; ++i)
        for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_loadu_si512(parameters.starts + first + LANES * v);
    const int8_t* weights = parameters.weights + first / LANES * layer.depth();
    for (int64_t tap = 0; tap < layer.kernel * layer.kernel; ++tap) {
        const uint8_t* from = image + tap / layer.kernel * row + tap % layer.kernel * channels;
        for (int64_t c = 0; c < channels; c += GROUP) {
            __m512i taken[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) taken[v] = _mm512_loadu_si512(weights + 64 * v);
            weights += 64 * VECTORS;
#pragma GCC unroll 8
            for (int i = 0; i < OUTPUTS; ++i) {
                const __m512i bytes = four(from + i / ACROSS * row + i % ACROSS * channels + c);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_dpbusd_epi32(sums[i][v], bytes, taken[v]);
            }
        }
    }
    const __m512i zero = _mm512_set1_epi32(static_cast<int>(layer.result_zero));
    const __m512i lowest = _mm512_set1_epi32(static_cast<int>(layer.lowest)), highest = _mm512_set1_epi32(static_cast<int>(layer.highest));
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t channel = first + LANES * v, left = layer.out_channels - channel;
        const __mmask16 real = left >= LANES ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1);
        const __m512 factor = _mm512_loadu_ps(parameters.factors + channel), offset = _mm512_loadu_ps(parameters.offsets + channel);
        __m512i whole[OUTPUTS];
#pragma GCC unroll 8
        for (int i = 0; i < OUTPUTS; ++i) {
            __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][v]), factor, offset);
            if (layer.floats) {
                if (layer.relu) value = _mm512_max_ps(value, _mm512_setzero_ps());
                _mm512_mask_storeu_ps(static_cast<float*>(result) + i * layer.out_channels + channel, real, value);
                continue;
            }
            whole[i] = _mm512_add_epi32(_mm512_cvtps_epi32(value), zero);
            whole[i] = _mm512_min_epi32(_mm512_max_epi32(whole[i], lowest), highest);
        }
        if (layer.floats) continue;
        uint8_t* to = static_cast<uint8_t*>(result) + channel;
        if (POOL) {
#pragma GCC unroll 4
            for (int i = 0; i < ACROSS; i += 2) {
                const __m512i upper = _mm512_max_epi32(whole[i], whole[i + 1]), lower = _mm512_max_epi32(whole[ACROSS + i], whole[ACROSS + i + 1]);
                _mm512_mask_cvtepi32_storeu_epi8(to + i / 2 * layer.out_channels, real, _mm512_max_epi32(upper, lower));
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < OUTPUTS; ++i) _mm512_mask_cvtepi32_storeu_epi8(to + i * layer.out_channels, real, whole[i]);
        }
    }
}

// A row of results (with a pool: of two rows of outputs), for one panel of channels.
template <int VECTORS, bool POOL>
void results_row(const Layer& layer, const Parameters& parameters, const uint8_t* image, int64_t first, int64_t y, uint8_t* results) {
    const int64_t width = layer.out_width(), channels = layer.channels(), down = POOL ? 2 : 1, wide = layer.floats ? 4 : 1;
    const uint8_t* from = image + y * down * layer.row();
    uint8_t* to = results + y * layer.result_width() * layer.out_channels * wide;
    int64_t x = 0;
    auto go = [&](auto outputs) {
        constexpr int kOutputs = decltype(outputs)::value, kAcross = POOL ? kOutputs / 2 : kOutputs;
        for (; x + kAcross <= width; x += kAcross)
            block<kOutputs, VECTORS, POOL>(layer, parameters, from + x * channels, first, to + x / down * layer.out_channels * wide);
    };
    go(std::integral_constant<int, 8>{});
    go(std::integral_constant<int, 4>{});
    if (!POOL) {
        go(std::integral_constant<int, 2>{});
        go(std::integral_constant<int, 1>{});
    }
}

void panel_of_image(const Layer& layer, const Parameters& parameters, const uint8_t* image, int64_t panel, uint8_t* results) {
    const int64_t first = panel * PANEL;
    const bool two = layer.out_channels - first > LANES;
    auto row = layer.pool ? (two ? results_row<2, true> : results_row<1, true>) : (two ? results_row<2, false> : results_row<1, false>);
    for (int64_t y = 0; y < layer.result_height(); ++y) row(layer, parameters, image, first, y, results);
}

}  // namespace

// Returns 0, or 1 for want of memory. With a pool, the outputs' sides have to be even.
extern "C" __attribute__((visibility("default"))) int lockstep_vnni8(const int64_t* fields, const uint8_t* images, const int8_t* weights, const int32_t* starts,
                                                                        const float* factors, const float* offsets, uint8_t* results) {
    Layer layer;
    std::memcpy(&layer, fields, sizeof(layer));
    const Parameters parameters{weights, starts, factors, offsets};
    const int64_t image = layer.height * layer.width * layer.in_channels, panels = layer.panels(), tasks = layer.batch * panels;
    const int64_t result = layer.result_height() * layer.result_width() * layer.out_channels * (layer.floats ? 4 : 1);
    // A linear layer's row may be as long as the batch: it is read where it is.
    const bool as_it_is = layer.padding == 0 && layer.channels() == layer.in_channels;
    std::atomic<int> failed{0};
#pragma omp parallel for num_threads(static_cast<int>(layer.threads)) schedule(static) if (layer.threads > 1)
    for (int64_t part = 0; part < layer.threads; ++part) {
        // The copy of an image, which is freed with the part.
        uint8_t* copy = as_it_is ? nullptr : static_cast<uint8_t*>(std::malloc(static_cast<size_t>(layer.size())));
        if (!as_it_is && !copy) failed = 1;
        int64_t held = -1;
        for (int64_t task = tasks * part / layer.threads; task < tasks * (part + 1) / layer.threads && !failed; ++task) {
            const int64_t n = task / panels;
            const uint8_t* from = images + n * image;
            if (!as_it_is) {
                if (n != held) copy_with_border(layer, from, copy);
                from = copy;
            }
            held = n;
            panel_of_image(layer, parameters, from, task % panels, results + n * result);
        }
        std::free(copy);
    }
    return failed;
}

// Images as bytes, channels-last: round(value x factor) + zero, within 0 and `top`. `sizes`: images, channels, pixels of an image, threads.
extern "C" __attribute__((visibility("default"))) void lockstep_bytes8(const int64_t* sizes, const float* images, float factor, int32_t zero, int32_t top,
                                                                         uint8_t* bytes) {
    const int64_t count = sizes[0], channels = sizes[1], pixels = sizes[2];
    const __m512i zeros = _mm512_set1_epi32(zero), highest = _mm512_set1_epi32(top);
    const __m512 factors = _mm512_set1_ps(factor), largest = _mm512_set1_ps(1e9f), least = _mm512_set1_ps(-1e9f);
#pragma omp parallel for num_threads(static_cast<int>(sizes[3])) schedule(static) if (sizes[3] > 1 && count > 1)
    for (int64_t plane = 0; plane < count * channels; ++plane) {
        const float* from = images + plane * pixels;
        uint8_t* to = bytes + plane / channels * channels * pixels + plane % channels;
        for (int64_t i = 0; i < pixels; i += LANES) {
            const __mmask16 real = pixels - i >= LANES ? 0xFFFF : static_cast<__mmask16>((1u << (pixels - i)) - 1);
            __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(real, from + i), factors);
            value = _mm512_max_ps(_mm512_min_ps(value, largest), least);  // what no whole number can hold
            const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(value), zeros);
            alignas(16) uint8_t narrow[LANES];
            _mm_store_si128(reinterpret_cast<__m128i*>(narrow), _mm512_cvtepi32_epi8(_mm512_min_epi32(_mm512_max_epi32(whole, _mm512_setzero_si512()), highest)));
            const int64_t these = pixels - i < LANES ? pixels - i : LANES;
            for (int64_t k = 0; k < these; ++k) to[(i + k) * channels] = narrow[k];
        }
    }
}
