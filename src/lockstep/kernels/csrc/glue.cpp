// What Python calls: plain C functions on pointers. They divide the batch among the threads of the OpenMP pool that PyTorch uses too.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "linear.h"
#include "problem.h"

namespace lockstep {
namespace {

constexpr int64_t kReal = sizeof(REAL);  // bytes of the kernels' own numbers

// Of what each part has for itself: of wide layers not more than a quarter of a gigabyte.
constexpr int64_t kMostMemory = int64_t{1} << 28;

enum Answer { kDone = 0, kNotFinite = 1, kNoMemory = 2 };

// Memory that a thread keeps from call to call: what malloc gives back to the system has to be faulted in again.
class Room {
 public:
  ~Room() { std::free(data_); }
  char* of(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 63) / 64 * 64;
      data_ = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size_)));
      if (!data_) size_ = 0;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};
thread_local Room scratch_room, weights_room, sums_room;

// Task 0 to count - 1, divided among the threads; the worst answer counts.
template <class Task>
int each(int64_t count, const Task& task) {
  if (count == 1) return task(0);
  std::atomic<int> worst{kDone};
#pragma omp parallel
  for (int64_t i = omp_get_thread_num(); i < count; i += omp_get_num_threads()) {
    int answer = task(i);
    if (answer > worst) worst = answer;
  }
  return worst;
}

// The numbers that Python passes, in this order (native.py).
struct Job {
  Problem p;
  Strided weight;
  const Algorithm* algorithm;
  int64_t threads = omp_get_max_threads();

  Job(const int64_t* n, const void* weights) {
    p = {n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8] != 0, n[9] != 0, n[10] != 0, n[11] ? Type::bfloat16 : Type::real};
    weight = {const_cast<void*>(weights), n[12], n[13], n[14], n[15]};
    algorithm = n[0] ? &winograd_algorithm : &direct_algorithm;
  }

  // Weights are many enough to be worth dividing from here on.
  int64_t pieces(int64_t rows) const { return p.in_channels * p.out_channels >= 4096 ? std::min(threads, rows) : 1; }

  int pack(bool backward, int64_t count, const void*& packed) const {
    char* room = weights_room.of(algorithm->weights_size(p) * kReal);
    packed = room;
    if (!room) return kNoMemory;
    int64_t rows = backward ? p.out_channels : p.in_channels;
    return each(count, [&](int64_t i) {
      return algorithm->pack_weights(p, weight, backward, rows * i / count, rows * (i + 1) / count, room) ? kDone : kNotFinite;
    });
  }

  // Whether each part packs all the weights for itself. A core may be slow to read what another has just written: on two of them (Zen 4)
  // the wide layers of cifar-vgg take a twelfth less time so. It does not pay for parts of a few images, and has to fit into memory.
  bool packs_alone(int64_t parts) const {
    return parts > 1 && p.batch >= 8 * parts && parts * algorithm->weights_size(p) * kReal <= kMostMemory;
  }

  // The work on each part of the batch: `work(first, last, weights, scratch, part)` says whether the numbers were in range.
  template <class Work>
  int on_parts(int64_t parts, bool backward, bool wants_weights, int64_t scratch, const Work& work) const {
    bool alone = packs_alone(parts);
    const void* common = nullptr;
    if (wants_weights && !alone) {
      if (int answer = pack(backward, pieces(backward ? p.out_channels : p.in_channels), common)) return answer;
    }
    return each(parts, [&](int64_t i) -> int {
      const void* weights = common;
      if (wants_weights && alone) {
        if (int answer = pack(backward, 1, weights)) return answer;
      }
      char* room = scratch_room.of(scratch * kReal);
      if (!room) return kNoMemory;
      return work(p.batch * i / parts, p.batch * (i + 1) / parts, weights, room, i) ? kDone : kNotFinite;
    });
  }
};

}  // namespace
}  // namespace lockstep

using namespace lockstep;
#define EXPORTED extern "C" __attribute__((visibility("default")))

// Each returns 0 when it is done, 1 where the numbers are too large or not numbers (nothing is written that counts), 2 for want of memory.
EXPORTED int lockstep_forward(const int64_t* numbers, const void* x, const void* weight, const void* bias, void* y, uint8_t* code) {
  Job job(numbers, weight);
  return job.on_parts(std::min(job.threads, job.p.batch), false, true, job.algorithm->forward_scratch(job.p),
                      [&](int64_t first, int64_t last, const void* weights, void* scratch, int64_t) {
                        return job.algorithm->forward(job.p, Forward{x, weights, bias, y, code}, first, last, scratch);
                      });
}

// `kept` is y, or with a pool its code; without a ReLU nobody looks at it. grad_x may be nullptr. grad_weight lies as weight does.
EXPORTED int lockstep_backward(const int64_t* numbers, const void* grad, const void* kept, const void* x, const void* weight,
                                 void* grad_x, void* grad_weight, void* grad_bias) {
  Job job(numbers, weight);
  const Problem& p = job.p;
  int64_t size = job.algorithm->sums_size(p) * kReal;
  int64_t parts = std::max<int64_t>(1, std::min({job.threads, p.batch, kMostMemory / size}));
  char* sums = sums_room.of(parts * size);
  if (!sums) return kNoMemory;
  const void* y = p.pool ? nullptr : kept;
  const uint8_t* code = p.pool ? static_cast<const uint8_t*>(kept) : nullptr;
  int answer = job.on_parts(parts, true, grad_x != nullptr, job.algorithm->backward_scratch(p),
                            [&](int64_t first, int64_t last, const void* weights, void* scratch, int64_t part) {
                              Backward a{grad, y, code, x, weights, grad_x};
                              return job.algorithm->backward(p, a, first, last, scratch, sums + part * size);
                            });
  if (answer) return answer;
  Strided to = job.weight;
  to.data = grad_weight;
  int64_t rows = p.in_channels, count = job.pieces(rows);
  return each(count, [&](int64_t i) {
    job.algorithm->finish(p, sums, parts, rows * i / count, rows * (i + 1) / count, to, grad_bias);
    return kDone;
  });
}

// Sizes: rows, inputs, outputs.
EXPORTED void lockstep_linear_forward(const int64_t* sizes, const REAL* x, const REAL* weight, const REAL* bias, REAL* y) {
  linear::forward({sizes[0], sizes[1], sizes[2]}, x, weight, bias, y);
}

EXPORTED void lockstep_linear_backward(const int64_t* sizes, const REAL* grad, const REAL* x, const REAL* weight, REAL* grad_x,
                                       REAL* grad_weight, REAL* grad_bias) {
  linear::backward({sizes[0], sizes[1], sizes[2]}, grad, x, weight, grad_x, grad_weight, grad_bias);
}
