// Products of tiles, 16 rows of weights with 16 tokens: Intel's AMX or, with the same bits, plain loops.
// Tests use the loops on every machine, and AMX by tests/native/emulated_tiles.c.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd/vec.h"
#ifdef HC_TILES_AMX
#include <immintrin.h>
#endif

namespace hc {
namespace {

constexpr int kTile = 16;  // rows or tokens of a tile

HC_INLINE float float_of(uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

// Two tiles of tokens and two tiles of weights; their sums are [token tile][row tile][token * 16 + row]. A
// token is a row of bytes. Weights have tiles of 64 bytes a row: word w of 16 rows (four bytes of each row),
// then word w + 1.
constexpr int kWeightTile = kTile * 64;
using TileSums = float[2][2][kTile * kTile];
struct FloatTiles {
    const uint8_t *x, *w;  // the first 32 BF16 numbers of each token and of each row
    int64_t token_bytes;   // from one token to the next
    int64_t low_x, low_w;  // offsets of the low halves; 0: none
};

struct LoopTiles {
    static constexpr const char* name = "loops";
    static void configure(int) {}
    static void release() {}

    template <int Bytes>
    static void multiply(const uint8_t* x, int64_t stride, const uint8_t* w, int32_t (*sums)[kTile]) {
        for (int t = 0; t < kTile; ++t)
            for (int r = 0; r < kTile; ++r) {
                sums[t][r] = 0;
                for (int i = 0; i < Bytes; ++i)
                    sums[t][r] += int8_t(x[t * stride + i]) * int8_t(w[i / 4 * 64 + 4 * r + i % 4]);
            }
    }
    static void multiply(const FloatTiles& of, int64_t chunks, TileSums& sums) {
        for (int token = 0; token < 2 * kTile; ++token)
            for (int row = 0; row < 2 * kTile; ++row) {
                const uint8_t* x = of.x + token * of.token_bytes;
                const uint8_t* w = of.w + row / kTile * chunks * kWeightTile + row % kTile * 4;
                float& sum = sums[token / kTile][row / kTile][token % kTile * kTile + row % kTile];
                for (int64_t i = 0; i < chunks; ++i, x += 64, w += kWeightTile) {
                    sum = add(sum, x, w);
                    if (of.low_x) sum = add(sum, x + of.low_x, w);
                    if (of.low_w) sum = add(sum, x, w + of.low_w);
                }
            }
    }

  private:
    // A denormal becomes a zero of its sign.
    static float flushed(float v) {
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        return bits & 0x7f800000 ? v : float_of(bits & 0x80000000);
    }
    static double value(const uint8_t* p) {
        uint16_t half;
        std::memcpy(&half, p, 2);
        return double(flushed(float_of(uint32_t(half) << 16)));
    }
    // The order of hotcold.kernels.numpy_tiles.add_tile.
    static float add(float sum, const uint8_t* x, const uint8_t* w) {
        float half[2] = {0, 0};
        for (int i = 0; i < 32; ++i) {
            const double product = value(x + 2 * i) * value(w + i / 2 * 64 + i % 2 * 2);
            half[i % 2] = flushed(float(double(half[i % 2]) + product));
        }
        return flushed(flushed(sum) + flushed(half[0] + half[1]));
    }
};

#ifdef HC_TILES_AMX
struct AmxTiles {
    static constexpr const char* name = "amx";
    // Configures the thread for tokens of `bytes` in a tile, until release().
    static void configure(int bytes) {
        alignas(64) uint8_t config[64] = {1};
        for (int tile = 0; tile < 8; ++tile) {  // 0 to 3 are sums, 4 and 5 tokens, 6 and 7 weights
            config[16 + 2 * tile] = uint8_t(tile / 2 == 2 ? bytes : 64);
            config[48 + tile] = uint8_t(tile / 2 == 3 ? bytes / 4 : kTile);
        }
        // Without it GCC may move the stores behind the instruction that reads them.
        asm volatile("" ::"r"(config) : "memory");
        _tile_loadconfig(config);
    }
    static void release() { _tile_release(); }

    // sums[token][row] = the products of `Bytes` signed bytes of each token and row.
    template <int Bytes> static HC_INLINE void multiply(const uint8_t* x, int64_t stride, const uint8_t* w,
                                                        int32_t (*sums)[kTile]) {
        asm volatile("" ::: "memory");  // GCC does not know what tile loads read
        _tile_zero(0);
        _tile_loadd(4, x, stride);
        _tile_loadd(6, w, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums, 64);
    }
    // Adds the products of `chunks` times 32 BF16 numbers.
    static HC_NOINLINE void multiply(const FloatTiles& of, int64_t chunks, TileSums& sums) {
        const int64_t token_tile = kTile * of.token_bytes, row_tile = chunks * kWeightTile;
        asm volatile("" ::: "memory");
        _tile_loadd(0, sums[0][0], 64);
        _tile_loadd(1, sums[0][1], 64);
        _tile_loadd(2, sums[1][0], 64);
        _tile_loadd(3, sums[1][1], 64);
        const auto add = [&](const uint8_t* x, const uint8_t* w) HC_INLINE_LAMBDA {
            _tile_loadd(4, x, of.token_bytes);
            _tile_loadd(5, x + token_tile, of.token_bytes);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + row_tile, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        };
        for (int64_t i = 0; i < chunks; ++i) {
            const uint8_t *x = of.x + i * 64, *w = of.w + i * kWeightTile;
            add(x, w);
            if (of.low_x) add(x + of.low_x, w);
            if (of.low_w) add(x, w + of.low_w);
        }
        _tile_stored(0, sums[0][0], 64);
        _tile_stored(1, sums[0][1], 64);
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
};
#endif

#ifdef HC_TILES_AMX
using Tiles = AmxTiles;
#else
using Tiles = LoopTiles;
#endif

// True if one product of each kind has the bits of plain loops: an instruction that never ran on a processor
// like this one is not trusted. Bytes and BF16 numbers are pseudo-random; some products are denormal.
bool tiles_agree() {
    constexpr int rows = 2 * kTile, high = rows * 64;  // bytes of the high halves
    alignas(64) uint8_t x[2 * high], w[2 * high];
    uint32_t random = 1;
    for (int i = 0; i < 4 * high; i += 2) {
        uint8_t* to = i < 2 * high ? x + i : w + i - 2 * high;
        const bool tiny = (i < 2 * high ? i / 64 : i % 64 / 4) % 4 == 3;  // of a token or of a row
        random = random * 1664525 + 1013904223;
        const uint32_t exponent = (tiny ? 56 : 116) + (random >> 24 & 15);
        const uint16_t half = uint16_t((random >> 8 & 0x807f) | exponent << 7);
        std::memcpy(to, &half, 2);
    }
    alignas(64) int32_t dots[2][2][kTile][kTile];
    alignas(64) TileSums sums[2] = {};
    const FloatTiles both{x, w, 64, high, high};
    Tiles::configure(32);
    Tiles::multiply<32>(x, 64, w, dots[0][0]);
    Tiles::configure(16);
    Tiles::multiply<16>(x, 64, w, dots[0][1]);
    Tiles::configure(64);
    Tiles::multiply(both, 1, sums[0]);
    Tiles::release();
    LoopTiles::multiply<32>(x, 64, w, dots[1][0]);
    LoopTiles::multiply<16>(x, 64, w, dots[1][1]);
    LoopTiles::multiply(both, 1, sums[1]);
    return !std::memcmp(dots[0], dots[1], sizeof dots[0]) && !std::memcmp(sums[0], sums[1], sizeof sums[0]);
}

}  // namespace
}  // namespace hc
