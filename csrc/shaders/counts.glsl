// How many rows an op has: COUNT_OF says which number of the batch, or none but the grid's.
uint count_of(uint which) {
    return which == 0 ? N_TOKENS : which == 1 ? N_LOGITS : which == 2 ? N_DECODE : 0xffffffffu;
}
