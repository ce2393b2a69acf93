// Attention over keys and values of each type, and what stores them.
#include "op_table.h"

namespace op_table {

namespace {

// A KV cache of random rows of head_dim values, F16 or Q8_0.
struct CacheRows {
    Type type;
    int64_t head_dim;
    std::vector<uint8_t> bytes;
    CacheRows(Type type, int64_t rows, int64_t head_dim)
        : type(type), head_dim(head_dim), bytes(static_cast<size_t>(rows * row_bytes(type, head_dim))) {
        const auto block = size_t(block_size(type).bytes);
        for (size_t i = 0; i < bytes.size(); i += block) {
            const uint16_t h = to_half(type == F16 ? uniform() : 0.01);
            std::memcpy(&bytes[i], &h, 2);
            for (size_t k = 2; k < block; ++k) bytes[i + k] = uint8_t(random_bits());
        }
    }
    double at(int64_t row, int64_t i) const {
        const uint8_t* p = &bytes[size_t(row * row_bytes(type, head_dim))];
        return type == F16 ? half_at(p + 2 * i)
                           : half_at(p + i / 32 * 34) * int8_t(p[i / 32 * 34 + 2 + i % 32]);
    }
};

// Rows of a prompt, which share what they read, have the bits of the same rows in decoding.
void test_prompt_rows(const Kernels& k, std::shared_ptr<Pool> pool, Type type, int length, int head_dim) {
    const int kv_heads = 2, heads = 6, tokens = std::min(length, kMaxDecodeRows);
    const int64_t pages = (length + kPage - 1) / kPage;
    CacheRows keys(type, pages * kv_heads * kPage, head_dim),
        values(type, pages * kv_heads * kPage, head_dim);
    const auto q = random_floats(tokens * heads * head_dim);
    std::vector<float> out[2];
    for (int decode : {0, 1}) {
        Step1 s(tokens, decode ? tokens : 0, length);
        out[decode].resize(q.size());
        Attention a{};
        a.q = q.data();
        a.k_cache = keys.bytes.data();
        a.v_cache = values.bytes.data();
        a.out = out[decode].data();
        a.cache_type = type;
        a.heads = heads;
        a.kv_heads = kv_heads;
        a.head_dim = head_dim;
        a.scale = 0.3f;
        Program program(k, pool, s.batch, s.bounds);
        program.attention(a, pages);
        program.run();
    }
    ++checks;
    if (std::memcmp(out[0].data(), out[1].data(), q.size() * sizeof(float)) && failures++ < 20)
        std::printf("attention, type %d, length %d: a prompt row has other bits than a decode row\n",
                    int(type), length);
}

// `options`: with a window of 70, a softcap and sinks.
void test_attention(const Kernels& k, std::shared_ptr<Pool> pool, Type type, int length, int head_dim,
                    int tokens, int decode, bool options = false) {
    const int kv_heads = 2, heads = 14;  // groups of seven
    Step1 s(tokens, decode, length);
    const auto pages = int64_t(s.pages.size());
    CacheRows keys(type, pages * kv_heads * kPage, head_dim),
        values(type, pages * kv_heads * kPage, head_dim);
    const auto q = random_floats(tokens * heads * head_dim),
               fresh = random_floats(tokens * kv_heads * head_dim);
    std::vector<float> out(q.size());
    Program program(k, pool, s.batch, s.bounds);
    program.store_kv(fresh.data(), fresh.data(),
                     {keys.bytes.data(), values.bytes.data(), type, pages, kv_heads, head_dim});
    Attention a{};
    a.q = q.data();
    a.k_cache = keys.bytes.data();
    a.v_cache = values.bytes.data();
    a.out = out.data();
    a.cache_type = type;
    a.heads = heads;
    a.kv_heads = kv_heads;
    a.head_dim = head_dim;
    a.scale = 0.3f;
    const auto sinks = random_floats(heads);
    if (options) {
        a.window = 70;
        a.softcap = 1.5f;
        a.sinks = sinks.data();
    }
    program.attention(a, pages);
    program.run();
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h) {
            const int last = s.positions[size_t(t)];
            std::vector<double> score, sum(static_cast<size_t>(head_dim));
            double total = 0, top = -1e30;
            const auto row = [&](int p) {
                return (int64_t(s.pages[size_t(p / kPage)]) * kv_heads + h / 7) * kPage + p % kPage;
            };
            const int first = options ? std::max(0, last - 69) : 0;
            for (int p = first; p <= last; ++p) {
                double v = 0;
                for (int i = 0; i < head_dim; ++i)
                    v += double(q[size_t((t * heads + h) * head_dim + i)]) * keys.at(row(p), i);
                v *= double(0.3f);
                score.push_back(options ? 1.5 * std::tanh(v / 1.5) : v);
                top = std::max(top, score.back());
            }
            if (options) {
                top = std::max(top, double(sinks[size_t(h)]));
                total = std::exp(double(sinks[size_t(h)]) - top);
            }
            for (int p = first; p <= last; ++p) {
                const double e = std::exp(score[size_t(p - first)] - top);
                total += e;
                for (int i = 0; i < head_dim; ++i) sum[size_t(i)] += e * values.at(row(p), i);
            }
            for (int i = 0; i < head_dim; ++i)
                check("attention", type, length, out[size_t((t * heads + h) * head_dim + i)],
                      sum[size_t(i)] / total, 1);
        }
    for (int i = 0; i < kv_heads * head_dim; ++i) {  // the last row's keys, as stored
        const int64_t page = s.slots.back() / kPage, offset = s.slots.back() % kPage;
        const double got = keys.at((page * kv_heads + i / head_dim) * kPage + offset, i % head_dim);
        const double want = fresh[size_t((tokens - 1) * kv_heads * head_dim + i)];
        if (type == F16)
            check("store_kv", type, head_dim, got, from_half(to_half(want)), 1);
        else  // within half a code of the largest that random_floats gives
            check("store_kv", type, head_dim, std::fabs(got - want) < 0.0045 ? 0 : 1, 0, 1);
    }
}

}  // namespace

void test_attentions(const Kernels& k, std::shared_ptr<Pool> pool) {
    for (int length : {1, 31, 33, 256, 257, 600})
        for (int head_dim : {8, 40, 64, 80}) {
            test_attention(k, pool, F16, length, head_dim, 1, 1);
            if (length > 5) test_attention(k, pool, F16, length, head_dim, 5, 2);
            if (length > 5) test_attention(k, pool, F16, length, head_dim, 5, 2, true);
            if (length > 5) test_prompt_rows(k, pool, F16, length, head_dim);
            if (head_dim == 64) test_attention(k, pool, Q8_0, length, head_dim, 1, 1);
            if (head_dim == 64) test_attention(k, pool, Q8_0, length, head_dim, 1, 1, true);
            if (head_dim == 64 && length > 5) test_prompt_rows(k, pool, Q8_0, length, head_dim);
        }
}

}  // namespace op_table
