// What the kernels are asked, in plain numbers and pointers: nothing here knows PyTorch, so the sources also build without it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lockstep {

// How images and gradients are stored. Weights and biases are always numbers of the kernels' own type.
enum class Type { real, bfloat16 };

// Convolution with stride 1, a square kernel and bias; then a ReLU, and behind it a 2x2 max-pool, if asked for.
struct Problem {
  int64_t batch, in_channels, out_channels, height, width, kernel, padding;
  bool relu, pool, channels_last;  // no pool without a ReLU
  Type type;

  // Of the convolution.
  int64_t out_height() const { return height + 2 * padding - kernel + 1; }
  int64_t out_width() const { return width + 2 * padding - kernel + 1; }
  // Of the result.
  int64_t y_height() const { return pool ? out_height() / 2 : out_height(); }
  int64_t y_width() const { return pool ? out_width() / 2 : out_width(); }
};

// Weights wherever they lie: PyTorch may keep them as channels-last.
struct Strided {
  void* data;
  int64_t out, in, row, column;  // strides
};

// Of a pooled result is kept which of its four numbers was the largest, 0 to 3, or that the ReLU cut it off.
constexpr int kCutOff = 4;

struct Forward {
  const void* x;
  const void* weights;  // as `pack_weights` left them
  const void* bias;
  void* y;
  uint8_t* code;  // nullptr where nobody will ask for the gradient
};

struct Backward {
  const void* grad;
  const void* y;        // with a ReLU and no pool: where it is 0, no gradient passes
  const uint8_t* code;  // with pool
  const void* x;
  const void* weights;  // packed for the way back; nullptr where the gradient of x is not wanted
  void* grad_x;
};

// One way to compute. Sizes are in numbers of the kernels' own type. A range is a part of the batch (or of the input channels),
// so that the caller may divide the work among threads. False means: the numbers are so large, infinite or not numbers at all,
// that this way would not give what the plain sum gives; the caller has to take another.
struct Algorithm {
  int64_t (*weights_size)(const Problem&);
  bool (*pack_weights)(const Problem&, const Strided&, bool backward, int64_t first, int64_t last, void* packed);
  int64_t (*forward_scratch)(const Problem&);
  bool (*forward)(const Problem&, const Forward&, int64_t first, int64_t last, void* scratch);
  int64_t (*backward_scratch)(const Problem&);
  int64_t (*sums_size)(const Problem&);
  bool (*backward)(const Problem&, const Backward&, int64_t first, int64_t last, void* scratch, void* sums);
  // Adds up the sums of all parts, which lie one behind the other, into the gradients of weights and bias.
  void (*finish)(const Problem&, const void* sums, int64_t parts, int64_t first, int64_t last, const Strided& grad_weight,
                 void* grad_bias);
};

extern const Algorithm direct_algorithm, winograd_algorithm;

}  // namespace lockstep
