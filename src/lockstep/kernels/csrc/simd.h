// Vectors of LANES numbers of type REAL through the compiler's own vector types: one source becomes SSE, AVX2, AVX512 or NEON. Both are
// defined on the compiler's command line, with the processor that it compiles for (build.py).
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <type_traits>
#include <utility>

#include "problem.h"

#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda
#define UNROLL _Pragma("GCC unroll 16")
#pragma GCC diagnostic ignored "-Wpsabi"  // about passing wide vectors between functions, which are all inlined

namespace lockstep {

using Real = REAL;
constexpr int64_t kLanes = LANES;
#if defined(__aarch64__)
constexpr bool kManyRegisters = LANES >= 4;  // NEON has 32 of them; the tiles for them take four lanes at least
#else
constexpr bool kManyRegisters = LANES * sizeof(Real) == 64;  // AVX512 has 32 of them, SSE and AVX2 have 16
#endif
using Int = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;

typedef Real Vec __attribute__((vector_size(sizeof(Real) * LANES)));
typedef Real VecInMemory __attribute__((vector_size(sizeof(Real) * LANES), aligned(sizeof(Real)), may_alias));
typedef Int IntVec __attribute__((vector_size(sizeof(Int) * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(sizeof(Real) * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

struct Bfloat16 {
  uint16_t bits;
};

template <class N>
INLINE N smaller(N a, N b) {
  return a < b ? a : b;
}
template <class N>
INLINE N larger(N a, N b) {
  return a > b ? a : b;
}
INLINE int64_t up_to_multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

INLINE Vec fill(Real value) { return value - Vec{}; }

INLINE Vec load(const Real* from) { return *reinterpret_cast<const VecInMemory*>(from); }
INLINE void store(Real* to, Vec value) { *reinterpret_cast<VecInMemory*>(to) = value; }
INLINE Real load_one(const Real* from) { return *from; }
INLINE void store_one(Real* to, Real value) { *to = value; }

// Lanes in the order that INDEX says; numbers from the count of lanes on are lanes of b.
#if defined(__clang__)
template <class V, class I, int... INDEX>
INLINE V pick(V a, V b) {
  return __builtin_shufflevector(a, b, INDEX...);
}
#else
template <class V, class I, int... INDEX>
INLINE V pick(V a, V b) {
  return __builtin_shuffle(a, b, I{INDEX...});
}
#endif

// Short whole numbers in memory as numbers in lanes. The compiler converts vectors of short numbers one by one, so the instruction that
// does it is named where there is one.
template <class T>
INLINE IntVec widened(const T* from) {
#if defined(__AVX512F__) && LANES == 16
  if constexpr (sizeof(T) == 1) return reinterpret_cast<IntVec>(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
  else return reinterpret_cast<IntVec>(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)));
#elif defined(__AVX2__) && LANES == 8
  if constexpr (sizeof(T) == 1) return reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
  else return reinterpret_cast<IntVec>(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__aarch64__) && LANES == 4
  uint16x4_t halves;
  if constexpr (sizeof(T) == 1) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, from, sizeof(bytes));
    halves = vget_low_u16(vmovl_u8(vcreate_u8(bytes)));
  } else {
    halves = vld1_u16(reinterpret_cast<const uint16_t*>(from));
  }
  return reinterpret_cast<IntVec>(vmovl_u16(halves));
#else
  IntVec value{};
  UNROLL for (int i = 0; i < LANES; i++) value[i] = from[i];
  return value;
#endif
}

// The bytes FIRST to FIRST + WIDTH - 1 of each lane, one behind the other, by a shuffle of bytes.
using EachByte = std::make_integer_sequence<int, sizeof(Bytes)>;
template <int FIRST, int WIDTH, int... I>
INLINE void narrowed(void* to, Bytes bytes, std::integer_sequence<int, I...>) {
  constexpr int kSize = sizeof(Real);
  bytes = pick<Bytes, Bytes, (I < WIDTH * LANES ? I / WIDTH * kSize + FIRST + I % WIDTH : 0)...>(bytes, bytes);
  __builtin_memcpy(to, &bytes, WIDTH * LANES);
}

// The codes of a pool are small whole numbers.
INLINE Vec load(const uint8_t* from) { return __builtin_convertvector(widened(from), Vec); }
INLINE void store(uint8_t* to, Vec value) {
  narrowed<0, 1>(to, reinterpret_cast<Bytes>(__builtin_convertvector(value, IntVec)), EachByte{});
}
INLINE Real load_one(const uint8_t* from) { return *from; }
INLINE void store_one(uint8_t* to, Real value) { *to = static_cast<uint8_t>(value); }

// bfloat16 is the upper half of a float; storing rounds to the nearest, ties to even, and keeps NaN. Only float kernels use it.
template <class W>
INLINE W rounded(W bits) {
  W nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (bits & 0x7fffffffu) > (W{} + 0x7f800000u) ? (W{} + 0x7fc00000u) : nearest;
}
INLINE Vec load(const Bfloat16* from) {
  return reinterpret_cast<Vec>(widened(reinterpret_cast<const uint16_t*>(from)) << 16);
}
INLINE void store(Bfloat16* to, Vec value) {
  Words bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  bits = rounded(bits);
  Bytes bytes{};
  __builtin_memcpy(&bytes, &bits, sizeof(bits));
  narrowed<2, 2>(to, bytes, EachByte{});
}
INLINE Real load_one(const Bfloat16* from) {
  uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
INLINE void store_one(Bfloat16* to, Real value) {
  float number = static_cast<float>(value);
  uint32_t bits;
  __builtin_memcpy(&bits, &number, sizeof(bits));
  to->bits = static_cast<uint16_t>(rounded(bits) >> 16);
}

// NaN stays NaN, as in PyTorch: the comparison with it is false.
constexpr Real kLowest = -static_cast<Real>(__builtin_huge_val());
INLINE Vec at_least(Vec value, Vec least) { return value < least ? least : value; }

INLINE Real total(Vec value) {
  Real sum = 0;
  UNROLL for (int i = 0; i < LANES; i++) sum += value[i];
  return sum;
}

template <int... I>
INLINE Vec evens(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return pick<Vec, IntVec, (2 * I)...>(a, b);
}
template <int... I>
INLINE Vec odds(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return pick<Vec, IntVec, (2 * I + 1)...>(a, b);
}
template <int FROM, int... I>
INLINE Vec interleaved(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return pick<Vec, IntVec, (FROM + I / 2 + (I % 2) * LANES)...>(a, b);
}
// Lanes BY to BY + LANES - 1 of a and what follows it in memory.
template <int BY, int... I>
INLINE Vec shifted(Vec a, Vec behind, std::integer_sequence<int, I...>) {
  static_assert(BY <= LANES);
  return pick<Vec, IntVec, (BY + I)...>(a, behind);
}
template <int... I>
INLINE Vec lane_numbers(std::integer_sequence<int, I...>) {
  return Vec{static_cast<Real>(I)...};
}
using Lanes = std::make_integer_sequence<int, LANES>;

// Exchange the blocks of D x D off the diagonal of a square of 2D x 2D.
template <int D, int... I>
INLINE void exchange_blocks(Vec& upper, Vec& lower, std::integer_sequence<int, I...>) {
  Vec a = upper, b = lower;
  upper = pick<Vec, IntVec, (I & D ? LANES + I - D : I)...>(a, b);
  lower = pick<Vec, IntVec, (I & D ? LANES + I : I + D)...>(a, b);
}
template <int D>
INLINE void transpose_by(Vec (&rows)[LANES]) {
  UNROLL for (int i = 0; i < LANES; i++) {
    if (!(i & D)) exchange_blocks<D>(rows[i], rows[i + D], Lanes{});
  }
  if constexpr (D > 1) transpose_by<D / 2>(rows);
}
INLINE void transpose(Vec (&rows)[LANES]) { transpose_by<LANES / 2>(rows); }

// Beyond these sizes a product of two numbers, summed with the weights of Winograd's transforms, could overflow.
constexpr Real kLargest = static_cast<Real>(1ull << 40);

INLINE IntVec out_of_range(Vec value) { return ~((value < fill(kLargest)) & (value > fill(-kLargest))); }

INLINE bool any(IntVec mask) {
  Int found = 0;
  UNROLL for (int i = 0; i < LANES; i++) found |= mask[i];
  return found != 0;
}

// Winograd's transforms add up all numbers of a tile, and take away again what an output has no part in: what is left of it is rounding,
// about 2 eps of the largest number x the sum of the weights' sizes (measured). So one number far larger than the rest would put its
// rounding on outputs that it does not touch. A bound of N times the mean size keeps that below 2^-13 of a sum of usual numbers;
// images and gradients of nets in training were seen to have a spread of 5 to 20.
constexpr Real kSpread = 1 << 10;

// Whether numbers are of a usual size, and none far larger than the others (zeros aside: after a ReLU there are many).
struct Sizes {
  IntVec found{};
  Vec largest{}, sum{}, count{};
  INLINE void add(Vec value) {
    Vec size = value < Vec{} ? -value : value;
    found |= out_of_range(value);
    largest = size > largest ? size : largest;
    sum += size;
    count += size > Vec{} ? fill(1) : Vec{};
  }
  INLINE bool in_range() const {
    Real most = 0;
    UNROLL for (int i = 0; i < LANES; i++) most = larger<Real>(most, largest[i]);
    return !any(found) && most * total(count) <= kSpread * total(sum);
  }
};

// `count` is a multiple of 16. If any number is infinite or NaN, so is the sum.
inline Real sum_of(const Real* numbers, int64_t count) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    UNROLL for (int j = 0; j < 4; j++) sums[j] += load(numbers + i + j * kLanes);
  }
  for (; i < count; i += kLanes) sums[0] += load(numbers + i);
  return total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
INLINE bool finite(Real value) { return value - value == 0; }

inline void clear(Real* numbers, int64_t count) { __builtin_memset(numbers, 0, static_cast<size_t>(count) * sizeof(Real)); }

// A piece of scratch memory after the other, each on a cache line of its own.
struct Scratch {
  Real* next;
  Real* take(int64_t count) {
    Real* piece = next;
    next += up_to_multiple(count, 64 / static_cast<int64_t>(sizeof(Real)));
    return piece;
  }
};
INLINE int64_t piece(int64_t count) { return up_to_multiple(count, 64 / static_cast<int64_t>(sizeof(Real))); }

}  // namespace lockstep
