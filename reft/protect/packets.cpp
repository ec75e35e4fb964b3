// Executes the steps of reft/protect/rs.py on buffers in host memory: XORs and copies of packets, cell by cell.
//
// One column of every packet is computed at a time in the first-level cache, and then written with non-temporal
// stores, which save reading the target's lines. Sources are prefetched one column ahead, because the hardware
// prefetchers cannot follow so many streams.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GLIBC__)
#define REFT_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define REFT_WIDEST
#endif

namespace {

constexpr size_t kPackets = 8;
constexpr size_t kLineBytes = 64;
constexpr size_t kColumnBytes = 512;

struct Step {
  int64_t target, target_packet, packets, left, left_packet, right, right_packet;  // right < 0 for a copy
};

struct alignas(kLineBytes) Column {
  uint8_t bytes[kColumnBytes];
};

inline __attribute__((always_inline)) void fetch(const uint8_t* from, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i += kLineBytes) __builtin_prefetch(from + i);
}

// The ranges are identical or do not overlap.
inline __attribute__((always_inline)) void xor_into(uint8_t* target, const uint8_t* left, const uint8_t* right,
                                                    size_t nbytes) {
#pragma GCC ivdep
  for (size_t i = 0; i < nbytes; ++i) target[i] = left[i] ^ right[i];
}

inline __attribute__((always_inline)) void write_out(uint8_t* target, const uint8_t* from, size_t nbytes) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(target) % 16 == 0 && nbytes % 16 == 0) {
    for (size_t i = 0; i < nbytes; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
    return;
  }
#endif
  std::memcpy(target, from, nbytes);
}

}  // namespace

// `buffers` holds the addresses of `sources` sources, then of `targets` targets, of `nbytes` each.
// Returns 0, or 1 if there was no memory; then nothing was written.
extern "C" REFT_WIDEST int reft_run_steps(const Step* steps, size_t count, uint8_t* const* buffers, size_t sources,
                                          size_t targets, size_t nbytes, size_t cell_bytes) {
  const std::unique_ptr<Column[]> made(new (std::nothrow) Column[targets * kPackets]);
  if (!made) return 1;
  for (size_t cell = 0; cell < nbytes; cell += cell_bytes) {
    const size_t packet = (nbytes - cell < cell_bytes ? nbytes - cell : cell_bytes) / kPackets;
    for (size_t at = 0; at < packet; at += kColumnBytes) {
      const size_t width = packet - at < kColumnBytes ? packet - at : kColumnBytes;
      const auto find = [&](size_t buffer, size_t number) -> uint8_t* {
        if (buffer >= sources) return made[(buffer - sources) * kPackets + number].bytes;
        uint8_t* found = buffers[buffer] + cell + number * packet + at;
        fetch(found + kColumnBytes, width);
        return found;
      };
      for (const Step* step = steps; step != steps + count; ++step) {
        for (int64_t i = 0; i < step->packets; ++i) {
          uint8_t* target = find(step->target, step->target_packet + i);
          const uint8_t* left = find(step->left, step->left_packet + i);
          if (step->right < 0)
            std::memcpy(target, left, width);
          else
            xor_into(target, left, find(step->right, step->right_packet + i), width);
        }
      }
      for (size_t t = 0; t < targets; ++t)
        for (size_t p = 0; p < kPackets; ++p)
          write_out(buffers[sources + t] + cell + p * packet + at, made[t * kPackets + p].bytes, width);
    }
  }
#if defined(__SSE2__)
  // Non-temporal stores are weakly ordered: the data must be visible before the caller publishes it.
  _mm_sfence();
#endif
  return 0;
}
