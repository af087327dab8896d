// Runs CUDA source on the CPU, to test its arithmetic where there is no GPU: every CUDA thread of a block is a context of its own, and a
// barrier hands over to the next one. Races, warps, alignment and speed are not those of a GPU, and nothing here shows them.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
using cudaStream_t = void*;

#define __global__ static
#define __device__ static
#define __forceinline__ inline
#define __restrict__
#define __shared__ static thread_local  // one block runs at a time

namespace shim {

constexpr size_t kStack = 64 << 10;

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  dim3 index;
  bool done = false;
};

struct Block {
  std::vector<Thread> threads;
  ucontext_t scheduler;
  size_t current = 0;
  const std::function<void()>* kernel = nullptr;
};
inline thread_local Block block;

inline void enter() {
  (*block.kernel)();
  block.threads[block.current].done = true;
  swapcontext(&block.threads[block.current].context, &block.scheduler);
}

inline void barrier() {
  swapcontext(&block.threads[block.current].context, &block.scheduler);
  threadIdx = block.threads[block.current].index;
}

// Each round takes every thread of the block to its next barrier, or to its end.
inline void run_block() {
  size_t left = block.threads.size();
  for (size_t i = 0; i < block.threads.size(); i++) {
    Thread& thread = block.threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &block.scheduler;
    thread.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
    thread.done = false;
    makecontext(&thread.context, enter, 0);
  }
  while (left > 0) {
    for (block.current = 0; block.current < block.threads.size(); block.current++) {
      Thread& thread = block.threads[block.current];
      if (thread.done) continue;
      threadIdx = thread.index;
      swapcontext(&block.scheduler, &thread.context);
      left -= thread.done;
    }
  }
}

inline void launch(dim3 grid, dim3 size, const std::function<void()>& kernel) {
  gridDim = grid;
  blockDim = size;
  block.threads.resize(size_t{size.x} * size.y * size.z);
  block.kernel = &kernel;
  for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block();
    }
  }
}

}  // namespace shim

#define __syncthreads() shim::barrier()
#define LAUNCH(kernel, grid, size, stream, ...) shim::launch(grid, size, [&] { kernel(__VA_ARGS__); })
#define LAUNCHED() ((void)stream, 0)
