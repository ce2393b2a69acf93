// The stages of a dot, by what becomes of it: a gate; with the gate before it a coefficient; without gates a
// coefficient; an output.
const uint GATE = 0, UP = 1, ONLY_UP = 2, OUTPUT = 3;

uint bias_of(uint stage) { return stage == GATE ? gate_bias : stage == OUTPUT ? 0 : up_bias; }
