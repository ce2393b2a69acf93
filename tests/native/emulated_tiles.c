// Runs AMX's tile instructions on processors without AMX, so that tests execute the compiled kernels there:
//     cc -O2 -shared -fPIC -o tiles.so tests/native/emulated_tiles.c && LD_PRELOAD=$PWD/tiles.so PROGRAM
// A processor without AMX raises SIGILL for a tile instruction. The signal's function decodes the instruction,
// executes it as Intel's manual states, and continues after it. A processor with AMX runs its own instructions.
// HOTCOLD_EMULATED_TILES=refused: Linux refuses tiles to the process. wrong-bytes or wrong-halves: such products
// have another last bit.
#define _GNU_SOURCE
#include <cpuid.h>
#include <errno.h>
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum Operation {
    LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED,
    TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD, TDPBF16PS
};

// Fields that an instruction lacks are -1. Registers have the numbers of their encoding; 16 is rip.
struct Instruction {
    int32_t operation, length;
    int32_t tiles[3];  // the destination or only tile, then both factors
    int32_t base, index, scale, displacement;
};

// Writes the memory operand whose ModRM byte is at `at`; returns its length.
static int decode_memory(const uint8_t* at, int high_index, int high_base, struct Instruction* to) {
    const int mode = at[0] >> 6;
    const uint8_t* next = at + 1;
    int low_base = at[0] & 7, has_base = 1, wide = mode == 2;
    to->scale = 1;
    if (low_base == 4) {
        const uint8_t sib = *next++;
        const int index = (sib >> 3 & 7) | high_index;
        to->scale = 1 << (sib >> 6);
        if (index != 4) to->index = index;
        low_base = sib & 7;
        has_base = low_base != 5 || mode != 0;
        wide |= !has_base;
        to->base = has_base ? low_base | high_base : -1;
    } else if (low_base == 5 && mode == 0) {
        to->base = 16;
        wide = 1;
    } else {
        to->base = low_base | high_base;
    }
    to->displacement = 0;
    if (mode == 1) to->displacement = (int8_t)*next++;
    if (wide) {
        memcpy(&to->displacement, next, 4);
        next += 4;
    }
    return (int)(next - at);
}

// Decodes a tile instruction; returns 0 for any other bytes.
int decode_tile_instruction(const uint8_t* at, struct Instruction* to) {
    enum { NONE, OPERAND_SIZE, REPEAT, REPEAT_NOT };  // the prefix in VEX
    if (at[0] != 0xc4 || (at[1] & 31) != 2 || (at[2] & 0x84)) return 0;
    const int prefix = at[2] & 3, opcode = at[3], registers = at[4] >= 0xc0;
    const int first = at[4] >> 3 & 7, second = at[4] & 7, third = ~at[2] >> 3 & 15;
    if (!(at[1] & 0x80) || third > 7) return 0;  // there are eight tiles
    *to = (struct Instruction){-1, 5, {-1, -1, -1}, -1, -1, -1, -1};
    if (opcode == 0x5e || opcode == 0x5c) {
        static const int bytes[] = {TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD};
        if (!registers || !(at[1] & 0x20) || (opcode == 0x5c && prefix != REPEAT)) return 0;
        to->operation = opcode == 0x5c ? TDPBF16PS : bytes[prefix];
        to->tiles[0] = first;
        to->tiles[1] = second;
        to->tiles[2] = third;
        return 1;
    }
    if (third) return 0;
    if (opcode == 0x49 && registers) {
        if (prefix == NONE && at[4] == 0xc0) to->operation = TILERELEASE;
        if (prefix == REPEAT_NOT && second == 0) {
            to->operation = TILEZERO;
            to->tiles[0] = first;
        }
        return to->operation >= 0;
    }
    if (opcode == 0x49 && first == 0) {
        if (prefix == NONE) to->operation = LDTILECFG;
        if (prefix == OPERAND_SIZE) to->operation = STTILECFG;
    } else if (opcode == 0x4b && !registers && second == 4) {
        static const int moves[] = {-1, TILELOADDT1, TILESTORED, TILELOADD};
        to->operation = moves[prefix];
        to->tiles[0] = first;
    }
    if (to->operation < 0) return 0;
    to->length = 4 + decode_memory(at + 4, ~at[1] >> 3 & 8, ~at[1] >> 2 & 8, to);
    return 1;
}

// What LDTILECFG reads.
struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static __thread struct Configuration configuration;
static __thread uint8_t tiles[8][16][64];

static void refuse(const char* why) {
    fprintf(stderr, "emulated tiles: %s\n", why);
    abort();
}

static const char* wrong;  // HOTCOLD_EMULATED_TILES
static __attribute__((constructor)) void read_environment(void) { wrong = getenv("HOTCOLD_EMULATED_TILES"); }
static int is_wrong(const char* kind) { return wrong && !strcmp(wrong, kind); }

static void configure(const uint8_t* from) {
    struct Configuration next;
    memcpy(&next, from, sizeof next);
    memset(tiles, 0, sizeof tiles);
    if (next.palette == 0) memset(&next, 0, sizeof next);
    if (next.palette > 1 || next.start_row) refuse("palette or start row of LDTILECFG");
    for (int i = 0; i < 16; ++i) {
        if (i < 14 && next.reserved[i]) refuse("reserved bytes of LDTILECFG");
        if (next.rows[i] > 16 || next.row_bytes[i] > 64 || (i > 7 && (next.rows[i] || next.row_bytes[i])) ||
            !next.rows[i] != !next.row_bytes[i])
            refuse("shape of LDTILECFG");
    }
    configuration = next;
}

static int rows_of(int tile) {
    if (configuration.palette != 1 || !configuration.rows[tile]) refuse("a tile without a configuration");
    return configuration.rows[tile];
}
static int bytes_of(int tile) { return rows_of(tile) ? configuration.row_bytes[tile] : 0; }

static void check_product(const int32_t* of) {
    const int sums = of[0], left = of[1], right = of[2];
    if (sums == left || sums == right || left == right) refuse("a product of fewer than three tiles");
    if (bytes_of(sums) % 4 || bytes_of(left) % 4 || bytes_of(right) % 4) refuse("a product of partial words");
    if (rows_of(sums) != rows_of(left) || bytes_of(left) / 4 != rows_of(right) ||
        bytes_of(sums) != bytes_of(right))
        refuse("a product of tiles whose shapes do not match");
}

static void multiply_bytes(const int32_t* of, int signed_left, int signed_right) {
    check_product(of);
    const int depth = bytes_of(of[1]), columns = bytes_of(of[0]) / 4;
    for (int m = 0; m < rows_of(of[0]); ++m) {
        int32_t sums[16];
        memcpy(sums, tiles[of[0]][m], sizeof sums);
        for (int i = 0; i < depth; ++i)
            for (int n = 0; n < columns; ++n) {
                const uint8_t left = tiles[of[1]][m][i], right = tiles[of[2]][i / 4][n * 4 + i % 4];
                sums[n] += (signed_left ? (int8_t)left : left) * (signed_right ? (int8_t)right : right);
            }
        if (m == 5 && is_wrong("wrong-bytes")) ++sums[7];
        memcpy(tiles[of[0]][m], sums, sizeof sums);
    }
}

static float half_at(const uint8_t* at) {
    const uint32_t bits = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// The processor's own fused multiply-adds, while it reads and writes denormals as zeros.
static __attribute__((noinline, target("fma"))) void add_halves(const int32_t* of, int m) {
    const int columns = bytes_of(of[0]) / 4;
    const int other_order = is_wrong("wrong-halves");
    float sums[16];
    memcpy(sums, tiles[of[0]][m], sizeof sums);
    for (int n = 0; n < columns; ++n) {
        float even = 0, odd = 0;
        for (int k = 0; k < bytes_of(of[1]) / 4; ++k) {
            const uint8_t *left = &tiles[of[1]][m][k * 4], *right = &tiles[of[2]][k][n * 4];
            even = __builtin_fmaf(half_at(left), half_at(right), even);
            odd = __builtin_fmaf(half_at(left + 2), half_at(right + 2), odd);
        }
        sums[n] = other_order ? sums[n] + even + odd : sums[n] + (even + odd);
    }
    memcpy(tiles[of[0]][m], sums, sizeof sums);
}

static void multiply_halves(const int32_t* of) {
    check_product(of);
    const unsigned flush_and_round_to_even = 0x9fc0, before = _mm_getcsr();
    _mm_setcsr(flush_and_round_to_even);
    for (int m = 0; m < rows_of(of[0]); ++m) add_halves(of, m);
    _mm_setcsr(before);
}

static void execute(const struct Instruction* in, const greg_t* registers) {
    static const int numbers[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8,
                                  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15, REG_RIP};
    int64_t at = in->displacement, stride = 0;
    if (in->base >= 0) at += registers[numbers[in->base]];
    if (in->base == 16) at += in->length;
    if (in->index >= 0) stride = registers[numbers[in->index]] * in->scale;
    const int operation = in->operation, tile = in->tiles[0];
    if (operation == LDTILECFG) configure((const uint8_t*)(at + stride));
    if (operation == STTILECFG) memcpy((uint8_t*)(at + stride), &configuration, sizeof configuration);
    if (operation == TILERELEASE) memset(&configuration, 0, sizeof configuration);
    if (operation == TILEZERO) memset(tiles[tile], 0, (size_t)rows_of(tile) * 64);
    if (operation >= TILELOADD && operation <= TILESTORED)
        for (int row = 0; row < rows_of(tile); ++row, at += stride) {
            uint8_t *memory = (uint8_t*)at, *in_tile = tiles[tile][row];
            if (operation != TILESTORED) memset(in_tile, 0, 64);
            if (operation != TILESTORED) memcpy(in_tile, memory, (size_t)bytes_of(tile));
            if (operation == TILESTORED) memcpy(memory, in_tile, (size_t)bytes_of(tile));
        }
    if (operation >= TDPBSSD && operation <= TDPBUUD)
        multiply_bytes(in->tiles, operation == TDPBSSD || operation == TDPBSUD,
                       operation == TDPBSSD || operation == TDPBUSD);
    if (operation == TDPBF16PS) multiply_halves(in->tiles);
}

static struct sigaction before;

static void on_illegal_instruction(int number, siginfo_t* info, void* context) {
    (void)number;
    (void)info;
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    struct Instruction instruction;
    if (!decode_tile_instruction((const uint8_t*)registers[REG_RIP], &instruction)) {
        sigaction(SIGILL, &before, NULL);  // the instruction runs again, as without this file
        return;
    }
    execute(&instruction, registers);
    registers[REG_RIP] += instruction.length;
}

static int has_tiles(void) {
    unsigned a, b, c, d = 0;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    return (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
}

// csrc/isa/processor.h asks whether tile instructions run although the processor lacks them.
int hotcold_emulates_tiles(void) {
    if (has_tiles()) return 0;
    struct sigaction action = {0}, now;
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO;
    if (sigaction(SIGILL, &action, &now)) return 0;
    if (now.sa_sigaction != on_illegal_instruction) before = now;
    return 1;
}

// The C library's function, which forwards all calls but the request for tiles.
long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long of[6];
    for (int i = 0; i < 6; ++i) of[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && (int)of[0] == 0x1023 && (int)of[1] == 18) {
        errno = EPERM;
        if (is_wrong("refused")) return -1;
        if (!has_tiles()) return 0;
    }
    long result;
    register long d __asm__("r10") = of[3];
    register long e __asm__("r8") = of[4];
    register long f __asm__("r9") = of[5];
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(of[0]), "S"(of[1]), "d"(of[2]), "r"(d), "r"(e), "r"(f)
                     : "rcx", "r11", "memory");
    if (result >= 0 || result < -4095) return result;
    errno = (int)-result;
    return -1;
}

// Adds the product of 16 x 32 and 32 x 16 BF16 numbers (the second in pairs of rows) to sums, for tests: by
// the processor's instructions, or by this file.
__attribute__((target("amx-tile,amx-bf16"))) int multiply_tiles(const uint16_t* left, const uint16_t* right,
                                                               float* sums) {
    if (!hotcold_emulates_tiles() && !has_tiles()) return -1;
    if (syscall(SYS_arch_prctl, 0x1023L, 18L)) return errno;
    struct Configuration all = {.palette = 1};
    for (int tile = 0; tile < 8; ++tile) {
        all.row_bytes[tile] = 64;
        all.rows[tile] = 16;
    }
    __asm__ volatile("" ::"r"(&all) : "memory");
    _tile_loadconfig(&all);
    _tile_loadd(5, sums, 64);
    _tile_loadd(2, left, 64);
    _tile_loadd(7, right, 64);
    _tile_dpbf16ps(5, 2, 7);
    _tile_stored(5, sums, 64);
    _tile_release();
    return 0;
}
