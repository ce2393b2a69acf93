// Packing once more, as processors without vectors of sixteen bytes do it.
#define HC_PLAIN_BYTES
#define hc hc_plain
#include "../../csrc/pack/pack.cpp"
#include "../../csrc/pack/pack_panels.cpp"

void plain_pack_row(int type, const uint8_t* from, int64_t cols, uint8_t* to) {
    hc_plain::pack_row(hc_plain::Type(type), from, cols, to);
}
void plain_pack_panel(int type, const uint8_t* from, int64_t stride, int count, uint8_t* to) {
    hc_plain::pack_panel(hc_plain::Type(type), {from, stride, 0, count}, count, to);
}
void plain_transpose(int bytes, const uint8_t* from, int64_t stride, int count, int64_t columns,
                     uint8_t* to) {
    hc_plain::transpose_floats(bytes, {from, stride, 0, count}, columns, to, count * bytes);
}
