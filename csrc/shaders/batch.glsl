// The step's numbers, binding 0 of every shader: vulkan/program.h (BatchPlace) has their layout.
layout(std430, set = 0, binding = 0) readonly buffer BatchBuffer { uint batch[]; };

const uint TOKENS = 5, POSITIONS = 6, SEQUENCE = 7, SLOTS = 8, PAGES = 9, LENGTHS = 10, LOGITS_ROWS = 11;
#define N_TOKENS batch[0]
#define N_DECODE batch[1]
#define N_LOGITS batch[2]
#define STEP batch[4]
// Arrays by sequence, the last by row; macros do not change the modules that do not use them.
#define FIRST_ROWS 12u
#define ROW_COUNTS 13u
#define STATE_FROM 14u
#define STATE_TO 15u
#define PAGES_PER_SEQUENCE batch[16]

uint of_row(uint array, uint row) { return batch[batch[array] + row]; }
