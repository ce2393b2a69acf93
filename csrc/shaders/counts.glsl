// The number of rows of an op: COUNT_OF selects a number of the batch, or only the grid bounds it.
uint count_of(uint which) {
    return which == 0 ? N_TOKENS : which == 1 ? N_LOGITS : which == 2 ? N_DECODE : 0xffffffffu;
}
