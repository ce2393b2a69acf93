// The kernels that read no weight rows.
#include "isa/table.h"
#include "ops/attention_block.h"
#include "ops/norm_rope.h"
#include "ops/plain_tiles.h"
#include "ops/quantise.h"
#include "ops/router.h"

namespace hc {

constexpr FloatKernels HC_OWN(floats) = {
    quantise,
    arrange,
    attention_split,
    attention_merge,
    attention_row,
    attention_block,
    router,
    norm,
    rope,
    store_row,
    add,
    softcap,
    relu,
    read,
};

}  // namespace hc
