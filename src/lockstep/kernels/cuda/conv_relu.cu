// Convolution + bias + ReLU (+ 2x2 max-pool) with stride 1, forward and backward, for float tensors in planar order. Knows nothing of PyTorch:
// the functions at the end take plain pointers. nvcc compiles it for the GPU; with -DLOCKSTEP_HOST a C++ compiler does for the CPU, for tests.
#ifdef LOCKSTEP_HOST
#include "host_shim.h"
#else
#include <cuda_runtime.h>
#define LAUNCH(kernel, grid, size, stream, ...) kernel<<<grid, size, 0, stream>>>(__VA_ARGS__)
#define LAUNCHED() static_cast<int>(cudaGetLastError())
#endif

namespace {

constexpr int kTile = 16;      // a block computes 16 x 16 pixels ...
constexpr int kChannels = 8;   // ... of 8 channels
constexpr int kThreads = 256;  // of a block of the weights' gradient
constexpr int kCutOff = 4;     // the code of a pooled number that the ReLU cut off

struct Sizes {
  int batch, in, out, height, width, padding, pool;
};

// Of the convolution.
template <int K>
__device__ __forceinline__ int out_height(const Sizes& s) {
  return s.height + 2 * s.padding - K + 1;
}
template <int K>
__device__ __forceinline__ int out_width(const Sizes& s) {
  return s.width + 2 * s.padding - K + 1;
}

// The gradient of the convolution's output at one place: through pool and ReLU. Where y is NaN it passes, as in PyTorch.
template <int K>
__device__ __forceinline__ float output_grad(const Sizes& s, const float* grad, const float* y, const unsigned char* code, int n,
                                             int channel, int row, int column) {
  int height = out_height<K>(s), width = out_width<K>(s);
  if (!s.pool) {
    size_t at = ((static_cast<size_t>(n) * s.out + channel) * height + row) * width + column;
    return y[at] <= 0 ? 0 : grad[at];
  }
  if (row / 2 >= height / 2 || column / 2 >= width / 2) return 0;
  size_t at = ((static_cast<size_t>(n) * s.out + channel) * (height / 2) + row / 2) * (width / 2) + column / 2;
  return code[at] == row % 2 * 2 + column % 2 ? grad[at] : 0;
}

// One channel of the block's pixels with those around them, which begin at (top, left); zeros outside of the plane.
template <int K, class Read>
__device__ __forceinline__ void read_tile(float (&tile)[kTile + K - 1][kTile + K - 1], int top, int left, int height, int width,
                                          const Read& read) {
  constexpr int kSide = kTile + K - 1;
  for (int i = threadIdx.y * kTile + threadIdx.x; i < kSide * kSide; i += kTile * kTile) {
    int row = top + i / kSide, column = left + i % kSide;
    tile[i / kSide][i % kSide] = row >= 0 && row < height && column >= 0 && column < width ? read(row, column) : 0.f;
  }
}

template <int K>
__device__ __forceinline__ void add_taps(const float (&tile)[kTile + K - 1][kTile + K - 1], const float (&weights)[kChannels][K * K],
                                         float (&sums)[kChannels]) {
  for (int tap = 0; tap < K * K; tap++) {
    float value = tile[threadIdx.y + tap / K][threadIdx.x + tap % K];
    for (int c = 0; c < kChannels; c++) sums[c] += value * weights[c][tap];
  }
}

// Grid: tiles of the image, groups of output channels, images.
template <int K>
__global__ void forward_kernel(Sizes s, const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                               float* __restrict__ y, unsigned char* __restrict__ code) {
  __shared__ float tile[kTile + K - 1][kTile + K - 1];
  __shared__ float weights[kChannels][K * K];
  __shared__ float outputs[kTile][kTile];
  int height = out_height<K>(s), width = out_width<K>(s), across = (width + kTile - 1) / kTile;
  int top = blockIdx.x / across * kTile, left = blockIdx.x % across * kTile, first = blockIdx.y * kChannels, n = blockIdx.z;
  int row = top + threadIdx.y, column = left + threadIdx.x, thread = threadIdx.y * kTile + threadIdx.x;
  float sums[kChannels];
  for (int c = 0; c < kChannels; c++) sums[c] = bias && first + c < s.out ? bias[first + c] : 0.f;
  for (int i = 0; i < s.in; i++) {
    const float* plane = x + (static_cast<size_t>(n) * s.in + i) * s.height * s.width;
    read_tile<K>(tile, top - s.padding, left - s.padding, s.height, s.width,
                 [&](int r, int c) { return plane[r * s.width + c]; });
    for (int j = thread; j < kChannels * K * K; j += kTile * kTile) {
      int channel = first + j / (K * K);
      weights[j / (K * K)][j % (K * K)] =
          channel < s.out ? weight[(static_cast<size_t>(channel) * s.in + i) * K * K + j % (K * K)] : 0.f;
    }
    __syncthreads();
    add_taps<K>(tile, weights, sums);
    __syncthreads();
  }
  for (int c = 0; c < kChannels && first + c < s.out; c++) {
    size_t plane = static_cast<size_t>(n) * s.out + first + c;
    if (!s.pool) {
      if (row < height && column < width) y[(plane * height + row) * width + column] = sums[c] < 0 ? 0.f : sums[c];
      continue;
    }
    outputs[threadIdx.y][threadIdx.x] = sums[c];
    __syncthreads();
    if (row % 2 == 0 && column % 2 == 0 && row / 2 < height / 2 && column / 2 < width / 2) {
      float best = outputs[threadIdx.y][threadIdx.x];
      int which = 0;
      for (int q = 1; q < 4; q++) {
        float other = outputs[threadIdx.y + q / 2][threadIdx.x + q % 2];
        if (other > best || other != other) {
          best = other;
          which = q;
        }
      }
      size_t at = (plane * (height / 2) + row / 2) * (width / 2) + column / 2;
      y[at] = best <= 0 ? 0.f : best;
      if (code) code[at] = best <= 0 ? kCutOff : which;
    }
    __syncthreads();
  }
}

// The gradient of x: the convolution of the output's gradient with the kernel turned round. Grid: tiles, groups of input channels, images.
template <int K>
__global__ void grad_x_kernel(Sizes s, const float* __restrict__ grad, const float* __restrict__ y,
                              const unsigned char* __restrict__ code, const float* __restrict__ weight, float* __restrict__ grad_x) {
  __shared__ float tile[kTile + K - 1][kTile + K - 1];
  __shared__ float weights[kChannels][K * K];
  int across = (s.width + kTile - 1) / kTile, border = K - 1 - s.padding;
  int top = blockIdx.x / across * kTile, left = blockIdx.x % across * kTile, first = blockIdx.y * kChannels, n = blockIdx.z;
  int row = top + threadIdx.y, column = left + threadIdx.x, thread = threadIdx.y * kTile + threadIdx.x;
  float sums[kChannels] = {};
  for (int o = 0; o < s.out; o++) {
    read_tile<K>(tile, top - border, left - border, out_height<K>(s), out_width<K>(s),
                 [&](int r, int c) { return output_grad<K>(s, grad, y, code, n, o, r, c); });
    for (int j = thread; j < kChannels * K * K; j += kTile * kTile) {
      int channel = first + j / (K * K);
      weights[j / (K * K)][j % (K * K)] =
          channel < s.in ? weight[(static_cast<size_t>(o) * s.in + channel) * K * K + K * K - 1 - j % (K * K)] : 0.f;
    }
    __syncthreads();
    add_taps<K>(tile, weights, sums);
    __syncthreads();
  }
  if (row >= s.height || column >= s.width) return;
  for (int c = 0; c < kChannels && first + c < s.in; c++) {
    grad_x[((static_cast<size_t>(n) * s.in + first + c) * s.height + row) * s.width + column] = sums[c];
  }
}

// The gradient of the weights between one input and one output channel, and of the bias, over one part of the batch's pixels.
// Grid: input channels, output channels, parts. `sums`: part, output channel, input channel, K * K taps and the bias.
template <int K>
__global__ void grad_weight_kernel(Sizes s, const float* __restrict__ grad, const float* __restrict__ y,
                                   const unsigned char* __restrict__ code, const float* __restrict__ x, float* __restrict__ sums) {
  __shared__ float shared[kThreads];
  int i = blockIdx.x, o = blockIdx.y, thread = threadIdx.x, height = out_height<K>(s), width = out_width<K>(s);
  float own[K * K + 1] = {};
  size_t pixels = static_cast<size_t>(height) * width, all = pixels * s.batch;
  for (size_t at = static_cast<size_t>(blockIdx.z) * kThreads + thread; at < all; at += static_cast<size_t>(gridDim.z) * kThreads) {
    int n = at / pixels, row = at % pixels / width, column = at % pixels % width;
    float g = output_grad<K>(s, grad, y, code, n, o, row, column);
    const float* plane = x + (static_cast<size_t>(n) * s.in + i) * s.height * s.width;
    for (int tap = 0; tap < K * K; tap++) {
      int r = row + tap / K - s.padding, c = column + tap % K - s.padding;
      if (r >= 0 && r < s.height && c >= 0 && c < s.width) own[tap] += g * plane[r * s.width + c];
    }
    own[K * K] += g;
  }
  float* to = sums + ((static_cast<size_t>(blockIdx.z) * s.out + o) * s.in + i) * (K * K + 1);
  for (int j = 0; j <= K * K; j++) {
    shared[thread] = own[j];
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (thread < half) shared[thread] += shared[thread + half];
      __syncthreads();
    }
    if (thread == 0) to[j] = shared[0];
    __syncthreads();
  }
}

// The parts added up in their order, so that every run gives the same bits. Grid: weights in blocks of kThreads.
template <int K>
__global__ void add_parts_kernel(Sizes s, int parts, const float* __restrict__ sums, float* __restrict__ grad_weight,
                                 float* __restrict__ grad_bias) {
  int pair = blockIdx.x * kThreads + threadIdx.x, pairs = s.in * s.out;
  if (pair >= pairs) return;
  for (int j = 0; j <= K * K; j++) {
    float sum = 0;
    for (int part = 0; part < parts; part++) sum += sums[(static_cast<size_t>(part) * pairs + pair) * (K * K + 1) + j];
    if (j < K * K) grad_weight[static_cast<size_t>(pair) * K * K + j] = sum;
    else if (pair % s.in == 0) grad_bias[pair / s.in] = sum;
  }
}

int tiles(int height, int width) { return (height + kTile - 1) / kTile * ((width + kTile - 1) / kTile); }
int groups(int channels) { return (channels + kChannels - 1) / kChannels; }

template <int K>
int forward_of(const Sizes& s, const float* x, const float* weight, const float* bias, float* y, unsigned char* code,
               cudaStream_t stream) {
  dim3 grid(tiles(s.height + 2 * s.padding - K + 1, s.width + 2 * s.padding - K + 1), groups(s.out), s.batch), size(kTile, kTile);
  LAUNCH(forward_kernel<K>, grid, size, stream, s, x, weight, bias, y, code);
  return LAUNCHED();
}

template <int K>
int backward_of(const Sizes& s, const float* grad, const float* y, const unsigned char* code, const float* x, const float* weight,
                float* grad_x, float* grad_weight, float* grad_bias, float* sums, int parts, cudaStream_t stream) {
  if (grad_x) {
    dim3 grid(tiles(s.height, s.width), groups(s.in), s.batch), size(kTile, kTile);
    LAUNCH(grad_x_kernel<K>, grid, size, stream, s, grad, y, code, weight, grad_x);
  }
  dim3 grid(s.in, s.out, parts), all((s.in * s.out + kThreads - 1) / kThreads), size(kThreads);
  LAUNCH(grad_weight_kernel<K>, grid, size, stream, s, grad, y, code, x, sums);
  LAUNCH(add_parts_kernel<K>, all, size, stream, s, parts, sums, grad_weight, grad_bias);
  return LAUNCHED();
}

}  // namespace

// Each returns CUDA's error number, 0 for none, and -1 for a kernel size that is not there.
extern "C" int lockstep_forward(const int* sizes, int kernel, const float* x, const float* weight, const float* bias, float* y,
                                unsigned char* code, void* stream_) {
  Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
  cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  if (kernel == 1) return forward_of<1>(s, x, weight, bias, y, code, stream);
  if (kernel == 3) return forward_of<3>(s, x, weight, bias, y, code, stream);
  if (kernel == 5) return forward_of<5>(s, x, weight, bias, y, code, stream);
  return -1;
}

// `sums` is room for parts * out * in * (kernel * kernel + 1) numbers.
extern "C" int lockstep_backward(const int* sizes, int kernel, const float* grad, const float* y, const unsigned char* code,
                                 const float* x, const float* weight, float* grad_x, float* grad_weight, float* grad_bias,
                                 float* sums, int parts, void* stream_) {
  Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
  cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  if (kernel == 1) return backward_of<1>(s, grad, y, code, x, weight, grad_x, grad_weight, grad_bias, sums, parts, stream);
  if (kernel == 3) return backward_of<3>(s, grad, y, code, x, weight, grad_x, grad_weight, grad_bias, sums, parts, stream);
  if (kernel == 5) return backward_of<5>(s, grad, y, code, x, weight, grad_x, grad_weight, grad_bias, sums, parts, stream);
  return -1;
}
