// Copies within host memory with non-temporal stores, which bypass the caches. A normal store reads the target's line
// into the cache first; avoiding that saves a third of a copy's memory traffic. A copy can also compute the checksum of
// its bytes (XXH3-64, equal to the xxhash package's) at little extra cost, because every byte is loaded only once.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kPages = 4;  // pages copied in parallel: each page has its own DRAM rows, which stay open longer
constexpr size_t kGroupBytes = kPages * kPageBytes;
constexpr size_t kLineBytes = 64;  // size of a cache line, and of a stripe of XXH3
constexpr size_t kAheadBytes = 256, kFarAheadBytes = 1024;

// XXH3 sums the stripes of a block of 1 KiB and then scrambles the sums, so several blocks can be summed in parallel.
// See the XXH3 specification in https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
constexpr size_t kStripes = 16;
constexpr size_t kBlockBytes = kStripes * kLineBytes;
constexpr size_t kGroupBlocks = kGroupBytes / kBlockBytes;
constexpr size_t kParts = kLineBytes / sizeof(__m128i);

alignas(16) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
constexpr size_t kLastSecretAt = sizeof(kSecret) - kLineBytes - 7;
constexpr size_t kMergeSecretAt = 11;

constexpr uint32_t kPrime32 = 0x9E3779B1U;
constexpr uint64_t kStart[8] = {0xC2B2AE3DU,           0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL,
                                0x165667B19E3779F9ULL, 0x85EBCA77C2B2AE63ULL, 0x85EBCA77U,
                                0x27D4EB2F165667C5ULL, kPrime32};

struct Sums {
  __m128i part[kParts];
};

inline __m128i load(const uint8_t* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }

inline void add_part(__m128i& sum, __m128i data, const uint8_t* secret) {
  const __m128i keyed = _mm_xor_si128(data, load(secret));
  const __m128i product = _mm_mul_epu32(keyed, _mm_shuffle_epi32(keyed, _MM_SHUFFLE(0, 3, 0, 1)));
  const __m128i swapped = _mm_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
  sum = _mm_add_epi64(sum, _mm_add_epi64(product, swapped));
}

inline void add_stripe(Sums& sums, const uint8_t* data, const uint8_t* secret) {
  for (size_t i = 0; i < kParts; ++i) add_part(sums.part[i], load(data + 16 * i), secret + 16 * i);
}

// Merges the sums of a complete block into the accumulators.
inline void scramble(Sums& sums, const Sums& block) {
  const __m128i prime = _mm_set1_epi32(static_cast<int>(kPrime32));
  for (size_t i = 0; i < kParts; ++i) {
    __m128i x = _mm_add_epi64(sums.part[i], block.part[i]);
    x = _mm_xor_si128(x, _mm_srli_epi64(x, 47));
    x = _mm_xor_si128(x, load(kSecret + sizeof(kSecret) - kLineBytes + 16 * i));
    const __m128i high = _mm_mul_epu32(_mm_srli_epi64(x, 32), prime);
    sums.part[i] = _mm_add_epi64(_mm_mul_epu32(x, prime), _mm_slli_epi64(high, 32));
  }
}

inline void hash_block(Sums& sums, const uint8_t* data) {
  Sums block{};
  for (size_t i = 0; i < kStripes; ++i) add_stripe(block, data + i * kLineBytes, kSecret + 8 * i);
  scramble(sums, block);
}

inline uint64_t lowest_bits(uint64_t exponents) { return exponents & ~(exponents << 1); }

// Returns a value other than 0 if the bytes contain a NaN or an infinity. ``exponents`` masks the exponent bits of the
// floating-point numbers. A number is not finite if all its exponent bits are 1: then adding the lowest of them carries
// into the sign bit.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
uint64_t not_finite(const uint8_t* source, size_t nbytes, uint64_t exponents) {
  const uint64_t lowest = lowest_bits(exponents);
  uint64_t found = 0;
  for (; nbytes >= 8; source += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, source, 8);
    found |= (word & exponents) + lowest;
  }
  uint64_t rest = 0;
  std::memcpy(&rest, source, nbytes);
  return (found | ((rest & exponents) + lowest)) & (exponents + lowest);
}

#define REFT_AVX2 __attribute__((target("avx2")))

// AVX2 is enabled for these functions only, so that the library loads on every x86-64.
REFT_AVX2 inline __m256i load_wide(const uint8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

REFT_AVX2 inline __m256i add_wide(__m256i sum, __m256i data, const uint8_t* secret) {
  const __m256i keyed = _mm256_xor_si256(data, load_wide(secret));
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_shuffle_epi32(keyed, _MM_SHUFFLE(0, 3, 0, 1)));
  const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(sum, _mm256_add_epi64(product, swapped));
}

REFT_AVX2 inline __m256i scramble_wide(__m256i x, const uint8_t* secret) {
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32));
  x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, 47)), load_wide(secret));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
}

// The same check as not_finite, on bytes that are in registers already.
struct Look {
  __m256i wanted, lowest, found;
  uint64_t mask;

  REFT_AVX2 explicit Look(uint64_t exponents)
      : wanted(_mm256_set1_epi64x(static_cast<long long>(exponents))),
        lowest(_mm256_set1_epi64x(static_cast<long long>(lowest_bits(exponents)))),
        found(_mm256_setzero_si256()),
        mask(exponents + lowest_bits(exponents)) {}
  REFT_AVX2 inline void at(__m256i data) {
    found = _mm256_or_si256(found, _mm256_add_epi64(_mm256_and_si256(data, wanted), lowest));
  }
  REFT_AVX2 inline uint64_t result() const {
    uint64_t lanes[4];
    std::memcpy(lanes, &found, sizeof(lanes));
    return (lanes[0] | lanes[1] | lanes[2] | lanes[3]) & mask;
  }
};

constexpr size_t kWide = kLineBytes / sizeof(__m256i);

// First copy loop: kPages pages in parallel, each with its own DRAM rows. On some processors this is the fastest loop.
// On others it is several times slower if source and target have the same offset within a page, because they then
// compete for the same few cache sets. Copies kGroupBytes to a target that is aligned to a cache line.
template <bool kHashes>
REFT_AVX2 uint64_t copy_pages_avx2(uint8_t* target, const uint8_t* source, Sums& sums, uint64_t exponents) {
  Look look(exponents);
  Sums blocks[kGroupBlocks];
  for (size_t block = 0; block < kPageBytes / kBlockBytes; ++block) {
    __m256i running[kPages][kWide];
    for (size_t page = 0; page < kPages; ++page)
      for (size_t i = 0; i < kWide; ++i) running[page][i] = _mm256_setzero_si256();
    for (size_t stripe = 0; stripe < kStripes; ++stripe) {
      for (size_t page = 0; page < kPages; ++page) {
        const size_t at = page * kPageBytes + block * kBlockBytes + stripe * kLineBytes;
        _mm_prefetch(reinterpret_cast<const char*>(source + at + kAheadBytes), _MM_HINT_T0);
        for (size_t i = 0; i < kWide; ++i) {
          const __m256i data = load_wide(source + at + 32 * i);
          _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at) + i, data);
          if (kHashes) {
            look.at(data);
            running[page][i] = add_wide(running[page][i], data, kSecret + 8 * stripe + 32 * i);
          }
        }
      }
    }
    if (kHashes)
      for (size_t page = 0; page < kPages; ++page)
        std::memcpy(&blocks[page * (kPageBytes / kBlockBytes) + block], running[page], sizeof(Sums));
  }
  if (kHashes)
    for (const Sums& block : blocks) scramble(sums, block);
  return look.result();
}

// Second copy loop: hash a piece, which loads it into the cache, then copy it from there in order. Its speed does not
// depend on the alignment of source and target.
REFT_AVX2 uint64_t hash_blocks_avx2(Sums& sums, const uint8_t* source, size_t nbytes, uint64_t exponents) {
  Look look(exponents);
  __m256i running[kWide];
  std::memcpy(running, &sums, sizeof(sums));
  for (; nbytes; nbytes -= kBlockBytes, source += kBlockBytes) {
    for (size_t stripe = 0; stripe < kStripes; ++stripe) {
      const uint8_t* at = source + stripe * kLineBytes;
      _mm_prefetch(reinterpret_cast<const char*>(at + kFarAheadBytes), _MM_HINT_T0);
      for (size_t i = 0; i < kWide; ++i) {
        const __m256i data = load_wide(at + 32 * i);
        look.at(data);
        running[i] = add_wide(running[i], data, kSecret + 8 * stripe + 32 * i);
      }
    }
    for (size_t i = 0; i < kWide; ++i)
      running[i] = scramble_wide(running[i], kSecret + sizeof(kSecret) - kLineBytes + 32 * i);
  }
  std::memcpy(&sums, running, sizeof(sums));
  return look.result();
}

REFT_AVX2 void stream_avx2(uint8_t* target, const uint8_t* source, size_t nbytes) {
  for (size_t at = 0; at < nbytes; at += 4 * sizeof(__m256i)) {
    __m256i data[4];
    for (size_t i = 0; i < 4; ++i) data[i] = load_wide(source + at + 32 * i);
    for (size_t i = 0; i < 4; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(target + at) + i, data[i]);
  }
}

bool uses_avx2 = __builtin_cpu_supports("avx2");
size_t piece_bytes = kPageBytes;  // size of a piece, hashed before it is copied; 0 selects parallel pages

// hash_blocks and copy_blocks take whole blocks of kBlockBytes.
inline uint64_t hash_blocks(Sums& sums, const uint8_t* source, size_t nbytes, uint64_t exponents) {
  if (uses_avx2) return hash_blocks_avx2(sums, source, nbytes, exponents);
  for (size_t at = 0; at < nbytes; at += kBlockBytes) hash_block(sums, source + at);
  return exponents ? not_finite(source, nbytes, exponents) : 0;
}

inline void copy_blocks(uint8_t* target, const uint8_t* source, size_t nbytes) {
  if (!target) return;
  // Non-temporal stores that straddle two cache lines were measured to take twice as long.
  if (uses_avx2 && reinterpret_cast<uintptr_t>(target) % kLineBytes == 0) stream_avx2(target, source, nbytes);
  else std::memcpy(target, source, nbytes);
}

// State of a hash. A block is merged only when more bytes follow it, because XXH3 treats the last block differently.
struct Hash {
  uint64_t sums[8];
  uint64_t total;                           // bytes hashed
  uint64_t not_finite;                      // not 0 if the hashed bytes contained a NaN or an infinity
  uint8_t held[kLineBytes + kBlockBytes];  // bytes that are not merged yet, after the line that precedes them

  uint8_t* open() { return held + kLineBytes; }
  size_t open_bytes() const { return total ? (total - 1) % kBlockBytes + 1 : 0; }
};

inline Sums load_sums(const Hash& hash) {
  Sums sums;
  std::memcpy(&sums, hash.sums, sizeof(sums));
  return sums;
}

inline void copy(uint8_t* target, const uint8_t* source, size_t nbytes) {
  if (target) std::memcpy(target, source, nbytes);
}

// If ``target`` is null, the bytes are only hashed.
void copy_and_hash(Hash& hash, uint8_t* target, const uint8_t* source, size_t nbytes, uint64_t exponents) {
  const size_t open_bytes = hash.open_bytes();
  const size_t head = nbytes < kBlockBytes - open_bytes ? nbytes : kBlockBytes - open_bytes;
  const auto look = [&](size_t count) {  // checks bytes that are in the cache
    if (exponents) hash.not_finite |= not_finite(source, count, exponents);
  };
  const auto advance = [&](size_t count) {
    hash.total += count, source += count, nbytes -= count;
    if (target) target += count;
  };
  if (open_bytes || nbytes <= kBlockBytes) {
    std::memcpy(hash.open() + open_bytes, source, head);
    copy(target, source, head);
    look(head);
    advance(head);
    if (!nbytes) return;
  }
  Sums sums = load_sums(hash);
  if (open_bytes) {
    hash_block(sums, hash.open());
    std::memcpy(hash.held, hash.open() + kBlockBytes - kLineBytes, kLineBytes);
  }
  if (nbytes > kBlockBytes) {
    const bool side_by_side = target && uses_avx2 && !piece_bytes && reinterpret_cast<uintptr_t>(target) % kLineBytes == 0;
    for (; side_by_side && nbytes > kGroupBytes; advance(kGroupBytes))
      hash.not_finite |= copy_pages_avx2<true>(target, source, sums, exponents);
    const size_t most = piece_bytes ? piece_bytes : kGroupBytes;
    while (nbytes > kBlockBytes) {
      const size_t whole = (nbytes - 1) / kBlockBytes * kBlockBytes, piece = whole < most ? whole : most;
      hash.not_finite |= hash_blocks(sums, source, piece, exponents);
      copy_blocks(target, source, piece);
      advance(piece);
    }
    std::memcpy(hash.held, source - kLineBytes, kLineBytes);
  }
  std::memcpy(hash.open(), source, nbytes);
  copy(target, source, nbytes);
  look(nbytes);
  advance(nbytes);
  std::memcpy(hash.sums, &sums, sizeof(sums));
}

inline uint64_t folded_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

// Switches AVX2 on (the default) or off, for tests and benchmarks. Returns whether it is used.
extern "C" int reft_use_avx2(int wanted) {
  uses_avx2 = wanted && __builtin_cpu_supports("avx2");
  return uses_avx2;
}

extern "C" void reft_hash_reset(Hash* hash) {
  std::memcpy(hash->sums, kStart, sizeof(kStart));
  hash->total = hash->not_finite = 0;
}

struct Range {
  uint8_t* target;  // null if the bytes are only hashed
  const uint8_t* source;
  size_t nbytes;
  uint64_t exponents;  // see not_finite

  // Returns whether ``next`` starts where this range ends, as with a tensor that was split into chunks.
  bool continues_in(const Range& next) const {
    return source + nbytes == next.source && (target ? target + nbytes == next.target : !next.target) &&
           exponents == next.exponents;
  }
};

extern "C" void reft_copy_and_hash(Hash* hash, const Range* ranges, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Range range = ranges[i];
    for (; i + 1 < count && range.continues_in(ranges[i + 1]); ++i) range.nbytes += ranges[i + 1].nbytes;
    copy_and_hash(*hash, range.target, range.source, range.nbytes, range.exponents);
  }
  // Non-temporal stores are weakly ordered. Without this fence, the header that says SEALED could become visible to
  // another process before the data.
  _mm_sfence();
}

// Copies and hashes the chunks [first, stop); chunk i ends before row ``ends[i]``. Once ``*until`` is not 0, no further
// chunk begins, but at least one is copied. Returns the number of chunks copied.
extern "C" size_t reft_copy_chunks(Hash* hash, const Range* ranges, const uint64_t* ends, size_t first, size_t stop,
                                   const int* until) {
  size_t row = first ? ends[first - 1] : 0, chunk = first;
  do {
    const size_t end = until ? ends[chunk] : ends[stop - 1];
    reft_copy_and_hash(hash, ranges + row, end - row);
    row = end, ++chunk;
    // The flag is shared with Python. A relaxed load suffices, because the flag guards no memory: training waits for a
    // lock that the caller releases after this returns, and that lock orders the copies. If the flag is seen late, one
    // more chunk is copied.
  } while (until && chunk < stop && !__atomic_load_n(until, __ATOMIC_RELAXED));
  return until ? chunk - first : stop - first;
}

// Returns the digest of more than 240 bytes. XXH3 has other formulas for shorter inputs, which the caller finds in
// ``held`` completely.
extern "C" uint64_t reft_hash_digest(Hash* hash) {
  Sums sums = load_sums(*hash);
  const size_t open_bytes = hash->open_bytes();
  for (size_t i = 0; i < (open_bytes - 1) / kLineBytes; ++i)
    add_stripe(sums, hash->open() + i * kLineBytes, kSecret + 8 * i);
  add_stripe(sums, hash->open() + open_bytes - kLineBytes, kSecret + kLastSecretAt);
  uint64_t acc[8], secret[8];
  std::memcpy(acc, &sums, sizeof(acc));
  std::memcpy(secret, kSecret + kMergeSecretAt, sizeof(secret));
  uint64_t result = hash->total * 0x9E3779B185EBCA87ULL;
  for (size_t i = 0; i < 8; i += 2) result += folded_product(acc[i] ^ secret[i], acc[i + 1] ^ secret[i + 1]);
  result = (result ^ (result >> 37)) * 0x165667919E3779F9ULL;
  return result ^ (result >> 32);
}
#endif

// Source and target must not overlap.
extern "C" void reft_copy_past_caches(uint8_t* target, const uint8_t* source, size_t nbytes) {
#if defined(__x86_64__)
  const size_t head = -reinterpret_cast<uintptr_t>(target) % kLineBytes;
  if (uses_avx2 && nbytes >= head + kGroupBytes) {
    std::memcpy(target, source, head);
    target += head, source += head, nbytes -= head;
    Sums unused;
    for (; !piece_bytes && nbytes >= kGroupBytes; nbytes -= kGroupBytes, target += kGroupBytes, source += kGroupBytes)
      copy_pages_avx2<false>(target, source, unused, 0);
    const size_t whole = nbytes / kBlockBytes * kBlockBytes;
    stream_avx2(target, source, whole);
    target += whole, source += whole, nbytes -= whole;
    // Non-temporal stores are weakly ordered: the copied data must be visible before the header that describes it.
    _mm_sfence();
  }
#endif
  std::memcpy(target, source, nbytes);
}

#if defined(__x86_64__)
// Selects the copy loop: pieces of ``nbytes``, a multiple of 1 KiB, or parallel pages for 0. It may be called while
// other threads copy, because every loop writes the same bytes and computes the same checksum.
extern "C" void reft_use_pieces(size_t nbytes) { piece_bytes = nbytes; }

// Measures the copy loops, selects the fastest and returns its piece_bytes; takes about 20 ms. It compares this
// thread's CPU time, the minimum over a few rounds, so that other processes do not disturb the result.
extern "C" size_t reft_choose_loop() {
  constexpr size_t kWays[] = {kPageBytes, kGroupBytes, 0}, kOffsets[] = {0, kLineBytes, kPageBytes / 2};
  constexpr size_t kMeasuredBytes = 2 << 20, kRounds = 3;
  uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, 2 * kMeasuredBytes + kPageBytes));
  if (!memory || !uses_avx2) {
    std::free(memory);
    return piece_bytes;
  }
  std::memset(memory, 1, 2 * kMeasuredBytes + kPageBytes);
  double best_secs = 1e9;
  size_t best = piece_bytes;
  for (size_t way : kWays) {
    double secs = 0;
    for (size_t offset : kOffsets) {  // offset of the target within a page; the source's is 0
      double least = 1e9;
      for (size_t round = 0; round < kRounds; ++round) {
        Hash hash;
        reft_hash_reset(&hash);
        timespec begin, end;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
        reft_use_pieces(way);
        copy_and_hash(hash, memory + kMeasuredBytes + offset, memory, kMeasuredBytes, 0);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        const double took = (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
        least = took < least ? took : least;
      }
      secs += least;
    }
    if (secs < best_secs) best_secs = secs, best = way;
  }
  std::free(memory);
  reft_use_pieces(best);
  return best;
}
#endif
