// Rows of the paged cache [page, K, 32, head_dim]: float32, float16, or GGML's Q8_0 (blocks of 34 bytes that
// begin at any half of a word).
const uint CACHE_F32 = 0, CACHE_F16 = 1, CACHE_Q8_0 = 2;
layout(constant_id = 0) const uint CACHE = 0;
layout(constant_id = 1) const uint HEAD_DIM = 32;

const uint PAGE = 32;
