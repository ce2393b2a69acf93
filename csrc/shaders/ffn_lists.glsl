// Lists of each tile's neurons, in any order: candidates, and neurons with active gates. First the lengths of
// the tiles' first lists, then of the second ones; then the lists.
layout(std430, binding = 4) buffer ListBuffer { uint lists[]; };
// The neurons of each choice whose coefficient is not zero.
layout(std430, binding = 5) buffer BitBuffer { uint bits[]; };

uint list_at(uint which, uint tile, uint at) {
    return 2 * most_tiles + (which * most_tiles + tile) * most + at;
}

// 32 bits of a row's candidates among an expert's neurons; a prompt row has them all.
uint mask_word(uint row, Expert e, uint word) {
    return row < N_DECODE ? mask[row * mask_words + e.word + word] : ~0u;
}
