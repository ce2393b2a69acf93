// Activations and the exponential they need: csrc/ops/activation.h with every fused step as two roundings. A
// comparison with NaN is false, and the branch taken then keeps NaN.

// In the order of hotcold/formats/words.py ACTIVATIONS.
const uint RELU = 0, DRELU = 1, RELU2 = 2, SILU = 3, GELU = 4, GELU_ERF = 5, SWIGLU_OAI = 6;

// exp(x) = scale (1 + slope r), to about 2 ulp: x = n ln 2 + r, scale = 2^n, |r| <= ln 2 / 2.
struct Exponential {
    float scale, slope, r;
};

Exponential exponential_parts(float x) {
    const float above = x < -87.0 ? -87.0 : x, clamped = above > 88.0 ? 88.0 : above;
    precise float n = clamped * 1.44269504;
    n = roundEven(n);
    precise float r = n * -0.693145752;
    r = r + clamped;
    precise float low = n * -1.42860677e-6;
    r = low + r;
    precise float p = 0.00138888892 * r;
    p = p + 0.00833333377;
    p = p * r;
    p = p + 0.0416666679;
    p = p * r;
    p = p + 0.166666672;
    p = p * r;
    p = p + 0.5;
    p = p * r;
    p = p + 1.0;
    return Exponential(intBitsToFloat((int(n) + 127) << 23), p, r);
}

float exponential(float x) {
    const Exponential e = exponential_parts(x);
    precise float y = e.slope * e.r;
    y = y + 1.0;
    y = y * e.scale;
    return y;
}

// m / (m + 2) with m = exp(2x) - 1, which is accurate for small x.
float hyperbolic_tangent(float x) {
    precise float twice = x + x;
    const Exponential e = exponential_parts(twice);
    precise float less = e.slope * e.r;
    precise float m = e.scale * less;
    precise float whole = e.scale - 1.0;
    m = m + whole;
    precise float over = m + 2.0;
    precise float y = m / over;
    return y;
}

// cap tanh(x / cap).
float capped(float x, float cap) {
    precise float part = x / cap, bound;
    bound = hyperbolic_tangent(part) * cap;
    return bound;
}

// P(X > a) of a standard normal X, a >= 0.
float normal_tail(float a) {
    precise float slope = 0.300520382 * a;
    slope = slope + 1.0;
    precise float t = 1.0 / slope;
    const float terms[7] = float[](-0.152753532, 0.19728601, -0.0456975065, 0.124455482, 0.101271093,
                                   0.120776556, 0.11984843);
    precise float p = 0.0348133482;
    for (int i = 0; i < 7; ++i) {
        p = p * t;
        p = p + terms[i];
    }
    precise float square = a * a;
    square = square * -0.5;
    precise float y = p * t;
    y = y * exponential(square);
    return y;
}

float sigmoid(float x) {
    precise float over = 1.0 + exponential(0.0 - x);
    precise float y = 1.0 / over;
    return y;
}

// act(g). swiglu_oai needs both values: see coefficient.
float activate(uint kind, float g, float threshold) {
    precise float y = g > threshold ? g : 0.0;
    if (kind == RELU2) y = y * y;
    if (kind == SILU) {
        precise float over = 1.0 + exponential(0.0 - g);
        y = g / over;
    }
    if (kind == GELU) {  // 0.5 g (1 + tanh(u)) = g / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
        precise float cubic = g * g;
        cubic = 0.044715 * cubic;
        cubic = cubic + 1.0;
        precise float u = -1.59576912 * g;
        u = u * cubic;
        precise float over = 1.0 + exponential(u);
        y = g / over;
    }
    if (kind == GELU_ERF) {  // g P(X <= g) = max(g, 0) - |g| P(X > |g|); beyond 16 the tail is 0
        const float size = abs(g), a = size > 16.0 ? 16.0 : size;
        precise float tail = a * normal_tail(a);
        y = g < 0.0 ? 0.0 : g;
        y = y - tail;
    }
    return y;
}

// act(gate) * up.
float coefficient(uint kind, float gate, float up, float threshold, float limit, float alpha) {
    if (kind == SWIGLU_OAI) {
        const float x = gate > limit ? limit : gate;
        const float most = up > limit ? limit : up, y = most < -limit ? -limit : most;
        precise float over = -alpha * x;
        over = 1.0 + exponential(over);
        precise float swish = x / over;
        precise float more = y + 1.0;
        precise float c = swish * more;
        return c;
    }
    // If gates decide which rows are read, up is not computed, so it must not matter here.
    if (kind <= RELU2 && !(gate > threshold)) return 0.0;
    if (kind == DRELU && !(up > 0.0)) return 0.0;
    precise float c = activate(kind, gate, threshold) * up;
    return c;
}
