// A sequence's rows of a step, its state's slots, and functions that scans apply to their inputs.

// Rows first to first + count - 1; the slot that its state is read from, or -1.
struct Span {
    uint first, count;
    int from;
};

// `which` is a sequence or, by row, a row of the step: then only a sequence's first row gets its span.
Span span_of(uint which, bool by_row) {
    if (N_TOKENS == 0 || by_row && which >= N_TOKENS) return Span(0, 0, -1);
    const uint sequence = by_row ? of_row(SEQUENCE, which) : which, first = of_row(FIRST_ROWS, sequence);
    const uint count = by_row && first != which ? 0 : of_row(ROW_COUNTS, sequence);
    return Span(first, count, int(of_row(STATE_FROM, sequence)));
}

// The slot that the state after a row is written to, or -1.
int slot_after(uint row) { return int(of_row(STATE_TO, row)); }

// ln(1 + e^x) = max(x, 0) + ln(1 + m), m = e^-|x|; with s = m / (m + 2) the latter is 2 artanh(s), a series
// in s^2, which is at most 1/9.
float softplus(float x) {
    const float m = exponential(0.0 - abs(x));
    precise float over = m + 2.0;
    precise float s = m / over, square = s * s, p = 0.0666666667;
    const float terms[7] =
        float[](0.0769230769, 0.0909090909, 0.111111111, 0.142857143, 0.2, 0.333333333, 1.0);
    for (int i = 0; i < 7; ++i) {
        p = p * square;
        p = p + terms[i];
    }
    precise float y = s + s;
    y = y * p;
    y = y + (x > 0.0 ? x : 0.0);
    return y;
}

// e^x of a decay, x <= 0: 0 where float32 would lose digits.
float shrink(float x) { return x < -87.0 ? 0.0 : exponential(x); }
