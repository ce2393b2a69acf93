// The kernels of ops that keep a state for each sequence.
#include "isa/table.h"
#include "ops/gated_delta.h"
#include "ops/short_conv.h"
#include "ops/ssm_scan.h"
#include "ops/token_shift.h"
#include "ops/wkv7.h"

namespace hc {

constexpr StateKernels HC_OWN(states) = {short_conv, gated_delta, ssm_scan, decay,
                                         multiply,   token_shift, wkv7};

}  // namespace hc
