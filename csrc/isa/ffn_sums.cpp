// The kernels that sum the outputs of an FFN's neurons.
#include "isa/table.h"
#include "ops/ffn_prompt.h"
#include "ops/ffn_reduce.h"

namespace hc {

constexpr FfnSums HC_OWN(ffn_sums) = {ffn_reduce, ffn_prompt_down};

}  // namespace hc
