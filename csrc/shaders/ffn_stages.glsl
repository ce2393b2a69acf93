// The stages of a dot product, by its use: a gate; a coefficient with an earlier gate; a coefficient without
// gates; an output.
const uint GATE = 0, UP = 1, ONLY_UP = 2, OUTPUT = 3;

uint bias_of(uint stage) { return stage == GATE ? gate_bias : stage == OUTPUT ? 0 : up_bias; }
