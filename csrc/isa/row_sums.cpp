// The kernels that sum weight rows.
#include "isa/table.h"
#include "ops/decode_row.h"
#include "ops/ffn_down.h"

namespace hc {

void HC_OWN(add_down)(const Ffn& f, const int32_t* neurons, const float* c, int count, float* y,
                      Stream& ahead) {
    add_down(f, neurons, c, count, y, ahead);
}

constexpr RowSums HC_OWN(row_sums) = {decode_row};

}  // namespace hc
