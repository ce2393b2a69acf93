// Products of tiles, 16 rows of weights with 16 tokens: Intel's AMX or, with the same bits, plain loops, with
// which tests run all that surrounds the instructions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/vec.h"
#ifdef HC_TILES_AMX
#include <immintrin.h>
#endif

namespace hc {
namespace {

constexpr int kTile = 16;  // rows or tokens of a tile

// Tokens are rows of bytes, so many bytes apart. Of weights, word w of 16 rows (four bytes of each) lie side
// by side, then word w + 1. Sums are [token][row].
struct FloatTiles {
    const uint8_t *x, *w;              // 32 BF16 numbers of each token; of each row
    int64_t token_bytes, chunk_bytes;  // between tokens; between chunks of weights
    int64_t low_x, low_w;              // from high halves to low ones
    bool has_low_x, has_low_w;
};

#ifdef HC_TILES_AMX
struct Tiles {
    static constexpr const char* name = "amx";
    // Configures the thread for tiles of 16 tokens, `bytes` of each, until release().
    static void configure(int bytes) {
        alignas(64) uint8_t config[64] = {1};
        const auto set = [&](int tile, int rows, int row_bytes) {
            config[16 + 2 * tile] = uint8_t(row_bytes);
            config[48 + tile] = uint8_t(rows);
        };
        for (int tile = 0; tile < 4; ++tile) set(tile, kTile, 64);
        for (int tile = 4; tile < 6; ++tile) set(tile, kTile, bytes);
        for (int tile = 6; tile < 8; ++tile) set(tile, bytes / 4, 64);
        // GCC may otherwise move the stores behind the instruction that reads them.
        asm volatile("" ::"r"(config) : "memory");
        _tile_loadconfig(config);
    }
    static void release() { _tile_release(); }

    // sums = the products of `Bytes` signed bytes of tokens and rows.
    template <int Bytes> static HC_INLINE void multiply(const uint8_t* x, int64_t stride, const uint8_t* w,
                                                        int32_t (*sums)[kTile]) {
        _tile_zero(0);
        _tile_loadd(4, x, stride);
        _tile_loadd(6, w, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums, 64);
    }
    // sums[token tile][row tile] += the products of `chunks` times 32 BF16 numbers; 0 at first.
    static HC_NOINLINE void multiply(const FloatTiles& of, int64_t chunks, bool begun,
                                     float (*sums)[2][256]) {
        const int64_t token_tile = kTile * of.token_bytes, row_tile = chunks * of.chunk_bytes;
        asm volatile("" ::: "memory");  // the loads of tiles do not say what they read
        if (begun) {
            _tile_loadd(0, sums[0][0], 64);
            _tile_loadd(1, sums[0][1], 64);
            _tile_loadd(2, sums[1][0], 64);
            _tile_loadd(3, sums[1][1], 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
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
            const uint8_t *x = of.x + i * 64, *w = of.w + i * of.chunk_bytes;
            add(x, w);
            if (of.has_low_x) add(x + of.low_x, w);
            if (of.has_low_w) add(x, w + of.low_w);
        }
        _tile_stored(0, sums[0][0], 64);
        _tile_stored(1, sums[0][1], 64);
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
};
#else
struct Tiles {
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
    static void multiply(const FloatTiles& of, int64_t chunks, bool begun, float (*sums)[2][256]) {
        for (int tile = 0; tile < 4; ++tile) {
            const uint8_t* x0 = of.x + tile / 2 * kTile * of.token_bytes;
            const uint8_t* w0 = of.w + tile % 2 * chunks * of.chunk_bytes;
            for (int i = 0; i < kTile * kTile; ++i) {
                float& sum = sums[tile / 2][tile % 2][i];
                if (!begun) sum = 0;
                for (int64_t c = 0; c < chunks; ++c) {
                    const uint8_t* x = x0 + i / kTile * of.token_bytes + c * 64;
                    const uint8_t* w = w0 + i % kTile * 4 + c * of.chunk_bytes;
                    sum = add(sum, x, w);
                    if (of.has_low_x) sum = add(sum, x + of.low_x, w);
                    if (of.has_low_w) sum = add(sum, x, w + of.low_w);
                }
            }
        }
    }

  private:
    static float flushed(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }
    static double value(const uint8_t* p) {
        uint16_t half;
        std::memcpy(&half, p, 2);
        const uint32_t bits = uint32_t(half) << 16;
        float v;
        std::memcpy(&v, &bits, 4);
        return double(flushed(v));
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
#endif

}  // namespace
}  // namespace hc
