// Copies within host memory that leave the target out of the caches: what is only written need not be read
// first, which saves a third of the memory traffic of a copy, and the source stays in the cache, for a checksum.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kPages = 4;  // side by side: each has rows of its own in memory, which stay open longer
constexpr size_t kLineBytes = 64;
constexpr size_t kAheadBytes = 256;

}  // namespace
#endif

// The ranges do not overlap.
extern "C" void reft_copy_past_caches(uint8_t* target, const uint8_t* source, size_t nbytes) {
#if defined(__SSE2__)
  const size_t head = (16 - reinterpret_cast<uintptr_t>(target) % 16) % 16;
  if (nbytes >= head + kPages * kPageBytes) {
    std::memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    for (; nbytes >= kPages * kPageBytes; nbytes -= kPages * kPageBytes) {
      for (size_t line = 0; line < kPageBytes; line += kLineBytes) {
        for (size_t at = line; at < kPages * kPageBytes; at += kPageBytes) {
          __builtin_prefetch(source + at + kAheadBytes);
          __m128i part[kLineBytes / 16];
          for (size_t i = 0; i < kLineBytes / 16; ++i)
            part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at) + i);
          for (size_t i = 0; i < kLineBytes / 16; ++i)
            _mm_stream_si128(reinterpret_cast<__m128i*>(target + at) + i, part[i]);
        }
      }
      target += kPages * kPageBytes, source += kPages * kPageBytes;
    }
    _mm_sfence();
  }
#endif
  std::memcpy(target, source, nbytes);
}
