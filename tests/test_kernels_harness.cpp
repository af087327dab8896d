// Runs the kernels without PyTorch, on buffers of exactly the right size, against a plain sum in double precision. Built by
// tests/test_kernels_build.py with the address and undefined-behaviour sanitizers, once for each width of vectors.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "linear.h"
#include "problem.h"

using namespace lockstep;
using Numbers = std::vector<float>;

struct Case {
  Problem p;
  const char* way;
};

Numbers draw(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Numbers numbers(count);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

// Memory with nothing around it that may be touched.
template <class T>
struct Exact {
  T* data;
  explicit Exact(int64_t count) : data(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64))) {}
  ~Exact() { std::free(data); }
};

int64_t at(const Problem& p, int64_t channels, int64_t height, int64_t width, int64_t n, int64_t c, int64_t y, int64_t x) {
  return p.channels_last ? ((n * height + y) * width + x) * channels + c : ((n * channels + c) * height + y) * width + x;
}

double worst(const Numbers& found, const std::vector<double>& wanted) {
  double error = 0, size = 1e-30;
  for (size_t i = 0; i < wanted.size(); i++) {
    error = std::fmax(error, std::fabs(found[i] - wanted[i]));
    size = std::fmax(size, std::fabs(wanted[i]));
    if (std::isnan(found[i])) return 1e9;
  }
  return error / size;
}

bool run(const Case& one) {
  const Problem& p = one.p;
  const Algorithm& a = std::strcmp(one.way, "direct") == 0 ? direct_algorithm : winograd_algorithm;
  int64_t height = p.out_height(), width = p.out_width(), yh = p.y_height(), yw = p.y_width(), k = p.kernel;
  Numbers x = draw(p.batch * p.in_channels * p.height * p.width, 1), w = draw(p.out_channels * p.in_channels * k * k, 2);
  Numbers b = draw(p.out_channels, 3), grad = draw(p.batch * p.out_channels * yh * yw, 4);
  Numbers y(grad.size()), grad_x(x.size()), grad_w(w.size()), grad_b(b.size());
  std::vector<uint8_t> code(y.size());
  Strided weights{w.data(), p.in_channels * k * k, k * k, k, 1}, grad_weights{grad_w.data(), p.in_channels * k * k, k * k, k, 1};

  Exact<float> packed(a.weights_size(p)), back(a.weights_size(p));
  Exact<float> scratch(std::max(a.forward_scratch(p), a.backward_scratch(p)));
  int64_t parts = p.batch > 1 ? 2 : 1, size = a.sums_size(p), middle = parts == 2 ? p.batch / 2 : p.batch;
  Exact<float> sums(parts * size);
  bool tame = a.pack_weights(p, weights, false, 0, p.in_channels, packed.data) &&
              a.pack_weights(p, weights, true, 0, p.out_channels, back.data);
  Forward forward{x.data(), packed.data, b.data(), y.data(), p.pool ? code.data() : nullptr};
  Backward backward{grad.data(), p.pool ? nullptr : y.data(), p.pool ? code.data() : nullptr, x.data(), back.data, grad_x.data()};
  for (int64_t part = 0; part < parts; part++) {
    int64_t first = part ? middle : 0, last = part || parts == 1 ? p.batch : middle;
    tame = tame && a.forward(p, forward, first, last, scratch.data);
    tame = tame && a.backward(p, backward, first, last, scratch.data, sums.data + part * size);
  }
  a.finish(p, sums.data, parts, 0, p.in_channels, grad_weights, grad_b.data());

  std::vector<double> outputs(p.batch * p.out_channels * height * width), results(y.size()), gx(x.size()), gw(w.size()), gb(b.size());
  auto each_tap = [&](auto&& visit) {
    for (int64_t n = 0; n < p.batch; n++)
      for (int64_t o = 0; o < p.out_channels; o++)
        for (int64_t r = 0; r < height; r++)
          for (int64_t c = 0; c < width; c++)
            for (int64_t i = 0; i < p.in_channels; i++)
              for (int64_t t = 0; t < k * k; t++) {
                int64_t row = r + t / k - p.padding, column = c + t % k - p.padding;
                if (row < 0 || row >= p.height || column < 0 || column >= p.width) continue;
                visit(((n * p.out_channels + o) * height + r) * width + c, o,
                      at(p, p.in_channels, p.height, p.width, n, i, row, column), (o * p.in_channels + i) * k * k + t);
              }
  };
  for (size_t i = 0; i < outputs.size(); i++) outputs[i] = b[i / (height * width) % p.out_channels];
  each_tap([&](int64_t to, int64_t, int64_t from, int64_t weight) { outputs[to] += double(x[from]) * w[weight]; });
  std::vector<double> output_grad(outputs.size());
  for (int64_t n = 0; n < p.batch; n++)
    for (int64_t o = 0; o < p.out_channels; o++)
      for (int64_t r = 0; r < yh; r++)
        for (int64_t c = 0; c < yw; c++) {
          int64_t plane = (n * p.out_channels + o) * height * width, step = p.pool ? 2 : 1, best = 0;
          for (int64_t q = 0; q < step * step; q++) {
            int64_t place = plane + (step * r + q / 2) * width + step * c + q % 2;
            if (q == 0 || outputs[place] > outputs[best]) best = place;
          }
          int64_t where = at(p, p.out_channels, yh, yw, n, o, r, c);
          bool passes = !p.relu || outputs[best] > 0;
          results[where] = passes ? outputs[best] : 0;
          if (passes) output_grad[best] = grad[where];
          gb[o] += passes ? grad[where] : 0;
        }
  each_tap([&](int64_t to, int64_t, int64_t from, int64_t weight) {
    gx[from] += output_grad[to] * w[weight];
    gw[weight] += output_grad[to] * x[from];
  });
  double found[] = {worst(y, results), worst(grad_x, gx), worst(grad_w, gw), worst(grad_b, gb)};
  bool good = tame;
  for (double error : found) good = good && error < 1e-4;
  std::printf("%s %-8s n%ld %ld->%ld %ldx%ld k%ld p%ld relu%d pool%d cl%d: y %.1e gx %.1e gw %.1e gb %.1e\n", good ? "ok " : "BAD",
              one.way, long(p.batch), long(p.in_channels), long(p.out_channels), long(p.height), long(p.width), long(k),
              long(p.padding), p.relu, p.pool, p.channels_last, found[0], found[1], found[2], found[3]);
  return good;
}

bool run_linear(const linear::Shape& n) {
  Numbers x = draw(n.rows * n.inputs, 1), w = draw(n.outputs * n.inputs, 2), b = draw(n.outputs, 3), grad = draw(n.rows * n.outputs, 4);
  Numbers y(grad.size()), grad_x(x.size()), grad_w(w.size()), grad_b(b.size());
  linear::forward(n, x.data(), w.data(), b.data(), y.data());
  linear::backward(n, grad.data(), x.data(), w.data(), grad_x.data(), grad_w.data(), grad_b.data());
  std::vector<double> wanted(y.size()), gx(x.size()), gw(w.size()), gb(b.size());
  for (int64_t r = 0; r < n.rows; r++)
    for (int64_t o = 0; o < n.outputs; o++) {
      double g = grad[r * n.outputs + o], sum = b[o];
      gb[o] += g;
      for (int64_t i = 0; i < n.inputs; i++) {
        sum += double(x[r * n.inputs + i]) * w[o * n.inputs + i];
        gx[r * n.inputs + i] += g * w[o * n.inputs + i];
        gw[o * n.inputs + i] += g * x[r * n.inputs + i];
      }
      wanted[r * n.outputs + o] = sum;
    }
  double found[] = {worst(y, wanted), worst(grad_x, gx), worst(grad_w, gw), worst(grad_b, gb)};
  bool good = true;
  for (double error : found) good = good && error < 1e-5;
  std::printf("%s linear %ldx%ld->%ld: y %.1e gx %.1e gw %.1e gb %.1e\n", good ? "ok " : "BAD", long(n.rows), long(n.inputs),
              long(n.outputs), found[0], found[1], found[2], found[3]);
  return good;
}

int main() {
  std::vector<Case> cases;
  for (bool last : {false, true}) {
    for (int tail : {0, 1, 2}) {  // nothing, ReLU, ReLU and pool
      auto add = [&](int64_t n, int64_t i, int64_t o, int64_t h, int64_t w, int64_t k, int64_t pad, const char* way) {
        cases.push_back({{n, i, o, h, w, k, pad, tail > 0, tail > 1, last, Type::real}, way});
      };
      add(2, 1, 4, 28, 28, 3, 1, "direct");
      add(3, 4, 8, 14, 14, 3, 1, "direct");
      add(1, 3, 17, 9, 33, 3, 0, "direct");
      add(2, 5, 3, 6, 5, 3, 2, "direct");
      add(1, 2, 9, 11, 7, 5, 2, "direct");
      add(1, 9, 2, 8, 19, 1, 0, "direct");
      add(3, 16, 16, 8, 8, 3, 1, "winograd");
      add(2, 17, 26, 7, 13, 3, 1, "winograd");
      add(1, 32, 16, 3, 5, 3, 0, "winograd");
      add(1, 20, 40, 2, 2, 3, 2, "winograd");
    }
  }
  bool good = true;
  for (const Case& one : cases) good = run(one) && good;
  for (const linear::Shape& n : {linear::Shape{32, 392, 10}, {1, 7, 3}, {5, 33, 16}, {3, 47, 1}}) good = run_linear(n) && good;
  return good ? 0 : 1;
}
